"""Distance of a pruned network from the dense one: at its outputs, and at features on the way.

Features are found in the traced graphs. Every path from the inputs to the outputs leads through a *bottleneck*, such as
the residual stream between two blocks or the map before pooling. A *merge* adds two branches of one shape that have
different weights: encoder-decoders and U-Nets have merges where they have no bottleneck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from ispasp.engine.batches import padding_masks, real_rows
from ispasp.errors import InputError
from ispasp.graph.trace import Batch, Trace, call_arguments, call_op, mutates, trace

_aten = torch.ops.aten
_ADDS = (_aten.add.Tensor, _aten.add_.Tensor)
_LINEAR = (_aten.linear.default, _aten.addmm.default, _aten.mm.default, _aten.matmul.default)
_LEAST = 1e-12  # variance of a feature that is constant
Masks = Sequence[Tensor]  # padding masks
Measure = Callable[[Tensor, Tensor, Masks], Tensor]  # student, teacher, masks -> distance
Key = tuple[str, str, int]  # module path, op, count: finds a node of one graph in another


@dataclass(frozen=True, eq=False)
class Distance:
    """`output` judges the network: KL divergence of logits, relative squared error of other outputs.

    `features` is the mean over all features of the squared error relative to the variance of the dense network's.
    `loss` is minimised: the features, plus the outputs by their share of positions. A classifier has one output per
    example and hundreds of positions in its features. With equal weights a pruned ResNet20 healed less.
    """

    output: Tensor
    features: Tensor
    loss: Tensor


@dataclass(frozen=True, eq=False)
class Pair:
    """The graphs of student and teacher for batches of one shape. They return matched features, then outputs.

    `blocks` has the parameters that each feature reads and no feature before it; last, those that only outputs read.
    """

    student: Trace
    teacher: Trace
    features: int
    measures: tuple[tuple[Measure, ...], ...]  # of each output; none where the two do not compare
    blocks: tuple[frozenset[str], ...] = ()
    names: tuple[str, ...] = ()  # of the modules that make the features

    def distance(
        self, student: nn.Module, teacher: nn.Module, batch: Batch, trained: Collection[str] | None = None
    ) -> Distance:
        """Run both networks. Gradients reach the student's parameters, all or those with the names `trained`."""
        with torch.no_grad():
            expected = _run(self.teacher, teacher, batch)
        found = _run(self.student, student, batch, trained)
        masks, k = padding_masks(batch), self.features
        features = [_relative(y, t, masks) for y, t in zip(found[:k], expected[:k], strict=True)]
        rows = zip(found[k:], expected[k:], self.measures, strict=True)
        outputs = [measure(y, t, masks) for y, t, measures in rows for measure in measures]
        output = torch.stack(outputs).sum()
        if not features:
            return Distance(output, torch.zeros_like(output), output)
        mean = torch.stack(features).mean()
        judged = max(_positions(t) for t, measures in zip(expected[k:], self.measures, strict=True) if measures)
        share = min(1.0, judged * k / sum(map(_positions, expected[:k])))
        return Distance(output, mean, mean + share * output)

    def errors(self, student: nn.Module, teacher: nn.Module, batch: Batch) -> dict[str, float]:
        """The relative error of every feature, by the module that makes it."""
        with torch.no_grad():
            found, expected = _run(self.student, student, batch), _run(self.teacher, teacher, batch)
            pairs = zip(self.names, found, expected, strict=False)
            return {name: float(_relative(y, t, padding_masks(batch)).sqrt()) for name, y, t in pairs}

    def upto(self, block: int) -> Pair:
        """Both networks from the inputs to the end of a block, which is their only output."""
        end = None if block == self.features else block + 1  # the last block ends in all outputs
        student, teacher = (_part(each, block, end) for each in (self.student, self.teacher))
        measures = ((_relative,),) if end else self.measures
        return replace(self, student=student, teacher=teacher, features=0, measures=measures)


