"""Models with experts: caches, padding, generation, training, files, and what is refused."""

import functools
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from family_checkpoints import FAMILY_CONFIGS, make
from safetensors.torch import load_file, save_file
from training_runs import learns_and_resumes_bit_for_bit
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from minillm.beyond.experts.balance import RouterBalance
from minillm.beyond.experts.moe import expert_load
from minillm.config import ModelConfig
from minillm.deeper.caches.kinds import CACHE_KINDS
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.deeper.training.run import Run
from minillm.deeper.training.trainer import RunConfig, Trainer
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.training import TrainConfig, WindowBatches, pad_rows

NAMES = ["mixtral", "qwen3_moe", "deepseek_v3-experts"]
OTHERS = {
    "mixtral": {"sliding_window": 6},
    "qwen3_moe": {"sliding_window": 6, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "deepseek_v3-experts": {"first_k_dense_replace": 0, "n_shared_experts": 0},
}
each = pytest.mark.parametrize("name", NAMES)


def lively(name, **changes):
    """A model whose branches count, with biases that matter."""
    config = ModelConfig(**{**vars(FAMILY_CONFIGS[name]), **changes, "initializer_range": 0.3})
    model, generator = CausalLM(config).eval(), torch.Generator().manual_seed(1)
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def ids(rows=3, length=14):
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(0))


@each
@pytest.mark.parametrize("kind", CACHE_KINDS)
@torch.no_grad()
def test_every_cache_gives_the_same_as_none(name, kind):
    model = lively(name, **(OTHERS[name] if kind == "sliding" else {}))
    if kind == "sliding" and model.config.sliding_window is None:
        pytest.skip("DeepSeek reads all the past")
    a = ids()
    expected, found = model(a), []
    cache = model.make_cache(kind, batch_size=3, max_length=16)
    for start, end in ((0, 5), (5, 9), *((i, i + 1) for i in range(9, 14))):
        found.append(model(a[:, start:end], cache=cache))
    worst = (torch.cat(found, 1) - expected).abs().max() / expected.abs().max()
    assert worst < (0.2 if kind == "quantized" else 1e-5), worst


@each
@pytest.mark.parametrize("changed", [False, True])
@torch.no_grad()
def test_left_padded_rows_are_those_of_each_alone(name, changed):
    model = lively(name, **(OTHERS[name] if changed else {}))
    a = ids()
    mask = torch.ones_like(a)
    mask[0, :5], mask[2, :11] = 0, 0
    together = model(a, attention_mask=mask)
    written = generate(model, a, attention_mask=mask, max_new_tokens=12, eos_token_id=None)
    for row in range(3):
        alone = a[row : row + 1, mask[row].bool()]
        real = together[row, mask[row].bool()]
        torch.testing.assert_close(real, model(alone)[0], atol=1e-5, rtol=1e-5)
        new = generate(model, alone, max_new_tokens=12, eos_token_id=None)[0, alone.shape[1] :]
        assert torch.equal(written[row, 14:], new)


@each
def test_training_goes_through_the_trainer_and_resumes_bit_for_bit(name, tmp_path):
    learns_and_resumes_bit_for_bit(lambda: CausalLM(FAMILY_CONFIGS[name], seed=1), tmp_path)


# ---- balance, in a training run ----


class Batches:
    """Given batches, over and over."""

    def __init__(self, *batches):
        self.batches, self.index = batches, 0

    def __next__(self):
        self.index += 1
        return self.batches[(self.index - 1) % len(self.batches)]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


def padded(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in lengths]
    return pad_rows(rows, 14, 0)


def balanced(name, source, steps=8, *, balance, batches=2, run=None, **settings):
    """In float64: trained weights of two ways to add up can be compared closely."""
    model = CausalLM(FAMILY_CONFIGS[name], seed=1).double()
    config = RunConfig(
        steps, max_lr=1e-2, warmup_steps=1, gradient_accumulation_steps=batches, **settings
    )
    balance = RouterBalance(model, **balance)
    return Trainer(model, source, config, run=run, balance=balance, progress=False)


def same_weights(a, b):
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_step_with_the_balancing_loss_has_the_gradients_of_transformers(name, tmp_path):
    theirs = make(name, tmp_path)
    theirs.router_aux_loss_coef = 0.5
    inputs, targets = padded(14, 9, 4)
    mask = (targets != -100).long()
    out = theirs(
        inputs, attention_mask=mask, labels=targets, shift_labels=targets, output_router_logits=True
    )
    out.loss.backward()
    ours, _ = from_pretrained(tmp_path)
    balance = RouterBalance(ours, loss=0.5, pooled=True)
    config = TrainConfig(1, max_norm=1e9)
    trainer = Trainer(ours, Batches((inputs, targets)), config, balance=balance, progress=False)
    nats, count, _, _ = trainer._gradients()
    extra = 0.5 * out.aux_loss.item()
    assert extra > 0.5 and abs(nats / count + extra - out.loss.item()) < 1e-5
    expected = dict(theirs.named_parameters())
    for key, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, expected[key].grad, atol=1e-5, rtol=1e-5)


