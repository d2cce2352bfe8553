"""Conversations for training: masks as transformers makes them, rows that are alone, refusals."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.beyond.answers.conversations import (
    ROLES,
    ConversationBatches,
    conversation_example,
    conversation_examples,
)
from minillm.beyond.answers.sft import Example, Isolated, document_example, token_mask
from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.tokenizer.chat_template import render_answers
from minillm.deeper.tokenizer.foreign import ForeignTokenizer
from minillm.deeper.tokenizer.wrapped import load_tokenizer
from minillm.deeper.training.documents import DocumentBatches, StoryDocuments
from minillm.deeper.training.trainer import Trainer
from minillm.model import CausalLM
from minillm.stories.language import StoryLanguage
from minillm.training import TrainConfig, cross_entropy

CHATML = """{% for m in messages %}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    # the header and the line end are learned too, the text is trimmed, a begin token
    "llama": """{{- bos_token }}{% for message in messages %}
{%- if message['role'] == 'assistant' %}{% generation %}
{{- '<|im_start|>assistant\\n\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endgeneration %}{% else %}
{{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endif %}{% endfor %}""",
    # no special token at all, pieces that join over the border of the mark
    "text": "{% for m in messages %}{% if m.role == 'assistant' %}th"
    "{%- generation -%}{{ m.content + '.\\n' }}{% endgeneration %}"
    "{% else %}{{ m.role }}: {{ m.content + '\\n' }}{% endif %}{% endfor %}",
    # two marks in an answer, one of them in a loop and white space around them
    "twice": "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>"
    "{% generation %}{{ m.content }} {% endgeneration %}~{%- generation -%}"
    "{% for i in range(2) %}({{ i }}){% endfor %}<|im_end|>{%- endgeneration -%}"
    "{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
    # marks inside a macro
    "macro": "{% macro say(m) %}{%generation%}{{ m.reasoning_content }}{{ m.content | upper }}"
    "<|im_end|>{%endgeneration%}{% endmacro %}{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}{{ say(m) }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}",
    # the system message goes into the first question, as in Llama 2
    "inst": "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n' %}"
    "{% set talk = messages[1:] %}{% else %}{% set first, talk = '', messages %}{% endif %}"
    "{% for m in talk %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }} "
    "<|endoftext|>{% endgeneration %}{% else %}[INST] {{ (first if loop.first else '') + m.content "
    "}} [/INST]{% endif %}{% endfor %}",
}
USER, YES = {"role": "user", "content": "Hi, you"}, {"role": "assistant", "content": "Yes, once"}
EMPTY = {"role": "assistant", "content": ""}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "one turn": [USER, YES],
    "system": [SYSTEM, USER, YES],
    "turns": [
        USER,
        YES,
        {"role": "user", "content": "née 你好 🙂"},
        {**YES, "content": "你 🙂 ok"},
    ],
    "empty": [USER, EMPTY],
    "empty, then not": [SYSTEM, USER, EMPTY, USER, YES, USER, EMPTY],
    "answer first": [YES, USER],
    "two answers": [USER, YES, {**YES, "content": "And a fox\n\nran  off"}],
    "question last": [USER, YES, USER],
    "only white space": [USER, {**YES, "content": "  \r\n"}],
    "like a template": [USER, {**YES, "content": "{% generation %}{{ 1 }}{% endgeneration %}"}],
    "tool": [USER, YES, {"role": "tool", "content": '{"a": 1}'}, YES],
    "more fields": [USER, {**YES, "name": "Bo", "reasoning_content": "once"}],
}


@pytest.fixture(scope="module")
def trained():
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return BPETokenizer.train(StoryLanguage("en").corpus(50, seed=0), 500, special_tokens=names)


def with_template(trained, template, **options):
    return ForeignTokenizer(
        trained.ranks,
        trained.pattern,
        trained.special_tokens,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=template,
        **options,
    )


@pytest.fixture(scope="module")
def chatml(trained):
    return with_template(trained, CHATML)


def by_transformers(folder, messages):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    found = theirs.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], [bool(m) for m in found["assistant_masks"]]


