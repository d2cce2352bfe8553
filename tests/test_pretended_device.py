"""The pretended device refuses what a GPU refuses, counts its waits, and leaves no trace."""

import copy
import warnings

import numpy as np
import pytest
import torch
from pretended_device import PretendedDevice, PretendedTensor
from torch import nn
from torch.nn import functional as F


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def device():
    with PretendedDevice() as device:
        yield device


# What is refused


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, y: x * y,
        lambda x, y: y @ x,
        lambda x, y: F.linear(x, y),
        lambda x, y: torch.where(y > 0, x, x),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x.sum(), y.sum()]),
        lambda x, y: x.add_(y),
        lambda x, y: y.add_(x),
        lambda x, y: y.sum().add_(x.sum()),
        lambda x, y: x.masked_fill(y > 0, 0),
        lambda x, y: F.embedding(torch.tensor([0]), x),
        lambda x, y: x.gather(0, torch.zeros(2, 2, dtype=torch.long)),
        lambda x, y: x.index_select(0, torch.tensor([0])),
        lambda x, y: F.scaled_dot_product_attention(x, x, x, attn_mask=y),
        lambda x, y: torch.equal(x, y),
    ],
)
def test_tensors_of_two_devices_do_not_meet(mix, device):
    x, y = draw(2, 2).to("cuda"), draw(2, 2)
    with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        mix(x, y)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
        mix(x.clone(), y.clone())


def test_a_number_of_the_cpu_may_take_part(device):
    x = draw(2, 3).to("cuda")
    for y in (x * torch.tensor(2.0), torch.where(x > 0, torch.tensor(0.0), x), 1 - x, x / 3):
        assert y.is_cuda
    assert torch.equal((x * torch.tensor(2.0)).cpu(), draw(2, 3) * 2)


def test_indices_of_the_cpu_read_the_device_and_not_the_other_way_round(device):
    x, i = draw(4, 3), torch.tensor([2, 0])
    assert torch.equal(x.to("cuda")[i].cpu(), x[i])
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        x[i.to("cuda")]
    there = x.to("cuda")
    with pytest.raises(RuntimeError, match="two devices"):
        there[i] = torch.ones(2, 3)
    there[1:3] = torch.ones(2, 3)  # a slice is copied to, from anywhere
    assert there.cpu()[1:3].eq(1).all()


def test_numpy_is_refused(device):
    x = draw(2).to("cuda")
    for turn in (lambda: x.numpy(), lambda: np.asarray(x), lambda: np.add(x, 1)):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
            turn()
    assert np.array_equal(x.cpu().numpy(), draw(2).numpy())


