"""The table of families: which ways their folders open."""

from __future__ import annotations

from pathlib import Path

import pytest

from ispasp_lab.benchmarks import families


@pytest.mark.long
def test_rows_and_page(tmp_path: Path) -> None:
    rows = list(families.run(["gpt2"]))
    assert [(row.pruned, row.way) for row in rows] == [("neurons", "plain"), ("neurons and heads", "code")]
    assert rows[0].note == "" and rows[1].note.startswith("GPT2Config cannot say the size of transformer.h.0.attn")
    families.write(rows, tmp_path / "page.md")
    assert f"| gpt2 | plain | code | {rows[1].note} |" in (tmp_path / "page.md").read_text()
    assert families.as_json(rows)[0]["family"] == "gpt2"


def test_the_page_in_the_docs_has_all_families() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results" / "families.md").read_text()
    names = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:]
    assert names == families.FAMILIES
