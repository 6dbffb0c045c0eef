"""Surgery: cut tensors to a plan, correct numbers, and be able to take it all back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.errors import InputError, IspaspError, PlanError
from ispasp.graph.analyse import owner
from ispasp.graph.interrupts import uninterrupted
from ispasp.surgery import attributes
from ispasp.surgery.attention import slim
from ispasp.surgery.fold import Folding
from ispasp.surgery.modules import own_sizes
from ispasp.types.layout import Extent, full_length, kept_length, kept_mask, names_in
from ispasp.types.plan import Plan, TensorLayout


class Undo:
    """Steps that restore the model, to be run in reverse order."""

    def __init__(self) -> None:
        """Nothing to undo yet."""
        self._steps: list[Callable[[], None]] = []

    def __call__(self, step: Callable[[], None]) -> None:
        """Remember how to take back what is done next."""
        self._steps.append(step)

    def run(self) -> None:
        """Take everything back."""
        while self._steps:
            self._steps.pop()()


@contextmanager
def all_or_nothing() -> Iterator[Undo]:
    """On any exception the model is exactly as before."""
    undo = Undo()
    try:
        yield undo
    except BaseException:
        with uninterrupted():
            undo.run()
        raise


@contextmanager
def fitting(model: nn.Module) -> Iterator[None]:
    """A plan from anywhere may name what a model has not: whatever comes of it inside is a `PlanError`."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, (IspaspError, torch.OutOfMemoryError)):
            raise
        raise PlanError(
            f"the plan does not fit {type(model).__name__} ({type(error).__name__}: {str(error)[:200]}): build the "
            "dense model that it was made for"
        ) from error


@torch.no_grad()
def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Refuse an optimizer of another model: its state would not be cut, and it would train nothing here."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters()):
        raise InputError(
            f"the optimizer holds no parameter of this {type(model).__name__}: pass the one that trains the model"
        )


