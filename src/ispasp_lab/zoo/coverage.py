"""`ispasp bench coverage`: every network of the zoo is surveyed and pruned, and removal is compared with masking."""

from __future__ import annotations

import gc
import math
import multiprocessing
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ispasp._apply import apply_
from ispasp._survey import Survey, survey
from ispasp.errors import InputError, NothingToPruneError
from ispasp.report import track
from ispasp.surgery.fold import folding
from ispasp.surgery.verify import masked_output, output_of, relative_error
from ispasp.types import units_to_keep
from ispasp_lab.zoo import GROUPS, cases
from ispasp_lab.zoo.case import Case, call

_LONGEST_REMARK = 180


@dataclass(frozen=True)
class Row:
    """The outcome for one network. `outcome` is "smaller", "nothing to remove" or "failed"."""

    name: str
    group: str
    outcome: str
    remark: str = ""
    dimensions: int = 0
    kinds: str = ""
    dense_params: int | None = None
    params: int | None = None
    dense_macs: int | None = None
    macs: int | None = None
    error: float | None = None
    change: float | None = None  # of the output, by masking: where it is nothing, the error says nothing
    recounted: str = ""
    seconds: float | None = None


class _TooLong(BaseException):
    """Not an Exception: a survey tries out things that may raise those, and goes on."""


def run(
    groups: Sequence[str] = (),
    prefix: str = "",
    *,
    keep: float = 0.5,
    limit: int = 120,
    workers: int = 2,
    progress: bool = True,
) -> list[Row]:
    """Rows of all cases of the groups (none: of all) whose `group/model` name, or model name, starts with `prefix`."""
    unknown = [group for group in groups if group not in GROUPS]
    if unknown:
        raise InputError(f"there is no group {unknown[0]!r} of networks: choose from {', '.join(GROUPS)}")
    chosen = [case for case in cases(*groups) if case.name.startswith((prefix, f"{case.group}/{prefix}"))]
    if not chosen:
        raise InputError(f"no network is called {prefix!r}...: names look like {cases('plain')[0].name!r}")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start) as pool:
        jobs = {pool.submit(_measure_named, case.group, case.name, keep, limit): case for case in chosen}
        done = {}
        for job in track(as_completed(jobs), "zoo", len(jobs), show=progress):
            died = job.exception()  # a row of its own for what happens inside; this is the process itself
            done[jobs[job].name] = _failed(jobs[job], died) if died else job.result()
    return [done[case.name] for case in chosen]


def _start() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    survey(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2))  # the first export imports for seconds


@cache
def _by_name(group: str) -> dict[str, Case]:
    return {case.name: case for case in cases(group)}


def _measure_named(group: str, name: str, keep: float, limit: int) -> Row:
    case = _by_name(group)[name]
    try:
        with _at_most(limit):
            return measure(case, keep)
    except _TooLong:
        return Row(case.name, case.group, "failed", f"took longer than {limit} s")
    except Exception as error:
        return _failed(case, error)
    finally:
        gc.collect()  # traces are full of cycles


def _failed(case: Case, error: BaseException) -> Row:
    lines = str(error).strip().splitlines()
    return Row(case.name, case.group, "failed", f"{type(error).__name__}: {lines[0] if lines else ''}")


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def measure(case: Case, keep: float = 0.5) -> Row:
    """Survey and prune one network. `seconds` are those of both, verification included."""
    model, batch = case.build(), case.batch()
    started = time.perf_counter()
    try:
        found, remark = _surveyed(model, batch)
    except NothingToPruneError as nothing:
        why = str(nothing).partition(": ")[2]
        return Row(case.name, case.group, "nothing to remove", why, seconds=time.perf_counter() - started)
    surveyed = time.perf_counter() - started
    plan = found.plan(random_units(found, keep))
    with folding(model) as layers:
        layers.fold(found.structure.folded)  # as it was analysed
        expected = masked_output(found.analysis, model, batch, plan.kept)
        layers.restore()
    change = relative_error(expected, output_of(model, batch))
    started = time.perf_counter()
    apply_(model, plan, batch, checked_by=found)
    seconds = surveyed + time.perf_counter() - started
    error = relative_error(output_of(model, batch), expected)
    cost = found.cost(plan)
    params, macs = count_params(model), count_macs(model, batch, found.costs.examples)
    trouble = ""
    if not cost.params < cost.dense_params:
        trouble = f"all {len(found.dimensions)} hidden dimensions stay whole at keep={keep}"
    elif not change:
        trouble = "masking does not change the output: the comparison is blind"
    kinds = Counter(dimension.kind for dimension in found.dimensions)
    return Row(
        case.name,
        case.group,
        "failed" if trouble else "smaller",
        trouble or remark,
        len(found.dimensions),
        ", ".join(f"{number} {kind}" for kind, number in kinds.items()),
        cost.dense_params,
        cost.params,
        cost.dense_macs,
        cost.macs,
        error,
        change,
        _agreement(cost.params, params, cost.macs, macs),
        seconds,
    )


def _surveyed(model: nn.Module, batch: Any) -> tuple[Survey, str]:
    """The survey, and a remark if only residual streams can be removed."""
    try:
        return survey(model, batch), ""
    except NothingToPruneError as error:
        if "scope='all'" not in str(error):
            raise
    return survey(model, batch, scope="all"), "residual streams only: scope='all'"


