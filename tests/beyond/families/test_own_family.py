"""A family that a user adds to the table: its parts train, generate, save and load like ours."""

import copy
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minillm.attention import attention
from minillm.config import ModelConfig
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.training.trainer import Trainer
from minillm.generation import generate
from minillm.heads import MultiHeadAttention, merge_heads, split_heads
from minillm.model import CausalLM, llama_mlp, make_part
from minillm.support.checks.kinds import POSITIVE
from minillm.support.family import FAMILIES, Family
from minillm.training import TrainConfig, WindowBatches

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


class DifferenceOfTwo(nn.Module):
    """Two attentions to the same values, one subtracted: a key is twice as long as a value."""

    def __init__(self, c):
        super().__init__()
        H, D = self.heads, self.size = c.num_attention_heads, c.head_dim
        self.q_proj, self.k_proj = (nn.Linear(c.hidden_size, 2 * H * D) for _ in "qk")
        self.v_proj, self.o_proj = nn.Linear(c.hidden_size, H * D), nn.Linear(H * D, c.hidden_size)
        self.share = nn.Parameter(torch.empty(H, 1, 1))
        self.cache_shape = (H, 2 * D, D)

    def draw(self, generator):
        self.share.fill_(0.5)

    def forward(self, x, *, rope=None, mask=None, is_causal=False, cache=None):
        q, k = (split_heads(p(x), 2 * self.heads) for p in (self.q_proj, self.k_proj))
        q, k = (rope(y).unflatten(1, (self.heads, 2)) for y in (q, k))  # (B, H, 2, T, D)
        k, v = k.transpose(2, 3).flatten(3), split_heads(self.v_proj(x), self.heads)
        if cache is not None:
            k, v = cache.update(k, v)
        first, second = k.chunk(2, dim=-1)
        given = {"mask": mask, "is_causal": is_causal}
        y = attention(q[:, :, 0], first, v, **given)
        y = y - self.share * attention(q[:, :, 1], second, v, **given)
        return self.o_proj(merge_heads(y))


class SquaredReLU(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.number = layer
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Reversed(nn.Module):
    """The feed-forward block first, then attention."""

    def __init__(self, c, layer):
        super().__init__()
        self.norm1, self.norm2 = make_part("norm", c), make_part("norm", c)
        self.mlp, self.self_attn = make_part("mlp", c, layer), make_part("attention", c)

    def forward(self, x, **given):
        x = x + self.mlp(self.norm1(x))
        return x + self.self_attn(self.norm2(x), **given)


def windowed_norm(c):
    return nn.LayerNorm(c.hidden_size, eps=c.rms_norm_eps, bias=False)


@dataclass(frozen=True)
class MyConfig(ModelConfig):
    """Keys of one's own, beside Llama's."""

    rms_norm_eps: float = 1e-4  # its own default
    sharpness: float = 2.0

    kinds: ClassVar = {**ModelConfig.kinds, "sharpness": POSITIVE}


MINE = {
    "attention": Family(attention=DifferenceOfTwo),
    "mlp": Family(mlp=SquaredReLU),
    "norm": Family(config=MyConfig, norm=windowed_norm),
    "layer": Family(layer=Reversed),
    "all": Family(norm=windowed_norm, attention=DifferenceOfTwo, mlp=SquaredReLU, layer=Reversed),
}


@pytest.fixture(params=MINE)
def config(request, monkeypatch):
    monkeypatch.setitem(FAMILIES, "mine", MINE[request.param])
    return ModelConfig(**SIZES, intermediate_size=24, model_type="mine", sliding_window=12)


def ids(rows=2, length=9):
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(1))


