"""Fold layers that compute their weight in the forward into plain layers, which can lose inputs.

Weight standardisation, spectral norm and other parametrizations normalise a weight over its inputs. With fewer inputs
the rest of the weight would change, so removing would not equal masking. A plain layer that holds the computed weight
gives the same outputs and can be pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from ispasp.errors import InputError, PlanError, failing_as
from ispasp.graph.analyse import Analysis, analyse, owner
from ispasp.graph.atoms import UNKNOWN, atoms_of
from ispasp.graph.state import uninterrupted
from ispasp.graph.trace import Batch, evaluating

_KINDS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, *(getattr(nn, kind) for kind in _KINDS))
_FUNCTIONS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_PRODUCTS = tuple(getattr(functional, name) for name in _FUNCTIONS)
_HOOKS = (SpectralNorm, WeightNorm, BasePruningMethod)  # they compute the weight before each call
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
_WEIGHT_NORM = "_WeightNorm"  # torch's own, which surgery corrects without folding


@final
class SameConv2d(nn.Conv2d):
    """A convolution that pads as TensorFlow's "SAME" does: by the input's size, more behind than before."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as torch calls it
        pads: list[int] = []
        rows = zip(input.shape[-2:], self.kernel_size, self.stride, self.dilation, strict=True)
        for size, kernel, stride, dilation in reversed(list(rows)):
            total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            pads += [total // 2, total - total // 2]
        output: Tensor = self._conv_forward(functional.pad(input, pads), self.weight, self.bias)
        return output


class Folding:
    """The layers of a model that are replaced by plain ones, and can be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._replaced: dict[str, tuple[nn.Module, nn.Module]] = {}  # path -> the layer, the plain one

    def fold(self, paths: Iterable[str]) -> None:
        """Replace these layers wherever they are used. Plain ones stay."""
        for path in dict.fromkeys(paths):
            old = submodule(self._model, path)
            if old is self._model:
                raise PlanError("the plan makes a plain layer of the model itself: write it again with to_json")
            if _base(old) is not None and not _computes(old):
                continue
            new = folded(old) if _owns_its_tensors(self._model, old) else None
            if new is None:
                raise PlanError(
                    f"the plan makes a plain layer of {path!r} ({type(old).__name__}), which does not compute its "
                    "weight from its own parameters: build the model of the plan"
                )
            self._replaced[path] = old, new
            replace_module(self._model, old, new)

    def restore(self, but: Iterable[str] = ()) -> None:
        """Put the layers back, except those in `but`."""
        for path in [path for path in self._replaced if path not in set(but)]:
            old, new = self._replaced.pop(path)
            replace_module(self._model, new, old)

    def check(self, optimizer: torch.optim.Optimizer | None, paths: Iterable[str]) -> None:
        """Check that the optimizer trains no parameter of these layers: folding replaces them."""
        held = set() if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        for path in (path for path in paths if path in self._replaced):
            old, new = self._replaced[path]
            if held & ({*map(id, old.parameters())} - {*map(id, new.parameters())}):
                raise InputError(
                    f"the optimizer trains parameters of {path!r} that pruning replaces: build it after pruning"
                )

    def lost(self, path: str) -> int:
        if path not in self._replaced:
            return 0
        old, new = self._replaced[path]
        return sum(p.numel() for p in old.parameters()) - sum(p.numel() for p in new.parameters())


@contextmanager
def folding(model: nn.Module, layers: Folding | None = None) -> Iterator[Folding]:
    """Put all layers back on any exception in a block."""
    found = Folding(model) if layers is None else layers
    try:
        yield found
    except BaseException:
        with uninterrupted():
            found.restore()
        raise


def to_fold(model: nn.Module, batch: Batch, also: Sequence[Batch] = ()) -> tuple[str, ...]:
    """The layers that have more removable units once they are plain. Others keep computing their weight."""
    computing = [(path, module) for path, module in model.named_modules() if path and _computes(module)]
    paths = [path for path, module in computing if _owns_its_tensors(model, module) and folded(module) is not None]
    if not paths:
        return ()
    before = _free(analyse(model, batch, also))
    with folding(model) as trial:
        trial.fold(paths)
        after = _free(analyse(model, batch, also))
        trial.restore()
    return tuple(path for path in paths if after.get(path, 0) > before.get(path, 0))


def folded(module: nn.Module) -> nn.Module | None:
    """A plain layer with the weight that a module computes; None if that gives other outputs."""
    if not _computes(module) or "forward" in vars(module):
        return None
    with suppress(Exception), evaluating(module):  # a forward may raise anything
        runs = [_watched(module, x) for x in _probes(module)]
        if any(len(seen) != 1 for _, _, seen in runs):
            return None
        weight, bias = runs[0][2][0]
        for _, _, ((w, b),) in runs:
            if not _same(w, weight) or (b is not bias and (b is None or bias is None or not _same(b, bias))):
                return None  # the weight depends on the input
        base = _base(module)
        for cls in (base, SameConv2d) if base is nn.Conv2d else (base,):
            new = _plain(module, cls, weight, bias)
            if all(_same(new.forward(x), y) for x, y, _ in runs):
                return new
    return None


class _Products(TorchFunctionMode):
    """Records weight and bias of every linear map and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor | None]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
            self.seen.append((given["weight"], given.get("bias")))
        return func(*args, **kwargs)


