"""python -m minillm train: tokenizer, data, model, training, saving.

Written by hand.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from minillm.cli.best import Best
from minillm.cli.corpus import (
    END,
    check_text,
    check_windows,
    documents_to_learn,
    held_out_texts,
    is_file,
    layout,
    measure,
    source,
    stories,
)
from minillm.cli.generate import device, sample_texts
from minillm.cli.options import check_training
from minillm.cli.run_info import begin_run_info, check_same_run, finish_run_info
from minillm.cli.terminal import show, tell, visible


def train(a: argparse.Namespace) -> None:
    """Train, and save the model with its tokenizer."""
    check_training(a)
    from minillm.deeper.training import distributed
    from minillm.deeper.training.checkpoint import CheckpointError
    from minillm.deeper.training.run import Run
    from minillm.deeper.training.trainer import Trainer, token_byte_lengths

    place, lock = distributed.start(device(a)), None
    try:
        first = distributed.world().rank == 0
        tokenizer, lock = _prepare(a) if first else (None, None)
        try:
            distributed.barrier()
        except RuntimeError as error:  # it has said why, and a traceback would hide that
            raise ValueError("the first process ended before the training began") from error
        tokenizer = tokenizer or _tokenizer(a.output_dir)
        model, config = _model(a, tokenizer).to(place), _config(a)
        looks: dict[str, Any] = {}
        if held_out := held_out_texts(a):
            looks["validate"] = lambda m: {"held_out": measure(m, tokenizer, held_out, a)}
        if not a.quiet:
            looks |= {"sample": lambda m: _early_text(a, m, tokenizer), "on_log": _show}
        looks |= {"token_bytes": token_byte_lengths(tokenizer), "progress": not a.quiet}
        best = Best(a.output_dir) if held_out and is_file(a) and first else None
        if best is not None:
            shown = looks.get("on_log")
            looks["on_log"] = lambda record: _keep_best(best, record, model, shown)
        run = Run(a.output_dir, checkpoint_interval=a.checkpoint_interval)
        trainer = Trainer(model, source(a, tokenizer), config, run=run, **looks)
        if a.resume:
            found = trainer.resume()
            if best is not None:
                best.resume(trainer.step)
            if first:
                stands = "resumed at" if found else "no whole checkpoint to go on from, so from"
                tell(f"{stands} step {trainer.step}")
        start = time.perf_counter()
        try:
            trainer.train()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_keep(a, trainer)) from None
        tensors = distributed.whole_tensors(model)
        if first:
            _finish(a, tokenizer, tensors, trainer, time.perf_counter() - start, best)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
    finally:
        if lock is not None:
            lock.release()
        distributed.stop()


def _keep(a: argparse.Namespace, trainer: Any) -> str:
    """Write a checkpoint of an interrupted run, if there is something to keep; how to go on."""
    from minillm.deeper.training.checkpoint import checkpoints

    if trainer.processes.size == 1 and trainer.step and not trainer.step_incomplete:
        trainer.run.save(trainer)
    found = checkpoints(a.output_dir)
    return f"; train --resume goes on from {found[-1].name}" if found else ""


def _prepare(a: argparse.Namespace) -> tuple[Any, Any]:
    """Take the folder; make the tokenizer and, of a file, the token file."""
    from minillm.bpe import BPETokenizer
    from minillm.deeper.pretrained.folder import empty_model
    from minillm.deeper.pretrained.load import check_savable
    from minillm.deeper.training.distributed import world
    from minillm.deeper.training.run_folder import FolderLock, check_free
    from minillm.deeper.training.tensor_parallel import check_tensor_parallel
    from minillm.deeper.training.token_file import TokenDataset
    from minillm.model import CausalLM
    from minillm.training import begin_id

    if not a.resume:
        check_free(a.output_dir, "give --resume to go on, or another --output-dir")
    else:
        check_same_run(a)
    if is_file(a):
        check_text(a.corpus)
    _config(a)  # numbers that make no training are errors now
    if a.resume and (a.output_dir / "tokenizer.json").exists():
        tokenizer = _tokenizer(a.output_dir)
    elif a.tokenizer is not None or a.init_from is not None:
        tokenizer = _tokenizer(a.tokenizer or a.init_from)
    else:
        texts = documents_to_learn(a) if is_file(a) else stories(a.corpus, 2000, "tokenizer")
        tokenizer = BPETokenizer.train(texts, a.vocab_size, special_tokens=[END])
    if tokenizer.eos_token_id is None and layout(a) != "windows":
        road = "a text file with --layout windows needs none"
        road += f", without --tokenizer one is trained that has {END}"
        raise ValueError(f"the tokenizer has no end token, where documents end: {road}")
    if layout(a) != "windows" and not tokenizer.add_bos:
        tokenizer.bos_token, tokenizer.add_bos = tokenizer.eos_token, True  # so begins each row
    if is_file(a) and layout(a) == "windows":
        check_windows(a, tokenizer)
    config = _model_config(a, tokenizer)
    _check_fit(config, a, tokenizer)
    check_savable(config)  # rather now than after the training
    if a.parallel == "tensor":
        check_tensor_parallel(empty_model(CausalLM, config), world().size)
    if not is_file(a):
        next(source(a, tokenizer))  # does a story fit a row?
    lock = FolderLock(a.output_dir)
    lock.acquire()
    if not a.resume:  # also now that it is ours
        check_free(a.output_dir, "give --resume to go on, or another --output-dir")
    tokenizer.save(a.output_dir)
    begin_run_info(a)
    if is_file(a) and not (a.resume and (a.output_dir / "tokens.npy").exists()):
        first = [] if (begin := begin_id(tokenizer)) in (None, tokenizer.eos_token_id) else [begin]
        encoded = ([*first, *tokenizer.encode_ordinary(text)] for text in documents_to_learn(a))
        ends = {"vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_token_id}
        TokenDataset.write(a.output_dir / "tokens.npy", encoded, **ends)
    return tokenizer, lock


def _model_config(a: argparse.Namespace, tokenizer: Any) -> Any:
    """The config of --init-from, or of the options of the model."""
    from minillm.config import ModelConfig
    from minillm.deeper.pretrained.load import config_of
    from minillm.training import begin_id

    if a.init_from is not None:
        return config_of(a.init_from)
    try:
        return ModelConfig(
            model_type=a.family,
            vocab_size=tokenizer.vocab_size,
            hidden_size=a.hidden_size,
            num_hidden_layers=a.layers,
            num_attention_heads=a.heads,
            num_key_value_heads=a.kv_heads,
            head_dim=a.head_dim,
            attention_dropout=a.dropout,
            intermediate_size=a.intermediate_size or -(-8 * a.hidden_size // 3 // 32) * 32,
            max_position_embeddings=max(512, 2 * a.context_length),
            tie_word_embeddings=True,
            initializer_range=a.init_range,
            rope_theta=a.rope_theta,
            bos_token_id=begin_id(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
        )
    except ValueError as error:
        heads = f"--heads {a.heads}" + (f" --kv-heads {a.kv_heads}" if a.kv_heads else "")
        asked = f"--family {a.family} --hidden-size {a.hidden_size} {heads}"
        raise ValueError(f"{asked}: {error}") from None


def _check_fit(config: Any, a: argparse.Namespace, tokenizer: Any) -> None:
    """Raises: ValueError if ids or positions of the training are not the model's."""
    if tokenizer.vocab_size > config.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, the model knows {config.vocab_size:,}"
        raise ValueError(f"the tokenizer has {sizes}")
    limit = config.max_position_embeddings
    if config.positions == "learned" and a.context_length > limit:
        raise ValueError(f"--context-length {a.context_length}: the model has {limit} positions")


