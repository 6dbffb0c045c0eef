"""`ispasp prune`: a smaller model, its plan, and a report."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from torch import Tensor
from torch.nn import functional

import ispasp
from ispasp._keep import recipes
from ispasp._options import Bias, Options, Order, Refitted, best_method
from ispasp.budget import Latency, Macs, Params
from ispasp.cli import options as o
from ispasp.cli.data import load_data
from ispasp.cli.evaluate import scorer
from ispasp.cli.loaded import Examples, Loaded, matched, runs
from ispasp.cli.models import RESULT, ModelOptions, check_out, saved_folder, saved_result
from ispasp.errors import InputError, SaveError, failing_as
from ispasp.files import read_bytes
from ispasp.report.html import html
from ispasp.select import Selector, methods, selector
from ispasp.train.loader import augmentation
from ispasp.train.objective import labels_of, logits_of
from ispasp.types.plan import Plan

_AMOUNT, _HOW, _HEAL = "How much stays", "How", "Heal"
_METHODS = f"auto, or one of {', '.join(methods())}; with options as in ispasp:iterations=40,minibatches=true."
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def number(text: str) -> float | int:
    """Parse a fraction or a count."""
    try:
        value = float(text)
    except ValueError as error:
        raise InputError("pass a fraction such as 0.5, or a whole number") from error
    is_count = text.strip().isdecimal() or (value > 1 and value.is_integer())
    return int(value) if is_count else value


def time_of(text: str) -> dict[str, Any]:
    """Parse --latency: a fraction, or milliseconds as in 12ms."""
    plain = text.strip().removesuffix("ms")
    return {"amount" if plain == text.strip() else "milliseconds": number(plain)}


def share(text: str) -> tuple[str, float | int]:
    """Parse --keep: a glob, empty if there is none, and how much of it stays."""
    pattern, equals, value = text.rpartition("=")
    if equals and not (pattern and value):
        raise InputError("pass GLOB=0.5, such as 'layer1.*=0.5'")
    return pattern, number(value)


def recipe_of(text: str) -> Any:
    """Parse --recipe."""
    if text not in recipes:
        raise InputError(f"choose from {', '.join(recipes)}")
    return recipes[text]


def plan_of(text: str) -> Plan:
    """Read the file of --plan."""
    if not Path(text).is_file():
        raise InputError("there is no such file: pass a plan.json, or one that report.html wrote")
    return Plan.from_json(read_bytes(Path(text)))


def bytes_of(text: str) -> int:
    """Parse a number of bytes: K, M, G, T are powers of 1,000, Ki, Mi, Gi, Ti of 1,024."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([kmgt]?)(i?)b?", text.strip().lower())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ") if found else 0
    if size < 1:
        raise InputError("pass a number of bytes such as 500M or 2G")
    return int(size)


def method_of(text: str) -> str | Selector:
    """Parse a method's name, with or without options."""
    name, options = o.with_options(text)
    if name == "auto":
        return name
    plain: Any = selector(name)
    types, known = get_type_hints(type(plain)), [field.name for field in fields(plain)]
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{name} has no option {key!r}: it has {', '.join(known) or 'none'}")
        if types[key] is bool:
            if str(value).lower() not in _TRUTH:
                raise InputError(f"{key} is {value!r}: pass {key}=true or {key}=false")
            options[key] = _TRUTH[str(value).lower()]
    return replace(plain, **options) if options else name


@dataclass(frozen=True, kw_only=True)
class AmountOptions:
    """How much stays."""

    keep: list[Any] | None = o.opt(
        None, _AMOUNT, "Units (0.5 by default; or a number), or GLOB=0.5; repeatable, first match counts.", parser=share
    )
    macs: Any = o.opt(None, _AMOUNT, "Fraction or number of MACs that stay.", parser=lambda t: Macs(number(t)))
    params: Any = o.opt(None, _AMOUNT, "Fraction or number of parameters.", parser=lambda t: Params(number(t)))
    latency: Any = o.opt(None, _AMOUNT, "Time of a call: a fraction of the dense, or 12ms.", parser=time_of)
    runtime: Literal["eager", "compile", "onnx"] = o.opt("eager", _AMOUNT, "What --latency is measured in.")
    latency_batch: int = o.opt(1, _AMOUNT, "Examples in a call that --latency measures.", min=1)
    recipe: Any = o.opt(None, _AMOUNT, f"The paper's: {', '.join(recipes)}.", parser=recipe_of, completes=recipes)
    plan: Any = o.opt(None, _AMOUNT, "Units of a plan.json, as report.html writes for a budget.", parser=plan_of)
    uniform: bool = o.opt(False, _AMOUNT, "Give all layers the same fraction of a budget.", "--uniform")
    round_to: int | None = o.opt(None, _AMOUNT, "Round widths to multiples of this, such as 8.", min=1)

    def amount(self) -> Any:
        names = ("keep", "macs", "params", "latency", "recipe", "plan")
        given = {name: value for name in names if (value := getattr(self, name)) not in (None, [])}
        if len(given) > 1:
            raise InputError(f"--{' and --'.join(given)} together: pass one of --{', --'.join(names)}")
        if self.latency is not None:
            return Latency(**self.latency, batch=self.latency_batch, runtime=self.runtime)
        if given and not self.keep:
            return next(iter(given.values()))
        rules = {pattern or "*": value for pattern, value in self.keep or [("", 0.5)]}
        plain = self.keep is None or (len(rules) == 1 and not self.keep[0][0])
        return rules["*"] if plain else rules


