"""Files damaged at random are used or refused, and nothing else; `make fuzz-files` runs for as long as you like."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import given, settings, strategies as st

from support.files_fuzz import KINDS, one_case

_CASES = int(os.environ.get("ISPASP_FILE_CASES", "60"))


@settings(max_examples=_CASES)
@given(seed=st.integers(0, 2**63))
def test_a_damaged_file_is_used_or_refused(seed: int) -> None:
    assert one_case(seed).endswith((": read", ": refused"))


def test_every_kind_of_file_is_damaged_and_sometimes_survives() -> None:
    """The fuzzer reaches what lies behind the first check."""
    found = Counter(one_case(seed) for seed in range(100))
    for kind in KINDS:
        assert found[f"{kind.__name__}: refused"] > 3
    assert sum(number for outcome, number in found.items() if outcome.endswith("read")) > 10
