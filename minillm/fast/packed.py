"""The same model for decoding: matrices fused and laid out as a CPU reads them, norms folded in.

Explained in notebooks/10_minillm.ipynb.
"""

# Built from notebooks/10_minillm.ipynb: edit there, then make build.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.cache.base import CacheLayer, KVCache
from minillm.fast.kernels import MOST_ROWS, panel_product, settled, step_attention, to_panels
from minillm.model import CausalLM, product_dtype
from minillm.nn.attention import attention

__all__ = [
    "PACKABLE",
    "SLAB",
    "PackedLM",
    "PackedLayer",
    "PackedMatrix",
    "lay_out",
    "multiply",
    "row_lengths",
    "shrink",
    "shrunk_product",
]

PACKABLE = ("llama", "mistral", "qwen2", "qwen3")


def lay_out(weight: Tensor) -> Tensor:
    """The rows of a matrix in two halves, in one piece of memory.

    Shape: (out, in) -> (2, out / 2, in), or (1, out, in) if out is odd.
    """
    halves = 1 if len(weight) % 2 else 2
    return weight.contiguous().view(halves, -1, weight.shape[1])


def multiply(x: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """`x @ W.T + plus` for W from `lay_out`: one row of float32 goes through the batched product.

    Shape: x (B, in), weight (2, out / 2, in), plus (B, out) or (out,) -> (B, out).
    """
    halves, half, size = weight.shape
    one = x.shape[0] == 1 and x.dtype == torch.float32
    if one and not torch.compiler.is_compiling():  # twice as quick as linear on many CPUs
        column = x.t().expand(halves, size, 1)
        if plus is None:
            return torch.bmm(weight, column).view(1, -1)
        return torch.baddbmm(plus.view(halves, half, 1), weight, column).view(1, -1)
    flat = weight.view(-1, size)
    return F.linear(x, flat) if plus is None else torch.addmm(plus, x, flat.t())


class _Forms(nn.Module):
    """A matrix, and the other forms of it that were asked for; they go when it changes."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", lay_out(weight))
        self._forget()

    def _forget(self) -> None:
        self.mkldnn: Tensor | None = None
        self.panels: Tensor | None = None

    def make_mkldnn(self) -> None:
        """Make the copy that oneDNN multiplies."""
        if self.mkldnn is None:
            with torch.inference_mode(False), torch.no_grad():
                self.mkldnn = self.weight.flatten(0, 1).to_mkldnn()

    def lay_out_panels(self) -> None:
        """Make the form for a compiler, where it is of use: on a CPU, in a dtype that sums."""
        w = self.weight
        if self.panels is None and w.device.type == "cpu" and w.dtype in MOST_ROWS:
            with torch.inference_mode(False), torch.no_grad():
                self.panels = to_panels(w.flatten(0, 1))

    def _apply(self, *args: Any, **kwargs: Any) -> "_Forms":
        self._forget()  # they would keep their old dtype and device
        return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:  # oneDNN's copy can be neither copied nor saved
        return {**vars(self), "mkldnn": None, "panels": None}


class PackedMatrix(_Forms):
    """A matrix W for products `x @ W.T + plus`: the routine depends on how many rows x has.

    One row goes by `multiply`. More rows of a large float32 matrix on a CPU go to oneDNN, in a copy
    of a type of its own, which is made when it is first needed. A compiler gets sums over a third
    form (`minillm.fast.kernels`), once `lay_out_panels` was called.
    """

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
        if self.takes_panels(x):
            y = panel_product(x, self.panels, self.weight.shape[:2].numel())
        elif self.takes_rows(x):
            self.make_mkldnn()
            y = F.linear(x.to_mkldnn(), self.mkldnn).to_dense()
        else:
            return multiply(x, self.weight, plus)
        return y if plus is None else y + plus


def row_lengths(x: Tensor, floor: Tensor) -> Tensor:
    """sqrt(|x|^2 + floor^2) of each row, at least in float32. Shape: (N, C) -> (N, 1)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).hypot(floor)