def test_each_layer_is_balanced_by_itself():
    model = lively("mixtral").train()
    logits, balance = [], RouterBalance(model, loss=0.1)
    for router in balance.routers:
        router.register_forward_hook(lambda m, _, out: logits.append(out[0]))
    inputs, targets = padded(14, 8, 2)
    targets[0, :5] = -100  # a question, say: no targets, but no padding either
    mask = torch.tensor([[1] * n + [0] * (13 - n) for n in (13, 7, 1)])
    model(inputs)
    each = [load_balancing_loss_func((layer,), 4, 2, mask) for layer in logits]
    assert len(each) == 2
    torch.testing.assert_close(balance(targets), 0.1 * sum(each) / 2)
    model(inputs)
    probs = torch.nn.functional.one_hot(targets.clamp(min=0), 64) * (targets != -100)[..., None]
    torch.testing.assert_close(balance(probs.float()), 0.1 * sum(each) / 2)
    model(inputs)
    assert balance(torch.full_like(targets, -100)) == 0  # nothing counts


BALANCE = {
    "mixtral": {"loss": 0.3},
    "qwen3_moe": {"loss": 0.3, "pooled": True},
    "deepseek_v3-experts": {"rate": 0.01},
}


@each
def test_balanced_runs_resume_bit_for_bit(name, tmp_path):
    batches = [padded(14, 14 - i, 3 + i, seed=i) for i in range(5)]
    whole = balanced(name, Batches(*batches), balance=BALANCE[name])
    whole.train()
    plain = balanced(name, Batches(*batches), balance=BALANCE[name])
    plain.balance = None
    plain.train()
    assert not same_weights(whole, plain)
    first = balanced(name, Batches(*batches), balance=BALANCE[name], run=Run(tmp_path))
    first.train(until=3)
    second = balanced(name, Batches(*batches), balance=BALANCE[name], run=Run(tmp_path))
    assert second.resume() and second.step == 3
    second.train()
    assert same_weights(whole, second)
    other = balanced(
        name,
        Batches(*batches),
        balance={key: 0.5 for key in BALANCE[name] if key != "pooled"},
        run=Run(tmp_path),
    )
    with pytest.raises(ValueError, match=r"balance: saved \{'loss'.*now \{'loss'"):
        other.resume()
    other.balance = None
    with pytest.raises(ValueError, match=r"balance: saved .*now None"):
        other.resume()


def test_biases_move_once_a_step_by_the_load_of_all_its_batches():
    name, batches = "deepseek_v3-experts", [padded(14, 5), padded(14, 9, 3, seed=1)]
    run = balanced(name, Batches(*batches), 1, balance={"rate": 0.25})
    found = []
    hook = run.balance.routers[0].register_forward_hook(lambda m, i, out: found.append(out[2]))
    for inputs, _ in batches:
        run.model(inputs)
    hook.remove()
    masks = [targets != -100 for _, targets in batches]
    loads = sum(expert_load(i, 6, mask=mask) for i, mask in zip(found, masks, strict=True))
    run.train()
    bias = run.model.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(bias, 0.25 * (loads.mean() - loads).sign()) and bias.abs().sum() > 0


def test_a_step_that_is_undone_is_not_counted(monkeypatch):
    def run():
        batches = [padded(14, 5), padded(14, 9, 3, seed=1), padded(10, 10, seed=2)]
        return balanced("deepseek_v3-experts", Batches(*batches), 4, balance={"rate": 0.25})

    whole, broken = run(), run()
    whole.train()
    head, calls = broken.model.lm_head, []

    def once(*_):
        calls.append(1)
        if len(calls) == 4:  # in the second batch of the second step
            raise KeyboardInterrupt

    head.register_forward_hook(once)
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.train()
    assert broken.step == 4 and same_weights(whole, broken)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3-experts"])
def test_a_compiled_run_is_balanced_alike(name, monkeypatch):
    eager = functools.partial(torch.compile, backend="aot_eager")  # no C++ compiler needed
    monkeypatch.setattr(torch, "compile", eager)
    runs = [
        balanced(name, Batches(padded(14, 9)), 2, balance=BALANCE[name], compile=compile)
        for compile in (False, True)
    ]
    for run in runs:
        run.train()
    for a, b in zip(*(run.model.state_dict().values() for run in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mixtral", {}, r"loss 0.0, rate 0.0: both from 0, and one of them above"),
        ("mixtral", {"loss": -0.1}, "loss -0.1, rate 0.0"),
        ("mixtral", {"loss": float("nan")}, "loss nan"),
        ("mixtral", {"rate": 0.1}, "rate 0.1 for routers without a bias: they take a loss"),
        ("deepseek_v3-experts", {"loss": 0.1}, "loss 0.1 for routers with sigmoid scores"),
        ("llama", {"loss": 0.1}, "CausalLM has no router: no layer has experts"),
    ],
)
def test_balances_that_cannot_be_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        RouterBalance(CausalLM(FAMILY_CONFIGS[name]), **options)


