"""What users may choose from, as types: help, completion and refusals come with them."""

from __future__ import annotations

from enum import Enum

from ispasp.api.recipes import recipes
from ispasp.api.survey import KINDS
from ispasp.select import methods


class Compensate(str, Enum):
    """Of `ispasp.prune(compensate=...)`; none is its None."""

    dense = "dense"
    local = "local"
    none = "none"


class Order(str, Enum):
    """Of `ispasp.prune(order=...)`."""

    sequential = "sequential"
    oneshot = "oneshot"
    everywhere = "global"


class Refit(str, Enum):
    """Of `ispasp.prune(refit=...)`."""

    consumers = "consumers"
    everything = "all"


class Scope(str, Enum):
    """Of `ispasp.prune(scope=...)`."""

    blocks = "blocks"
    everything = "all"


class Optimizer(str, Enum):
    """How to train."""

    sgd = "sgd"
    adamw = "adamw"


class Precision(str, Enum):
    """In what to train, beside full precision."""

    bf16 = "bf16"
    fp16 = "fp16"


class Task(str, Enum):
    """What a Hugging Face model is for; `TASKS` has the class of each."""

    features = "features"
    causal_lm = "causal-lm"
    masked_lm = "masked-lm"
    seq2seq_lm = "seq2seq-lm"
    sequence_classification = "sequence-classification"
    token_classification = "token-classification"  # noqa: S105
    question_answering = "question-answering"
    image_classification = "image-classification"
    audio_classification = "audio-classification"


def complete_method(begun: str) -> list[str]:
    """Methods that start so.

    >>> complete_method("isp")
    ['ispasp']
    """
    return [name for name in methods() if name.startswith(begun)]


def complete_recipe(begun: str) -> list[str]:
    """Recipes that start so."""
    return [name for name in recipes if name.startswith(begun)]


def complete_kinds(begun: str) -> list[str]:
    """Kinds of units, after those that are there already.

    >>> complete_kinds("neuron,h")
    ['neuron,head']
    """
    before, comma, last = begun.rpartition(",")
    return [f"{before}{comma}{kind}" for kind in KINDS if kind.startswith(last)]
