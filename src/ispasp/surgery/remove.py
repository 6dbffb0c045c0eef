"""Surgery: cut a model's tensors to a plan and correct its attributes, with a way back."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any, final

import torch
from torch import Tensor, nn

from ispasp.errors import InputError, IspaspError, PlanError
from ispasp.graph.analyse import owner
from ispasp.graph.state import uninterrupted
from ispasp.graph.trace import cache_on
from ispasp.surgery.attention import slim
from ispasp.surgery.empty import empty_class
from ispasp.surgery.fold import Folding, replace_module, submodule
from ispasp.types.dimension import Extent, TensorLayout, full_length, kept_length, kept_mask, names_in
from ispasp.types.plan import Plan

_PLANS = "_ispasp_plans"  # deepcopy copies this attribute; state_dict, repr and torch.export ignore it
_ONCE = "apply a plan once, to the dense model it was made for"
_SIZES: Mapping[type[nn.Module], tuple[str, ...]] = {  # attributes that repeat the shape of `weight`
    nn.Linear: ("out_features", "in_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
    nn.EmbeddingBag: ("num_embeddings", "embedding_dim"),
    nn.Bilinear: ("out_features", "in1_features", "in2_features"),
    nn.modules.batchnorm._NormBase: ("num_features",),
    nn.GroupNorm: ("num_channels",),
    nn.PReLU: ("num_parameters",),
}


@final
class Undo(ExitStack):
    """Steps that restore a model: `undo.callback(step, *arguments)` adds one, `close` runs all, the last first."""


@contextmanager
def all_or_nothing() -> Iterator[Undo]:
    """Restore the model on any exception."""
    undo = Undo()
    try:
        yield undo
    except BaseException:
        with uninterrupted():
            undo.close()
        raise


@contextmanager
def undone() -> Iterator[Undo]:
    """Restore the model at the end of the block, and on any exception."""
    with all_or_nothing() as undo:
        yield undo
        with uninterrupted():
            undo.close()


@contextmanager
def removed(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Remove units for a block, then put them back."""
    with undone() as undo:
        remove_(model, plan, undo)
        yield


def plans_of(model: nn.Module) -> tuple[Plan, ...]:
    """All plans that were applied to the model, in order."""
    found: tuple[Plan, ...] = vars(model).get(_PLANS, ())
    return found


def record_(model: nn.Module, plans: tuple[Plan, ...], undo: Undo) -> None:
    """Replace the plans on record."""
    before = plans_of(model)
    undo.callback(lambda: vars(model).update({_PLANS: before}) if before else vars(model).pop(_PLANS, None))
    vars(model)[_PLANS] = plans


@contextmanager
def fitting(model: nn.Module) -> Iterator[None]:
    """Raise `PlanError` where a plan names what the model does not have."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, (IspaspError, torch.OutOfMemoryError)):
            raise
        raise PlanError(
            f"the plan does not fit {type(model).__name__} ({error!r:.200}): build the model of the plan"
        ) from error


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Check that the optimizer trains this model, so that its state is cut too."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise InputError(
            f"the optimizer holds no parameter of this {type(model).__name__}: pass the one that trains it"
        )


def remove_(model: nn.Module, plan: Plan, undo: Undo, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Remove every unit that the plan does not keep, and record the plan. Names, ties, dtypes and devices stay."""
    layers = Folding(model)
    undo.callback(layers.restore)
    layers.fold(plan.structure.folded)
    _add_biases(model, plan, undo)
    touched = _touched(model, plan)
    scales = _weight_norm_scales(model, plan, touched)
    done: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the tensor, whose id must not be used again
    for name, layout in touched.items():
        module, leaf = _holder(model, name)
        tensor = getattr(module, leaf)
        if id(tensor) not in done:  # else it is tied, and cut already
            small = _cut(tensor, layout, plan)
            done[id(tensor)] = tensor, _rescaled(name, small, scales[name]) if name in scales else small
            if isinstance(tensor, nn.Parameter):
                shape, grad = tensor.shape, tensor.grad
                set_data(tensor, done[id(tensor)][1], None if grad is None else _cut(grad, layout, plan), undo)
                state = {} if optimizer is None else optimizer.state.get(tensor, {})
                for key, value in list(state.items()):
                    if isinstance(value, Tensor) and value.shape == shape and value.ndim:
                        undo.callback(operator.setitem, state, key, value)
                        state[key] = _cut(value, layout, plan)
        if not isinstance(tensor, nn.Parameter):
            undo.callback(operator.setitem, module._buffers, leaf, module._buffers[leaf])
            module._buffers[leaf] = done[id(tensor)][1]
    _check_weight_norms(model, touched)
    swapped = _swap_attentions(model, plan, touched, undo)
    with cache_on():  # a copy of a config keeps the user's setting
        _correct_attributes(model, plan, swapped, undo)
    _correct_layers(model, plan, touched, undo)
    record_(model, (*plans_of(model), plan), undo)