def shrink(x: Tensor, floor: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + floor^2), row by row: RMSNorm but for a constant factor."""
    return (x / row_lengths(x, floor)).to(x.dtype)


def shrunk_product(
    matrix: PackedMatrix, x: Tensor, floor: Tensor, plus: Tensor | None = None
) -> Tensor:
    """`shrink(x) @ W.T + plus`. A compiler's sums are divided at their end.

    Shape: x (N, in), plus (N, out) or (out,) -> (N, out).
    """
    if not matrix.takes_panels(x):
        return matrix(shrink(x, floor), plus)
    y = (matrix(x) / settled(row_lengths(x, floor))).to(x.dtype)
    return y if plus is None else y + plus


class _PackedProducts(nn.Module):
    """The four matrices of a layer, with their biases: qkv, out, gate and up, down."""

    def __init__(self, layer: nn.Module) -> None:
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
        self.norms, scales = a.q_norm is not None, None
        if self.norms:  # Qwen3's, within each head: (H + G, 1, D)
            norms = [a.q_norm] * a.num_heads + [a.k_norm] * a.num_kv_heads
            scales, self.eps = torch.stack([norm.weight for norm in norms])[:, None], a.q_norm.eps
        self.register_buffer("scales", scales)


SLAB = 256  # rows that go through the products after attention together


class _PackedParts(_PackedProducts):
    """What a layer does with queries, keys and values, and what it does afterwards."""

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

    def finish(self, y: Tensor, x: Tensor, floor: Tensor) -> Tensor:
        """What attention read, and the feed-forward block. Shape: (N, H * D), (N, C) -> (N, C)."""
        x = self.out(y, x if self.out_bias is None else x + self.out_bias)
        gate, up = shrunk_product(self.gate_up, x, floor, self.gate_up_bias).chunk(2, -1)
        x = x if self.down_bias is None else x + self.down_bias
        return self.down(F.silu(gate) * up, x)


class PackedLayer(_PackedParts):
    """One decoder layer in four products: qkv, out, gate and up, down.

    The weight of a norm multiplies its output, so it can as well multiply the next matrix, and so
    can the square root in x / sqrt(mean(x^2) + eps) = sqrt(C) x / sqrt(|x|^2 + C eps).
    """

    def forward(
        self,
        x: Tensor,
        turns: tuple[Tensor, Tensor],
        floor: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        cache: CacheLayer | None,
    ) -> Tensor:
        """Shape: x (B * T, C), cosines and sines (B or 1, 1, T, D) -> (B * T, C)."""
        H, G, D, (cos, sin) = self.heads, self.groups, self.dim, turns
        qkv = shrunk_product(self.qkv, x, floor, self.qkv_bias)
        qkv = qkv.view(-1, cos.shape[2], H + 2 * G, D).transpose(1, 2)  # (B, H + 2 G, T, D)
        qk = qkv.narrow(1, 0, H + G)
        if self.norms:
            qk = (F.rms_norm(qk, (D,), eps=self.eps) * self.scales).to(qkv.dtype)
        qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
        q, k, v = qk.narrow(1, 0, H), qk.narrow(1, H, G), qkv.narrow(1, H + G, G)
        if cache is not None:
            k, v = cache.update(k, v)
        y = self.attend(q, k, v, mask, is_causal)
        if len(x) <= SLAB:
            return self.finish(y, x, floor)
        slabs = zip(y.split(SLAB), x.split(SLAB), strict=True)
        return torch.cat([self.finish(*slab, floor) for slab in slabs])


class _PackedWeights(CausalLM):
    """The packed layers and head of a model, and the table of turns."""

    @torch.no_grad()
    def __init__(self, model: CausalLM) -> None:
        nn.Module.__init__(self)
        c = self.config = model.config
        if c.model_type not in PACKABLE or c.hidden_act != "silu" or c.rope_interleave:
            given = f"{c.model_type} with {c.hidden_act}, rope_interleave={c.rope_interleave}"
            raise ValueError(f"{given} cannot be packed; {', '.join(PACKABLE)} with silu can")
        self.model, self.lm_head = model.model, model.lm_head
        self.packed = nn.ModuleList(PackedLayer(layer) for layer in model.model.layers)
        head = model.lm_head.weight * (model.model.norm.weight * c.hidden_size**0.5)
        self.head = PackedMatrix(head)
        self.training = False  # the model keeps its own mode
        self._compute_constants()

    def _compute_constants(self) -> None:
        """The norms' floor, and the turns of the first positions."""
        c, device = self.config, self.lm_head.weight.device
        floor = torch.tensor((c.hidden_size * c.rms_norm_eps) ** 0.5, device=device)
        known = 1 if self.model.rotary.dynamic else min(c.max_position_embeddings, 4096)
        self.register_buffer("floor", floor)
        self.register_buffer("table", self.turns(torch.arange(known, device=device)[None]))

    def _apply(self, *args: Any, **kwargs: Any) -> "_PackedWeights":
        super()._apply(*args, **kwargs)
        self._compute_constants()  # anew: a dtype of few digits on the way leaves no trace
        return self

    def turns(self, position_ids: Tensor) -> Tensor:
        """Cosines, and sines with the first half negative. Shape: (B, T) -> (B, T, 2, D)."""
        rotation = self.model.rotary(position_ids)
        first, second = rotation.sin.chunk(2, -1)
        return torch.stack((rotation.cos, torch.cat((-first, second), -1)), dim=-2)

    def _turns_at(self, position_ids: Tensor) -> Tensor:
        """As `turns`, from the table where that is quicker."""
        unseen = torch.compiler.is_compiling() or position_ids.is_cuda  # reading them would wait
        if unseen or int(position_ids.max()) >= self.table.shape[1]:
            return self.turns(position_ids)
        return self.table[0, position_ids]


class PackedLM(_PackedWeights):
    """A `CausalLM` for generation only: a packed copy of the weights, same interface and numbers.

    Steps of one token use it, and prompts where oneDNN is of use. The
    embedding is the model's own. Who trains the model further packs it anew.

    Raises: ValueError for a family whose layers are built otherwise.
    """

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
        x = self.model.embed_tokens(input_ids).flatten(0, 1)  # (B * T, C)
        if T > 1 and not self.packed[0].gate_up.takes_rows(x):
            return super().run(input_ids, position_ids, mask, is_causal, cache, logits_to_keep)
        turns = self._turns_at(position_ids).to(product_dtype(self.lm_head.weight))
        turns = turns[:, None].unbind(3)  # (B or 1, 1, T, D) each
        for i, layer in enumerate(self.packed):
            layer_cache = None if cache is None else cache[i]
            x = layer(x, turns, self.floor, mask, is_causal, layer_cache)
        x = x.view(B, T, -1)[:, -logits_to_keep:]
        return shrunk_product(self.head, x.flatten(0, 1), self.floor).view(B, x.shape[1], -1)

    def before_compiling(self) -> None:
        """Lay all matrices out in panels, beside their other form: as much memory again."""
        for part in self.modules():
            if isinstance(part, PackedMatrix):
                part.lay_out_panels()
