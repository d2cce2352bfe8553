"""The tokenizer handed to other libraries: tiktoken and tokenizers.

Explained in notebook 02. Each library is imported where it is used.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import json
import warnings
from typing import TYPE_CHECKING

from minillm.tokenizer_files import to_json

__all__ = ["to_hf", "to_tiktoken"]

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

    from minillm.tokenizer import BPETokenizer


def to_tiktoken(tokenizer: "BPETokenizer", name: str = "minillm") -> "tiktoken.Encoding":
    """The same ranks, pattern and special tokens as a `tiktoken.Encoding`; it adds no begin token.

    Added tokens become special, as tiktoken knows no others.
    Warns if one special token lies inside another: which one tiktoken then finds is left to chance.
    Raises: ValueError if the tokenizer has a normalizer, which tiktoken has not.
    """
    import tiktoken

    if tokenizer.normalizer:
        raise ValueError(
            f"tiktoken has no normalizer, and this tokenizer uses {tokenizer.normalizer}"
        )
    names = {**tokenizer.special_tokens, **tokenizer.added_tokens}
    inside = [(a, b) for a in names for b in names if a != b and a in b]
    if inside:
        warnings.warn(
            f"special token {inside[0][0]!r} lies inside {inside[0][1]!r}: "
            "tiktoken may find the shorter one, this package takes the longer",
            stacklevel=3,
        )
    return tiktoken.Encoding(
        name,
        pat_str=tokenizer.pattern,
        mergeable_ranks=tokenizer.ranks,
        special_tokens=names,
    )


def to_hf(tokenizer: "BPETokenizer") -> "tokenizers.Tokenizer":
    """The same tokenizer as a `tokenizers.Tokenizer`; special tokens are always found in text."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(to_json(tokenizer)))
