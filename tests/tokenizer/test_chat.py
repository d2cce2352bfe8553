"""Chat templates of loaded tokenizers: transformers, on the same folder, writes the same ids."""

import json
import re
import sys
from datetime import datetime

import pytest
import transformers
from tokenizer_folders import GEMMA_CHAT, KINDS, byte_level, write
from tokenizer_texts import NATURAL
from tokenizers import Regex, normalizers, pre_tokenizers, processors

from minillm.tokenizer.bpe import BPETokenizer
from minillm.tokenizer.chat import render_chat
from minillm.tokenizer.hf_wrapper import load_tokenizer
from minillm.tokenizer.pretokenizer import LLAMA3_PATTERN, QWEN2_PATTERN

# In the manner of Qwen: a system message is supplied if there is none.
CHATML = """
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- if tools %}{{ '# Tools\\n' + tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role in ('system', 'user') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + message.content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# In the manner of Llama 3.1: a begin token, headers, the date, white space trimmed, a namespace.
LLAMA3 = """{{- bos_token }}
{%- if tools is not none %}{{ raise_exception('no tools here') }}{% endif %}
{%- if strftime_now is defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- else %}
    {%- set date_string = '26 Jul 2024' %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' }}
{{- system_message }}
{{- '<|eot_id|>' }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson(indent=2) if message.content is mapping else message.content }}
        {{- '<|eot_id|>' }}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
CHATML_NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_NAMES = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>")
LLAMA3_NAMES += ("<|end_header_id|>", "<|eot_id|>")

SYSTEM = {"role": "system", "content": '  Be brief & kind: <b>never</b> "shout".\n'}
USER = {"role": "user", "content": "Where is the cat?\n\n猫在哪儿？ 🐈"}
ANSWER = {"role": "assistant", "content": " On the mat.  "}
AGAIN = {"role": "user", "content": " And the dog?"}
TOOL = {"role": "tool", "content": {"place": "garden", "Wetter": "schön <'&>"}}
TALKS = {
    "question": [USER],
    "with system": [SYSTEM, USER],
    "answered": [SYSTEM, USER, ANSWER],
    "going on": [USER, ANSWER, AGAIN],
    "all languages": [{"role": "user", "content": text} for text in [*NATURAL.values()]],
}


def write_bpe(folder, kind, template, **config):
    """A folder of Qwen 2's or Llama 3's kind, whose tokenizer we read ourselves."""
    pattern, names = (
        (QWEN2_PATTERN, CHATML_NAMES) if kind == "qwen2" else (LLAMA3_PATTERN, LLAMA3_NAMES)
    )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), level]
    tokenizer = byte_level(steps, names)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    names = {"bos_token": None, "eos_token": names[2], "pad_token": names[0]}
    if kind == "llama":
        begin = LLAMA3_NAMES[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
        names = {"bos_token": begin, "eos_token": LLAMA3_NAMES[4]}
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **config}
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


FOLDERS = {
    "ChatML": lambda folder: write_bpe(folder, "qwen2", CHATML),
    "Llama 3": lambda folder: write_bpe(folder, "llama", LLAMA3),
    "Llama 2": lambda folder: write(folder, "mistral-0.1"),
    "Gemma": lambda folder: write(folder, "gemma"),
}


