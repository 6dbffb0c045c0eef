"""Calibration: from activations to statistics."""

from ispasp.calibrate.measure import measure

__all__ = ["measure"]
