"""The networks that the library is tried on: small, seeded, randomly initialised, nothing downloaded."""

from . import language, plain, timm_models, vision
from .case import Case

__all__ = ["Case", "cases"]


def cases(group: str | None = None) -> list[Case]:
    """Return every case, or those of one group: `plain`, `torchvision`, `timm` or `transformers`."""
    makers = (plain.cases, vision.cases, timm_models.cases, language.cases)
    return [case for make in makers for case in make() if group in (None, case.group)]
