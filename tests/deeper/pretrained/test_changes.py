"""What was changed in a model by hand is in no file and no packed copy: it is refused by name."""

import copy
import inspect
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from qwen_vl_checkpoints import pair as qwen_vl_pair
from seq2seq_checkpoints import pair as seq2seq_pair
from torch import nn
from torch.nn.utils import parametrizations
from vision_checkpoints import LLAVAS, TOWERS, make_llava, make_tower, save

import minillm.layers as layers
from minillm.beyond.lora.adapters import add_lora, merge
from minillm.beyond.pictures.pictures import PictureLM
from minillm.beyond.pictures.vision import VisionTransformer
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.generation import generate
from minillm.heads import MultiHeadAttention
from minillm.layers import ACTIVATIONS, GatedMLP, RMSNorm
from minillm.model import CausalLM
from minillm.rope import RotaryEmbedding


def small(kind="llama", **changes):
    options = {"num_key_value_heads": 2, "model_type": kind, "initializer_range": 0.2}
    return CausalLM(ModelConfig(61, 16, 2, 4, 24, **{**options, **changes})).eval()


class Attention(MultiHeadAttention):
    def forward(self, x, **options):
        return super().forward(x, **options) * 0


class MLP(GatedMLP):
    def forward(self, x):
        return x


class Norm(RMSNorm):
    def forward(self, x):
        return x


class Linear(nn.Linear):
    def forward(self, x):
        return super().forward(x).round()


class Embedding(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids).round()


class Rotary(RotaryEmbedding):
    def forward(self, positions):
        return super().forward(positions * 2)


class Head(CausalLM):
    def run(self, *args, **options):
        return super().run(*args, **options) * 2


def as_(kind):
    """Make a part one of another class, with the same weights and settings."""

    def change(part):
        part.__class__ = kind

    return change


def with_value(name, value):
    return lambda part: setattr(part, name, value)


def with_forward(part):
    part.forward = lambda *args, **options: args[0]


LAYER = "model.layers.1"
FOREIGN = {
    "attention": (f"{LAYER}.self_attn", as_(Attention), r"is a .*Attention, .*MultiHeadAttention"),
    "mlp": (f"{LAYER}.mlp", as_(MLP), r"is a .*MLP, its config makes a .*GatedMLP"),
    "norm": (f"{LAYER}.input_layernorm", as_(Norm), r"is a .*Norm, .*\.RMSNorm"),
    "last norm": ("model.norm", as_(Norm), r"is a .*Norm, .*\.RMSNorm"),
    "embedding": ("model.embed_tokens", as_(Embedding), r"is a .*, .*\.Embedding"),
    "rotary": ("model.rotary", as_(Rotary), r"is a .*Rotary, .*\.RotaryEmbedding"),
    "head": ("lm_head", as_(Linear), r"is a .*\.Linear, .*torch.*\.Linear"),
    "linear": (f"{LAYER}.mlp.up_proj", as_(Linear), r"is a .*\.Linear, .*torch.*\.Linear"),
    "model": ("", as_(Head), r"is a .*Head, .*CausalLM"),
    "forward of the model": ("", with_forward, "has its own forward"),
    "forward of a layer": (LAYER, with_forward, "has its own forward"),
    "run": ("", with_value("run", lambda *args: None), "has its own run"),
    "embed": ("model", with_value("embed", lambda *args: None), "has its own embed"),
    "scale": (f"{LAYER}.self_attn", with_value("scale", 1.0), r"scale=1.0, its config says 0.5"),
    "eps": (f"{LAYER}.input_layernorm", with_value("eps", 0.1), "eps=0.1, its config says 1e-0"),
    "offset": (f"{LAYER}.input_layernorm", with_value("offset", 1.0), "offset=1.0, .* 0.0"),
    "activation": (f"{LAYER}.mlp", with_value("activation", F.gelu), "activation=.*gelu"),
    "interleaved": ("model.rotary", with_value("interleaved", True), "interleaved=True, .*False"),
    "angles": ("model.rotary", lambda part: part.inv_freq.mul_(0.5), "has another inv_freq"),
    "q_norm": (f"{LAYER}.self_attn.q_norm", as_(Norm), "is a .*Norm"),
    "extra layer": (
        "model.layers",
        lambda part: part.append(nn.Identity()),
        r"\.2 is a .*makes no",
    ),
}


