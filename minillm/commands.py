"""What `python -m minillm train` does: tokenizer, data, model, training, saving.

Written by hand; the pieces are explained in notebooks 02, 09 and 10.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from minillm.corpora import END, check_source, documents, is_file, source, stories

__all__ = ["device", "train"]


def train(a: argparse.Namespace) -> None:
    """Train, and save the model with its tokenizer."""
    from minillm.training import distributed
    from minillm.training.evaluation import evaluate, token_byte_lengths
    from minillm.training.trainer import Trainer

    place, lock = distributed.start(device(a)), None
    try:
        first = distributed.world().rank == 0
        tokenizer, lock = _prepare(a) if first else (None, None)
        distributed.barrier()
        tokenizer = tokenizer or _tokenizer(a.out)
        model, config = _model(a, tokenizer).to(place), _config(a)
        looks: dict[str, Any] = {}
        if not is_file(a):
            held_out = stories(a.corpus, a.held_out, "held out")
            looks["validate"] = lambda m: {"held_out": evaluate(m, held_out, tokenizer)}
        if not a.quiet:
            looks |= {"sample": lambda m: _early_text(a, m, tokenizer), "on_log": _show}
        looks |= {"token_bytes": token_byte_lengths(tokenizer), "progress": not a.quiet}
        trainer = Trainer(model, source(a, tokenizer), config, **looks)
        if a.resume:
            found = trainer.resume()
            if first:
                stands = "resumed at" if found else "no whole checkpoint to go on from, so from"
                print(f"{stands} step {trainer.step}", file=sys.stderr)
        start = time.perf_counter()
        trainer.train()
        tensors = distributed.whole_tensors(model)
        if first:
            _finish(a, tokenizer, tensors, trainer, time.perf_counter() - start)
    finally:
        if lock is not None:
            lock.release()
        distributed.stop()


def _prepare(a: argparse.Namespace) -> tuple[Any, Any]:
    """Take the folder; make the tokenizer and, of a file, the token file."""
    from minillm import record
    from minillm.pretrained.load import check_savable
    from minillm.tokenizer.bpe import BPETokenizer
    from minillm.training.data import TokenDataset
    from minillm.training.run_folder import FolderLock, check_free

    if not a.resume:
        check_free(a.out, "give --resume to go on, or another --out")
    else:
        record.check_same(a)
    check_source(a)
    _config(a)  # numbers that make no training are errors now
    if a.resume and (a.out / "tokenizer.json").exists():
        tokenizer = _tokenizer(a.out)
    elif a.tokenizer is not None or a.init_from is not None:
        tokenizer = _tokenizer(a.tokenizer or a.init_from)
    else:
        texts = documents(a.corpus) if is_file(a) else stories(a.corpus, 2000, "tokenizer")
        tokenizer = BPETokenizer.train(texts, a.vocab_size, special_tokens=[END])
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer has no end token, such as {END}")
    config = _model_config(a, tokenizer)
    _check_fit(config, a, tokenizer)
    check_savable(config)  # rather now than after the training
    if not is_file(a):
        next(source(a, tokenizer))  # does a story fit a row?
    lock = FolderLock(a.out)
    lock.acquire()
    if not a.resume:
        check_free(a.out, "give --resume to go on, or another --out")  # also now that it is ours
    tokenizer.save(a.out)
    record.begin(a)
    if is_file(a) and not (a.resume and (a.out / "tokens.npy").exists()):
        encoded = (tokenizer.encode_ordinary(text) for text in documents(a.corpus))
        ends = {"vocab_size": tokenizer.vocab_size, "end_id": tokenizer.eos_token_id}
        TokenDataset.write(a.out / "tokens.npy", encoded, **ends)
    return tokenizer, lock


def _model_config(a: argparse.Namespace, tokenizer: Any) -> Any:
    from minillm.config import ModelConfig
    from minillm.utils import read_json

    if a.init_from is not None:
        return ModelConfig.from_dict(read_json(a.init_from / "config.json"))
    end = tokenizer.eos_token_id
    return ModelConfig(
        model_type=a.family,
        vocab_size=tokenizer.vocab_size,
        hidden_size=a.hidden_size,
        num_hidden_layers=a.layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        intermediate_size=a.intermediate_size or -(-8 * a.hidden_size // 3 // 32) * 32,
        max_position_embeddings=max(512, 2 * a.context_length),
        tie_word_embeddings=True,
        initializer_range=a.init_range,
        rope_theta=a.rope_theta,
        bos_token_id=end,
        eos_token_id=end,
    )


def _check_fit(config: Any, a: argparse.Namespace, tokenizer: Any) -> None:
    """Raises: ValueError if ids or positions of the training are not the model's."""
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, the model knows {config.vocab_size:,}"
        raise ValueError(f"the tokenizer has {sizes}")
    limit = config.max_position_embeddings
    if not config.family.rotary and a.context_length > limit:
        raise ValueError(f"--context-length {a.context_length}: the model has {limit} positions")


