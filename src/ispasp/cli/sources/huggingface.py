"""Models and tokenizers of Hugging Face: from a folder, or by the name the user gives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ispasp.cli.sources.loaded import Loaded
from ispasp.cli.sources.preprocessing import Preprocessing, from_dict
from ispasp.errors import InputError, MissingExtraError, SaveError
from ispasp.files.reading import read_json
from ispasp.integrations.torchvision import import_torchvision

_SMALL = 2**20  # bytes of a config
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers
TASKS = {
    "features": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
}


def transformers() -> Any:
    """The package, quiet; torchvision first, for it imports that."""
    if find_spec("torchvision") is not None:
        import_torchvision()
    try:
        import transformers as package
    except ImportError as error:
        raise MissingExtraError("hf: needs transformers: pip install 'ispasp[transformers]'") from error
    package.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    package.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    quiet_hub()
    return package


def quiet_hub() -> None:
    """The hub's client tells of every attempt to reach it; what comes of it is told in one line."""
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


def described(model: Any, spec: str, folder: str) -> Loaded:
    """A Hugging Face model with what its config and its folder say about its inputs."""
    size = getattr(model.config, "image_size", None)
    shape = (getattr(model.config, "num_channels", 3), size, size) if isinstance(size, int) else None
    prepare = image_preprocessing(folder, size if isinstance(size, int) and size > 0 else None)
    labels = getattr(model.config, "id2label", None) or {}
    names = tuple(str(labels[i]) for i in range(len(labels)) if i in labels)
    return Loaded(model.eval(), spec, shape, prepare, tokenizer=folder, names=names)


def hf_model(name: str, *, empty: bool = False, task: str = "") -> tuple[nn.Module, tuple[str, ...]]:
    """The model of a folder (nothing is fetched) or of a hub name, of the class that its config names; and warnings.

    `empty`: the weights come from elsewhere, so only the config is read. `task` names another class, see `TASKS`.
    """
    if not name:
        raise InputError("hf: names no model: pass hf:FOLDER, or the name of a model on the hub such as hf:gpt2")
    package = transformers()
    local = _local(name)
    try:
        config = package.AutoConfig.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        own = (getattr(config, "architectures", None) or ["AutoModel"])[0]
        cls = getattr(package, TASKS[task] if task else own)
        if empty:
            return _from_config(cls, config), ()
        model, told = cls.from_pretrained(
            name, local_files_only=local, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:
        raise InputError(_unusable(name, error)) from error
    return model.eval(), _untrained(name, sorted(told.get("missing_keys", ())))


def is_causal(model: nn.Module) -> bool:
    """Whether a model predicts the next token of a text.

    >>> is_causal(nn.Linear(2, 2))
    False
    """
    if not hasattr(model, "main_input_name"):  # not of Hugging Face
        return False
    known = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return type(model).__name__ in known.values()


def tokenizer(name: str) -> Any:
    """The tokenizer of a folder or hub name; one without padding pads with its end of text."""
    if not name:
        raise InputError("text needs a tokenizer: it is that of a Hugging Face model, so pass hf:FOLDER as the model")
    try:
        found = transformers().AutoTokenizer.from_pretrained(
            name, local_files_only=_local(name), trust_remote_code=False
        )
    except Exception as error:
        raise InputError(f"no tokenizer: {_unusable(name, error)}") from error
    if found.pad_token is None:
        found.pad_token = found.eos_token or found.unk_token
    if found.pad_token is None:
        raise InputError(f"the tokenizer of {name} has no token to pad with: set its pad_token, and save it anew")
    return found


def image_preprocessing(name: str, size: int | None = None) -> Preprocessing:
    """What the folder of an image model says about its inputs; else ImageNet's, for images of a side of `size`.

    >>> image_preprocessing("no/such/folder") == Preprocessing()
    True
    """
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
    """A side of an image: 224, or {"height": 224, "width": 224}, or {"shortest_edge": 224}."""
    if isinstance(told, dict):
        told = told.get("shortest_edge") or told.get("height")
    return told if isinstance(told, int) and told > 0 else None


def _from_config(cls: Any, config: Any) -> nn.Module:
    build = getattr(cls, "from_config", None) or cls._from_config
    model: nn.Module = build(config)
    return model.eval()


def _untrained(name: str, missing: Sequence[str]) -> tuple[str, ...]:
    """transformers fills what a checkpoint lacks with random numbers, and goes on."""
    if not missing:
        return ()
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (f"the checkpoint of hf:{name} lacks {missing[0]!r}{more}, so that these weights are random.",)


def _local(name: str) -> bool:
    if Path(name).is_dir():
        return True
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise InputError(f"no folder {name}: pass hf:FOLDER, or the name of a model on the hub such as hf:gpt2")
    return False


def _unusable(name: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    remedy = "check the folder" if Path(name).is_dir() else "check the name and the network, or pass a local folder"
    return f"hf:{name} cannot be loaded ({reason[:200]}): {remedy}"