def changed(name):
    part, change, message = FOREIGN[name]
    stretched = (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}} if name == "interleaved" else {}
    )
    model = small("qwen3" if name == "q_norm" else "llama", **stretched)
    before = copy.deepcopy(model)
    change(model.get_submodule(part))
    return model, before, f"{part or 'the model'}.* ?{message}"


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_part_is_neither_packed_nor_saved(name, tmp_path):
    model, before, message = changed(name)
    before.packed("linear")
    save_pretrained(before, None, tmp_path / "before")
    with pytest.raises(ValueError, match=f"^{message}.*: packed.* copies matrices"):
        model.packed("linear")
    with pytest.raises(ValueError, match=f"^{message}.*: read back .* another one"):
        save_pretrained(model, None, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_matrices_that_are_made_when_they_are_used(tmp_path):
    model = small()
    parametrizations.weight_norm(model.lm_head)
    with pytest.raises(ValueError, match=r"^lm_head is a .*ParametrizedLinear, .*: packed"):
        model.packed("linear")
    with pytest.raises(ValueError, match=r"cannot be saved.* not known: lm_head.parametrizations"):
        save_pretrained(model, None, tmp_path)


HOOKS = ["register_forward_hook", "register_forward_pre_hook"]


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("part", ["", "model.layers.1.self_attn", "model.layers.0.mlp.down_proj"])
def test_what_a_hook_does_is_not_packed(register, part, tmp_path):
    model = small()
    handle = getattr(model.get_submodule(part), register)(lambda *args: None)
    with pytest.raises(ValueError, match=f"^{part or 'the model'} has a forward hook: packed"):
        model.packed("linear")
    save_pretrained(model, None, tmp_path)  # a hook that looks, and the weights are all there
    handle.remove()
    model.packed("linear")


@pytest.mark.parametrize("register", HOOKS)
def test_a_hook_for_all_modules_is_not_packed(register):
    model = small()
    handle = getattr(nn.modules.module, register.replace("_", "_module_", 1))(lambda *args: None)
    try:
        with pytest.raises(ValueError, match="forward hook for all modules"):
            model.packed("linear")
    finally:
        handle.remove()
    model.packed("linear")


def test_the_same_story_or_none():
    """Without its attention a model tells another story, which the packed one must not hide."""
    model, ids = small(), torch.tensor([[3, 5, 8]])
    options = {"max_new_tokens": 12, "eos_token_id": None}
    packed = model.packed("linear")
    story = generate(model, ids, **options)
    assert torch.equal(generate(packed, ids, **options), story)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda part, args, output: output * 0)
    assert not torch.equal(generate(model, ids, **options), story)
    for again in (model, packed):  # a packed model has the same parts
        with pytest.raises(ValueError, match=r"layers\.0\.self_attn has a forward hook"):
            again.packed("linear")


def test_what_changes_no_score_may_be_set(tmp_path):
    model = small().train()
    model.config = replace(model.config, eos_token_id=7)
    model.model.layers[0].self_attn.dropout = 0.3
    with pytest.warns(UserWarning, match="position 999999 lies beyond"):
        model.model.rotary(torch.tensor([[10**6 - 1]]))
    model.note = "mine"
    model.model.layers[0].compile(backend="eager")
    for again in (model, copy.deepcopy(model), copy.deepcopy(small(hidden_act="swish"))):
        again.packed("linear")
        save_pretrained(again, None, tmp_path)


def test_activations_are_compared_as_functions(tmp_path, monkeypatch):
    gelu = copy.deepcopy(small("gpt2", num_key_value_heads=None, hidden_act="gelu_new"))
    save_pretrained(gelu, None, tmp_path)  # a copy has a copy of the partial function
    monkeypatch.setitem(ACTIVATIONS, "silu", torch.tanh)
    with pytest.raises(ValueError, match=r"llama with silu.* cannot be packed"):
        small().packed("linear")


