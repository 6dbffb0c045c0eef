"""Networks of the zoo by name; the test is skipped where their package is missing."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest

from ispasp.integrations.torchvision import import_torchvision
from ispasp_lab import zoo
from ispasp_lab.zoo.case import Case


@cache
def _group(name: str) -> dict[str, Case]:
    return {case.name: case for case in zoo.cases(name)}


def case(name: str) -> Case:
    """Such as `torchvision/resnet18` or `plain/mlp`."""
    package = name.partition("/")[0]
    for needed in () if package == "plain" else ("torchvision", package):
        if find_spec(needed) is None:
            pytest.skip(f"needs {needed}: pip install 'ispasp[vision,transformers]'")
    if package != "plain":
        import_torchvision()
    return _group(package)[name]
