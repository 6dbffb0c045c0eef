"""`ispasp bench accuracy`: scores of pruned networks by size, method and healing, beside the targets of issue 12."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ispasp._heal import heal
from ispasp._keep import recipes
from ispasp._options import Refitted
from ispasp._prune import prune
from ispasp._survey import survey
from ispasp.budget import Macs
from ispasp.errors import InputError, IspaspError
from ispasp.result import Result
from ispasp.select import selector
from ispasp_lab.benchmarks.accuracy_tasks import NETWORKS, Network, Target, Task
from ispasp_lab.data.folder import available, data_folder
from ispasp_lab.experiments.records import append_row, read_rows, rewrite

METHODS = ("auto", "ispasp", "l1", "obs", "random")
NAME = "accuracy.csv"
PAGE = "accuracy.md"
DENSE = "dense"
REFIT: Refitted = "all"  # the default of `prune`; older rows have another, and are marked
HEALED, PLAIN = "yes", "no"
WAYS = {
    "keep": "`keep={size:g}`",
    "matched": "`Macs` of `keep={size:g}`",
    "macs": "`Macs({size:g})`",
    "recipe": "260 M recipe",
}
_SAME_MACS = 0.01  # two networks are of one size if they differ by at most this part of the dense one's MACs
Key = tuple[str, str, float, str, str, str, int]


@dataclass(frozen=True)
class Row:
    """One network: its score on `test` examples, and on text of another kind; sizes are parts of the dense network's.

    `seconds`: processor time of pruning and healing, all threads together. Where a method cannot run, `note` says why.
    """

    task: str
    way: str
    size: float
    method: str
    refit: str
    heal: str
    test: int
    score: float | None
    other: float | None
    params: float | None
    macs: float | None
    seconds: float | None
    steps: int
    lr: float | None
    commit: str
    note: str = ""

    @property
    def key(self) -> Key:
        """The key of this row."""
        return self.task, self.way, self.size, self.method, self.refit, self.heal, self.test


@dataclass(frozen=True)
class Choice:
    """The rows to measure; an empty tuple takes all. `test`: examples, 0 for all. `heal_time`: seconds of healing."""

    sizes: tuple[float, ...] = ()
    ways: tuple[str, ...] = ()
    methods: tuple[str, ...] = METHODS
    heals: tuple[str, ...] = (PLAIN, HEALED)
    test: int = 0
    heal_time: float | None = None

    def __post_init__(self) -> None:
        """Validate the options."""
        for method in self.methods:
            if method != "auto":
                selector(method)
        unknown = [way for way in self.ways if way not in WAYS]
        if unknown:
            raise InputError(f"way {unknown[0]!r}: choose from {', '.join(WAYS)}")

    def grid(self, network: Network) -> list[tuple[str, float, str]]:
        """Way, size and method of the rows of a network."""
        return [
            (way, size, method)
            for way, sizes in network.sizes.items()
            for size in sizes
            for method in self.methods
            if (not self.ways or way in self.ways) and (not self.sizes or size in self.sizes)
        ]


def missing(task: str) -> str:
    """Why a task cannot run here; empty if it can.

    >>> missing("vgg")
    Traceback (most recent call last):
    ispasp.errors.InputError: there is no task 'vgg': choose from resnet56, resnet20, mobilenet_v2, minilm, smollm2
    """
    if task not in NETWORKS:
        raise InputError(f"there is no task {task!r}: choose from {', '.join(NETWORKS)}")
    absent = [name for name in NETWORKS[task].files if not available(name)]
    return f"{', '.join(absent)} not in {data_folder()}" if absent else ""


def run(task: str, folder: Path, choice: Choice = Choice(), *, progress: bool = True) -> Iterator[Row]:  # noqa: B008
    """Measure the rows that accuracy.csv in the folder does not have yet, and yield each when it is there.

    One pruned network serves for the row without healing and for the one with it.
    """
    path, network = folder / NAME, NETWORKS[task]
    done = _known(path)
    test = choice.test or network.test
    blank = Row(task, "", 1.0, DENSE, "", PLAIN, test, None, None, 1.0, 1.0, None, 0, None, _commit())
    jobs: dict[Row, list[str]] = {}
    for way, size, method in choice.grid(network):
        row = replace(blank, way=way, size=size, method=method, refit=REFIT, params=None, macs=None)
        wanted = [healed for healed in choice.heals if replace(row, heal=healed).key not in done]
        if wanted:
            jobs[row] = wanted
    if not jobs and blank.key in done:
        return
    work = network.load(test)
    if choice.heal_time is not None:
        work = replace(work, heal=replace(work.heal, epochs=None, time=choice.heal_time))
    rows = iter([_scored(blank, work, work.model)]) if blank.key not in done else iter(())
    for made in (rows, *(_rows(row, wanted, work, progress=progress) for row, wanted in jobs.items())):
        for row in made:
            append_row(path, row)
            yield row


def _known(path: Path) -> set[Key]:
    """The rows that are there; those of methods that could not run are removed, to be tried again."""
    good = [row for row in read_rows(path, Row) if row.score is not None]
    if path.exists():
        rewrite(path, good)
    return {row.key for row in good}


def _rows(row: Row, wanted: Sequence[str], work: Task, *, progress: bool) -> Iterator[Row]:
    """One pruned network, scored before and after healing as wanted."""
    started = time.process_time()
    try:
        result = _pruned(row, work, progress=progress)
        cost = result.cost
        row = replace(
            row,
            params=cost.params / cost.dense_params,
            macs=cost.macs / cost.dense_macs,
            seconds=time.process_time() - started,
        )
        if PLAIN in wanted:
            yield _scored(row, work, result.model)
        if HEALED not in wanted:
            return
        started = time.process_time()
        row = replace(row, heal=HEALED)
        gain = heal(result.model, work.model, work.healing, work.heal, progress=progress)
        seconds = (row.seconds or 0.0) + time.process_time() - started
        limit = "" if work.heal.time is None else f"healed for at most {work.heal.time:g} s"
        yield _scored(replace(row, seconds=seconds, steps=gain.steps, lr=gain.lr, note=limit), work, result.model)
    except IspaspError as error:
        yield replace(row, heal=wanted[0], note=str(error))


def _pruned(row: Row, work: Task, *, progress: bool) -> Result:
    keep: Any = row.size
    if row.way == "recipe":
        keep = recipes["mobilenet_v2-260M"]
    elif row.way == "macs":
        keep = Macs(row.size)
    elif row.way == "matched":
        found = survey(work.model, work.calibration[0])
        cost = found.cost(found.plan(row.size))
        keep = Macs(cost.macs / cost.dense_macs)
    return prune(work.model, work.calibration, keep, method=row.method, refit=REFIT, examples=None, progress=progress)


def _scored(row: Row, work: Task, model: Any) -> Row:
    score, other = work.scores(model)
    return replace(row, score=score, other=other)


def _commit() -> str:
    """The commit of this code, with a + where files differ from it; empty outside a git repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    asked = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--exclude=*", "--dirty=+"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603


