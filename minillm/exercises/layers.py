"""Graders of notebook 06: a layer by hand, predictions, GELU's derivative, counting, sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from minillm.exercises import apart, as_given, check_table, check_values, exercise


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def _own_type(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    root = x.float().pow(2).mean(-1, keepdim=True).sqrt()
    return weight * (x.float() / (root + eps)).to(x.dtype)


def _centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * F.layer_norm(x.float(), x.shape[-1:], None, None, eps).to(x.dtype)


def _unweighted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, torch.ones_like(weight), eps)


def _all_tokens(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean() + eps)).to(x.dtype)


def _all_places(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean((-2, -1), keepdim=True) + eps)).to(x.dtype)


def _sum(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def _eps_to_sum(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, weight, eps / x.shape[-1])


def _no_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, weight, 0.0)


def _usual_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms(x, weight, 1e-6)


_NORM_SLIPS = {
    "eps belongs under the root, added to the mean square": _outside,
    "you subtract the mean: that is LayerNorm, RMSNorm divides only": _centred,
    "the weights of the norms are missing": _unweighted,
    "each token has a mean square of its own; yours is taken over all of them": _all_tokens,
    "each token has a mean square of its own; yours is that of its whole row": _all_places,
    "the squares of a token are averaged, not added up": _sum,
    "eps is added to the mean of the squares, not to their sum": _eps_to_sum,
    "eps is missing in the norm": _no_eps,
    "use the eps that is given, not one of your own": _usual_eps,
}


@exercise(
    "06.1",
    "two lines and a small norm: what does each branch read, and what is its result added to?",
    "the stream is only ever added to; each branch reads a normalised copy of it",
)
def _pre_norm_layer(answer: Callable[..., Tensor]) -> str | None:
    cases = (
        (_draw(2, 3, 8), 1e-6),
        (1e-3 * _draw(2, 4, 8, seed=1), 1e-5),
        (torch.tensor([[[300.0, -300.0, 150.0, 0.0], [1.0, -2.0, 3.0, 0.5]]]).half(), 1e-6),
        (_draw(2, 4, 8, seed=2).bfloat16(), 1e-6),
    )
    for x, eps in cases:
        C, kind = x.shape[-1], str(x.dtype).removeprefix("torch.")
        one, two = ((1 + 0.3 * _draw(C, seed=s)).to(x.dtype) for s in (5, 6))
        mix, bend = (_draw(C, C, seed=s).to(x.dtype) / C**0.5 for s in (7, 8))

        read: set[torch.dtype] = set()  # the types that the branches are given

        def attention(y: Tensor, mix: Tensor = mix, read: set[torch.dtype] = read) -> Tensor:
            read.add(y.dtype)
            return (y.to(mix.dtype) @ mix).cumsum(1)

        def mlp(y: Tensor, bend: Tensor = bend, read: set[torch.dtype] = read) -> Tensor:
            read.add(y.dtype)
            return F.relu(y.to(bend.dtype) @ bend)

        def layer(
            norm: Callable[[Tensor, Tensor, float], Tensor] = _rms,
            w1: Tensor = one,
            w2: Tensor = two,
            x: Tensor = x,
            eps: float = eps,
            f: Callable[[Tensor], Tensor] = attention,
            g: Callable[[Tensor], Tensor] = mlp,
        ) -> Tensor:
            x = x + f(norm(x, w1, eps))
            return x + g(norm(x, w2, eps))

        kept = x.clone()
        got, want = answer(x, attention, mlp, one, two, eps), layer()
        if not torch.equal(x, kept):
            return "x itself has changed: write x = x + ..., which makes a new tensor"
        if other := read - {x.dtype}:
            return f"{kind}: a branch is given {other.pop()}: cast the norm's result back"
        if got.dtype != x.dtype:
            return f"a {kind} input should give a {kind} output, yours is {got.dtype}"
        if got.shape != x.shape:
            return f"the shape {tuple(x.shape)} became {tuple(got.shape)}"
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-5}.get(x.dtype, 2**-7)

        if x.dtype == torch.float16 and torch.allclose(got, layer(_own_type), atol=tolerance):
            return "float16 300 squared is infinite: take the mean square in float32"
        first = x + attention(_rms(x, one, eps))
        normed = _rms(x, one, eps)
        slips = {
            "the two weights are swapped": layer(w1=two, w2=one),
            "both norms use weight1": layer(w2=one),
            "mlp reads the stream without a norm": first + mlp(first),
            "attention reads the stream without a norm": _second(x + attention(x), two, eps, mlp),
            "there are no norms: each branch reads a normalised copy": _bare(x, attention, mlp),
            "both branches read the first x: mlp comes after attention's result was added": (
                x + attention(normed) + mlp(_rms(x, two, eps))
            ),
            "the norm stands on the stream, after the addition: that is post-norm": _rms(
                _post(x, attention, one, eps) + mlp(_post(x, attention, one, eps)), two, eps
            ),
            "what is added to is the normalised copy: add to the stream itself": _second_on_copy(
                normed + attention(normed), two, eps, mlp
            ),
            "mlp's result is returned alone: add it to the stream": mlp(_rms(first, two, eps)),
            "mlp's branch is missing": first,
            "the results replace the stream: add each to it": mlp(
                _rms(attention(normed), two, eps)
            ),
            "attention comes first, then mlp": _second(
                _second(x, two, eps, mlp), one, eps, attention
            ),
            "the norms stand behind the branches: each branch reads a normalised copy": _behind(
                _behind(x, one, eps, attention), two, eps, mlp
            ),
            "attention's result is not added to x, it replaces it": _second(
                attention(normed), two, eps, mlp
            ),
        }
        slips |= {why: layer(norm) for why, norm in _NORM_SLIPS.items()}
        said = f"the output begins {got.flatten()[0]:.4f}, not {want.flatten()[0]:.4f}"
        if why := check_values(got, want, slips, near=tolerance, otherwise=said):
            return f"{kind}: {why}"
    return None


def _second(x: Tensor, weight: Tensor, eps: float, mlp: Callable[[Tensor], Tensor]) -> Tensor:
    return x + mlp(_rms(x, weight, eps))


def _second_on_copy(
    x: Tensor, weight: Tensor, eps: float, mlp: Callable[[Tensor], Tensor]
) -> Tensor:
    normed = _rms(x, weight, eps)
    return normed + mlp(normed)


def _post(x: Tensor, f: Callable[[Tensor], Tensor], weight: Tensor, eps: float) -> Tensor:
    return _rms(x + f(x), weight, eps)


def _behind(x: Tensor, weight: Tensor, eps: float, f: Callable[[Tensor], Tensor]) -> Tensor:
    return x + _rms(f(x), weight, eps)


def _bare(x: Tensor, f: Callable[[Tensor], Tensor], g: Callable[[Tensor], Tensor]) -> Tensor:
    x = x + f(x)
    return x + g(x)


PREDICTED: dict[str, tuple[bool | int, str]] = {  # each with what to ask oneself again
    "RMSNorm(3 x) equals RMSNorm(x)": (True, "by what is 3 x divided?"),
    "RMSNorm(x + 5) equals RMSNorm(x)": (False, "does RMSNorm subtract anything?"),
    "LayerNorm(x + 5) equals LayerNorm(x)": (True, "what does LayerNorm do to the mean?"),
    "LayerNorm of a token changes with its neighbours": (
        False,
        "over which dimension is its mean taken?",
    ),
    "if every branch gives 0, a pre-norm layer gives x": (
        True,
        "is anything done to the stream itself?",
    ),
    "if every branch gives 0, a post-norm layer gives x": (False, "where does its norm stand?"),
    "width for C = 96, multiple of 64": (
        256,
        "8/3 of 96 is 256; which multiples of 64 are near?",
    ),
    "width for C = 100, multiple of 2": (
        266,
        "8/3 of 100 is 266.67: cut it to a whole number first",
    ),
}


@exercise(
    "06.2",
    "for each line, ask what is subtracted, what is divided by, and over which numbers",
    "a norm forgets the size, LayerNorm the mean as well; only post-norm changes the stream itself",
)
def _predict(answer: Any) -> str | None:
    for question, value in (as_given(answer, PREDICTED) or {}).items():
        wanted = PREDICTED[question][0]
        if value is not ... and type(value) is not type(wanted):
            kind = "True or False" if isinstance(wanted, bool) else "a whole number (int)"
            return f"{question}: write {kind}, not {value!r}"
    return check_table(answer, *apart(PREDICTED), fits=lambda value: True)


class _NoAutograd(TorchFunctionMode):
    """Refuses the tensors that torch.func's transforms follow; inference mode sees to the rest."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in args:
            if isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x):
                raise RuntimeError("grad")
        return func(*args, **(kwargs or {}))


