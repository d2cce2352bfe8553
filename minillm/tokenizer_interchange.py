"""The tokenizer handed to other libraries: tiktoken, tokenizers, and Jinja for chat templates.

Explained in notebook 02. Each library is imported where it is used.
"""

# Built from notebooks/02_tokenizer.ipynb: edit there, then make build.

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minillm.tokenizer_files import to_json

__all__ = ["render_chat", "to_hf", "to_tiktoken"]

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

    from minillm.tokenizer import BPETokenizer


def to_tiktoken(tokenizer: "BPETokenizer", name: str = "minillm") -> "tiktoken.Encoding":
    """The same ranks, pattern and special tokens as a `tiktoken.Encoding`; it adds no begin token.

    Warns if one special token lies inside another: which one tiktoken then finds is left to chance.
    Raises: ValueError if the tokenizer has a normalizer, which tiktoken has not.
    """
    import tiktoken

    if tokenizer.normalizer:
        raise ValueError(
            f"tiktoken has no normalizer, and this tokenizer uses {tokenizer.normalizer}"
        )
    names = [*tokenizer.special_tokens]
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
        special_tokens=tokenizer.special_tokens,
    )


def to_hf(tokenizer: "BPETokenizer") -> "tokenizers.Tokenizer":
    """The same tokenizer as a `tokenizers.Tokenizer`; special tokens are always found in text."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(to_json(tokenizer)))


def render_chat(
    tokenizer: "BPETokenizer", messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str:
    """The conversation as the tokenizer's chat template writes it, run in Jinja's sandbox.

    Raises: ValueError if there is no template, or if a message spells a special token.
    """
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer came without a chat template")
    for text in _strings(messages):
        for token in tokenizer.special_tokens:
            if token in text:
                raise ValueError(f"a message spells the special token {token!r}: {text[:80]!r}")
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    environment.globals["raise_exception"] = raise_exception
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **names
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None


def _strings(value: Any) -> list[str]:
    """All strings inside nested lists and mappings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.values()]
    return [s for item in value for s in _strings(item)] if isinstance(value, Sequence) else []
