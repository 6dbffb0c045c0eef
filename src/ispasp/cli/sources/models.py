"""From what users type to a model: `torchvision:`, `timm:`, `hf:`, `ispasp:`, `path/to/file.py:factory`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ispasp.cli.sources.factory import from_file, is_factory
from ispasp.cli.sources.huggingface import described, hf_model, quiet_hub
from ispasp.cli.sources.loaded import Loaded, with_options
from ispasp.cli.sources.preprocessing import Preprocessing, of_timm, of_torchvision
from ispasp.cli.sources.saved import load_saved, saved_folder
from ispasp.cli.sources.weights import fill
from ispasp.errors import InputError, MissingExtraError
from ispasp.integrations.torchvision import import_torchvision

PRETRAINED = "pretrained"
_FORMS = (
    "torchvision:NAME, timm:NAME, hf:FOLDER_OR_NAME, path/to/file.py:factory, or a folder that `ispasp prune` wrote"
)
_IMAGE = (3, 224, 224)


def load_model(spec: str, weights: str = "", *, dense: str = "", task: str = "", seed: int = 0) -> Loaded:
    """Build the model that `spec` names, and fill it with the weights of a file.

    `weights`: a file, "pretrained" (torchvision and timm then fetch theirs), or empty. `dense` names the dense model
    of a pruned folder, `task` the class of a Hugging Face model. Nothing is fetched but what is named.

    >>> load_model("resnet34")
    Traceback (most recent call last):
    ispasp.errors.InputError: 'resnet34' names no model: pass torchvision:NAME, timm:NAME, ...
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _load(spec, weights, dense, task)


def _load(spec: str, weights: str, dense: str, task: str) -> Loaded:
    kind, _, rest = spec.partition(":")
    folder = saved_folder(spec)
    if task and (folder is not None or kind != "hf"):
        raise InputError(
            f"--task {task} is for models of Hugging Face, hf:FOLDER_OR_NAME, not for {spec}: leave it out"
        )
    if folder is not None:
        if weights:
            raise InputError(f"--weights beside {spec}: the folder holds its weights, so leave --weights out")
        return load_saved(folder, dense, lambda text: _load(text, "", "", ""))
    if kind == "hf":
        built = _huggingface(rest, weights, task)
    elif kind in _BUILDERS:
        built = _BUILDERS[kind](rest, weights)
    elif is_factory(spec):
        built = Loaded(from_file(spec).eval(), spec)
    else:
        raise InputError(_no_model(spec))
    if weights == PRETRAINED:
        if kind not in ("torchvision", "timm"):
            raise InputError(f"--weights pretrained is for torchvision: and timm:, not for {spec}: pass a file")
    elif weights:
        fill(built.model, Path(weights).expanduser())
    return built


def _torchvision(text: str, weights: str) -> Loaded:
    name, options = with_options(text)
    try:
        package = import_torchvision()
    except ImportError as error:
        raise MissingExtraError("torchvision: needs torchvision: pip install 'ispasp[vision]'") from error
    models = package.models
    _check_name("torchvision", name, models.list_models())
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options.setdefault("weights_backbone", None)  # the default is to fetch them
    model = _built(f"torchvision:{text}", lambda: models.get_model(name, weights=None, **options))
    entry = _entry(models, name, weights)
    if weights == PRETRAINED:
        url = entry.url
        state = _fetched(url, lambda: torch.hub.load_state_dict_from_url(url, map_location="cpu", weights_only=True))
        _built(f"torchvision:{text}", lambda: model.load_state_dict(state) and model)
    prepare = (entry and of_torchvision(entry.transforms(), f"torchvision's {entry.name}")) or Preprocessing()
    names = tuple(map(str, entry.meta.get("categories", ()))) if entry else ()
    shape = (3, prepare.size, prepare.size)
    warnings = _untrained(f"torchvision:{text}", weights)
    return Loaded(model.eval(), f"torchvision:{text}", shape, prepare, warnings=warnings, names=names)


def _entry(models: Any, name: str, weights: str) -> Any:
    """torchvision's entry of the weights: that of the file's name, else the first; of what is fetched, the default."""
    known = list(models.get_model_weights(name))
    if weights == PRETRAINED:
        return models.get_model_weights(name).DEFAULT
    return next((w for w in known if w.url.endswith(f"/{Path(weights).name}")), known[0] if known else None)


def _timm(text: str, weights: str) -> Loaded:
    name, options = with_options(text)
    try:
        import_torchvision()  # timm imports it
        import timm
    except ImportError as error:
        raise MissingExtraError("timm: needs timm: pip install 'ispasp[vision]'") from error
    _check_name("timm", name.partition(".")[0], timm.list_models())
    fetch = weights == PRETRAINED
    make: Callable[[], nn.Module] = lambda: timm.create_model(name, pretrained=fetch, **options)  # noqa: E731
    model = _fetched(f"timm:{name}", make) if fetch else _built(f"timm:{text}", make)
    told: Any = getattr(model, "pretrained_cfg", None) or {}
    size = options.get("img_size")
    channels = options.get("in_chans", 3)
    shape = (channels, size, size) if isinstance(size, int) else tuple(told.get("input_size", _IMAGE))
    prepare = of_timm(told, shape[-1]) or Preprocessing().sized(shape[-1])
    names = tuple(map(str, told.get("label_names") or ()))
    warnings = _untrained(f"timm:{text}", weights)
    return Loaded(model.eval(), f"timm:{text}", shape, prepare, warnings=warnings, names=names)


def _huggingface(name: str, weights: str, task: str) -> Loaded:
    name = str(Path(name).expanduser()) if name.startswith("~") else name
    model, warnings = hf_model(name, empty=bool(weights), task=task)
    return replace(described(model, f"hf:{name}", name), warnings=warnings)


_BUILDERS: dict[str, Callable[[str, str], Loaded]] = {"torchvision": _torchvision, "timm": _timm}


def _no_model(spec: str) -> str:
    """Why `spec` is none, with the nearest remedy."""
    path = Path(spec)
    if path.suffix == ".py":
        return f"{spec!r} names a file, not a model: add the function that builds it, {spec}:FUNCTION"
    if path.is_file():
        return f"{spec!r} is a file: pass the model that it belongs to, and --weights {spec}"
    if spec and (path / "config.json").is_file():
        return f"{spec!r} is a folder of Hugging Face: pass hf:{spec}"
    return f"{spec!r} names no model: pass {_FORMS}"


def _built(what: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise InputError(f"{what} cannot be built: {type(error).__name__}: {error}: check its options") from error


def _fetched(what: str, fetch: Callable[[], Any]) -> Any:
    quiet_hub()
    try:
        with redirect_stdout(sys.stderr):  # torch.hub tells there what it fetches, and may be followed by JSON
            return fetch()
    except Exception as error:
        raise InputError(f"{what} cannot be fetched ({type(error).__name__}): pass --weights FILE instead") from error


def _check_name(package: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {len(known)}, such as {sorted(known)[0]}"
        raise InputError(f"{package} has no model {name!r}: {hint}")


def _untrained(spec: str, weights: str) -> tuple[str, ...]:
    if weights:
        return ()
    return (f"{spec} has random weights: pass --weights FILE, or --weights pretrained to fetch trained ones.",)
