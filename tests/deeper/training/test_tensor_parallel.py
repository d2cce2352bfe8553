"""Layers cut over two processes on gloo give the numbers of one; what cannot be cut is named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_runs import two_processes

from minillm.beyond.export.step import export_step
from minillm.cli.main import main
from minillm.config import ModelConfig
from minillm.deeper.fast.small import int8_copy, prune_vocabulary
from minillm.deeper.pretrained.load import save_pretrained
from minillm.deeper.training import distributed
from minillm.deeper.training.tensor_parallel import check_tensor_parallel, parallelize
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.model import CausalLM

SMALL = {"vocab_size": 29, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 72}
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 10},
    "gpt2": {"model_type": "gpt2", "num_key_value_heads": 4},
    "falcon": {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
}

OPTIONS = """
    --steps 4 --device cpu --hidden-size 32 --layers 2 --heads 4 --kv-heads 2 --family qwen3
    --batch-size 4 --eval-interval 0 --held-out 2 --lr 6e-3 --warmup 2 --log-interval 1 --quiet
    --gradient-accumulation-steps 2 --checkpoint-interval 2 --parallel tensor
""".split()

TEXTS = ["--device", "cpu", "--count", "2", "--max-new-tokens", "6"]

WORKER = """
    import contextlib, faulthandler, io, os
    import torch
    faulthandler.dump_traceback_later(200, exit=True)  # whoever waits in vain says where
    torch.set_num_threads(1)
    from torch.distributed.tensor.debug import CommDebugMode
    from minillm.cli.main import main
    from minillm.config import ModelConfig
    from minillm.generation import generate
    from minillm.model import CausalLM
    from minillm.deeper.training import distributed
    from minillm.deeper.training.tensor_parallel import parallelize

    small, families, commands = arguments
    distributed.start("cpu")
    distributed.stop = lambda: None  # one group serves all

    def made(changes):
        model = CausalLM(ModelConfig(**{**small, **changes}), seed=3).double()
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype))
        return model

    found = {}
    ids = torch.randint(29, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    for kind, changes in families.items():
        one, two = made(changes), parallelize(made(changes))
        wanted = one(ids, attention_mask=mask)[mask.bool()]
        wanted.square().sum().backward()
        with CommDebugMode() as forward:
            logits = two(ids, attention_mask=mask)[mask.bool()]
        with CommDebugMode() as backward:
            logits.square().sum().backward()
        error, theirs = 0.0, dict(two.named_parameters())
        for name, p in one.named_parameters():
            off = (theirs[name].grad.full_tensor() - p.grad).abs().max().item()
            error = max(error, off / (1 + p.grad.abs().max().item()))
        counts = [dict(mode.get_comm_counts()) for mode in (forward, backward)]
        assert all("all_reduce" in str(k) for c in counts for k in c), counts
        texts = [generate(m, ids, attention_mask=mask, max_new_tokens=3) for m in (one, two)]
        cache = two.make_cache("static", batch_size=2, max_length=9)
        found[kind] = {
            "logits": (logits - wanted).abs().max().item(),
            "gradients": error,
            "sums": [sum(c.values()) for c in counts],
            "same text": torch.equal(*texts),
            "cached heads": cache[0].allocate(1)[0].shape[1],
            "weights": sum(p.to_local().numel() for p in two.parameters()),
        }
    try:
        parallelize(CausalLM(ModelConfig(**{**small, "num_key_value_heads": 1})))
    except ValueError as error:
        found["error"] = str(error)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found["codes"] = [main(argv) for argv in commands]
    pipe.send((found, said.getvalue()))
    distributed.barrier()
    os._exit(0)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of one process; the same in two; each resumed from its middle by the other."""
    folder = tmp_path_factory.mktemp("runs")

    def train(out, *more):
        return ["train", "--output-dir", str(folder / out), *OPTIONS, *more]

    assert main(train("one")) == 0
    tokenizer = ["--tokenizer", str(folder / "one")]
    shutil.copytree(folder / "one", folder / "one, then two")
    shutil.rmtree(folder / "one, then two" / "step-00000004")
    commands = [
        train("two", *tokenizer),
        train("one, then two", *tokenizer, "--resume"),
        ["generate", str(folder / "one"), "--parallel", "tensor", *TEXTS],
    ]
    found = two_processes(WORKER, SMALL, FAMILIES, commands)
    shutil.copytree(folder / "two", folder / "two, then one")
    shutil.rmtree(folder / "two, then one" / "step-00000004")
    assert main(train("two, then one", "--resume")) == 0
    return folder, found


def curve(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_gradients_and_texts_are_those_of_one_process(runs, kind):
    for found, _ in runs[1]:
        assert found[kind]["logits"] < 1e-12
        assert found[kind]["gradients"] < 1e-12
        assert found[kind]["same text"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_one_sum_ends_each_block(runs, kind):
    layers, norms = SMALL["num_hidden_layers"], 2 if kind == "qwen3" else 0
    for found, _ in runs[1]:
        forward, backward = found[kind]["sums"]
        assert forward == 2 * layers  # attention, feed-forward
        assert backward == 2 * layers + norms * layers  # and the weights of norms in the heads


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_process_holds_half_of_the_layers_and_of_the_cache(runs, kind):
    config = ModelConfig(**{**SMALL, **FAMILIES[kind]})
    model = CausalLM(config)
    cut = sum(
        p.numel()
        for name, p in model.named_parameters()
        if "_proj" in name and not name.endswith(("o_proj.bias", "down_proj.bias"))
    )
    for found, _ in runs[1]:
        assert found[kind]["weights"] == model.num_parameters() - cut // 2
        assert found[kind]["cached heads"] == config.num_key_value_heads // 2


def test_heads_that_two_processes_cannot_share_are_refused_in_both(runs):
    errors = {found["error"] for found, _ in runs[1]}
    assert errors == {"2 processes cannot share 1 key/value heads equally"}


@pytest.mark.parametrize("kind", ["two", "one, then two", "two, then one"])
def test_training_gives_the_curve_and_the_files_of_one_process(runs, kind):
    folder, found = runs
    assert [f["codes"] for f, _ in found] == [[0, 0, 0]] * 2
    one, other = curve(folder / "one"), curve(folder / kind)
    assert [r["step"] for r in other] == [1, 2, 3, 4]
    for a, b in zip(one, other, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert b["tokens"] == a["tokens"]
    files = ["model.safetensors", "step-00000004/model.safetensors"]
    for name in [*files, "step-00000004/optimizer.safetensors"]:
        ours, theirs = (load_file(folder / k / name) for k in ("one", kind))
        assert ours.keys() == theirs.keys()
        # means of gradients differ in rounding alone; weights by part of a step's length, 6e-3,
        # since Adam divides rounding by rounding where a gradient is next to nothing
        near = 2e-6 if "optimizer" in name else 6e-5
        for key in ours:
            assert theirs[key].dtype == ours[key].dtype
            torch.testing.assert_close(theirs[key], ours[key], rtol=1e-3, atol=near)


def test_the_first_process_prints_the_texts_of_one(runs, capsys):
    folder, found = runs
    capsys.readouterr()
    assert main(["generate", str(folder / "one"), *TEXTS]) == 0
    alone = capsys.readouterr().out
    (_, first), (_, second) = found
    assert alone.rstrip("\n") in first
    assert not second


@pytest.fixture
def two_in_name():
    """A group that this process believes to have two members; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_part_of_a_model_is_not_saved_exported_packed_or_squeezed(two_in_name, tmp_path):
    model = parallelize(CausalLM(ModelConfig(**SMALL)))
    with pytest.raises(ValueError, match=r"sharded: gather it with distributed.whole_tensors"):
        save_pretrained(model, None, tmp_path / "saved")
    for way in (int8_copy, CausalLM.packed, lambda m: export_step(m, max_length=4)):
        with pytest.raises(ValueError, match="only a part of the model"):
            way(model)
    with pytest.raises(ValueError, match="only a part of the model"):
        prune_vocabulary(model, None, [1])


# one process


def test_alone_in_the_world_nothing_is_cut_or_sent():
    model = CausalLM(ModelConfig(**SMALL))
    assert parallelize(model) is model
    assert distributed.wrap(model, "tensor") is model
    assert not distributed.is_sharded(model)
    odd = CausalLM(ModelConfig(**{**SMALL, "num_key_value_heads": 1}))
    assert parallelize(odd) is odd  # one process shares with nobody


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "3 processes cannot share 4 query heads"),
        (4, {}, "4 processes cannot share 2 key/value heads"),
        (2, {"intermediate_size": 71}, "2 processes cannot share 71 hidden units"),
        (8, {"num_attention_heads": 8, "num_key_value_heads": 4}, "share 4 key/value heads"),
    ],
)
def test_what_cannot_be_shared_is_named(size, changes, message):
    with pytest.raises(ValueError, match=message):
        check_tensor_parallel(CausalLM(ModelConfig(**{**SMALL, **changes})), size)


