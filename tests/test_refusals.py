"""What the package refuses, in which words: each call in `refusals/` raises what stands there.

A file is a subject. A call is one Python expression on one line, and the line below it says what
it raises. Its names are those of `MADE` below (made anew for each call), of the builtins, of
`minillm`, or of any function or class that a file of the package defines, wherever it lies: the
lists outlive a move of modules.

    python tests/test_refusals.py --write

writes what is raised below every call anew (to add a call, write its line alone). A refusal that
changes is a change for all who meet it: say why in the commit. One that is gone must be refused in
better words now, or be possible.
"""

import ast
import builtins
import importlib
import json
import os
import re
import sys
import tempfile
import warnings
from functools import cache
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import minillm

LISTS = sorted(Path(__file__).with_name("refusals").glob("*.txt"))
PACKAGE = Path(minillm.__file__).parent


@cache
def definitions():
    """What each file of the package defines at its top: (module, names); the graders left out."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "exercises" in path.parts:
            continue
        names = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found.append((module.removesuffix(".__init__"), names))
    return found


def find(name, *, beside=()):
    """What the package calls `name`, in the file that defines it (and what stands `beside` it)."""
    wanted = {name, *([beside] if isinstance(beside, str) else beside)}
    for module, names in definitions():
        if wanted <= names:
            return getattr(importlib.import_module(module), name)
    raise LookupError(f"no file of the package defines {' and '.join(sorted(wanted))}")


SMALL = {"vocab_size": 31, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 12, "max_position_embeddings": 16}
OWN = {  # the keys that a family's config needs beside those
    "mixtral": {"num_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
    "deepseek_v3": {
        "head_dim": 4,
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
}
STATES = {"mamba": {"state_size": 4}, "mamba2": {"num_heads": 4, "state_size": 4}}
STATES["bamba"] = STATES["mamba2"]
CHAT = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>{% endfor %}"


def cfg(**keys):
    """A small config, with these keys instead of its own; a key of ... is left out."""
    kind = keys.get("model_type", "llama")
    given = {**SMALL, **OWN.get(kind, {})}
    if kind in STATES:
        given["state"] = find("StateSizes")(**STATES[kind])
    if kind in ("mamba", "mamba2"):
        del given["num_attention_heads"], given["intermediate_size"]
    return minillm.ModelConfig(**{k: v for k, v in {**given, **keys}.items() if v is not ...})


def lm(**keys):
    """A small model of such a config."""
    return minillm.CausalLM(cfg(**keys))


def bpe(size=261, special_tokens=("<|endoftext|>",), text="the cat sat on the mat", **options):
    """A small tokenizer."""
    return minillm.BPETokenizer.train(text, size, special_tokens=special_tokens, **options)


def chat(template=CHAT):
    """A small tokenizer with a chat template."""
    made = bpe()
    options = {"eos_token": "<|endoftext|>", "chat_template": template}
    return minillm.ForeignTokenizer(made.ranks, made.pattern, made.special_tokens, **options)


def folder(files, name="folder"):
    """A folder of these files: name -> text, bytes, a table of tensors, or what JSON says."""
    Path(name).mkdir(exist_ok=True)
    for file, content in files.items():
        path = Path(name, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict) and any(torch.is_tensor(x) for x in content.values()):
            save_file(content, path)
        elif isinstance(content, str | bytes):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        else:
            path.write_text(json.dumps(content), encoding="utf-8")
    return Path(name)


def file(content, name="file.txt"):
    """A file of that content."""
    return folder({name: content}, ".") / name


def saved(model=None, name="folder", tokenizer=None):
    """A folder that a model was saved into."""
    minillm.save_pretrained(lm() if model is None else model, tokenizer, name)
    return Path(name)


def saved_adapter(**options):
    """A folder that an adapter of the small model was saved into."""
    minillm.add_lora(model := lm(), **{"rank": 2, "alpha": 4, "targets": ["q_proj"], **options})
    minillm.save_adapter(model, "folder")
    return Path("folder")


def edited(place, name, change):
    """The folder, after `change` of what the JSON file of that name holds."""
    path = Path(place, name)
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return Path(place)


def retensored(place, name, change):
    """The folder, after `change` of the table of tensors that a file of that name holds."""
    from safetensors.torch import load_file

    content = {k: v.clone() for k, v in load_file(Path(place, name)).items()}
    change(content)
    save_file(content, Path(place, name))
    return Path(place)


def cut(place, name, size):
    """The folder, after a file was cut to that size."""
    path = Path(place, name)
    path.write_bytes(path.read_bytes()[:size])
    return Path(place)


def tokenizer_file(change=lambda content: None, own=False):
    """A folder with a tokenizer.json that says `change`; `own`: still with our fingerprint."""
    bpe().save("folder")

    def both(content):
        if not own:
            content["model"].pop("minillm_sha256")
        change(content)

    return edited("folder", "tokenizer.json", both)


def kv(kind="dynamic", length=0, **options):
    """A small cache that holds so many positions."""
    sizes = {"num_layers": 2, "batch_size": 2, "num_kv_heads": 2, "key_dim": 4, "value_dim": 4}
    made = minillm.make_cache(kind, **{**sizes, **options})
    for layer in made.layers if length else ():
        layer.update(*torch.zeros(2, 2, 2, length, 4))
    return made


def windows(**options):
    """A source of batches."""
    given = {"tokens": torch.arange(200) % 31, "batch_size": 2, "context_length": 4}
    return minillm.WindowBatches(**{**given, **options})


def trainer(steps=2, *, model=None, batches=None, optimizer=None, run=None, loss=None, **options):
    """A trainer of the small model."""
    names = ("validate", "sample", "token_bytes", "on_log", "balance", "schedule")
    parts = {name: options.pop(name) for name in names if name in options}
    parts |= {"optimizer": optimizer, "run": run, "loss": loss, "progress": False}
    model = lm() if model is None else model
    batches = windows() if batches is None else batches
    return minillm.Trainer(model, batches, minillm.RunConfig(steps, **options), **parts)


@cache
def files_of_a_run():
    """What a short run leaves in its folder, path -> bytes: it is trained once."""
    with tempfile.TemporaryDirectory() as place:
        trainer(run=minillm.Run(place)).train()
        found = [p for p in Path(place).rglob("*") if p.is_file() and ".lock" not in p.name]
        return {p.relative_to(place).as_posix(): p.read_bytes() for p in found}


def trained(model=None):
    """The folder of the only checkpoint of a run."""
    if model is None:
        folder(files_of_a_run(), "run")
    else:
        trainer(model=model, run=minillm.Run("run")).train()
    return next(Path("run").glob("step-*"))


def documents():
    """A stream of documents."""
    return minillm.TextDocuments(["a", "bc", "def"], bpe().encode_ordinary)


def vit(**keys):
    """A small config of a picture tower."""
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "intermediate_size": 12}
    return minillm.VisionConfig(**{**sizes, "num_attention_heads": 2, **keys})


def llava(**keys):
    """A small config of a tower and a language model."""
    parts = {"vision_config": vit(), "text_config": cfg(), "image_token_index": 30}
    return minillm.PictureConfig(**{**parts, **keys})


def qwen_tower(**keys):
    """A small config of Qwen's tower."""
    sizes = {"hidden_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 2}
    return minillm.QwenVisionConfig(**{**sizes, **keys})


def qwen_vl(**keys):
    """A small config of a Qwen2-VL."""
    parts = {"text": cfg(model_type="qwen2"), "vision": qwen_tower(), "mrope_section": (1, 1, 0)}
    marks = {"image_token_id": 30, "video_token_id": 29}
    marks |= {"vision_start_token_id": 28, "vision_end_token_id": 27}
    return minillm.QwenVLConfig(**{**parts, **marks, **keys})


def bart(**keys):
    """A small config of an encoder and a decoder."""
    sizes = {"vocab_size": 11, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12}
    return minillm.Seq2SeqConfig(**{**sizes, "max_position_embeddings": 8, **keys})


def after(first, then):
    """What `then` makes of a thing to which something was done first."""
    first()
    return then()


def within(context, then):
    """What `then` makes while a context is open."""
    with context:
        return then()


def adapted(model=None, targets="all-linear", **options):
    """A small model with adapters."""
    minillm.add_lora(model := lm() if model is None else model, 2, 4, targets, **options)
    return model


def unigram(change=lambda content: None):
    """A folder with a tokenizer.json that the library `tokenizers` reads, after `change`."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True, **plain}],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]},
    }
    change(content)
    return folder({"tokenizer.json": content})


def wrapped(change=lambda content: None):
    """That tokenizer."""
    return find("load_tokenizer")(unigram(change))


def gguf(*parts):
    """A file that begins as a GGUF does, then holds these bytes, or numbers (8 bytes each)."""
    begin = b"GGUF" + (3).to_bytes(4, "little")
    parts = [p if isinstance(p, bytes) else p.to_bytes(8, "little") for p in parts]
    return file(begin + b"".join(parts), "a.gguf")


MADE = {  # what a call may name, made anew for it
    **{f.__name__: lambda f=f: f for f in (find, cfg, lm, bpe, chat, folder, file, saved, edited)},
    **{f.__name__: lambda f=f: f for f in (saved_adapter, retensored, cut, tokenizer_file, kv)},
    **{f.__name__: lambda f=f: f for f in (windows, trainer, trained, documents, vit, llava)},
    **{f.__name__: lambda f=f: f for f in (qwen_tower, qwen_vl, bart, after, within, adapted)},
    **{f.__name__: lambda f=f: f for f in (unigram, wrapped, gguf, islice, Path, patch)},
    **{x.__name__: lambda x=x: x for x in (torch, json, minillm)},
    "nn": lambda: nn,
    "np": lambda: numpy,
    "attention": lambda: find("attention", beside="causal_mask"),  # families have one, too
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "zeros": lambda: torch.zeros,
    "tensor": lambda: torch.tensor,
    "meta": lambda: torch.device("meta"),
    "half": lambda: torch.float16,
    "long": lambda: torch.long,
    "q": lambda: torch.zeros(2, 4, 3, 8),
    "k": lambda: torch.zeros(2, 2, 3, 8),
    "v": lambda: torch.zeros(2, 2, 3, 8),
    "x": lambda: torch.zeros(2, 3, 8),
    "ids": lambda: torch.tensor([[1, 2, 3]]),
    "logits": lambda: torch.zeros(2, 5),
    "config": cfg,
    "model": lm,
    "tokenizer": bpe,
}


def named(name):
    """What a call means by a name."""
    if name in MADE:
        return MADE[name]()
    if name in dir(builtins):
        return getattr(builtins, name)
    return getattr(minillm, name) if name in minillm.__all__ else find(name)


NOTHING = "nothing was refused"


def refusal(call, place):
    """Type and message of what a call raises; `place` is the folder where it may write."""
    tree = ast.parse(call, mode="eval")
    own = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is not ast.Load}
    names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - own
    before = os.getcwd()
    os.chdir(place)
    try:
        with warnings.catch_warnings(), patch("os.fsync"):  # nothing here must outlive a crash
            warnings.simplefilter("ignore")
            eval(compile(tree, "call", "eval"), {name: named(name) for name in sorted(names)})
    except Exception as error:  # of whatever type: it is what is compared
        text = str(error).replace(str(Path(place).resolve()), "TMP").replace(str(place), "TMP")
        text = re.sub(r"(?<=[\w.])\\+(?=[\w.])", "/", text)  # as Windows writes a path
        return f"{type(error).__name__}: {text}"
    finally:
        os.chdir(before)
    return NOTHING


def read(path):
    """The calls of a list, and what each raises."""
    found, call = {}, ""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        if line.startswith("    "):
            found[call] = line[4:]
        else:
            call = line
            assert call not in found, f"twice in {path.name}: {call}"
            found[call] = ""
    return found


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_what_is_refused_is_refused_in_the_same_words(path, tmp_path):
    wrong = []
    for number, (call, was) in enumerate(read(path).items()):
        (place := tmp_path / str(number)).mkdir()
        if (now := refusal(call, place)) != was:
            wrong.append(f"{call}\n    was  {was}\n    now  {now}")
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong)


def test_no_list_is_lost():
    assert sum(len(read(path)) for path in LISTS) >= 1900


def test_what_is_not_refused_and_what_python_refuses_are_told(tmp_path):
    assert refusal("attention(q, k, v)", tmp_path) == NOTHING
    assert refusal("1 / 0", tmp_path) == "ZeroDivisionError: division by zero"
    told = refusal("read_json(Path().absolute() / 'x.json')", tmp_path)
    assert told == "FileNotFoundError: TMP has no x.json"


def write():
    """What is raised below every call anew."""
    for path in LISTS:
        lines = []
        for call, was in read(path).items():
            with tempfile.TemporaryDirectory() as place:
                now = refusal(call, Path(place).resolve())
            lines += [call, f"    {now}"]
            if now != was:
                print(f"{call}\n    was  {was}\n    now  {now}")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("Each change has to be justified in the commit.")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