def test_a_balance_of_another_model_is_refused():
    one, other = (CausalLM(FAMILY_CONFIGS["mixtral"]) for _ in range(2))
    source, balance = Batches(padded(14, 9)), RouterBalance(other, loss=0.1)
    trainer = Trainer(one, source, TrainConfig(1), balance=balance, progress=False)
    with pytest.raises(ValueError, match="is it that of the model in training"):
        trainer.train()


WORKER = """
import sys, torch, torch.distributed as dist
sys.path[:0] = sys.argv[3], sys.argv[3] + "/../.."  # this folder, and tests/
import test_experts
from minillm.deeper.training.distributed import whole_tensors

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
for name in ("mixtral", "deepseek_v3-experts"):
    for parallel in ("ddp", "fsdp"):
        run = test_experts.two_processes_or_one(name, parallel=parallel)
        state = whole_tensors(run.model)
        if rank == 0:
            torch.save(state, f"{sys.argv[4]}/{name}-{parallel}.pt")
dist.barrier()
import os
os._exit(0)
"""


def two_processes_or_one(name, **settings):
    rows = [padded(14, 14, 14, 14, seed=i) for i in range(3)]
    run = balanced(name, Batches(*rows), 3, balance=BALANCE[name], **settings)
    run.train()
    return run


def test_two_processes_balance_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    here = str(Path(__file__).parent)
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(rank), port, here, str(tmp_path)])
        for rank in range(2)
    ]
    assert [worker.wait(timeout=900) for worker in workers] == [0, 0]
    for parallel in ("ddp", "fsdp"):
        one = two_processes_or_one("deepseek_v3-experts").model.state_dict()
        two = torch.load(tmp_path / f"deepseek_v3-experts-{parallel}.pt")
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-8, atol=1e-9, msg=key)
    ddp, fsdp = (torch.load(tmp_path / f"mixtral-{parallel}.pt") for parallel in ("ddp", "fsdp"))
    for key in ddp:  # each process balances its own rows, either way
        torch.testing.assert_close(ddp[key], fsdp[key], rtol=1e-8, atol=1e-9, msg=key)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bfloat16_products_and_both_optimizers_train_it(optimizer):
    model = CausalLM(FAMILY_CONFIGS["qwen3_moe"])
    before = model.model.layers[1].mlp.experts.down_proj.clone()
    settings = RunConfig(3, warmup_steps=0, precision="bfloat16", optimizer=optimizer)
    Trainer(model, WindowBatches(torch.arange(300) % 11, 4, 16), settings, progress=False).train()
    assert not torch.equal(model.model.layers[1].mlp.experts.down_proj, before)


@each
def test_packing_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{FAMILY_CONFIGS[name].model_type} .*cannot be packed"):
        CausalLM(FAMILY_CONFIGS[name]).packed()


def test_flops_count_the_experts_that_compute():
    few, every = (
        CausalLM(ModelConfig(**{**vars(FAMILY_CONFIGS["mixtral"]), "num_experts_per_tok": k}))
        for k in (1, 4)
    )
    one = 3 * 16 * 24  # numbers of an expert
    assert every.flops_per_token() - few.flops_per_token() == 2 * 2 * 3 * one
    assert every.num_parameters() == few.num_parameters()


# ---- files ----


def test_biases_keep_their_digits_in_16_bit_models(tmp_path):
    theirs = make("deepseek-experts", tmp_path)
    theirs.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[key] = torch.full((12,), 0.1234567)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for dtype in (None, torch.bfloat16):
        ours, _ = from_pretrained(tmp_path, dtype=dtype)
        gate = ours.model.layers[1].mlp.gate
        assert gate.weight.dtype == torch.bfloat16
        assert torch.equal(gate.e_score_correction_bias, tensors[key])
    save_pretrained(ours, None, tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again.state_dict()[key], tensors[key])


def test_experts_joined_already_are_read_too(tmp_path):
    theirs = make("mixtral", tmp_path)
    expected = CausalLM.from_pretrained(tmp_path)(ids())
    state = {k: v.clone() for k, v in theirs.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in state)
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(CausalLM.from_pretrained(tmp_path)(ids()), expected)


