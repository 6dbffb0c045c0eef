"""Attention of a few lines, one way of writing it each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, case, tokens

_WIDTH, _HEADS, _SIZE = 32, 4, 8


class _Attention(nn.Module):
    """Self-attention whose heads are made in one of several ways; the subclasses say which."""

    def __init__(self, inner: int = _WIDTH, fused: int = 3 * _WIDTH) -> None:
        super().__init__()
        self.heads, self.size = _HEADS, _SIZE
        self.qkv, self.out = nn.Linear(_WIDTH, fused), nn.Linear(inner, _WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values, each (batch, heads, length, size)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.split(x)
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))  # type: ignore[no-any-return]


class _Chunk(_Attention):
    """One projection, chunked in three."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, _ = x.shape
        return tuple(t.view(b, n, self.heads, self.size).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))


class _Permute(_Attention):
    """One projection, reshaped to (3, heads, size) as timm does."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, _ = x.shape
        return self.qkv(x).reshape(b, n, 3, self.heads, self.size).permute(2, 0, 3, 1, 4).unbind(0)  # type: ignore[no-any-return]


class _PerHead(_Attention):
    """One projection, head by head as GPT-NeoX and BLOOM do: (heads, 3 * size)."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, _ = x.shape
        return self.qkv(x).view(b, n, self.heads, 3 * self.size).transpose(1, 2).chunk(3, -1)  # type: ignore[no-any-return]


class _Grouped(_Attention):
    """Grouped-query attention: two key/value heads for four query heads."""

    def __init__(self, how: str) -> None:
        super().__init__(fused=_WIDTH + 2 * _WIDTH // 2)
        self.kv_heads, self.how = _HEADS // 2, how

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, _ = x.shape
        inner, few = self.heads * self.size, self.kv_heads * self.size
        q, k, v = self.qkv(x).split([inner, few, few], -1)
        q = q.view(b, n, self.heads, self.size).transpose(1, 2)
        k, v = (self.repeat(t.view(b, n, self.kv_heads, self.size).transpose(1, 2)) for t in (k, v))
        return q, k, v

    def repeat(self, x: Tensor) -> Tensor:
        """Return `x` with each of its heads repeated."""
        times = self.heads // self.kv_heads
        if self.how == "repeat_interleave":
            return x.repeat_interleave(times, 1)
        b, h, n, d = x.shape
        return x[:, :, None].expand(b, h, times, n, d).reshape(b, h * times, n, d)


class _GroupedFlag(_Grouped):
    """Grouped-query attention left to sdpa's `enable_gqa`."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def repeat(self, x: Tensor) -> Tensor:
        return x


class _Matmul(_Chunk):
    """Attention spelled out: matmul, mask, softmax, matmul."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.split(x)
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1) * self.size**-0.5).masked_fill(~mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, n, -1))  # type: ignore[no-any-return]


class _Bmm(_Chunk):
    """Attention with batch and heads folded together, as fairseq's descendants do."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.reshape(b * self.heads, n, self.size) for t in self.split(x))
        scores = torch.baddbmm(torch.zeros(1, 1, n), q, k.transpose(1, 2), alpha=self.size**-0.5)
        y = torch.bmm(scores.softmax(-1), v).view(b, self.heads, n, self.size)
        return self.out(y.transpose(1, 2).reshape(b, n, self.heads * self.size))  # type: ignore[no-any-return]


class _Rotary(_Chunk):
    """Rotary positions: each head's channels are halved, negated and joined again."""

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = super().split(x)
        angle = torch.arange(x.shape[1])[:, None] / 10 ** torch.arange(self.size // 2)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        return q, k, v


class _Einsum(nn.Module):
    """Attention by einsum with parameters of its own, heads as an axis of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, _WIDTH, _HEADS, _SIZE) * 0.2)
        self.out = nn.Parameter(torch.randn(_HEADS, _SIZE, _WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnc,chd->bhnd", x, w) for w in self.weight)
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1)
        return torch.einsum("bhnm,bhmd,hdc->bnc", scores, v, self.out)


class _EinsumMLP(nn.Module):
    """An MLP by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Parameter(torch.randn(_WIDTH, 48) * 0.2)
        self.outward = nn.Parameter(torch.randn(48, _WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnh,hc->bnc", torch.einsum("bnc,ch->bnh", x, self.inward).relu(), self.outward)


class _Multihead(nn.Module):
    """`nn.MultiheadAttention` as self-attention."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_WIDTH, _HEADS, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


class _Block(nn.Module):
    """A pre-norm transformer block around an attention, with a classifier."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(_WIDTH), attention, nn.LayerNorm(_WIDTH)
        self.fc1, self.fc2, self.head = nn.Linear(_WIDTH, 64), nn.Linear(64, _WIDTH), nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class _TiedLM(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(100, _WIDTH), _Block(_Chunk())
        self.fc, self.output = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 100, bias=False)
        self.block.head = nn.Linear(_WIDTH, _WIDTH)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.output(self.fc(x) + self.block(x)[:, None])  # type: ignore[no-any-return]


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 64, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(_WIDTH, 4))


def _transformer() -> nn.Module:
    return nn.Transformer(_WIDTH, _HEADS, 1, 1, 64, batch_first=True)


_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "attention_chunk": lambda: _Block(_Chunk()),
    "attention_permute": lambda: _Block(_Permute()),
    "attention_per_head": lambda: _Block(_PerHead()),
    "attention_gqa_repeat": lambda: _Block(_Grouped("repeat_interleave")),
    "attention_gqa_expand": lambda: _Block(_Grouped("expand")),
    "attention_gqa_flag": lambda: _Block(_GroupedFlag("none")),
    "attention_matmul": lambda: _Block(_Matmul()),
    "attention_bmm": lambda: _Block(_Bmm()),
    "attention_rotary": lambda: _Block(_Rotary()),
    "attention_einsum": lambda: _Block(_Einsum()),
    "einsum_mlp": lambda: _Block(_EinsumMLP()),
    "multihead": lambda: _Block(_Multihead(batch_first=True)),
    "multihead_seq_first": lambda: _Block(_Multihead(batch_first=False)),
    "transformer_encoder": _encoder,
}


def _sequence() -> Tensor:
    return torch.randn(2, 6, _WIDTH)


def cases() -> list[Case]:
    """Return the plain attention cases."""
    rows: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]]
    rows = [(name, make, _sequence) for name, make in _SEQUENCES.items()]
    rows += [
        ("transformer", _transformer, lambda: (_sequence(), _sequence())),
        ("tied_lm", _TiedLM, tokens()),
    ]
    return [case("plain", *row) for row in rows]
