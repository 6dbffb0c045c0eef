"""The table of rules: importing this package fills it."""

from ispasp.graph.rules import contraction, creation, indexing, normalisation, pointwise, reduction, shape, spatial

__all__ = ["contraction", "creation", "indexing", "normalisation", "pointwise", "reduction", "shape", "spatial"]
