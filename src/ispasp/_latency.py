"""Time models on this machine: two of them side by side, and a table of their ops at several widths for `Latency`.

An op is timed as a chain of copies, less an empty chain, so that the overhead of a call cancels. The table is kept on
disk by machine, thread count and versions. One factor makes its sums fit two whole runs, and a third one tells whether
odd widths cost more in the whole network. The time that a thread waits for a processor is not counted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ispasp._keep import prunable
from ispasp._onnx import TALKATIVE, in_order, named_arrays, open_session
from ispasp._steps import Work
from ispasp.budget.latency import Latency, LatencyModel, Runtime, Term, fitted, interpolated, name_of
from ispasp.engine.batches import count_examples
from ispasp.engine.team import Team
from ispasp.errors import InputError, IspaspError, failing_as
from ispasp.files import make_folder, publish, read_json, workspace, write_bytes
from ispasp.graph.atoms import UNKNOWN, length
from ispasp.graph.ops import call, given_to, op_of
from ispasp.graph.state import copied, quiet
from ispasp.graph.trace import Batch, call_arguments, evaluating
from ispasp.graph.track import Value
from ispasp.report import track
from ispasp.surgery.remove import removed
from ispasp.types.dimension import Extent, Kept, full_length, kept_length, names_in
from ispasp.types.plan import Plan

Job = Callable[[], Any] | float  # what is timed, or the seconds that a runtime has told
_GRID = (0.75, 0.5, 0.25, 0.125)  # of the units: widths that every op is timed at, besides all
_PROBES = (1, 4, 8)  # units below the half: are widths that are not round slower?
_COPIES, _ROUNDS = 2, 5  # of an op in a chain; of the table
_LOOP, _TABLE, _WHOLE = 2e-3, 0.1, 1.0  # seconds of a timed loop, and at least of all rounds for the table and models
_COMPILED = 64  # networks of one class that are compiled
_NOISY = 0.2  # relative spread of runs that is told
_NEAR = 0.1  # by which the target may be missed


@dataclass(frozen=True)
class LatencyResult:
    """Milliseconds of a call, dense and pruned: medians of runs in turn.

    Spreads are the middle half of the runs, relative to their median. `predicted` and `target` are milliseconds of the
    pruned model, None where no budget was given; `corrected` says that the budget was spent a second time.
    """

    dense: float
    pruned: float
    dense_spread: float
    pruned_spread: float
    examples: int
    runtime: str
    threads: int
    predicted: float | None = None
    target: float | None = None
    corrected: bool = False
    reason: str = ""  # why it is not faster

    @property
    def speedup(self) -> float:
        return self.dense / self.pruned

    @property
    def missed(self) -> bool:
        """Whether the target is missed by more than 10 %; one that the dense model meets is not."""
        return self.target is not None and self.target < self.dense and abs(self.pruned / self.target - 1) > _NEAR

    def __str__(self) -> str:
        where = f"{self.runtime}, {self.examples} example{'s' * (self.examples != 1)}, {self.threads} thread"
        aim = "" if self.target is None else f"; target {self.target:.3g} ms, predicted {self.predicted:.3g} ms"
        return (
            f"{self.dense:.3g} ms ±{self.dense_spread / 2:.0%} -> {self.pruned:.3g} ms ±{self.pruned_spread / 2:.0%} "
            f"({self.speedup:.2f}x faster; {where}{'s' * (self.threads != 1)}{aim})"
        )

    def advice(self) -> list[str]:
        """Caveats: not faster, off the target, or too noisy to tell."""
        found = []
        if self.target is not None and self.target >= self.dense:
            told = f"the dense model takes {self.dense:.3g} ms, within the target of {self.target:.3g} ms"
            found.append(f"{told}: nothing had to go; pass a shorter time")
        elif self.pruned >= self.dense:
            found.append(f"the pruned model is not faster than the dense one ({self.speedup:.2f}x): {self.reason}")
        elif self.missed and self.target is not None:
            side = "above" if self.pruned > self.target else "below"
            again = ", also after a second round" if self.corrected else ""
            told = f"a call takes {self.pruned:.3g} ms, more than 10 % {side} the target of {self.target:.3g} ms{again}"
            remedy = f"pass Latency(milliseconds=...) {'lower' if side == 'above' else 'higher'} by the difference"
            if self.predicted is not None and self.predicted > (1 + _NEAR) * self.target:
                remedy = "it is out of reach; pass a larger limit, least=0, scope='all', or a larger batch="
            found.append(f"{told}: {remedy}")
        if (spread := max(self.dense_spread, self.pruned_spread)) > _NOISY:
            wrong = f"the middle half of the runs spreads over {spread:.0%} of their median"
            remedy = "close other programs, pass repeats=50, or use fewer threads (torch.set_num_threads)"
            found.append(f"the machine is too noisy for exact times: {wrong}; {remedy}")
        return found


# Timing ---------------------------------------------------------------------------------------------------------
def timed_pair(
    dense: nn.Module, pruned: nn.Module, batch: Batch, runtime: Runtime, repeats: int = 7, jobs: list[Job] | None = None
) -> LatencyResult:
    """Run two models in turn on a batch. `jobs` keeps that of the dense one for the next time."""
    jobs = [] if jobs is None or callable(runtime) else jobs  # a function may tell seconds, of this moment
    with evaluating(dense), evaluating(pruned):
        jobs[:] = jobs or [job(runtime, dense, batch)]
        runs = _settled([*jobs, job(runtime, pruned, batch)], repeats, _WHOLE)
    (a, b), (c, d) = (1e3 * statistics.median(each) for each in runs), map(_spread, runs)
    return LatencyResult(a, b, c, d, count_examples(batch), name_of(runtime), torch.get_num_threads())


def job(runtime: Runtime, model: nn.Module, batch: Batch) -> Job:
    """A call of the model, ready to be timed."""
    args, kwargs = call_arguments(batch)
    if runtime == "onnx":
        with failing_as(InputError, "the model cannot be timed in ONNX Runtime", "try runtime='eager'"):
            return _onnx_job(model, batch)
    if callable(runtime):
        remedy = "it gets whole models and single layers, each with a batch: let it take both"
        with failing_as(InputError, "the function runtime= fails", remedy):
            found = runtime(model, batch)
        if callable(found):
            return partial(found)
        if not isinstance(found, (int, float)) or isinstance(found, bool) or not 0 <= found < math.inf:
            raise InputError(f"the runtime returned {found!r}: return a function to time, or seconds")
        return float(found)
    called: Any = torch.compile(model, dynamic=False) if runtime == "compile" else model
    limits = {"recompile_limit": _COMPILED, "fail_on_recompile_limit_hit": True}  # else it runs eagerly, unnoticed
    compiled = torch._dynamo.config.patch(limits) if runtime == "compile" else nullcontext()
    with failing_as(InputError, f"the model does not run in runtime={runtime!r}", "try runtime='eager'"), compiled:
        called(*args, **kwargs)
    return partial(called, *args, **kwargs)


def _onnx_job(model: nn.Module, batch: Batch) -> Job:
    batch = in_order(model, batch)
    with tempfile.TemporaryDirectory() as folder, quiet(*TALKATIVE):
        session = open_session(model, batch, Path(folder) / "model.onnx", threads=torch.get_num_threads())
    feed = named_arrays(session, batch)
    return lambda: session.run(None, feed)


def _settled(jobs: Sequence[Job], rounds: int, least: float) -> list[list[float]]:
    """Seconds of each job in each round; three times as many rounds where those of a job differ much."""
    runs = _interleaved(jobs, rounds, least)
    if max(map(_spread, runs)) > _NOISY:
        runs = [a + b for a, b in zip(runs, _interleaved(jobs, 2 * rounds, 2 * least), strict=True)]
    return runs


def _interleaved(jobs: Sequence[Job], rounds: int, least: float) -> list[list[float]]:
    """Seconds of each job in each round. All run in turn, short ones several times, for at least so many seconds."""
    loops = []
    for each in jobs:
        _seconds(each, 1)
        loops.append(max(1, min(1000, int(_LOOP / max(_seconds(each, 1), 1e-9)))))
    runs: list[list[float]] = [[] for _ in jobs]
    constant, spent = all(isinstance(each, float) for each in jobs), 0.0
    while len(runs[0]) < rounds or not (constant or spent > least):
        for each, n, found in zip(jobs, loops, runs, strict=True):
            found.append(_seconds(each, n))
            spent += n * found[-1]
    return runs


def _seconds(job: Job, times: int) -> float:
    """Seconds of a call, without those that this thread waited for a processor while other programs had it."""
    if isinstance(job, float):
        return job
    waited, busy, started = _waited(), time.thread_time(), time.perf_counter()
    for _ in range(times):
        job()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    busy, passed = time.thread_time() - busy, time.perf_counter() - started
    return max(busy, passed - (_waited() - waited)) / times


def _waited() -> float:
    """Seconds that this thread was ready to run and did not: Linux tells, elsewhere none are known."""
    with suppress(OSError, ValueError, IndexError):
        return 1e-9 * int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    return 0.0


def _spread(runs: Sequence[float]) -> float:
    """The middle half of the runs, relative to their median."""
    low, middle, high = np.quantile(runs, [0.25, 0.5, 0.75]).tolist()
    return float((high - low) / middle) if middle > 0 else 0.0


# The table ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Spec:
    """A tensor argument of an op; a `weight` is not an input of its chain."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight: bool

    def __repr__(self) -> str:
        """In short: the cache holds thousands."""
        return f"{self.dtype}{[*self.shape]}{self.device.type}{'w' if self.weight else ''}".removeprefix("torch.")

    def tensor(self, device: str | torch.device | None = None) -> Tensor:
        return torch.ones(self.shape, dtype=self.dtype, device=device or self.device)


