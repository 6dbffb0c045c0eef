"""`ispasp bench runtimes`: half of a network's units go, and each runtime runs what is left.

A row is one runtime on one network: the relative error of its output against torch's, or why it does not run. For ONNX
Runtime the time of the dense export is measured in the same run.
"""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ispasp._apply import apply_
from ispasp._gguf import export_gguf
from ispasp._latency import timed_pair
from ispasp._onnx import export_onnx, in_order, named_arrays
from ispasp._survey import survey
from ispasp.engine.batches import tensors_of
from ispasp.errors import InputError, MissingExtraError
from ispasp.graph.trace import call_arguments
from ispasp.report import Column, render, track
from ispasp.surgery.verify import output_of, relative_error
from ispasp_lab.benchmarks import llama_cpp
from ispasp_lab.zoo import Case, cases

NETWORKS = ("torchvision/resnet18", "torchvision/mobilenet_v2", "transformers/bert", "transformers/llama")
PLANS = {"uniform": (0.5,), "mixed": (0.75, 0.5)}  # fractions to keep, for one hidden dimension after the other


@dataclass(frozen=True)
class Row:
    """One runtime on one network. `speed` is that of the dense export, in times."""

    network: str
    plan: str
    runtime: str
    version: str
    error: float | None
    speed: float | None
    reason: str


@dataclass(frozen=True, eq=False)
class Job:
    """A pruned network, the dense one, a batch, and a folder for files."""

    dense: nn.Module
    model: nn.Module
    batch: Any
    folder: Path

    def compare(self, found: Any) -> float:
        """Relative error of an output against torch's."""
        return relative_error(tensors_of(found), output_of(self.model, self.batch))


def _compile(job: Job) -> tuple[float, None]:
    args, kwargs = call_arguments(job.batch)
    torch._dynamo.reset()
    with torch.no_grad():
        return job.compare(torch.compile(job.model)(*args, **kwargs)), None


def _exported(job: Job) -> Any:
    args, kwargs = call_arguments(job.batch)
    with torch.no_grad():
        return torch.export.export(job.model, args, kwargs)


def _export(job: Job) -> tuple[float, None]:
    args, kwargs = call_arguments(job.batch)
    with torch.no_grad():
        return job.compare(_exported(job).module()(*args, **kwargs)), None