def remove_(model: nn.Module, plan: Plan, undo: Undo, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Remove every unit that the plan does not keep. Names, ties, dtypes and devices stay."""
    layers = Folding(model)
    undo(layers.restore)
    layers.fold(plan.structure.folded)
    _add_biases(model, plan, undo)
    touched = _touched(model, plan)
    scales = _weight_norm_scales(model, plan, touched)
    done: dict[int, tuple[Any, ...]] = {}
    for name, layout in touched.items():
        module, leaf = _holder(model, name)
        tensor = getattr(module, leaf)
        if id(tensor) in done:  # tied: the parameter object is shared and already cut
            if leaf in module._buffers:
                _set_buffer(module, leaf, done[id(tensor)][1], undo)
            continue
        small = _cut(tensor, layout, plan)
        if name in scales:
            small = _rescaled(name, small, scales[name])
        done[id(tensor)] = (tensor, small)
        if isinstance(tensor, nn.Parameter):
            _set_parameter(tensor, small, layout, plan, undo, optimizer)
        else:
            _set_buffer(module, leaf, small, undo)
    _check_weight_norms(model, touched)
    _correct(model, plan, touched, undo)


def _add_biases(model: nn.Module, plan: Plan, undo: Undo) -> None:
    """Give layers that were built without a bias one of zeros, where the plan says so."""
    for path in plan.structure.biases:
        module, _ = _holder(model, f"{path}.bias")
        weight = module._parameters.get("weight")
        if weight is None or "bias" not in module._parameters:
            raise PlanError(f"{path!r} ({type(module).__name__}) cannot hold a bias: build the model of the plan")
        if module._parameters["bias"] is None:
            outputs = plan.structure.tensors[f"{path}.bias"].shape
            if outputs != (getattr(module, "out_features", getattr(module, "out_channels", None)),):
                raise PlanError(f"{path!r} cannot hold a bias of shape {outputs}: build the model of the plan")
            undo(lambda module=module: module._parameters.__setitem__("bias", None))  # type: ignore[misc]
            module.bias = nn.Parameter(weight.new_zeros(outputs), requires_grad=weight.requires_grad)


def _touched(model: nn.Module, plan: Plan) -> dict[str, TensorLayout]:
    """Tensors that lose something, checked against the model."""
    found: dict[str, TensorLayout] = {}
    for name, layout in plan.structure.tensors.items():
        if not any(_loses(extent, plan) for extent in layout.axes.values()):
            continue
        module, leaf = _holder(model, name)
        tensor = getattr(module, leaf, None)
        if not isinstance(tensor, Tensor):
            raise PlanError(
                f"{type(model).__name__} has no tensor {name!r}: the plan was made for {plan.structure.model}; "
                "build the same dense model"
            )
        if tuple(tensor.shape) != layout.shape:
            raise PlanError(
                f"{name!r} has shape {tuple(tensor.shape)}, the plan expects {layout.shape}: "
                "apply a plan once, to the dense model it was made for"
            )
        found[name] = layout
    return found


def _loses(extent: Extent, plan: Plan) -> bool:
    return any(name in plan.kept for name in names_in(extent))


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(path), leaf
    except AttributeError as error:
        raise PlanError(
            f"{type(model).__name__} has no module {path!r}: build the dense model that the plan was made for"
        ) from error


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
    """What the plan leaves of a dense tensor."""
    layout = plan.structure.tensors.get(name)
    return value if layout is None else _cut(value, layout, plan)


def _set_parameter(
    parameter: nn.Parameter,
    small: Tensor,
    layout: TensorLayout,
    plan: Plan,
    undo: Undo,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    data, grad = parameter.data, parameter.grad
    set_data(parameter, small, None if grad is None else _cut(grad, layout, plan), undo)
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for key, value in list(state.items()):
        if isinstance(value, Tensor) and value.shape == data.shape and value.ndim:
            undo(lambda key=key, value=value: state.__setitem__(key, value))  # type: ignore[misc]
            state[key] = _cut(value, layout, plan)


def set_data(tensor: Tensor, data: Tensor, grad: Tensor | None, undo: Undo) -> None:
    """Give a parameter or buffer new data: it stays the same object, so that all who hold it see the change."""
    before = tensor.data, tensor.grad

    def restore() -> None:
        tensor.grad = None  # a gradient must fit its tensor at every moment
        tensor.data, tensor.grad = before

    undo(restore)
    tensor.grad = None
    tensor.data, tensor.grad = data, grad


def _set_buffer(module: nn.Module, leaf: str, small: Tensor, undo: Undo) -> None:
    old = module._buffers[leaf]
    undo(lambda: module._buffers.__setitem__(leaf, old))
    module._buffers[leaf] = small


def _weight_norm_scales(model: nn.Module, plan: Plan, touched: dict[str, TensorLayout]) -> dict[str, Tensor]:
    """Factors for g: ||v kept|| / ||v|| for each row, so that g v / ||v|| keeps its remaining entries."""
    scales: dict[str, Tensor] = {}
    for norm in plan.structure.weight_norms:
        if norm.v not in touched:
            continue
        module, leaf = _holder(model, norm.v)
        v = getattr(module, leaf).detach()
        rows = {axis: e for axis, e in touched[norm.v].axes.items() if axis == norm.dim}
        before = row_norms(_cut(v, TensorLayout(touched[norm.v].shape, rows), plan), norm.dim)
        scales[norm.g] = row_norms(_cut(v, touched[norm.v], plan), norm.dim) / before
        touched.setdefault(norm.g, TensorLayout(tuple(_tensor(model, norm.g).shape), {}))
    return scales


def _check_weight_norms(model: nn.Module, touched: Iterable[str]) -> None:
    """Refuse to cut g and v apart: torch multiplies them without a look at their shapes, beyond their memory."""
    for name in touched:
        for one, other in (("original0", "original1"), ("_g", "_v")):
            stem = next((name.removesuffix(end) for end in (one, other) if name.endswith(end)), None)
            module, leaf = _holder(model, name)
            pair = [getattr(module, f"{leaf.removesuffix(one).removesuffix(other)}{end}", None) for end in (one, other)]
            if stem is None or not all(isinstance(tensor, Tensor) for tensor in pair):
                continue
            g, v = (tuple(tensor.shape) for tensor in pair)  # type: ignore[union-attr]
            if g and (len(g) != len(v) or any(a not in (1, b) for a, b in zip(g, v, strict=True))):
                raise PlanError(f"{name!r}: the plan leaves a weight norm g of {g} and v of {v}: build the plan anew")


def _rescaled(name: str, g: Tensor, scale: Tensor) -> Tensor:
    scaled = g * scale
    if scaled.shape != g.shape:
        raise PlanError(f"{name!r} is no weight norm's g of shape {tuple(scale.shape)}: build the model of the plan")
    return scaled


def _tensor(model: nn.Module, name: str) -> Tensor:
    module, leaf = _holder(model, name)
    tensor = getattr(module, leaf)
    assert isinstance(tensor, Tensor)  # noqa: S101  # `_touched` has checked it
    return tensor


def row_norms(v: Tensor, dim: int) -> Tensor:
    """Norms that a weight norm over `dim` divides by."""
    norms: Tensor = torch.linalg.vector_norm(v, dim=[k for k in range(v.ndim) if k != dim], keepdim=True)
    return norms


def _correct(model: nn.Module, plan: Plan, touched: dict[str, TensorLayout], undo: Undo) -> None:
    """Numbers that forwards read, then what layers say about their own sizes."""
    heads = {a.module: kept_length(a.extent, plan.kept) for a in plan.structure.attributes if a.name == "num_heads"}
    swapped: list[nn.Module] = []
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention) and any(name.startswith(f"{path}.") for name in touched):
            swapped.append(_swap(model, module, heads.get(path, module.num_heads), undo))
    for attribute in plan.structure.attributes:
        module = model.get_submodule(attribute.module)
        if not _loses(attribute.extent, plan) or any(module is new for new in swapped):
            continue
        found, expected = attributes.read(module, attribute.name), full_length(attribute.extent)
        if found != expected:
            raise PlanError(
                f"{attribute.module!r} has {attribute.name}={found}, the plan expects {expected}: "
                "apply a plan once, to the dense model it was made for"
            )
        _write(module, attribute.name, kept_length(attribute.extent, plan.kept), undo)
    for norm in plan.structure.weight_norms:
        module, leaf = _holder(model, norm.v)
        whole = leaf.removesuffix("_v")
        if norm.v in touched and whole in vars(module):  # the hook-style weight_norm keeps the last weight it computed
            _write_plain(
                module, whole, torch._weight_norm(_tensor(model, norm.v), _tensor(model, norm.g), norm.dim), undo
            )
    for path in dict.fromkeys(owner(name) for name in touched):
        module = model.get_submodule(path)
        for name, size in own_sizes(module).items():
            if getattr(module, name, size) != size:
                _write_plain(module, name, size, undo)


def _write(module: nn.Module, name: str, new: int, undo: Undo) -> None:
    before = dict(vars(module))

    def restore() -> None:
        vars(module).clear()
        vars(module).update(before)

    undo(restore)
    attributes.write(module, name, new)


def _write_plain(module: nn.Module, name: str, new: Any, undo: Undo) -> None:
    old = getattr(module, name)
    undo(lambda: setattr(module, name, old))
    setattr(module, name, new)


def _swap(model: nn.Module, old: nn.MultiheadAttention, heads: int, undo: Undo) -> nn.Module:
    """Put an attention module that can run with fewer heads in the place of one that cannot, wherever it is used."""
    projection, width = old.out_proj, old.out_proj.in_features
    undo(lambda: setattr(projection, "in_features", width))
    new = slim(old, heads)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                undo(lambda parent=parent, name=name: parent._modules.__setitem__(name, old))  # type: ignore[misc]
                parent._modules[name] = new
    return new
