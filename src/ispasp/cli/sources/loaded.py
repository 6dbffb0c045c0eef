"""A model that the command line has built, and what is known about what it reads."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ispasp.cli.sources.preprocessing import IMAGENET, Preprocessing
from ispasp.errors import InputError
from ispasp.types.plan import Plan


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in eval mode. `spec` is what was typed; `warnings` are sentences that the user must see."""

    model: nn.Module
    spec: str
    input_size: tuple[int, ...] | None = None  # of one example, where it is known
    preprocessing: Preprocessing = IMAGENET
    tokenizer: str = ""  # folder or name that a tokenizer may be loaded from
    warnings: tuple[str, ...] = ()
    plan: Plan | None = None  # of a pruned model
    names: tuple[str, ...] = ()  # of the outputs, where they are known

    @property
    def keyword(self) -> str:
        """The name of the main input of a Hugging Face model; empty for all others."""
        return str(getattr(self.model, "main_input_name", "")) if self.config is not None else ""

    @property
    def config(self) -> Any:
        """The config of a Hugging Face model, None for all others."""
        return getattr(self.model, "config", None) if hasattr(self.model, "main_input_name") else None

    def call(self, x: Tensor) -> Any:
        """The input as the model takes it: in its precision, by keyword if it is a Hugging Face model.

        >>> import torch
        >>> Loaded(nn.Identity(), "").call(torch.ones(2)).shape
        torch.Size([2])
        """
        kind = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), x.dtype)
        x = x.to(kind) if x.is_floating_point() else x
        return self.complete({self.keyword: x}) if self.keyword else x

    @property
    def reads_text(self) -> bool:
        """Whether it is known to take tokens, which only Hugging Face models tell."""
        return self.keyword in ("input_ids", "decoder_input_ids")

    def complete(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add what a forward wants beside its main input: a decoder's, and that it need not remember the past."""
        parameters = self.parameters
        if "use_cache" in parameters:
            batch["use_cache"] = False
        if getattr(self.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            batch.setdefault("decoder_input_ids", batch[self.keyword])
        return batch

    @property
    def longest(self) -> int:
        """How many tokens a text may have, as far as the config tells."""
        told = getattr(self.config, "max_position_embeddings", None)
        return told if isinstance(told, int) and told > 0 else sys.maxsize

    @property
    def parameters(self) -> set[str]:
        """The names that the forward takes."""
        return set(inspect.signature(self.model.forward).parameters)


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split `name:key=value,key=value`; values are JSON where they can be, else text.

    >>> with_options("resnet18:num_classes=10,zero_init_residual=true")
    ('resnet18', {'num_classes': 10, 'zero_init_residual': True})
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(f"{text!r}: {item!r} is no option; write name:key=value,key=value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return name, options