def test_a_generator_belongs_to_one_device(device):
    cpu, cuda = torch.Generator().manual_seed(1), torch.Generator("cuda").manual_seed(1)
    assert (cpu.device.type, str(cuda.device)) == ("cpu", "cuda:0")
    x = torch.empty(3, device="cuda")
    for attempt in (
        lambda: torch.rand(3, device="cuda", generator=cpu),
        lambda: x.normal_(generator=cpu),
        lambda: x.exponential_(generator=cpu),
        lambda: nn.init.normal_(x, generator=cpu),
        lambda: torch.multinomial(x.fill_(1), 1, generator=cpu),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
            attempt()
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator"):
        torch.rand(3, generator=cuda)
    drawn = torch.rand(3, device="cuda", generator=cuda)
    assert torch.equal(drawn.cpu(), torch.rand(3, generator=cpu))


def test_there_is_one_device(device):
    with pytest.raises(RuntimeError, match="cuda:1: invalid device ordinal"):
        torch.zeros(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="cuda:1: invalid device ordinal"):
        torch.zeros(2).to("cuda:1")


def test_apples_device_has_no_float64():
    with PretendedDevice("mps") as device:
        x = draw(3).to("mps")
        assert x.is_mps and not x.is_cuda and str(x.device) == str(device.device) == "mps:0"
        for attempt in (lambda: x.double(), lambda: torch.zeros(2, device="mps").double()):
            with pytest.raises(TypeError, match="float64"):
                attempt()
        assert x.cpu().double().dtype == torch.float64
        assert torch.backends.mps.is_available() and not torch.cuda.is_available()


# What works as on the CPU


def test_tensors_are_made_there(device):
    for make in (
        lambda **d: torch.zeros(2, 3, **d),
        lambda **d: torch.arange(5, **d),
        lambda **d: torch.full((2,), 3.0, **d),
        lambda **d: torch.linspace(0, 1, 4, **d),
        lambda **d: torch.eye(3, **d),
        lambda **d: torch.tensor([[1, 2], [3, 4]], **d),
        lambda **d: torch.tensor(2.5, dtype=torch.bfloat16, **d),
        lambda **d: torch.as_tensor(np.arange(3), **d),
        lambda **d: torch.zeros_like(torch.ones(3), **d),
        lambda **d: torch.ones(3).new_tensor([1, 2], **d),
        lambda **d: torch.ones(3).new_zeros(4, **d),
        lambda **d: torch.zeros_like(torch.ones(3, device="meta"), device=d.get("device", "cpu")),
        lambda **d: torch.ones(2).to(d.get("device", "cpu"), torch.float16),
    ):
        expected, made = make(), make(device="cuda")
        assert made.is_cuda and not made.is_cpu and made.get_device() == 0
        assert made.dtype == expected.dtype and torch.equal(made.cpu(), expected)
        assert not expected.is_cuda and expected.device.type == "cpu"
    x = torch.zeros(2, device="cuda")
    for like in (x.new_tensor([1.5]), x.new_zeros(2), torch.ones_like(x), torch.rand_like(x)):
        assert like.is_cuda
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda and nn.Linear(2, 2).weight.is_cuda
    assert not torch.zeros_like(x, device="cpu").is_cuda
    assert torch.zeros(2).type_as(x).is_cuda and torch.zeros(2).cuda().is_cuda
    assert x.to("cuda") is x and not x.to(torch.zeros(2)).is_cuda
    assert torch.zeros(1, device="cuda", requires_grad=True).is_leaf


def test_there_and_back_is_a_copy(device):
    x = draw(3)
    there = x.to("cuda")
    there += 1
    assert torch.equal(x, draw(3))
    back = there.cpu()
    back += 1
    assert torch.equal(there.cpu(), x + 1) and torch.equal(back, x + 2)


def test_views_share_their_numbers(device):
    x = torch.zeros(3, 4, device="cuda")
    x[1] = 1
    x[:, 2] += 1
    x.view(-1)[0].fill_(5)
    x.T[3, 2:].copy_(torch.ones(1))
    expected = torch.zeros(3, 4)
    expected[1] = 1
    expected[:, 2] += 1
    expected[0, 0] = 5
    expected[2, 3] = 1
    assert torch.equal(x.cpu(), expected)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 3))


@pytest.mark.parametrize("fused", [True, False])
def test_a_module_trains_as_on_the_cpu(fused, device):
    x, y = draw(5, 4), torch.tensor([0, 1, 2, 1, 0])
    here, there = small(), small()
    parameters = list(there.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), fused=fused) for m in (here, there)]
    assert there.to("cuda") is there
    assert all(a is b for a, b in zip(there.parameters(), parameters, strict=True))
    for _ in range(3):
        for module, optimizer, to in zip((here, there), optimizers, ("cpu", "cuda"), strict=True):
            F.cross_entropy(module(x.to(to)), y.to(to)).backward()
            assert all(p.grad.device.type == to for p in module.parameters())
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(here.state_dict().items(), there.cpu().parameters(), strict=True):
        assert torch.equal(a, b), name


