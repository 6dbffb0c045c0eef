"""The networks of `ispasp bench accuracy`: what each is calibrated, healed and scored on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ispasp._heal import Heal
from ispasp.graph.trace import evaluating
from ispasp_lab.accuracy import accuracy
from ispasp_lab.benchmarks.classify import sample
from ispasp_lab.data import batches, cifar10, imagenet_mini
from ispasp_lab.data.folder import find
from ispasp_lab.data.text import load_texts, similar_pairs, token_blocks
from ispasp_lab.experiments.heads_network import import_transformers, pretrained_folder
from ispasp_lab.models import mobilenet_v2, resnet20, resnet56

SIZES = (0.75, 0.5, 0.25)
RECIPE_MACS = 0.8465  # what the 260 M recipe leaves of MobileNetV2's MACs


@dataclass(frozen=True, eq=False)
class Task:
    """A network with batches to prune by and to heal by, and its scores: the main one, and maybe another."""

    model: nn.Module
    calibration: Sequence[Any]
    healing: Sequence[Any]
    heal: Heal
    scores: Callable[[nn.Module], tuple[float, float | None]]


@dataclass(frozen=True)
class Target:
    """A value that the issue asks of `size`, given in one of the `ways`, with and without healing."""

    text: str
    ways: tuple[str, ...]
    size: float
    plain: float
    healed: float


@dataclass(frozen=True)
class Network:
    """A task: how to load it, its files, and its rows (sizes, by the kind of `keep`)."""

    load: Callable[[int], Task]
    files: tuple[str, ...]
    about: str
    test: int
    sizes: Mapping[str, tuple[float, ...]]
    targets: tuple[Target, ...] = ()
    score: str = "top-1, %"
    digits: int = 2
    lower_is_better: bool = False


def _cifar(build: Callable[[], nn.Module], test: int) -> Task:
    train, test_set = cifar10("train"), cifar10("test")
    calibration, _ = sample(*train, min(1280, len(train[1])))
    given = list(batches(calibration, 128))
    heal = Heal(augment=("flip", "crop"), epochs=40)
    return Task(build(), given, given, heal, partial(_top1, *sample(*test_set, min(test, len(test_set[1])))))


def _mobilenet(test: int) -> Task:
    calibration, _ = imagenet_mini("calibration")
    tested = sample(*imagenet_mini("val"), test)
    given = list(batches(calibration, 50))
    return Task(mobilenet_v2(), given, given, Heal(augment="flip"), partial(_top1, *tested))


def _top1(x: Any, y: Tensor, model: nn.Module) -> tuple[float, None]:
    return accuracy(model, x, y, 128, progress=False), None


class SentenceEncoder(nn.Module):
    """The mean of a transformer's last hidden states over the tokens that are not padding, of length 1."""

    def __init__(self, transformer: nn.Module) -> None:
        """`transformer` is a Hugging Face encoder."""
        super().__init__()
        self.transformer = transformer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(batch, tokens), (batch, tokens) -> (batch, width)."""
        hidden = self.transformer(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(hidden.dtype)
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _minilm(test: int, name: str = "all-MiniLM-L6-v2", sentences: int = 1280, length: int = 32) -> Task:
    transformers, folder = import_transformers(), pretrained_folder(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    bert = transformers.AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    pairs, _ = similar_pairs("train")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:sentences]
    # One length for all, so that healing can mix them; few sentences are longer.
    encoded = _encoded(tokenizer, [texts[i] for i in order], padding="max_length", max_length=length)
    given = [{key: value[k : k + 64] for key, value in encoded.items()} for k in range(0, len(order), 64)]
    tested, likeness = similar_pairs("test")
    scores = partial(_similarity, tokenizer, tested[:test], likeness[:test])
    return Task(SentenceEncoder(bert).eval(), given, given, Heal(), scores)


def _encoded(tokenizer: Any, texts: Sequence[str], **options: Any) -> dict[str, Tensor]:
    found = tokenizer(list(texts), truncation=True, return_tensors="pt", **options)
    return {key: found[key] for key in ("input_ids", "attention_mask")}


def _similarity(
    tokenizer: Any, pairs: Sequence[tuple[str, str]], likeness: Tensor, model: nn.Module
) -> tuple[float, None]:
    found = []
    with evaluating(model), torch.no_grad():
        for k in range(0, len(pairs), 64):
            left, right = zip(*pairs[k : k + 64], strict=True)
            a, b = (model(**_encoded(tokenizer, texts, padding=True, max_length=128)) for texts in (left, right))
            found.append((a * b).sum(1))
    return spearman(torch.cat(found), likeness), None


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation of two vectors; equal values share the mean of their ranks.

    >>> round(spearman(torch.tensor([1.0, 2.0, 2.0, 9.0]), torch.tensor([0.1, 0.2, 0.2, 0.3])), 6)
    1.0
    """

    def ranks(x: Tensor) -> Tensor:
        below, least = (x[:, None] > x).sum(1), (x[:, None] >= x).sum(1)
        return (below + least + 1) / 2

    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]).double())[0, 1])


