"""`ispasp.reset_`: new initial weights at the present shapes, to train a pruned architecture from scratch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ispasp.errors import InputError
from ispasp.graph.state import plain, random_numbers_kept

_FLAG = "_is_hf_initialized"  # transformers leaves alone what it has loaded


def reset_(
    model: nn.Module, *, init: Callable[[nn.Module], Any] | None = None, leave: Collection[str] = (), seed: int = 0
) -> nn.Module:
    """Give every parameter a new initial value at its present shape, in place. Returns the model.

    Training a pruned architecture from scratch shows what its weights were worth (Liu et al. 2019, Rethinking the Value
    of Network Pruning). Weights are drawn as the model's classes draw them: by each module's `reset_parameters`, then
    by the model's `init_weights`, if it has one (transformers, timm), then by `init`, a function of each module as for
    `model.apply`. What a constructor does on its own cannot be called again: pass it as `init`.

    A parameter that nothing has set raises `InputError`, and the model is as before. `leave` names parameters, or
    globs, that keep their values. BatchNorm statistics start anew; other buffers stay. Gradients are dropped. Random
    numbers depend on `seed`; the caller's are left alone.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> before = net[0].weight.clone()
    >>> reset_(net, seed=1) is net, bool((net[0].weight == before).any()), net[0].weight.abs().max() <= 0.5
    (True, False, tensor(True))
    """
    globs = (leave,) if isinstance(leave, str) else tuple(leave)
    with torch.no_grad(), plain(model) as inner, _all_or_nothing(inner) as old, random_numbers_kept():
        _check(inner, init, globs)
        torch.manual_seed(seed)
        left = {name for name in old if any(fnmatchcase(name, glob) for glob in globs)}
        parameters = dict(inner.named_parameters())
        for parameter in parameters.values():
            if parameter.is_floating_point():
                parameter.fill_(torch.nan)  # shows afterwards what nothing has set
        _initialise(inner, init)
        for name in left & parameters.keys():
            parameters[name].copy_(old[name])
        _check_set(parameters, left)
        inner.zero_grad()
    return model


def _initialise(model: nn.Module, init: Callable[[nn.Module], Any] | None) -> None:
    """By the modules' own methods, then by what the class of the model says about all of them, then by `init`."""

    def draw(module: nn.Module) -> None:
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(getattr(module, name, None)):
                getattr(module, name)()
                break

    model.apply(draw)  # children first, as constructors do
    for module in _outermost(model, "init_weights"):
        module.init_weights()
    if init is not None:
        model.apply(init)


def _outermost(module: nn.Module, method: str) -> Iterator[Any]:
    """The modules with this method that are not inside another one with it."""
    if callable(getattr(module, method, None)):
        yield module
        return
    for child in module.children():
        yield from _outermost(child, method)


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Yield copies of all tensors, and write them back after a failure. Flags of transformers are off meanwhile."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    old = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    flagged = [each for each in (*tensors.values(), *model.modules()) if vars(each).pop(_FLAG, False)]
    try:
        yield old
    except BaseException:
        for name, tensor in tensors.items():
            tensor.copy_(old[name])
        raise
    finally:
        for each in (*tensors.values(), *model.modules()):
            vars(each).pop(_FLAG, None)  # set by the run just now
        for each in flagged:
            setattr(each, _FLAG, True)


def _check(model: nn.Module, init: object, leave: tuple[str, ...]) -> None:
    if init is not None and not callable(init):
        raise InputError(f"init is a {type(init).__name__}: pass a function of a module, as for model.apply")
    names = [name for name, _ in model.named_parameters()]
    for glob in leave:
        if not any(fnmatchcase(name, glob) for name in names):
            raise InputError(f"leave has {glob!r}, which fits no parameter: the model has {', '.join(names[:3])}, ...")


def _check_set(parameters: dict[str, nn.Parameter], left: set[str]) -> None:
    drawn = {name: p for name, p in parameters.items() if name not in left}
    unset = [name for name, p in drawn.items() if not p.is_floating_point() or bool(torch.isnan(p).any())]
    if unset:
        wrong = f"nothing gives {', '.join(unset[:5])}{', ...' if len(unset) > 5 else ''} a new initial value"
        why = "no reset_parameters of a module, no init_weights of the model"
        remedy = f"pass init=, a function of a module that sets them, or leave={unset[:1]!r} to keep their values"
        raise InputError(f"{wrong} ({why}): {remedy}. The model is as it was")
