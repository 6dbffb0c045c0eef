"""The table of rules: importing this package fills it. `register_op` adds a rule for a custom op."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from ispasp.errors import InputError
from ispasp.graph.ops import OPS, Arguments, Form, Op, Operand, linear_forms
from ispasp.graph.rules import freezing, shape  # noqa: F401  # fill the table
from ispasp.graph.rules.arithmetic import elementwise, linear_product
from ispasp.graph.track import RULES, Rule, Tracker, Value

__all__ = ["elementwise", "linear_like", "register_op", "unregister_op"]

_ADDED: set[Any] = set()


def register_op(target: Any, rule: Rule, contraction: Op | None = None) -> None:
    """Say what a custom op does to axes, so that units before and after it can be removed.

    `target` is an op of `torch.library.custom_op`, one of `torch.ops`, or a name such as "mylib.swish.default". The
    rule is called as rule(tracker, node, **arguments), see `elementwise` and CONTRIBUTING. An op that sums over an
    axis with a parameter also needs its `contraction`; `linear_like` gives both.

        register_op(torch.ops.mylib.swish, elementwise)
        register_op(torch.ops.mylib.matvec, *linear_like(data="x", weight="weight"))

    Pruning compares every network with the masked one, and so detects a wrong rule.
    """
    ops = _overloads(target)
    if not callable(rule):
        raise InputError(f"the rule for {target} is {rule!r}: pass a function such as ispasp.graph.elementwise")
    if contraction is not None and not isinstance(contraction, Op):
        raise InputError(f"the contraction of {target} is a {type(contraction).__name__}: pass an ispasp.graph.Op")
    for op in ops:
        if op in RULES or str(op) in RULES:
            raise InputError(f"{op} has a rule already: call ispasp.graph.unregister_op first, if it is yours")
    RULES.update(dict.fromkeys(ops, rule))
    if contraction is not None:
        OPS.update(dict.fromkeys(ops, contraction))
    _ADDED.update(ops)


def unregister_op(target: Any) -> None:
    """Undo `register_op`: the op freezes what it touches again."""
    ops = _overloads(target)
    for op in ops:
        if op not in _ADDED:
            raise InputError(f"{op} was not added by register_op: only such ops can be removed")
    for op in ops:
        del RULES[op]
        OPS.pop(op, None)
        _ADDED.remove(op)


def linear_like(data: str = "x", weight: str = "weight", bias: str = "") -> tuple[Rule, Op]:
    """The rule and the contraction of an op that computes x W^T + b, W (outputs, channels).

    `data`, `weight` and `bias` are the names of its arguments.
    """

    def rule(t: Tracker, node: fx.Node, **arguments: Any) -> Value:
        def argument(name: str) -> Any:
            called = "x" if name in ("self", "input") else name  # as the tracker passes them
            if called not in arguments:
                known = ", ".join(arguments)
                raise InputError(f"{node.target} has no argument {name!r}: pass linear_like some of {known}")
            return arguments[called]

        x, W = argument(data), argument(weight)
        return linear_product(t, node, (data, x), (weight, W), argument(bias) if bias else None)

    def form(given: Arguments, at: Operand) -> Sequence[Form]:
        return linear_forms(given[weight]) if at.name == data else []

    return rule, Op(form, weight=weight, bias=bias, channels=-1)


def _overloads(target: Any) -> list[Any]:
    target = getattr(target, "_opoverload", target)  # what torch.library.custom_op returns
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    if isinstance(target, OpOverload) or (isinstance(target, str) and re.fullmatch(r"\w+\.\w+\.\w+", target)):
        return [target]
    one = "torch.ops.mylib.swish, the custom_op itself, or 'mylib.swish.default'"
    raise InputError(f"{target!r} is not an op: pass one as {one}")
