"""Random networks: chains of small blocks, written in the many ways that forwards are written in the wild.

A block is a module class whose constructor gets `pick` (choose one of some options) and the shape of one example. All
choices of a network are recorded, so `build(seed, choices)` makes it again: that line is a reproducer.
"""

from __future__ import annotations

from support.networks.build import Network, again, batch_for, build, networks, random_network
from support.networks.table import LEAVES, NESTED

# Importing fills the tables; hypothesis shrinks towards what stands first in them.
from support.networks import image, channels, convs, transformer, tokens, nested  # noqa: F401  # isort: skip

__all__ = ["LEAVES", "NESTED", "Network", "again", "batch_for", "build", "networks", "random_network"]