class Doubled(torch.autograd.Function):
    """Makes tensors on the way back, as a user's function may."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.full((), 2.0, device="cuda") + torch.zeros(3, device=grad.device)


def test_gradients_of_a_users_function_and_through_a_move(device):
    x = draw(3).requires_grad_()
    Doubled.apply(x.to("cuda")).square().sum().backward()
    assert not x.grad.is_cuda and torch.equal(x.grad, 8 * x.detach())
    (gradient,) = torch.autograd.grad(
        Doubled.apply(y := x.detach().to("cuda").requires_grad_()).sum(), y
    )
    assert gradient.is_cuda and gradient.cpu().eq(2).all()


def test_a_copied_module_has_weights_of_its_own(device):
    module = small().to("cuda")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert isinstance(twin[0].weight, nn.Parameter) and twin[0].weight.is_cuda
    assert torch.equal(module[0].weight.cpu(), small()[0].weight)


def test_inference_mode_and_autocast(device):
    older = torch.zeros(4, device="cuda")
    with torch.inference_mode():
        older[1:3] = 1
        older[0] += older.sum()
        made = older * 2
    assert made.is_inference() and not older.is_inference()
    assert older.tolist() == [2, 1, 1, 0]
    x, w = draw(2, 4).to("cuda"), draw(3, 4)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        y = F.linear(x, w.to("cuda"))
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(draw(2, 4), w)
    assert y.dtype == torch.bfloat16 and torch.equal(y.cpu(), expected)


def test_its_random_numbers_are_its_own(device):
    """As those of a GPU: neither stream moves the other, and `manual_seed` seeds both."""
    torch.manual_seed(3)
    here = torch.rand(4), torch.rand(4)
    torch.manual_seed(3)
    for expected in here:
        assert torch.equal(torch.rand(4, device="cuda").cpu(), expected)
        assert torch.equal(torch.rand(4), expected)
    state = torch.cuda.get_rng_state()
    ones = torch.ones(50, device="cuda")
    dropped = F.dropout(ones).cpu()
    assert not torch.equal(F.dropout(ones).cpu(), dropped)
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(ones).cpu(), dropped)


# What is counted


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda x: x.sum().item(), {"item": 1}),
        (lambda x: int(x[0]) + float(x[1]), {"item": 2}),
        (lambda x: bool((x > 0).all()), {"item": 1}),
        (lambda x: 1 if (x > 0).any() else 0, {"item": 1}),
        (lambda x: x.tolist(), {"tolist": 1}),
        (lambda x: x.cpu(), {"cpu": 1}),
        (lambda x: x.to("cpu", torch.float64), {"cpu": 1}),
        (lambda x: x.to("cpu", non_blocking=True), {}),
        (lambda x: torch.zeros(3).copy_(x), {"copy_": 1}),
        (lambda x: x.nonzero(), {"nonzero": 1}),
        (lambda x: x[x > 0], {"nonzero": 1}),
        (lambda x: torch.equal(x, x), {"equal": 1}),
        (lambda x: x.unique(), {"_unique2": 1}),
        (lambda x: x.masked_select(x > 0), {"masked_select": 1}),
        (lambda x: x.repeat_interleave(2), {}),
        (lambda x: x.repeat_interleave(x.long().abs()), {"repeat_interleave": 1}),
        (lambda x: torch.cuda.synchronize(), {"synchronize": 1}),
        (lambda x: repr(x), {"repr": 1}),
        (lambda x: x.masked_fill(x > 0, 1).sort().values.cumsum(0), {}),
        (lambda x: x[x.argmax()], {"item": 1}),  # torch reads such an index
        (lambda x: x.where(x > 0, 0).softmax(0).topk(2).indices, {}),
    ],
)
@pytest.mark.parametrize("inferring", [False, True])
def test_waiting_is_counted(ask, expected, inferring, device):
    x = draw(3).to("cuda")
    with torch.inference_mode(inferring):
        ask(x)
    assert +device.waits == expected


def test_what_is_sent_is_counted(device):
    x = draw(3).to("cuda")
    assert device.sent == {"to": 1}
    torch.tensor([1, 2], device="cuda")
    torch.zeros(3, device="cuda")
    assert device.sent == {"to": 2}
    x.copy_(draw(3))
    x[torch.tensor([0])]
    draw(3).to("cuda", non_blocking=True)
    assert device.sent == {"to": 2, "copy_": 1, "index": 1, "to, without waiting": 1}
    assert not device.waits


# Afterwards


def trace():
    """What the pretended device changes while it is there."""
    names = [(torch, "Generator"), (torch, "is_autocast_enabled"), (torch, "get_autocast_dtype")]
    names += [(torch.autocast, "__init__"), (nn.Module, "_apply")]
    names += [(torch.autograd.Variable, "_execution_engine"), (torch.backends.mps, "is_available")]
    names += [(torch.accelerator, "synchronize")]
    for module in (torch.cuda, torch.mps):
        names += [(module, name) for name in dir(module) if not name.startswith("_")]
    return [getattr(place, name) for place, name in names]


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_nothing_is_left_of_it(kind):
    before, random, modes = (
        trace(),
        torch.get_rng_state(),
        torch.overrides._get_current_function_mode_stack(),
    )
    with pytest.raises(KeyError), PretendedDevice(kind) as device:
        changed = [a is not b for a, b in zip(trace(), before, strict=True)]
        assert sum(changed) >= 10
        x = torch.rand(3, device=kind)
        nn.Linear(2, 2, device=kind).to("cpu")
        random = torch.get_rng_state()
        raise KeyError
    assert all(a is b for a, b in zip(trace(), before, strict=True))
    assert torch.overrides._get_current_function_mode_stack() == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not torch.__future__.get_swap_module_params_on_conversion()
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device=kind)
    with pytest.raises(RuntimeError, match="the pretended device has been left"):
        x + 1
    assert type(torch.zeros(2) + 1) is torch.Tensor
    with device:  # it may be entered again
        assert isinstance(torch.zeros(2, device=kind), PretendedTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
