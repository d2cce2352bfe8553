"""The same model for decoding: matrices fused and laid out as a CPU reads them, norms folded in.

Explained in deeper/10_fast_decoding.
"""

# Built from notebooks/deeper/10_fast_decoding.ipynb: edit there, then make build.

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.attention import attention
from minillm.cache import CacheLayer, KVCache
from minillm.deeper.attention import rope_scaling
from minillm.deeper.fast.kernels import (
    MOST_ROWS,
    materialized,
    pack_panels,
    panel_product,
    step_attention,
)
from minillm.heads import MultiHeadAttention
from minillm.layers import ACTIVATIONS, DecoderLayer, GatedMLP, RMSNorm
from minillm.model import CausalLM, Decoder
from minillm.rope import RotaryEmbedding, Rotation
from minillm.support.modes import own_method

__all__ = [
    "CHUNK",
    "PLAIN",
    "WAYS",
    "PackedLM",
    "PackedLayer",
    "PackedMatrix",
    "Ways",
    "by_onednn",
    "choose_ways",
    "glued",
    "in_halves",
    "measure_ways",
    "normalize",
    "normalized_product",
    "other_part",
    "plain_norm",
    "row_norms",
    "seconds_of",
]


def in_halves(x: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """`x @ W.T + plus` for one row x, as a batch of two products: the halves of W with a column.

    Shape: x (1, in), weight (out, in), plus (1, out) or (out,) -> (1, out).
    """
    out, size = weight.shape
    halves = 1 if out % 2 else 2
    column, laid = x.t().expand(halves, size, 1), weight.view(halves, -1, size)
    if plus is None:
        return torch.bmm(laid, column).view(1, -1)
    return torch.baddbmm(plus.view(halves, -1, 1), laid, column).view(1, -1)


WAYS = (("linear", "halves", "transposed"), ("linear", "mkldnn"))  # for one row, for more

PLAIN = ("linear", "linear")


def by_onednn(x: Tensor, copy: Tensor) -> Tensor:
    """`x @ W.T` for the copy `W.to_mkldnn()`. Shape: x (N, in), W (out, in) -> (N, out)."""
    return F.linear(x.to_mkldnn(), copy).to_dense()


class PackedMatrix(nn.Module):
    """A matrix W for products `x @ W.T + plus`: the routine depends on how many rows x has.

    `ways` names that for one row and that for more, of `WAYS`; they are for float32 on a CPU, all
    else goes by "linear". For "transposed" W lies column by column. For "mkldnn", oneDNN, there is
    a copy of a type of its own, made when it is first needed. A compiler gets sums over another
    form (`deeper.fast.kernels`), once `make_panels` was called. Both go when it changes.
    """

    weight: Tensor  # (out, in)

    def __init__(self, weight: Tensor, ways: tuple[str, str] = PLAIN) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.take(ways)

    def take(self, ways: tuple[str, str]) -> None:
        """Go these ways from now on."""
        self.ways, w = ways, self.weight
        self.weight = w.t().contiguous().t() if ways[0] == "transposed" else w.contiguous()
        self._forget()

    def _forget(self) -> None:
        self.mkldnn: Tensor | None = None
        self.panels: Tensor | None = None

    def make_mkldnn(self) -> Tensor:
        """The copy that oneDNN multiplies."""
        if self.mkldnn is None:
            with torch.inference_mode(False), torch.no_grad():
                self.mkldnn = self.weight.contiguous().to_mkldnn()
        return self.mkldnn

    def make_panels(self) -> None:
        """Make the form for a compiler, where it is of use: on a CPU, in a dtype that sums."""
        w = self.weight
        if self.panels is None and w.device.type == "cpu" and w.dtype in MOST_ROWS:
            with torch.inference_mode(False), torch.no_grad():
                self.panels = pack_panels(w.contiguous())

    def _apply(self, *args: Any, **kwargs: Any) -> "PackedMatrix":
        self._forget()  # they would keep their old dtype and device
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # oneDNN's copy can be neither copied nor saved
        return {**vars(self), "mkldnn": None, "panels": None}

    def takes_panels(self, x: Tensor) -> bool:
        """Whether a compiler gets sums for N rows x (N, ...)."""
        if not torch.compiler.is_compiling() or self.panels is None:
            return False
        same = x.dtype == self.panels.dtype and not torch.is_autocast_enabled("cpu")
        return same and len(x) <= MOST_ROWS[x.dtype]

    def reads(self, x: Tensor) -> bool:
        """Whether a prompt of such rows x (N, in) goes by it: where oneDNN is the quicker one."""
        return self.way(x) == "mkldnn"

    def way(self, x: Tensor) -> str:
        """How x (N, in) is multiplied."""
        w, way = self.weight, self.ways[len(x) > 1]
        if way == "linear" or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
            return "linear"
        return way if w.is_cpu and w.dtype == x.dtype == torch.float32 else "linear"

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """Shape: x (N, in), plus (N, out) or (out,) -> (N, out)."""
        if self.panels is not None and self.takes_panels(x):
            y = panel_product(x, self.panels, len(self.weight))
        elif (way := self.way(x)) == "mkldnn":
            y = by_onednn(x, self.make_mkldnn())
        elif way == "halves":
            return in_halves(x, self.weight, plus)
        elif plus is not None:
            return torch.addmm(plus, x, self.weight.t())
        else:
            return F.linear(x, self.weight)
        return y if plus is None else y + plus


Ways = Mapping[tuple[int, ...], tuple[str, str]]  # of each shape (out, in)


def seconds_of(
    multiply: Callable[[Tensor, Tensor], Tensor],
    rows: int,
    matrices: Sequence[tuple[tuple[int, ...], Tensor]],
) -> dict[tuple[int, ...], float]:
    """How long products of that many rows take with all matrices in turn, added up by shape."""
    spent: dict[tuple[int, ...], float] = defaultdict(float)
    for shape, w in matrices:
        x = torch.ones(rows, shape[1], dtype=torch.float32, device="cpu")
        start = time.perf_counter()
        multiply(x, w)
        spent[shape] += time.perf_counter() - start
    return spent


def measure_ways(weights: Sequence[Tensor]) -> Ways:
    """The quickest ways for each shape among these float32 matrices, on this CPU, by the clock.

    It takes about a tenth of a second. "linear" is left for what takes at most 95% of its time.
    """
    pieces: list[tuple[tuple[int, ...], Tensor]] = []  # of large matrices a part
    for w in weights:
        if tuple(w.shape) not in dict(pieces) or sum(p.numel() for _, p in pieces) < 2**23:
            pieces.append((tuple(w.shape), w[: max(1, 2**21 // w.shape[1])]))
    turned = [(s, w.view(w.shape[::-1]).t()) for s, w in pieces]  # other numbers, the same work
    copies = [(s, w.to_mkldnn()) for s, w in pieces if torch.backends.mkldnn.is_available()]
    runs: dict[tuple[str, int], Any] = {("halves", 1): (in_halves, pieces)}
    for rows in (1, 8):
        runs["linear", rows] = F.linear, pieces
        runs["transposed", rows] = F.linear, turned
    runs["mkldnn", 8] = by_onednn, copies
    best: dict[Any, float] = defaultdict(lambda: math.inf)
    begin, turns = time.perf_counter(), 0
    with torch.autocast("cpu", enabled=False):
        while turns < 3 or time.perf_counter() - begin < 0.05:
            turns += 1
            for (way, rows), (multiply, matrices) in runs.items():
                for shape, seconds in seconds_of(multiply, rows, matrices).items():
                    best[way, rows, shape] = min(seconds, best[way, rows, shape])

    def quickest(shape: tuple[int, ...], rows: int, usual: str, *others: str) -> str:
        least = min(others, key=lambda way: best[way, rows, shape])
        return least if best[least, rows, shape] < 0.95 * best[usual, rows, shape] else usual

    ways = {}
    for shape in dict(pieces):
        one = quickest(shape, 1, "linear", "halves", "transposed")
        if one == "transposed" and quickest(shape, 8, one, "linear") == "linear":
            one = quickest(shape, 1, "linear", "halves")
        usual = "transposed" if one == "transposed" else "linear"  # as it lies for more rows, too
        more = quickest(shape, 8, usual, "mkldnn")
        ways[shape] = one, "mkldnn" if more == "mkldnn" else "linear"
    return ways


def choose_ways(weights: Sequence[Tensor], ways: Ways | str | None) -> Ways:
    """The given ways of each shape; of one name, that where it is known; of None, the quickest.

    Raises: ValueError for names and shapes that are not known, and for ways other than "linear"
        where the matrices are not float32 on a CPU.
    """
    shapes = {tuple(w.shape): PLAIN for w in weights}
    if not shapes and ways is None:
        return {}
    others = {f"{w.dtype} on {w.device.type}" for w in weights} - {"torch.float32 on cpu"}
    if ways is None:
        return shapes if others else measure_ways(weights)
    if isinstance(ways, str):
        if ways not in {name for known in WAYS for name in known}:
            raise ValueError(f"unknown way {ways!r:.60}; for one row and for more there are {WAYS}")
        one, more = (ways if ways in known else "linear" for known in WAYS)
        ways = dict.fromkeys(shapes, (one, more))
    if not isinstance(ways, Mapping) or ways.keys() != shapes.keys():
        raise ValueError(f"ways {ways!r:.200}, but the matrices are {sorted(shapes)}")
    for shape, names in ways.items():
        if len(names) != 2 or any(n not in known for n, known in zip(names, WAYS, strict=True)):
            raise ValueError(f"ways {names!r:.60} for {shape}; one row and more have {WAYS}")
        if others and tuple(names) != PLAIN:
            raise ValueError(f"ways {names!r} for {others.pop()}: other than float32 has 'linear'")
        if "mkldnn" in names and not torch.backends.mkldnn.is_available():
            raise ValueError(f"ways {names!r}, but this torch was built without oneDNN")
    return dict(ways)


def row_norms(x: Tensor, eps: Tensor) -> Tensor:
    """sqrt(|x|^2 + eps^2) of each row, at least in float32. Shape: (N, C) -> (N, 1)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).hypot(eps)


def normalize(x: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps^2), row by row: RMSNorm but for a constant factor."""
    return (x / row_norms(x, eps)).to(x.dtype)


def normalized_product(
    matrix: PackedMatrix, x: Tensor, eps: Tensor, plus: Tensor | None = None
) -> Tensor:
    """`normalize(x) @ W.T + plus`. A compiler's sums are divided at their end.

    Shape: x (N, in), plus (N, out) or (out,) -> (N, out).
    """
    if not matrix.takes_panels(x):
        return matrix(normalize(x, eps), plus)
    y = (matrix(x) / materialized(row_norms(x, eps))).to(x.dtype)
    return y if plus is None else y + plus


def glued(linears: Sequence[Any], columns: Tensor | None = None) -> Any:
    """One matrix of several, one above the other; `columns` multiplies what it multiplies.

    Linears of another kind say themselves how that goes (`StoredLinear` of deeper/fast/stored).
    """
    if hasattr(linears[0], "glue"):
        return linears[0].glue(linears, columns)
    weight = torch.cat([p.weight for p in linears])
    return PackedMatrix(weight if columns is None else weight.mul_(columns))


class PackedLayer(nn.Module):
    """One decoder layer in four products: qkv, out, gate and up, down.

    The weight of a norm multiplies its output, so it can as well multiply the next matrix, and so
    can the square root in x / sqrt(mean(x^2) + eps) = sqrt(C) x / sqrt(|x|^2 + C eps).
    """

    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    norm_weights: Tensor | None  # Qwen3's, of q and k within each head: (H + G, 1, D)

    def __init__(self, layer: Any) -> None:
        super().__init__()
        a, m = layer.self_attn, layer.mlp
        self.heads, self.groups, self.dim = a.num_heads, a.num_kv_heads, a.head_dim
        self.scale = a.scale
        qkv, gate_up = [a.q_proj, a.k_proj, a.v_proj], [m.gate_proj, m.up_proj]
        root = a.hidden_size**0.5
        first, second = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.qkv, self.out = glued(qkv, first * root), glued([a.o_proj])
        self.gate_up, self.down = glued(gate_up, second * root), glued([m.down_proj])
        biases = {"qkv_bias": qkv, "out_bias": [a.o_proj], "gate_up_bias": gate_up}
        for name, linears in {**biases, "down_bias": [m.down_proj]}.items():
            given = linears[0].bias is not None
            self.register_buffer(name, torch.cat([p.bias for p in linears]) if given else None)
        weights = None
        if a.q_norm is not None:
            norms = [a.q_norm] * a.num_heads + [a.k_norm] * a.num_kv_heads
            weights, self.norm_eps = torch.stack([n.weight for n in norms])[:, None], a.q_norm.eps
        self.register_buffer("norm_weights", weights)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Shape: q (B, H, T, D), k and v (B, G, S, D) -> (B * T, H * D)."""
        B, _, T, D = q.shape
        if T > 1:
            y = attention(q, k, v, mask=mask, is_causal=is_causal, scale=self.scale).transpose(1, 2)
            return y.reshape(B * T, -1)
        q = q.view(B, self.groups, -1, D)  # those that share a key: rows of one product
        if self.out.takes_panels(q) and q[0, 0].numel() <= 256:  # registers hold its sums
            return step_attention(q, k, v, mask, self.scale).reshape(B, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return y.reshape(B, -1)

    def finish(self, y: Tensor, x: Tensor, eps: Tensor) -> Tensor:
        """What attention read, and the feed-forward block. Shape: (N, H * D), (N, C) -> (N, C)."""
        x = self.out(y, x if self.out_bias is None else x + self.out_bias)
        gate, up = normalized_product(self.gate_up, x, eps, self.gate_up_bias).chunk(2, -1)
        x = x if self.down_bias is None else x + self.down_bias
        return self.down(F.silu(gate) * up, x)

    def forward(
        self,
        x: Tensor,
        rope: Rotation | None,
        eps: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: CacheLayer | None,
        T: int,
    ) -> Tensor:
        """Shape: x (B * T, C) -> (B * T, C)."""
        H, G, D = self.heads, self.groups, self.dim
        qkv = normalized_product(self.qkv, x, eps, self.qkv_bias)
        qkv = qkv.view(-1, T, H + 2 * G, D).transpose(1, 2)  # (B, H + 2 G, T, D)
        qk = qkv.narrow(1, 0, H + G)
        if self.norm_weights is not None:
            qk = (F.rms_norm(qk, (D,), eps=self.norm_eps) * self.norm_weights).to(qkv.dtype)
        qk = qk if rope is None else rope(qk)
        q, k, v = qk.narrow(1, 0, H), qk.narrow(1, H, G), qkv.narrow(1, H + G, G)
        if cache is not None:
            k, v = cache.update(k, v)
        y = self.attend(q, k, v, mask, is_causal)
        if len(x) <= CHUNK:
            return self.finish(y, x, eps)
        chunks = zip(y.split(CHUNK), x.split(CHUNK), strict=True)
        return torch.cat([self.finish(*chunk, eps) for chunk in chunks])


CHUNK = 256  # rows that go through the products after attention together

_NORMS = ("input_layernorm", "post_attention_layernorm")

_KINDS = {"self_attn": MultiHeadAttention, "mlp": GatedMLP, **dict.fromkeys(_NORMS, RMSNorm)}


def plain_norm(part: Any, eps: Any) -> bool:
    """Whether this is the RMSNorm that is packed, with that epsilon."""
    from minillm.deeper.pretrained.changes import same_class

    return same_class(type(part), RMSNorm) and not part.offset and part.eps == eps


def other_part(model: CausalLM) -> str | None:
    """The first part that is not of the kind that is packed, as Llama's are; None if all are."""
    from minillm.deeper.pretrained.changes import same_class

    eps, rotary = model.config.rms_norm_eps, model.model.rotary
    for i, layer in enumerate(model.model.layers):
        if not same_class(type(layer), DecoderLayer):
            return f"layers.{i} is a {type(layer).__name__}"
        for name, kind in _KINDS.items():
            part = getattr(layer, name)
            if not same_class(type(part), kind) or (kind is RMSNorm and not plain_norm(part, eps)):
                return f"layers.{i}.{name} is {str(part).splitlines()[0].rstrip('(')}"
        a: Any = layer.self_attn
        m: Any = layer.mlp
        inner = [] if a.q_norm is None else [a.q_norm, a.k_norm]
        if not all(plain_norm(norm, inner[0].eps) for norm in inner):
            return f"layers.{i}.self_attn has norms of another kind"
        if m.activation is not F.silu:
            return f"layers.{i}.mlp has another activation than silu"
    if model.model.embedding is not None or rotary is None:
        return "its positions or embeddings are of another kind"
    if not any(
        same_class(type(rotary), kind) for kind in (RotaryEmbedding, rope_scaling.RotaryEmbedding)
    ):
        return f"rotary is a {type(rotary).__name__}"
    if not plain_norm(model.model.norm, eps):
        return f"norm is {model.model.norm}"
    ways = ("forward", "layer_mask")
    if any(own_method(model.model, x, Decoder) for x in ways) or own_method(
        model, "forward", CausalLM
    ):
        return f"a {type(model.model).__name__} runs its layers in its own way"
    return None


class PackedLM(CausalLM):
    """A `CausalLM` for generation only: a packed copy of the weights, same interface and numbers.

    Steps of one token use it, and prompts where it is quicker. The embedding is the model's own.
    Who trains the model further packs it anew. Matrices are of two kinds: float ones, and those of
    a GGUF file whose few bits were kept (deeper/10_four_bits).

    `ways` says how matrices are multiplied (`WAYS`): for each shape, as another copy's `ways`, or
    one name for all. None: what is quickest here by the clock, which may differ the next time, and
    with it the last digits.

    Raises: ValueError for a family whose layers are built otherwise, for adapters that are not
        merged (`beyond.lora`), for a part that has a forward hook or is not as the config makes it,
        for a model of which this process holds a part only, and for unknown `ways`.
    """

    eps: Tensor  # of the norms, times the square root that the matrices have taken in

    @torch.no_grad()
    def __init__(self, model: CausalLM, ways: Ways | str | None = None) -> None:
        from minillm.beyond.lora.adapters import check_merged
        from minillm.deeper.pretrained.changes import check_unchanged
        from minillm.deeper.pretrained.folder import empty_model
        from minillm.deeper.training.distributed import is_sharded

        nn.Module.__init__(self)
        if is_sharded(model):
            raise ValueError("this process holds only a part of the model: load it whole, in one")
        c = self.config = model.config
        check_merged(model, "a PackedLM copies matrices")
        lost = "packed() copies matrices and would leave it out"
        built = empty_model(CausalLM, c)
        for name, part in model.named_modules(remove_duplicate=False):
            if hasattr(part, "stored_kind"):  # of a file's few bits: as they were read
                built.set_submodule(name, part)
        check_unchanged(model, built, lost, hooks=True)
        strange = other_part(model)
        if strange or ACTIVATIONS[c.hidden_act] is not F.silu:
            why = strange or "only silu is computed"
            raise ValueError(f"{c.model_type} with {c.hidden_act} cannot be packed: {why}")
        self.model, self.lm_head = model.model, model.lm_head
        self.packed_layers = nn.ModuleList(PackedLayer(layer) for layer in model.model.layers)
        self.head = glued([model.lm_head], model.model.norm.weight * c.hidden_size**0.5)
        matrices = [part for part in self.modules() if isinstance(part, PackedMatrix)]
        self.ways = choose_ways([matrix.weight for matrix in matrices], ways)
        for matrix in matrices:
            matrix.take(self.ways[tuple(matrix.weight.shape)])
        self.training = False  # the model keeps its own mode
        self._make_eps()

    def _make_eps(self) -> None:
        eps = (self.config.hidden_size * self.config.rms_norm_eps) ** 0.5
        self.register_buffer("eps", torch.tensor(eps, device=self.lm_head.weight.device))

    def _apply(self, *args: Any, **kwargs: Any) -> "PackedLM":
        super()._apply(*args, **kwargs)
        self._make_eps()  # anew: a dtype of few digits on the way leaves no trace
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            "a PackedLM takes no weights, for it shares some with the model that it was made from: "
            "load them into that model and pack it anew"
        )

    def extra_repr(self) -> str:
        return f"ways={self.ways}"

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: KVCache | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """As `CausalLM.run`."""
        B, T = input_ids.shape
        x = self.model.embed(input_ids, position_ids).flatten(0, 1)  # (B * T, C)
        first: Any = self.packed_layers[0]
        if T > 1 and not first.gate_up.reads(x):
            return super().run(input_ids, position_ids, mask, is_causal, cache, logits_to_keep)
        rope = self.model.rotary(position_ids)  # type: ignore[misc]  # see other_part
        for i, layer in enumerate(self.packed_layers):
            layer_cache = None if cache is None else cache[i]
            own = self.model.layer_rotation(i, rope, position_ids)
            x = layer(x, own, self.eps, mask, is_causal, layer_cache, T)
        x = x.view(B, T, -1)[:, -logits_to_keep:]
        return normalized_product(self.head, x.flatten(0, 1), self.eps).view(B, x.shape[1], -1)

    def before_compiling(self) -> None:
        """Lay all matrices out in panels, beside their other form: as much memory again."""
        for part in self.modules():
            if isinstance(part, PackedMatrix):
                part.make_panels()
