"""The MNIST experiment on made-up images: what it computes, resumes and writes."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ispasp.cli.app import app
from ispasp.errors import InputError
from ispasp_lab import reference
from ispasp_lab.experiments import mnist, mnist_network, mnist_report
from ispasp_lab.experiments.mnist import Row
from ispasp_lab.experiments.mnist_network import Digits, Settings, evaluate, network, outputs, smaller, weights
from ispasp_lab.experiments.mnist_prune import METHODS, Task, added_loss, choose

SETTINGS = Settings(hidden=30, epochs=1, finetune_epochs=1, prune_batch=40, iterations=4, examples=200)
SIZES = (3, 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with bars of light: the class is the place of the bar."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 240), ("test", 80)):
        y = random.integers(0, 10, n)
        x = random.integers(0, 60, (n, 28, 28), dtype=np.uint8)
        for image, label in zip(x, y, strict=True):
            image[2 * label : 2 * label + 4] += 180
        arrays |= {f"x_{part}": x, f"y_{part}": y.astype(np.uint8)}
    np.savez(tmp_path / "mnist.npz", **arrays)
    monkeypatch.setenv("ISPASP_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(90, 12, generator=generator), torch.randint(4, (90,), generator=generator)
    settings = replace(SETTINGS, hidden=15, examples=90)
    return Task(network(12, 15, 4, seed=1), Digits(x, y, x[:50], y[:50]), settings, trial=0)


def test_images_are_flat_and_labels_kept(folder: Path) -> None:
    data = Digits.load(200)
    assert data.x.shape == (200, 784)
    assert data.x_test.shape == (80, 784)
    with np.load(folder / "mnist.npz") as arrays:
        assert data.y.tolist() == arrays["y_train"][:200].tolist()


def test_adding_a_unit_costs_what_the_smaller_network_costs(task: Task) -> None:
    kept = torch.zeros(15, dtype=torch.bool)
    kept[[2, 7, 11]] = True
    tried = torch.nonzero(~kept).flatten()[1:]
    found = added_loss(task)(kept, tried, 5)
    generator = torch.Generator().manual_seed(5)  # seed 0, trial 0, step 5
    index = torch.randperm(90, generator=generator)[:40]
    for unit, loss in zip(tried.tolist(), found.tolist(), strict=True):
        net = smaller(task.net, sorted([2, 7, 11, unit]))
        expected = nn.functional.cross_entropy(net(task.data.x[index]), task.data.y[index]).detach()
        assert loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("fresh", [True, False])
def test_ispasp_is_the_papers_algorithm_on_the_same_mini_batches(task: Task, fresh: bool) -> None:
    task = replace(task, settings=replace(task.settings, fresh=fresh))
    W1 = weights(task.net)[1].double()
    Hs = [task.minibatch(t if fresh else 0)[0].double().T for t in range(4)]
    for s, choice in zip((2, 5), choose("ispasp", task, (2, 5)), strict=True):
        assert list(choice.kept) == reference.algorithm1_minibatch(Hs, W1, s=s)[-1]


def test_topk_takes_the_largest_activations_of_one_mini_batch(task: Task) -> None:
    total = task.minibatch(0)[0].sum(0)
    (choice,) = choose("topk", task, [4])
    assert set(choice.kept) == set(total.topk(4).indices.tolist())


def test_gfs_serves_all_sizes_from_one_growth(task: Task) -> None:
    small, large = choose("gfs", task, (3, 6))
    assert set(small.kept) < set(large.kept)
    assert 0 < small.seconds <= large.seconds
    (alone,) = choose("gfs", task, [3])
    assert alone.kept == small.kept


def test_mini_batches_are_new_in_each_step_and_trial(task: Task) -> None:
    H, y = task.minibatch(0)
    assert H.shape == (40, 15)
    assert torch.equal(task.minibatch(0)[1], y)
    assert not torch.equal(task.minibatch(1)[0], H)
    assert not torch.equal(replace(task, trial=1).minibatch(0)[0], H)


def test_a_smaller_network_equals_masking(task: Task) -> None:
    kept = [1, 4, 9]
    mask = torch.zeros(15)
    mask[kept] = 1.0
    W0, W1 = weights(task.net)
    masked = torch.relu(task.data.x @ W0.T) * mask @ W1.T
    torch.testing.assert_close(outputs(smaller(task.net, kept), task.data.x), masked)
    right, loss = evaluate(task.net, task.data)
    y = task.net(task.data.x_test).detach()
    assert right == pytest.approx(100 * float((y.argmax(1) == task.data.y_test).float().mean()))
    assert loss == pytest.approx(float(nn.functional.cross_entropy(y, task.data.y_test)), rel=1e-5)


def without_time(rows: list[Row]) -> list[Row]:
    return [replace(row, pruning_s=0.0) for row in rows]


def test_a_run_fills_the_grid_and_is_not_made_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = folder / "out"
    rows = mnist.run(SETTINGS, out, SIZES, trials=2, progress=False)
    assert len(rows) == 2 * (1 + 4 * len(SIZES) * 2)
    assert {row.method for row in rows} == {"dense", *METHODS}
    assert all(row.finetuned_accuracy is not None for row in rows if row.method != "dense")
    nets = sorted(out.glob("mnist-dense-*.safetensors"))
    assert len(nets) == 2
    assert not list(out.glob("*.checkpoint"))

    monkeypatch.setattr(mnist_network, "finetune", lambda *_, **__: pytest.fail("trained again"))
    again = mnist.run(SETTINGS, out, SIZES, trials=2, progress=False)
    assert again == rows


def test_what_is_missing_is_made_and_comes_out_the_same(folder: Path) -> None:
    out, methods = folder / "out", ("ispasp", "gfs")
    rows = mnist.run(SETTINGS, out, SIZES, [0.1], methods, trials=1, progress=False)
    table = out / "mnist.csv"
    lines = table.read_text().splitlines()
    assert len(lines) == 1 + len(rows)
    table.write_text("\n".join([lines[0], *(line for line in lines[1:] if ",gfs,8," not in line)]) + "\n")
    (net,) = out.glob("mnist-dense-*")
    written = net.stat().st_mtime_ns
    again = mnist.run(SETTINGS, out, SIZES, [0.1], methods, trials=1, progress=False)
    assert net.stat().st_mtime_ns == written
    assert without_time(again) == without_time(rows)
    more = mnist.run(SETTINGS, out, (3, 5, 8), [0.1], methods, trials=1, progress=False)
    assert len(table.read_text().splitlines()) == 1 + len(more) == 1 + 1 + 2 * 3


def test_other_settings_share_the_file_but_not_the_rows(folder: Path) -> None:
    out = folder / "out"
    mnist.run(SETTINGS, out, [3], [0.1], ["topk"], trials=1, progress=False)
    other = replace(SETTINGS, finetune_epochs=2)
    rows = mnist.run(other, out, [3], [0.1], ["topk"], trials=1, progress=False)
    assert {row.settings for row in rows} == {str(other)}
    assert len(mnist.read(out / "mnist.csv")) == 4
    assert len(list(out.glob("mnist-dense-*"))) == 1  # fine-tuning does not change the dense network
    mnist.run(replace(SETTINGS, lr=0.5), out, [3], [0.1], ["topk"], trials=1, progress=False)
    assert len(list(out.glob("mnist-dense-*"))) == 2


def test_training_learns_and_trials_differ(folder: Path) -> None:
    data = Digits.load(200)
    settings = replace(SETTINGS, epochs=8, lr=0.02)
    nets = [mnist_network.dense(settings, data, trial, folder / "out", progress=False) for trial in (0, 1)]
    assert all(evaluate(net, data)[0] > 80 for net in nets)
    assert not torch.equal(*(weights(net)[0] for net in nets))
    loaded = mnist_network.dense(settings, data, 0, folder / "out", progress=False)
    assert torch.equal(weights(loaded)[1], weights(nets[0])[1])
    mixed = mnist_network.dense(replace(settings, precision="bf16"), data, 0, folder / "out", progress=False)
    assert evaluate(mixed, data)[0] > 80
    assert not torch.equal(weights(mixed)[1], weights(nets[0])[1])
    assert str(replace(settings, precision="bf16")) == f"{settings} precision=bf16"


def made_up(best_before: str, best_after: str) -> list[Row]:
    rows = [Row("", trial, "dense", 99, 0.0, 0.0, 98.0, 0.1) for trial in (0, 1)]
    for trial in (0, 1):
        for method in METHODS:
            for size in (5, 10):
                before = 80.0 + trial + 9 * (method == best_before)
                after = 90.0 + trial + 9 * (method == best_after)
                rows.append(Row("", trial, method, size, 1.0, 0.5, before, 1.0, 0.01, after, 0.5))
    return rows


def test_the_text_says_where_it_agrees_with_the_paper() -> None:
    text = mnist_report.summary(made_up("gfs", "ispasp"), SETTINGS, "ispasp reproduce mnist")
    assert text.count("- Agrees: ") == 2
    assert "**89.50 ± 0.71**" in text
    text = mnist_report.summary(made_up("topk", "random"), SETTINGS, "ispasp reproduce mnist")
    assert "Disagrees: GFS is best before fine-tuning" in text
    assert "i-SpaSP at 2 of 2 sizes before fine-tuning, at 2 of 2 sizes fine-tuned with lr 0.01" in text
    assert "(within the spread)" in text  # only the random draw is better, and it is no method of the paper


def test_a_lead_counts_only_beyond_the_spread() -> None:
    rows = made_up("gfs", "")
    assert mnist_report.winner(rows, 5, None) == mnist_report.Winner("gfs", 9.0, clear=True)
    assert not mnist_report.winner(rows, 5, 0.01).clear
    assert mnist_report.accuracies(rows, "gfs", 5, None).mean == pytest.approx(89.5)


def test_quick_on_the_command_line_writes_three_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "QUICK", SETTINGS)
    monkeypatch.setattr(mnist, "QUICK_SIZES", SIZES)
    out = folder / "out"
    done = CliRunner().invoke(app, ["reproduce", "mnist", "--quick", "--seed", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "`ispasp reproduce mnist --quick --seed 3`" in done.output
    assert (out / "mnist.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "mnist.md").read_text(encoding="utf-8")
    assert str(folder) not in text
    assert re.search(r"\| 8 \| .* ± ", text)
    with (out / "mnist.csv").open() as file:
        assert {line["trial"] for line in csv.DictReader(file)} == {"0", "1"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sizes": [0]}, r"sizes=\[0\]: pass numbers of units to keep, from 1 to 30"),
        ({"sizes": [31]}, r"sizes=\[31\]"),
        ({"rates": []}, "pass different learning rates"),
        ({"methods": ["magic"]}, "choose from ispasp, gfs, topk, random"),
        ({"trials": 0}, "trials=0"),
        ({"settings": replace(SETTINGS, examples=241)}, "MNIST has 240 training examples"),
    ],
)
def test_bad_input_is_refused(folder: Path, changes: dict[str, object], says: str) -> None:
    arguments = {"settings": SETTINGS, "folder": folder / "out", "sizes": SIZES, "progress": False} | changes
    with pytest.raises(InputError, match=says):
        mnist.run(**arguments)  # type: ignore[arg-type]


def test_a_table_of_something_else_is_not_overwritten(folder: Path) -> None:
    (folder / "mnist.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="choose another folder"):
        mnist.run(SETTINGS, folder, SIZES, progress=False)