@dataclass(frozen=True, kw_only=True)
class HowOptions:
    """How units are chosen and consumers refitted."""

    method: Any = o.opt("auto", _HOW, _METHODS, parser=method_of, completes=["auto", *methods()])
    compensate: Literal["dense", "local", "none"] = o.opt("dense", _HOW, "Refit to the dense network, or locally.")
    order: Order = o.opt("sequential", _HOW, "Layer by layer, all in the dense network, or all units ranked together.")
    refit: Refitted = o.opt("auto", _HOW, "Consumers, or all layers after them. auto: all with --compensate dense.")
    bias: Bias = o.opt("auto", _HOW, "Whether refits add biases. auto: to readers of pruned units, unless --uniform.")
    ridge: float | None = o.opt(None, _HOW, "Ridge, relative to inputs' variance. Default: chosen on held-out data.")
    memory: Any = o.opt(None, _HOW, "For waiting batches, such as 2G; beyond, they run per layer.", parser=bytes_of)
    recalibrate: bool = o.opt(False, _HOW, "Re-estimate BatchNorm statistics.", "--recalibrate")
    search: int = o.opt(0, _HOW, "Extra candidate networks that --macs and --params try.", min=0)
    least: int = o.opt(1, _HOW, "Fewest units that --macs and --params leave; 0 may remove residual branches.", min=0)
    curves: bool = o.opt(True, _HOW, "Predict the error at other widths, for the report.", "--curves/--no-curves")

    def chosen(self) -> str | Selector:
        return best_method(self.order) if self.method == "auto" else self.method

    def no_curves(self) -> str:
        """Say why the report has no curves; empty if it has."""
        method = selector(self.chosen())
        if looks_at_the_task(method):
            return f"{method.name} looks at the task, so every width would need the loss again: there are no curves."
        return "" if self.curves else "There are no curves: --no-curves was passed."


def augment_of(text: str) -> tuple[str, ...]:
    """Parse --heal-augment."""
    names = tuple(part.strip() for part in text.split(","))
    augmentation(names)
    return names


@dataclass(frozen=True, kw_only=True)
class HealOptions:
    """Options of `ispasp.Heal`. Any of them turns healing on."""

    heal: bool = o.opt(False, _HEAL, "Train the pruned model towards the dense one, without labels.", "--heal")
    heal_time: float | None = o.opt(None, _HEAL, "Seconds at most. Without a limit: about 20 epochs.", min=1)
    heal_steps: int | None = o.opt(None, _HEAL, "Steps at most.", min=1)
    heal_epochs: float | None = o.opt(None, _HEAL, "Passes over the calibration data at most.", min=0)
    heal_augment: Any = o.opt(None, _HEAL, "Changes of images: flip, crop or flip,crop.", parser=augment_of)
    heal_blocks: bool = o.opt(False, _HEAL, "One block after the other, in less memory.", "--heal-blocks")
    heal_checkpoint: Path | None = o.opt(None, _HEAL, "Folder; the same command resumes from it after a stop.")

    def chosen(self) -> ispasp.Heal | None:
        given = {name.removeprefix("heal_"): value for name, value in vars(self).items() if name != "heal"}
        asked = self.heal or any(value not in (None, False) for value in given.values())
        return ispasp.Heal(**given) if asked else None


@dataclass(frozen=True, kw_only=True)
class WhatOptions:
    """Which hidden dimensions."""

    scope: o.Scope = "blocks"
    kinds: o.Kinds = o.ALL
    skip: list[str] | None = o.opt(None, o.WHAT, "Glob of hidden dimensions to leave alone; repeatable.")


@dataclass(frozen=True, kw_only=True)
class DataOptions(o.Labelled):
    """Data to calibrate with, and data to score on."""

    examples: int = o.opt(256, o.DATA, "Calibration examples, spread over the data.", min=1)
    batch_size: o.BatchSize = 32
    input_size: o.InputSize = None
    val: str = o.opt("", o.DATA, "Data to score on, before and after: accuracy, or of language models perplexity.")
    val_examples: int | None = o.opt(None, o.DATA, "Examples of --val to use. Default: all.", min=1)


