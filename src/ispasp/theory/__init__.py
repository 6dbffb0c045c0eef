"""The paper's theory as functions: first moments, compressibility, restricted isometry, error bounds.

Everything is computed on the CPU in float64. What is proved and where the paper errs: docs/theory.md.
"""

from ispasp.theory.bounds import lemma1, lemma2, theorem1, theorem2, theorem3, theorem3_as_printed
from ispasp.theory.compressibility import RowCompressibility, row_compressibility
from ispasp.theory.isometry import Assumption1, RestrictedIsometry, assumption1, restricted_isometry
from ispasp.theory.moments import Split, best_split, mu

__all__ = [
    "Assumption1",
    "RestrictedIsometry",
    "RowCompressibility",
    "Split",
    "assumption1",
    "best_split",
    "lemma1",
    "lemma2",
    "mu",
    "restricted_isometry",
    "row_compressibility",
    "theorem1",
    "theorem2",
    "theorem3",
    "theorem3_as_printed",
]