@pytest.mark.filterwarnings("ignore:the chat template's marks")
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_masks_are_those_of_transformers(trained, tmp_path, template, wrapped):
    ours = with_template(trained, TEMPLATES[template])
    ours.save(tmp_path)
    if wrapped:
        ours = load_tokenizer(tmp_path)
    for messages in CONVERSATIONS.values():
        example = conversation_example(ours, messages)
        assert (example.ids, example.mask) == by_transformers(tmp_path, messages)
        assert example.ids == ours.apply_chat_template(messages, add_generation_prompt=False)


words = st.text(st.characters(codec="utf-8", exclude_characters="<|"), max_size=12)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=3))
def test_any_words(trained, tmp_path_factory, turns):
    ours = with_template(trained, CHATML)
    folder = tmp_path_factory.mktemp("chatml")
    ours.save(folder)
    messages = []
    for question, answer in turns:
        messages += [{**USER, "content": question}, {**YES, "content": answer}]
    example = conversation_example(ours, messages)
    assert (example.ids, example.mask) == by_transformers(folder, messages)


def test_all_of_a_last_letter_is_learnt(trained, tmp_path):
    """transformers leaves out all tokens of a last letter but the first."""
    ours = with_template(trained, CHATML.replace(" + '<|im_end|>' }}{% end", " }}{% end"))
    ours.save(tmp_path)
    messages = [USER, {"role": "assistant", "content": "ok🙂"}]
    example = conversation_example(ours, messages)
    learned = [i for i, m in zip(*example, strict=True) if m]
    assert ours.decode(learned) == "ok🙂"
    theirs = by_transformers(tmp_path, messages)[1]
    assert sum(theirs) == len(learned) - 3


def test_without_marks_transformers_marks_nothing_and_we_look_for_the_answers(
    trained, chatml, tmp_path
):
    plain = with_template(trained, re.sub(r"\{%-? (end)?generation %\}", "", CHATML))
    plain.save(tmp_path)
    for name, messages in CONVERSATIONS.items():
        if name == "two answers":
            continue
        example = conversation_example(plain, messages)
        assert example == conversation_example(chatml, messages)
        assert not any(by_transformers(tmp_path, messages)[1])


def test_without_marks_and_without_special_tokens_an_answer_ends_where_the_text_does(trained):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    text, spans = render_answers(with_template(trained, template), [USER, YES, USER])
    assert [text[a:b] for a, b in spans] == [" Yes, once\n"]


def test_a_template_that_rewrites_the_past_is_refused(trained):
    template = (
        "{% for m in messages %}{{ m.role if loop.last else '-' }} {{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"no \{% generation %\} marks.*messages\[:2\]"):
        conversation_example(with_template(trained, template), [USER, YES, USER])


def test_normalised_text(trained, tmp_path):
    ours = with_template(trained, CHATML, normalizer="NFC")
    ours.save(tmp_path)
    messages = [{**USER, "content": "ne\u0301e"}, {**YES, "content": "e\u0301te\u0301 ok"}]
    assert conversation_example(ours, messages) == by_transformers(tmp_path, messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER], r"no answer: the roles are \['user'\]"),
        ([], r"no answer: the roles are \[\]"),
        ([USER, {"role": "robot", "content": "x"}], "the role 'robot'; known are system,"),
        ([USER, {"content": "x"}], "the role None"),
        ([USER, {"role": ["assistant"], "content": "x"}], r"the role \['assistant'\]"),
        ([USER, {"role": "assistant"}], r"\['content'\] must be a string, not a NoneType"),
        ([USER, {"role": "assistant", "content": 5}], r"messages\[1\]\['content'\].*not a int"),
        ([USER, {"role": "assistant", "content": [{"type": "text"}]}], "not a list"),
        ([USER, "Yes"], r"messages\[1\] must be a dict, not a str"),
        ("Yes", "must be a list of dicts, not a str"),
        ([USER, {**YES, "content": "<|im_end|>"}], "spells the special token"),
        ([USER, {**YES, "content": "a\ufdd0"}], "U\\+FDD0"),
        ([USER, {**YES, "content": "a\ud800"}], "surrogates not allowed"),
    ],
)
def test_refused_conversations(chatml, messages, message):
    with pytest.raises(ValueError, match=message):
        conversation_example(chatml, messages)
    with pytest.raises(ValueError, match=f"conversation 2: .*{message}"):
        conversation_examples(chatml, [[USER, YES], [USER, EMPTY], messages])


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        (None, "conversations must be a list of lists of dicts, not a NoneType"),
        (5, "conversations must be a list of lists of dicts, not a int"),
        ([USER, YES], "conversation 0: messages must be a list of dicts, not a dict"),
        ("Hi", "conversation 0: messages must be a list of dicts, not a str"),
        ([[USER, YES], None], "conversation 1: messages must be a list of dicts, not a NoneType"),
    ],
)
def test_what_is_no_list_of_conversations(chatml, conversations, message):
    with pytest.raises(ValueError, match=message):
        conversation_examples(chatml, conversations)


