"""`ispasp bench surgery`: time and memory of survey and surgery, side by side with torch-pruning.

Three networks with random weights on one example, and the pretrained SmolLM2-135M on a batch of 4 x 128 tokens, where
its folder is there; keep 0.5. Each library runs in a process of its own for each network, so that memory is its own.
Neither is timed while it imports: ours surveys a tiny network first (`start_s`), torch-pruning is imported before.
Machines that do other work as well stretch seconds, so CPU seconds are there too.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ispasp._apply import apply_
from ispasp._survey import survey
from ispasp.errors import InputError
from ispasp.integrations.torchvision import import_torchvision
from ispasp.report import Column, render, track
from ispasp.surgery.verify import masked_output, output_of, relative_error
from ispasp_lab.benchmarks import timing
from ispasp_lab.data.folder import available, data_folder, find

_MB = 2**20
_SMOLLM2 = "SmolLM2-135M"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Network:
    """A network with a batch, and what torch-pruning has to be told about it."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    last: Callable[[Any], nn.Module]
    """The layer that makes the output: torch-pruning must be asked to leave it."""
    attention: Callable[[Any], bool] = lambda module: False
    """The modules whose heads torch-pruning must be told of, and that are corrected afterwards."""
    output: Callable[[Any], Tensor] | None = None
    weights: str = ""
    """Folder of the pretrained weights; without it the network is skipped."""
    beside_torch_pruning: bool = True


@dataclass(frozen=True)
class Row:
    """Seconds and memory of one network; those of torch-pruning are None where it is not installed."""

    model: str
    start_s: float
    forward_s: float
    survey_s: float
    surgery_s: float
    verify_s: float
    total_s: float
    cpu_s: float
    error: float
    model_mb: float
    extra_mb: float
    dimensions: int
    params: int
    torch_pruning_start_s: float | None = None
    torch_pruning_s: float | None = None
    torch_pruning_cpu_s: float | None = None
    torch_pruning_mb: float | None = None
    torch_pruning_dimensions: int | None = None
    torch_pruning_params: int | None = None
    torch_pruning_result: str = "not installed"


def _image() -> Tensor:
    return torch.randn(1, 3, 224, 224)


def _torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: nn.Module = getattr(import_torchvision().models, name)()
        return model

    return build


def _bert() -> nn.Module:
    import_torchvision()
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: nn.Module = transformers.BertModel(transformers.BertConfig())  # type: ignore[no-untyped-call]
    return model


def _smollm2() -> nn.Module:
    import_torchvision()
    from transformers import LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM.from_pretrained(find(_SMOLLM2))
    return model


NETWORKS = {
    "resnet50": Network(_torchvision("resnet50"), _image, lambda model: model.fc),
    "mobilenet_v2": Network(_torchvision("mobilenet_v2"), _image, lambda model: model.classifier),
    "bert_base": Network(  # the hints are those of torch-pruning's own example for BERT
        _bert,
        lambda: {"input_ids": torch.randint(1000, 30000, (1, 32))},
        lambda model: model.pooler,
        lambda module: hasattr(module, "num_attention_heads") and hasattr(module, "query"),
        lambda output: output.pooler_output.sum(),
    ),
    "smollm2": Network(
        _smollm2,
        lambda: {"input_ids": torch.randint(0, 49_000, (4, 128))},
        lambda model: model.lm_head,
        weights=_SMOLLM2,
        beside_torch_pruning=False,  # its own example corrects Llama's attributes by hand
    ),
}


def run(models: Sequence[str] = tuple(NETWORKS), keep: float = 0.5, *, progress: bool = True) -> list[Row]:
    """One row for each network. Those without their pretrained weights are skipped, with a warning."""
    unknown = [name for name in models if name not in NETWORKS]
    if unknown:
        raise InputError(f"there is no network {unknown[0]!r} here: choose from {', '.join(NETWORKS)}")
    context = multiprocessing.get_context("spawn")
    rows = []
    for name in track(_at_hand(models), "surgery", show=progress):
        with ProcessPoolExecutor(1, context) as pool:
            row = pool.submit(measure, name, keep).result()
        if not NETWORKS[name].beside_torch_pruning:
            row = replace(row, torch_pruning_result="not compared")
        elif find_spec("torch_pruning") is not None:
            with ProcessPoolExecutor(1, context) as pool:
                row = replace(row, **pool.submit(measure_torch_pruning, name, keep).result())
        rows.append(row)
    return rows


