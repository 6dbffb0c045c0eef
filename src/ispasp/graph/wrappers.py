"""Models inside wrappers: `torch.compile`, DataParallel, DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from ispasp.errors import InputError

_COMPILED = "_compiled_call_impl"  # what module.compile() leaves in a module


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside all wrappers; a model without any is returned as it is.

    >>> net = nn.Linear(2, 2)
    >>> unwrapped(nn.DataParallel(net)) is net, unwrapped(net) is net
    (True, True)
    """
    inner = _inner(model)
    return model if inner is None else unwrapped(inner)


@contextmanager
def plain(model: nn.Module) -> Iterator[nn.Module]:
    """The module inside all wrappers. Inside the block its submodules are unwrapped as well, and nothing is compiled.

    Names of parameters and modules are then those of the plain model.

    >>> net = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    >>> with plain(net) as model:
    ...     [name for name, _ in model.named_parameters()]
    ['0.weight', '0.bias']
    >>> [name for name, _ in net.named_parameters()]
    ['0.module.weight', '0.module.bias']
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    model = unwrapped(model)
    wrapped: list[tuple[nn.Module, str, nn.Module]] = []
    compiled: list[tuple[nn.Module, Any]] = []
    try:
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if child is not None and _inner(child) is not None:
                    wrapped.append((parent, name, child))
                    parent._modules[name] = unwrapped(child)
        for module in model.modules():
            if vars(module).get(_COMPILED) is not None:
                compiled.append((module, vars(module).pop(_COMPILED)))
        yield model
    finally:
        for module, call in compiled:
            vars(module)[_COMPILED] = call
        for parent, name, child in wrapped:
            if parent._modules[name] is unwrapped(child):  # else another layer has taken its place
                parent._modules[name] = child


def _inner(module: nn.Module) -> nn.Module | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module  # type: ignore[no-any-return]
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing can have been compiled
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return cast("nn.Module", module._modules["_orig_mod"])
    return None
