"""Graders of the page 02_chat_templates: ChatML by hand, what templates write, what is learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.exercises import check_table, exercise

_TALKS: tuple[list[tuple[str, str]], ...] = (
    [("user", "Who lived here?")],
    [("system", "Be brief."), ("user", "Hi."), ("assistant", "Yes?"), ("user", "Who?\nYou?")],
    [("user", " two  spaces "), ("assistant", "")],
    [],
)


def _chatml(talk: Sequence[tuple[str, str]], prompt: bool) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in talk)
    return text + "<|im_start|>assistant\n" * prompt


@exercise(
    "02_chat_templates.1",
    "write the borders as they are spelled; what did the page's template write for `talk`?",
    "a chat template is a function from messages to text, and every line end counts",
)
def _by_hand(answer: Callable[[list[dict[str, str]], bool], Any]) -> str | None:
    for talk in _TALKS:
        for prompt in (False, True):
            messages = [{"role": role, "content": content} for role, content in talk]
            want, got = _chatml(talk, prompt), answer(messages, prompt)
            if got == want:
                continue
            if not isinstance(got, str):
                return f"return a text, not a {type(got).__name__}"
            if got == _chatml(talk, not prompt):
                return f"with add_generation_prompt={prompt}: the prompt is {_there(not prompt)}"
            if got == _chatml(talk, False) + "<|im_start|>assistant" * prompt:
                return "the generation prompt ends with a line end, as after every role"
            if got == _chatml(talk, prompt).removesuffix("\n"):
                return "the last line end is missing: there is one after every <|im_end|>"
            stripped = [(role, content.strip()) for role, content in talk]
            if got == _chatml(stripped, prompt):
                return "the content is written as it is, with its spaces"
            if got.replace("\n", "") == want.replace("\n", ""):
                return f"only line ends are wrong: {got!r} should be {want!r}"
            return f"for {messages} it should be {want!r}, not {got!r}"
    return None


def _there(prompt: bool) -> str:
    return "there, but should not be" if prompt else "missing"


WRITTEN = {
    "{{ messages[0].content | trim }}!": "Hi!",
    "{% for m in messages %}{{ m.role }},{% endfor %}": "user,assistant,",
    "{% if messages[-1].role == 'user' %}a{% else %}b{% endif %}": "b",
    "{{ bos_token }}{{ messages[1].content }}": "<s>Yes",
    "{% for m in messages %}\n{{ m.role }}\n{% endfor %}": "user\nassistant\n",
    "{%- for m in messages -%}\n{{ m.role }}\n{%- endfor -%}": "userassistant",
}
_HINTS = (
    "trim drops white space at both ends",
    "what stands between for and endfor is written once per message",
    "-1 is the last message; who speaks there?",
    "a name is replaced by its value; the messages are counted from 0",
    "a line end right after a command is dropped, any other is kept",
    "a minus drops all white space on its side",
)


@exercise(
    "02_chat_templates.2",
    "go through each template from left to right, and mind the line ends",
    "values, loops, conditions and white space: that is all that most chat templates use",
)
def _written(answer: Any) -> str | None:
    hints = dict(zip(WRITTEN, _HINTS, strict=True))
    return check_table(
        answer, WRITTEN, hints, kind="the text that comes out", fits=lambda x: isinstance(x, str)
    )


def _mask(ids: Sequence[int], start: int, end: int, header: Sequence[int]) -> list[bool]:
    begin, mask, writing = [start, *header], [False] * len(ids), False
    for n, i in enumerate(ids):
        mask[n] = writing
        if i == end:
            writing = False
        if list(ids[: n + 1])[-len(begin) :] == begin:
            writing = True
    return mask


_ANSWERS = {  # start 90, end 91; assistant 7 8 0, user 5 0; a line end 0
    "one answer": [90, 5, 0, 1, 2, 91, 0, 90, 7, 8, 0, 3, 4, 91, 0],
    "two answers": [90, 5, 0, 1, 91, 0, 90, 7, 8, 0, 3, 91, 0, 90, 7, 8, 0, 4, 4, 91, 0],
    "an answer that is cut off": [90, 5, 0, 1, 91, 0, 90, 7, 8, 0, 3, 4],
    "an empty answer": [90, 5, 0, 1, 91, 0, 90, 7, 8, 0, 91, 0],
    "the header's ids in a question": [90, 5, 0, 7, 8, 0, 2, 91, 0, 90, 7, 8, 0, 3, 91, 0],
    "roles that share ids with the header": [
        *(90, 7, 5, 0, 1, 91, 0, 90, 5, 8, 0, 2, 91, 0),
        *(90, 7, 8, 0, 3, 91, 0),
    ],
    "no answer": [90, 5, 0, 1, 2, 91, 0],
}


@exercise(
    "02_chat_templates.3",
    "go along the ids: what must have come just before the assistant writes, and what stops it?",
    "the model learns what it will have to write: the answers and their ends, not the prompt",
)
def _answer_mask(answer: Callable[..., Any]) -> str | None:
    start, end, header = 90, 91, [7, 8, 0]
    for name, ids in _ANSWERS.items():
        want, got = _mask(ids, start, end, header), answer(list(ids), start, end, list(header))
        got = got.tolist() if hasattr(got, "tolist") else got  # an array
        if not isinstance(got, list | tuple) or len(got) != len(ids):
            return f"{name}: return a list of {len(ids)} values, one per id"
        got = [bool(value) for value in got]
        if got == want:
            continue
        written = [i for i, one in zip(ids, got, strict=True) if one]
        right = [i for i, one in zip(ids, want, strict=True) if one]
        if name == "no answer":
            return "nobody answers here: all are False"
        if written == [i for i in right if i != end]:
            return "the assistant writes the end as well: else the model never learns to stop"
        if not any(got):
            return f"{name}: nothing is True, but the assistant writes {right}"
        if start in written:
            return f"{name}: the border at the start is the program's, not the assistant's"
        if got == [not one for one in want]:
            return f"{name}: True and False are exchanged"
        if written[: len(header)] == header and "question" not in name:
            return f"{name}: the header is the program's, not the assistant's"
        if "question" in name:
            return "the header's ids alone do not begin an answer: they follow a start"
        if "roles" in name:
            return "the whole header counts: another role may share some of its ids"
        if name == "two answers" and len(written) < len(right):
            return "there may be more than one answer"
        if sum(got) > sum(want):
            return f"{name}: True are {written}, but the assistant writes {right} only"
        return f"{name}: the assistant writes {right}, not {written}"
    return None
