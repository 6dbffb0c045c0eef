"""Products that sum over an axis: linear, convolutions, matrix products, einsum, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ispasp.graph import contractions  # noqa: F401  # fills the table of linear forms
from ispasp.graph.atoms import UNKNOWN, Axis, Reason, flatten, freeze, length, mark, split
from ispasp.graph.ops import Operand
from ispasp.graph.rules.pointwise import broadcast, overloads
from ispasp.graph.track import Tracker, rule
from ispasp.graph.values import Value, fresh

aten = torch.ops.aten
_INNER = "is summed over between activations"


@rule(aten.linear.default)
def linear(t: Tracker, node: fx.Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """y = x W^T + b."""
    return linear_product(t, node, ("input", x), ("weight", weight), bias)


def linear_product(
    t: Tracker, node: fx.Node, data: tuple[str, Value], parameter: tuple[str, Value], bias: Value | None
) -> Value:
    """y = x W^T + b; the activations and the weight come with their names in the op's schema."""
    x, weight = data[1], parameter[1]
    out = _product(t, node, data, parameter, -1, -1, "linear")
    made = weight.axes[:-1]
    t.multiplies(node, [*x.axes, *made])
    if bias is not None and made:
        made = (t.unite(node, made[0], bias.axes[0]),)
    return Value((*x.axes[:-1], *made), out)


def _product(
    t: Tracker, node: fx.Node, a: tuple[str, Value], b: tuple[str, Value], dim_a: int, dim_b: int, kind: str
) -> frozenset[str]:
    """Sum over dim_a of a and dim_b of b; returns the parameters the result consists of, if of nothing else."""
    (name_a, x), (name_b, w) = a, b
    t.unite(node, x.axes[dim_a], w.axes[dim_b])
    if x.is_parameter == w.is_parameter:
        for value, dim in ((x, dim_a), (w, dim_b)):
            t.freeze(node, value, [dim], "is summed over between parameters" if x.is_parameter else _INNER)
        return x.parameters | w.parameters if x.is_parameter else frozenset()
    if x.is_parameter:
        name_a, x, dim_a, w, dim_b = name_b, w, dim_b, x, dim_a
    dim_b %= len(w.axes)
    made = [axis for k, axis in enumerate(w.axes) if k != dim_b]
    t.contract(node, kind, (Operand(name_a), x, [dim_a % len(x.axes)]), w, [w.axes[dim_b]], made)
    return frozenset()


