"""Where a consumer's new weight and bias can be put."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, fx, nn

from ispasp.calibrate.circuit import Circuit, caller
from ispasp.calibrate.readers import Reader
from ispasp.graph.analyse import owner
from ispasp.graph.ops import bias_of, given_to, op_of, weight_operand


@dataclass(frozen=True)
class Slot:
    """Names of the tensors that take the weight and the shift; `why_not` says why there is none.

    The shift goes into the layer's bias, else into the mean of a BatchNorm right after it, else into a bias that the
    module gains, where it can hold one.
    """

    weight: str = ""
    shift: str = ""
    into: Literal["bias", "norm", "new bias", ""] = ""
    why_not: str = ""


def slot(reader: Reader, circuit: Circuit, model: nn.Module, tensors: Mapping[str, Tensor]) -> Slot:
    """Find the slots of a reader; a tensor that anything else uses, too, is left alone."""
    node = circuit.contractions[reader.number]
    given, operand = given_to(node), weight_operand(node, reader.contraction.data)
    name = _own(operand.get(given) if operand else None, circuit, tensors)
    if not name:
        return Slot(why_not="its weight is shared or computed, not a parameter of its own")
    op = op_of(node)
    if tensors[name].ndim != 2 and not (op is not None and op.channels == "conv"):
        return Slot(why_not=f"its weight has {tensors[name].ndim} axes, not the two of a matrix")
    bias = bias_of(node, given)
    if bias is not None:
        return _with_bias(name, bias, node, _own(bias, circuit, tensors))
    norm = circuit.tails[reader.number].norm
    if norm is not None:
        mean = _own(norm.args[3], circuit, tensors)
        if mean:
            return Slot(name, mean, "norm")
    if _can_hold(model, name, node):
        return Slot(name, f"{owner(name)}.bias", "new bias")
    return Slot(name, why_not="its module has no place for a bias")


def _with_bias(weight: str, bias: object, node: fx.Node, own: str) -> Slot:
    shape = tuple(bias.meta["val"].shape) if isinstance(bias, fx.Node) else ()
    usual = shape[-1:] == (math.prod(shape),) == tuple(node.meta["val"].shape[-1:])
    if str(node.target) == "aten.addmm.default" and not usual:
        return Slot(why_not="its bias is not one number for each output")  # addmm takes all shapes that broadcast
    return Slot(weight, own, "bias") if own else Slot(weight, why_not="its bias is shared, and stays")


def _own(node: object, circuit: Circuit, tensors: Mapping[str, Tensor]) -> str:
    """The tensor's name, if this is its only use under any name."""
    if not isinstance(node, fx.Node) or node.op != "placeholder" or len(node.users) != 1:
        return ""
    source = circuit.trace.sources[node.name]
    if source.kind not in ("parameter", "buffer"):
        return ""
    mine = tensors[source.name]
    for other in circuit.trace.graph.find_nodes(op="placeholder"):
        at = circuit.trace.sources[other.name]
        if other is not node and at.kind == source.kind and tensors[at.name] is mine and other.users:
            return ""
    return source.name


def _can_hold(model: nn.Module, weight: str, node: fx.Node) -> bool:
    """Whether the module is a plain linear or convolution layer built without a bias, and runs its own forward."""
    module = model.get_submodule(owner(weight))
    by = caller(node, model)
    if by is not module and not isinstance(by, nn.MultiheadAttention):  # that one reads its layer's bias itself
        return False
    plain = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d))
    own_code = type(module).forward.__module__.startswith("torch.")
    return plain and own_code and "bias" in module._parameters and module.bias is None
