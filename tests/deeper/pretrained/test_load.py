"""Checkpoints of every family against transformers: logits, caches, generation, saving."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from family_checkpoints import CONFIGS, make, ragged
from safetensors.torch import load_file, save_file

from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.support.family import FAMILIES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """name -> (folder, transformers' model), made once each."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = (folder, make(name, folder))
        return made[name]

    return get


each_family = pytest.mark.parametrize("name", CONFIGS)


@each_family
@torch.no_grad()
def test_logits_are_those_of_transformers(name, checkpoint):
    folder, theirs = checkpoint(name)
    ours, tokenizer = from_pretrained(folder)
    assert tokenizer is None and not ours.training
    assert ours.num_parameters() == theirs.num_parameters()
    matrices = ours.num_parameters(exclude_embeddings=True)
    assert matrices == theirs.num_parameters(exclude_embeddings=True)
    ids, mask, positions = ragged()
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits
    real = mask.bool()
    torch.testing.assert_close(
        ours(ids, attention_mask=mask)[real], expected[real], atol=1e-5, rtol=1e-5
    )


def test_opening_computes_nothing_that_a_file_overwrites(checkpoint):
    """On the meta device any arithmetic imports torch's compiler, which takes two seconds."""
    folders = [str(checkpoint(name)[0]) for name in CONFIGS]
    code = "import sys\nfrom minillm import from_pretrained\n"
    code += f"for folder in {folders!r}: from_pretrained(folder)\n"
    code += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


SPARSE = [name for name in CONFIGS if name.startswith(("mixtral", "qwen3-moe", "deepseek-experts"))]


@pytest.mark.parametrize("name", SPARSE)
def test_gradients_are_those_of_transformers(name, checkpoint):
    folder, theirs = checkpoint(name)
    ours, found = CausalLM.from_pretrained(folder), []
    ids = ragged()[0].clamp(min=2)  # the padding token's vector is not learned there
    for m in (theirs, ours):
        logits = m(ids).logits if m is theirs else m(ids)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        found.append({k: p.grad for k, p in m.named_parameters()})
    theirs.zero_grad()
    assert found[0].keys() == found[1].keys()
    for key, expected in found[0].items():
        torch.testing.assert_close(found[1][key], expected, atol=1e-5, rtol=1e-5)


@each_family
@torch.no_grad()
def test_cached_logits_one_shot_in_chunks_and_step_by_step(name, checkpoint):
    folder, theirs = checkpoint(name)
    ours = CausalLM.from_pretrained(folder)
    ids, mask, positions = ragged()
    expected = theirs(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    kinds = ["dynamic", "static", "paged"] + (["sliding"] if ours.config.sliding_window else [])
    for kind in kinds:
        for sizes in ([21], [7, 9, 5], [4] + [1] * 17):
            cache, found, end = ours.make_cache(kind, batch_size=3, max_length=32), [], 0
            for size in sizes:
                end += size
                found.append(
                    ours(ids[:, end - size : end], attention_mask=mask[:, :end], cache=cache)
                )
            found = torch.cat(found, 1)[mask.bool()]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# The last product of each branch. Small ones let a token predict itself: dull texts test little.
OUTWARD = ("o_proj.weight", "down_proj.weight", "c_proj.weight", "dense.weight", "4h_to_h.weight")
OUTWARD += ("out_proj.weight",)
NORMED = "post_feedforward_layernorm.weight"  # where there is one, whatever stands before it


NEW = 32  # tokens: past the 32 positions of the scaled rotations, and four windows of 8


@torch.no_grad()
def lively(name, folder):
    """The named model with branches that count, so that what it writes does not repeat itself."""
    theirs = make(name, folder)
    weights = dict(theirs.named_parameters())
    normed = any(key.endswith(NORMED) for key in weights)
    for key, weight in weights.items():
        if key.endswith(NORMED if normed else OUTWARD):
            weight.mul_(30 if normed else 10)
    theirs.generation_config.eos_token_id = None
    theirs.save_pretrained(folder)
    return theirs, CausalLM.from_pretrained(folder)


def by_transformers(theirs, ids, mask, **options):
    """Greedy continuations; row by row where its generate counts padding as positions."""
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    if theirs.config.model_type != "falcon":
        return theirs.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    rows = [row[real.bool()][None] for row, real in zip(ids, mask, strict=True)]
    return torch.cat([theirs.generate(row, **options)[:, row.shape[1] :] for row in rows])


@each_family
@torch.no_grad()
def test_greedy_generation_gives_the_same_ids(name, tmp_path):
    theirs, ours = lively(name, tmp_path)
    ids, mask, _ = ragged()
    expected = by_transformers(theirs, ids, mask)
    assert expected.shape == (3, NEW)
    assert sum(len(set(row)) for row in expected.tolist()) > 8  # else a loop proves nothing
    found = generate(ours, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None)
    assert torch.equal(found[:, : ids.shape[1]], ids)
    assert torch.equal(found[:, ids.shape[1] :], expected)


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "mistral", "qwen3", "gemma"])
@torch.no_grad()
def test_rows_end_where_those_of_transformers_end(name, tmp_path):
    theirs, ours = lively(name, tmp_path)
    ids, mask, _ = ragged()
    end = by_transformers(theirs, ids, mask)[1, 12].item()
    expected = by_transformers(theirs, ids, mask, eos_token_id=end)
    ends = (expected == end).any(1).tolist()
    assert ends[1] and (not all(ends) or expected.shape[1] < NEW)
    found = generate(ours, ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=end)
    assert torch.equal(found[:, ids.shape[1] :], expected)