W1 = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
GATE = "model.layers.0.block_sparse_moe.gate.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(W1), r"missing: model\.layers\.1\.mlp\.experts\.3\.gate_proj"),
        (
            lambda t: t.update({W1.replace("3", "7"): t[W1].clone()}),
            r"unexpected: .*experts\.7\.gate",
        ),
        (lambda t: t.update({W1: t[W1][:5]}), r"3\.gate_proj\.weight is \(5, 32\), .*\(48, 32\)"),
        (lambda t: t.pop(GATE), r"missing: model\.layers\.0\.mlp\.gate\.weight"),
    ],
)
def test_experts_that_do_not_fit_are_named(change, message, tmp_path):
    make("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path)


def test_qwens_two_names_for_one_number(tmp_path):
    make("qwen3-moe", tmp_path)
    data = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    number = data.pop("num_local_experts")  # transformers 5; published files say num_experts
    config = ModelConfig.from_dict({**data, "num_experts": number})
    assert config == ModelConfig.from_dict({**data, "num_local_experts": number})
    assert config.to_dict()["num_experts"] == 7
    with pytest.raises(ValueError, match="num_experts 8, num_local_experts 7"):
        ModelConfig.from_dict({**data, "num_experts": 8, "num_local_experts": 7})
    with pytest.raises(ValueError, match="a qwen3_moe config lacks num_experts"):
        ModelConfig.from_dict(data)


def test_a_layer_frequency_is_not_read_by_transformers_and_a_warning_says_so():
    data = FAMILY_CONFIGS["deepseek_v3-experts"].to_dict()
    config = ModelConfig.from_dict({**data, "moe_layer_freq": 1})
    assert [config.is_sparse(i) for i in range(2)] == [False, True]
    with pytest.warns(UserWarning, match="not used: moe_layer_freq"):
        assert ModelConfig.from_dict({**data, "moe_layer_freq": 2}) == config


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_factor_of_the_balancing_loss_is_read_and_written(name):
    data = FAMILY_CONFIGS[name].to_dict()
    theirs = transformers.AutoConfig.for_model(**data)
    assert ModelConfig.from_dict(theirs.to_dict()).router_aux_loss_coef == 0.001  # the default
    config = ModelConfig.from_dict({**theirs.to_dict(), "router_aux_loss_coef": 1})
    again = transformers.AutoConfig.for_model(**config.to_dict())
    assert (
        again.router_aux_loss_coef
        == 1
        == ModelConfig.from_dict(data | {"router_aux_loss_coef": 1.0}).router_aux_loss_coef
    )
    with pytest.raises(ValueError, match="router_aux_loss_coef must be a number of at least 0"):
        ModelConfig.from_dict({**data, "router_aux_loss_coef": -0.1})
    with pytest.raises(ValueError, match="router_aux_loss_coef must be a number of at least 0"):
        ModelConfig(**{**vars(FAMILY_CONFIGS[name]), "router_aux_loss_coef": -0.1})


def test_which_layers_are_sparse():
    sizes = {**vars(FAMILY_CONFIGS["qwen3_moe"]), "num_hidden_layers": 6}
    for step, only, expected in ((1, (), "111111"), (2, (), "010101"), (3, (2,), "000001")):
        config = ModelConfig(**{**sizes, "decoder_sparse_step": step, "mlp_only_layers": only})
        theirs = transformers.AutoConfig.for_model(**config.to_dict())
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(theirs)
        built = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
        assert built == [config.is_sparse(i) for i in range(6)] == [c == "1" for c in expected]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 of num_experts 4"),
        ("mixtral", {"num_experts": 0}, "num_experts must be a whole number from 1 .*, not 0"),
        ("mixtral", {"num_experts": None}, "lacks num_experts"),
        ("mixtral", {"num_experts": -1}, "num_experts must be a whole number from 1 .*, not -1"),
        (
            "mixtral",
            {"num_experts_per_tok": 0},
            "num_experts_per_tok must be a whole",
        ),
        ("qwen3_moe", {"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size must be a whole"),
        ("qwen3_moe", {"mlp_only_layers": (1.5,)}, "mlp_only_layers must be a list, each a"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob must be true or false, not 1"),
        ("deepseek_v3-experts", {"n_group": 4}, "topk_group 2 of n_group 4, for 6 experts"),
        ("deepseek_v3-experts", {"topk_group": 1, "num_experts_per_tok": 3}, "hold 2 experts"),
        ("deepseek_v3-experts", {"routed_scaling_factor": 0.0}, "routed_scaling_factor must be"),
        ("deepseek_v3-experts", {"model_type": "llama"}, "a llama config has no .*num_experts,"),
        ("mixtral", {"norm_topk_prob": False}, "a mixtral config has no norm_topk_prob"),
        ("qwen3_moe", {"n_shared_experts": 1}, "a qwen3_moe config has no n_shared_experts"),
    ],
)
def test_configs_that_contradict_themselves_are_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**vars(FAMILY_CONFIGS[name]), **changes})
