"""Networks of `support.nets` with their hidden dimensions written down for the naive procedure."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from support.naive import Reads, Written, whole
from support.nets import (
    CalledTwice,
    DenseNet,
    Encoder,
    Inception,
    Recurrent,
    ResidualMLP,
    ResNet,
    ViewChangedInPlace,
    alive,
    mlp,
)


def _batches(*shape: int, sizes: tuple[int, ...] = (4, 4)) -> Callable[[], list[Tensor]]:
    def make() -> list[Tensor]:
        g = torch.Generator().manual_seed(7)
        return [torch.randn(n, *shape, generator=g, dtype=torch.float64) for n in sizes]

    return make


_RESNET = (
    Reads("layer1.0.conv1", whole(("conv1", 6)), "layer1.0.bn1"),
    Reads("layer1.0.conv2", whole(("layer1.0.conv1", 7)), "layer1.0.bn2"),
    Reads("layer1.0.downsample.0", whole(("conv1", 6)), "layer1.0.downsample.1"),
    Reads("layer1.1.conv2", whole(("layer1.1.conv1", 9)), "layer1.1.bn2"),
    Reads("layer2.0.conv2", whole(("layer2.0.conv1", 10)), "layer2.0.bn2"),
)
_STREAMS = (
    *_RESNET[:3],
    Reads("layer1.1.conv1", whole(("layer1.0.conv2", 8)), "layer1.1.bn1"),
    _RESNET[3],
    Reads("layer2.0.conv1", whole(("layer1.0.conv2", 8)), "layer2.0.bn1"),
    _RESNET[4],
    Reads("layer2.0.downsample.0", whole(("layer1.0.conv2", 8)), "layer2.0.downsample.1"),
    Reads("fc", whole(("layer2.0.conv2", 6))),
)
_DENSE = [("stem", 6), ("convs.0", 5), ("convs.1", 5), ("convs.2", 5)]

NETWORKS: dict[str, Written] = {
    "mlp": Written(
        lambda: alive(mlp(6, 10, 8, 3)),
        _batches(6, sizes=(7, 4, 4, 1)),
        (Reads("2", whole(("0", 10))), Reads("4", whole(("2", 8)))),
    ),
    "resnet": Written(lambda: alive(ResNet()), _batches(3, 9, 9), _RESNET),
    "resnet, sizes of images differ": Written(
        lambda: alive(ResNet()), lambda: [*_batches(3, 9, 9)(), *_batches(3, 12, 7)()], _RESNET
    ),
    "streams": Written(
        lambda: alive(ResNet()),
        _batches(3, 9, 9),
        _STREAMS,
        {
            "layer1.0.conv2": ("layer1.0.conv2", "layer1.0.downsample.0", "layer1.1.conv2"),
            "layer2.0.conv2": ("layer2.0.conv2", "layer2.0.downsample.0"),
        },
        {"scope": "all"},
    ),
    "streams of an mlp": Written(
        lambda: alive(ResidualMLP()),
        _batches(5),
        (
            Reads("up.0", whole(("stem", 8))),
            Reads("down.0", whole(("up.0", 9))),
            Reads("up.1", whole(("stem", 8))),
            Reads("down.1", whole(("up.1", 9))),
            Reads("head", whole(("stem", 8))),
        ),
        {"stem": ("stem", "down.0", "down.1")},
        {"scope": "all"},
    ),
    "view changed in place": Written(
        lambda: alive(ViewChangedInPlace()),
        _batches(5),
        (Reads("b", whole(("a", 9))), Reads("c", whole(("a", 9))), Reads("d", whole(("b", 4)))),
        {"b": ("b", "c")},
        {"scope": "all"},
    ),
    "called twice": Written(
        lambda: alive(CalledTwice()),
        _batches(5),
        (
            Reads("e", whole(("first", 7))),
            Reads("shared", whole(("a", 9))),
            Reads("shared", whole(("a", 9)), call=1),
            Reads("c", whole(("shared", 8))),
            Reads("d", whole(("c", 6))),
        ),
        {"a": ("a", "b"), "shared": ("shared", "shared")},
        {"scope": "all"},
    ),
    "recurrent": Written(
        lambda: alive(Recurrent()),
        _batches(5),
        (Reads("step", whole(("a", 9))), Reads("step", whole(("a", 9)), call=1), Reads("c", whole(("a", 9)))),
        {"a": ("a", "step", "step")},
        {"scope": "all"},
    ),
    "inception": Written(
        lambda: alive(Inception()),
        _batches(3, 8, 8),
        (
            Reads("one", whole(("stem", 8))),
            Reads("reduce", whole(("stem", 8))),
            Reads("three", whole(("reduce", 6))),
            Reads("pooled", whole(("stem", 8))),
            Reads("head", whole(("one", 5), ("three", 7), ("pooled", 4))),
        ),
    ),
    "densenet": Written(
        lambda: alive(DenseNet()),
        _batches(3, 6, 6),
        (*(Reads(f"convs.{k}", whole(*_DENSE[: k + 1])) for k in range(3)), Reads("fc", whole(*_DENSE))),
    ),
    "heads": Written(
        lambda: alive(Encoder()),
        _batches(6, 12, sizes=(2, 2, 2, 2)),
        tuple(
            reads
            for k in range(2)
            for reads in (
                Reads(f"attention.{k}.out", whole((f"attention.{k}", 4), size=3)),
                Reads(f"down.{k}", whole((f"up.{k}", 10))),
            )
        ),
        {f"attention.{k}": tuple(f"attention.{k}.{part}" for part in "qkv") for k in range(2)},
    ),
}
