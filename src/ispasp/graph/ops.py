"""What each contraction op is: its data, weight and bias arguments, output axis and linear form.

A contraction sums over an axis with a parameter. In its linear form it is one or more products `A H`: a weight in the
layout of `LinearConsumer` or `ConvConsumer`, and a function that arranges the op's activations as their input. A
product with one matrix for each of several groups (batched matmul, einsum) is a convolution of one tap in groups.
An op that is not in the table has no linear form: what it reads cannot be calibrated. The entries are in
`graph/contractions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, fx

from ispasp.types import Consumer

Arguments = dict[str, Any]  # of a call, by their names in the op's schema
OPERANDS = ("self", "other", "mat1", "mat2", "vec")


@dataclass(frozen=True)
class Operand:
    """An argument of an op by its name in the schema; `index` picks one of a list of tensors.

    >>> Operand("tensors", 1).get({"tensors": ["a", "b"]}), Operand("input").put({"input": 1}, 2)
    ('b', {'input': 2})
    """

    name: str
    index: int | None = None

    def get(self, given: Arguments) -> Any:
        """The value of the argument."""
        return given[self.name] if self.index is None else given[self.name][self.index]

    def put(self, given: Arguments, value: Any) -> Arguments:
        """The arguments with another value for this one."""
        if self.index is None:
            return {**given, self.name: value}
        items = [value if k == self.index else item for k, item in enumerate(given[self.name])]
        return {**given, self.name: items}


@dataclass(frozen=True, eq=False)
class Form:
    """One product: the consumer and how its input is arranged from the op's activations.

    `restore` puts a weight of the consumer's layout back into that of the op's argument; None where the op's weight
    cannot be replaced (it is used for several products).
    """

    consumer: Consumer
    arrange: Callable[[Tensor], Tensor]
    restore: Callable[[Tensor], Tensor] | None = None
    output: Callable[[Tensor], Tensor] = field(default=lambda y: y)  # the op's output in the consumer's layout


Maker = Callable[[Arguments, Operand], Sequence[Form]]


@dataclass(frozen=True)
class Op:
    """A contraction op.

    `form` gives its products from the arguments and the operand that holds activations. `weight` and `bias` name
    arguments; without `weight` the weight is the other one of two operands. `channels` is the output's axis of output
    channels, counted from the end: a number, or "conv" for the one in front of the spatial axes. `sliced` is the axis
    of the activations that axis 1 of the weight reads, where both may be cut to fewer positions. `total` says that
    every call has a form.
    """

    form: Maker
    weight: str = ""
    bias: str = ""
    channels: int | Literal["conv"] | None = None
    sliced: int | None = None
    total: bool = False


OPS: dict[Any, Op] = {}


def contraction(*targets: Any, **facts: Any) -> Callable[[Maker], Maker]:
    """Put ops into the table with this function as their linear form; ops of optional packages are given by name."""

    def register(maker: Maker) -> Maker:
        for target in targets:
            OPS[target] = Op(maker, **facts)
        return maker

    return register


def op_of(node: fx.Node) -> Op | None:
    """The entry of a node's op."""
    return OPS.get(node.target) or OPS.get(str(node.target))


def named_arguments(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Arguments of a call by their names in the op's schema, defaults filled in."""
    found: Arguments = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


def given_to(node: fx.Node) -> Arguments:
    """Arguments of a node by name, other nodes standing for their values."""
    return named_arguments(node, node.args, node.kwargs)


def call(node: fx.Node, given: Arguments) -> Any:
    """Run a node's op with arguments by name."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    args = [given[a.name] for a in arguments if not a.kwarg_only]
    kwargs = {a.name: given[a.name] for a in arguments if a.kwarg_only}
    return node.target(*args, **kwargs)  # type: ignore[operator]


def forms(node: fx.Node, given: Arguments, data: Operand) -> Sequence[Form]:
    """The products of a node; none where it has no linear form. `data` is where its activations are."""
    op = op_of(node)
    if op is None or node.meta["val"].is_complex():  # methods are defined for real numbers
        return []
    return op.form(given, data)


def weight_operand(node: fx.Node, data: Operand) -> Operand | None:
    """The argument that holds a contraction's weight, `data` being the one with its activations."""
    op = op_of(node)
    if op is not None and op.weight:
        return Operand(op.weight)
    others = [name for name in given_to(node) if name in OPERANDS][-2:]
    return next((Operand(name) for name in others if name != data.name), None)


def bias_of(node: fx.Node, given: Arguments) -> Any:
    """The bias among the arguments of a contraction, None where it has none."""
    op = op_of(node)
    return given.get(op.bias) if op is not None and op.bias else None


def output_channels(node: fx.Node) -> int | None:
    """The axis of a contraction's output that counts its output channels, counted from the end.

    A convolution takes an example without a batch dimension, too.
    """
    op = op_of(node)
    channels = None if op is None else op.channels
    return 1 - len(given_to(node)["weight"].meta["val"].shape) if channels == "conv" else channels


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """A vector shaped so that it broadcasts along one axis of a tensor.

    >>> import torch
    >>> along(torch.ones(3), 1, 4).shape
    torch.Size([1, 3, 1, 1])
    """
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def without_bias(node: fx.Node, y: Tensor, given: Arguments) -> Tensor:
    """The output of a contraction without its bias, where that is one number for each output channel."""
    bias, channel = bias_of(node, given), output_channels(node)
    if not isinstance(bias, Tensor) or channel is None or bias.ndim != 1:
        return y
    return y - along(bias.to(y), channel, y.ndim)
