"""Conversations as a tokenizer's chat template writes them, with all that transformers gives it.

A template is a program that came with somebody's file: it runs in Jinja's immutable sandbox, sees
strings and lists, and may call `raise_exception`, `strftime_now` and the filter `tojson`. Written
by hand; notebook 02 shows how a template works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["choose_template", "render_chat"]

# what a template can raise besides Jinja's own: 1 / 0, range(10**9), "a".index("b"), 5 | dictsort
_MISTAKES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)


def choose_template(found: Any) -> str | None:
    """The template itself, or the one called "default" where a file lists several by name.

    Raises: ValueError if it lists several and none is called so.
    """
    if found is None or isinstance(found, str):
        return found
    named = {entry["name"]: entry["template"] for entry in found}
    if "default" not in named:
        raise ValueError(f"no chat template is called 'default'; there are {', '.join(named)}")
    return named["default"]


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str:
    """The conversation as the tokenizer's chat template writes it.

    Raises: ValueError if there is no template, if it refuses the messages, or if one of them
        spells a special token, which would let its author speak as somebody else.
    """
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer came without a chat template")
    for text in _strings(messages):
        for token in tokenizer.special_tokens:
            if token in text:
                raise ValueError(f"a message spells the special token {token!r}: {text[:80]!r}")
    environment = _environment()
    from jinja2.exceptions import TemplateError

    tokens = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")}
    try:
        return environment.from_string(tokenizer.chat_template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{name: token for name, token in tokens.items() if token is not None},
        )
    except (TemplateError, *_MISTAKES) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None


def _environment() -> Environment:
    """Jinja as chat templates expect it.

    Raises: ImportError if it is not installed.
    Source: transformers, `utils/chat_template_utils.py`.
    """
    try:
        from jinja2 import nodes
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ImportError("chat templates are written in Jinja: pip install jinja2") from None

    class Generation(Extension):
        """{% generation %} marks what an assistant says, for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _strings(value: Any) -> list[str]:
    """All strings inside nested lists and mappings."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*value.values()]
    return [s for item in value for s in _strings(item)] if isinstance(value, Sequence) else []
