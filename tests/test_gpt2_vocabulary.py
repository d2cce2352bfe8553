"""The shipped merges are those of the published file of ranks, to the byte."""

import base64
import hashlib

from minillm.exercises.tokenizer import gpt2_tokens

PUBLISHED = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"


def test_the_merges_write_the_published_rank_file():
    lines = [f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(gpt2_tokens())]
    assert len(lines) == 50256
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == PUBLISHED