def _add_biases(model: nn.Module, plan: Plan, undo: Undo) -> None:
    """Give layers without a bias one of zeros, where the plan says so."""
    for path in plan.structure.biases:
        module, _ = _holder(model, f"{path}.bias")
        weight = module._parameters.get("weight")
        if weight is None or "bias" not in module._parameters:
            raise PlanError(f"{path!r} ({type(module).__name__}) cannot hold a bias: build the model of the plan")
        if module._parameters["bias"] is None:
            outputs = plan.structure.tensors[f"{path}.bias"].shape
            if outputs != (getattr(module, "out_features", getattr(module, "out_channels", None)),):
                raise PlanError(f"{path!r} cannot hold a bias of shape {outputs}: build the model of the plan")
            undo.callback(operator.setitem, module._parameters, "bias", None)
            module.bias = nn.Parameter(weight.new_zeros(outputs), requires_grad=weight.requires_grad)


def _touched(model: nn.Module, plan: Plan) -> dict[str, TensorLayout]:
    """The tensors that lose units, checked against the model."""
    found: dict[str, TensorLayout] = {}
    for name, layout in plan.structure.tensors.items():
        if not any(_loses(extent, plan) for extent in layout.axes.values()):
            continue
        module, leaf = _holder(model, name)
        tensor = getattr(module, leaf, None)
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"{type(model).__name__} has no tensor {name!r}: the plan is for {plan.structure.model}: build it"
            )
        if tuple(tensor.shape) != layout.shape:
            raise PlanError(f"{name!r} has shape {tuple(tensor.shape)}, the plan expects {layout.shape}: {_ONCE}")
        found[name] = layout
    return found


