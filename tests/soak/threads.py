"""Several threads at once: each gets what it gets alone, and the process is as before."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ispasp
from soak.case import Case, Wrong, check
from soak.networks import Subject, draw
from soak.options import random_options
from soak.state import check_same, process_unchanged, unchanged, weights


def run(case: Case) -> None:
    jobs = []
    for number in range(case.chosen("threads", 2, 3, 4)):
        sub = Case(f"threads:{case.seed}", number, case.folder / str(number))
        sub.folder.mkdir()
        jobs.append((sub, job(sub)))
        case.options[f"thread {number}"] = sub.options
    alone = [told(act, sub.folder / "alone") for sub, act in jobs]
    together: list[Any] = [None] * len(jobs)
    start = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        sub, act = jobs[number]
        start.wait()
        together[number] = told(act, sub.folder / "together")

    running = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    with process_unchanged("threads"):
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        if isinstance(other, dict) and "crash" in other and one != other:
            raise Wrong(f"thread {number}: {other['crash']}")
        check(one == other, f"thread {number}: {str(other)[:500]} instead of {str(one)[:500]}")
    for how in alone:
        case.facts["refused alone" if "refused" in how else "done"] = True


def told(act: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    try:
        return act(folder)
    except ispasp.IspaspError as error:
        return {"refused": type(error).__name__, "message": str(error)}
    except BaseException:
        return {"crash": traceback.format_exc()[-3000:]}


def job(case: Case) -> Callable[[Path], dict[str, Any]]:
    """What one thread does: survey, prune, or prune, save and load."""
    subject = draw(case)
    options = random_options(case)
    verb = case.chosen("verb", "survey", "prune", "prune", "save")
    keep = case.chosen("keep", 0.5, 0.3)

    def act(folder: Path) -> dict[str, Any]:
        if verb == "survey":
            found = ispasp.survey(subject.model, subject.batches[0], scope=options["scope"])
            return {"names": [d.name for d in found.dimensions]}
        result = ispasp.prune(subject.model, subject.batches, keep, **options)
        if verb == "save":
            saved_and_loaded(subject, result, folder)
        return {"kept": {k: list(v) for k, v in result.plan.kept.items()}, "weights": weights(result.model)}

    with unchanged(subject.model, "a thread's model"):
        return act


def saved_and_loaded(subject: Subject, result: ispasp.Result, folder: Path) -> None:
    for _ in range(3):
        ispasp.save(result, folder)
        loaded = ispasp.load(folder, subject.fresh())
        check_same(weights(result.model), weights(loaded), "saved and loaded weights")
