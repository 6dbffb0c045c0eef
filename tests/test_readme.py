"""README, Makefile and CI say the same, the README's Python examples run, and what the docs name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ispasp.integrations.torchvision import import_torchvision

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/guide.md", "docs/theory.md", "docs/vision.md", "docs/language-models.md"]
)
def test_the_examples_run(page: str) -> None:
    examples = blocks(ROOT / page, "python")
    assert examples
    import_torchvision()  # transformers looks for it
    namespace: dict[str, object] = {}
    for example in examples:
        exec(compile(example, page, "exec"), namespace)  # noqa: S102
    assert {"ispasp", "theory"} & set(namespace)


def test_the_readme_opens_with_two_commands_that_make_has() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(make \w+)", blocks(ROOT / "README.md", "bash")[0], flags=re.MULTILINE)
    assert commands == ["make demo", "make test"]
    assert readme.index("make demo") < 200
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{command.split()[1]}:" in makefile for command in commands)
    assert "make test\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for target in re.findall(r"`((?:src|tests|docs)/[\w/.-]+)`", text):
        assert (ROOT / target).exists(), f"{page.name} names {target}"
    for file, test in re.findall(r"`(tests/[\w/.-]+\.py)::(\w+)`", text):
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{page.name} names {file}::{test}"


def test_the_readme_tells_what_the_coverage_table_says() -> None:
    coverage = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    found = re.search(r"^\| all \| (\d+) \| (\d+) \|", coverage, flags=re.MULTILINE)
    assert found is not None
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"on {found[1]} networks" in readme
    assert f"[{found[2]} shrink" in readme