def _model(a: argparse.Namespace, tokenizer: Any) -> Any:
    """A fresh model of the options, or the one of --init-from, in float32.

    Raises: ValueError if there is not so much memory.
    """
    import torch

    from minillm.deeper.pretrained.load import load_model
    from minillm.model import CausalLM
    from minillm.training import begin_id

    if a.init_from is not None:
        model = load_model(a.init_from, dtype=torch.float32)
        begin = begin_id(tokenizer)
        if begin is not None:
            model.config = replace(model.config, bos_token_id=begin)
        return model
    config = _model_config(a, tokenizer)
    try:
        return CausalLM(config, seed=a.seed)
    except (MemoryError, RuntimeError) as error:
        reason = (str(error) or "no memory").splitlines()[0]
        sizes = f"--hidden-size {a.hidden_size} --layers {a.layers}"
        raise ValueError(f"a model of {sizes} cannot be made here: {reason}") from None


def _config(a: argparse.Namespace) -> Any:
    """The settings of the training: what the options are called there."""
    from minillm.deeper.training.trainer import RunConfig

    return RunConfig(
        a.steps,
        max_lr=a.lr,
        min_lr=a.lr / 20 if a.min_lr is None else a.min_lr,
        warmup_steps=a.warmup,
        weight_decay=a.weight_decay,
        optimizer=a.optimizer,
        gradient_accumulation_steps=a.gradient_accumulation_steps,
        precision=a.precision,
        compile=a.compile,
        seed=a.seed,
        parallel=a.parallel,
        log_interval=a.log_interval,
        eval_interval=a.eval_interval,
    )


