"""Pruning procedures that look at more than one hidden dimension at a time, or train: each ends in a plan.

A selector sees the statistics of one hidden dimension. NISP propagates importance through the whole network, SNIP and
GraSP take gradients of all weights at once, discrimination-aware pruning and early-bird tickets train. So they are
functions of a model here.
"""

from ispasp_lab.procedures.discrimination import Growth, discrimination_aware
from ispasp_lab.procedures.early_bird import EarlyBird, early_bird
from ispasp_lab.procedures.gradients import grasp, snip
from ispasp_lab.procedures.nisp import nisp

__all__ = ["EarlyBird", "Growth", "discrimination_aware", "early_bird", "grasp", "nisp", "snip"]
