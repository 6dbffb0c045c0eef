"""Real data and real networks; where the files are absent, small ones made here walk the same paths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import ispasp
from ispasp.errors import InputError
from ispasp_lab import data, models
from ispasp_lab.accuracy import accuracy
from ispasp_lab.models.cifar_resnet import CifarResNet


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not data.available(name), reason=f"{name} is not in {data.data_folder()}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISPASP_DATA", str(tmp_path))
    return tmp_path


def write_npz(path: Path, *shape: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 7), ("test", 5)):
        arrays[f"x_{part}"] = random.integers(0, 256, (n, *shape), dtype=np.uint8)
        arrays[f"y_{part}"] = random.integers(0, 10, n, dtype=np.uint8)
    np.savez(path, **arrays)
    return arrays


@pytest.mark.parametrize("inside", ["", "data", "weights"])
def test_find_looks_in_three_places(folder: Path, inside: str) -> None:
    path = folder / inside / "a.bin"
    assert not data.available("a.bin")
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert data.available("a.bin")
    assert data.find("a.bin") == path


def test_a_missing_file_names_itself_the_folder_and_the_remedy(folder: Path) -> None:
    with pytest.raises(InputError, match="'cifar10.npz' is not in") as error:
        data.cifar10("test")
    assert str(folder) in str(error.value)
    assert "set ISPASP_DATA to a folder that holds it" in str(error.value)


def test_without_the_variable_the_cache_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISPASP_DATA", "")
    assert data.data_folder() == Path.home() / ".cache" / "ispasp"
    monkeypatch.delenv("ISPASP_DATA")
    assert data.data_folder() == Path.home() / ".cache" / "ispasp"


@pytest.mark.parametrize("part", ["train", "test"])
def test_cifar10_has_channels_first_and_imagenet_scale(folder: Path, part: str) -> None:
    arrays = write_npz(folder / "cifar10.npz", 32, 32, 3)
    x, y = data.cifar10(part)
    raw = arrays[f"x_{part}"]
    assert x[:].shape == (len(raw), 3, 32, 32)
    assert x[:].dtype == torch.float32
    assert y.tolist() == arrays[f"y_{part}"].tolist()
    expected = (raw[2, 4, 9] / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(x[2][:, 4, 9].numpy(), expected, rtol=1e-5)


def test_mnist_gains_a_channel(folder: Path) -> None:
    arrays = write_npz(folder / "mnist.npz", 28, 28)
    x, _ = data.mnist("test")
    assert x[:2].shape == (2, 1, 28, 28)
    np.testing.assert_allclose(float(x[1][0, 3, 5]), (arrays["x_test"][1, 3, 5] / 255 - 0.1307) / 0.3081, rtol=1e-5)


def test_reading_leaves_the_bytes_alone(folder: Path) -> None:
    write_npz(folder / "mnist.npz", 28, 28)
    x, _ = data.mnist("test")
    before = x.data.clone()
    torch.testing.assert_close(x[:], x[:], rtol=0, atol=0)
    assert torch.equal(x.data, before)
    assert torch.equal(x.subset([4, 0])[:], torch.stack([x[4], x[0]]))


def write_image(path: Path, size: tuple[int, int], colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_imagenet_mini_takes_the_class_from_the_folder_name(folder: Path) -> None:
    for number, colour in ((7, (255, 0, 0)), (12, (0, 255, 0)), (3, (0, 0, 255))):
        write_image(folder / f"imagenet-mini/val/{number:04}/0.png", (224, 224), colour)
    x, y = data.imagenet_mini("val")
    assert y.tolist() == [3, 7, 12]
    assert x[:].shape == (3, 3, 224, 224)
    brightest = x[:][:, :, 0, 0].argmax(1)
    assert brightest.tolist() == [2, 0, 1]
    assert torch.equal(x.subset([2])[:], x[2:3])
    assert torch.equal(x[2], x[2:3][0])


def test_a_folder_of_names_is_numbered_in_order_and_images_are_cut(tmp_path: Path) -> None:
    wide = Image.new("RGB", (600, 300), (0, 0, 0))
    wide.paste((255, 255, 255), (200, 0, 400, 300))  # the centre third
    (tmp_path / "n02").mkdir()
    wide.save(tmp_path / "n02/b.png")
    write_image(tmp_path / "n01/a.jpg", (230, 300), (9, 9, 9))
    (tmp_path / "n01/notes.txt").write_text("no image")
    x, y = data.image_folder(tmp_path)
    assert y.tolist() == [0, 1]
    assert x[:].shape == (2, 3, 224, 224)
    white = float((x[1] > 1.5).float().mean())
    assert white == pytest.approx(200 * 256 / 300 / 224, abs=0.02)
    assert bool((x[1][:, :, :20] < -1.5).all() and (x[1][:, :, -20:] < -1.5).all())  # black on both sides


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda f: data.mnist("val"), "part='val': choose 'train' or 'test'"),
        (lambda f: data.imagenet_mini("test"), "choose 'calibration' or 'val'"),
        (lambda f: data.image_folder(f / "none"), "is not a folder"),
        (data.image_folder, "has no sub-folder with"),
        (lambda f: list(data.batches(torch.ones(2), 0)), "pass a size of 1 or more"),
        (lambda f: CifarResNet(21), "depth of 6 n \\+ 2"),
        (lambda f: accuracy(nn.Identity(), torch.eye(2), torch.zeros(3)), "2 examples and 3 labels"),
        (lambda f: accuracy(nn.Identity(), torch.eye(0), torch.zeros(0)), "at least one"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(folder: Path, call, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=says):
        call(folder)


def test_an_npz_without_the_arrays_is_refused(folder: Path) -> None:
    np.savez(folder / "mnist.npz", x_test=np.zeros((1, 28, 28), np.uint8))
    with pytest.raises(InputError, match="has no array 'y_test': it holds \\['x_test'\\]"):
        data.mnist("test")


def test_batches_cover_everything_once_with_labels() -> None:
    x, y = torch.arange(10.0).reshape(5, 2), torch.arange(5)
    parts = list(data.batches(x, 2, y))
    assert torch.equal(torch.cat([a for a, _ in parts]), x)
    assert torch.equal(torch.cat([b for _, b in parts]), y)
    loader = DataLoader(data.Labelled(data.Pixels(torch.zeros(5, 1, 2, 2, dtype=torch.uint8), ((0.0,), (1.0,))), y), 2)
    assert [tuple(a.shape) for a, _ in loader] == [(2, 1, 2, 2), (2, 1, 2, 2), (1, 1, 2, 2)]


def test_accuracy_counts_in_eval_mode_and_restores_every_mode() -> None:
    model = nn.Sequential(nn.Dropout(1.0), nn.BatchNorm1d(3))
    model.train()
    model[1].eval()
    y = torch.tensor([0, 1, 2, 0, 0])
    assert accuracy(model, torch.eye(3).repeat(2, 1)[:5], y, 2) == pytest.approx(80.0)
    assert [m.training for m in (model, *model)] == [True, True, False]
    assert float(model[1].running_mean.abs().sum()) == 0.0


def test_accuracy_restores_the_mode_after_an_error() -> None:
    model = nn.Linear(3, 2).train()
    with pytest.raises(RuntimeError):
        accuracy(model, torch.ones(1, 4), torch.zeros(1))
    assert model.training


def test_weights_are_loaded_strictly(folder: Path) -> None:
    torch.manual_seed(0)
    weights = {k: t for k, t in CifarResNet(20).state_dict().items() if not k.endswith("num_batches_tracked")}
    save_file(weights, folder / "cifar10-resnet20.safetensors")
    model = models.resnet20()
    assert not model.training
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    del weights["layer2.1.bn2.running_var"]
    save_file(weights, folder / "cifar10-resnet20.safetensors")
    with pytest.raises(RuntimeError, match="layer2.1.bn2.running_var"):
        models.resnet20()


def test_the_shortcut_drops_pixels_and_adds_zeros() -> None:
    block = models.cifar_resnet.Block(2, 4, stride=2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(1, 2, 6, 6)
    y = block(x).detach()
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert float(y[:, [0, 3]].abs().sum()) == 0.0


@pytest.mark.parametrize(("depth", "blocks"), [(20, 9), pytest.param(56, 27, marks=pytest.mark.long)])
def test_every_block_has_its_hidden_dimension(depth: int, blocks: int) -> None:
    torch.manual_seed(0)
    found = ispasp.survey(CifarResNet(depth).eval(), torch.randn(2, 3, 32, 32), scope="blocks")
    expected = {f"layer{i}.{j}.conv1" for i in (1, 2, 3) for j in range(blocks // 3)}
    assert {d.name for d in found.dimensions} == expected
    assert all(d.consumers == (d.name.replace("conv1", "conv2"),) for d in found.dimensions)


@needs("cifar10.npz")
@needs("cifar10-resnet20.safetensors")
def test_pretrained_resnet20_knows_cifar10() -> None:
    x, y = data.cifar10("test")
    assert len(x) == len(y) == 10_000
    assert accuracy(models.resnet20(), x[:500], y[:500]) > 89  # 91.73 on all 10,000


@needs("mnist.npz")
def test_mnist_is_normalised() -> None:
    x, y = data.mnist("train")
    assert len(x) == len(y) == 60_000
    some = x[::20]
    assert abs(float(some.mean())) < 0.05
    assert abs(float(some.std()) - 1) < 0.05


@needs("imagenet-mini")
@needs("mobilenet_v2.pth")
def test_pretrained_mobilenet_knows_imagenet() -> None:
    x, y = data.imagenet_mini("val")
    assert sorted(y.tolist()) == list(range(1000))
    some = torch.arange(0, 1000, 25)
    assert accuracy(models.mobilenet_v2(), x.subset(some), y[some], 20) > 55  # 70.6 on all 1,000
