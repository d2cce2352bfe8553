"""Muon and AdamW as one: the steps are torch's own."""

import math

import pytest
import torch
from torch import nn
from training_runs import TOKENS, C, Killed, Stop, Tiny, V, make, same, tiny

from minillm.deeper.training import distributed
from minillm.deeper.training.checkpoint import (
    load_checkpoint,
    newest_checkpoint,
)
from minillm.deeper.training.muon import MuonAdamW, equalize
from minillm.deeper.training.trainer import RunConfig
from minillm.training import decay_groups


class Untied(nn.Module):
    """Two embeddings, a head of its own, matrices between them, a vector and a stack of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(V, C), nn.Embedding(12, C)
        self.mix, self.wide = nn.Linear(C, C), nn.Linear(C, 3 * C, bias=False)
        self.kernels = nn.Parameter(torch.randn(2, C, 3))
        self.norm = nn.LayerNorm(C)
        self.lm_head = nn.Linear(C, V, bias=False)


def names_of(model, optimizer):
    """The names of the parameters in each group, with the group's decay."""
    names = {p: name for name, p in model.named_parameters()}
    return [
        ({names[p] for p in group["params"]}, group["weight_decay"])
        for group in optimizer.param_groups
    ]


def test_muon_moves_the_matrices_between_embedding_and_head():
    model = Untied()
    optimizer = MuonAdamW(model, decay_groups(model, 0.3), 1e-3, (0.9, 0.95), 1e-8)
    tables = {"embed.weight", "places.weight", "lm_head.weight", "kernels"}
    vectors = {"mix.bias", "norm.weight", "norm.bias"}
    expected = [({"mix.weight", "wide.weight"}, 0.3), (tables, 0.3), (vectors, 0.0)]
    assert names_of(model, optimizer) == expected
    assert [len(o.param_groups) for o in (optimizer.muon, optimizer.adamw)] == [1, 2]
    tied = Tiny()  # the head is the embedding
    optimizer = RunConfig(9, optimizer="muon", warmup_steps=2).make_optimizer(tied)
    expected = [({"mix.weight"}, 0.1), ({"embed.weight"}, 0.1), (vectors, 0.0)]
    assert isinstance(optimizer, MuonAdamW) and names_of(tied, optimizer) == expected
    tied.embed.weight.requires_grad_(False)  # frozen: nobody moves it
    optimizer = MuonAdamW(tied, decay_groups(tied, 0.1), 1e-3, (0.9, 0.95), 1e-8)
    assert names_of(tied, optimizer) == [({"mix.weight"}, 0.1), (vectors, 0.0)]


@pytest.mark.parametrize("width", [C, 12])
def test_muon_leaves_a_head_of_any_name(width):
    """Also where there are as many positions as channels: the blocks stay with Muon."""
    model = Untied()
    model.classify, model.lm_head = model.lm_head, None
    model.places = nn.Embedding(C, C)
    model.blocks = nn.ModuleList([nn.Linear(width, C, bias=False)])
    model.mix = model.wide = None
    optimizer = MuonAdamW(model, decay_groups(model, 0.3), 1e-3, (0.9, 0.95), 1e-8)
    tables = {"embed.weight", "places.weight", "classify.weight", "kernels"}
    assert [names for names, _ in names_of(model, optimizer)][:2] == [{"blocks.0.weight"}, tables]


