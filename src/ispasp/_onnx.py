"""`ispasp.export_onnx`: export a model to ONNX and compare onnxruntime's output with torch's."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.engine.batches import one_batch, tensors_of
from ispasp.errors import ExportError, InputError, IspaspError, MissingExtraError
from ispasp.files.writing import workspace
from ispasp.graph.state import one_at_a_time, plain, quiet
from ispasp.graph.trace import Batch, call_arguments, evaluating
from ispasp.surgery.verify import output_of, relative_error

_TALKATIVE = ("torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime")  # their warnings say less than our check
_LIMIT = 2**31 - 2**20  # protobuf ends at 2 GiB: larger weights go to a file beside the model


def export_onnx(
    model: nn.Module, batch: Batch, path: str | os.PathLike[str], *, opset: int | None = None, tolerance: float = 1e-4
) -> float:
    """Write the model as ONNX and return the relative error of onnxruntime's output against torch's.

    `batch` is one batch, as for `survey`; a wrapped model is written without its wrapper. The first axis of the
    batch's tensors becomes the dynamic axis "batch" if the file then agrees with torch on one and on two copies of the
    batch; otherwise the export is for the batch's own shapes.
    The model runs in eval mode, and its own mode is restored. Weights are inside the file, from 2 GiB on beside it in
    `<path>.data`. An error above `tolerance` raises `ExportError` and writes nothing; float16 needs about 1e-2.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(nn.Linear(4, 2), torch.ones(3, 4), f"{folder}/model.onnx") < 1e-4
    True
    """
    if not tolerance >= 0:
        raise InputError(f"tolerance={tolerance}: pass a relative error >= 0, such as 1e-4")
    with one_at_a_time(), plain(model) as inner:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise MissingExtraError(f"exporting to ONNX needs {name}: pip install 'ispasp[onnx]'") from error
        return _write(inner, _in_order(inner, one_batch(inner, batch)), Path(path), opset, tolerance)


def _write(model: nn.Module, batch: Batch, path: Path, opset: int | None, tolerance: float) -> float:
    twice = _doubled(batch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with workspace(path.parent) as fresh, quiet(*_TALKATIVE):
            made = fresh / path.name
            error = None if twice is None else _try_dynamic(model, batch, twice, made, opset, tolerance)
            if error is None:
                error = _export(model, batch, made, opset, None, [batch])
            if not error <= tolerance:
                raise ExportError(
                    f"onnxruntime differs from torch by {error:.1e}, more than tolerance={tolerance:.1e}; nothing was "
                    "written: export in float32 (model.float()), try another opset, or pass a higher tolerance"
                )
            for file in fresh.iterdir():  # the model, and its .data beyond 2 GiB
                file.replace(path.parent / file.name)
    except IspaspError:
        raise
    except Exception as problem:
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        empty = next((name for name, tensor in model.named_parameters() if not tensor.numel()), None)
        remedy = "Check that model(batch) runs and torch.export takes it; try another opset, or model.float()"
        if empty is not None:
            remedy = f"{empty!r} has no units left, which ONNX does not allow everywhere: keep at least one of them"
        raise ExportError(f"cannot export {type(model).__name__} to {path}: {reason[:300]}. {remedy}") from problem
    return error


def _in_order(model: nn.Module, batch: Batch) -> Batch:
    """Sort named inputs as the forward does; so does the exporter."""
    if not isinstance(batch, Mapping):
        return batch
    order = list(inspect.signature(model.forward).parameters)
    return dict(sorted(batch.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _rows(batch: Batch) -> int | None:
    """The length of the first axis of the first tensor that has one."""
    return next((t.shape[0] for t in tensors_of(call_arguments(batch)) if t.ndim and t.shape[0]), None)


def _batched(leaf: Any, rows: int | None) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows


def _doubled(batch: Batch) -> Batch:
    """Two copies of the batch along its batch axis; None if it has none."""
    rows = _rows(batch)
    if rows is None:
        return None
    return pytree.tree_map(lambda leaf: torch.cat([leaf, leaf]) if _batched(leaf, rows) else leaf, batch)


def _try_dynamic(
    model: nn.Module, batch: Batch, twice: Batch, path: Path, opset: int | None, tolerance: float
) -> float | None:
    """The error with a dynamic batch axis; None, and no file, if the model does not allow one."""
    rows = _rows(twice)  # the batch itself may have one row, which torch.export takes for a constant
    args, kwargs = pytree.tree_map(lambda leaf: {0: "batch"} if _batched(leaf, rows) else None, call_arguments(twice))
    try:
        error = _export(model, twice, path, opset, kwargs or args, [batch, twice])
    except Exception:
        error = float("inf")
    if error <= tolerance:
        return error
    for file in path.parent.iterdir():
        file.unlink()
    return None


def _export(
    model: nn.Module, batch: Batch, path: Path, opset: int | None, dynamic_shapes: Any, checked: list[Batch]
) -> float:
    args, kwargs = call_arguments(batch)
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    options: dict[str, Any] = {"opset_version": opset, "external_data": size > _LIMIT, "verbose": False}
    with evaluating(model):
        torch.onnx.export(model, args, path, kwargs=kwargs, dynamo=True, dynamic_shapes=dynamic_shapes, **options)
    importlib.import_module("onnx.checker").check_model(str(path))
    runtime = importlib.import_module("onnxruntime")
    settings = runtime.SessionOptions()
    settings.log_severity_level = 4  # fatal: errors are raised anyway
    session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return max(relative_error(_run(session, batch), [t.cpu() for t in output_of(model, batch)]) for batch in checked)


def _run(session: Any, batch: Batch) -> list[Tensor]:
    names = [known.name for known in session.get_inputs()]
    inputs = [tensor.detach().cpu().numpy() for tensor in tensors_of(call_arguments(batch))]
    if len(names) != len(inputs):
        raise ExportError(
            f"the ONNX model has inputs {names}, the batch has {len(inputs)} tensors: leave out unused ones"
        )
    return [torch.from_numpy(array) for array in session.run(None, dict(zip(names, inputs, strict=True)))]
