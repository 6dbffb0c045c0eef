"""Models under accelerate's hooks: pruned inside `materialised`, they equal the plain model pruned alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch import Tensor, nn
from torch.testing import assert_close

import ispasp
from ispasp.errors import InputError
from ispasp.integrations.offload import materialised

pytestmark = pytest.mark.filterwarnings("ignore:The following device_map keys")  # tensors at the top are no submodules


class Net(nn.Module):
    """Convolutions with BatchNorm, attention, weights that are tied, and a parameter and a buffer at the top."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, stride=2)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.up, self.down = nn.Linear(12, 16, bias=False), nn.Linear(16, 12)
        self.again = nn.Linear(12, 16, bias=False)
        self.again.weight = self.up.weight
        self.gain = nn.Parameter(torch.rand(12))
        self.register_buffer("shift", torch.rand(12))
        self.register_buffer("twist", torch.rand(12), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.norm(self.conv1(x)).relu()).flatten(2).mT
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.shift * self.twist
        return self.down(self.up(x).relu() * self.again(x * self.gain).relu())


def network() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    net.norm.running_mean.normal_()
    net.norm.running_var.uniform_(0.5, 2.0)
    return net


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


@cache
def pruned(*keeps: float) -> tuple[nn.Module, list[ispasp.Plan]]:
    """The plain network pruned several times, and the plans."""
    net, plans = network(), []
    for keep in keeps:
        plans.append(ispasp.survey(net, X).plan(keep))
        ispasp.apply_(net, plans[-1], X)
    return net, plans


@pytest.fixture
def net() -> Net:
    return network()


@pytest.fixture
def x() -> Tensor:
    return X


PRELOAD = ["MultiheadAttention"]  # reads the weights of its child without calling it
MAP = dict.fromkeys(("conv1", "up", "again", "gain", "shift", "twist"), "cpu")
MAP |= dict.fromkeys(("norm", "conv2", "attention", "down"), "disk")
# A device that is not the string "cpu" counts as an accelerator, so what the map puts on "cpu" is offloaded to memory.
ACCELERATOR = torch.device("cpu")

Offload = Callable[[nn.Module, Path], Any]
WAYS: dict[str, Offload] = {
    "cpu": lambda model, folder: cpu_offload(model, "cpu", preload_module_classes=PRELOAD),
    "cpu with buffers": lambda model, folder: cpu_offload(
        model, "cpu", offload_buffers=True, preload_module_classes=PRELOAD
    ),
    "disk": lambda model, folder: disk_offload(model, folder, "cpu", preload_module_classes=PRELOAD),
    "disk with buffers": lambda model, folder: disk_offload(
        model, folder, "cpu", offload_buffers=True, preload_module_classes=PRELOAD
    ),
    "map to disk": lambda model, folder: dispatch_model(
        model, dict.fromkeys(MAP, "disk"), offload_dir=folder, preload_module_classes=PRELOAD
    ),
    "map to cpu and disk": lambda model, folder: dispatch_model(
        model, MAP, offload_dir=folder, preload_module_classes=PRELOAD
    ),
    "map to memory and disk": lambda model, folder: dispatch_model(
        model, MAP, main_device=ACCELERATOR, offload_dir=folder, preload_module_classes=PRELOAD
    ),
    "map to one device": lambda model, folder: dispatch_model(model, {"": "cpu"}, force_hooks=True),
}


def hooks_of(model: nn.Module) -> dict[str, str]:
    """Hooks by path, and in them all that does not depend on weights; whether accelerate guards `to`."""

    def shown(hook: Any) -> str:
        return " ".join(map(shown, hook.hooks)) if hasattr(hook, "hooks") else repr(hook)

    found = {path: shown(module._hf_hook) for path, module in model.named_modules() if hasattr(module, "_hf_hook")}
    return found | ({"guarded": "to"} if "to" in vars(model) else {})


def on_meta(model: nn.Module) -> set[str]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name for name, tensor in tensors if tensor.is_meta}


def prune_(model: nn.Module) -> None:
    (plan,) = pruned(0.5)[1]
    ispasp.apply_(model, plan)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("way", WAYS)
