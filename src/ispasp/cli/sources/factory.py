"""A model from the user's own file: `path/to/file.py:factory`, with options `path/to/file.py:factory:width=32`."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ispasp.cli.sources.loaded import with_options
from ispasp.errors import InputError

_FORM = re.compile(r"(?P<file>.+\.py):(?P<call>[^/\\]*)", re.DOTALL)


def is_factory(text: str) -> bool:
    """Whether a text names a function in a file.

    >>> is_factory("nets.py:build:width=32"), is_factory("nets.py")
    (True, False)
    """
    return _FORM.fullmatch(text) is not None


def from_file(text: str) -> nn.Module:
    """Run the file and call the factory in it; what goes wrong there is told with file and line.

    >>> from_file("no_such_file.py:make")
    Traceback (most recent call last):
    ispasp.errors.InputError: no file no_such_file.py: pass path/to/file.py:factory
    """
    found = _FORM.fullmatch(text)
    path = Path(found["file"] if found else text).expanduser()
    if found is None or not path.is_file():
        raise InputError(f"no file {path}: pass path/to/file.py:factory")
    name, options = with_options(found["call"])
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as `python path/to/file.py` does, so that the file finds its neighbours
    try:
        model = _factory(_run(path), path, name, options)(**options)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise InputError(f"{where}: {type(error).__name__}: {error}: mend the file, then run this again") from error
    finally:
        sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise InputError(f"{text} returns {type(model).__name__}: it must return a torch.nn.Module")
    return model


def _factory(module: ModuleType, path: Path, name: str, options: Mapping[str, Any]) -> Any:
    """The function, if it is there and takes the options."""
    factory: Any = getattr(module, name, None)
    if not callable(factory):
        own = {key: value for key, value in vars(module).items() if callable(value)}
        found = [key for key, value in own.items() if getattr(value, "__module__", "") == module.__name__]
        raise InputError(f"{path} has no function {name!r}: it has {', '.join(found) or 'none'}")
    try:
        signature = inspect.signature(factory)
    except ValueError:  # a function in C does not tell
        return factory
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise InputError(f"{path}:{name}: {error}: its options are {takes}; pass {path}:{name}:KEY=VALUE") from None
    return factory


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ispasp_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported: pass a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look their module up
    spec.loader.exec_module(module)
    return module
