"""Training on a pretended GPU: the CPU's weights, and a step that waits for loss and norm alone."""

import copy
import math

import pytest
import torch
from family_checkpoints import FAMILY_CONFIGS
from pretended_device import PretendedDevice, PretendedTensor, same_there
from training_runs import TOKENS, V, make, tiny

from minillm.beyond.answers.conversations import ConversationBatches
from minillm.beyond.answers.sft import Example, Isolated
from minillm.beyond.experts.balance import RouterBalance
from minillm.beyond.lora.adapters import add_lora, merge, remove_lora
from minillm.bpe import BPETokenizer
from minillm.config import ModelConfig
from minillm.deeper.pretrained.adapters import load_adapter, save_adapter
from minillm.deeper.pretrained.load import from_pretrained, save_pretrained
from minillm.generation import generate
from minillm.model import CausalLM
from minillm.training import WindowBatches, cross_entropy, evaluate

SETTINGS = {
    "fused": {},
    "own": {"fused": False},
    "muon": {"optimizer": "muon"},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bfloat16": {"precision": "bfloat16"},
}


def small(**changes):
    return CausalLM(ModelConfig(V, 16, 2, 4, 24, **changes)).train()


def weights(model):
    return {name: x.detach() for name, x in model.state_dict().items()}


def trained_there(model, atol, *, before=lambda trainer: None, **settings):
    """The same run here and there: close in the end; returns what each step there waited for."""
    there = copy.deepcopy(model)
    options = {"steps": 2, "warmup_steps": 1, "log_interval": 1, **settings}
    here = make(model=model, **options)
    before(here)
    expected = here.train()
    with PretendedDevice() as device:
        trainer = make(model=there.to("cuda"), **options)
        before(trainer)
        device.forget()
        found = trainer.train()
        waits = device.waits.copy()
        for name, x in weights(trainer.model).items():
            assert isinstance(x, PretendedTensor)
            torch.testing.assert_close(x.held, weights(model)[name], rtol=0, atol=atol, msg=name)
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2 if atol > 1e-3 else 1e-5)
        assert a["tokens"] == b["tokens"]
    return {name: n / options["steps"] for name, n in waits.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_waits_for_loss_and_norm_alone(name):
    rounded = name in ("muon", "bfloat16")  # muon's products are rounded to bfloat16 on a GPU
    atol = 5e-3 if rounded else 1e-6
    assert trained_there(small(), atol, **SETTINGS[name]) == {"item": 2}


def test_bytes_are_counted_without_waiting():
    def count(trainer):
        trainer.token_bytes = torch.full((V,), 3)

    assert trained_there(small(), 1e-6, before=count) == {"item": 2}


def test_dropout_draws_from_the_devices_numbers():
    assert trained_there(tiny(dropout=0.3), 1e-6) == {"item": 2}


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3-experts"])
def test_experts_with_balance(family):
    model = CausalLM(FAMILY_CONFIGS[family]).train()
    options = {"rate": 1e-3} if family.startswith("deepseek") else {"loss": 0.01}

    def balance(trainer):
        trainer.balance = RouterBalance(trainer.model, **options)

    waits = trained_there(model, 1e-6, before=balance)
    layers = sum(map(getattr(model.config, "is_sparse", lambda layer: False), range(2)))
    assert waits == {"item": 2, "tolist": layers}


@pytest.mark.parametrize("family", ["mamba", "mamba2", "bamba", "gpt2"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_layers_train(family, precision):
    model = CausalLM(FAMILY_CONFIGS[family]).train()
    assert trained_there(model, 5e-3 if precision == "bfloat16" else 1e-5, precision=precision) == {
        "item": 2
    }


@pytest.mark.parametrize("name", ["fused", "own", "muon"])
def test_a_run_that_was_stopped_there_goes_on_there(name, tmp_path):
    """Weights, the optimizer's state and the device's random numbers come back bit for bit."""
    with PretendedDevice():

        def run(folder=None):
            model = tiny(dropout=0.3) if name != "muon" else small(attention_dropout=0.2)
            return make(folder, steps=7, model=model.to("cuda"), **SETTINGS[name])

        whole, first = run(), run(tmp_path)
        whole.train()
        first.train(until=5)
        torch.manual_seed(99)
        second = run(tmp_path)
        assert second.resume() and second.step == 5
        for state in second.optimizer.state.values():
            assert state["exp_avg" if "exp_avg" in state else "momentum_buffer"].is_cuda
            if "step" in state and name == "fused":
                assert state["step"].is_cuda  # torch's fused kernel counts there
        second.train()
        for key, x in weights(whole.model).items():
            assert torch.equal(x, weights(second.model)[key]), key


def test_a_run_that_was_stopped_there_goes_on_here_and_back(tmp_path):
    with PretendedDevice():
        make(tmp_path, steps=7, model=small().to("cuda")).train(until=5)
        here = make(tmp_path, steps=7, model=small())
        assert here.resume() and here.step == 5
        here.train(until=6)
        back = make(tmp_path, steps=7, model=small().to("cuda"))
        assert back.resume() and back.step == 6
        back.train()
        assert all(x.is_cuda for x in back.model.parameters())


def test_tokens_that_lie_there():
    with PretendedDevice():
        source = WindowBatches(TOKENS.to("cuda"), 4, 12, seed=3)
        there = make(steps=2, model=small().to("cuda"), source=source)
        there.train()
        here = make(steps=2, model=small())
        here.train()
        for key, x in weights(here.model).items():
            torch.testing.assert_close(weights(there.model)[key].cpu(), x, rtol=0, atol=1e-6)


def test_the_loss_of_ids_and_of_probabilities():
    logits = torch.randn(2, 5, V, generator=torch.Generator().manual_seed(0))
    ids = TOKENS[:10].view(2, 5).clone()
    ids[0, 3:] = -100

    def run(logits, ids, probs):
        logits.requires_grad_()
        losses = [cross_entropy(logits, ids), cross_entropy(logits, probs, reduction="sum")]
        return [*losses, *torch.autograd.grad(sum(losses), logits)]

    device = same_there(run, logits, ids, logits.softmax(-1))
    assert not device.waits and not device.sent


@pytest.fixture(scope="module")
def tokenizer():
    names = ("<|endoftext|>",)
    plain = BPETokenizer.train(["the cat sat on the mat"] * 4, 270, special_tokens=names)
    return BPETokenizer(plain.ranks, plain.pattern, plain.special_tokens, eos_token=names[0])


def test_evaluation(tokenizer):
    model = CausalLM(ModelConfig(tokenizer.vocab_size, 16, 2, 4, 24))
    texts = ["the cat", "sat on the mat, the cat", "", "on"]
    expected = evaluate(model, tokenizer, texts, batch_tokens=20)
    with PretendedDevice() as device:
        model.to("cuda")
        device.forget()
        assert evaluate(model, tokenizer, texts, batch_tokens=20) == pytest.approx(expected, 1e-6)
        assert set(device.waits) == {"item"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora(family, tmp_path):
    """Trained, saved, read, merged and taken out there as here."""
    base = CausalLM(FAMILY_CONFIGS[family])
    prompt = torch.tensor([[3, 4, 5]])

    def run(model, place):
        add_lora(model, 2, 4.0, dropout=0.2)
        make(steps=3, model=model).train()
        adapted = model.eval()(prompt.to(place)).detach()
        save_adapter(model, tmp_path / place)
        merge(model)
        merged = model(prompt.to(place)).detach()
        remove_lora(model)
        other = copy.deepcopy(base).to(place).eval()
        load_adapter(other, tmp_path / place)
        assert all(p.device.type == place for p in other.parameters())
        read = other(prompt.to(place)).detach()
        return [adapted, merged, read, *weights(model).values()]

    expected = run(copy.deepcopy(base), "cpu")
    with PretendedDevice():
        found = run(copy.deepcopy(base).to("cuda"), "cuda")
        for x, y in zip(found, expected, strict=True):
            assert x.is_cuda
            torch.testing.assert_close(x.cpu(), y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_conversations(layout):
    g = torch.Generator().manual_seed(0)
    examples = [
        Example(torch.randint(V, (n,), generator=g).tolist(), [i > n // 2 for i in range(n)])
        for n in (4, 9, 7, 5, 12, 6)
    ]
    model = small()
    model = Isolated(model) if layout == "packed" else model
    there = copy.deepcopy(model)

    def run(model):
        source = ConversationBatches(examples, 2, 12, layout=layout)
        make(steps=4, model=model, source=source).train()
        return weights(model)

    expected = run(model)
    with PretendedDevice() as device:
        there.to("cuda")
        device.forget()
        found = run(there)
        assert device.waits == {"item": 8}
        for name, x in found.items():
            torch.testing.assert_close(x.cpu(), expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_saved_from_there_and_read_to_there(family, tmp_path):
    model = CausalLM(FAMILY_CONFIGS[family]).eval()
    ids = torch.tensor([[3, 4, 5]])
    expected = model(ids).detach()
    save_pretrained(model, None, tmp_path / "here")
    with PretendedDevice():
        save_pretrained(model.to("cuda"), None, tmp_path / "there")
        assert all(p.is_cuda for p in model.parameters())
        found, _ = from_pretrained(tmp_path / "there", device="cuda")
        assert all(x.is_cuda for x in [*found.parameters(), *found.buffers()])
        torch.testing.assert_close(found(ids.to("cuda")).cpu(), expected, rtol=0, atol=1e-6)
        generate(found, ids.to("cuda"), max_new_tokens=2)
        save_pretrained(found, None, tmp_path / "there")  # in the place of its own file
    for name in ("model.safetensors", "config.json"):
        written = [(tmp_path / place / name).read_bytes() for place in ("here", "there")]
        assert written[0] == written[1]


def test_a_broken_step_there_leaves_no_trace(tmp_path):
    with PretendedDevice():
        trainer = make(tmp_path, steps=3, model=small().to("cuda"))
        trainer.train(until=1)
        before = {name: x.clone() for name, x in weights(trainer.model).items()}
        with torch.no_grad():
            trainer.model.lm_head.weight[0, 0] = math.nan
        before["lm_head.weight"][0, 0] = math.nan
        with pytest.raises(FloatingPointError, match="loss nan"):
            trainer.train()
        for name, x in weights(trainer.model).items():
            assert torch.equal(x.nan_to_num(7), before[name].nan_to_num(7))