def test_a_pruned_model_is_offloaded_again(net: Net, x: Tensor, tmp_path: Path, way: str) -> None:
    plain, _ = pruned(0.5)
    dense = net(x)
    model = WAYS[way](net, tmp_path)
    before, files, hooks = on_meta(model), contents(tmp_path), hooks_of(model)
    assert bool(before) == (way != "map to one device")
    assert_close(model(x), dense)
    with materialised(model) as changed:
        assert changed
        assert not on_meta(model)
        assert not hooks_of(model)
        assert torch.equal(model(x), dense)
        if "disk" not in way or way == "map to cpu and disk":
            assert model.up.weight is model.again.weight  # tied, as before
        prune_(model)
    assert plain.conv1.out_channels == model.conv1.out_channels == 4
    assert plain.attention.num_heads == model.attention.num_heads == 2
    for _ in range(2):  # a forward loads and drops the weights
        assert_close(model(x), plain(x))
        assert on_meta(model) == before
    assert hooks_of(model) == hooks
    assert contents(tmp_path) == files  # a copy of the dense model may need them
    for name, tensor in model.state_dict().items():
        assert tensor.shape == plain.state_dict()[name].shape


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_leaves_a_working_model(net: Net, x: Tensor, tmp_path: Path, way: str) -> None:
    dense = net(x)
    model = WAYS[way](net, tmp_path)
    before, hooks = on_meta(model), hooks_of(model)
    with pytest.raises(KeyError, match="boom"), materialised(model):
        raise KeyError("boom")
    assert torch.equal(model(x), dense)
    assert (on_meta(model), hooks_of(model)) == (before, hooks)
    with pytest.raises(KeyboardInterrupt), materialised(model):
        with torch.no_grad():
            model.down.bias += 1
        raise KeyboardInterrupt
    assert_close(model(x), dense + 1)  # with the values as they are
    assert (on_meta(model), hooks_of(model)) == (before, hooks)


@pytest.mark.parametrize("way", ["cpu", "disk", "map to memory and disk"])
def test_pruning_twice_and_a_copy(net: Net, x: Tensor, tmp_path: Path, way: str) -> None:
    dense = net(x)
    first = WAYS[way](net, tmp_path)
    model = copy.deepcopy(first)
    for keeps in ((0.75,), (0.75, 0.5)):
        plain, plans = pruned(*keeps)
        with materialised(model):
            ispasp.apply_(model, plans[-1])
        assert_close(model(x), plain(x))
    assert torch.equal(first(x), dense)


def test_dense_weights_in_memory_are_let_go(net: Net, x: Tensor, tmp_path: Path) -> None:
    model = WAYS["map to memory and disk"](net, tmp_path)
    with materialised(model):
        prune_(model)
    hooks = [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]
    maps = [hook.weights_map for hook in hooks if hook.offload]
    assert maps
    assert not any(value.shape == (16, 12) for weights in maps for value in weights.values())


@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_a_layer_may_gain_a_bias(net: Net, x: Tensor, tmp_path: Path, way: str) -> None:
    model = WAYS[way](net, tmp_path)
    with materialised(model):
        model.again.bias = nn.Parameter(torch.full((16,), 0.5))
        expected = model(x)
    assert "again.bias" in on_meta(model)
    assert torch.equal(model(x), expected)


def test_a_checkpoint_that_a_model_borrows_stays_as_it_is(net: Net, x: Tensor, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    net.again = nn.Linear(12, 16, bias=False)  # safetensors holds no tied weights
    plan = ispasp.survey(net, x).plan(0.5)
    plain, file = ispasp.apply_(copy.deepcopy(net), plan), tmp_path / "checkpoint.safetensors"
    save_file(net.state_dict(), file)
    index = {name: {"safetensors_file": str(file), "weight_name": name} for name in net.state_dict()}
    model: nn.Module = dispatch_model(net, {"": "disk"}, offload_index=index, preload_module_classes=PRELOAD)
    saved = file.read_bytes()
    with materialised(model):
        ispasp.apply_(model, plan, x)
    assert_close(model(x), plain(x))
    assert on_meta(model)
    assert file.read_bytes() == saved
    assert list(tmp_path.iterdir()) == [file]


def test_a_module_that_is_used_twice_has_two_names(x: Tensor) -> None:
    layer = nn.Conv2d(3, 3, 1)
    model = cpu_offload(nn.Sequential(layer, nn.ReLU(), layer), "cpu")
    expected = model(x)
    with materialised(model):
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)
    assert layer.weight.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = disk_offload(nn.Linear(3, 4).to(dtype), tmp_path, "cpu")
    with materialised(model), torch.no_grad():
        model.weight.fill_(torch.nan)
        model.bias.copy_(torch.tensor([1, 2, 3, 4]))
    with materialised(model):
        assert model.weight.dtype == dtype
        assert model.weight.isnan().all()
        assert model.bias.tolist() == [1, 2, 3, 4]


def test_other_hooks_are_put_back_too(net: Net, x: Tensor) -> None:
    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            Count.calls += 1
            return args, kwargs

    model = WAYS["cpu"](net, Path())
    add_hook_to_module(model, Count(), append=True)
    model(x)
    with materialised(model):
        model(x)
    model(x)
    assert Count.calls == 2
    remove_hook_from_submodules(model)
    assert not on_meta(model)
    model(x)


def test_a_plain_model_is_left_alone(net: Net, x: Tensor) -> None:
    before = dict(vars(net))
    weight = net.up.weight
    with materialised(net) as changed:
        assert not changed
    assert dict(vars(net)) == before
    assert net.up.weight is weight


def test_a_model_without_weights_is_refused(net: Net) -> None:
    model = cpu_offload(net, "cpu", preload_module_classes=PRELOAD)
    model.lost = nn.Linear(2, 2, device="meta")
    hooks = hooks_of(model)
    with pytest.raises(InputError, match="'lost.weight' is on the meta device"), materialised(model):
        pass
    assert hooks_of(model) == hooks
