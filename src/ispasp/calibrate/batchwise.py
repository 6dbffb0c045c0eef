"""Graphs that run on any number of examples, though they were traced with two.

torch.export fixes shapes, and an op such as `view` carries them. A graph made only of ops that carry none, and that
never touch the first dimension, is as good for larger batches: it need not be traced again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_FREE = {  # each example alone, whatever their number
    *(getattr(aten, f"conv{n}d").default for n in (1, 2, 3)),
    *(getattr(aten, f"adaptive_avg_pool{n}d").default for n in (1, 2)),
    aten.linear.default,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.add.Tensor,
    aten.add_.Tensor,
    aten.mul.Tensor,
    aten.mul_.Tensor,
    aten.sub.Tensor,
    aten.div.Tensor,
    aten.relu.default,
    aten.relu_.default,
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.relu6.default,
    aten.silu.default,
    aten.silu_.default,
    aten.gelu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.hardswish.default,
    aten.hardswish_.default,
    aten.hardsigmoid.default,
    aten.leaky_relu.default,
    aten.layer_norm.default,
}
_ALONG = {aten.softmax.int, aten.flatten.using_ints, aten.cat.default}  # the second argument names a dimension


def any_number_of_examples(graph: fx.Graph) -> bool:
    """Whether the graph gives each example what it would get alone, for batches of any size.

    >>> from ispasp.graph.trace import trace
    >>> any_number_of_examples(trace(torch.nn.Linear(2, 3), torch.ones(2, 2)).graph)
    True
    """
    return all(_is_free(node) for node in graph.nodes if node.op == "call_function") and not any(
        node.op in ("get_attr", "call_module", "call_method") for node in graph.nodes
    )


def _is_free(node: fx.Node) -> bool:
    if node.target is aten.batch_norm.default:
        return not node.args[5]  # statistics of the batch mix examples
    if node.target in (aten.dropout.default, aten.dropout_.default):
        return not node.args[2]
    if node.target in _ALONG:
        return len(node.args) > 1 and _beyond_first(node, node.args[1])
    if node.target is aten.mean.dim:
        dims: Any = node.args[1]
        return all(_beyond_first(node, dim) for dim in dims)
    return node.target in _FREE


def _beyond_first(node: fx.Node, dim: Any) -> bool:
    """A dimension that is certainly not the first."""
    first: Any = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
    return isinstance(dim, int) and dim % first.meta["val"].ndim != 0