def _at_hand(models: Sequence[str]) -> list[str]:
    found = []
    for name in models:
        weights = NETWORKS[name].weights
        if not weights or available(weights):
            found.append(name)
        else:
            _LOG.warning("%s is skipped: put its folder %s into %s, or set ISPASP_DATA", name, weights, data_folder())
    return found


def _build(name: str) -> tuple[Network, nn.Module, Any]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    network = NETWORKS[name]
    model, batch = network.build().eval(), network.batch()
    output_of(model, batch)
    return network, model, batch


def measure(name: str, keep: float = 0.5) -> Row:
    """Time one network in this process."""
    _, model, batch = _build(name)
    start_s, _ = _timed(lambda: survey(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)))
    forward_s, _ = _timed(lambda: output_of(model, batch))
    cpu = time.process_time()
    with _Memory() as memory:
        survey_s, found = _timed(lambda: survey(model, batch))
        plan = found.plan(keep)
        masked_s, expected = _timed(lambda: masked_output(found.analysis, model, batch, plan.kept))
        surgery_s, _ = _timed(lambda: apply_(model, plan))
        pruned_s, output = _timed(lambda: output_of(model, batch))
    cpu_s = time.process_time() - cpu
    cost = found.cost(plan)
    return Row(
        name,
        start_s,
        forward_s,
        survey_s,
        surgery_s,
        masked_s + pruned_s,
        survey_s + surgery_s + masked_s + pruned_s,
        cpu_s,
        relative_error(output, expected),
        cost.dense_params * 4 / _MB,
        memory.extra / _MB,
        len(found.dimensions),
        cost.params,
    )


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