def test_a_tied_head_that_has_left_its_embedding(tmp_path):
    model = small(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    save_pretrained(model, None, tmp_path)  # two tensors, one matrix
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 1
    with pytest.raises(ValueError, match=r"^lm_head.weight differs from model.embed_tokens.weight"):
        save_pretrained(model, None, tmp_path)


def on_a_page(file, *change):
    """GatedMLP as a notebook defines it, in `__main__`, and reopens it; or with other lines."""
    more = "\n\nclass GatedMLP(GatedMLP):\n    def more(self): ...\n"
    source = (inspect.getsource(GatedMLP) + more).replace(*change or ("", ""))
    file.write_text(source, encoding="utf-8")
    names = {**vars(layers), "__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    return names["GatedMLP"]


@pytest.mark.parametrize(
    "change",
    [(") * self.up", ") + self.up"), ("def more(self)", "def forward(self, x)")],
)
def test_the_class_of_a_page_counts_if_it_has_the_same_lines(change, tmp_path):
    model = small()
    model.model.layers[1].mlp.__class__ = on_a_page(tmp_path / "same.py")
    model.packed("linear")
    save_pretrained(model, None, tmp_path)
    model.model.layers[1].mlp.__class__ = on_a_page(tmp_path / "other.py", *change)
    with pytest.raises(ValueError, match=r"layers.1.mlp is a __main__.GatedMLP, its config makes"):
        save_pretrained(model, None, tmp_path)


def test_sizes_that_the_config_does_not_say(tmp_path):
    model = small()
    model.model.embed_tokens.weight = nn.Parameter(torch.randn(64, 16))
    with pytest.raises(ValueError, match=r"embed_tokens has weight \(64, 16\), .* \(61, 16\)"):
        save_pretrained(model, None, tmp_path)
    model = small()
    del model.model.layers[1]
    with pytest.raises(ValueError, match=r"model.layers.1 is not there"):
        model.packed("linear")


def test_merged_adapters_and_packed_models_are_saved_and_looked_at(tmp_path):
    model = small()
    add_lora(model, 2, 4)
    merge(model)
    packed = model.packed("linear")
    for whole in (model, packed):
        save_pretrained(whole, None, tmp_path)
    found, ids = from_pretrained(tmp_path)[0], torch.tensor([[3, 5, 8]])
    torch.testing.assert_close(found(ids), model(ids))
    model.model.layers[1].self_attn.scale = 2.0  # behind the back of its packed copy
    for whole in (model, packed):
        with pytest.raises(ValueError, match=r"^model.layers.1.self_attn has scale=2.0"):
            save_pretrained(whole, None, tmp_path)


def others(folder):
    """One of each kind of model that is no CausalLM, and the name of a part to change."""
    tower, llava = make_tower(next(iter(TOWERS))), make_llava(next(iter(LLAVAS)))
    yield VisionTransformer.from_pretrained(save(tower, folder / "tower")), "layers.0.mlp"
    text = "language_model.model.layers.0.mlp"
    yield PictureLM.from_pretrained(save(llava, folder / "llava")), text
    yield seq2seq_pair("marian", folder / "marian")[1], "decoder.layers.0.fc1"
    yield qwen_vl_pair("plain", folder / "qwen")[1], "language.model.layers.0.mlp"


def test_other_kinds_of_models_are_saved_as_their_configs_make_them_or_not_at_all(tmp_path):
    for number, (model, part) in enumerate(others(tmp_path)):
        copy.deepcopy(model).save_pretrained(tmp_path / f"good {number}")
        with_forward(model.get_submodule(part))
        with pytest.raises(ValueError, match=rf"^{part} has its own forward"):
            model.save_pretrained(tmp_path / f"bad {number}")
        assert not (tmp_path / f"bad {number}").exists()
