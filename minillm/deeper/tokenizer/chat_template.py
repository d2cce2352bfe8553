"""Conversations as a tokenizer's chat template writes them, with all that transformers gives it.

A template is a program that came with somebody's file: it runs in a process of its own, with
limits (`minillm.support.fence`), in Jinja's immutable sandbox, sees strings and lists, and may call
`raise_exception`, `strftime_now` and the filter `tojson`. Written by hand;
notebooks/deeper/02_chat_templates shows how a template works.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from minillm.support import fence
from minillm.support.checks.words import quoted
from minillm.support.fence_worker import BEGIN, END

# What transformers calls a message's reasoning; gpt-oss's template reads the second name
_REASONING = ("reasoning_content", "thinking", "reasoning")

_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


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

    The special tokens of the result are compared with those of the same conversation with harmless
    strings: pieces that only join to a special token, or become one by a filter, are found as well.

    Raises: ValueError if there is no template, if it refuses the messages or takes more time,
        memory or text than `support.fence` allows, if the messages are not dicts of strings (or of
        lists of dicts of strings), or if a string makes a special token, which would let its author
        speak as somebody else.
    """
    plain = _checked(tokenizer, messages)
    return _written(tokenizer, plain, _Writer(tokenizer), prompt=add_generation_prompt)


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> list[int]:
    """Ids of a conversation, written by the chat template; no message may spell a border."""
    text = render_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(text, allowed_special="all", add_special_tokens=False)


def render_answers(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> tuple[str, list[tuple[int, int]]]:
    """The conversation, as `render_chat` without a generation prompt, and where its answers stand.

    The places, as (begin, end) in characters, are what the template writes between its marks
    {% generation %} and {% endgeneration %}. Without marks, an answer is what the template writes
    after the conversation before it and the generation prompt, up to its last special token; or
    to its end, if it has none.

    Raises: ValueError as `render_chat`; and if the template has no marks and what it writes for the
        beginning of a conversation is not the beginning of what it writes for all of it.
    """
    plain = _checked(tokenizer, messages)
    writer = _Writer(tokenizer)
    if not _MARK.search(tokenizer.chat_template):
        text = _written(tokenizer, plain, writer)
        return text, _answers_by_prefix(tokenizer, plain, text, writer)
    for place, string in [("the chat template", tokenizer.chat_template), *_strings(plain)]:
        if BEGIN in string or END in string:
            raise ValueError(f"{place} holds U+FDD0 or U+FDD1, which is no character")
    text, begins, spans = "", [], []
    for piece in re.split(f"({BEGIN}|{END})", _written(tokenizer, plain, writer, marked=True)):
        if piece == BEGIN:
            begins.append(len(text))
        elif piece == END and begins:
            spans.append((begins.pop(), len(text)))
        elif piece == END:
            raise ValueError("the chat template itself writes U+FDD1, which is no character")
        else:
            text += piece
    return text, spans


def _answers_by_prefix(
    tokenizer: Any, plain: list[dict[str, Any]], text: str, writer: _Writer
) -> list[tuple[int, int]]:
    """Where the answers stand in `text`, found by writing the beginnings of the conversation."""
    spans = []
    for i, message in enumerate(plain):
        if message.get("role") != "assistant":
            continue
        before, after = writer.write((plain[:i], True, False), (plain[: i + 1], False, False))
        before, after = _unless_refused(before), _unless_refused(after)
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                "the chat template has no {% generation %} marks, and what it writes for "
                f"messages[:{i + 1}] is not a beginning of what it writes for all of them: "
                "mark the answers in the template"
            )
        ends = [
            after.rindex(token) + len(token) for token in tokenizer.special_tokens if token in after
        ]
        end = max(ends, default=0)
        spans.append((len(before), end if end > len(before) else len(after)))
    return spans


def _checked(tokenizer: Any, messages: Any) -> list[dict[str, Any]]:
    """A plain copy of the messages. Raises: ValueError if one spells a special token."""
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer came without a chat template")
    plain = _plain(messages)
    for place, text in _strings(plain):
        for token in tokenizer.special_tokens:
            if token in text:
                raise ValueError(
                    f"a message spells the special token {quoted(token)}: {text[:80]!r}, {place}"
                )
    return plain


def _written(
    tokenizer: Any,
    plain: list[dict[str, Any]],
    writer: _Writer,
    *,
    prompt: bool = False,
    marked: bool = False,
) -> str:
    """The text for the messages.

    Raises: ValueError if harmless strings in the messages give other special tokens.
    """
    harmless = _Harmless(tokenizer.special_tokens, tokenizer.chat_template)
    first, other = writer.write((plain, prompt, marked), (harmless.copy(plain, 0), prompt, False))
    text = _unless_refused(first)

    def special(written: str | ValueError) -> list[int] | None:
        try:
            return _special_ids(tokenizer, _unless_refused(written))
        except ValueError:
            return None  # refused

    found = _special_ids(tokenizer, re.sub(f"{BEGIN}|{END}", "", text))
    expected = special(other)
    if expected is None:
        raise ValueError(
            "the chat template decides by the words of the messages: it refuses others"
        )
    if found != expected:
        places = [*_strings(plain)]
        copies = ((harmless.copy(plain, n + 1), prompt, False) for n in range(len(places)))
        changed = (special(*writer.write(copy)) != expected for copy in copies)
        place, made_by = next(
            (p for p, yes in zip(places, changed, strict=True) if yes), places[-1]
        )
        raise ValueError(
            f"a special token is made by {made_by[:80]!r}, {place}, alone or with what is written "
            "before it; or the chat template writes other special tokens for other words"
        )
    return text