@each_family
@torch.no_grad()
def test_saved_and_read_back_by_transformers(name, checkpoint, tmp_path):
    folder, theirs = checkpoint(name)
    ours = CausalLM.from_pretrained(folder)
    save_pretrained(ours, None, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids, _, _ = ragged()
    torch.testing.assert_close(again(ids).logits, theirs(ids).logits, atol=0, rtol=0)
    assert CausalLM.from_pretrained(tmp_path).config == ours.config
    assert set(load_file(tmp_path / "model.safetensors")) == set(
        load_file(folder / "model.safetensors")
    )


SHARDED = ["llama-3", "llama-tied", "gpt2", "falcon-new", "deepseek"]
SHARDED += ["mixtral", "qwen3-moe", "deepseek-experts", "mamba", "mamba2", "bamba"]


@pytest.mark.parametrize("name", SHARDED)
def test_shards_are_read_and_written(name, checkpoint, tmp_path):
    _, theirs = checkpoint(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    ours = CausalLM.from_pretrained(tmp_path / "theirs")
    save_pretrained(ours, None, tmp_path / "ours", max_shard_bytes=30_000)
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids, _, _ = ragged()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, theirs(ids).logits, atol=0, rtol=0)
    save_pretrained(ours, None, tmp_path / "ours")  # whole again: no shard of before may stay
    assert [p.name for p in (tmp_path / "ours").glob("*.safetensors*")] == ["model.safetensors"]


def test_a_missing_shard_and_a_lying_index_are_named(checkpoint, tmp_path):
    _, theirs = checkpoint("llama-3")
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    second = sorted(tmp_path.glob("*.safetensors"))[1]
    moved = second.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=second.name):
        from_pretrained(tmp_path)
    moved.rename(second)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.invented.weight"] = second.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.invented\.weight"):
        from_pretrained(tmp_path)
    for places, message in (({"a": "../b.safetensors"}, r"\.\./b"), (["x"], "has no weight_map")):
        index["weight_map"] = places
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            from_pretrained(tmp_path)