def _convolution(
    t: Tracker, node: fx.Node, x: Value, weight: Value, bias: Value | None, groups: int, transposed: bool
) -> Value:
    spatial = len(weight.axes) - 2
    batched = len(x.axes) == spatial + 2
    channel_dim = 1 if batched else 0
    t.freeze(node, x, range(channel_dim + 1, len(x.axes)), "is spatial")
    t.freeze(node, weight, range(2, 2 + spatial), "counts taps of a kernel")
    reason = Reason("is cut into groups across its structure", node.name)
    channels, first, second = x.axes[channel_dim], weight.axes[0], weight.axes[1]
    outer_w, inner_w = split(first, [groups, length(first) // groups], reason)
    outer_x, inner_x = split(channels, [groups, length(channels) // groups], reason)
    read, made = (inner_w, second) if transposed else (second, inner_w)
    t.unite(node, outer_x, outer_w)
    t.unite(node, inner_x, read)
    if weight.is_parameter and not x.is_parameter:
        if length(read) > 1 or groups == 1:
            t.contract(node, "conv", (Operand("input"), x, [channel_dim]), weight, [read], [flatten([outer_w, made])])
    else:
        t.freeze(node, Value((read,)), [0], _INNER)
    t.counts(weight, "groups", outer_w)
    out = flatten([outer_w, made])
    if bias is not None:
        out = t.unite(node, out, bias.axes[0])
    shape = t.shape(node)
    space = [t.new(node, size, "is spatial") for size in shape[channel_dim + 1 :]]
    positions = x.axes[channel_dim + 1 :] if transposed else space
    t.multiplies(node, [*x.axes[:channel_dim], *positions, outer_w, read, made, *weight.axes[2:]])
    return Value((*x.axes[:channel_dim], out, *space))


@rule(*overloads(["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]))
def convolution(
    t: Tracker,
    node: fx.Node,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    groups: int = 1,
    **_: Any,
) -> Value:
    """Channels in groups; space is frozen."""
    return _convolution(t, node, x, weight, bias, groups, "transpose" in str(node.target))


@rule(*overloads(["convolution", "_convolution"]))
def general_convolution(
    t: Tracker,
    node: fx.Node,
    x: Value,
    weight: Value,
    bias: Value | None,
    groups: int,
    transposed: bool,
    **_: Any,
) -> Value:
    """The general op behind them."""
    return _convolution(t, node, x, weight, bias, groups, transposed)


@rule(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default)
def matmul(t: Tracker, node: fx.Node, **operands: Value) -> Value:
    """Matrix product with broadcast batch axes."""
    (name_a, a), (name_b, b) = operands.items()
    name_a = "self" if name_a == "x" else name_a
    parameters = _product(t, node, (name_a, a), (name_b, b), -1, -2 if len(b.axes) > 1 else -1, "matmul")
    rows = a.axes[-2:-1] if len(a.axes) > 1 else ()
    columns = b.axes[-1:] if len(b.axes) > 1 else ()
    batch = _batch(t, node, [a.axes[:-2], b.axes[:-2]])
    t.multiplies(node, [*batch, *rows, a.axes[-1], *columns])
    if not a.is_parameter and not b.is_parameter:
        _parallel(batch)
    return Value((*batch, *rows, *columns), parameters)


def _parallel(batch: list[Axis]) -> None:
    for axis in batch:
        mark(axis, head=True)


def _batch(t: Tracker, node: fx.Node, operands: list[tuple[Axis, ...]]) -> list[Axis]:
    rank = max(len(axes) for axes in operands)
    found: list[Axis] = []
    for k in range(rank):
        meeting = []
        for axes in operands:
            own = k - (rank - len(axes))
            if own >= 0 and length(axes[own]) != 1:
                meeting.append(axes[own])
        axis: Axis = meeting[0] if meeting else ((),)
        for other in meeting[1:]:
            axis = t.unite(node, axis, other)
        found.append(axis)
    return found


@rule(aten.addmm.default, aten.baddbmm.default, aten.addbmm.default)
def addmm(t: Tracker, node: fx.Node, x: Value, **operands: Any) -> Value:
    """x + a b."""
    pair = {name: value for name, value in operands.items() if isinstance(value, Value)}
    product = matmul(t, node, **pair)
    return broadcast(t, node, [product, Value(x.axes)])


@rule(aten.tensordot.default)
def tensordot(t: Tracker, node: fx.Node, x: Value, other: Value, dims_self: list[int], dims_other: list[int]) -> Value:
    """Sums over pairs of axes; the others of both remain, in order."""
    parameters: frozenset[str] = frozenset()
    for a, b in zip(dims_self, dims_other, strict=True):
        parameters = _product(t, node, ("self", x), ("other", other), a, b, "matmul")
    summed = [{d % len(v.axes) for d in dims} for v, dims in ((x, dims_self), (other, dims_other))]
    t.multiplies(node, [*x.axes, *(axis for k, axis in enumerate(other.axes) if k not in summed[1])])
    kept = [axis for v, gone in zip((x, other), summed, strict=True) for k, axis in enumerate(v.axes) if k not in gone]
    return Value(tuple(kept), parameters)


@rule(aten.bilinear.default)
def bilinear(t: Tracker, node: fx.Node, input1: Value, input2: Value, weight: Value, bias: Value | None) -> Value:
    """y_o = x1^T W_o x2 + b_o: the weight (outputs, inputs 1, inputs 2) reads both."""
    for number, value in ((1, input1), (2, input2)):
        t.unite(node, value.axes[-1], weight.axes[number])
        where = (Operand(f"input{number}"), value, [len(value.axes) - 1])
        if weight.is_parameter and not value.is_parameter:
            t.contract(node, "linear", where, weight, [weight.axes[number]], [weight.axes[0]])
        else:
            t.freeze(node, value, [-1], _INNER)
    made = weight.axes[0] if bias is None else t.unite(node, weight.axes[0], bias.axes[0])
    return Value((*_batch(t, node, [input1.axes[:-1], input2.axes[:-1]]), made))


@rule(aten.einsum.default)
def einsum(t: Tracker, node: fx.Node, equation: str, tensors: list[Value], path: Any = None) -> Any:
    """Letters are axes; those missing on the right are summed over."""
    equation = equation.replace(" ", "")
    if "." in equation or "->" not in equation:
        reason = Reason(f"einsum {equation!r} is not spelled out", node.name)
        for value in tensors:
            value.freeze(reason)
        return fresh(node, reason)
    left, right = equation.split("->")
    terms = left.split(",")
    letters = _letters(t, node, terms, tensors)
    data = [k for k, value in enumerate(tensors) if not value.is_parameter]
    for letter, axis in letters.items():
        if sum(letter in terms[k] for k in data) > 1:
            mark(axis, head=True)
    summed = [letter for letter in letters if letter not in right]
    for letter in _unread(t, node, terms, tensors, letters, summed):
        freeze(letters[letter], Reason(_INNER, node.name))
    for step in _pairwise(terms, right, {letter: length(axis) for letter, axis in letters.items()}):
        t.multiplies(node, [letters[letter] for letter in step])
    parameters = [value.parameters for value in tensors]
    made_of = frozenset().union(*parameters) if all(parameters) else frozenset()
    return Value(tuple(letters[letter] for letter in right), made_of)


def _letters(t: Tracker, node: fx.Node, terms: list[str], tensors: list[Value]) -> dict[str, Axis]:
    letters: dict[str, Axis] = {}
    for term, value in zip(terms, tensors, strict=True):
        for letter, axis in zip(term, value.axes, strict=True):
            if letter not in letters or letters[letter] == ((),):
                letters[letter] = axis
            elif length(axis) != 1:
                letters[letter] = t.unite(node, letters[letter], axis)
    return letters


def _pairwise(terms: list[str], right: str, sizes: dict[str, int]) -> list[list[str]]:
    """Letters of the matrix products that torch makes of an einsum, operand by operand from left to right.

    >>> _pairwise(["bhqk", "bhkd", "hdo"], "bqo", dict.fromkeys("bhqkdo", 2))
    [['b', 'd', 'h', 'k', 'q'], ['b', 'd', 'h', 'o', 'q']]
    """
    products, current = [], set(terms[0])
    for k, term in enumerate(terms[1:], 1):
        later = set(right).union(*terms[k + 1 :])
        a, b = current & (set(term) | later), set(term) & (current | later)  # the others are summed over beforehand
        if any(sizes[letter] != 1 for letter in (a & b) - later):  # without a sum torch just multiplies
            products.append(sorted(a | b))
        current = (a | b) & later
    return products


def _unread(
    t: Tracker, node: fx.Node, terms: list[str], tensors: list[Value], letters: dict[str, Axis], summed: list[str]
) -> list[str]:
    """Note what the only parameter of an einsum reads; returns the letters that are summed over otherwise."""
    fixed = [k for k, value in enumerate(tensors) if value.is_parameter]
    if len(fixed) != 1 or len(tensors) == 1:
        return summed
    w, term = tensors[fixed[0]], terms[fixed[0]]
    made = [letters[letter] for letter in term if letter not in summed]
    for k, x in enumerate(tensors):
        read = [letter for letter in summed if letter in term and letter in terms[k]]
        if k != fixed[0] and read:
            where = (Operand("tensors", k), x, [terms[k].index(letter) for letter in read])
            t.contract(node, "matmul", where, w, [letters[letter] for letter in read], made)
            summed = [letter for letter in summed if letter not in read]
    return summed


@rule("transformers.grouped_mm_fallback.default", *overloads(["_grouped_mm"]))
def grouped_product(t: Tracker, node: fx.Node, **operands: Any) -> Value:
    """Rows (T, K) times the matrix (E, K, N) of the expert that each row was sent to: (T, N)."""
    rows, weight = [value for value in operands.values() if isinstance(value, Value)][:2]
    first, second = (argument.name for argument in node.target._schema.arguments[:2])  # type: ignore[union-attr]
    t.freeze(node, weight, [0], "counts experts")
    _product(t, node, (first, rows), (second, weight), -1, -2, "linear")
    t.multiplies(node, [*rows.axes, weight.axes[-1]])
    return Value((*rows.axes[:-1], weight.axes[-1]))


@rule(*overloads(["scaled_dot_product_attention"]))
def attention(
    t: Tracker,
    node: fx.Node,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    enable_gqa: bool = False,
    **_: Any,
) -> Value:
    """softmax(q k^T) v: batch axes run in parallel, the embedding of q and k is summed over."""
    t.unite(node, query.axes[-1], key.axes[-1])
    t.freeze(node, query, [-1, -2], "is inside an attention head")
    t.freeze(node, key, [-1, -2], "is inside an attention head")
    t.freeze(node, value, [-2], "is inside an attention head")
    q, k, v = list(query.axes[:-2]), list(key.axes[:-2]), list(value.axes[:-2])
    if enable_gqa and length(q[-1]) != length(k[-1]) and UNKNOWN not in (length(q[-1]), length(k[-1])):
        reason = Reason("query heads of one key/value head go together", node.name)
        outer, inner = split(q[-1], [length(k[-1]), length(q[-1]) // length(k[-1])], reason)
        freeze(inner, reason)
        heads = t.unite(node, t.unite(node, outer, k[-1]), v[-1])
        mark(heads, head=True)
        batch = [*_batch(t, node, [tuple(q[:-1]), tuple(k[:-1]), tuple(v[:-1])]), flatten([heads, inner])]
    else:
        batch = _batch(t, node, [tuple(q), tuple(k), tuple(v)])
        _parallel(batch)
    t.multiplies(node, [*batch, query.axes[-2], key.axes[-2], query.axes[-1]])
    t.multiplies(node, [*batch, query.axes[-2], key.axes[-2], value.axes[-1]])
    if attn_mask is not None:
        for own, axis in zip(reversed(batch), reversed(attn_mask.axes[:-2]), strict=False):
            if length(axis) != 1:
                t.unite(node, own, axis)
    return Value((*batch, query.axes[-2], value.axes[-1]))