def _watched(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor | None]]]:
    """Run a module; returns input, output and recorded products. Users' hooks are not called."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _HOOKS):
            hook(module, (x,))
    with _Products() as products:
        y = module.forward(x)
    return x, y, products.seen


def _probes(module: Any) -> list[Tensor]:
    like = next(p for p in module.parameters() if p.is_floating_point())
    if isinstance(module, nn.Linear):
        shapes = [(3, module.in_features), (2, 5, module.in_features)]
    else:
        spans = [(k - 1) * d + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        shapes = [(2, module.in_channels, *(s + more + i for i, s in enumerate(spans))) for more in (1, 4, 6)]
    generator = torch.Generator("cpu").manual_seed(0)
    return [torch.randn(shape, generator=generator, device="cpu").to(like.device, like.dtype) for shape in shapes]


def _plain(module: nn.Module, cls: type[nn.Module], weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A layer of a plain class with these tensors, and everything else from the module."""
    new = cls.__new__(cls)
    new.__dict__.update({k: v for k, v in vars(module).items() if k not in ("weight", "bias", "_compiled_call_impl")})
    trains = any(p.requires_grad for p in module.parameters())
    if bias is not None and bias is not module._parameters.get("bias"):
        bias = nn.Parameter(bias.detach().clone(), requires_grad=trains)
    tensors = {"weight": nn.Parameter(weight.detach().clone(), requires_grad=trains), "bias": bias}
    hooks = {k: hook for k, hook in module._forward_pre_hooks.items() if not isinstance(hook, _HOOKS)}
    state = {name: type(vars(module)[name])() for name in _STATE_HOOKS if name in vars(module)}
    new.__dict__.update(_parameters=tensors, _buffers={}, _modules={}, _non_persistent_buffers_set=set(), **state)
    if len(hooks) < len(module._forward_pre_hooks):
        new.__dict__["_forward_pre_hooks"] = type(module._forward_pre_hooks)(hooks)
    return new


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.allclose(x, y, equal_nan=True)


def _base(module: nn.Module) -> Any:
    """The plain class that a module derives from."""
    return next((cls for cls in type(module).__mro__ if cls in _PLAIN), None)


def _computes(module: Any) -> bool:
    """Whether a layer may compute its weight. Quantisation-aware layers count as plain."""
    base = _base(module)
    if base is None or isinstance(module, SameConv2d) or type(module).__module__.startswith("torch.ao."):
        return False
    if parametrize.is_parametrized(module):
        kinds = {type(p).__name__ for chain in module.parametrizations.values() for p in chain}
        return kinds != {_WEIGHT_NORM} or base not in type(module).__bases__
    hooked = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    return hooked or type(module).forward is not base.forward


def _owns_its_tensors(model: nn.Module, module: nn.Module) -> bool:
    """Whether no other module holds one of its parameters. Folding would separate tied ones."""
    inside = {*module.modules()}
    own = {id(p) for p in module.parameters()}
    return not any(id(p) in own for m in model.modules() if m not in inside for p in m._parameters.values())


def _free(analysis: Analysis) -> dict[str, int]:
    """Number of inputs and outputs of each layer that are not frozen."""
    found: dict[str, int] = {}
    for contraction in analysis.tracker.contractions:
        axes = (*contraction.contracted, *contraction.made)
        atoms = [atom for axis in axes for atom in atoms_of(axis)]
        count = sum(atom.size for atom in atoms if atom.frozen is None and atom.size != UNKNOWN)
        for path in {owner(name) for name in contraction.parameters}:
            found[path] = found.get(path, 0) + count
    return found


def submodule(model: nn.Module, path: str) -> nn.Module:
    """The module at a path that a plan names."""
    with failing_as(PlanError, f"{type(model).__name__} has no module {path!r}", "build the model of the plan"):
        return model.get_submodule(path)


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module wherever it is used."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
