"""python -m minillm eval: bits per byte; of stories also the floor, and how many are valid.

Written by hand.
"""

import argparse
from contextlib import suppress
from pathlib import Path

from minillm.cli.corpus import documents, held_out_texts, is_file, language, measure
from minillm.cli.generate import begin_ids, open_model, sample_texts
from minillm.cli.run_info import RUN_INFO, read_run_info


def evaluate_folder(a: argparse.Namespace) -> None:
    """Print bits per byte; of stories also the floor, and how many samples are stories."""
    from minillm.sampling import Sampler

    model, tokenizer = open_model(a)
    whole, a.held_out = a.corpus is not None, a.documents
    a.corpus = a.corpus or _corpus_of(a.folder)
    if is_file(a):
        texts = list(documents(a.corpus))[: a.documents] if whole else held_out_texts(a)
        part = "" if whole else "the held-out part of "
        if not texts:
            raise ValueError(f"{part}{a.corpus} holds no text")
        print(f"bits per byte  {measure(model, tokenizer, texts, a):.4f}  on {part}{a.corpus}")
        return
    grammar = language(a.corpus)
    held_out = held_out_texts(a)
    measured, floor = measure(model, tokenizer, held_out, a), grammar.bits_per_byte(held_out)
    print(f"bits per byte  {measured:.4f}  on {a.documents} held-out stories, ends included")
    ratio = measured / floor
    print(f"floor          {floor:.4f}  what a perfect model pays for them; ratio {ratio:.3f}")
    begin, texts = begin_ids(model, tokenizer, ""), []
    for start in range(0, a.samples, 64):
        sampler = Sampler(seed=a.seed + start // 64)
        how = {"count": min(64, a.samples - start), "sampler": sampler, "max_new_tokens": 512}
        texts += sample_texts(model, tokenizer, begin, **how)
    if texts:
        valid = sum(grammar.score(text) > float("-inf") for text in texts)
        print(f"valid stories  {valid} of {len(texts)} sampled at temperature 1")


def _corpus_of(folder: Path) -> str:
    """What the run of a folder was trained on; English stories if it does not say."""
    with suppress(OSError, ValueError):
        return read_run_info(folder / RUN_INFO)["options"]["corpus"]
    return "stories-en"
