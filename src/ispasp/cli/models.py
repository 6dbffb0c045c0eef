"""Load the model that users name: `torchvision:`, `timm:`, `hf:`, `path/to/file.py:factory`, or a pruned folder."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import re
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from ispasp._saved import CONFIG, FILES, PLAN, WEIGHTS, is_ours, opened_save
from ispasp._store import load
from ispasp.cli import options as o
from ispasp.cli.huggingface import Task, described, hf_model, quiet_hub, transformers
from ispasp.cli.loaded import Loaded, from_dict, of_timm, of_torchvision
from ispasp.errors import InputError, MissingExtraError, SaveError, failing_as
from ispasp.files import check_names, check_tensor, is_regular, opened, read_json
from ispasp.integrations.torchvision import import_torchvision

RESULT = "result.json"  # `Result.to_json`, the model as it was typed, and the command
PRETRAINED = "pretrained"
_FORMS = "torchvision:NAME, timm:NAME, hf:FOLDER_OR_NAME, path/to/file.py:factory, or a folder of `ispasp prune`"
_WITH_OPTIONS = "Options follow the name: torchvision:resnet18:num_classes=10, nets.py:build:width=32."
_FACTORY = re.compile(r"(?P<file>.+\.py):(?P<call>[^/\\]*)", re.DOTALL)
_FETCHES = re.compile(r"weights|pretrained|checkpoint|path|url|cfg|hub")  # options that read other files


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model."""

    model: Annotated[str, typer.Argument(help=f"{_FORMS}. {_WITH_OPTIONS}")]
    weights: str = o.opt("", None, "Safetensors or state dict (.pt, .pth); pretrained fetches torchvision's or timm's.")
    dense: o.Dense = ""
    task: Task | None = o.opt(None, None, "Class of a Hugging Face model. Default: as its config says.")

    def load(self, seed: int = 0) -> Loaded:
        o.LOG.debug("loading %s", self.model)
        return load_model(self.model, self.weights, dense=self.dense, task=self.task, seed=seed)


def load_model(spec: str, weights: str = "", *, dense: str = "", task: Task | None = None, seed: int = 0) -> Loaded:
    """Build the model that `spec` names and load its weights, from a file or with "pretrained" from the network.

    `dense` names the dense model of a pruned folder, `task` the class of a Hugging Face model.
    """
    (kind, _, rest), folder = spec.partition(":"), saved_folder(spec)
    if task and (folder is not None or kind != "hf"):
        raise InputError(f"--task {task.value} is for Hugging Face models (hf:), not for {spec}: leave it out")
    if folder is not None:
        if weights:
            raise InputError(f"--weights beside {spec}: the folder holds its weights, so leave --weights out")
        return load_saved(folder, dense, partial(load_model, seed=seed))
    if weights == PRETRAINED and kind not in _PACKAGES:
        raise InputError(f"--weights pretrained is for torchvision: and timm:, not for {spec}: pass a file")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "hf":
            name = str(Path(rest).expanduser()) if rest.startswith("~") else rest
            model, warnings = hf_model(name, empty=bool(weights), task=task)
            built = replace(described(model, f"hf:{name}", name), warnings=warnings)
        elif kind in _PACKAGES:
            built = _of_package(spec, weights)
        elif _FACTORY.fullmatch(spec):
            built = Loaded(from_file(spec).eval(), spec)
        else:
            raise InputError(_no_model(spec))
    if weights and weights != PRETRAINED:
        fill(built.model, Path(weights).expanduser())
    return built


def _of_package(spec: str, weights: str) -> Loaded:
    """A model of torchvision or timm."""
    package, _, rest = spec.partition(":")
    name, options = o.with_options(rest)
    if find_spec(package) is None:
        raise MissingExtraError(f"{package}: needs {package}: pip install 'ispasp[vision]'")
    quiet_hub()
    fetched = "fetched", "pass --weights FILE instead"
    done, remedy = fetched if weights == PRETRAINED else ("built", "check its options")
    # Downloads show their progress on standard output.
    with failing_as(InputError, f"{spec} cannot be {done}", remedy), redirect_stdout(sys.stderr):
        built = _PACKAGES[package](name, options, weights)
    hint = f"{spec} has random weights: pass --weights FILE, or --weights pretrained to fetch trained ones."
    return replace(built, model=built.model.eval(), spec=spec, warnings=() if weights else (hint,))


def _torchvision(name: str, options: dict[str, Any], weights: str) -> Loaded:
    models = import_torchvision().models
    _check_name("torchvision", name, models.list_models())
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options.setdefault("weights_backbone", None)  # the default fetches them
    model, known = models.get_model(name, weights=None, **options), models.get_model_weights(name)
    if weights == PRETRAINED:
        entry = known.DEFAULT
        model.load_state_dict(torch.hub.load_state_dict_from_url(entry.url, map_location="cpu", weights_only=True))
    else:  # the entry that a file is named after, else the first
        named = [entry for entry in known if entry.url.endswith(f"/{Path(weights).name}")]
        entry = next(iter([*named, *known]), None)
    prepare = of_torchvision(entry)
    names = tuple(map(str, entry.meta.get("categories", ()))) if entry else ()
    return Loaded(model, name, (3, prepare.size, prepare.size), prepare, names=names)


