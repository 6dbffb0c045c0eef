"""Other searches of widths for a budget: `ispasp.prune(..., keep=ispasp.Macs(0.5), search="legr")`.

Importing this package makes "legr", "amc" and "meta" known. Their reward is the divergence of the pruned and refitted
network from the dense one, or a number of your own, where larger is better: `search=AMC(evaluate=accuracy)`.
"""

from ispasp_lab.search.amc import AMC
from ispasp_lab.search.legr import LeGR
from ispasp_lab.search.meta import MetaPruning

__all__ = ["AMC", "LeGR", "MetaPruning"]