def test_layers_of_other_kinds_are_named():
    experts = {"model_type": "mixtral", "num_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(ValueError, match="mlp of mixtral is SparseMoeBlock, not GatedMLP or MLP"):
        check_tensor_parallel(CausalLM(ModelConfig(**{**SMALL, **experts})), 2)
    latent = {"model_type": "deepseek_v3", "num_key_value_heads": 4, "kv_lora_rank": 8}
    latent |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    with pytest.raises(ValueError, match="self_attn of deepseek_v3 is MultiHeadLatentAttention"):
        check_tensor_parallel(CausalLM(ModelConfig(**{**SMALL, **latent})), 2)
    with pytest.raises(ValueError, match="PackedLM"):
        check_tensor_parallel(CausalLM(ModelConfig(**SMALL)).packed("linear"), 2)
    with pytest.raises(ValueError, match="Linear"):
        check_tensor_parallel(torch.nn.Linear(2, 2), 2)


def test_compiling_and_tensor_parallel_are_refused_together():
    with pytest.raises(ValueError, match=r"compile=True .*'tensor'"):
        RunConfig(2, parallel="tensor", compile=True)


def test_a_trainer_of_one_process_trains_as_ever():
    losses = {}
    for parallel in ("ddp", "tensor"):
        ids = torch.arange(24).view(2, 12)
        batches = ForEver((ids[:, :-1], ids[:, 1:]))
        config = RunConfig(2, warmup_steps=1, log_interval=1, parallel=parallel)
        trainer = Trainer(CausalLM(ModelConfig(**SMALL)), batches, config, progress=False)
        losses[parallel] = [record["loss"] for record in trainer.train()]
    assert losses["tensor"] == losses["ddp"]


class ForEver:
    """The same batch, again and again."""

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        return self

    def __next__(self):
        return self.batch

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_the_command_line_refuses_heads_before_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "world", lambda: distributed.World(0, 2))
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    options = ["--output-dir", str(tmp_path / "run"), *OPTIONS, "--heads", "3", "--kv-heads", "3"]
    options += ["--hidden-size", "36"]
    assert main(["train", *options]) == 1
    assert "2 processes cannot share 3 query heads" in capsys.readouterr().err
    assert not (Path(tmp_path) / "run").exists()


def test_the_others_say_in_one_line_that_the_first_process_refused(tmp_path, monkeypatch, capsys):
    def gone():
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(distributed, "world", lambda: distributed.World(1, 2))
    monkeypatch.setattr(distributed, "barrier", gone)
    assert main(["train", "--output-dir", str(tmp_path / "run"), *OPTIONS]) == 1
    assert capsys.readouterr().err == "error: the first process ended before the training began\n"
