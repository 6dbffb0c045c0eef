"""Hugging Face models and tokenizers, from a folder or by their name on the hub."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ispasp.cli.loaded import Loaded, Preprocessing, from_dict
from ispasp.errors import InputError, SaveError, failing_as, needed
from ispasp.files import read_json
from ispasp.integrations.torchvision import import_torchvision

_SMALL = 2**20  # bytes of a config
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


class Task(str, Enum):
    """Task of a model: the name is its class in transformers, the value is what users type."""

    AutoModel = "features"
    AutoModelForCausalLM = "causal-lm"
    AutoModelForMaskedLM = "masked-lm"
    AutoModelForSeq2SeqLM = "seq2seq-lm"
    AutoModelForSequenceClassification = "sequence-classification"
    AutoModelForTokenClassification = "token-classification"
    AutoModelForQuestionAnswering = "question-answering"
    AutoModelForImageClassification = "image-classification"
    AutoModelForAudioClassification = "audio-classification"


def transformers() -> Any:
    """Import transformers, and torchvision before it, with their logs silenced."""
    if find_spec("torchvision") is not None:
        import_torchvision()
    package = needed("transformers", "hf:", "transformers")
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    quiet_hub()
    return package


def quiet_hub() -> None:
    """Silence the hub's client, which logs every attempt to connect."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


def hf_model(name: str, *, empty: bool = False, task: Task | None = None) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model of a folder or hub name, and warnings; its class is that of `task`, else of its config.

    `empty` builds it from the config alone. Nothing is fetched for a folder.
    """
    if not name:
        raise InputError("hf: names no model: pass hf:FOLDER, or the name of a model on the hub such as hf:gpt2")
    package, options = transformers(), {"local_files_only": _is_local(name), "trust_remote_code": False}
    with _loading(name):
        config = package.AutoConfig.from_pretrained(name, **options)
        own = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        cls = getattr(package, task.name if task else own)
        if empty:
            build = getattr(cls, "from_config", None) or cls._from_config
            return build(config).eval(), ()
        model, told = cls.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(told.get("missing_keys", ()))
    if not missing:
        return model.eval(), ()
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return model.eval(), (f"the checkpoint of hf:{name} lacks {missing[0]!r}{more}: these weights are random.",)


def described(model: Any, spec: str, folder: str) -> Loaded:
    """Return the model with what its config and its folder say about inputs and outputs."""
    size = getattr(model.config, "image_size", None)
    shape = (getattr(model.config, "num_channels", 3), size, size) if isinstance(size, int) else None
    prepare = image_preprocessing(folder, size if isinstance(size, int) and size > 0 else None)
    labels = getattr(model.config, "id2label", None) or {}
    names = tuple(str(labels[i]) for i in range(len(labels)) if i in labels)
    return Loaded(model.eval(), spec, shape, prepare, tokenizer=folder, names=names)


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts the next token of a text."""
    if not hasattr(model, "main_input_name"):  # not of Hugging Face
        return False
    known = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return type(model).__name__ in known.values()


def tokenizer(name: str) -> Any:
    """Return the tokenizer of a folder or hub name; without a padding token, it pads with the end of text."""
    if not name:
        raise InputError("text needs the tokenizer of a Hugging Face model: pass hf:FOLDER as the model")
    options = {"local_files_only": _is_local(name), "trust_remote_code": False}
    with _loading(name, "the tokenizer of "):
        found = transformers().AutoTokenizer.from_pretrained(name, **options)
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.unk_token
    if found.pad_token is None:
        raise InputError(f"the tokenizer of {name} has no token to pad with: set its pad_token, and save it again")
    return found


def image_preprocessing(name: str, size: int | None = None) -> Preprocessing:
    """Return the preprocessing of an image model's folder, else ImageNet's for images of that size."""
    plain = Preprocessing() if size is None else Preprocessing().sized(size)
    try:
        told = read_json(Path(name) / "preprocessor_config.json", _SMALL)
        crop, whole = _side(told.get("crop_size")), _side(told.get("size"))
        side = crop or whole or plain.size
        resize = max(whole or side, side) if told.get("do_center_crop") or crop else side
        how = _RESAMPLING.get(told.get("resample"), plain.interpolation)
        told = {"size": side, "resize": resize, "mean": told["image_mean"], "std": told["image_std"]}
    except (SaveError, LookupError, TypeError, AttributeError):
        return plain
    return from_dict({**told, "interpolation": how}, "its preprocessor_config.json") or plain


def _side(told: Any) -> int | None:
    """Read 224, {"height": 224, "width": 224} or {"shortest_edge": 224}."""
    if isinstance(told, dict):
        told = told.get("shortest_edge") or told.get("height")
    return told if isinstance(told, int) and told > 0 else None


def _is_local(name: str) -> bool:
    if Path(name).is_dir():
        return True
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise InputError(f"no folder {name}: pass hf:FOLDER, or the name of a model on the hub such as hf:gpt2")
    return False


def _loading(name: str, part: str = "") -> AbstractContextManager[None]:
    remedy = "check the folder" if Path(name).is_dir() else "check the name and the network, or pass a local folder"
    return failing_as(InputError, f"{part}hf:{name} cannot be loaded", remedy)
