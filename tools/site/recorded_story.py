"""The recorded story of the front page: build/site-live/story.json.

    .venv/bin/python tools/site/recorded_story.py

The shipped model tells it here, with the probability of each of its tokens; beside it stands what a
perfect model would have paid for it, its own floor.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

from minillm import Sampler, StoryLanguage, from_pretrained, generate

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "assets/stories-en"
TOKENS = 320  # a story has some 200 at most
SEED = 4


def main() -> None:
    model, tokenizer = from_pretrained(FOLDER, dtype="float32")
    language = StoryLanguage("en")
    begin = torch.tensor([[tokenizer.bos_token_id]])
    ids = generate(model, begin, max_new_tokens=TOKENS - 1, sampler=Sampler(seed=SEED))[0]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    nats = language.score(text)
    if ids[-1] != tokenizer.eos_token_id or not math.isfinite(nats):
        raise SystemExit(
            f"make site: seed {SEED} tells no valid story; choose another in {__file__}"
        )
    with torch.no_grad():
        log_probs = model(ids[None, :-1])[0].log_softmax(-1)
    log_probs = log_probs.gather(1, ids[1:, None])[:, 0]
    shown = ["" if i == tokenizer.eos_token_id else tokenizer.decode([i]) for i in ids[1:].tolist()]
    story = {
        "tokens": [
            {"text": t, "p": round(math.exp(lp), 6)}
            for t, lp in zip(shown, log_probs.tolist(), strict=True)
        ],
        "bits": -log_probs.sum().item() / math.log(2),
        "bytes": len(text.encode()),
        "floor_bits": -nats / math.log(2),
    }
    out = ROOT / "build/site-live"
    out.mkdir(parents=True, exist_ok=True)
    (out / "story.json").write_text(json.dumps(story), encoding="utf-8")


if __name__ == "__main__":
    main()