def _smollm2(test: int, name: str = "SmolLM2-135M") -> Task:
    transformers, folder = import_transformers(), pretrained_folder(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.model_max_length = 10**9  # no warning: the text is cut into blocks
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, use_cache=False
    )
    valid, tested = ((find("nlp/wikitext2") / f"{part}.txt").read_text(encoding="utf-8") for part in ("valid", "test"))
    other = "\n".join(sentence.texts[0] for sentence in load_texts("sst2").test)
    first, second = (token_blocks(text, tokenizer, test, 512, 2) for text in (tested, other))
    calibration, healing = (token_blocks(valid, tokenizer, count, 256, 4) for count in (32, 256))
    return Task(model.eval(), calibration, healing, Heal(epochs=3, batch=4), partial(_perplexities, first, second))


def _perplexities(text: Sequence[Any], other: Sequence[Any], model: nn.Module) -> tuple[float, float]:
    return perplexity(model, text), perplexity(model, other)


def perplexity(model: nn.Module, blocks: Sequence[Mapping[str, Tensor]]) -> float:
    """exp of the mean cross entropy of every token after the first of its block."""
    losses = []
    with evaluating(model), torch.no_grad():
        for batch in blocks:
            for logits, ids in zip(model(**batch).logits, batch["input_ids"], strict=True):
                losses.append(functional.cross_entropy(logits[:-1].float(), ids[1:]))
    return math.exp(min(float(torch.stack(losses).mean()), 700.0))


_PLAIN = {"keep": SIZES, "macs": SIZES}
_MATCHED = {"keep": SIZES, "matched": SIZES, "macs": SIZES}
_CIFAR = (
    "CIFAR-10, 1,280 unlabelled training images; healed on the same for 40 epochs with flips and crops; top-1 on test "
    "images"
)

NETWORKS: Mapping[str, Network] = MappingProxyType({
    "resnet56": Network(
        partial(_cifar, resnet56), ("cifar10.npz", "cifar10-resnet56.safetensors"), _CIFAR, 10_000, _PLAIN,
        (
            Target("half of the MACs", ("macs", "keep"), 0.5, 91.3, 92.5),
            Target("a quarter of the MACs", ("macs", "keep"), 0.25, 82.0, 89.0),
        ),
    ),
    "resnet20": Network(
        partial(_cifar, resnet20), ("cifar10.npz", "cifar10-resnet20.safetensors"), _CIFAR, 10_000, _PLAIN
    ),
    "mobilenet_v2": Network(
        _mobilenet, ("mobilenet_v2.pth", "imagenet-mini"),
        "imagenet-mini, 1,000 unlabelled images; healed on the same for 20 epochs, the default, with flips; "
        "top-1 on the 1,000 others", 1000,
        {"recipe": (RECIPE_MACS,), "keep": SIZES, "matched": SIZES, "macs": (RECIPE_MACS, *SIZES)},
        (
            Target("the MACs of the 260 M recipe", ("recipe", "macs"), RECIPE_MACS, 65.5, 67.5),
            Target("75 % of the MACs", ("macs",), 0.75, 58.0, 64.0),
        ),
    ),
    "minilm": Network(
        _minilm, ("all-MiniLM-L6-v2", "nlp/stsb"),
        "STS-B, 1,280 training sentences; healed on the same for 20 epochs, the default; "
        "Spearman of cosine similarities on test pairs", 1379,
        _MATCHED, (Target("half of neurons and heads", ("keep", "matched"), 0.5, 0.79, 0.81),),
        score="Spearman", digits=4,
    ),
    "smollm2": Network(
        _smollm2, ("SmolLM2-135M", "nlp/wikitext2", "nlp/sst2"),
        "WikiText-2, 32 blocks of 256 tokens of valid; healed on 256 of them for 3 epochs; perplexity of the first "
        "16 blocks of 512 tokens of test, and in brackets of as many tokens of SST-2", 16,
        _MATCHED, (Target("three quarters of neurons and heads", ("keep", "matched"), 0.75, 60.0, 42.0),),
        score="perplexity", lower_is_better=True,
    ),
})  # fmt: skip