def _loses(extent: Extent, plan: Plan) -> bool:
    return any(name in plan.kept for name in names_in(extent))


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return submodule(model, path), leaf


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by name."""
    module, leaf = _holder(model, name)
    tensor: Tensor = getattr(module, leaf)
    return tensor


def _cut(tensor: Tensor, layout: TensorLayout, plan: Plan) -> Tensor:
    small = tensor.detach()
    for axis, extent in layout.axes.items():
        if _loses(extent, plan):
            positions = torch.nonzero(kept_mask(extent, plan.kept)).flatten()
            small = small.index_select(axis, positions.to(small.device))
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous():
        return small.contiguous(memory_format=torch.channels_last)
    return small.contiguous()


def kept_part(name: str, value: Tensor, plan: Plan) -> Tensor:
    """Cut a dense tensor to the plan."""
    layout = plan.structure.tensors.get(name)
    return value if layout is None else _cut(value, layout, plan)


def set_data(tensor: Tensor, data: Tensor, grad: Tensor | None, undo: Undo) -> None:
    """Give a parameter or buffer new data. It stays the same object, so ties and optimizers see the change."""
    before = tensor.data, tensor.grad

    def restore() -> None:
        tensor.grad = None  # torch checks that a gradient fits its tensor
        tensor.data, tensor.grad = before

    undo.callback(restore)
    tensor.grad = None
    tensor.data, tensor.grad = data, grad


# Weight norms -------------------------------------------------------------------------------------------------------
def row_norms(v: Tensor, dim: int) -> Tensor:
    """The norms that a weight norm over `dim` divides by."""
    norms: Tensor = torch.linalg.vector_norm(v, dim=[k for k in range(v.ndim) if k != dim], keepdim=True)
    return norms


def _weight_norm_scales(model: nn.Module, plan: Plan, touched: dict[str, TensorLayout]) -> dict[str, Tensor]:
    """Factors for g: ||v kept|| / ||v|| of each row, so that g v / ||v|| keeps its remaining entries."""
    scales: dict[str, Tensor] = {}
    for norm in plan.structure.weight_norms:
        if norm.v not in touched:
            continue
        v, layout = tensor_of(model, norm.v).detach(), touched[norm.v]
        rows = {axis: extent for axis, extent in layout.axes.items() if axis == norm.dim}
        before = row_norms(_cut(v, TensorLayout(layout.shape, rows), plan), norm.dim)
        scales[norm.g] = row_norms(_cut(v, layout, plan), norm.dim) / before
        touched.setdefault(norm.g, TensorLayout(tuple(tensor_of(model, norm.g).shape), {}))
    return scales


def _rescaled(name: str, g: Tensor, scale: Tensor) -> Tensor:
    scaled = g * scale
    if scaled.shape != g.shape:
        raise PlanError(f"{name!r} is no weight norm's g of shape {tuple(scale.shape)}: build the model of the plan")
    return scaled


def _check_weight_norms(model: nn.Module, touched: Iterable[str]) -> None:
    """Check that g and v fit and have rows: torch reads beyond their memory otherwise, or ends the process."""
    for name in touched:
        module, leaf = _holder(model, name)
        for ends in (("original0", "original1"), ("_g", "_v")):
            stem = leaf.removesuffix(ends[0]).removesuffix(ends[1])
            pair = [getattr(module, stem + end, None) for end in ends]
            if stem == leaf or not all(isinstance(tensor, Tensor) for tensor in pair):
                continue
            g, v = (tuple(tensor.shape) for tensor in pair)  # type: ignore[union-attr]
            if 0 in g or (g and (len(g) != len(v) or any(a not in (1, b) for a, b in zip(g, v, strict=True)))):
                raise PlanError(f"{name!r}: the plan leaves a weight norm g of {g} and v of {v}: make a new plan")


@torch.no_grad()
def zero_(model: nn.Module, name: str, axes: Collection[int], plan: Plan, undo: Undo) -> None:
    """Put zeros where these axes of a tensor hold units that the plan does not keep."""
    layout = plan.structure.tensors.get(name)
    norm = next((norm for norm in plan.structure.weight_norms if norm.v == name), None)
    losing = {k: e for k, e in layout.axes.items() if k in axes and _loses(e, plan)} if layout else {}
    if norm is not None:
        losing.pop(norm.dim, None)  # g is zero there; v would be 0 / 0
    if not losing:
        return
    tensor = tensor_of(model, name)
    masked = tensor.detach().clone()
    for axis, extent in losing.items():
        masked.movedim(axis, 0)[~kept_mask(extent, plan.kept).to(masked.device)] = 0
    if norm is not None:
        g = tensor_of(model, norm.g)
        set_data(g, g.detach() * row_norms(masked, norm.dim) / row_norms(tensor, norm.dim), g.grad, undo)
    set_data(tensor, masked, tensor.grad, undo)


# Attributes ---------------------------------------------------------------------------------------------------------
def _swap_attentions(model: nn.Module, plan: Plan, touched: Iterable[str], undo: Undo) -> list[nn.Module]:
    """Replace each cut nn.MultiheadAttention by one that runs with fewer heads. Returns the new modules."""
    heads = {a.module: kept_length(a.extent, plan.kept) for a in plan.structure.attributes if a.name == "num_heads"}
    swapped: list[nn.Module] = []
    for path, old in list(model.named_modules()):
        if not isinstance(old, nn.MultiheadAttention) or not any(name.startswith(f"{path}.") for name in touched):
            continue
        undo.callback(setattr, old.out_proj, "in_features", old.out_proj.in_features)
        new = slim(old, heads.get(path, old.num_heads))
        swapped.append(new)
        undo.callback(replace_module, model, new, old)
        replace_module(model, old, new)
    return swapped


def _correct_attributes(model: nn.Module, plan: Plan, swapped: list[nn.Module], undo: Undo) -> None:
    for attribute in plan.structure.attributes:
        module = model.get_submodule(attribute.module)
        if not _loses(attribute.extent, plan) or any(module is new for new in swapped):
            continue
        found, expected = read_number(module, attribute.name), full_length(attribute.extent)
        if found != expected:
            raise PlanError(f"{attribute.module!r} has {attribute.name}={found}, the plan expects {expected}: {_ONCE}")
        undo.callback(put_back, module, dict(vars(module)))
        write_number(module, attribute.name, kept_length(attribute.extent, plan.kept))


def _correct_layers(model: nn.Module, plan: Plan, touched: Iterable[str], undo: Undo) -> None:
    """Update what layers hold beside their parameters: weights computed by weight norms, and their own sizes."""
    for norm in plan.structure.weight_norms:
        module, leaf = _holder(model, norm.v)
        whole = leaf.removesuffix("_v")
        if norm.v in touched and whole in vars(module):  # the hook-style weight_norm keeps the weight it computed last
            weight = torch._weight_norm(tensor_of(model, norm.v), tensor_of(model, norm.g), norm.dim)
            _set_attribute(module, whole, weight, undo)
    branches_go = not all(plan.kept.values())
    for path in dict.fromkeys(owner(name) for name in touched):
        module = model.get_submodule(path)
        for name, size in own_sizes(module).items():
            if getattr(module, name, size) != size:
                _set_attribute(module, name, size, undo)
        if branches_go and (cls := empty_class(module)):
            _set_attribute(module, "__class__", cls, undo)


def _set_attribute(module: nn.Module, name: str, new: Any, undo: Undo) -> None:
    undo.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, new)


def own_sizes(module: Any) -> dict[str, Any]:
    """The attributes that repeat the sizes of a layer's tensors, with their present values."""
    weight = getattr(module, "weight", None)
    weight = getattr(module, "running_mean", None) if weight is None else weight
    if not isinstance(weight, Tensor):
        return {}
    for cls, names in _SIZES.items():
        if isinstance(module, cls):
            return dict(zip(names, weight.shape, strict=True))
    if isinstance(module, nn.modules.conv._ConvNd):
        sizes = weight.shape[0], weight.shape[1] * module.groups
        return dict(zip(("in_channels", "out_channels"), sizes if module.transposed else sizes[::-1], strict=True))
    if isinstance(module, nn.LayerNorm):
        return {"normalized_shape": tuple(weight.shape)}
    if hasattr(module, "nf") and hasattr(module, "nx"):  # transformers' Conv1D, a transposed linear layer
        return dict(zip(("nx", "nf"), weight.shape, strict=True))
    return {}


