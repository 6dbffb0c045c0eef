"""The paper's theory as functions: first moments, compressibility, restricted isometry, error bounds.

Everything is computed on the CPU in float64. What is proved and where the paper errs: docs/theory.md.
"""

from ispasp_lab.theory.bounds import lemma1 as lemma1
from ispasp_lab.theory.bounds import lemma2 as lemma2
from ispasp_lab.theory.bounds import theorem1 as theorem1
from ispasp_lab.theory.bounds import theorem2 as theorem2
from ispasp_lab.theory.bounds import theorem3 as theorem3
from ispasp_lab.theory.bounds import theorem3_as_printed as theorem3_as_printed
from ispasp_lab.theory.isometry import Assumption1 as Assumption1
from ispasp_lab.theory.isometry import RestrictedIsometry as RestrictedIsometry
from ispasp_lab.theory.isometry import assumption1 as assumption1
from ispasp_lab.theory.isometry import restricted_isometry as restricted_isometry
from ispasp_lab.theory.moments import RowCompressibility as RowCompressibility
from ispasp_lab.theory.moments import Split as Split
from ispasp_lab.theory.moments import best_split as best_split
from ispasp_lab.theory.moments import mu as mu
from ispasp_lab.theory.moments import row_compressibility as row_compressibility
