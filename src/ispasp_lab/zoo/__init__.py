"""The networks that the library is tried on: small, seeded, randomly initialised, nothing downloaded."""

from . import language, plain, timm_models, vision
from .case import Case

__all__ = ["GROUPS", "Case", "cases"]

GROUPS = {
    "plain": plain.cases,
    "torchvision": vision.cases,
    "timm": timm_models.cases,
    "transformers": language.cases,
}


def cases(*groups: str) -> list[Case]:
    """Return the cases of the named groups, or of all.

    Only `torchvision` imports its package to be listed; the others do so when a case is built.
    """
    return [case for group in groups or GROUPS for case in GROUPS[group]()]