def _keep_best(best: Best, record: dict[str, Any], model: Any, shown: Any) -> None:
    """What is done with each record of a run on a file."""
    best.look(record, model)
    if shown is not None:
        shown(record)


def _finish(
    a: argparse.Namespace,
    tokenizer: Any,
    tensors: Any,
    trainer: Any,
    seconds: float,
    best: Best | None,
) -> None:
    """Save the model where `from_pretrained` finds it, and say how it was made.

    Of a file it is the model that did best on what is held out.
    """
    import torch

    from minillm.deeper.pretrained.load import save_pretrained
    from minillm.deeper.training import distributed
    from minillm.deeper.training.checkpoint import load_model_tensors
    from minillm.model import CausalLM

    model = CausalLM(trainer.model.config)
    better = best.tensors(trainer.step) if best is not None else None
    load_model_tensors(model, better or tensors)
    model.to(getattr(torch, a.save_dtype))  # the checkpoints beside it stay as they were trained
    save_pretrained(model, tokenizer, a.output_dir)
    made = {"processes": distributed.world().size, "torch": torch.__version__, "seconds": seconds}
    figures: dict[str, Any] = {"parameters": model.num_parameters(), **made}
    if best is not None:
        figures["best"] = {"step": best.step, "held_out": best.held_out}
    found = finish_run_info(a, figures, trainer.history)
    names = ("loss", "bits_per_byte", "held_out")
    measured = {name: round(found[name], 4) for name in names if name in found}
    size, tokens = f"{model.num_parameters():,} parameters", f"{trainer.tokens:,} tokens"
    show(f"{a.output_dir}: {size}, {tokens}, {measured}")
    if best is not None:
        show(best.said(trainer.step, found.get("held_out")))


def _early_text(a: argparse.Namespace, model: Any, tokenizer: Any) -> str:
    """A text of the model now; of a sharded one by a whole copy in process 0: all must call it."""
    from minillm.deeper.training import distributed
    from minillm.deeper.training.checkpoint import load_model_tensors
    from minillm.model import CausalLM
    from minillm.sampling import Sampler
    from minillm.training import begin_id

    if distributed.is_sharded(model):
        tensors, place = distributed.whole_tensors(model), next(model.parameters()).device
        if distributed.world().rank > 0:
            return ""
        model = CausalLM(model.config).to(place).eval()
        load_model_tensors(model, tensors)
    begin = begin_id(tokenizer)  # as each row of the training begins
    prompt = tokenizer.encode_ordinary("\n") if begin is None else [begin]
    sampler = Sampler(seed=a.seed)
    return sample_texts(model, tokenizer, prompt, sampler=sampler, max_new_tokens=60)[0]


def _show(record: dict[str, Any]) -> None:
    """Print what a look at the model found."""
    from tqdm import tqdm

    if "sample" in record:
        held_out = f", held out {record['held_out']:.4f}" if "held_out" in record else ""
        text = visible(f"step {record['step']}{held_out}: {record['sample']}")
        tqdm.write(text, sys.stderr)


def _tokenizer(folder: Path) -> Any:
    from minillm.deeper.tokenizer.wrapped import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    return tokenizer
