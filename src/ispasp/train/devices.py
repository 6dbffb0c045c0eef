"""An accelerate `Accelerator` for one run, undone afterwards.

accelerate takes seconds to import, so it is imported when a run begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from ispasp.errors import InputError, MissingExtraError

_WRAPPING = ("forward", "_original_forward", "_is_accelerate_prepared")  # what accelerate leaves on a model


def need_accelerate(what: str = "fine-tuning") -> None:
    """Raise MissingExtraError unless accelerate is installed."""
    if find_spec("accelerate") is None:
        raise MissingExtraError(f"{what} needs accelerate: pip install 'ispasp[train]'")


def accelerated_if_useful(mixed_precision: str | None, *, join: bool) -> AbstractContextManager[Any]:
    """An Accelerator where it makes a difference: in mixed precision, on a GPU, in several processes. Else None.

    `join`: processes of torchrun that are not connected yet become a group.
    """
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
    launched |= join and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if mixed_precision is not None:
        need_accelerate(f"mixed_precision={mixed_precision!r}")
    elif find_spec("accelerate") is None or not (launched or torch.accelerator.is_available()):
        return nullcontext()
    return accelerated(mixed_precision)


@contextmanager
def accelerated(mixed_precision: str | None) -> Iterator[Any]:
    """An Accelerator. Its process-wide settings are reset at the end, so that the next run may have others."""
    state = import_module("accelerate.state")
    before, threads = state.is_initialized(), torch.get_num_threads()
    gradients = state.GradientState()
    accumulation = gradients.plugin_kwargs  # of the caller's Accelerator, if there is one
    try:
        yield _accelerator(mixed_precision)
    finally:
        torch.set_num_threads(threads)
        gradients.plugin_kwargs = accumulation
        if not before:
            state.AcceleratorState._reset_state()


def _accelerator(mixed_precision: str | None) -> Any:
    if mixed_precision not in (None, "bf16", "fp16"):
        raise InputError(f"mixed_precision={mixed_precision!r}: choose None, 'bf16' or 'fp16'")
    utils = import_module("accelerate.utils")
    try:
        accelerator = import_module("accelerate").Accelerator(
            cpu=not torch.accelerator.is_available(),  # otherwise torchrun on CPUs counts as one process
            mixed_precision=mixed_precision,
            # The loop weighs every batch by its examples, so accelerate must not divide.
            gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=1),
            dataloader_config=utils.DataLoaderConfiguration(split_batches=True, even_batches=False),
            kwargs_handlers=[utils.DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
    except ValueError as error:
        raise InputError(f"accelerate refuses mixed_precision={mixed_precision!r}: {error}") from error
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":  # it would train in float32
        raise InputError("mixed_precision='fp16' needs a GPU: pass 'bf16' or None")
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise InputError(f"accelerate is set up for {kind}, training is data-parallel: run `accelerate config`")
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if processes != (seen := accelerator.num_processes):
        raise InputError(f"torch.distributed has {processes} processes, accelerate sees {seen}: use torchrun")
    return accelerator


@contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model on a device; at the end it is moved back, each module in its own train or eval mode."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if len(devices) > 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise InputError(f"{type(model).__name__} lies on {names}: bring all of it to one real device first")
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.to(device)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for home in devices:
            model.to(home)


@contextmanager
def wrapped(accelerator: Any, model: nn.Module) -> Iterator[nn.Module]:
    """The model as accelerate runs it: in mixed precision, with gradients averaged over processes."""
    own = {name: vars(model)[name] for name in _WRAPPING if name in vars(model)}
    vars(model).pop("_is_accelerate_prepared", None)
    try:
        yield accelerator.prepare_model(model)
    finally:
        for name in _WRAPPING:
            vars(model).pop(name, None)
        vars(model).update(own)


@contextmanager
def shared(accelerator: Any, loader: Any) -> Iterator[Any]:
    """A loader that reads this process's part of each batch; with one process, the loader itself."""
    if accelerator.num_processes == 1:
        yield loader
        return
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
        remedy = "pass a torch DataLoader without a DistributedSampler; each of its batches is split over the processes"
        raise InputError(f"{accelerator.num_processes} processes share a {type(loader).__name__}: {remedy}")
    sampler: Any = loader.sampler
    generator = getattr(sampler, "generator", None)
    try:
        part = accelerator.prepare_data_loader(loader, device_placement=False)
    except ValueError as error:
        raise InputError(f"the loader cannot be shared by {accelerator.num_processes} processes: {error}") from error
    try:
        yield part
    finally:
        part.end()
        if hasattr(sampler, "generator"):
            sampler.generator = generator  # accelerate adds one where there is none


def draws_alone(loader: Any) -> bool:
    """Whether a loader's order is independent of the global generators, so that processes may seed them differently."""
    sampler = getattr(loader, "sampler", None)
    own = type(sampler) is SequentialSampler or isinstance(getattr(sampler, "generator", None), torch.Generator)
    return own and type(getattr(loader, "batch_sampler", None)) is BatchSampler