def random_units(found: Survey, keep: float) -> dict[str, list[int]]:
    """For every hidden dimension some units to keep: the first ones would hide many a confusion of indices."""
    generator = torch.Generator().manual_seed(0)
    return {
        d.name: sorted(torch.randperm(d.units, generator=generator)[: units_to_keep(keep, d.units)].tolist())
        for d in found.dimensions
    }


def count_params(model: nn.Module) -> int:
    """Parameters, each tensor once."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_macs(model: nn.Module, batch: Any, examples: int) -> int:
    """Multiply-accumulates for one example, by torch's own counter.

    It knows products and convolutions, not the fused kernels for attention on a CPU: those are switched off, one by
    name, the other by gradients. (Without gradients the counter stumbles over parameters handed from module to module.)
    """
    aten = torch.ops.aten
    more: dict[Any, Any] = dict.fromkeys((aten.mv, aten.vdot, aten.dot, aten._grouped_mm), _product)
    if hasattr(torch.ops.transformers, "grouped_mm_fallback"):  # products with experts, on a CPU
        more[torch.ops.transformers.grouped_mm_fallback] = _product
    counting = FlopCounterMode(display=False, custom_mapping=more)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), counting as counter:
        call(model, batch)
    return int(counter.get_total_flops()) // 2 // examples


def _product(a: Sequence[int], b: Sequence[int], *_: object, **__: object) -> int:
    """Operations of a (.., m, k) times b (.., k, n) or (k), rows of a going to one expert each."""
    return 2 * math.prod(a) * (b[-1] if len(b) > 1 else 1)


def _agreement(params: int, counted_params: int, macs: int, counted_macs: int) -> str:
    differences = [
        f"{what} {counted:,}"
        for what, told, counted in (("parameters", params, counted_params), ("MACs", macs, counted_macs))
        if told != counted
    ]
    return ", ".join(differences) or "equal"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain dictionaries."""
    return [asdict(row) for row in rows]


def write(rows: Sequence[Row], path: Path, keep: float = 0.5) -> Path:
    """Write the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_markdown(rows, keep), encoding="utf-8")
    return path


def as_markdown(rows: Sequence[Row], keep: float = 0.5) -> str:
    """A summary, then a table for every group."""
    parts = ["# Coverage", _ABOUT.format(keep=keep), summary(rows)]
    for group, members in _grouped(rows).items():
        parts += [f"## {group}", _table(_TITLES, [_cells(row) for row in members])]
    return "\n\n".join(parts) + "\n"


_ABOUT = """\
Made by `make zoo`. Every network is small or shrunk, randomly initialised and enlivened (no constant biases or scales),
surveyed with `ispasp.survey` and pruned with `ispasp.apply_` at keep {keep}. The error is that of the pruned network's
output against the dense network's with the same (random) units masked where they are read, relative, in float32; the
change is what masking itself does to the output. Parameters and MACs (for one example) are what `survey.cost(plan)`
tells; "recounted" compares them with the pruned network's own parameters and with torch's flop counter on it. Seconds
are those of survey and surgery with verification, one core each, two networks at a time."""

_TITLES = (
    *("model", "hidden dimensions", "kinds", "parameters", "MACs", "change", "error", "recounted", "seconds", "remark"),
)


def summary(rows: Sequence[Row]) -> str:
    """Count, for each group, the networks that became smaller and equal masking; and the worst error."""
    groups = _grouped(rows)
    lines = [_total(group, members) for group, members in groups.items()]
    if len(groups) > 1:
        lines.append(_total("all", rows))
    titles = ("group", "networks", "smaller and equal to masking", "nothing to remove", "failed", "worst error")
    return _table((*titles, "costs equal recounting", "median seconds"), lines)


def _grouped(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {group: [row for row in rows if row.group == group] for group in dict.fromkeys(row.group for row in rows)}


def _total(group: str, rows: Sequence[Row]) -> list[str]:
    outcomes = Counter(row.outcome for row in rows)
    errors = [row.error for row in rows if row.error is not None]
    seconds = sorted(row.seconds for row in rows if row.seconds is not None)
    return [
        group,
        str(len(rows)),
        *(str(outcomes[outcome]) for outcome in ("smaller", "nothing to remove", "failed")),
        f"{max(errors):.0e}" if errors else "",
        f"{sum(row.recounted == 'equal' for row in rows)} of {len(errors)}",
        f"{seconds[len(seconds) // 2]:.1f}" if seconds else "",
    ]


def _cells(row: Row) -> list[str]:
    remark = row.remark if row.outcome == "smaller" else f"**{row.outcome}**: {row.remark}"
    return [
        row.name.partition("/")[2],
        str(row.dimensions),
        row.kinds,
        _change(row.dense_params, row.params),
        _change(row.dense_macs, row.macs),
        "" if row.change is None else f"{row.change:.0%}",
        "" if row.error is None else f"{row.error:.0e}",
        row.recounted,
        "" if row.seconds is None else f"{row.seconds:.1f}",
        remark if len(remark) <= _LONGEST_REMARK else remark[: _LONGEST_REMARK - 1] + "…",
    ]


def _change(before: int | None, after: int | None) -> str:
    return "" if before is None or after is None else f"{_short(before)} → {_short(after)}"


def _short(number: float) -> str:
    """Three digits and a unit.

    >>> _short(25557032), _short(999), _short(4100)
    ('25.6 M', '999', '4.1 k')
    """
    for unit in ("", " k", " M"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} G"


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [titles, ["---"] * len(titles), *([_escaped(cell) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
