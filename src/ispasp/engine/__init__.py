"""Run traced graphs, and turn activations into statistics."""

from ispasp.engine.sites import measure

__all__ = ["measure"]