def _unless_refused(written: str | ValueError) -> str:
    """Raises: ValueError if the template has refused."""
    if isinstance(written, ValueError):
        raise written
    return written


class _Writer:
    """The chat template of a tokenizer; one limit of time for all that it writes in one call."""

    def __init__(self, tokenizer: Any) -> None:
        self.template, self.time = tokenizer.chat_template, fence.Time()
        tokens = getattr(tokenizer, "named_tokens", None)
        if tokens is None:  # of no file
            names = ("bos_token", "eos_token", "pad_token")
            tokens = {name: getattr(tokenizer, name) for name in names}
        self.tokens = {name: token for name, token in tokens.items() if token is not None}

    def write(self, *wanted: tuple[list[dict[str, Any]], bool, bool]) -> list[str | ValueError]:
        """What the template writes for each of (plain messages, prompt, marked), or its refusal."""
        options = {"tools": None, "documents": None, **self.tokens}
        tasks = [
            (
                {"messages": [*map(_with_reasoning, m)], "add_generation_prompt": p, **options},
                marked,
            )
            for m, p, marked in wanted
        ]
        return fence.fill(self.template, tasks, self.time)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message, its reasoning under all names that a template may ask for."""
    found = next((message[name] for name in _REASONING if name in message), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _special_ids(tokenizer: Any, text: str) -> list[int]:
    """The special tokens that the tokenizer finds in a text, in order."""
    unknown = getattr(tokenizer, "unk_token", None)  # stands for what it cannot spell
    ids = {i for name, i in tokenizer.special_tokens.items() if name != unknown}
    found = tokenizer.encode(text, allowed_special="all", add_special_tokens=False)
    return [i for i in found if i in ids]


def _plain(messages: Any) -> list[dict[str, Any]]:
    """A copy of the messages that is made of nothing but dicts, lists and strings.

    A generator would be used up by the first reader, an object could read differently each time.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of dicts, not a {type(messages).__name__}")
    return [_fields(message, f"messages[{i}]", True) for i, message in enumerate(messages)]


def _fields(message: Any, place: str, may_hold_lists: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place} must be a dict of strings, not a {type(message).__name__}")
    found: dict[str, Any] = {}
    for key, value in message.items():
        if not isinstance(key, str):
            raise ValueError(f"{place} has a key that is no string, but a {type(key).__name__}")
        name = _plain_str(key)
        inside = f"{place}[{name!r}]"
        if value is None and may_hold_lists and name != "content":
            continue  # as if it were not there
        if isinstance(value, str):
            found[name] = _plain_str(value)
        elif may_hold_lists and isinstance(value, list | tuple):
            found[name] = [_fields(part, f"{inside}[{n}]", False) for n, part in enumerate(value)]
        else:
            raise ValueError(f"{inside} must be a string, not a {type(value).__name__}")
    return found


def _plain_str(text: str) -> str:
    """The characters of `text` as a plain string: an heir of `str` may say something else."""
    return str.__str__(text)


def _strings(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Where each string of plain messages stands, and the string: keys first, then values."""
    for i, message in enumerate(messages):
        for key, value in message.items():
            yield f"a key of messages[{i}]", key
            if isinstance(value, str):
                yield f"messages[{i}][{key!r}]", value
                continue
            for n, part in enumerate(value):
                for name, text in part.items():
                    yield f"a key of messages[{i}][{key!r}][{n}]", name
                    yield f"messages[{i}][{key!r}][{n}][{name!r}]", text


# What programs, not users, write into a message: it stands in the harmless copy as well.
_KEYS = {"role", "content", "type", "text", "name", *_REASONING}
_VALUES = {
    "role": {"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"},
    "type": {"text", "image", "audio", "video", "image_url", "input_text", "output_text"},
}


class _Harmless:
    """Copies of messages whose strings neither are nor become parts of special tokens.

    Each character but white space becomes a letter that no special token holds. Keys, roles and
    types stay if they are well known, or if the template itself names them.
    """

    def __init__(self, special_tokens: Iterable[str], template: str) -> None:
        used = "".join(special_tokens)
        used += used.lower() + used.upper()
        letters = (chr(code) for code in range(ord("a"), 0x3000) if chr(code).isalpha())
        self.letter = next(c for c in letters if c not in used and c.upper() not in used)
        in_quotes = re.findall(r"""(['"])(\w+)\1""", template)
        self.values = {word for _, word in in_quotes}
        self.keys = {*_KEYS, *self.values, *re.findall(r"\.(\w+)", template)}

    def copy(self, messages: list[dict[str, Any]], keep: int) -> list[dict[str, Any]]:
        """The messages with harmless strings but for the first `keep`, counted as `_strings`."""
        number = count(1)

        def string(text: str, known: Collection[str]) -> str:
            if next(number) <= keep or text in known:
                return text
            return re.sub(r"\S", self.letter, text)

        def fields(message: dict[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for key, value in message.items():
                name = string(key, self.keys)
                while name in found:
                    name += self.letter
                if isinstance(value, str):
                    known = _VALUES[key] | self.values if key in _VALUES else ()
                    found[name] = string(value, known)
                else:
                    found[name] = [fields(part) for part in value]
            return found

        return [fields(message) for message in messages]