def test_its_parts_are_in_the_model(config):
    lm, family = CausalLM(config), FAMILIES["mine"]
    layer = lm.model.layers[1]
    assert type(layer.self_attn) is (family.attention or MultiHeadAttention)
    assert type(layer.mlp) is (family.mlp or type(llama_mlp(config, 0)))
    assert getattr(layer.mlp, "number", 1) == 1  # which layer it is for
    assert type(lm.model.norm) is type(make_part("norm", config))
    if family.attention:
        assert (layer.self_attn.share == 0.5).all()  # its own first values, not the model's


def test_it_trains(config):
    torch.manual_seed(0)
    text = torch.arange(400) % 40
    lm = CausalLM(config)
    before = [p.clone() for p in lm.parameters()]
    trainer = Trainer(
        lm, WindowBatches(text, 4, 16), TrainConfig(60, max_lr=1e-2, warmup_steps=5), progress=False
    )
    history = trainer.train()
    assert history[-1]["loss"] < history[0]["loss"] / 3
    assert all(not torch.equal(a, b) for a, b in zip(before, lm.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding", "paged", "quantized"])
def test_it_generates_with_every_cache(config, kind):
    lm = CausalLM(config).eval()
    full = ids(2, 20)
    expected = lm(full)
    cache = lm.make_cache(kind, batch_size=2, max_length=20)
    pieces = [lm(piece, cache=cache) for piece in full.split([9, 1, 1, 4, 5], dim=1)]
    tolerance = 0.05 if kind == "quantized" else 1e-5
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=tolerance)
    if kind != "quantized":
        said = generate(lm, full[:, :4], max_new_tokens=6, cache=kind)
        for t in range(4, 10):
            assert torch.equal(said[:, t], lm(said[:, :t])[:, -1].argmax(-1))


def test_padding_on_the_left_changes_nothing(config):
    lm, text = CausalLM(config).eval(), ids(1, 7)
    mask = torch.tensor([[0, 0, 0] + [1] * 7])
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), text], dim=1)
    torch.testing.assert_close(lm(padded, attention_mask=mask)[:, 3:], lm(text))


def test_it_is_saved_and_read_by_a_program_that_knows_it(config, tmp_path):
    lm = CausalLM(config, seed=3).eval()
    save_pretrained(lm, None, tmp_path)
    again, _ = from_pretrained(tmp_path)
    assert again.config == config
    assert torch.equal(again(ids()), lm(ids()))
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert torch.equal(other(ids()), lm(ids()))
    code = f"from minillm import from_pretrained; from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "unknown model_type 'mine'; known are llama" in done.stderr.splitlines()[-1]


def test_a_key_that_nobody_reads_is_named(config):
    with pytest.warns(UserWarning, match="not used: wings"):
        ModelConfig.from_dict({**config.to_dict(), "wings": 2})


def test_what_cannot_be_packed_says_so(config):
    with pytest.raises(ValueError, match=r"mine .*cannot be packed"):
        CausalLM(config).packed()


@pytest.mark.parametrize("wrong", ["minillm.layers:Nothing", "nowhere:attention", "no_such_module"])
def test_a_family_that_is_not_there(monkeypatch, wrong):
    monkeypatch.setitem(FAMILIES, "mine", wrong)
    with pytest.raises(ValueError, match=f"no family '{wrong}' for mine"):
        ModelConfig(**SIZES, intermediate_size=24, model_type="mine")


def test_a_family_of_llamas_parts_is_packed_and_another_one_of_that_name_is_not(monkeypatch):
    """What can be packed is seen by its parts, whatever the family is called."""
    monkeypatch.setitem(FAMILIES, "mine", Family())
    lm = CausalLM(ModelConfig(**SIZES, intermediate_size=24, model_type="mine")).eval()
    torch.testing.assert_close(lm.packed("linear")(ids()), lm(ids()))
    monkeypatch.setitem(FAMILIES, "llama", Family(attention=DifferenceOfTwo))
    lm = CausalLM(ModelConfig(**SIZES, intermediate_size=24))
    with pytest.raises(ValueError, match=r"llama with silu cannot be packed: layers\.0\.self_attn"):
        lm.packed()