def pair(student: nn.Module, teacher: nn.Module, batch: Batch) -> Pair:
    """Trace both models on a batch, and match their features by the module and op that make them."""
    ours, theirs = trace(student, batch), trace(teacher, batch)
    outputs, dense = _outputs(ours), _outputs(theirs)
    measures = tuple(_measures(name, x, y) for (name, x), (_, y) in zip(outputs, dense, strict=False))
    if len(outputs) != len(dense) or not any(measures):
        raise InputError(
            f"model and teacher do not fit: their outputs are {_shapes(outputs)} and {_shapes(dense)}. "
            "Pass the dense model that this one was pruned from as the teacher"
        )
    final = {node for _, node in outputs}
    known = _features(theirs)
    both = {key: (x, known[key]) for key, x in _features(ours).items() if key in known and x not in final}
    same = {key: (x, y) for key, (x, y) in both.items() if _shape(x) == _shape(y)}
    matched, names = [*same.values()], [f"{path or 'model'}{f' ({n + 1})' if n else ''}" for path, _, n in same]
    blocks = _blocks(ours, [x for x, _ in matched])
    _return(ours, [x for x, _ in matched], outputs)
    _return(theirs, [y for _, y in matched], dense)
    return Pair(ours, theirs, len(matched), measures, blocks, tuple(names))


def _return(traced: Trace, features: list[fx.Node], outputs: list[tuple[str, fx.Node]]) -> None:
    """Let a graph return the features and the outputs as one flat tuple."""
    if any(map(mutates, traced.graph.nodes)):  # an op may write into a feature later on
        for k, node in enumerate(features):
            with traced.graph.inserting_after(node):
                features[k] = traced.graph.call_function(_aten.clone.default, (node,))
    traced.graph.output_node().args = ((*features, *(node for _, node in outputs)),)
    traced.module.recompile()


def _part(traced: Trace, start: int, end: int | None) -> Trace:
    """The graph up to the last of the values that it returns from `start` to `end`."""
    flat: Any = traced.graph.output_node().args[0]
    returned = flat[start:end]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        if all(each in copies for each in returned):
            break
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[each] for each in returned))
    inputs = traced.graph.find_nodes(op="placeholder")
    sources = {copies[node].name: traced.sources[node.name] for node in inputs}  # copies may have other names
    return replace(traced, module=fx.GraphModule(traced.module, graph), sources=sources)


def _run(traced: Trace, model: nn.Module, batch: Batch, trained: Collection[str] | None = None) -> tuple[Tensor, ...]:
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors: dict[str, Any] = {
        **{name: p if trained is None or name in trained else p.detach() for name, p in named.items()},
        # An op may write into buffers and inputs.
        **{name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)},
        **traced.constants,
    }
    inputs = iter(pytree.tree_leaves(pytree.tree_map_only(Tensor, torch.clone, call_arguments(batch))))
    sources = [traced.sources[node.name] for node in traced.graph.find_nodes(op="placeholder")]
    given = (traced.laid_out(next(inputs)) if source.kind == "input" else tensors[source.name] for source in sources)
    casts = any("autocast" in node.meta for node in traced.graph.nodes)
    run: Callable[..., tuple[Tensor, ...]] = _Interpreter(traced.module).run if casts else traced.module.forward
    return run(*given)


class _Interpreter(fx.Interpreter):
    """Runs each op under the autocast it was traced in; the graph's own code knows nothing of it."""

    def run_node(self, n: fx.Node) -> Any:
        return super().run_node(n) if n.op != "call_function" else call_op(n, *self.fetch_args_kwargs_from_env(n))


def _blocks(traced: Trace, features: list[fx.Node]) -> tuple[frozenset[str], ...]:
    """The parameters that each feature is the first to read; last, those that no feature reads."""
    seen: set[fx.Node] = set()
    found = []
    for end in (*features, traced.graph.output_node()):
        before, waiting = set(seen), [end]
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        sources = [traced.sources[node.name] for node in seen - before if node.op == "placeholder"]
        found.append(frozenset(source.name for source in sources if source.kind == "parameter"))
    return tuple(found)


# Features -------------------------------------------------------------------------------------------------------
def _features(traced: Trace) -> dict[Key, fx.Node]:
    """Bottlenecks and merges by key. Of those that differ by norms and activations only, the last one counts."""
    nodes = list(traced.graph.nodes)
    reads = _reads(traced)
    inputs = {n.name for n in nodes if n.op == "placeholder" and traced.sources[n.name].kind == "input"}
    live = [n for n in nodes if n.op == "call_function" and reads[n] & inputs and reads[n] - inputs]
    chosen = _bottlenecks(live, nodes[-1]) | {n for n in live if _merges(n, reads)}
    last = set({(reads[n], _shape(n)): n for n in live if n in chosen}.values())
    found: dict[Key, fx.Node] = {}
    count: Counter[tuple[str, str]] = Counter()
    for node in live:
        name = (_path(node), str(node.target))
        if node in last:
            found[name[0], name[1], count[name]] = node
        count[name] += 1
    return found


