"""The table of runtimes: every network is pruned by both plans, and what does not run says why."""

from __future__ import annotations

import pytest

from ispasp.errors import InputError
from ispasp_lab.benchmarks import runtimes


def test_both_plans_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: runtimes.Job) -> tuple[float, None]:
        raise ValueError("no such | op")

    monkeypatch.setitem(runtimes.RUNTIMES, "OpenVINO", ("torch", refuse))
    monkeypatch.setitem(runtimes.RUNTIMES, "ExecuTorch", ("a_package_that_is_absent", refuse))
    rows = runtimes.run(["plain/mlp"], ["torch.export", "OpenVINO", "ExecuTorch"], progress=False)
    assert [row.plan for row in rows] == ["uniform"] * 3 + ["mixed"] * 3
    for export, refused, absent in (rows[:3], rows[3:]):
        assert export.error is not None and export.error < 1e-5
        assert (refused.error, refused.reason) == (None, "no such | op")
        assert absent.reason.startswith("not installed: ")
    page = runtimes.as_markdown(rows)
    assert "`ispasp bench runtimes --network plain/mlp --out" in page
    assert "no such \\| op" in page


@pytest.mark.parametrize(("networks", "names", "text"), [(["no/such"], [], "no 'no/such'"), ([], ["x"], "runtime 'x'")])
def test_unknown_names(networks: list[str], names: list[str], text: str) -> None:
    with pytest.raises(InputError, match=text):
        runtimes.run(networks, names, progress=False)
