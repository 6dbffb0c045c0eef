"""The paper's theory as functions: first moments, compressibility, restricted isometry, error bounds.

Everything is computed on the CPU in float64. What is proved and where the paper errs: docs/theory.md.
"""

from ispasp_lab.theory.bounds import (
    lemma1 as lemma1,
    lemma2 as lemma2,
    theorem1 as theorem1,
    theorem2 as theorem2,
    theorem3 as theorem3,
    theorem3_as_printed as theorem3_as_printed,
)
from ispasp_lab.theory.isometry import (
    Assumption1 as Assumption1,
    RestrictedIsometry as RestrictedIsometry,
    assumption1 as assumption1,
    restricted_isometry as restricted_isometry,
)
from ispasp_lab.theory.moments import (
    RowCompressibility as RowCompressibility,
    Split as Split,
    best_split as best_split,
    mu as mu,
    row_compressibility as row_compressibility,
)