@o.grouped
def prune(
    model: ModelOptions,
    data: DataOptions,
    amounts: AmountOptions,
    how: HowOptions,
    healing: HealOptions,
    what: WhatOptions,
    device: o.Device = "",
    out: Annotated[Path, o.option(None, "Folder to write to.")] = Path("pruned"),
    force: o.Force = False,
    as_json: o.Json = False,
) -> None:
    """Prune a model with unlabelled data; write the model, plan.json, result.json and report.html."""
    chosen = _chosen(amounts, how, healing, what)
    Options(**chosen)  # reports options that do not go together before anything is loaded
    check_out(out, force=force)
    loaded = model.load(data.seed)
    found = _with_usable_labels(loaded, load_data(data.data, loaded, data), chosen["method"])
    held = load_data(data.val, loaded, data) if data.val else None
    judge = scorer(loaded, held, data.batch_size, examples=data.val_examples) if held else None
    warnings = [*loaded.warnings, *found.warnings]
    o.warn(warnings)
    o.LOG.debug("pruning %s", loaded.spec)
    o.move(loaded.model, device)
    labelled = looks_at_the_task(chosen["method"]) and found.labels is not None
    batches = found.loader(data.batch_size, numbers=found.some(data.examples), labelled=labelled)
    without = how.no_curves()
    loss = _loss if labelled else None
    result = ispasp.prune_(loaded.model, batches, loss=loss, examples=None, evaluate=judge, **chosen)
    warnings += [] if result.layers else ["Nothing was removed: pass a smaller --keep, or fewer --skip."]
    told = json.loads(result.to_json()) | {"warnings": warnings, **({"no_curves": without} if without else {})}
    folder = saved_folder(model.model)  # of a model that was pruned before: the dense one is named
    name = model.model if folder is None else model.dense or str(saved_result(folder)["model"])
    told |= {"model": name, "command": shlex.join(["ispasp", *sys.argv[1:]])}
    told["settings"] |= {name: getattr(data, name) for name in ("data", "val", "seed", "batch_size")}
    told["settings"] |= {"weights": model.weights, "examples": min(data.examples, found.count)}
    told["settings"] |= {"preprocessing": asdict(found.preprocessing)} if found.preprocessing else {}
    told["settings"] |= {"scored_on": judge.text} if judge else {}
    _write(result, told, found, out)
    _print(told, str(result), found, out, as_json=as_json)


def _chosen(amounts: AmountOptions, how: HowOptions, healing: HealOptions, what: WhatOptions) -> dict[str, Any]:
    """Return the options as `ispasp.prune` takes them."""
    return {
        **vars(how),
        **vars(what),
        "keep": amounts.amount(),
        "round_to": amounts.round_to,
        "uniform": amounts.uniform,
        "method": how.chosen(),
        "curves": not how.no_curves(),
        "ridge": "auto" if how.ridge is None else how.ridge,
        "heal": healing.chosen(),
        "compensate": None if how.compensate == "none" else how.compensate,
        "skip": tuple(what.skip or ()),
    }


def _with_usable_labels(loaded: Loaded, found: Examples, method: str | Selector) -> Examples:
    """Match labels to the model's outputs; labels that do not fit and are not needed are dropped with a warning."""
    output = runs(loaded, found)
    used = looks_at_the_task(method) or (found.classes and isinstance(output, Tensor))
    if found.labels is None or not used:
        return found
    scores = logits_of(output)
    if scores.ndim != 2:
        return found
    try:
        return matched(found, scores.shape[1], loaded.names)
    except InputError as error:
        if "sensitivity" in selector(method).needs:
            raise  # the method would look at these labels
        return replace(found, labels=None, warnings=(*found.warnings, f"The labels are not used: {error}"))


def _loss(output: Any, batch: Any) -> Tensor:
    scores = logits_of(output)
    return functional.cross_entropy(scores, labels_of(batch).to(scores.device))


def _write(result: ispasp.Result, told: dict[str, Any], found: Examples, out: Path) -> None:
    o.LOG.debug("writing %s", out)
    told["opens"] = ispasp.save(result, out).note
    with failing_as(SaveError, f"cannot write to {out}", "make room, or pass another --out"):
        (out / RESULT).write_text(json.dumps(told, indent=1), encoding="utf-8")
        (out / "report.html").write_text(html(told, result.curves, result.tradeoffs), encoding="utf-8")
        if found.tokenizer is not None:
            found.tokenizer.save_pretrained(out)


def _print(told: dict[str, Any], table: str, found: Examples, out: Path, *, as_json: bool) -> None:
    """Print the table or JSON, then the data it rests on; beside JSON that goes to standard error."""
    settings = told["settings"]
    typer.echo(json.dumps(told, indent=2) if as_json else table)
    typer.echo(f"calibrated with {settings['examples']:,} of {found.text}", err=as_json)
    if found.preprocessing is not None:
        typer.echo(f"images: {found.preprocessing}", err=as_json)
    if "scored_on" in settings:
        typer.echo(f"scored on {settings['scored_on']}", err=as_json)
    o.warn(told["warnings"])
    typer.echo(f"the folder {told['opens']}", err=as_json)
    typer.echo(f"wrote {out / 'report.html'}, plan.json, model.safetensors and {RESULT}", err=as_json)


def looks_at_the_task(method: str | Selector) -> bool:
    """Whether a method looks at a loss, and so at labels where there are any."""
    return bool({"sensitivity", "task"} & set(selector(method).needs))
