"""What transformers consist of: MLPs and attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.networks.table import Pick, Shape, activation, block, divisor


@block("tokens")
class Mlp(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        hidden = pick(8, 6, 12)
        self.norm = pick(nn.LayerNorm, nn.RMSNorm, nn.Identity)(shape[1])
        self.fc1, self.act, self.fc2 = nn.Linear(shape[1], hidden), activation(pick), nn.Linear(hidden, shape[1])
        self.residual = pick(True, False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(self.act(self.fc1(self.norm(x))))
        return x + y if self.residual else y


@block("tokens")
class GatedMlp(nn.Module):
    """SwiGLU and its relatives, with one or two input projections."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.style, self.hidden = pick("two", "chunk", "glu", "split", "slice", "unbind", "view"), pick(6, 8)
        C = shape[1]
        if self.style == "two":
            self.gate, self.up = nn.Linear(C, self.hidden, bias=False), nn.Linear(C, self.hidden, bias=False)
        else:
            self.fused = nn.Linear(C, 2 * self.hidden)
        self.down = nn.Linear(self.hidden, C)

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "two":
            return x + self.down(F.silu(self.gate(x)) * self.up(x))
        y = self.fused(x)
        if self.style == "glu":
            return x + self.down(F.glu(y))
        if self.style == "chunk":
            gate, up = y.chunk(2, dim=-1)
        elif self.style == "split":
            gate, up = y.split(self.hidden, dim=-1)
        elif self.style == "slice":
            gate, up = y[..., : self.hidden], y[..., self.hidden :]
        elif self.style == "unbind":
            gate, up = y.view(*y.shape[:-1], 2, -1).unbind(-2)
        else:
            gate, up = y.view(*y.shape[:-1], self.hidden, 2).unbind(-1)
        return x + self.down(F.gelu(gate) * up)