@torch.no_grad()
def test_bf16_files_stay_bf16_or_become_what_is_asked(checkpoint, tmp_path):
    _, theirs = checkpoint("llama-3")
    tensors = {k: v.to(torch.bfloat16) for k, v in theirs.state_dict().items()}
    theirs.save_pretrained(tmp_path, state_dict=tensors)
    load = transformers.AutoModelForCausalLM.from_pretrained
    low, same = load(tmp_path, dtype=torch.bfloat16), load(tmp_path, dtype=torch.float32)
    ours, _ = from_pretrained(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    ids, _, _ = ragged()
    torch.testing.assert_close(ours(ids), low(ids).logits, atol=6e-2, rtol=2e-2)
    save_pretrained(ours, None, tmp_path / "again")
    again = load(tmp_path / "again", dtype="auto")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    for tensor, kept in zip(again.parameters(), low.parameters(), strict=True):
        assert torch.equal(tensor, kept)
    high, _ = from_pretrained(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in high.parameters()} == {torch.float32}
    torch.testing.assert_close(high(ids), same(ids).logits, atol=1e-5, rtol=1e-5)


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing: model\.norm\.weight"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), r"unexpected: model\.extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"model\.norm\.weight is \(31,\), the config wants \(32,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.long)}),
            r"model\.norm\.weight holds torch\.int64, not floating-point numbers",
        ),
        (
            lambda t: (
                [t.pop(f"model.layers.{i}.mlp.up_proj.weight") for i in range(2)]
                + [t.update({"b.c": torch.zeros(1), "a": torch.zeros(1)})]
                + [t.update({"lm_head.weight": torch.zeros(96, 32)})]
            ),
            r"missing: model\.layers\.0\.mlp\.up_proj\.weight, "
            r"model\.layers\.1\.mlp\.up_proj\.weight; "
            r"unexpected: a, b\.c; lm_head\.weight is \(96, 32\), the config wants \(97, 32\)$",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message, checkpoint, tmp_path):
    folder, _ = checkpoint("llama-3")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def test_files_that_are_damaged_or_absent(checkpoint, tmp_path):
    folder, _ = checkpoint("qwen2")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        from_pretrained(tmp_path)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        from_pretrained(tmp_path)
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model\.safetensors, but pytorch_model\.bin"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not whole JSON"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "gpt2"}')
    with pytest.raises(ValueError, match="holds the key 'model_type' twice"):
        from_pretrained(tmp_path)