def _model(a: argparse.Namespace, tokenizer: Any) -> Any:
    """A fresh model of the options, or the one of --init-from, in float32."""
    import torch

    from minillm.model import CausalLM
    from minillm.pretrained.load import from_pretrained

    if a.init_from is not None:
        return from_pretrained(a.init_from, dtype=torch.float32)[0]
    return CausalLM(_model_config(a, tokenizer), seed=a.seed)


def _config(a: argparse.Namespace) -> Any:
    from minillm.training.trainer import TrainConfig

    return TrainConfig(
        a.steps,
        max_lr=a.lr,
        min_lr=a.lr / 20 if a.min_lr is None else a.min_lr,
        warmup_steps=a.warmup,
        weight_decay=a.weight_decay,
        optimizer=a.optimizer,
        gradient_accumulation_steps=a.accumulation,
        precision=a.precision,
        compile=a.compile,
        seed=a.seed,
        parallel=a.parallel,
        output_dir=str(a.out),
        checkpoint_interval=a.checkpoint_every,
        log_interval=a.log_every,
        eval_interval=a.validate_every,
    )


def _finish(
    a: argparse.Namespace, tokenizer: Any, tensors: Any, trainer: Any, seconds: float
) -> None:
    """Save the model where `from_pretrained` finds it, and say how it was made."""
    import torch

    from minillm import record
    from minillm.model import CausalLM
    from minillm.pretrained.load import save_pretrained
    from minillm.training import distributed
    from minillm.training.checkpoint import load_model_tensors

    model = CausalLM(trainer.model.config)
    load_model_tensors(model, tensors)
    model.to(getattr(torch, a.save_dtype))  # the checkpoints beside it stay as they were trained
    save_pretrained(model, tokenizer, a.out)
    made = {"processes": distributed.world().size, "torch": torch.__version__, "seconds": seconds}
    figures = {"parameters": model.num_parameters(), **made}
    found = record.finish(a, figures, trainer.history)
    names = ("loss", "bits_per_byte", "held_out")
    measured = {name: round(found[name], 4) for name in names if name in found}
    print(f"{a.out}: {model.num_parameters():,} parameters, {trainer.tokens:,} tokens, {measured}")


def _early_text(a: argparse.Namespace, model: Any, tokenizer: Any) -> str:
    """A text of the model now; of a sharded one by a whole copy in process 0: all must call it."""
    from minillm.model import CausalLM
    from minillm.training import distributed
    from minillm.training.checkpoint import load_model_tensors

    if distributed.is_sharded(model):
        tensors, place = distributed.whole_tensors(model), next(model.parameters()).device
        if distributed.world().rank > 0:
            return ""
        model = CausalLM(model.config).to(place).eval()
        load_model_tensors(model, tensors)
    return _sample(model, tokenizer, a.seed)


def _sample(model: Any, tokenizer: Any, seed: int) -> str:
    """The beginning of a text that the model writes at this moment."""
    import torch

    from minillm.generation.decoding import generate
    from minillm.generation.sampling import Sampler

    end = tokenizer.eos_token_id
    begin = torch.tensor([[end]], device=model.lm_head.weight.device)
    ids = generate(model, begin, max_new_tokens=60, sampler=Sampler(seed=seed))[0, 1:].tolist()
    return tokenizer.decode(ids[: ids.index(end)] if end in ids else ids)


def _show(record: dict[str, Any]) -> None:
    """Print what a look at the model found."""
    from tqdm import tqdm

    if "sample" in record:
        held_out = f", held out {record['held_out']:.4f}" if "held_out" in record else ""
        tqdm.write(f"step {record['step']}{held_out}: {record['sample']}", sys.stderr)


def _tokenizer(folder: Path) -> Any:
    from minillm.tokenizer.hf_wrapper import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    return tokenizer


def device(a: argparse.Namespace) -> Any:
    """The device of --device, or the best there is."""
    import torch

    from minillm.utils import pick_device

    if not a.device:
        return pick_device()
    try:
        place = torch.device(a.device)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no device {a.device!r} here: {reason}") from None
    # counted, not tried: under torchrun all processes would take memory of the first GPU
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = counts.get(place.type)
    if count is not None and (place.index or 0) >= count:
        raise ValueError(f"no device {a.device!r} here: of {place.type} there are {count}")
    return place