@dataclass(frozen=True, eq=False)
class Op:
    """A node whose time depends on widths: the axes of its arguments, and the hidden dimensions on them."""

    node: fx.Node
    values: Mapping[fx.Node, tuple[bool, tuple[Extent, ...]]]  # whether an argument is a weight, and its axes
    units: Mapping[str, int]

    @property
    def hidden(self) -> list[tuple[frozenset[str], Extent]]:
        """Disjoint sets of hidden dimensions, each with the longest axis that holds it."""
        sets: list[frozenset[str]] = []
        extents = [extent for _, axes in self.values.values() for extent in axes if names_in(extent)]
        for names in map(names_in, extents):
            joined = frozenset(names).union(*(each for each in sets if each & names))
            sets = [*(each for each in sets if not each & names), joined]
        return [(s, max((e for e in extents if names_in(e) <= s), key=full_length)) for s in sets]

    def points(self, names: frozenset[str]) -> tuple[list[Kept], list[Kept]]:
        """Widths to time one set of dimensions at: round ones, and probes."""
        units = {name: self.units[name] for name in names}
        if len(units) > 1:
            return [{n: range(max(1, round(f * size))) for n, size in units.items()} for f in _GRID], []
        ((name, size),) = units.items()
        step = granule(size)
        grid = sorted({max(step, round(f * size / step) * step) for f in _GRID} - {size})
        half = round_half(size)
        probes = [half - p for p in _PROBES if p < min(step, half)]
        return [{name: range(n)} for n in grid], [{name: range(n)} for n in probes]

    def arguments(self, kept: Kept) -> dict[str, Any]:
        """The arguments of the op at these widths, tensors as `Spec`s."""

        def spec(node: fx.Node) -> Spec:
            weight, axes = self.values[node]
            example = node.meta["val"]
            return Spec(tuple(kept_length(e, kept) for e in axes), example.dtype, example.device, weight)

        given: dict[str, Any] = fx.map_arg(given_to(self.node), cast(Any, spec))
        if given.get("groups", 1) != 1:
            given["groups"] = given["input"].shape[1] // given["weight"].shape[1]
        return given

    def key(self, kept: Kept) -> str:
        """The op, shapes and dtypes as text: ops that are called alike take the same time."""
        return f"{self.node.target} {self.arguments(kept)}"

    def runs(self) -> bool:
        """Whether the op is no view, and gives at half the widths what the graph says."""
        schema = getattr(self.node.target, "_schema", None)
        if schema is None or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return False
        kept = {name: range(max(1, size // 2)) for name, size in self.units.items()}
        with suppress(Exception):  # a size is written into the graph, as in a view
            given = pytree.tree_map_only(Spec, lambda s: s.tensor("meta"), self.arguments(kept))
            return isinstance(call(self.node, given), Tensor)
        return False

    def chain(self, kept: Kept, copies: int) -> tuple[nn.Module, Batch]:
        """Copies of the op, each with weights of its own, and their common inputs."""
        given, graph, holder = self.arguments(kept), fx.Graph(), nn.Module()
        leaves, form = pytree.tree_flatten(given)
        specs = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, Spec)}
        inputs = {k: graph.placeholder(f"x{k}") for k, spec in specs.items() if not spec.weight}
        results: list[fx.Node] = []
        for copy in range(copies):
            nodes = dict(inputs)
            for k in (k for k in specs if k not in inputs):
                name = f"weight{copy}_{k}"
                holder.register_parameter(name, nn.Parameter(specs[k].tensor(), requires_grad=False))
                nodes[k] = graph.get_attr(name)
            found = pytree.tree_unflatten([nodes.get(k, leaf) for k, leaf in enumerate(leaves)], form)
            schema = self.node.target._schema.arguments  # type: ignore[union-attr]
            args = tuple(found[a.name] for a in schema if not a.kwarg_only)
            kwargs = {a.name: found[a.name] for a in schema if a.kwarg_only}
            results.append(graph.call_function(self.node.target, args, kwargs))  # type: ignore[arg-type]
        graph.output(tuple(results) or tuple(inputs.values())[:1])
        return fx.GraphModule(holder, graph), tuple(specs[k].tensor() for k in inputs)


def granule(units: int) -> int:
    """The power of two that round widths are multiples of: about an eighth of the units.

    >>> granule(12), granule(96), granule(2048)
    (1, 8, 256)
    """
    return 1 << max(0, (units // 8).bit_length() - 1)


def round_half(units: int) -> int:
    """A round width near half of the units."""
    step = granule(units)
    return max(1, round(0.5 * units / step) * step)


def ops_of(work: Work, batch: Batch, *, pointwise: bool) -> Iterator[Op]:
    """The nodes of the batch's graph that read hidden dimensions; without `pointwise`, only products."""
    analysis, traced = work.survey.analysis, work.graphs.of(batch).trace
    walk = next(each for each in (analysis.tracker, *analysis.others) if each.trace is traced)
    for node in walk.values:
        if node.op != "call_function" or node in walk.unread:
            continue
        product = op_of(node) is not None or "scaled_dot_product" in str(node.target)
        values: dict[fx.Node, Any] = {each: walk.values.get(each) for each in node.all_input_nodes}
        plain = all(isinstance(v, Value) and UNKNOWN not in map(length, v.axes) for v in values.values())
        if not plain or not (pointwise or product):
            continue
        axes = {n: (v.is_parameter, tuple(map(analysis.extent, v.axes))) for n, v in values.items()}
        names = {name for _, extents in axes.values() for extent in extents for name in names_in(extent)}
        op = Op(node, axes, {name: work.units[name] for name in sorted(names)})
        if names and op.runs():
            yield op


@torch.no_grad()
def measured_terms(ops: Sequence[Op], runtime: Runtime, *, progress: bool) -> list[list[float]]:
    """Seconds of every op at every width of its `schedule`; what the cache knows is not timed again.

    torch.compile fuses around products and calls the kernels of eager mode for them, so these stand for its own: a
    compilation of every chain would take minutes.
    """
    runtime = "eager" if runtime == "compile" else runtime
    cache = Cache(runtime)
    for op in track(ops, "timing layers", len(ops), show=progress):
        wanted = {key: kept for kept in schedule(op) if (key := op.key(kept)) not in cache.times}
        if wanted:
            chains = [op.chain(kept, _COPIES) for kept in wanted.values()]
            jobs = [job(runtime, *each) for each in (op.chain({}, 0), *chains)]
            empty, *middles = (statistics.median(runs) for runs in _settled(jobs, _ROUNDS, _TABLE))
            found = ((each - empty) / _COPIES for each in middles)
            cache.times |= {key: max(seconds, 1e-9) for key, seconds in zip(wanted, found, strict=True)}
    cache.write()
    return [[cache.times[op.key(kept)] for kept in schedule(op)] for op in ops]


def schedule(op: Op) -> list[Kept]:
    """All units, then for each set of dimensions its round widths and its probes."""
    return [{}, *chain.from_iterable(chain(*op.points(names)) for names, _ in op.hidden)]


def terms_of(ops: Sequence[Op], times: Sequence[Sequence[float]]) -> list[Term]:
    """The table as terms; ops of one axis each are added up."""
    single: dict[Extent, NDArray[np.float64]] = {}
    terms: list[Term] = []
    for op, seconds in zip(ops, times, strict=True):
        dense, *others = seconds
        left, axes = iter(others), []
        for names, extent in op.hidden:
            grid, probes = ({kept_length(extent, kept): next(left) for kept in part} for part in op.points(names))
            axes.append((extent, interpolated({full_length(extent): dense, **grid}, probes, full_length(extent))))
        if len(axes) == 1:
            ((extent, curve),) = axes
            single[extent] = single[extent] + curve if extent in single else curve
        else:
            terms.append((axes[0], *((extent, curve / dense) for extent, curve in axes[1:])))
    return [*(((extent, curve),) for extent, curve in single.items()), *terms]


class Cache:
    """Measured seconds on disk, one file for each machine, thread count, runtime and versions. It never fails."""

    def __init__(self, runtime: Runtime) -> None:
        """Read what is known; a file that is damaged, or holds anything but times, counts as absent."""
        self.times: dict[str, float] = {}
        self._path: Path | None = None
        if not isinstance(runtime, str):
            return  # a function may mean anything
        packages = ("torch", "onnxruntime") if runtime == "onnx" else ("torch",)
        versions = {name: version(name) for name in packages}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
        about = [runtime, platform.node(), device, os.cpu_count(), torch.get_num_threads(), versions]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
        folder = Path(os.environ.get("ISPASP_CACHE") or "~/.cache/ispasp").expanduser()
        self._path, self._about = folder / "latency" / f"{name}.json", about
        with suppress(IspaspError):
            found = read_json(self._path)
            times = found.get("times") if isinstance(found, dict) and found.get("about") == about else None
            rows = times.items() if isinstance(times, dict) else ()
            self.times = {key: float(t) for key, t in rows if type(t) is float and 0 < t < math.inf}
        self._known = len(self.times)

    def write(self) -> None:
        """Write what is new, whole or not at all; a folder that cannot be written to is no error."""
        if self._path is None or len(self.times) == self._known:
            return
        with suppress(OSError):
            make_folder(self._path.parent)
            with workspace(self._path.parent) as fresh:
                text = json.dumps({"about": self._about, "times": self.times}, indent=0)
                write_bytes(fresh / "times.json", text.encode())
                publish(fresh / "times.json", self._path)


def _processor() -> str:
    """The name of the processor; on Linux platform.processor is empty."""
    with suppress(OSError):
        rows = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), "")
    return platform.processor()


# The budget -----------------------------------------------------------------------------------------------------
class Stopwatch:
    """Measures for a `Latency` budget: the table, candidates cut to their widths, and the result."""

    def __init__(self, work: Work, keep: Latency) -> None:
        """Measure the table, then the dense network and one of half the widths."""
        self._work, self._dense, self.budget = work, copied(work.model), keep
        self._batch, self._jobs = work.inputs.timed, list[Job]()
        found = prunable(work.survey.dimensions, work.options.skip)
        self._half = {d.name: round_half(d.units) for d in found if d.name not in work.unread}
        self.corrected = False
        with quiet():
            ops = [*ops_of(work, self._batch, pointwise=keep.runtime == "eager")]
        table = _of_first_rank(work.team, lambda: measured_terms(ops, keep.runtime, progress=work.options.progress))
        terms = terms_of(ops, table)
        dense, ratio = self._cut(self._half)
        self._saved = 1 - ratio  # by half of the units
        self.budget = replace(keep, model=self._punished(fitted(terms, dense, ratio * dense, self._half)))

    def _punished(self, model: LatencyModel) -> LatencyModel:
        """Raise the times of odd widths if a whole network of them is slower than one with a few more units.

        A runtime may change the layout of tensors between ops, which no op alone shows.
        """
        for step, power in zip(_PROBES, (*_PROBES[1:], 2 * _PROBES[-1]), strict=True):
            widths = {n: w - step * (step < min(w, granule(self._work.units[n]))) for n, w in self._half.items()}
            if widths == self._half:
                break
            ratio = self._cut(widths)[1]
            if ratio <= (1 + _NEAR) * (1 - self._saved):
                break  # then rounder widths are not punished either
            model = model.punished(widths, ratio * model.dense, step, power)
        return model

    def _timed(self, model: nn.Module, plan: Plan | None = None) -> LatencyResult:
        """Time a model beside the dense one, cut by a plan if there is one."""

        def measure() -> tuple[Any, ...]:
            with removed(model, plan) if plan else nullcontext():
                keep = self.budget
                return astuple(timed_pair(self._dense, model, self._batch, keep.runtime, keep.repeats, self._jobs))

        return LatencyResult(*_of_first_rank(self._work.team, measure))

    def _cut(self, widths: Mapping[str, int]) -> tuple[float, float]:
        """Seconds of the dense model, and the part of them that it takes with these widths."""
        work = self._work
        kept = {name: tuple(range(n)) for name, n in widths.items() if n < work.units[name]}
        found = self._timed(work.model, Plan(kept, work.survey.structure.folding(kept)))
        return 1e-3 * found.dense, found.pruned / found.dense

    def correct(self, widths: Mapping[str, int]) -> bool:
        """Measure a candidate. If it misses the target by more than 10 %, fit the prediction to it and return True."""
        model = self.budget.model
        if model is None or not widths:
            return False
        dense, ratio = self._cut(widths)
        off = ratio * dense / self.budget.seconds(dense)
        if abs(off - 1) > _NEAR:
            self.corrected = True
            self.budget = replace(self.budget, model=fitted(model.terms, dense, ratio * dense, widths))
        return self.corrected

    def result(self, model: nn.Module, widths: Mapping[str, int]) -> LatencyResult:
        keep, about = self.budget, self.budget.model
        assert about is not None  # noqa: S101  # __init__ has put it there
        found = self._timed(model)
        predicted, target = found.dense * about.seconds(widths) / about.dense, 1e3 * keep.seconds(1e-3 * found.dense)
        found = replace(found, predicted=predicted, target=target, corrected=self.corrected, reason=self._reason())
        if found.pruned >= found.dense and widths:
            warnings.warn(found.advice()[0], stacklevel=7)  # the caller of prune
        return found

    def _reason(self) -> str:
        """Why narrower layers may not be faster here."""
        about = self.budget.model
        if about is None or about.fixed > 0.5 * about.dense:
            why = "it is too small, most of a call is spent outside of the layers that were pruned"
            return f"{why}; use a larger batch=, runtime='compile' or 'onnx', or scope='all'"
        if self._saved < 0.2:
            part = f"half of the units saves {max(self._saved, 0):.0%} of the time"
            remedy = "use a larger batch=, or least=0, which removes whole branches"
            return f"its layers are bound by memory or by calls, {part}; {remedy}"
        return "the runtime punishes these widths in the whole network; pass round_to=16, or another runtime="


def _of_first_rank(team: Team, measure: Callable[[], Sequence[Any]]) -> list[Any]:
    """Measure on rank 0 for all ranks: ranks of one machine would disturb each other."""
    with team.together("the measuring of latency"):
        found = measure() if team.rank == 0 else []
    return list(team.gather("the latency", found)[0])