def described(row: Row) -> str:
    """One line about a row.

    >>> described(Row("resnet20", "keep", 0.5, "l1", "all", "no", 100, 88.5, None, 0.5, 0.5, 9.0, 0, None, "", ""))
    'resnet20, `keep=0.5`, l1, heal no: 88.5 in 9 s'
    """
    what = f"{row.task}, {WAYS[row.way].format(size=row.size)}, {row.method}, heal {row.heal}" if row.way else row.task
    if row.score is None:
        return f"{what}: {row.note}"
    other = "" if row.other is None else f" (other text {row.other:.5g})"
    return f"{what}: {row.score:.5g}{other} in {row.seconds or 0:.0f} s"


# The page -------------------------------------------------------------------------------------------------------


def write(folder: Path) -> Path:
    """Write accuracy.md beside accuracy.csv, from its rows alone."""
    path = folder / PAGE
    path.write_text(as_page(read_rows(folder / NAME, Row)), encoding="utf-8")
    return path


def as_page(rows: Sequence[Row]) -> str:
    """Markdown: a table for every task, and what has become of its targets."""
    lines = [
        "# Accuracy of pruned networks",
        "",
        "Made by `ispasp bench accuracy` from [accuracy.csv](accuracy.csv), which has the commit, the seconds and the "
        "size of every row. No labels are used anywhere. Every network is pruned with `ispasp.prune`, its defaults and "
        "the method named; `+ heal` is the same network after `ispasp.heal`. The best of a line is bold, `-` was not "
        "run. MACs are parts of the dense network's. `*` marks networks whose layers were refitted only where they "
        "read removed units (`refit='consumers'`, the default before); they were not run with the default.",
        "",
    ]
    for task in NETWORKS:
        lines += _section(task, _largest([row for row in rows if row.task == task]))
    return "\n".join(lines)


def _largest(rows: Sequence[Row]) -> dict[tuple[str, float, str, str], Row]:
    """Rows by way, size, method and heal, each with the default refit if there is one, from the largest test."""
    known = (row for row in rows if row.score is not None)
    ordered = sorted(known, key=lambda row: (row.refit == REFIT, row.test))
    return {(row.way, row.size, row.method, row.heal): row for row in ordered}


