"""Newer families beside transformers: lines of the file, the worst logit, caches, copies, exports.

    OMP_NUM_THREADS=1 python benchmarks/families.py

The random models of tests/family_checkpoints.py, 21 positions, windows of 8, a row padded on the
left. Prints the largest difference of two logits (the logits reach some 3), of a plain pass and of
steps with each cache, and what `packed()` and an exported step say.
"""

import sys
import tempfile
from pathlib import Path

import torch

from minillm import from_pretrained, generate
from minillm.beyond.export.step import DecodingStep, decode, export_step
from minillm.support.family import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from family_checkpoints import CONFIGS, make, ragged  # noqa: E402

NEWER = ("gemma3", "smollm3", "olmo", "gpt-oss", "qwen3-5")


def outcome(attempt):
    """What a try gives, or how it is refused."""
    try:
        return attempt()
    except ValueError as error:
        return str(error).rpartition(": ")[2][:60]


@torch.no_grad()
def row(name: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        theirs = make(name, folder)
        ours, _ = from_pretrained(folder)
    ids, mask, positions = ragged()
    given = {"attention_mask": mask}
    expected = theirs(ids, **given, position_ids=positions).logits[mask.bool()]
    place = str(FAMILIES[ours.config.model_type]).partition(":")[0].replace(".", "/")
    lines = len((ROOT / f"{place}.py").read_text(encoding="utf-8").splitlines())

    def worst(found):
        return f"{(found[mask.bool()] - expected).abs().max():.1e}"

    steps = {}
    kinds = ["dynamic", "static", "paged", *(["sliding"] if ours.config.sliding_window else [])]
    for kind in kinds:
        cache, pieces = ours.make_cache(kind, batch_size=3, max_length=32), []
        for t in range(ids.shape[1]):
            pieces.append(ours(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], cache=cache))
        steps[kind] = worst(torch.cat(pieces, 1))

    def exported():
        step = export_step(ours, max_length=40).module()
        empty = DecodingStep(ours, max_length=40).empty()
        text = decode(step, ids[:1], empty, max_new_tokens=12)
        return (
            "equal"
            if torch.equal(text, generate(ours, ids[:1], max_new_tokens=12, eos_token_id=None))
            else "NO"
        )

    packed = outcome(lambda: worst(ours.packed()(ids, **given)))
    caches = ", ".join(f"{kind} {value}" for kind, value in steps.items())
    plain = worst(ours(ids, **given))
    return f"| {name} | {lines} | {plain} | {caches} | {packed} | {outcome(exported)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| family | lines | a plain pass | steps with a cache | packed() | exported step |")
    print("|---|---|---|---|---|---|")
    for name in CONFIGS:
        if name.startswith(NEWER):
            print(row(name), flush=True)
