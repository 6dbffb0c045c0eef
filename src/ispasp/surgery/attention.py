"""`nn.MultiheadAttention` with fewer heads.

torch's own module asserts that all heads together are as wide as the model, so it cannot run once heads are gone.
"""

from __future__ import annotations

from copy import copy
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from ispasp.errors import InputError


@final
class SlimMultiheadAttention(nn.Module):
    """Computes what `nn.MultiheadAttention` does, with H heads of size D where H * D need not be the model's width E.

    `slim` makes it. Parameters have the names that torch gives them: in_proj_weight (3 * H * D, E), or with kdim or
    vdim q_proj_weight (H * D, E), k_proj_weight (H * D, kdim) and v_proj_weight (H * D, vdim); in_proj_bias
    (3 * H * D); bias_k and bias_v (1, 1, H * D); out_proj.weight (E, H * D).
    """

    in_proj_weight: Tensor | None
    q_proj_weight: Tensor
    k_proj_weight: Tensor
    v_proj_weight: Tensor
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    out_proj: nn.Linear
    embed_dim: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool

    def __init__(self, module: nn.MultiheadAttention | SlimMultiheadAttention, heads: int) -> None:
        """Take over everything that `module` has: the same parameters, in copies of the dicts that hold them."""
        super().__init__()
        for name, value in vars(module).items():
            if name != "_compiled_call_impl":  # bound to `module`
                self.__dict__[name] = copy(value) if isinstance(value, (dict, set)) else value
        self.num_heads = heads
        # nn.TransformerEncoderLayer reads this: False keeps it from the fused kernel, which wants H * D == E.
        self._qkv_same_embed_dim = False

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"

    def reset_parameters(self) -> None:
        W, b = self.in_proj_weight, self.in_proj_bias
        for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if W is None else (W,):
            nn.init.xavier_uniform_(weight)
        for bias in (b, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from queries to keys, as `nn.MultiheadAttention.forward` does.

        query (L, E), (L, B, E), or (B, L, E) if batch_first; key and value alike with S for L, kdim and vdim for E;
        key_padding_mask (S) or (B, S); attn_mask (L, S) or (B * H, L, S), H being the number of heads left.
        Returns the output, of query's shape, and None or the weights: (B, L, S), averaged over the heads left, or
        (B, H, L, S); without B if query has no batch.
        """
        if is_causal and attn_mask is None:
            raise InputError("is_causal=True is a hint about attn_mask, which is None: pass the causal mask as well")
        if query.is_nested or key.is_nested or value.is_nested:
            self._check_nested(query, key, value, key_padding_mask, attn_mask)
            return self._forward_nested(query, key, value, need_weights, average_attn_weights)
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        q, k, v = (self._split(x, batched) for x in self._project(query, key, value))  # (B, H, L, D), (B, H, S, D) x 2
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        # As in torch, the hint replaces the mask wherever nothing else needs the mask.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = _merge(None if is_causal else attn_mask, key_padding_mask, q, k)
        k, v, mask = self._extend(k, v, mask)
        heads, weights = self._attend(q, k, v, mask, is_causal, need_weights)  # (B, H, L, D), (B, H, L, S)
        output = functional.linear(self._join(heads, batched), self.out_proj.weight, self.out_proj.bias)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        W, b = self.in_proj_weight, self.in_proj_bias
        if W is not None and query is key and key is value:
            return functional.linear(query, W, b).chunk(3, -1)
        Ws = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if W is None else W.chunk(3)
        bs = (None, None, None) if b is None else b.chunk(3)
        return tuple(functional.linear(*xWb) for xWb in zip((query, key, value), Ws, bs, strict=True))

    def _split(self, x: Tensor, batched: bool) -> Tensor:
        x = x.view(*x.shape[:-1], self.num_heads, self.head_dim)
        if not batched:
            return x.transpose(0, 1).unsqueeze(0)
        return x.permute(0, 2, 1, 3) if self.batch_first else x.permute(1, 2, 0, 3)  # (B, H, L, D)

    def _join(self, y: Tensor, batched: bool) -> Tensor:
        if not batched:
            return y.squeeze(0).transpose(0, 1).flatten(-2)
        return (y.permute(0, 2, 1, 3) if self.batch_first else y.permute(2, 0, 1, 3)).flatten(-2)

    def _extend(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add the learned key and value (add_bias_kv), then zeros (add_zero_attn); no mask hides them."""
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            extra += 1
            shape = (self.num_heads, 1, self.head_dim)
            k = torch.cat([k, self.bias_k.view(shape).expand(k.shape[0], *shape)], dim=2)
            v = torch.cat([v, self.bias_v.view(shape).expand(v.shape[0], *shape)], dim=2)
        if self.add_zero_attn:
            extra += 1
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
        return k, v, functional.pad(mask, (0, extra)) if mask is not None and extra else mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        p = self.dropout if self.training else 0.0
        if not need_weights:
            return functional.scaled_dot_product_attention(q, k, v, mask, p, is_causal), None
        scores = (q * self.head_dim**-0.5) @ k.mT  # (B, H, L, S)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        if p > 0.0:
            weights = functional.dropout(weights, p)
        return weights @ v, weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend on nested tensors, which an nn.TransformerEncoder built with all heads sends."""
        padded = {id(x): x.to_padded_tensor(0.0) for x in (query, key, value)}  # one tensor stays one tensor
        q, k, v = padded[id(query)], padded[id(key)], padded[id(value)]
        lengths = torch.tensor([x.shape[0] for x in key.unbind()], device=k.device)
        padding = torch.arange(k.shape[1], device=k.device) >= lengths.unsqueeze(1)  # (B, S)
        output, weights = self.forward(q, k, v, padding, need_weights, average_attn_weights=average_attn_weights)
        rows = [y[: x.shape[0]] for x, y in zip(query.unbind(), output.unbind(), strict=True)]
        return torch.nested.as_nested_tensor(rows), weights

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch = 0 if self.batch_first else 1
        alike = query.dim() in (2, 3) and query.dim() == key.dim() and key.shape[:-1] == value.shape[:-1]
        if not alike or (query.dim() == 3 and query.shape[batch] != key.shape[batch]):
            shapes = [tuple(x.shape) for x in (query, key, value)]
            raise InputError(
                f"query, key and value of shapes {shapes} do not go together with batch_first={self.batch_first}: "
                "pass (L, E) or a batch of them, with one value for each key"
            )

    def _check_nested(self, query: Tensor, key: Tensor, value: Tensor, *masks: Tensor | None) -> None:
        nested = [x.is_nested for x in (query, key, value)]
        if not (self.batch_first and all(nested) and all(mask is None for mask in masks)):
            raise InputError(
                f"nested query, key, value: {nested}, batch_first={self.batch_first}, masks given: "
                f"{sum(mask is not None for mask in masks)}: nested tensors need all three, batch_first and no mask"
            )


def slim(module: nn.MultiheadAttention | SlimMultiheadAttention, heads: int) -> SlimMultiheadAttention:
    """A replacement for an attention whose parameters have been cut to `heads` heads.

    It holds the same Parameter objects under the same names, the same `out_proj` with corrected in_features, the
    training flag and the hooks. Do not use `module` any more.
    """
    if getattr(module.forward, "__func__", None) not in (nn.MultiheadAttention.forward, SlimMultiheadAttention.forward):
        raise InputError(f"{type(module).__name__} has a forward of its own, unknown with fewer heads: leave it dense")
    made = SlimMultiheadAttention(module, heads)
    if parametrize.is_parametrized(module):
        # torch keeps parametrized tensors as properties of a class that it makes for each such module.
        body = {name: value for name, value in vars(type(module)).items() if name not in ("__dict__", "__weakref__")}
        made.__class__ = type("ParametrizedSlimMultiheadAttention", (SlimMultiheadAttention,), body)
    made.out_proj.in_features = heads * made.head_dim
    return made


def _merge(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Merge both masks into one to add to the scores; it broadcasts to (B, H, L, S)."""
    (B, H, L, _), S = q.shape, k.shape[2]
    merged = None
    if attn_mask is not None:
        three = attn_mask.dim() == 3
        merged = _additive("attn_mask", attn_mask, (B * H, L, S) if three else (L, S), q.dtype)
        merged = merged.view(B, H, L, S) if three else merged
    if key_padding_mask is not None:
        padding = _additive("key_padding_mask", key_padding_mask, (B, S), q.dtype).view(B, 1, 1, S)
        merged = padding if merged is None else merged + padding
    return merged


def _additive(name: str, mask: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if mask.shape != shape:
        raise InputError(f"{name} has shape {tuple(mask.shape)}; expected {shape} with the heads that are left")
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    if not mask.is_floating_point():
        raise InputError(f"{name} is {mask.dtype}: pass a boolean mask (True hides) or a floating one (added)")
    return mask.to(dtype)
