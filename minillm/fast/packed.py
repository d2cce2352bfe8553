"""The same model for decoding: matrices fused and laid out as a CPU reads them, norms folded in.

Explained in deeper/10_fast_decoding.
"""

# Built from notebooks/deeper/10_fast_decoding.ipynb: edit there, then make build.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cache.base import CacheLayer, KVCache
from minillm.fast.kernels import MOST_ROWS, pack_panels, panel_product, settled, step_attention
from minillm.model import CausalLM
from minillm.nn.attention import attention
from minillm.nn.layers import ACTIVATIONS
from minillm.nn.rope import Rotation

__all__ = [
    "CHUNK",
    "PACKABLE",
    "PackedLM",
    "PackedLayer",
    "PackedMatrix",
    "multiply",
    "normalize",
    "normalized_product",
    "pack",
    "row_norms",
]


def pack(weight: Tensor) -> Tensor:
    """The rows of a matrix in two halves, in one piece of memory.

    Shape: (out, in) -> (2, out / 2, in), or (1, out, in) if out is odd.
    """
    halves = 1 if len(weight) % 2 else 2
    return weight.contiguous().view(halves, -1, weight.shape[1])


def multiply(x: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """`x @ W.T + plus` for W from `pack`: one row of float32 goes through the batched product.

    Shape: x (B, in), weight (2, out / 2, in), plus (B, out) or (out,) -> (B, out).
    """
    halves, half, size = weight.shape
    one = x.shape[0] == 1 and x.dtype == torch.float32
    if one and not torch.compiler.is_compiling():  # often quicker than linear, on some CPUs twice
        column = x.t().expand(halves, size, 1)
        if plus is None:
            return torch.bmm(weight, column).view(1, -1)
        return torch.baddbmm(plus.view(halves, half, 1), weight, column).view(1, -1)
    flat = weight.view(-1, size)
    return F.linear(x, flat) if plus is None else torch.addmm(plus, x, flat.t())


class PackedMatrix(nn.Module):
    """A matrix W for products `x @ W.T + plus`: the routine depends on how many rows x has.

    One row goes by `multiply`. More rows of a large float32 matrix on a CPU go to oneDNN, in a copy
    of a type of its own, which is made when it is first needed. A compiler gets sums over a third
    form (`minillm.fast.kernels`), once `make_panels` was called. Both go when the matrix changes.
    """

    weight: Tensor  # from `pack`

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", pack(weight))
        self._forget()

    def _forget(self) -> None:
        self.mkldnn: Tensor | None = None
        self.panels: Tensor | None = None

    def make_mkldnn(self) -> Tensor:
        """The copy that oneDNN multiplies."""
        if self.mkldnn is None:
            with torch.inference_mode(False), torch.no_grad():
                self.mkldnn = self.weight.flatten(0, 1).to_mkldnn()
        return self.mkldnn

    def make_panels(self) -> None:
        """Make the form for a compiler, where it is of use: on a CPU, in a dtype that sums."""
        w = self.weight
        if self.panels is None and w.device.type == "cpu" and w.dtype in MOST_ROWS:
            with torch.inference_mode(False), torch.no_grad():
                self.panels = pack_panels(w.flatten(0, 1))

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

    def takes_rows(self, x: Tensor) -> bool:
        """Whether oneDNN is to multiply x (N, in) with N > 1."""
        w = self.weight
        if torch.compiler.is_compiling() or len(x) < 2 or w.numel() < 2**18:
            return False
        if w.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        return w.dtype == x.dtype == torch.float32 and torch.backends.mkldnn.is_available()

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        """Shape: x (N, in), plus (N, out) or (out,) -> (N, out)."""
        if self.panels is not None and self.takes_panels(x):
            y = panel_product(x, self.panels, self.weight.shape[:2].numel())
        elif self.takes_rows(x):
            y = F.linear(x.to_mkldnn(), self.make_mkldnn()).to_dense()
        else:
            return multiply(x, self.weight, plus)
        return y if plus is None else y + plus


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
    y = (matrix(x) / settled(row_norms(x, eps))).to(x.dtype)
    return y if plus is None else y + plus


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
        pieces = {
            "qkv": torch.cat([p.weight for p in qkv]) * (first * root),
            "out": a.o_proj.weight.clone(),
            "gate_up": torch.cat([p.weight for p in gate_up]) * (second * root),
            "down": m.down_proj.weight.clone(),
        }
        for name, weight in pieces.items():
            self.add_module(name, PackedMatrix(weight))
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
        rope: Rotation,
        eps: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: CacheLayer | None,
    ) -> Tensor:
        """Shape: x (B * T, C) -> (B * T, C)."""
        H, G, D, T = self.heads, self.groups, self.dim, rope.cos.shape[-2]
        qkv = normalized_product(self.qkv, x, eps, self.qkv_bias)
        qkv = qkv.view(-1, T, H + 2 * G, D).transpose(1, 2)  # (B, H + 2 G, T, D)
        qk = qkv.narrow(1, 0, H + G)
        if self.norm_weights is not None:
            qk = (F.rms_norm(qk, (D,), eps=self.norm_eps) * self.norm_weights).to(qkv.dtype)
        qk = rope(qk)
        q, k, v = qk.narrow(1, 0, H), qk.narrow(1, H, G), qkv.narrow(1, H + G, G)
        if cache is not None:
            k, v = cache.update(k, v)
        y = self.attend(q, k, v, mask, is_causal)
        if len(x) <= CHUNK:
            return self.finish(y, x, eps)
        chunks = zip(y.split(CHUNK), x.split(CHUNK), strict=True)
        return torch.cat([self.finish(*chunk, eps) for chunk in chunks])


