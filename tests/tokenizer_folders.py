"""Folders with tokenizers of published families' kinds, made by Hugging Face's own libraries."""

from __future__ import annotations

import json
import string
from collections import Counter
from functools import cache
from pathlib import Path

import transformers
from tokenizer_texts import NATURAL
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from minillm.deeper.tokenizer.patterns import DEEPSEEK_V3_PATTERNS

transformers.logging.set_verbosity_error()

LLAMA2_CHAT = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') -}}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{- bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() }}
        {{- ' [/INST]' -}}
    {%- else -%}
        {{- ' ' + message['content'].strip() + ' ' + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""
GEMMA_CHAT = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""


@cache
def pieces(first: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary as SentencePiece's: special tokens, 256 bytes, what was learned; its merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    # Few letters, always the same: the rest of the texts has to fall back to bytes.
    counts = Counter("".join(NATURAL.values()))
    letters = {*string.ascii_letters, *sorted(counts, key=lambda c: (-counts[c], c))[:70]}
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(letters), limit_alphabet=len(letters),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([*NATURAL.values()] * 2 + ["a  b    c [INST] hello"] * 9, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].get)
    spaces = ["▁" * n for n in (1, 2, 4)]
    learned = [*spaces, *(name for name in learned if name not in spaces)]
    names = [*first, *(f"<0x{i:02X}>" for i in range(256)), *learned]
    merges = [(n, n) for n in spaces[:2]] + [tuple(pair) for pair in model["merges"]]
    return {name: i for i, name in enumerate(names)}, merges


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, normalized=False, special=True) for name in names]


def sentencepiece(normalizer, pre_tokenizer, first=("<unk>", "<s>", "</s>")) -> Tokenizer:
    vocab, merges = pieces(first)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True,
                                     byte_fallback=True))  # fmt: skip
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if "<s>" in first:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(special(*first))
    return tokenizer


def begins_with(tokenizer: Tokenizer, name: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name}:1 $B:1",
        special_tokens=[(name, tokenizer.token_to_id(name))],
    )  # fmt: skip
    return tokenizer


def old_style() -> Tokenizer:
    """Llama 2 and Mistral 0.1: a space in front of each stretch of text."""
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return begins_with(sentencepiece(normalizers.Sequence(spaces), None), "<s>")


def new_style() -> Tokenizer:
    """Mistral 0.3: a space in front of the text only, if there is none."""
    metaspace = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return begins_with(sentencepiece(None, metaspace), "<s>")


def gemmas() -> Tokenizer:
    first = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>")
    by_space = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer = sentencepiece(normalizers.Replace(" ", "▁"), by_space, first)
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("\n\n", "\n\n\n", "<table>")])
    return begins_with(tokenizer, "<bos>")


def byte_level(steps: list, names: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Sequence(steps),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*NATURAL.values()] * 2, trainer)
    tokenizer.add_special_tokens(special(*names))
    return tokenizer


def falcons() -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    steps = [pre_tokenizers.Punctuation("contiguous"), level, pre_tokenizers.Digits(True)]
    steps += [pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]
    return byte_level(steps, (">>TITLE<<", ">>QUESTION<<", "<|endoftext|>"))


def deepseeks() -> Tokenizer:
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in DEEPSEEK_V3_PATTERNS]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer = byte_level(steps, ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"))
    return begins_with(tokenizer, "<｜begin▁of▁sentence｜>")


S_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", "legacy": False, **S_NAMES, "pad_token": None}
LLAMA |= {"add_bos_token": True, "add_eos_token": False, "chat_template": LLAMA2_CHAT}
LLAMA["bos_token"] = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False,
                      "normalized": False, "single_word": False}  # fmt: skip
GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
GEMMA |= {"tokenizer_class": "GemmaTokenizer", "chat_template": GEMMA_CHAT, "add_bos_token": True}
FALCON = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
DEEPSEEK = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
DEEPSEEK |= {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}

# name -> model_type, tokenizer, what tokenizer_config.json says
KINDS = {
    "llama-2": ("llama", old_style, LLAMA),
    "llama-2 by transformers 5": ("llama", None, S_NAMES),
    "mistral-0.1": ("mistral", old_style, LLAMA),
    "mistral-0.3": ("mistral", new_style, {**LLAMA, "chat_template": None}),
    "gemma": ("gemma", gemmas, GEMMA),
    "falcon": ("falcon", falcons, FALCON),
    "deepseek": ("deepseek_v3", deepseeks, DEEPSEEK),
}


def write(folder: Path, name: str, **changes) -> Path:
    """The files of one kind in `folder`; a change to None takes a key away."""
    model_type, make, config = KINDS[name]
    if make is None:
        vocab, merges = pieces(("<unk>", "<s>", "</s>"))
        transformers.LlamaTokenizer(vocab, merges, **config).save_pretrained(folder)
    else:
        make().save(str(folder / "tokenizer.json"))
        config = {k: v for k, v in {**config, **changes}.items() if v is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def plain_byte_level(special=("<|endoftext|>",), normalizer=None) -> Tokenizer:
    """A small one of a kind that our own class reads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder, tokenizer.normalizer = decoders.ByteLevel(), normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the hat of the cat"] * 3, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """A small one of a kind that only the library reads."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<|endoftext|>"], show_progress=False
    )
    texts = [*[*NATURAL.values()][:2], "<tool><a><b></s><pad><mask><img><x y>tool"]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


SMALL = {"native": plain_byte_level, "wrapped": metaspace}
