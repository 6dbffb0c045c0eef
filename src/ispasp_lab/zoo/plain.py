"""Networks of a few lines, one structure each: convolutions, branches, gates and parametrizations."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations

from . import layers, plain_attention
from .case import Case, case, image
from .layers import Branches, conv

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    layer.__name__.lower(): layer
    for layer in (
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
        *(nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Softplus, nn.Softsign),
        *(nn.Softshrink, nn.Hardshrink, nn.Tanhshrink, nn.LogSigmoid, nn.Dropout, nn.Identity),
    )
} | {
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "threshold": lambda: nn.Threshold(0.1, 0.2),
}


def _cnn(*middle: nn.Module, width: int = 16, head: nn.Module | None = None) -> nn.Sequential:
    """Return stem, `middle`, global average and classifier."""
    pool: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)]
    return nn.Sequential(conv(3, 16), *middle, *([head] if head else pool))


def _mlp(*middle: nn.Module, out: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), *middle, nn.Linear(out, 4))


def _around(activation: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: _mlp(activation())


def _se(width: int) -> nn.Module:
    squeeze = nn.Conv2d(width, width // 4, 1), nn.ReLU(), nn.Conv2d(width // 4, width, 1), nn.Sigmoid()
    return Branches(nn.Sequential(nn.AdaptiveAvgPool2d(1), *squeeze), join="mul", skip=True)


def _dense(width: int, growth: int, layers: int) -> list[nn.Module]:
    return [Branches(conv(width + growth * i, growth), join="cat", skip=True) for i in range(layers)]


def _old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


def _lenet() -> nn.Module:
    body = nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))


def _conv1d() -> nn.Module:
    conv = nn.Conv1d(4, 16, 3, padding=1), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(2)
    return nn.Sequential(*conv, nn.Conv1d(16, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))


def _conv3d() -> nn.Module:
    conv = nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2)
    return nn.Sequential(*conv, nn.Conv3d(16, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 4))


def _residual() -> nn.Module:
    plain = Branches(nn.Sequential(conv(16, 16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)), skip=True)
    inner = nn.Sequential(conv(16, 32, stride=2), nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32))
    shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, 2), nn.BatchNorm2d(32))
    return _cnn(plain, nn.ReLU(), Branches(inner, shortcut), nn.ReLU(), width=32)


_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "lenet": _lenet,
    "vgg_bn": lambda: _cnn(conv(16, 16), nn.MaxPool2d(2), conv(16, 32), nn.MaxPool2d(2), conv(32, 32), width=32),
    "densenet": lambda: _cnn(*_dense(16, 8, 3), conv(40, 20, 1), nn.AvgPool2d(2), *_dense(20, 8, 2), width=36),
    "unet": layers.UNet,
    "inception": lambda: _cnn(
        Branches(conv(16, 8, 1), nn.Sequential(conv(16, 8, 1), conv(8, 16)), conv(16, 8, 5), join="cat"),
        conv(32, 16, 1),
    ),
    "squeeze_excite": lambda: _cnn(conv(16, 32), _se(32), nn.Conv2d(32, 16, 1)),
    "depthwise": lambda: _cnn(conv(16, 48, 1), conv(48, 48, groups=48), nn.Conv2d(48, 16, 1), nn.BatchNorm2d(16)),
    "depthwise_multiplier": lambda: _cnn(conv(16, 32, groups=16), conv(32, 16, 1)),
    "grouped": lambda: _cnn(conv(16, 32, 1), conv(32, 32, groups=4), conv(32, 16, 1)),
    "channel_shuffle": lambda: _cnn(
        conv(16, 24, 1, groups=2), layers.Shuffle(2), conv(24, 24, groups=24), conv(24, 16, 1)
    ),
    "channel_shuffle_op": lambda: _cnn(conv(16, 24, 1, groups=2), nn.ChannelShuffle(2), conv(24, 16, 1, groups=2)),
    "pixel_shuffle": lambda: _cnn(conv(16, 32), nn.PixelShuffle(2), conv(8, 16)),
    "pixel_unshuffle": lambda: _cnn(conv(16, 8), nn.PixelUnshuffle(2), conv(32, 16)),
    "conv_transpose": lambda: _cnn(
        nn.ConvTranspose2d(16, 24, 2, 2),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.ConvTranspose2d(24, 16, 3, groups=2),
        nn.ReLU(),
    ),
    "group_norm": lambda: _cnn(conv(16, 32, norm=False), nn.GroupNorm(8, 32), nn.ReLU(), conv(32, 16)),
    "instance_norm": lambda: _cnn(conv(16, 32, norm=False), nn.InstanceNorm2d(32, affine=True), conv(32, 16)),
    "prelu": lambda: _cnn(nn.Conv2d(16, 24, 3), nn.PReLU(24), nn.Conv2d(24, 16, 3), nn.PReLU()),
    "glu": lambda: _cnn(nn.Conv2d(16, 48, 3, padding=1), nn.GLU(1), conv(24, 16)),
    "buffer": lambda: _cnn(nn.Conv2d(16, 24, 3), layers.Buffer(24), nn.ReLU(), conv(24, 16)),
    "residual": _residual,
    "two_producers": lambda: _cnn(Branches(conv(16, 24), conv(16, 24, 1)), conv(24, 16)),
    "split": layers.Split,
    "mean_pool": lambda: nn.Sequential(conv(3, 24), layers.Apply(lambda x: x.mean([2, 3])), nn.Linear(24, 4)),
    "pool_2x2": lambda: _cnn(
        head=nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 4))
    ),
    "weight_norm_conv": lambda: _cnn(parametrizations.weight_norm(nn.Conv2d(16, 24, 3)), nn.ReLU(), conv(24, 16)),
    "spectral_norm": lambda: _cnn(parametrizations.spectral_norm(nn.Conv2d(16, 24, 3)), nn.ReLU(), conv(24, 16)),
    "reflection_pad": lambda: _cnn(
        nn.ReflectionPad2d(1), nn.Conv2d(16, 24, 3), nn.ZeroPad2d(1), nn.ReLU(), conv(24, 16)
    ),
}

_VECTORS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)),
    "batch_norm_mlp": lambda: _mlp(nn.BatchNorm1d(32), nn.ReLU()),
    "layer_norm_between": lambda: nn.Sequential(
        _mlp(nn.LayerNorm(32), nn.ReLU()), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4)
    ),
    "rms_norm": lambda: nn.Sequential(
        nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4)
    ),
    "swiglu": lambda: layers.SwiGLU(fused=False),
    "swiglu_fused": lambda: layers.SwiGLU(fused=True),
    "glu_linear": lambda: _mlp(nn.GLU(), out=16),
    "weight_norm": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(16, 32)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(32, 4)),
    ),
    "weight_norm_old": lambda: nn.Sequential(
        _old_weight_norm(nn.Linear(16, 32)), nn.ReLU(), _old_weight_norm(nn.Linear(32, 4))
    ),
    "called_twice": layers.Twice,
    "own_parameters": layers.Bilinear,
    "maxout": lambda: _mlp(layers.Apply(lambda x: x.view(2, 16, 2).amax(-1)), out=16),
    "unflatten": lambda: _mlp(nn.Unflatten(1, (4, 8)), nn.ReLU(), nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), out=24),
    "softmax_mlp": lambda: _mlp(nn.Linear(32, 24), nn.Softmax(-1), nn.Linear(24, 32), nn.ReLU()),
}


def cases() -> list[Case]:
    """Return the plain cases, attention included."""
    two = lambda: (torch.randn(2, 3, 8, 8), torch.randn(2, 16))  # noqa: E731
    rows: list[tuple[str, Callable[[], nn.Module], Callable[[], Any]]] = [
        *((name, make, image(16)) for name, make in _IMAGES.items()),
        *((name, make, lambda: torch.randn(2, 16)) for name, make in _VECTORS.items()),
        *((f"activation_{name}", _around(make), lambda: torch.randn(2, 16)) for name, make in _ACTIVATIONS.items()),
        ("two_inputs", lambda: layers.TwoInputs(False), two),
        ("dict_output", lambda: layers.TwoInputs(True), two),
        ("lstm", lambda: layers.Recurrent(nn.LSTM), lambda: torch.randn(2, 6, 16)),
        ("gru", lambda: layers.Recurrent(nn.GRU), lambda: torch.randn(2, 6, 16)),
        ("conv1d", _conv1d, lambda: torch.randn(2, 4, 16)),
        ("conv3d", _conv3d, lambda: torch.randn(2, 3, 4, 8, 8)),
    ]
    return [case("plain", *row) for row in rows] + plain_attention.cases()
