"""python -m minillm generate: texts of a saved model; what chat and eval need of this, too.

Written by hand.
"""

import argparse
import math
import os
from typing import Any

from minillm.cli.terminal import show


def generate_texts(a: argparse.Namespace) -> None:
    """Print texts that the model of a folder writes; of several processes, the first prints."""
    from minillm.deeper.training import distributed
    from minillm.support.checks.model import context_length

    drawn_by = sampler(a)
    if a.parallel is not None:
        a.device = str(distributed.start(device(a)))
    try:
        model, tokenizer = open_model(a)
        if a.parallel is not None:
            model = distributed.wrap(model, a.parallel)
        begin = begin_ids(model, tokenizer, a.prompt)
        new = _new_tokens(a.max_new_tokens, len(begin), context_length(model.config))
        how = {"count": a.count, "sampler": drawn_by, "max_new_tokens": new, "stop": a.stop}
        texts = sample_texts(model, tokenizer, begin, prompt=a.prompt, **how)
        if distributed.world().rank == 0:
            show("\n\n".join(texts))
    finally:
        distributed.stop()


def _new_tokens(asked: int | None, length: int, context: int) -> int:
    """How many tokens may follow a prompt. Raises: ValueError if the context has not so many."""
    room = context - length
    if room < (asked or 0) or room < 1:
        new = "" if asked is None else f" --max-new-tokens {asked}:"
        raise ValueError(
            f"{new} the prompt's length is {length:,}, and this model can read {context:,}".strip()
        )
    return min(400, room) if asked is None else asked


def sampler(a: argparse.Namespace) -> Any:
    """The sampler of the options, which are called as its fields (all but `steps`)."""
    from dataclasses import fields

    from minillm.sampling import Sampler

    names = {field.name for field in fields(Sampler)} - {"steps"}
    return Sampler(**{name: getattr(a, name) for name in names})


def open_model(a: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer of the folder or of the GGUF file."""
    from minillm.deeper.pretrained.folder import local_place
    from minillm.deeper.pretrained.load import load_model, tokenizer_of

    if not a.folder.exists():
        kind = "file" if a.folder.suffix == ".gguf" else "folder"
        raise FileNotFoundError(f"there is no {kind} {a.folder}")
    place = local_place(a.folder)
    model, tokenizer = load_model(place, dtype=a.dtype, device=device(a)), tokenizer_of(place)
    if tokenizer is None:
        raise ValueError(f"{a.folder} has no tokenizer")
    return model, tokenizer


def begin_ids(model: Any, tokenizer: Any, prompt: str) -> list[int]:
    """The ids of a prompt, begun as `encode` begins a text; of none, what begins a document."""
    from minillm.training import begin_id

    ids, begin = tokenizer.encode_ordinary(prompt), begin_id(tokenizer)
    begin = model.config.bos_token_id if begin is None else begin
    if (tokenizer.add_bos or not ids) and begin is not None and ids[:1] != [begin]:
        ids = [begin, *ids]
    if not ids:
        raise ValueError("this model has no begin token: give a --prompt")
    return ids


def sample_texts(
    model: Any,
    tokenizer: Any,
    begin: list[int],
    *,
    prompt: str = "",
    count: int = 1,
    sampler: Any,
    max_new_tokens: int,
    stop: list[str] | None = None,
) -> list[str]:
    """`count` texts that go on after the ids `begin` of a prompt, without the end token or stop."""
    import torch

    from minillm.generation import generate

    prompts = torch.tensor([begin] * count, device=model.lm_head.weight.device)
    sampler = known_only(sampler, tokenizer, model.config.vocab_size)
    stops: dict[str, Any] = {} if stop is None else {"stop": stop, "tokenizer": tokenizer}
    rows = generate(model, prompts, max_new_tokens=max_new_tokens, sampler=sampler, **stops)
    ends, texts = {*model.config.eos_token_ids, tokenizer.eos_token_id}, []
    for row in rows[:, len(begin) :].tolist():
        new = row[: next((i for i, token in enumerate(row) if token in ends), len(row))]
        # a text that begins loses its first space in some tokenizers; one that goes on must not
        rest = tokenizer.decode_bytes(new).decode("utf-8", "replace")
        text = rest if prompt else tokenizer.decode(new)
        first = min((text.find(word) for word in stop or () if word in text), default=len(text))
        texts.append(prompt + text[:first])
    return texts


def known_only(sampler: Any, tokenizer: Any, vocab_size: int) -> Any:
    """A sampler that draws no id without a token, as published models with padded rows have."""
    unknown = []
    if len(tokenizer) < vocab_size:
        unknown = [i for i in range(vocab_size) if not tokenizer.decode_bytes([i])]
    if not unknown:
        return sampler

    def draw(logits: Any, *rest: Any, **named: Any) -> Any:
        logits = logits.clone()
        logits[:, unknown] = -math.inf
        return sampler(logits, *rest, **named)

    return draw


def device(a: argparse.Namespace) -> Any:
    """The device of --device, else of the environment's MINILLM_DEVICE, else the best there is.

    Raises: ValueError for one that is not there.
    """
    import torch

    from minillm.support.device import pick_device

    name = a.device or os.environ.get("MINILLM_DEVICE")
    if not name:
        return pick_device()
    try:
        place = torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no device {name!r} here: {reason}") from None
    # counted, not tried: under torchrun all processes would take memory of the first GPU
    counts = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = {"cpu": 1, **counts}.get(place.type)
    if count is None:
        raise ValueError(f"no device {name!r} here: it may be cpu, cuda or mps")
    if (place.index or 0) >= count:
        raise ValueError(f"no device {name!r} here: of {place.type} there are {count}")
    return torch.device("cpu") if place.type == "cpu" else place
