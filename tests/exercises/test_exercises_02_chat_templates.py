"""Planted wrong answers of the page 02_chat_templates, each with the sentence it must earn."""

import numpy as np
import pytest

from minillm.bpe import GPT4_PATTERN
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.exercises import grade
from minillm.exercises.chat_templates import _TALKS, WRITTEN, _chatml, _mask


def by_hand(messages, add_generation_prompt):
    text = ""
    for message in messages:
        text += "<|im_start|>" + message["role"] + "\n" + message["content"] + "<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def never_a_prompt(messages, add_generation_prompt):
    return by_hand(messages, False)


def always_a_prompt(messages, add_generation_prompt):
    return by_hand(messages, True)


def short_prompt(messages, add_generation_prompt):
    return by_hand(messages, False) + "<|im_start|>assistant" * add_generation_prompt


def no_last_line_end(messages, add_generation_prompt):
    return by_hand(messages, add_generation_prompt).removesuffix("\n")


def stripped(messages, add_generation_prompt):
    messages = [{**m, "content": m["content"].strip()} for m in messages]
    return by_hand(messages, add_generation_prompt)


def no_line_ends(messages, add_generation_prompt):
    return by_hand(messages, add_generation_prompt).replace("<|im_end|>\n", "<|im_end|>")


def user_only(messages, add_generation_prompt):
    return by_hand([{**m, "role": "user"} for m in messages], add_generation_prompt)


def as_list(messages, add_generation_prompt):
    return [by_hand(messages, add_generation_prompt)]


def answer_mask(ids, start, end, header):
    mask, n = [False] * len(ids), 0
    while n < len(ids):
        if ids[n] == start and ids[n + 1 : n + 1 + len(header)] == header:
            n += 1 + len(header)
            while n < len(ids):
                mask[n] = True
                if ids[n] == end:
                    break
                n += 1
        n += 1
    return mask


def without_ends(ids, start, end, header):
    mask = answer_mask(ids, start, end, header)
    return [one and i != end for one, i in zip(mask, ids, strict=True)]


def with_header(ids, start, end, header):
    mask, size = answer_mask(ids, start, end, header), len(header)
    return [any(mask[n : n + size + 1]) for n in range(len(ids))]


def with_start(ids, start, end, header):
    mask, size = answer_mask(ids, start, end, header), len(header) + 1
    return [any(mask[n : n + size + 1]) for n in range(len(ids))]


def first_only(ids, start, end, header):
    mask = answer_mask(ids, start, end, header)
    last = next((n for n, i in enumerate(ids) if mask[n] and i == end), len(ids))
    return [one and n <= last for n, one in enumerate(mask)]


def header_alone(ids, start, end, header):
    mask, writing, size = [], False, len(header)
    for n, i in enumerate(ids):
        mask.append(writing)
        writing = (writing and i != end) or ids[n + 1 - size : n + 1] == header
    return mask


def first_id_of_the_header(ids, start, end, header):
    alike = [*ids]
    for n, i in enumerate(ids):
        if i == start and ids[n + 1] == header[0]:
            alike[n + 1 : n + 1 + len(header)] = header
    return answer_mask(alike, start, end, header)


def last_id_of_the_header(ids, start, end, header):
    alike = [*ids]
    for n, i in enumerate(ids):
        if i == start and ids[n + 2 : n + 1 + len(header)] == header[1:]:
            alike[n + 1] = header[0]
    return answer_mask(alike, start, end, header)


def to_the_end(ids, start, end, header):
    mask = answer_mask(ids, start, end, header)
    return [any(mask[: n + 1]) for n in range(len(ids))]


RIGHT = {
    "02_chat_templates.1": by_hand,
    "02_chat_templates.2": WRITTEN,
    "02_chat_templates.3": answer_mask,
}

TRIM, LOOP, IF, BOS, LINES, MINUS = WRITTEN

WRONG = [
    ("02_chat_templates.1", never_a_prompt, "the prompt is missing"),
    ("02_chat_templates.1", always_a_prompt, "should not be"),
    ("02_chat_templates.1", short_prompt, "ends with a line end"),
    ("02_chat_templates.1", no_last_line_end, "after every <|im_end|>"),
    ("02_chat_templates.1", stripped, "with its spaces"),
    ("02_chat_templates.1", no_line_ends, "line end"),
    ("02_chat_templates.1", user_only, "it should be"),
    ("02_chat_templates.1", as_list, "not a list"),
    ("02_chat_templates.2", {**WRITTEN, TRIM: " Hi !"}, "at both ends"),
    ("02_chat_templates.2", {**WRITTEN, LOOP: "user,"}, "once per message"),
    ("02_chat_templates.2", {**WRITTEN, IF: "a"}, "the last message"),
    ("02_chat_templates.2", {**WRITTEN, BOS: "bos_tokenYes"}, "by its value"),
    ("02_chat_templates.2", {**WRITTEN, LINES: "\nuser\n\nassistant\n"}, "right after a command"),
    ("02_chat_templates.2", {**WRITTEN, MINUS: "user\nassistant\n"}, "a minus drops"),
    ("02_chat_templates.2", {**WRITTEN, MINUS: ...}, "not filled in"),
    ("02_chat_templates.2", {**WRITTEN, IF: 5}, "the text that comes out"),
    ("02_chat_templates.2", "Hi!", "a dictionary"),
    ("02_chat_templates.3", without_ends, "learns to stop"),
    ("02_chat_templates.3", with_header, "the header is the program's"),
    ("02_chat_templates.3", with_start, "the border at the start"),
    ("02_chat_templates.3", first_only, "more than one answer"),
    ("02_chat_templates.3", header_alone, "they follow a start"),
    ("02_chat_templates.3", first_id_of_the_header, "the whole header counts"),
    ("02_chat_templates.3", last_id_of_the_header, "the whole header counts"),
    ("02_chat_templates.3", to_the_end, "only"),
    ("02_chat_templates.3", lambda ids, *_: [True] * len(ids), "start"),
    ("02_chat_templates.3", lambda ids, *_: [False] * len(ids), "nothing is True"),
    ("02_chat_templates.3", lambda *a: [not one for one in answer_mask(*a)], "start"),
    ("02_chat_templates.3", lambda ids, *_: ids[3:], "one per id"),
]


def test_a_second_right_answer_is_accepted():
    assert grade("02_chat_templates.3", _mask).status == "correct"
    ones = grade("02_chat_templates.3", lambda *a: [int(one) for one in answer_mask(*a)])
    assert ones.status == "correct"
    array = grade("02_chat_templates.3", lambda *a: np.array(answer_mask(*a)))
    assert array.status == "correct"


@pytest.mark.parametrize("prompt", [False, True])
def test_what_templates_write_is_what_the_package_writes(prompt):
    ranks = {bytes([byte]): byte for byte in range(256)}
    names = {"<s>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    messages = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes"}]
    for template, text in WRITTEN.items():
        found = ForeignTokenizer(ranks, GPT4_PATTERN, names, chat_template=template)
        assert found.decode(found.apply_chat_template(messages)) == text
    chatml = (
        "{% for m in messages %}\n<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}\n{% if add_generation_prompt %}\n<|im_start|>assistant\n\n{% endif %}"
    )
    found = ForeignTokenizer(ranks, GPT4_PATTERN, names, chat_template=chatml)
    for talk in _TALKS:
        messages = [{"role": role, "content": content} for role, content in talk]
        ids = found.apply_chat_template(messages, add_generation_prompt=prompt)
        assert found.decode(ids) == _chatml(talk, prompt) + "\n" * prompt