def _timm(name: str, options: dict[str, Any], weights: str) -> Loaded:
    import_torchvision()  # timm imports it
    import timm

    _check_name("timm", name.partition(".")[0], timm.list_models())
    model = timm.create_model(name, pretrained=weights == PRETRAINED, **options)
    told: Any = getattr(model, "pretrained_cfg", None) or {}
    size, channels = options.get("img_size"), options.get("in_chans", 3)
    shape = (channels, size, size) if isinstance(size, int) else tuple(told.get("input_size", (3, 224, 224)))
    return Loaded(model, name, shape, of_timm(told, shape[-1]), names=tuple(map(str, told.get("label_names") or ())))


_PACKAGES = {"torchvision": _torchvision, "timm": _timm}


def _check_name(package: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {len(known)}, such as {sorted(known)[0]}"
        raise InputError(f"{package} has no model {name!r}: {hint}")


def _no_model(spec: str) -> str:
    path = Path(spec)
    if path.suffix == ".py":
        return f"{spec!r} names a file, not a model: add the function that builds it, {spec}:FUNCTION"
    if path.is_file():
        return f"{spec!r} is a file: pass the model that it belongs to, and --weights {spec}"
    if spec and (path / "config.json").is_file():
        return f"{spec!r} is a folder of Hugging Face: pass hf:{spec}"
    return f"{spec!r} names no model: pass {_FORMS}"


def from_file(text: str) -> nn.Module:
    """Run the user's file and call the factory in it; an error there is reported with file and line."""
    found = _FACTORY.fullmatch(text)
    path = Path(found["file"] if found else text).expanduser()
    if found is None or not path.is_file():
        raise InputError(f"no file {path}: pass path/to/file.py:factory")
    name, options = o.with_options(found["call"])
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as `python path/to/file.py` does, so that the file can import its neighbours
    try:
        model = _factory(path, name, options)(**options)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise InputError(f"{where}: {type(error).__name__}: {error}: correct the file, then try again") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise InputError(f"{text} returns {type(model).__name__}: it must return a torch.nn.Module")
    return model


def _factory(path: Path, name: str, options: dict[str, Any]) -> Any:
    """Run the file, and check that the options fit the function of this name."""
    spec: Any = importlib.util.spec_from_file_location(f"ispasp_user_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    factory: Any = getattr(module, name, None)
    if not callable(factory):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise InputError(f"{path} has no function {name!r}: it has {', '.join(own) or 'none'}")
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise InputError(f"{path}:{name}: {error}: its options are {takes}; pass {path}:{name}:KEY=VALUE") from None
    return factory


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a pruned model."""
    return is_regular(folder / PLAN) or is_ours(folder)


def check_out(out: Path, *, force: bool) -> None:
    """Check, before the work, that a model can be written to a folder that is empty, or with `force` holds another."""
    o.writable(out)
    foreign = [file for file in FILES if (out / file).exists()]
    if foreign and not is_saved(out):
        raise InputError(f"--out {out} holds {foreign[0]}, which `ispasp prune` did not write: pass another folder")
    if not force and out.is_dir() and any(out.iterdir()):
        raise InputError(f"--out {out} is not empty: pass another folder, or --force to write into it")


def saved_folder(spec: str) -> Path | None:
    """Return the folder of a pruned model, given as FOLDER, ispasp:FOLDER or hf:FOLDER; None for other models."""
    kind, _, rest = spec.partition(":")
    text = rest if kind in ("ispasp", "hf") else spec
    folder = Path(text).expanduser()
    return folder if kind == "ispasp" or (text and is_saved(folder)) else None


def load_saved(folder: Path, dense: str, build: Callable[[str], Loaded]) -> Loaded:
    """Return the pruned model of a folder; `build` makes the dense one, named by `dense` unless the folder names it."""
    if not is_saved(folder):
        raise SaveError(f"{folder} has no {WEIGHTS} of ispasp: pass a folder that `ispasp prune` wrote")
    with opened_save(folder) as saved:
        plan, has_config = saved.plan, CONFIG in saved.texts
    result = saved_result(folder)
    if not dense and has_config:
        transformers()  # raises if it is missing, and imports torchvision first
        built = described(load(folder), f"ispasp:{folder}", str(folder))
    else:
        known = result["model"]
        is_safe = known.startswith(("torchvision:", "timm:")) and not _FETCHES.search(known)
        if not dense and not is_safe:  # a folder may not name code to run
            remedy = f"it was made from {known}" if known else "such as torchvision:resnet34"
            raise InputError(f"{folder} does not hold the code of its model: pass --model, the dense one ({remedy})")
        built = build(dense or known)
        load(folder, built.model)
    settings = result.get("settings")
    told = settings.get("preprocessing") if isinstance(settings, dict) else None
    prepare = from_dict(told, str(folder / RESULT)) or built.preprocessing
    return replace(built, spec=f"ispasp:{folder}", warnings=(), plan=plan, preprocessing=prepare)


def saved_result(folder: Path) -> dict[str, Any]:
    """Read result.json of a folder; "model" is empty unless it names the dense model."""
    try:
        told = read_json(folder / RESULT)
    except SaveError:
        told = None
    told = told if isinstance(told, dict) else {}
    return told | {"model": model if isinstance(model := told.get("model"), str) else ""}


# Weights from a file: safetensors or a state dict, never anything that can run code ----------------------------------
_COUNTER = "num_batches_tracked"  # BatchNorm's counter; old files lack it, and no output depends on it
_WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys of a state dict in a training checkpoint
_DEPTH = 8  # most nested wrappers
_WIDER, _BESIDE = 32, 2**28  # bytes per byte of the model, and more: checkpoints hold optimizers, too


def fill(model: nn.Module, path: Path) -> None:
    """Load the weights of a file into a model, strictly; tied tensors may be stored once."""
    expected = model.state_dict()
    limit = _BESIDE + _WIDER * sum(tensor.nbytes for tensor in expected.values() if isinstance(tensor, Tensor))
    try:
        given = _unwrapped(_read_weights(path, limit), path)
        _check_fits(given, model, path)
    except SaveError as error:
        raise InputError(str(error)) from None
    with failing_as(InputError, f"{path} does not fit {type(model).__name__}", "save model.state_dict()"):
        model.load_state_dict(given, strict=False)  # complete, but for the other names of tied tensors


def _check_fits(given: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    """Raise unless the file has each tensor of the model, tied ones under one of their names, and no others."""
    expected, first = model.state_dict(keep_vars=True), dict[int, str]()
    names = {name: first.setdefault(id(tensor), name) for name, tensor in expected.items()}
    counters = {name for name in names if name.endswith(_COUNTER)}
    remedy = f"pass weights of the same {type(model).__name__}, with the same number of classes, not quantized"
    for name in sorted((given.keys() & names.keys()) - counters):
        check_tensor(name, given[name], expected[name], path, remedy)
    check_names({*names.values()} - counters, {names.get(name, name) for name in given} - counters, path, remedy)


def _read_weights(path: Path, limit: int) -> Any:
    if not is_regular(path):
        raise InputError(f"no weights at {path}: pass --weights FILE, a safetensors file or a state dict (.pt, .pth)")
    with failing_as(InputError, f"{path} cannot be read as weights", "pass safetensors or a state dict"):
        if path.suffix == ".safetensors":
            with opened(path) as stored:
                return stored.tensors(limit)
        _check_archive(path, limit)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about pickles, which are errors anyway
                return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            wrong = f"{path} holds more than tensors, which could run code when it is read"
            remedy = "save it again with torch.save(model.state_dict(), path) or as safetensors"
            raise InputError(f"{wrong}: {remedy}") from error


def _check_archive(path: Path, limit: int) -> None:
    """Raise for files that torch did not write, and for those that would fill the memory once unpacked."""
    with path.open("rb") as file:
        start = file.read(2)
    if not start.startswith((b"PK", b"\x80")):  # an archive, or a pickle of old versions
        raise InputError(f"{path} was not written by torch.save: pass safetensors or a state dict (.pt, .pth)")
    size = path.stat().st_size
    if start == b"PK":
        with zipfile.ZipFile(path) as archive:
            size = max(size, sum(part.file_size for part in archive.infolist()))
    if size > limit:
        raise InputError(f"{path} takes {size:,} bytes, far more than the model: pass weights of the same model")


def _unwrapped(found: Any, path: Path) -> Mapping[str, Tensor]:
    """Return the state dict inside a checkpoint, without the prefix of DataParallel."""
    for _ in range(_DEPTH):  # a dict may contain itself
        key = next((k for k in _WRAPPERS if k in found), None) if isinstance(found, Mapping) else None
        if key is None:
            break
        found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(f"{path} holds a {type(found).__name__}, not a state dict: save model.state_dict()")
    for name, tensor in found.items():
        if not isinstance(name, str) or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise InputError(f"{str(name)[:80]!r} in {path} is not a plain tensor: save model.state_dict()")
    parallel = bool(found) and all(name.startswith("module.") for name in found)
    return {name.removeprefix("module.") if parallel else name: value for name, value in found.items()}
