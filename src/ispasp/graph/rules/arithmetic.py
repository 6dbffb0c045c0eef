"""Element-wise ops, and products that sum over an axis: linear, convolutions, matrix products, einsum, attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from ispasp.graph.atoms import UNKNOWN, Axis, Reason, flatten, freeze, length, live_atoms, mark, new_axis, split
from ispasp.graph.ops import Operand
from ispasp.graph.track import Tracker, Value, common_parameters, fresh, listed, rule

# Each position alone ------------------------------------------------------------------------------------------------
EACH = """
relu relu_ gelu gelu_ silu silu_ sigmoid sigmoid_ tanh tanh_ elu elu_ selu selu_ celu celu_ mish mish_ softplus
hardswish hardswish_ hardsigmoid hardsigmoid_ hardtanh hardtanh_ leaky_relu leaky_relu_ relu6 relu6_
threshold threshold_ log_sigmoid softshrink hardshrink rrelu rrelu_
exp exp_ exp2 expm1 log log2 log10 log1p sqrt sqrt_ rsqrt rsqrt_ reciprocal abs abs_ neg neg_ sign sgn square sin cos
tan asin acos atan sinh cosh erf erfc erfinv ceil floor round trunc frac logit bitwise_not logical_not isnan isinf
isfinite clone contiguous detach detach_ alias dropout dropout_ feature_dropout alpha_dropout lift_fresh_copy lift
lift_fresh nan_to_num positive real zeros_like ones_like empty_like rand_like randn_like full_like zero_ bernoulli
_to_copy clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ native_dropout _conj resolve_conj resolve_neg
to.dtype to.device to.dtype_layout add.Scalar add_.Scalar sub.Scalar sub_.Scalar rsub.Scalar
pow pow_ mul mul_ multiply multiply_ div div_ divide divide_ true_divide true_divide_ remainder fmod floor_divide
eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__
where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill masked_fill_ fill fill_ copy copy_
complex polar imag angle atan2 maximum minimum max.other min.other addcmul addcdiv lerp xlogy
"""


def broadcast(t: Tracker, node: fx.Node, operands: Sequence[Value]) -> Value:
    """The axes of a result that every operand is broadcast to."""
    return Value(tuple(_meet(t, node, [operand.axes for operand in operands])), common_parameters(operands))


def _meet(t: Tracker, node: fx.Node, operands: Sequence[Sequence[Axis]]) -> list[Axis]:
    """Axes aligned from the last one on; those of length 1 give way to the others."""
    found: list[Axis] = []
    for dim in range(-max(map(len, operands), default=0), 0):
        axis: Axis = ((),)
        for other in (axes[dim] for axes in operands if len(axes) >= -dim and length(axes[dim]) != 1):
            axis = other if axis == ((),) else t.unite(node, axis, other)
        found.append(axis)
    return found


def _tensors(arguments: dict[str, Any]) -> list[Value]:
    return [argument for argument in arguments.values() if isinstance(argument, Value)]


@rule(EACH)
def elementwise(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    """The rule of an op that works on each position alone; several tensors are broadcast as in `torch.add`."""
    return listed(node, broadcast(t, node, _tensors(arguments)))


@rule("add.Tensor add_.Tensor sub.Tensor sub_.Tensor rsub.Tensor subtract.Tensor")
def _sum(t: Tracker, node: fx.Node, **arguments: Any) -> Value:
    """As `elementwise`; where outputs of different producers are added, the axis is a residual stream."""
    operands = _tensors(arguments)
    data = [operand for operand in operands if not operand.is_parameter]
    streams = []
    for dim in range(-len(t.shape(node)), 0):
        atoms = [live_atoms(operand.axes[dim]) for operand in data if len(operand.axes) >= -dim]
        if len(atoms) == 2 and all(atoms) and not atoms[0] & atoms[1]:
            streams.append(dim)
    value = broadcast(t, node, operands)
    for dim in streams:
        mark(value.axes[dim], stream=True)
    return value


@rule("to.other type_as.default")
def _converted(t: Tracker, node: fx.Node, x: Value, **_: Any) -> Value:
    return x


@rule("prelu.default")
def _prelu(t: Tracker, node: fx.Node, x: Value, weight: Value) -> Value:
    if weight.axes and weight.axes[0] != ((),) and len(x.axes) > 1:  # one slope per channel
        t.unite(node, x.axes[1], weight.axes[0])
    return x


@rule("zeros ones full new_zeros new_ones new_full")
def _uniform(t: Tracker, node: fx.Node, **arguments: Any) -> Value:
    """One number everywhere: any position may go, and surgery corrects the size that the forward reads."""
    return Value(tuple(new_axis(size) for size in t.shape(node)))


@rule("arange empty eye linspace scalar_tensor rand randn randint new_empty tril_indices triu_indices hann_window")
def _made(t: Tracker, node: fx.Node, **arguments: Any) -> Any:
    return fresh(node, Reason("has a size written in the forward", node.name))


# Sums over an axis --------------------------------------------------------------------------------------------------
_INNER = "is summed over between activations"

Named = tuple[str, Value]  # an argument with its name in the op's schema


@rule("linear.default")
def _linear(t: Tracker, node: fx.Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    return linear_product(t, node, ("input", x), ("weight", weight), bias)


def linear_product(t: Tracker, node: fx.Node, data: Named, parameter: Named, bias: Value | None) -> Value:
    """y = x W^T + b."""
    x, weight = data[1], parameter[1]
    parameters = _product(t, node, data, parameter, -1, -1, "linear")
    made = weight.axes[:-1]
    t.multiplies([*x.axes, *made])
    if bias is not None and made:
        made = (t.unite(node, made[0], bias.axes[0]),)
    return Value((*x.axes[:-1], *made), parameters)


def _product(t: Tracker, node: fx.Node, a: Named, b: Named, dim_a: int, dim_b: int, kind: str) -> frozenset[str]:
    """Sum over dim_a of a and dim_b of b; returns the parameters the result consists of, if of nothing else."""
    (name_a, x), (name_b, w) = a, b
    t.unite(node, x.axes[dim_a], w.axes[dim_b])
    if x.is_parameter == w.is_parameter:
        for value, dim in ((x, dim_a), (w, dim_b)):
            t.freeze(node, value, [dim], "is summed over between parameters" if x.is_parameter else _INNER)
        return common_parameters([x, w])
    if x.is_parameter:
        name_a, x, dim_a, w, dim_b = name_b, w, dim_b, x, dim_a
    t.contract(node, kind, (Operand(name_a), [dim_a % len(x.axes)]), w, [w.axes[dim_b]], w.without(dim_b).axes)
    return frozenset()


@rule("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution")
def _convolution(
    t: Tracker, node: fx.Node, x: Value, weight: Value, bias: Value | None, groups: int, **rest: Any
) -> Value:
    """Channels in groups; space is frozen."""
    transposed = rest.get("transposed", "transpose" in str(node.target))
    spatial = len(weight.axes) - 2
    channel = len(x.axes) - spatial - 1  # 0 without a batch axis
    t.freeze(node, x, range(channel + 1, len(x.axes)), "is spatial")
    t.freeze(node, weight, range(2, 2 + spatial), "counts taps of a kernel")
    reason = Reason("is cut into groups across its structure", node.name)
    channels, first, second = x.axes[channel], weight.axes[0], weight.axes[1]
    outer_w, inner_w = split(first, [groups, length(first) // groups], reason)
    outer_x, inner_x = split(channels, [groups, length(channels) // groups], reason)
    read, made = (inner_w, second) if transposed else (second, inner_w)
    t.unite(node, outer_x, outer_w)
    t.unite(node, inner_x, read)
    out = flatten([outer_w, made])
    if not weight.is_parameter or x.is_parameter:
        freeze(read, Reason(_INNER, node.name))
    elif length(read) > 1 or groups == 1:
        t.contract(node, "conv", (Operand("input"), [channel]), weight, [read], [out])
    t.counts(weight, "groups", outer_w)
    if bias is not None:
        out = t.unite(node, out, bias.axes[0])
    space = [t.new(node, size, "is spatial") for size in t.shape(node)[channel + 1 :]]
    positions = x.axes[channel + 1 :] if transposed else space
    t.multiplies([*x.axes[:channel], *positions, outer_w, read, made, *weight.axes[2:]])
    return Value((*x.axes[:channel], out, *space))


@rule("matmul.default mm.default bmm.default mv.default dot.default vdot.default")
def _matmul(t: Tracker, node: fx.Node, **operands: Value) -> Value:
    (name_a, a), (name_b, b) = operands.items()
    name_a = "self" if name_a == "x" else name_a
    parameters = _product(t, node, (name_a, a), (name_b, b), -1, -2 if len(b.axes) > 1 else -1, "matmul")
    rows = a.axes[-2:-1] if len(a.axes) > 1 else ()
    columns = b.axes[-1:] if len(b.axes) > 1 else ()
    batch = _meet(t, node, [a.axes[:-2], b.axes[:-2]])
    t.multiplies([*batch, *rows, a.axes[-1], *columns])
    if not a.is_parameter and not b.is_parameter:
        mark(*batch, head=True)
    return Value((*batch, *rows, *columns), parameters)


@rule("addmm.default baddbmm.default addbmm.default")
def _addmm(t: Tracker, node: fx.Node, x: Value, **operands: Any) -> Value:
    product = _matmul(t, node, **{name: value for name, value in operands.items() if isinstance(value, Value)})
    return broadcast(t, node, [product, Value(x.axes)])


@rule("tensordot.default")
def _tensordot(t: Tracker, node: fx.Node, x: Value, other: Value, dims_self: list[int], dims_other: list[int]) -> Value:
    """Sums over pairs of axes; the others of both remain, in order."""
    parameters: frozenset[str] = frozenset()
    for a, b in zip(dims_self, dims_other, strict=True):
        parameters = _product(t, node, ("self", x), ("other", other), a, b, "matmul")
    rows, columns = (
        [axis for k, axis in enumerate(value.axes) if k not in {d % len(value.axes) for d in dims}]
        for value, dims in ((x, dims_self), (other, dims_other))
    )
    t.multiplies([*x.axes, *columns])
    return Value((*rows, *columns), parameters)


@rule("bilinear.default")
def _bilinear(t: Tracker, node: fx.Node, input1: Value, input2: Value, weight: Value, bias: Value | None) -> Value:
    """y_o = x1^T W_o x2 + b_o: the weight (outputs, inputs 1, inputs 2) reads both."""
    for number, value in ((1, input1), (2, input2)):
        t.unite(node, value.axes[-1], weight.axes[number])
        if weight.is_parameter and not value.is_parameter:
            data = (Operand(f"input{number}"), [len(value.axes) - 1])
            t.contract(node, "linear", data, weight, [weight.axes[number]], [weight.axes[0]])
        else:
            t.freeze(node, value, [-1], _INNER)
    made = weight.axes[0] if bias is None else t.unite(node, weight.axes[0], bias.axes[0])
    return Value((*_meet(t, node, [input1.axes[:-1], input2.axes[:-1]]), made))


@rule("einsum.default")
def _einsum(t: Tracker, node: fx.Node, equation: str, tensors: list[Value], path: Any = None) -> Any:
    """Letters are axes; those missing on the right are summed over."""
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
        t.multiplies(letters[letter] for letter in step)
    return Value(tuple(letters[letter] for letter in right), common_parameters(tensors))


def _letters(t: Tracker, node: fx.Node, terms: list[str], tensors: list[Value]) -> dict[str, Axis]:
    letters: dict[str, Axis] = {}
    for term, value in zip(terms, tensors, strict=True):
        for letter, axis in zip(term, value.axes, strict=True):
            if letter not in letters or letters[letter] == ((),):
                letters[letter] = axis
            elif length(axis) != 1:
                letters[letter] = t.unite(node, letters[letter], axis)
    return letters


def _pairwise(terms: list[str], right: str, sizes: dict[str, int]) -> Iterator[list[str]]:
    """Yield the letters of the matrix products that torch makes of an einsum, operand by operand from left to right."""
    current = set(terms[0])
    for k, term in enumerate(terms[1:], 1):
        later = set(right).union(*terms[k + 1 :])
        a, b = current & (set(term) | later), set(term) & (current | later)  # the others are summed over beforehand
        if any(sizes[letter] != 1 for letter in (a & b) - later):  # without a sum torch just multiplies
            yield sorted(a | b)
        current = (a | b) & later


def _unread(
    t: Tracker, node: fx.Node, terms: list[str], tensors: list[Value], letters: dict[str, Axis], summed: list[str]
) -> list[str]:
    """Record what the only parameter of an einsum reads; returns the letters that are summed over otherwise."""
    fixed = [k for k, value in enumerate(tensors) if value.is_parameter]
    if len(fixed) != 1 or len(tensors) == 1:
        return summed
    w, term = tensors[fixed[0]], terms[fixed[0]]
    made = [letters[letter] for letter in term if letter not in summed]
    for k in range(len(tensors)):
        read = [letter for letter in summed if letter in term and letter in terms[k]]
        if k != fixed[0] and read:
            data = (Operand("tensors", k), [terms[k].index(letter) for letter in read])
            t.contract(node, "matmul", data, w, [letters[letter] for letter in read], made)
            summed = [letter for letter in summed if letter not in read]
    return summed


@rule("transformers::grouped_mm_fallback.default _grouped_mm")
def _grouped_product(t: Tracker, node: fx.Node, **operands: Any) -> Value:
    """Rows (T, K) times the matrix (E, K, N) of the expert that each row was sent to: (T, N)."""
    rows, weight = [value for value in operands.values() if isinstance(value, Value)][:2]
    first, second = (argument.name for argument in node.target._schema.arguments[:2])  # type: ignore[union-attr]
    t.freeze(node, weight, [0], "counts experts")
    _product(t, node, (first, rows), (second, weight), -1, -2, "linear")
    t.multiplies([*rows.axes, weight.axes[-1]])
    return Value((*rows.axes[:-1], weight.axes[-1]))


@rule("scaled_dot_product_attention")
def _attention(t: Tracker, node: fx.Node, query: Value, key: Value, value: Value, **rest: Any) -> Value:
    """softmax(q k^T) v: batch axes run in parallel, the embedding of q and k is summed over."""
    t.unite(node, query.axes[-1], key.axes[-1])
    for operand, dims in ((query, [-1, -2]), (key, [-1, -2]), (value, [-2])):
        t.freeze(node, operand, dims, "is inside an attention head")
    q, k, v = query.axes[:-2], key.axes[:-2], value.axes[:-2]
    if rest["enable_gqa"] and length(q[-1]) != length(k[-1]) and UNKNOWN not in (length(q[-1]), length(k[-1])):
        reason = Reason("query heads of one key/value head go together", node.name)
        outer, inner = split(q[-1], [length(k[-1]), length(q[-1]) // length(k[-1])], reason)
        freeze(inner, reason)
        heads = t.unite(node, t.unite(node, outer, k[-1]), v[-1])
        mark(heads, head=True)
        batch = [*_meet(t, node, [q[:-1], k[:-1], v[:-1]]), flatten([heads, inner])]
    else:
        batch = _meet(t, node, [q, k, v])
        mark(*batch, head=True)
    for summed in (query.axes[-1], value.axes[-1]):
        t.multiplies([*batch, query.axes[-2], key.axes[-2], summed])
    if (attn_mask := rest["attn_mask"]) is not None:
        for own, axis in zip(reversed(batch), reversed(attn_mask.axes[:-2]), strict=False):
            if length(axis) != 1:
                t.unite(node, own, axis)
    return Value((*batch, query.axes[-2], value.axes[-1]))