def _below(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / 2**0.5))


def _bell(x: Tensor) -> Tensor:
    return torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5


GELU_MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "that is only the first term: by the product rule a second one is missing": _below,
    "the density is to be multiplied by x": lambda x: _below(x) + _bell(x),
    "the normal density has a factor 1 / sqrt(2 pi)": lambda x: (
        _below(x) + x * _bell(x) * (2 * torch.pi) ** 0.5
    ),
    "the normal density has a factor 1 / sqrt(2 pi), yours is 1 / sqrt(pi)": lambda x: (
        _below(x) + x * _bell(x) * 2**0.5
    ),
    "in the density x is squared and halved: erf is given x / sqrt(2)": lambda x: (
        _below(x) + x * torch.exp(-(x**2)) / torch.pi**0.5
    ),
    "the two terms are added, not subtracted": lambda x: _below(x) - x * _bell(x),
    "that is GELU itself, the question is its derivative": lambda x: x * _below(x),
}


@exercise(
    "06.3",
    "GELU is a product of two functions of x: what is the slope of a product?",
    "the smoothed step, plus x times its slope, which is the bell curve",
)
def _gelu_derivative(answer: Callable[[Tensor], Tensor]) -> str | None:
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    try:
        with torch.inference_mode(), _NoAutograd():  # nothing is recorded
            got = answer(x.clone())
    except RuntimeError as error:
        if "grad" in str(error) or "inference" in str(error).lower():
            return "autograd is switched off here: write the derivative as a formula"
        raise
    if not isinstance(got, Tensor):
        return f"return a tensor of slopes, not a {type(got).__name__}"
    if got.shape != x.shape:
        return f"for {len(x)} inputs I expected as many slopes, got shape {tuple(got.shape)}"
    if got.dtype != x.dtype:
        return f"x is float64, your slopes are {str(got.dtype).removeprefix('torch.')}"
    want = _below(x) + x * _bell(x)
    worst = int((got - want).abs().nan_to_num(torch.inf).argmax())
    off = (got - want).abs()[worst]
    if off < 3e-15:
        return None
    if off < 1e-5:
        return (
            f"off by {off:.0e} at x = {x[worst]:.1f}: a small difference, float32 or a rounded "
            "constant; from the formula it is exact"
        )
    slips = ((why, mistake(x)) for why, mistake in GELU_MISTAKES.items())
    said = f"at x = {x[worst]:.1f} the slope is {want[worst]:.4f}, not {got[worst]:.4f}"
    if torch.allclose(got, want, atol=2e-2):
        said = "close, but this is the derivative of one of GELU's approximations"
    return check_values(got, want, slips, otherwise=said)


