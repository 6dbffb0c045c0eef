"""Estimate BatchNorm statistics anew from the calibration batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ispasp.calibrate.team import Team
from ispasp.errors import InputError
from ispasp.graph.trace import Batch, run_and_restore
from ispasp.surgery.remove import Undo, set_data


@torch.no_grad()
def recalibrate_(model: nn.Module, batches: Iterable[Batch], team: Team, undo: Undo) -> int:
    """Set the running statistics of every BatchNorm to the mean over its calls; returns how many there are.

    Machines weigh by their number of calls, so that the result is that of one machine with all of them. Every
    BatchNorm sees inputs that others in the network have normalised by the statistics of the same batch.
    """
    norms = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    }
    sums: dict[str, torch.Tensor] = {}
    handles = [module.register_forward_pre_hook(_adder(name, sums)) for name, module in norms.items()]
    before = {(m, leaf): value.clone() for m in norms.values() for leaf, value in m.named_buffers(recurse=False)}
    for module in norms.values():
        module.training = True
    try:
        with team.together("the recalibration of BatchNorm"):
            for number, batch in enumerate(batches):
                _run(model, batch, number)
    finally:
        for handle in handles:
            handle.remove()
        for module in norms.values():
            module.training = False
        for (module, leaf), value in before.items():
            module.get_buffer(leaf).copy_(value)
    totals = team.sum_tensors(sums)
    for name, module in norms.items():
        for kind, buffer in (("mean", module.running_mean), ("var", module.running_var)):
            if f"{kind}:{name}" in totals and buffer is not None:
                set_data(buffer, (totals[f"{kind}:{name}"] / totals[f"calls:{name}"]).to(buffer), None, undo)
    return len(norms)


def _run(model: nn.Module, batch: Batch, number: int) -> None:
    try:
        run_and_restore(model, batch)
    except Exception as error:  # torch refuses a BatchNorm that gets one value for each channel
        raise InputError(
            f"BatchNorm cannot be recalibrated on batch {number} ({type(error).__name__}: {error}): pass larger "
            "batches, or recalibrate=False"
        ) from error


def _adder(name: str, sums: dict[str, torch.Tensor]):  # type: ignore[no-untyped-def]
    def add(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        x = args[0].double()
        over = [0, *range(2, x.ndim)]
        one = torch.ones((), dtype=x.dtype, device=x.device)
        for kind, value in (("mean", x.mean(over)), ("var", x.var(over, unbiased=True)), ("calls", one)):
            key = f"{kind}:{name}"
            sums[key] = sums[key] + value if key in sums else value

    return add