class _Memory:
    """The most memory that the process takes meanwhile, beyond what it had; looked at every five milliseconds."""

    def __enter__(self) -> _Memory:
        process = timing.this_process()
        before = process.memory_info().rss
        self.extra = 0
        self._stop = threading.Event()

        def watch() -> None:
            while not self._stop.wait(0.005):
                self.extra = max(self.extra, process.memory_info().rss - before)

        self._thread = threading.Thread(target=watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()


def measure_torch_pruning(name: str, keep: float = 0.5) -> dict[str, Any]:
    """Its graph and one step of its magnitude pruner, and whether what comes out equals masking."""
    network, model, batch = _build(name)
    dense = _build(name)[1]
    gone: dict[str, set[int]] = {}
    start_s, _ = _timed(lambda: importlib.import_module("torch_pruning"))
    cpu = time.process_time()
    try:
        with _Memory() as memory:
            seconds, groups = _timed(lambda: _step(network, model, batch, keep, gone))
        cpu_s = time.process_time() - cpu
        result = _judged(output_of(model, batch), _masked(dense, batch, gone), output_of(dense, batch))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return {"torch_pruning_result": f"fails: {type(error).__name__}: {lines[0] if lines else ''}"[:120]}
    return {
        "torch_pruning_start_s": start_s,
        "torch_pruning_s": seconds,
        "torch_pruning_cpu_s": cpu_s,
        "torch_pruning_mb": memory.extra / _MB,
        "torch_pruning_dimensions": groups,
        "torch_pruning_params": sum(parameter.numel() for parameter in model.parameters()),
        "torch_pruning_result": result,
    }


def stepped(name: str, keep: float) -> nn.Module:
    """The network after one step of torch-pruning's magnitude pruner."""
    network, model, batch = _build(name)
    _step(network, model, batch, keep, {})
    return model


def _step(network: Network, model: nn.Module, batch: Any, keep: float, gone: dict[str, set[int]]) -> int:
    """Prune; `gone` gets the removed inputs of every layer. Returns the number of groups."""
    tp = importlib.import_module("torch_pruning")
    attentions: list[Any] = [module for module in model.modules() if network.attention(module)]
    heads = {module.query: module.num_attention_heads for module in attentions}
    pruner = tp.pruner.MagnitudePruner(
        model,
        batch,
        importance=tp.importance.MagnitudeImportance(p=2),
        pruning_ratio=1 - keep,
        ignored_layers=[network.last(model)],
        output_transform=network.output,
        **({"num_heads": heads, "prune_num_heads": True, "head_pruning_ratio": 1 - keep} if heads else {}),
    )
    names = {module: name for name, module in model.named_modules()}
    groups = 0
    for group in pruner.step(interactive=True):
        groups += 1
        for dependency, indices in group:
            if pruner.DG.is_in_channel_pruning_fn(dependency.handler) and dependency.target.module in names:
                gone.setdefault(names[dependency.target.module], set()).update(indices)
        group.prune()
    for module in attentions:
        module.num_attention_heads = pruner.num_heads[module.query]
        module.attention_head_size = module.query.out_features // module.num_attention_heads
        module.all_head_size = module.query.out_features
    return groups


def _masked(dense: nn.Module, batch: Any, gone: dict[str, set[int]]) -> list[Tensor]:
    """The output of the dense network with those inputs of its linear layers and convolutions zero."""
    for name, indices in gone.items():
        layer = dense.get_submodule(name)
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_pre_hook(_zeroing(sorted(indices), -1 if isinstance(layer, nn.Linear) else 1))
    return output_of(dense, batch)


def _zeroing(indices: list[int], dim: int) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    return lambda layer, args: (args[0].index_fill(dim, torch.tensor(indices), 0), *args[1:])


def _judged(found: list[Tensor], expected: list[Tensor], dense: list[Tensor]) -> str:
    changed = [(tuple(b.shape), tuple(a.shape)) for a, b in zip(found, dense, strict=True) if a.shape != b.shape]
    if changed:
        same = [(a, b) for a, b in zip(found, expected, strict=True) if a.shape == b.shape]
        error = relative_error([a for a, _ in same], [b for _, b in same])
        return f"output {changed[0][0]} became {changed[0][1]}; the others differ from masking by {error:.0e}"
    error = relative_error(found, expected)
    return "equals masking" if error < 1e-4 else f"differs from masking by {error:.0e}"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries."""
    return [asdict(row) for row in rows]


def as_table(rows: Sequence[Row], keep: float = 0.5) -> str:
    """Two tables: ours, and torch-pruning beside it."""
    seconds, megabytes, millions = "{:.2f}".format, "{:.0f}".format, lambda n: f"{n / 1e6:.1f} M"
    ours = [
        Column("model", "model"),
        Column("start_s", "first export, s", seconds),
        Column("forward_s", "forward, s", seconds),
        Column("survey_s", "survey, s", seconds),
        Column("surgery_s", "surgery, s", seconds),
        Column("verify_s", "verify, s", seconds),
        Column("total_s", "total, s", seconds),
        Column("cpu_s", "CPU, s", seconds),
        Column("error", "error", "{:.0e}".format),
        Column("model_mb", "model, MB", megabytes),
        Column("extra_mb", "extra, MB", megabytes),
    ]
    both = [
        Column("model", "model"),
        Column("total_s", "ispasp, s", seconds),
        Column("cpu_s", "CPU, s", seconds),
        Column("torch_pruning_s", "torch-pruning, s", seconds),
        Column("torch_pruning_cpu_s", "its CPU, s", seconds),
        Column("torch_pruning_start_s", "its import, s", seconds),
        Column("dimensions", "dimensions"),
        Column("torch_pruning_dimensions", "its groups"),
        Column("params", "params left", millions),
        Column("torch_pruning_params", "its", millions),
        Column("torch_pruning_mb", "its extra MB", megabytes),
        Column("torch_pruning_result", "its result"),
    ]
    data = as_json(rows)
    first = render(
        f"Survey and surgery at keep {keep}, {torch.get_num_threads()} thread(s)",
        ours,
        data,
        "total = survey + surgery + verify (one masked and one pruned forward). The first export of a process imports.",
    )
    second = render(
        "Beside torch-pruning",
        both,
        data,
        "torch-pruning prunes residual streams too; it is told the last layer, and BERT's heads as in its own example. "
        "It runs one forward and checks nothing; of ours, four passes of the trial and two of verify do.",
    )
    return f"{first}\n\n{second}"