def test_a_head_that_should_be_tied_but_differs(checkpoint, tmp_path):
    folder, _ = checkpoint("qwen2")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    spoil(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    model, _ = from_pretrained(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    spoil(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ValueError, match="lm_head"):
        from_pretrained(tmp_path)


def test_original_gpt2_files_have_no_prefix_and_carry_masks(checkpoint, tmp_path):
    folder, theirs = checkpoint("gpt2")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors = {k.removeprefix("transformer."): v for k, v in tensors.items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128) for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    ids, _, _ = ragged()
    with torch.no_grad():
        found = CausalLM.from_pretrained(tmp_path)(ids)
        torch.testing.assert_close(found, theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    model = CausalLM(ModelConfig(50, 16, 1, 2, 32))
    save_pretrained(model, None, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_pretrained(CausalLM(model.config, seed=1), None, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("add_bos", [False, True])
def test_the_tokenizer_travels_too(add_bos, tmp_path):
    texts = ["one fish, two fish, red fish, blue fish"] * 3
    end = "<|endoftext|>"
    tokenizer = BPETokenizer.train(texts, 280, special_tokens=[end], add_bos=add_bos)
    model = CausalLM(ModelConfig(tokenizer.vocab_size, 16, 1, 2, 32))
    save_pretrained(model, tokenizer, tmp_path)
    _, ours = from_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("two blue fish", "été, 鱼\n"):
        ids = tokenizer.encode(text)
        assert ours.encode(text) == theirs.encode(text) == ids
        assert (ids[0] == tokenizer.eos_token_id) == add_bos
        alone = tokenizer.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == alone == ids[add_bos:]
        assert theirs.encode(text, add_special_tokens=False) == alone
        assert theirs.decode(alone) == ours.decode(alone) == text
        assert theirs.decode(ids, skip_special_tokens=True) == text
        assert ours.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", ["rwkv", "gpt_neox", None])
def test_an_unknown_architecture_is_refused_with_all_that_are_known(kind, checkpoint, tmp_path):
    folder, _ = checkpoint("llama-3")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    with pytest.raises(ValueError, match=f"unknown model_type {kind!r}; known are") as caught:
        from_pretrained(tmp_path)
    known, _, nearest = str(caught.value).split("known are ")[1].partition("; nearest is ")
    assert set(known.split(", ")) == {
        *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "falcon", "deepseek_v3"),
        *("mixtral", "qwen3_moe", "mamba", "mamba2", "bamba", "gemma3_text", "smollm3"),
        *("olmo2", "olmo3", "gpt_oss", "qwen3_5_text"),
    }
    assert not nearest or nearest in FAMILIES


@torch.no_grad()
def test_padding_on_the_left_may_hold_anything(checkpoint):
    ids, mask, _ = ragged()
    other = torch.where(mask.bool(), ids, 96)
    for name in ("gpt2", "llama-3", "mistral", "falcon-new", "deepseek"):
        model = CausalLM.from_pretrained(checkpoint(name)[0])
        found = model(other, attention_mask=mask)[mask.bool()]
        torch.testing.assert_close(found, model(ids, attention_mask=mask)[mask.bool()])
        alone = model(ids[1:2, 6:])
        torch.testing.assert_close(found[21 : 21 + 15], alone[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_device_and_dtype_as_asked(checkpoint):
    folder, _ = checkpoint("llama-tied")
    model, _ = from_pretrained(folder, device="cpu", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.bfloat16)}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training and model(ragged()[0]).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["gpt2", "falcon-new"])
def test_a_loaded_model_is_trained_as_any_other(name, checkpoint):
    """Fused optimizers walk through memory: pieces of one tensor must not lie in each other."""
    moved = []
    for fused in (False, True):
        model, _ = from_pretrained(checkpoint(name)[0])
        assert all(p.is_contiguous() for p in model.parameters())
        model(ragged()[0]).square().mean().backward()
        torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused).step()
        moved.append(dict(model.named_parameters()))
    for key in moved[0]:
        torch.testing.assert_close(moved[1][key], moved[0][key], atol=1e-6, rtol=1e-5)


def test_saving_removes_its_own_old_files_and_no_others(checkpoint, tmp_path):
    kept = ["model-best.safetensors", "model.fp16.safetensors", "model_ema.safetensors"]
    for name in [*kept, "model-00001-of-00002.safetensors"]:
        (tmp_path / name).touch()
    save_pretrained(CausalLM.from_pretrained(checkpoint("llama-3")[0]), None, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == sorted(
        [*kept, "model.safetensors"]
    )


@pytest.mark.parametrize(
    ("family", "change", "lost"),
    [
        ("gpt2", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("gpt2", {"head_dim": 16}, "head_dim=16"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"sliding_window": 4}, "sliding_window=4"),
        ("gemma", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_no_file_of_the_family_can_say_is_not_saved(family, change, lost, tmp_path):
    config = ModelConfig(97, 32, 2, 4, 48, model_type=family, **change)
    with pytest.raises(ValueError, match=f"{family} config.json has no place for .*{lost}"):
        save_pretrained(CausalLM(config), None, tmp_path / "o")
    assert not (tmp_path / "o").exists()


@torch.no_grad()
@pytest.mark.parametrize("name", ["gelu_tanh", "gelu_sigmoid", "relu_squared", "gelu", "swish"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_activations_are_saved_under_names_that_transformers_knows(family, name, tmp_path):
    config = ModelConfig(
        97, 32, 2, 4, 48, model_type=family, hidden_act=name, initializer_range=0.3
    )
    model, (ids, _, _) = CausalLM(config).eval(), ragged()
    save_pretrained(model, None, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_compiled_model_is_saved_as_itself(checkpoint, tmp_path):
    folder, _ = checkpoint("llama-tied")
    model, _ = from_pretrained(folder)
    save_pretrained(torch.compile(model, backend="eager"), None, tmp_path)
    torch.testing.assert_close(CausalLM.from_pretrained(tmp_path)(ragged()[0]), model(ragged()[0]))


@torch.no_grad()
def test_files_that_mix_dtypes_come_in_one(checkpoint, tmp_path):
    shutil.copytree(checkpoint("llama-3")[0], tmp_path, dirs_exist_ok=True)

    def change(tensors):
        for key in [k for k in tensors if "norm" not in k]:
            tensors[key] = tensors[key].bfloat16()

    spoil(tmp_path, change)
    path = tmp_path / "config.json"
    data = json.loads(path.read_text())
    for said, wanted in (("float16", torch.float16), (None, torch.bfloat16)):
        path.write_text(json.dumps({**data, "dtype": said}))
        model, _ = from_pretrained(tmp_path)
        assert {p.dtype for p in model.parameters()} == {wanted}
        assert model(ragged()[0]).dtype == wanted


def test_dtypes_have_names(checkpoint):
    folder, _ = checkpoint("llama-3")
    for name, wanted in (("bfloat16", torch.bfloat16), ("auto", torch.float32)):
        model, _ = from_pretrained(folder, dtype=name)
        assert {p.dtype for p in model.parameters()} == {wanted}
    for name in ("half-life", "nn", "int32"):
        with pytest.raises(ValueError, match=f"unknown dtype '{name}' for weights"):
            from_pretrained(folder, dtype=name)


def test_more_end_tokens_for_generation(tmp_path):
    """Chat models end with tokens that only generation_config.json tells."""
    theirs, (ids, mask, _) = make("llama-3", tmp_path), ragged()
    free = generate(CausalLM.from_pretrained(tmp_path), ids, attention_mask=mask, max_new_tokens=12)
    theirs.generation_config.eos_token_id = [1, free[0, -5].item()]
    theirs.generation_config.save_pretrained(tmp_path)
    ours = CausalLM.from_pretrained(tmp_path)
    assert ours.config.eos_token_ids == tuple(theirs.generation_config.eos_token_id)
    options = {"attention_mask": mask, "max_new_tokens": 12}
    expected = theirs.generate(ids, do_sample=False, pad_token_id=0, **options)
    found = generate(ours, ids, **options)
    assert torch.equal(found[:, : expected.shape[1]], expected)
    assert found.shape == expected.shape


def test_layers_that_no_file_holds_are_named_before_a_model_is_made(
    checkpoint, tmp_path, monkeypatch
):
    shutil.copytree(checkpoint("llama-3")[0], tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    monkeypatch.setattr("minillm.deeper.pretrained.folder.empty_model", None)
    for layers in (3, 20_000, 10**9):
        content = json.dumps({**data, "num_hidden_layers": layers})
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        message = rf"missing: model\.layers\.2 .* there are {layers}, and weights of 2"
        with pytest.raises(ValueError, match=message):
            from_pretrained(tmp_path)


def test_sizes_that_no_tensor_can_have(checkpoint, tmp_path):
    shutil.copytree(checkpoint("llama-3")[0], tmp_path, dirs_exist_ok=True)
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for change in ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 4}, {"head_dim": 2**31 - 2}):
        (tmp_path / "config.json").write_text(json.dumps({**data, **change}), encoding="utf-8")
        with pytest.raises(ValueError, match=r"no model can be made|the largest weight"):
            from_pretrained(tmp_path)


def test_a_weight_in_two_shards_and_an_index_that_is_wrong(checkpoint, tmp_path):
    _, theirs = checkpoint("llama-3")
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    places = index["weight_map"]
    first, last = "model.layers.0.input_layernorm.weight", "model.norm.weight"
    assert places[first] != places[last]
    swapped = {**places, first: places[last], last: places[first]}
    path.write_text(json.dumps({**index, "weight_map": swapped}), encoding="utf-8")
    message = rf"wrong on 2 tensors: {first} to be in {places[last]}, and {places[first]} holds it"
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)
    for strange in ("", ".", "..", "config.json", 5, None, ["a"], "/etc/x.safetensors"):
        content = {**index, "weight_map": {**places, first: strange}}
        path.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(ValueError, match="names what is no file of its folder"):
            from_pretrained(tmp_path)
    (tmp_path / "f.safetensors").mkdir()
    content = {**index, "weight_map": {**places, first: "f.safetensors"}}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=r"lacks f\.safetensors, which its index names"):
        from_pretrained(tmp_path)
    path.write_text(json.dumps(index), encoding="utf-8")
    shard = tmp_path / places[last]
    tensors = {**load_file(shard), first: torch.ones(32)}
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"holds {first} twice, in model-0.* and in model-0"):
        from_pretrained(tmp_path)