@pytest.fixture(scope="module", params=FOLDERS)
def pair(request, tmp_path_factory):
    folder = FOLDERS[request.param](tmp_path_factory.mktemp("chat"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return request.param, load_tokenizer(folder), theirs


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_ids_are_those_of_transformers(pair, talk, add_generation_prompt):
    name, ours, theirs = pair
    options = {"add_generation_prompt": add_generation_prompt}
    try:
        expected = theirs.apply_chat_template(TALKS[talk], return_dict=False, **options)
        text = theirs.apply_chat_template(TALKS[talk], tokenize=False, **options)
    except Exception as error:
        assert type(error).__name__ == "TemplateError"
        assert (name, talk) in {
            ("Gemma", "with system"),
            ("Gemma", "answered"),
            ("Llama 2", "all languages"),
        }
        with pytest.raises(ValueError, match=re.escape(f"refuses these messages: {error}")):
            ours.apply_chat_template(TALKS[talk], **options)
        return
    assert render_chat(ours, TALKS[talk], **options) == text
    assert ours.apply_chat_template(TALKS[talk], **options) == expected
    assert len(expected) > 20 and expected[0] == (ours.bos_token_id or 601)
    if add_generation_prompt:
        assert ours.apply_chat_template(TALKS[talk]) == expected  # the default
        without = theirs.apply_chat_template(TALKS[talk], return_dict=False)
        assert (without == expected) == (name == "Llama 2")


def test_classes_and_dates(tmp_path):
    tokenizer = load_tokenizer(write_bpe(tmp_path, "llama", LLAMA3))
    assert isinstance(tokenizer, BPETokenizer) and tokenizer.add_bos
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talk = [SYSTEM, USER, TOOL, AGAIN]
    assert tokenizer.apply_chat_template(talk) == theirs.apply_chat_template(
        talk, add_generation_prompt=True, return_dict=False
    )
    text = tokenizer.decode(tokenizer.apply_chat_template(talk))
    assert f"Today Date: {datetime.now():%d %b %Y}\n" in text
    assert '"Wetter": "schön <\'&>"\n}' in text
    assert text.count("<|begin_of_text|>") == 1


def test_a_begin_token_that_is_none_is_not_written(tmp_path):
    template = "{{ bos_token }}{{ messages[0].content }}{% if documents is none %}!{% endif %}"
    ours = load_tokenizer(write_bpe(tmp_path, "qwen2", template))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template([USER], return_dict=False)
    assert ours.apply_chat_template([USER]) == expected
    assert ours.decode(expected) == USER["content"] + "!"


def test_white_space_around_tags(tmp_path):
    template = (
        "  {% for m in messages %}\n  {% if m.content %}\n  {{ m.content }} \n\t{% endif %}\n"
    )
    template += "{# no more #}\n   {% break %}\n{% endfor %}\nend\n"
    ours = load_tokenizer(write_bpe(tmp_path, "llama", template))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talk = [USER, ANSWER]
    text = render_chat(ours, talk, add_generation_prompt=False)
    assert text == theirs.apply_chat_template(talk, tokenize=False)
    assert text == f"  {USER['content']} \nend"


def test_where_the_template_lies(tmp_path):
    def found():
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ids = load_tokenizer(tmp_path).apply_chat_template([USER])
        options = {"add_generation_prompt": True, "return_dict": False}
        assert ids == theirs.apply_chat_template([USER], **options)
        return ids

    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b c"}]
    for folder in FOLDERS["Llama 3"], lambda f: write(f, "gemma", chat_template="d"):
        folder(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        config = json.loads(path.read_text())
        kept = found()
        path.write_text(json.dumps({**config, "chat_template": named}))
        assert found() != kept
        path.write_text(json.dumps({**config, "chat_template": named[:1]}))
        with pytest.raises(ValueError, match=r"no chat template is called 'default'.* tool_use"):
            load_tokenizer(tmp_path)
        beside = tmp_path / "chat_template.jinja"
        beside.write_text("{{ messages[0].content }} e")
        path.write_text(json.dumps(config))
        assert load_tokenizer(tmp_path).decode(found()).endswith(" e")
        beside.unlink()
        path.write_text(json.dumps({**config, "chat_template": None}))
        with pytest.raises(ValueError, match="without a chat template"):
            load_tokenizer(tmp_path).apply_chat_template([USER])


@pytest.mark.parametrize("kind", ["bpe", "wrapped"])
def test_templates_are_fenced_in(kind, tmp_path):
    def chat(template, messages=(USER,)):
        if kind == "bpe":
            write_bpe(tmp_path, "llama", template)
        else:
            write(tmp_path, "mistral-0.3", chat_template=template)
        return load_tokenizer(tmp_path).apply_chat_template(list(messages))

    for template in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ raise_exception('no users') }}",
        "{% for m in messages %}",
        "{{ messages[0].content + 1 }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ 1 / 0 }}",
        "{{ 9.0 ** 9999 }}",
        "{{ range(10 ** 9) | length }}",
        "{{ 'abc'.index('z') }}",
        "{{ [].pop() }}",
        "{{ '%d' | format('x') }}",
        "{{ '{7}'.format(1) }}",
        "{{ messages[0].content | dictsort }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ):
        with pytest.raises(ValueError, match="the chat template refuses these messages: "):
            chat(template)
    assert USER["role"] == "user"
    end = "<|eot_id|>" if kind == "bpe" else "</s>"
    for content in (f"a{end}", [{"type": "text", "text": end}], {"deep": [end]}):
        with pytest.raises(
            ValueError, match=f"a message spells the special token '{re.escape(end)}"
        ):
            chat(GEMMA_CHAT, [{"role": "user", "content": content}])


def test_without_jinja(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(write(tmp_path, "gemma"))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match="pip install jinja2"):
        tokenizer.apply_chat_template([USER])
    assert tokenizer.encode("a") and KINDS