def _reads(traced: Trace) -> dict[fx.Node, frozenset[str]]:
    """The inputs and weight matrices that each node depends on. Vectors belong to norms and biases."""
    found: dict[fx.Node, frozenset[str]] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            kind = traced.sources[node.name].kind
            counts = kind == "input" or (kind == "parameter" and len(_shape(node) or ()) > 1)
            found[node] = frozenset((node.name,)) if counts else frozenset()
        else:
            found[node] = frozenset[str]().union(*(found[n] for n in node.all_input_nodes))
    return found


def _bottlenecks(live: list[fx.Node], output: fx.Node) -> set[fx.Node]:
    """Nodes that every path leads through: no value from before them is read after them."""
    order = {node: k for k, node in enumerate(live)}
    order[output] = len(live)
    useful = [any(user in order for user in node.users) for node in live]
    starts = [k for k, node in enumerate(live) if useful[k] and not any(n in order for n in node.all_input_nodes)]
    reach, found = 0, set[fx.Node]()
    for k, node in enumerate(live):
        if useful[k] and reach <= k and k >= max(starts, default=0) and _is_float(node):
            found.add(node)
        reach = max([reach, *(order[user] for user in node.users if user in order)])
    return found


def _merges(node: fx.Node, reads: Mapping[fx.Node, frozenset[str]]) -> bool:
    operands = [n for n in node.args[:2] if isinstance(n, fx.Node)]
    if node.target not in _ADDS or len(operands) != 2 or not _is_float(node):
        return False
    a, b = operands
    return _shape(a) == _shape(b) and reads[a] != reads[b]


def _path(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]).partition("@")[0] if stack else ""


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


# Outputs --------------------------------------------------------------------------------------------------------
def _outputs(traced: Trace) -> list[tuple[str, fx.Node]]:
    """The outputs that are tensors, with their names in what the model returns."""
    returned = pytree.tree_unflatten(pytree.tree_leaves(traced.graph.output_node().args[0]), traced.output)
    named = pytree.tree_flatten_with_path(returned)[0]
    return [(pytree.keystr(path), x) for path, x in named if isinstance(x, fx.Node) and _shape(x) is not None]


def _measures(name: str, student: fx.Node, teacher: fx.Node) -> tuple[Measure, ...]:
    """KL divergence for `logits`, squared error for other values, both where a last linear layer may give either."""
    shape = _shape(student) or ()
    if not (_is_float(student) and _is_float(teacher) and shape == _shape(teacher)):
        return ()
    if len(shape) < 2 or shape[-1] < 2:
        return (_relative,)
    if "logits" in name:
        return (_divergence,)
    return (_divergence, _relative) if not name and student.target in _LINEAR else (_relative,)


def _shapes(outputs: list[tuple[str, fx.Node]]) -> str:
    return ", ".join(str(_shape(node)) for _, node in outputs) or "no tensors"


def _divergence(student: Tensor, teacher: Tensor, masks: Masks) -> Tensor:
    """KL divergence of the softmaxes over the last axis."""
    q, p = (functional.log_softmax(_counted(t, masks).float(), -1) for t in (student, teacher))
    return functional.kl_div(q, p, reduction="sum", log_target=True) / max(1, q.numel() // q.shape[-1])


def _relative(student: Tensor, teacher: Tensor, masks: Masks) -> Tensor:
    """Mean squared error over the variance of the teacher's values."""
    y, t = (_counted(tensor, masks).float() for tensor in (student, teacher))
    return functional.mse_loss(y, t) / t.var(correction=0).clamp_min(_LEAST)


def _positions(values: Tensor) -> int:
    """The number of examples times positions: all axes but that of the channels."""
    return values.numel() // max(1, values.shape[1 if values.ndim > 3 else -1]) if values.ndim else 1


def _counted(values: Tensor, masks: Masks) -> Tensor:
    """The values without padding tokens, if there is a row for every token."""
    rows = real_rows(values, masks)
    return values if rows is None else values[rows]
