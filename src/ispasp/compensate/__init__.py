"""Compensation: refit what a consumer reads from the kept units, so that the output stays that of the dense network."""

from ispasp.compensate.solve import Fit, Sums, solve, sums_of

__all__ = ["Fit", "Sums", "solve", "sums_of"]