def _section(task: str, found: Mapping[tuple[str, float, str, str], Row]) -> list[str]:
    network = NETWORKS[task]
    dense = found.get(("", 1.0, DENSE, PLAIN))
    tests = sorted({row.test for row in found.values()} or {network.test})
    lines = [
        f"## {task}",
        "",
        f"{network.about} ({' or '.join(f'{test:,}' for test in tests)} of them). "
        f"Dense network: {_cell(dense, network)} ({network.score}).",
        "",
        f"| size given as | MACs | {' | '.join(f'{m} | + heal' for m in METHODS)} | seconds, auto |",
        f"|---|---:|{'---:|' * (2 * len(METHODS) + 1)}",
    ]
    for way, sizes in network.sizes.items():
        for size in sizes:
            lines.append(_line(network, way, size, found))
    verdicts = [text for target in network.targets for text in _verdicts(network, target, found)]
    verdicts += _against_uniform(network, found)
    return [*lines, "", *(f"- {text}" for text in verdicts), *([""] if verdicts else [])]


def _line(network: Network, way: str, size: float, found: Mapping[tuple[str, float, str, str], Row]) -> str:
    cells = [found.get((way, size, method, healed)) for method in METHODS for healed in (PLAIN, HEALED)]
    best = {_best(network, cells[::2]), _best(network, cells[1::2])}
    macs = next((f"{row.macs:.1%}" for row in cells if row is not None and row.macs is not None), "-")
    shown = [f"**{_cell(row, network)}**" if row and row in best else _cell(row, network) for row in cells]
    seconds = " / ".join("-" if row is None or row.seconds is None else f"{row.seconds:,.0f}" for row in cells[:2])
    return f"| {WAYS[way].format(size=size)} | {macs} | {' | '.join(shown)} | {seconds} |"


def _against_uniform(network: Network, found: Mapping[tuple[str, float, str, str], Row]) -> Iterator[str]:
    """One sentence for every budget that leaves as many MACs as a uniform cut; the default method is judged.

    >>> row = Row("minilm", "keep", 0.5, "auto", "all", "no", 9, 0.80, None, 0.5, 0.5, 9.0, 0, None, "")
    >>> rows = [row, replace(row, way="matched", score=0.81)]
    >>> list(_against_uniform(NETWORKS["minilm"], {(r.way, r.size, r.method, r.heal): r for r in rows}))
    ['`Macs` of `keep=0.5` against `keep=0.5`, not healed: 0.8100 against 0.8000, **better**.']
    """
    way = "matched" if "matched" in network.sizes else "macs"
    for size in network.sizes["keep"]:
        for healed, text in ((PLAIN, "not healed"), (HEALED, "healed")):
            even, budget = (found.get((each, size, "auto", healed)) for each in ("keep", way))
            if even is None or budget is None or abs((even.macs or 0.0) - (budget.macs or 0.0)) > _SAME_MACS:
                continue
            better = _best(network, [even, budget]) is budget
            names = (WAYS[each].format(size=size) for each in (way, "keep"))
            yield (
                f"{' against '.join(names)}, {text}: {_cell(budget, network)} against {_cell(even, network)}, "
                f"**{'better' if better else 'not better'}**."
            )


def _best(network: Network, rows: Sequence[Row | None]) -> Row | None:
    sign = 1 if network.lower_is_better else -1
    return min((row for row in rows if row is not None), key=lambda row: sign * (row.score or 0.0), default=None)


def _cell(row: Row | None, network: Network) -> str:
    if row is None or row.score is None:
        return "-"
    other = "" if row.other is None else f" ({row.other:.{network.digits}f})"
    return f"{row.score:.{network.digits}f}{other}{_mark(row)}"


def _mark(row: Row) -> str:
    """The mark of a row that was not refitted as by default."""
    return "" if row.refit in ("", REFIT) else r"\*"


def _verdicts(network: Network, target: Target, found: Mapping[tuple[str, float, str, str], Row]) -> Iterator[str]:
    """One sentence for the target without healing, one for that with it; the default method is judged."""
    for healed, wanted in ((PLAIN, target.plain), (HEALED, target.healed)):
        row = _best(network, [found.get((way, target.size, "auto", healed)) for way in target.ways])
        sign = "<=" if network.lower_is_better else ">="
        text = f"{target.text}, {'healed' if healed == HEALED else 'not healed'}, target {sign} {wanted:g}: "
        if row is None or row.score is None:
            yield f"{text}not run."
            continue
        short = row.score - wanted if network.lower_is_better else wanted - row.score
        verdict = "reached" if short <= 0 else f"short by {short:.{network.digits}f}"
        way = WAYS[row.way].format(size=row.size)
        yield f"{text}{row.score:.{network.digits}f}{_mark(row)} with {way}, **{verdict}**."
