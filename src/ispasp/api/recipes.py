"""Placeholder until the recipes land."""
from dataclasses import dataclass
@dataclass(frozen=True)
class Recipe:
    name: str
    keep: dict