@pytest.mark.parametrize("kind", [Tiny, Untied])
def test_muon_and_adamw_take_torchs_steps_exactly(kind, generator, monkeypatch):
    """As torch takes them where its Muon does not go over to bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(0)
    ours, theirs = kind(), kind()
    theirs.load_state_dict(ours.state_dict())
    optimizer = MuonAdamW(ours, decay_groups(ours, 0.2), 1e-3, (0.8, 0.95), 1e-7)
    named = dict(theirs.named_parameters())
    matrices = [p for name, p in named.items() if name in ("mix.weight", "wide.weight")]
    vectors = [p for p in named.values() if p.dim() == 1]
    rest = [p for p in named.values() if all(p is not q for q in (*matrices, *vectors))]
    muon = torch.optim.Muon(matrices, lr=1e-3, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": rest, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.95), eps=1e-7, fused=True)
    for i in range(7):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        if i == 3:  # a matrix without gradient stays where it is
            ours.mix.weight.grad = theirs.mix.weight.grad = None
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 1e-3 * (i + 1)
        optimizer.step(), muon.step(), adamw.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(p, q)
    optimizer.zero_grad()
    assert all(p.grad is None for p in ours.parameters())


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8), (1, 30)])
def test_singular_values_come_near_one(shape, generator):
    matrix = torch.randn(shape, generator=generator)
    left, values, right = torch.linalg.svd(equalize(matrix), full_matrices=False)
    assert values.min() > 0.6 and values.max() < 1.3 and values.dtype == torch.float32
    in_its_own = matrix @ right.T @ left.T  # symmetric and positive: the vectors are the same
    torch.testing.assert_close(in_its_own, in_its_own.T, atol=1e-3, rtol=1e-3)
    assert torch.linalg.eigvalsh(in_its_own).min() > -1e-3
    assert not equalize(torch.zeros(shape)).any()


def test_a_step_of_muon_is_as_long_as_one_of_adamw(generator):
    for shape in ((8, 40), (40, 8), (24, 24)):
        model = nn.Sequential(nn.Linear(shape[1], shape[0]))
        optimizer = MuonAdamW(model, decay_groups(model, 0.0), 1e-2, (0.9, 0.95), 1e-8)
        before = model[0].weight.detach().clone()
        model[0].weight.grad = 1e3 * torch.randn(shape, generator=generator)
        optimizer.step()
        moved = (model[0].weight.detach() - before) / 1e-2
        assert 0.1 < moved.pow(2).mean().sqrt() < 0.25
        sizes = torch.linalg.svdvals(moved) / (0.2 * math.sqrt(max(shape)))
        assert sizes.min() > 0.6 and sizes.max() < 1.3


def test_muon_refuses_what_it_cannot_move(monkeypatch):
    def make_one(model):
        return MuonAdamW(model, decay_groups(model, 0.1), 1e-3, (0.9, 0.95), 1e-8)

    for model in (nn.Embedding(5, 4), nn.Linear(4, 4, bias=False), nn.LayerNorm(4)):
        with pytest.raises(ValueError, match="matrices between its embedding and its head"):
            make_one(model)
    monkeypatch.setattr(distributed, "is_sharded", lambda model: True)
    with pytest.raises(ValueError, match="fsdp has shards of them: use ddp"):
        make_one(Tiny())


def test_a_run_with_muon_resumes_exactly(tmp_path):
    whole = make(optimizer="muon", log_interval=1)
    whole.train()
    cut = make(tmp_path / "cut", optimizer="muon")
    cut.train(until=11)
    killed = make(tmp_path / "killed", optimizer="muon", source=Killed(TOKENS, 4, 12, seed=3))
    with pytest.raises(Stop):
        killed.train()
    for name, step in (("cut", 11), ("killed", 10)):
        again = make(tmp_path / name, model=tiny(seed=8), optimizer="muon")
        assert again.resume() and again.step == step
        again.train()
        assert same(again, whole)
    tensors, state = load_checkpoint(newest_checkpoint(tmp_path / "cut"))
    kinds = {name.rpartition("/")[2] for name in tensors["optimizer"]}
    assert kinds == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}
    moments = [name for name in tensors["optimizer"] if name.startswith("mix.weight")]
    assert moments == ["mix.weight/momentum_buffer"]
    assert state["config"]["optimizer"] == "muon"
    plain = make()
    plain.train()
    assert not same(plain, whole)
    assert whole.history[-1]["loss"] < whole.history[0]["loss"]