CHUNK = 256  # rows that go through the products after attention together

PACKABLE = ("llama", "mistral", "qwen2", "qwen3")


class PackedLM(CausalLM):
    """A `CausalLM` for generation only: a packed copy of the weights, same interface and numbers.

    Steps of one token use it, and prompts where oneDNN is of use. The
    embedding is the model's own. Who trains the model further packs it anew.

    Raises: ValueError for a family whose layers are built otherwise, for adapters that are not
        merged (`minillm.nn.lora`), for a part that has a forward hook or is not as the config makes
        it, and for a model of which this process holds a part only.
    """

    eps: Tensor  # of the norms, times the square root that the matrices have taken in

    @torch.no_grad()
    def __init__(self, model: CausalLM) -> None:
        from minillm.nn.lora import check_merged
        from minillm.pretrained.changes import check_unchanged
        from minillm.pretrained.load import empty_model
        from minillm.training.distributed import is_sharded

        nn.Module.__init__(self)
        if is_sharded(model):
            raise ValueError("this process holds only a part of the model: load it whole, in one")
        c = self.config = model.config
        silu = ACTIVATIONS[c.hidden_act] is F.silu
        if c.model_type not in PACKABLE or not silu or c.rope_interleave:
            given = f"{c.model_type} with {c.hidden_act}, rope_interleave={c.rope_interleave}"
            raise ValueError(f"{given} cannot be packed; {', '.join(PACKABLE)} with silu can")
        check_merged(model, "a PackedLM copies matrices")
        lost = "packed() copies matrices and would leave it out"
        check_unchanged(model, empty_model(c), lost, hooks=True)
        self.model, self.lm_head = model.model, model.lm_head
        self.packed_layers = nn.ModuleList(PackedLayer(layer) for layer in model.model.layers)
        self.head = PackedMatrix(
            model.lm_head.weight * (model.model.norm.weight * c.hidden_size**0.5)
        )
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
        if T > 1 and not first.gate_up.takes_rows(x):
            return super().run(input_ids, position_ids, mask, is_causal, cache, logits_to_keep)
        rope = self.model.rotary(position_ids)  # type: ignore[misc]  # all of PACKABLE rotate
        for i, layer in enumerate(self.packed_layers):
            layer_cache = None if cache is None else cache[i]
            x = layer(x, rope, self.eps, mask, is_causal, layer_cache)
        x = x.view(B, T, -1)[:, -logits_to_keep:]
        return normalized_product(self.head, x.flatten(0, 1), self.eps).view(B, x.shape[1], -1)

    def before_compiling(self) -> None:
        """Lay all matrices out in panels, beside their other form: as much memory again."""
        for part in self.modules():
            if isinstance(part, PackedMatrix):
                part.make_panels()
