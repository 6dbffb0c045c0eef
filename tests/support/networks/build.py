"""Networks of recorded choices: drawn by hypothesis, or built again from what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from support.networks.net import Net
from support.networks.table import BATCH, VOCABULARY, Pick


@dataclass(frozen=True)
class Network:
    """A model in eval mode with a batch. `repr` is the call that makes it again."""

    seed: int
    choices: tuple[Any, ...]
    model: nn.Module = field(repr=False)
    batch: Any = field(repr=False)

    @property
    def stubborn(self) -> bool:
        """Whether sizes stand in the code of a forward, or follow from shapes in ways that suit some plans only."""
        return bool({"literal", "halves"}.intersection(map(str, self.choices)))

    def __repr__(self) -> str:
        names = [getattr(c, "__name__", c) for c in self.choices]
        return f"build({self.seed}, {names!r})"


def build(seed: int, choices: list[Any] | tuple[Any, ...]) -> Network:
    """The network of recorded choices; classes may be given by name."""
    left = iter(choices)

    def replay(*options: Any) -> Any:
        given = next(left)
        return next(option for option in options if given in (option, getattr(option, "__name__", option)))

    return _build(seed, replay)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Random networks; hypothesis shrinks towards few, plain blocks."""
    return _build(draw(st.integers(0, 99)), lambda *options: draw(st.sampled_from(options)))


def random_network(seed: int, choose: Pick) -> Network:
    """A network whose choices are made by `choose(*options)`, such as a random generator's."""
    return _build(seed, choose)


def again(network: Network) -> nn.Module:
    """The same model, built anew."""
    return build(network.seed, network.choices).model


def batch_for(network: Network, seed: int, examples: int) -> Any:
    """Another batch of this many examples, in float64 where it is not of ids."""
    with _doubles(seed):
        return _batch(network.model, examples)


def _build(seed: int, choose: Pick) -> Network:
    log: list[Any] = []

    def pick(*options: Any) -> Any:
        log.append(choose(*options))
        return log[-1]

    with _doubles(seed):
        model = Net(pick)
        _trained(model)
        batch = _batch(model)
    return Network(seed, tuple(log), model.eval(), batch)


@contextmanager
def _doubles(seed: int) -> Iterator[None]:
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _trained(model: nn.Module) -> None:
    """No parameter stays at its initial constant, and running statistics are not those of fresh layers."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2.0)


def _batch(model: Net, examples: int = BATCH) -> Any:
    def example() -> Tensor:
        if model.domain == "ids":
            return torch.randint(VOCABULARY, (examples, *model.example))
        return torch.randn(examples, *model.example)

    if model.inputs == "tensor":
        return example()
    pair = (example(), example())
    return pair if model.inputs == "tuple" else dict(zip("xy", pair, strict=True))
