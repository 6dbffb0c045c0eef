"""The dense model that a saved config describes, built within the bounds that its tensors set."""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter

from ispasp.api.files import CONFIG, GENERATION
from ispasp.api.stored import Stored
from ispasp.errors import MissingExtraError, SaveError
from ispasp.files.reading import memory
from ispasp.files.text import parsed

_MODULES = 20  # for every stored tensor: layers have activations, dropouts and containers beside them
_BESIDE = 1000


def build(saved: Stored, shapes: Mapping[str, Sequence[int]], folder: Path) -> nn.Module:
    """The dense model that the config describes. `shapes` of the stored tensors bound how large it can be."""
    remedy = "pass the dense model: ispasp.load(folder, model)"
    try:
        data = parsed(saved.texts[CONFIG])
        name = data["architectures"][0]
    except (ValueError, LookupError, TypeError) as error:
        raise SaveError(f"{folder / CONFIG} does not say which model to build ({error!r}): {remedy}") from error
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(f"building a {name} needs pip install 'ispasp[transformers]'; or {remedy}") from error
    try:
        cls = getattr(transformers, name)
        if not issubclass(cls, transformers.PreTrainedModel):
            raise TypeError(f"{name} is no PreTrainedModel")
        with torch.random.fork_rng(devices=[]), _bounded(saved, shapes):
            model: nn.Module = cls(cls.config_class.from_dict(data))
        if GENERATION in saved.texts:
            model.generation_config = transformers.GenerationConfig.from_dict(parsed(saved.texts[GENERATION]))
    except Exception as error:
        if _lacks_operators(error):
            raise MissingExtraError(
                f"building a {name} imports torchvision, which does not fit this PyTorch {torch.__version__} (its "
                "compiled part does not load): install the torchvision made for it, or pip uninstall torchvision"
            ) from error
        raise SaveError(f"cannot build a {name} from {folder / CONFIG} ({error}): {remedy}") from error
    return model.eval()


def _lacks_operators(error: BaseException | None) -> bool:
    """Whether torchvision missed its own operators: so it fails where it was compiled for another PyTorch."""
    while error is not None:
        if isinstance(error, RuntimeError) and "torchvision::" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _bounded(saved: Stored, shapes: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Stop a constructor that makes more than the saved tensors explain, before what it allocates is filled."""
    layouts = saved.plan.structure.tensors
    dense = sum(math.prod(layouts[name].shape if name in layouts else shape) for name, shape in shapes.items())
    room = min(memory(), 16 * dense + 2**26)  # bytes: twice float64
    left = {"modules": _MODULES * (len(shapes) + len(saved.ties)) + _BESIDE, "bytes": room}
    thread = threading.get_ident()  # hooks are called for all threads

    def count(what: str, number: int) -> None:
        if threading.get_ident() == thread:
            left[what] -= number
            if left[what] < 0:
                raise ValueError(f"it makes more {what} than the saved tensors explain")

    def parameter(_module: nn.Module, _name: str, value: nn.Parameter | None) -> None:
        count("bytes", 0 if value is None else value.nbytes)

    def module(_module: nn.Module, _name: str, _child: nn.Module | None) -> None:
        count("modules", 1)

    hooks = on_parameter(parameter), on_module(module)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