def _config(
    kind: str, v: int, c: int, f: int, n: int, h: int, g: int, *, tied: bool, bias: bool = False
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": v,
        "hidden_size": c,
        "intermediate_size": f,
        "num_hidden_layers": n,
        "num_attention_heads": h,
        "num_key_value_heads": g,
        "tie_word_embeddings": tied,
    }
    return config | ({"attention_bias": bias} if kind == "llama" else {})


# The first four as published; the last one counted from transformers' own class (see the tests).
COUNTS = {
    "Llama-2-7B": (
        _config("llama", 32000, 4096, 11008, 32, 32, 32, tied=False),
        6_738_415_616,
    ),
    "Llama-3.1-8B": (_config("llama", 128256, 4096, 14336, 32, 32, 8, tied=False), 8_030_261_248),
    "Qwen2.5-0.5B": (_config("qwen2", 151936, 896, 4864, 24, 14, 2, tied=True), 494_032_768),
    "Qwen2.5-7B": (_config("qwen2", 152064, 3584, 18944, 28, 28, 4, tied=False), 7_615_616_512),
    "a small Llama with attention_bias": (
        _config("llama", 500, 64, 176, 3, 4, 2, tied=True, bias=True),
        171_264,
    ),
}


@exercise(
    "06.4",
    "compare the counts with the published ones, part by part: what do the other models share?",
    "a config is enough to count a model to the last parameter, if one knows what it leaves unsaid",
)
def _count_parameters(answer: Callable[[dict[str, Any]], int]) -> str | None:
    for name, (config, want) in COUNTS.items():
        got = answer(dict(config))
        if isinstance(got, bool) or not isinstance(got, int | float) or got != int(got):
            return f"{name}: a count is a whole number (int), got {got!r}"
        missing = want - int(got)
        if not missing:
            continue
        C, L, V = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        H, G = config["num_attention_heads"], config["num_key_value_heads"]
        shared, read = L * 2 * C * (H - G) * (C // H), L * (C + 2 * G * (C // H))
        qwen = config["model_type"] == "qwen2"
        biased = qwen or config["attention_bias"]
        parts = {
            (2 * L + 1) * C: "the norms are missing: two a layer and one at the end",
            C: "one norm is missing: the stack ends with one of its own",
            L * C * config["intermediate_size"]: "a gated block has three matrices, not two",
            -shared: "k and v have fewer heads than q here",
        }
        if config["tie_word_embeddings"]:
            parts[-V * C] = "embedding and head are tied here: count them once"
        else:
            parts[V * C] = "embedding and head are two matrices unless they are tied"
        if biased:
            who = "Qwen2 always has biases" if qwen else "attention_bias is true: there are biases"
            parts[read] = f"{who} on q, k and v" + ("" if qwen else ", and in a Llama on o")
            parts[read + L * C] = f"{who} on q, k and v" + ("" if qwen else ", and in a Llama on o")
            if qwen:
                parts[-L * C] = "o has no bias in Qwen2"
                del parts[read + L * C]
            else:
                parts[L * C] = "attention_bias is true: in a Llama, o has a bias too"
        else:
            parts[-read] = parts[-read - L * C] = "there are no biases in this model"
        for amount, why in parts.items():
            if amount and missing == amount:
                return f"{name}: {why}"
        for amount, why in parts.items():  # two slips at once: name the first
            if amount and any(missing == amount + other for other in parts if other != amount):
                return f"{name}: {why} (and something else)"
        return f"{name} has {want:,} parameters, you count {int(got):,}"
    return None


@exercise(
    "06.5",
    "what does relu(a - b) say, and how does a number get through relu whatever its sign?",
    "relu(x) - relu(-x) lets a number through, and relu(a - b) says by how much a is larger",
)
def _sorting(answer: Any) -> str | None:
    found = answer() if callable(answer) else answer
    if not isinstance(found, tuple | list) or len(found) != 2:
        return "return two matrices, up and down"
    up, down = (torch.as_tensor(m).double().detach() for m in found)
    if up.ndim != 2 or down.ndim != 2 or up.shape[0] != 2 or down.shape[1] != 2:
        return f"expected (2, F) and (F, 2), got {tuple(up.shape)} and {tuple(down.shape)}"
    if up.shape[1] != down.shape[0]:
        return f"up makes {up.shape[1]} numbers, down takes {down.shape[0]}"
    if up.shape[1] > 8:
        return f"{up.shape[1]} hidden units: at most 8"
    if not (up.isfinite().all() and down.isfinite().all()):
        return "there are numbers that are not finite"
    pairs = [(3, 1), (1, 3), (2, 2), (-1, -4), (-4, -1), (-2, 5), (5, -2), (0, 0), (0, -3), (70, 9)]
    x = torch.tensor(pairs, dtype=torch.float64)
    x = torch.cat((x, 10 * _draw(50, 2, seed=3).double()))
    got = F.relu(x @ up) @ down
    want = torch.stack((x.amax(-1), x.amin(-1)), -1)
    if torch.allclose(got, want, rtol=1e-5, atol=1e-5):
        return None
    if torch.allclose(got, want.flip(-1), rtol=1e-5, atol=1e-5):
        return "the smaller number comes first: the larger one should"
    bad = (got - want).abs().amax(-1) > 1e-4
    if not bad[(x >= 0).all(-1)].any():
        return "right while both numbers are positive: how does a negative number pass relu?"
    i = int(bad.nonzero()[0, 0])
    pair, mine = x[i].tolist(), got[i].tolist()
    return (
        f"({pair[0]:g}, {pair[1]:g}) should give ({want[i, 0]:g}, {want[i, 1]:g}), "
        f"yours gives ({mine[0]:g}, {mine[1]:g})"
    )