# Integers among a module's attributes, by names such as `num_heads`, `sizes[1]` and `config.hidden_size` ------------
_NUMBER = re.compile(r"(?:(?P<config>\w+)\.)?(?P<name>\w+)(?:\[(?P<index>\d+)\])?")


def numbers(holder: object, config: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer among a module's attributes: plain, in lists and tuples, and in its config."""
    for key, value in vars(holder).items():
        name = f"{config}{key}"
        if key.startswith("_"):
            continue
        if _is_int(value):
            yield name, value
        elif isinstance(value, (list, tuple)) and all(map(_is_int, value)):
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
        elif "config" in key and not config and hasattr(value, "__dict__"):
            yield from numbers(value, f"{name}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_number(module: nn.Module, name: str) -> int | None:
    """The integer that `numbers` yields under this name, or None."""
    found = _NUMBER.fullmatch(name)
    if found is None:
        return None
    holder: Any = getattr(module, found["config"], None) if found["config"] else module
    value = getattr(holder, found["name"], None)
    if found["index"] is not None:
        index = int(found["index"])
        value = value[index] if isinstance(value, (list, tuple)) and index < len(value) else None
    return value if _is_int(value) else None


def write_number(module: nn.Module, name: str, number: int) -> None:
    """Set an integer. A config or list that holds it is copied first, since other modules may share it."""
    found = _NUMBER.fullmatch(name)
    assert found is not None  # noqa: S101  # names come from `numbers`
    holder: Any = module
    if found["config"]:
        holder = copy(getattr(module, found["config"]))
        setattr(module, found["config"], holder)
    value: Any = number
    if found["index"] is not None:
        items = list(getattr(holder, found["name"]))
        items[int(found["index"])] = number
        value = type(getattr(holder, found["name"]))(items)
    setattr(holder, found["name"], value)


def put_back(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Restore all attributes of a module."""
    vars(module).clear()
    vars(module).update(before)