def _onnx(job: Job) -> tuple[float, float]:
    runtime, sessions = importlib.import_module("onnxruntime"), dict[nn.Module, Any]()
    for name, model in (("dense", job.dense), ("pruned", job.model)):
        error = export_onnx(model, job.batch, job.folder / f"{name}.onnx")
        sessions[model] = runtime.InferenceSession(job.folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
    inputs = named_arrays(sessions[job.model], in_order(job.model, job.batch))

    def call(model: nn.Module, _: Any) -> Callable[[], Any]:
        return lambda: sessions[model].run(None, inputs)

    return error, timed_pair(job.dense, job.model, job.batch, call).speedup


def _llama_cpp(job: Job) -> tuple[float, None]:
    if not isinstance(job.batch, dict) or "input_ids" not in job.batch:
        raise InputError("no language model")
    path, ids = job.folder / "model.gguf", job.batch["input_ids"][:1]
    size = len(job.model.get_input_embeddings().weight)  # type: ignore[operator]
    first, *others = (chr(0x100 + i) for i in range(size - 1))
    words = {word: i for i, word in enumerate([first, *others, first + others[0]])}
    told = {"model": {"type": "BPE", "vocab": words, "merges": [f"{first} {others[0]}"]}}
    (job.folder / "tokenizer.json").write_text(json.dumps(told | {"pre_tokenizer": {"type": "ByteLevel"}}))
    export_gguf(job.model, path, tokenizer=job.folder, dtype="f32")
    heard = llama_cpp.ask(path, ids[0].tolist()).logits
    return relative_error([heard], [output_of(job.model, {"input_ids": ids, "use_cache": False})[0][0]]), None


def _openvino(job: Job) -> tuple[float, None]:
    openvino = importlib.import_module("openvino")
    compiled = openvino.compile_model(
        openvino.convert_model(_exported(job)), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    found = compiled([tensor.numpy() for tensor in tensors_of(call_arguments(job.batch))])
    return job.compare([torch.from_numpy(found[output]) for output in compiled.outputs]), None


def _executorch(job: Job) -> tuple[float, None]:
    exir, runtime = (importlib.import_module(f"executorch.{name}") for name in ("exir", "runtime"))
    program = exir.to_edge_transform_and_lower(_exported(job)).to_executorch()
    method = runtime.Runtime.get().load_program(program.buffer).load_method("forward")
    return job.compare(method.execute(tensors_of(call_arguments(job.batch)))), None


RUNTIMES: dict[str, tuple[str, Callable[[Job], tuple[float, float | None]]]] = {  # the package, and how it runs
    "torch.compile": ("torch", _compile),
    "torch.export": ("torch", _export),
    "ONNX Runtime": ("onnxruntime", _onnx),
    "llama.cpp": ("gguf", _llama_cpp),
    "OpenVINO": ("openvino", _openvino),
    "ExecuTorch": ("executorch", _executorch),
}


def run(
    networks: Sequence[str] = NETWORKS, runtimes: Sequence[str] = tuple(RUNTIMES), *, progress: bool = True
) -> list[Row]:
    """Every runtime on every network, by a uniform and a mixed plan."""
    unknown = [name for name in runtimes if name not in RUNTIMES]
    if unknown:
        raise InputError(f"no runtime {unknown[0]!r}: pass some of {', '.join(RUNTIMES)}")
    known = {case.name: case for case in cases()}
    absent = [name for name in networks if name not in known]
    if absent:
        raise InputError(f"the zoo has no {absent[0]!r}: pass names such as {', '.join(NETWORKS)}")
    rows = []
    for network, plan in track([(name, plan) for name in networks for plan in PLANS], "runtimes", show=progress):
        with tempfile.TemporaryDirectory() as folder:
            job = _job(known[network], PLANS[plan], Path(folder))
            rows += [_row(job, network, plan, name) for name in runtimes]
    return rows


def _job(case: Case, fractions: Sequence[float], folder: Path) -> Job:
    dense, batch = case.build(), case.batch()
    if isinstance(batch, dict) and "use_cache" not in batch and hasattr(getattr(dense, "config", None), "use_cache"):
        dense.config.use_cache = False  # type: ignore[union-attr]
    model = copy.deepcopy(dense)
    found = survey(model, batch)
    keep = {dimension.name: keep for dimension, keep in zip(found.dimensions, cycle(fractions), strict=False)}
    return Job(dense, apply_(model, found.plan(keep)).eval(), batch, folder)


def _row(job: Job, network: str, plan: str, name: str) -> Row:
    package, runs = RUNTIMES[name]
    number = ""
    try:
        number = llama_cpp.version() if name == "llama.cpp" else version(package).partition("-")[0]
        error, speed = runs(job)
    except (ImportError, MissingExtraError) as missing:
        return Row(network, plan, name, number, None, None, f"not installed: {missing}"[:160])
    except Exception as problem:  # a runtime may raise anything: this is what the table is about
        reason = " ".join(f"{problem}".split()).partition(": ")[0]
        return Row(network, plan, name, number, None, None, reason if len(reason) < 160 else f"{reason[:159]}…")
    return Row(network, plan, name, number, error, speed, "")


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row]) -> str:
    """Rows as a table.

    >>> "2e-07" in as_table([Row("torchvision/resnet18", "mixed", "torch.export", "2.13", 2e-7, None, "")])
    True
    """
    columns = [
        *(Column("network", "network"), Column("plan", "plan"), Column("runtime", "runtime")),
        Column("error", "error", "{:.0e}".format),
        Column("speed", "speed of dense", "{:.2f} x".format),
        Column("reason", "why not", drop=1),
    ]
    return render("Runtimes of pruned networks", columns, as_json(rows), _NOTE)


_NOTE = (
    "Networks of the zoo: those of torchvision at small inputs, transformers tiny. Error: relative difference from "
    "torch's output. Speed: ONNX Runtime's, in times of the dense export in the same run. uniform keeps half of all "
    "units, mixed three quarters in every other hidden dimension. ispasp bench latency times real sizes."
)


def as_markdown(rows: Sequence[Row]) -> str:
    """The page `docs/results/runtimes.md`."""
    networks = dict.fromkeys(row.network for row in rows)
    some = "" if tuple(networks) == NETWORKS else "".join(f" --network {name}" for name in networks)
    made = f"Made by `ispasp bench runtimes{some} --out docs/results/runtimes.md`."
    lines = ["# Runtimes of pruned networks", "", made, ""]
    lines += [_NOTE, "", "| network | plan | runtime | version | error | speed of dense | why not |", "|" + "---|" * 7]
    for row in rows:
        error = "" if row.error is None else f"{row.error:.0e}"
        speed = "" if row.speed is None else f"{row.speed:.2f} x"
        reason = row.reason.replace("|", "\\|")
        lines.append(f"| {row.network} | {row.plan} | {row.runtime} | {row.version} | {error} | {speed} | {reason} |")
    return "\n".join(lines) + "\n"
