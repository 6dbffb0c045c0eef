"""`ispasp.export_onnx`: export a model to ONNX and compare onnxruntime's output with torch's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ispasp.engine.batches import one_batch, tensors_of
from ispasp.errors import ExportError, InputError, failing_as, needed
from ispasp.files import workspace
from ispasp.graph.state import one_at_a_time, plain, quiet
from ispasp.graph.trace import Batch, call_arguments, evaluating
from ispasp.surgery.verify import output_of, relative_error

TALKATIVE = ("torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime")  # their warnings say less than our check
_LIMIT = 2**31 - 2**20  # protobuf ends at 2 GiB: larger weights go to a file beside the model


def export_onnx(
    model: nn.Module,
    batch: Batch,
    path: str | os.PathLike[str],
    *,
    opset: int | None = None,
    tolerance: float = 1e-4,
    dynamic: bool | Literal["batch"] = True,
) -> float:
    """Write the model as ONNX and return the relative error of onnxruntime's output against torch's.

    `batch` is one batch, as for `survey`; a wrapped model is written without its wrapper. The first axis of the batch's
    tensors has the dynamic size "batch", the second axis of token ids and their masks "sequence"; the file is compared
    with torch at two larger shapes and for one example as well. `dynamic="batch"` leaves the sequence fixed,
    `dynamic=False` all shapes. The model runs in eval mode, and its own mode is restored. Weights are inside the file,
    from 2 GiB on beside it in `<path>.data`. An error above `tolerance` raises `ExportError` and writes nothing;
    float16 needs about 1e-2.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_onnx(nn.Linear(4, 2), torch.ones(3, 4), f"{folder}/model.onnx") < 1e-4
    True
    """
    if dynamic not in (True, False, "batch"):
        raise InputError(f'dynamic={dynamic!r}: pass True, "batch" or False')
    if not tolerance >= 0:
        raise InputError(f"tolerance={tolerance}: pass a relative error >= 0, such as 1e-4")
    path = Path(path)
    with one_at_a_time(), plain(model) as inner:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            needed(name, "exporting to ONNX", "onnx")
        batch = in_order(inner, one_batch(inner, batch))
        axes = _axes(batch, dynamic)
        with failing_as(ExportError, f"cannot export {type(inner).__name__} to {path}", _remedy(inner, axes)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with workspace(path.parent) as fresh, quiet(*TALKATIVE):
                error = _export(inner, batch, axes, fresh / path.name, opset)
                if not error <= tolerance:
                    wrong = f"onnxruntime differs from torch by {error:.1e}, more than tolerance={tolerance:.1e}"
                    other = f"pass a higher tolerance{' or dynamic=False' if axes else ''}"
                    remedy = f"export in float32 (model.float()), try another opset, or {other}"
                    raise ExportError(f"{wrong}; nothing was written: {remedy}")
                for file in fresh.iterdir():  # the model, and its .data beyond 2 GiB
                    file.replace(path.parent / file.name)
    return error


def _remedy(model: nn.Module, axes: dict[int, str]) -> str:
    empty = next((name for name, tensor in model.named_parameters() if not tensor.numel()), None)
    if empty is not None:
        return f"{empty!r} has no units left, which ONNX does not allow everywhere: keep at least one of them"
    if len(axes) > 1:
        return 'it may not take texts of any length: pass dynamic="batch", or dynamic=False for the shapes of the batch'
    if axes:
        return "it may not take batches of any size: pass dynamic=False for the shapes of the batch"
    return "check that model(batch) runs and torch.export takes it; try another opset, or model.float()"


def in_order(model: nn.Module, batch: Batch) -> Batch:
    """Sort named inputs as the forward does; so does the exporter."""
    if not isinstance(batch, Mapping):
        return batch
    order = list(inspect.signature(model.forward).parameters)
    return dict(sorted(batch.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _axes(batch: Batch, dynamic: bool | str) -> dict[int, str]:
    """Names of the dynamic axes; no batch has one if no tensor has a first axis."""
    tensors = tensors_of(call_arguments(batch)) if dynamic else []
    axes = {0: "batch"} if _size(tensors, 0) else {}
    ids = [t for t in tensors if t.ndim == 2 and not t.is_floating_point() and t.shape[1] > 1]
    return axes | {1: "sequence"} if axes and ids and dynamic is True else axes


def _size(tensors: list[Tensor], axis: int) -> int | None:
    """The length of an axis: of the first tensor that has one, for sequences of the first token ids."""
    fitting = (t for t in tensors if t.ndim > axis and t.shape[axis] and not (axis and t.is_floating_point()))
    return next((t.shape[axis] for t in fitting), None)


def _dynamic(leaf: Any, batch: Batch, axes: dict[int, str]) -> dict[int, str]:
    """Which axes of one input are dynamic."""
    tensors = tensors_of(call_arguments(batch))
    if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != _size(tensors, 0):
        return {}
    return {axis: name for axis, name in axes.items() if axis < leaf.ndim and leaf.shape[axis] == _size(tensors, axis)}


def _resized(batch: Batch, axes: dict[int, str], copies: int, shorter: int, rows: int | None = None) -> Batch:
    """Copies of the batch, or of its first rows, along its batch axis; sequences lack their last tokens."""

    def change(leaf: Any) -> Any:
        found = _dynamic(leaf, batch, axes)
        leaf = leaf[:, : max(1, leaf.shape[1] - shorter)] if 1 in found else leaf
        return torch.cat([leaf[:rows]] * copies) if found else leaf

    return pytree.tree_map(change, batch)


def _export(model: nn.Module, batch: Batch, axes: dict[int, str], path: Path, opset: int | None) -> float:
    # torch.export takes an axis of one row for a constant.
    sample = _resized(batch, axes, 2, 0)
    args, kwargs = call_arguments(sample)
    shapes = pytree.tree_map(lambda leaf: _dynamic(leaf, sample, axes) or None, kwargs or args) if axes else None
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    options: dict[str, Any] = {"opset_version": opset, "external_data": size > _LIMIT, "dynamic_shapes": shapes}
    with evaluating(model):
        session = open_session(model, sample, path, **options)
    import_module("onnx.checker").check_model(str(path))
    changes = ((2, 2, None), (3, 1, None), (1, 0, 1)) if axes else ()  # one example alone, too
    checked = [batch, *(_resized(batch, axes, *change) for change in changes)]
    return max(relative_error(_run(session, each), [t.cpu() for t in output_of(model, each)]) for each in checked)


def _run(session: Any, batch: Batch) -> list[Tensor]:
    return [torch.from_numpy(array) for array in session.run(None, named_arrays(session, batch))]


def open_session(model: nn.Module, batch: Batch, path: Path, *, threads: int = 0, **options: Any) -> Any:
    """Write a model as ONNX, and open the file in onnxruntime; 0 threads are its own choice."""
    args, kwargs = call_arguments(batch)
    torch.onnx.export(model, args, path, kwargs=kwargs, dynamo=True, verbose=False, **options)
    runtime = import_module("onnxruntime")
    settings = runtime.SessionOptions()
    settings.log_severity_level, settings.intra_op_num_threads = 4, threads  # 4, fatal: errors are raised anyway
    return runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])


def named_arrays(session: Any, batch: Batch) -> dict[str, Any]:
    """The tensors of a batch by the names of the session's inputs."""
    names = [known.name for known in session.get_inputs()]
    inputs = [tensor.detach().cpu().numpy() for tensor in tensors_of(call_arguments(batch))]
    if len(names) != len(inputs):
        raise ExportError(f"the ONNX model has inputs {names}, the batch {len(inputs)} tensors: leave out unused ones")
    return dict(zip(names, inputs, strict=True))