@block("tokens")
class Attention(nn.Module):
    """Heads made and joined in various ways; what a head does is `_attend`."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.head_dim = pick(2, 3, 4), pick(4, 2)
        self.style = pick("separate", "chunk", "reshape3", "per_head", "split", "literal", "shape")
        self.core = pick(
            "sdpa", "matmul", "einsum", "bmm", "bias", "temperature", "talking", "qk_norm", "linear", "mask"
        )
        self.inner = self.all_head_size = self.num_heads * self.head_dim
        C = shape[1]
        if self.style in ("separate", "shape", "literal"):
            self.q, self.k, self.v = (nn.Linear(C, self.inner, bias=pick(True, False)) for _ in range(3))
        else:
            self.qkv = nn.Linear(C, 3 * self.inner)
        self.proj = nn.Linear(self.inner, C)
        self.scale = self.head_dim**-0.5
        if self.style == "literal":
            heads, size = self.num_heads, self.head_dim
            self.cut = lambda t: t.view(t.shape[0], t.shape[1], heads, size).permute(0, 2, 1, 3)
        self._extras(shape[0])

    def _extras(self, n: int) -> None:
        if self.core == "bias":
            self.table = nn.Parameter(torch.randn(2 * n - 1, self.num_heads))
            self.register_buffer("index", torch.arange(n)[:, None] - torch.arange(n)[None] + n - 1)
        elif self.core == "temperature":
            self.temperature = nn.Parameter(torch.rand(self.num_heads, 1, 1) + 0.5)
        elif self.core == "talking":
            self.mix = nn.Linear(self.num_heads, self.num_heads)
        elif self.core == "qk_norm":
            self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n = x.shape[:2]
        y = self._attend(*self._heads(x))  # (b, heads, n, size)
        if self.style in ("separate", "split"):
            y = y.permute(0, 2, 1, 3).contiguous().view(b, n, self.inner)
        elif self.style in ("chunk", "literal"):
            y = y.transpose(1, 2).reshape(b, n, self.num_heads * self.head_dim)
        elif self.style == "per_head":
            y = y.permute(0, 2, 1, 3).flatten(-2)
        else:
            y = y.transpose(1, 2).reshape(b, n, -1)
        return x + self.proj(y)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, _ = x.shape
        if self.style == "separate":
            shape = (b, n, self.num_heads, self.head_dim)
            return tuple(layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.style == "literal":
            return self.cut(self.q(x)), self.cut(self.k(x)), self.cut(self.v(x))
        if self.style == "shape":
            return tuple(layer(x).view(b, n, -1, self.head_dim).movedim(2, 1) for layer in (self.q, self.k, self.v))
        if self.style == "reshape3":
            return self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.style == "per_head":
            return self.qkv(x).view(b, n, self.num_heads, 3 * self.head_dim).transpose(1, 2).chunk(3, dim=-1)
        parts = self.qkv(x).chunk(3, dim=-1) if self.style == "chunk" else self.qkv(x).split(self.all_head_size, 2)
        return tuple(t.view(b, n, self.num_heads, t.shape[-1] // self.num_heads).transpose(1, 2) for t in parts)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, n, _ = q.shape
        if self.core == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        if self.core == "qk_norm":
            return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        if self.core == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            return q @ (k.transpose(-2, -1) @ v) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
        if self.core == "einsum":
            weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(self.scale).softmax(-1)
            return torch.einsum("bhij,bhjd->bhid", weights, v)
        if self.core == "bmm":
            q, k, v = (t.reshape(b * self.num_heads, n, self.head_dim) for t in (q, k, v))
            scores = torch.baddbmm(torch.zeros(1, n, n, dtype=q.dtype), q, k.transpose(1, 2), alpha=self.scale)
            return torch.bmm(scores.softmax(-1), v).view(b, self.num_heads, n, self.head_dim)
        scores = q @ k.transpose(-2, -1) * self.scale
        if self.core == "bias":
            scores = scores + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        elif self.core == "temperature":
            scores = scores * self.temperature
        elif self.core == "talking":
            scores = self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        elif self.core == "mask":
            mask = torch.ones(n, n, dtype=torch.bool).tril()
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(dim=-1) @ v


@block("tokens")
class GroupedQuery(nn.Module):
    """Fewer key/value heads than query heads."""

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        self.kv_heads, self.n_rep, self.d = pick(2, 3, 1), pick(2, 3), pick(2, 4)
        self.heads, C = self.kv_heads * self.n_rep, shape[1]
        self.style, self.fused = pick("interleave", "expand", "flag", "grouped"), pick(False, True)
        if self.fused:
            self.qkv = nn.Linear(C, (self.heads + 2 * self.kv_heads) * self.d, bias=False)
        else:
            self.q_proj = nn.Linear(C, self.heads * self.d)
            self.k_proj, self.v_proj = (nn.Linear(C, self.kv_heads * self.d) for _ in range(2))
        self.o_proj = nn.Linear(self.heads * self.d, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        if self.fused:
            few = self.kv_heads * self.d
            q, k, v = self.qkv(x).split([self.heads * self.d, few, few], dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = q.view(b, n, self.heads, self.d).transpose(1, 2)
        k, v = (t.view(b, n, self.kv_heads, self.d).transpose(1, 2) for t in (k, v))
        if self.style == "grouped":
            q = q.reshape(b, self.kv_heads, self.n_rep, n, self.d)
            y = (q @ k.unsqueeze(2).transpose(-1, -2)).softmax(-1) @ v.unsqueeze(2)
            return x + self.o_proj(y.flatten(1, 2).transpose(1, 2).reshape(b, n, -1))
        if self.style == "flag":
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, self._repeat(k), self._repeat(v))
        return x + self.o_proj(y.transpose(1, 2).reshape(b, n, self.heads * self.d))

    def _repeat(self, x: Tensor) -> Tensor:
        if self.style == "interleave":
            return x.repeat_interleave(self.n_rep, dim=1)
        b, h, n, d = x.shape
        return x[:, :, None, :, :].expand(b, h, self.n_rep, n, d).reshape(b, h * self.n_rep, n, d)


@block("tokens")
class Multihead(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        heads = divisor(pick, (2, 3, 4, 1), shape[1])
        self.attention = nn.MultiheadAttention(shape[1], heads, bias=pick(True, False), batch_first=True)
        self.weights = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        y, weights = self.attention(x, x, x, need_weights=self.weights)
        return x + y if weights is None else x + y * weights.mean()


@block("tokens")
class Encoder(nn.Module):
    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        heads = divisor(pick, (2, 3, 4, 1), shape[1])
        self.layer = nn.TransformerEncoderLayer(
            shape[1], heads, pick(6, 8), 0.0, norm_first=pick(True, False), batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@block("tokens")
class EinsumAttention(nn.Module):
    """Heads as an axis of the weights."""

    reads: ClassVar = {"w": (1,), "wo": (0, 1)}

    def __init__(self, pick: Pick, shape: Shape) -> None:
        super().__init__()
        h, d = pick(2, 3), pick(2, 4)
        self.w = nn.Parameter(torch.randn(3, shape[1], h, d) / 3)
        self.wo = nn.Parameter(torch.randn(h, d, shape[1]) / 3)
        self.three = pick(False, True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnc,chd->bhnd", x, w) for w in self.w)
        a = torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1)
        if self.three:
            return x + torch.einsum("bhnm,bhmd,hdc->bnc", a, v, self.wo)
        return x + torch.einsum("bhnd,hdc->bnc", a @ v, self.wo)