def test_every_role_is_known(chatml):
    roles = [{"role": role, "content": "x"} for role in ROLES]
    assert sum(conversation_example(chatml, roles).mask) == 2


def test_a_span_without_a_character(chatml):
    ids = chatml.encode(" the")
    assert len(ids) == 1
    assert token_mask(chatml, " the", ids, [(1, 1)]) == [False]
    assert token_mask(chatml, " the", ids, [(0, 1), (1, 1)]) == [True]


def test_a_mask_without_a_token(trained):
    bare = with_template(trained, CHATML.replace(" + '<|im_end|>' }}{% end", " }}{% end"))
    with pytest.raises(ValueError, match="nothing to learn"):
        conversation_example(bare, [USER, EMPTY])


def test_marks_without_the_end_token_are_warned_of(trained, chatml):
    template = CHATML.replace("m.content + '<|im_end|>' }}{% endgeneration %}", "@")
    template = template.replace("@", "m.content }}{% endgeneration %}<|im_end|>")
    with pytest.warns(UserWarning, match=r"leave out '<\|im_end\|>'"):
        conversation_example(with_template(trained, template), [USER, YES])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conversation_example(chatml, [USER, YES, USER, EMPTY])


def examples(n=7, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for length in rng.integers(3, 12, n):
        mask = rng.random(length) < 0.4
        mask[0], mask[-1] = False, True
        found.append(Example(rng.integers(1, 50, length).tolist(), mask.tolist()))
    return found


def tiny(**options):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 24
    return CausalLM(ModelConfig(**{**sizes, "initializer_range": 0.3, **options})).double()


def targets_of(example):
    return [
        (a, b) for a, b, m in zip(example.ids, example.ids[1:], example.mask[1:], strict=False) if m
    ]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_epoch_has_every_target_once(layout):
    given_ = examples(11)
    batches = ConversationBatches(given_, 2, 20, layout=layout, seed=3)
    per_epoch = len(batches._batches)
    orders = []
    for _ in range(2):
        found = []
        for _ in range(per_epoch):
            inputs, targets = next(batches)
            ids = inputs[:, 0] if layout == "packed" else inputs
            assert ids.shape == targets.shape and ids.shape[1] <= 20
            found += [
                (int(i), int(t))
                for i, t in zip(ids[targets != -100], targets[targets != -100], strict=True)
            ]
        orders.append(found)
        assert sorted(found) == sorted(pair for e in given_ for pair in targets_of(e))
    assert orders[0] != orders[1]


def test_state():
    batches = ConversationBatches(examples(), 3, 20, seed=1)
    for _ in range(4):
        next(batches)
    state = batches.state_dict()
    wanted = [next(batches) for _ in range(4)]
    again = ConversationBatches(examples(), 3, 20, seed=1)
    again.load_state_dict(state)
    for one in wanted:
        for a, b in zip(one, next(again), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(ValueError, match="seed: saved 1, now 2"):
        ConversationBatches(examples(), 3, 20, seed=2).load_state_dict(state)


@pytest.mark.parametrize("family", [{}, {"model_type": "qwen3"}, {"model_type": "gpt2"}])
def test_packed_is_alone(family):
    """Loss and gradients of packed rows are those of each example alone, in torch's own loss."""
    model = tiny(**family)
    given_ = examples(9, seed=5)
    batches = ConversationBatches(given_, 100, 24, layout="packed")
    inputs, targets = next(batches)
    assert len(inputs) < len(given_)
    cross_entropy(Isolated(model)(inputs), targets, reduction="sum").backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for e in given_:
        logits = model(torch.tensor([e.ids[:-1]]))[0]
        counted = torch.tensor([i if m else -100 for i, m in zip(e.ids, e.mask, strict=True)][1:])
        F.cross_entropy(logits, counted, reduction="sum").backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(packed[name], p.grad, atol=1e-10, rtol=1e-8)


def test_isolated_refuses():
    with pytest.raises(ValueError, match=r"\(B, 2, T\), not \(2, 5\)"):
        Isolated(tiny())(torch.ones(2, 5, dtype=torch.long))
    windowed = tiny(model_type="mistral", sliding_window=4)
    with pytest.raises(ValueError, match=r"a sliding window \(4\)"):
        Isolated(windowed)


def test_too_long_for_a_row():
    ids, late = list(range(1, 12)), [False] * 8 + [True] * 3
    with pytest.raises(ValueError, match=r"example 1: 11 ids, .* number 11; a row of 9 would cut"):
        ConversationBatches([*examples(1), Example(ids, late)], 2, 9)
    for T, m in ((10, late), (4, [False] * 4 + [True] + [False] * 6)):  # only what follows is cut
        inputs, targets = next(ConversationBatches([Example(ids, m)], 1, T))
        assert inputs.tolist() == [ids[:T]] and (targets != -100).sum() == sum(m)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ConversationBatches([], 2, 9), "no examples"),
        (lambda: ConversationBatches(examples(), 0, 9), "batch_size=0"),
        (lambda: ConversationBatches(examples(), 2, 0), "context_length=0"),
        (lambda: ConversationBatches(examples(), "2", 9), "batch_size='2', context_length=9"),
        (lambda: ConversationBatches(examples(), 2, "9"), "batch_size=2, context_length='9'"),
        (lambda: ConversationBatches(examples(), 2.0, 9), r"batch_size=2\.0"),
        (lambda: ConversationBatches(None, 2, 9), "must be a list, not a NoneType"),
        (lambda: ConversationBatches(iter(examples()), 2, 9), "a list, not a list_iterator"),
        (lambda: ConversationBatches(examples(), 2, 9, layout="flat"), "layout='flat'"),
        (lambda: ConversationBatches([Example([1, 2], [True, False])], 2, 9), "example 0: .* 0 t"),
        (lambda: ConversationBatches([Example([1, 2], [True])], 2, 9), "2 ids, a mask of 1"),
        (lambda: ConversationBatches([Example([], [])], 2, 9), "example 0: 0 ids"),
        (
            lambda: ConversationBatches([*examples(2), [USER, YES]], 2, 20),
            "example 2 .* not a list",
        ),
    ],
)
def test_refused_batches(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_document_is_what_document_batches_make_of_it(chatml):
    language = StoryLanguage("en")
    end = chatml.special_tokens["<|endoftext|>"]
    stories = StoryDocuments(language, chatml.encode_ordinary, seed=1)
    rows = [document_example(chatml.encode_ordinary(stories.text(i)), end) for i in range(8)]
    width = max(len(row.ids) for row in rows)
    ours = next(ConversationBatches(rows, 8, width))
    assert all(row.mask == [False] + [True] * (len(row.ids) - 1) for row in rows)
    theirs = DocumentBatches(stories, 1, width, eos_token_id=end, shuffle_buffer=1)
    found = {tuple(t[t != -100].tolist()) for t in ours[1]}
    _, targets = next(theirs)
    assert {tuple(t[t != -100].tolist()) for t in targets} <= found


def test_through_the_trainer():
    """Packed and padded are the same step: the sum over targets does not know about rows."""
    given_ = examples(6)
    results = []
    for layout in ("padded", "packed"):
        model = tiny()
        wrapped = Isolated(model) if layout == "packed" else model
        source = ConversationBatches(given_, 100, 40, layout=layout)
        config = TrainConfig(steps=3, max_lr=1e-2, warmup_steps=1)
        history = Trainer(wrapped, source, config, progress=False).train()
        results.append((history[-1]["loss"], copy.deepcopy(model.state_dict())))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-9)
    for name, weight in results[0][1].items():
        torch.testing.assert_close(weight, results[1][1][name], atol=1e-8, rtol=1e-6)
