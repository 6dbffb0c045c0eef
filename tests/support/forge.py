"""Change saved files and make their checksums fit again, as a forger would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ispasp._saved import checksum
from ispasp.files import digest

Change = Callable[[dict[str, Tensor], dict[str, str]], object]


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, of their own, and metadata."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def forge_model(path: Path, change: Change) -> None:
    """Change the tensors or the metadata of a model.safetensors."""
    tensors, metadata = read(path)
    change(tensors, metadata)
    metadata["texts_sha256"] = checksum(metadata)
    metadata["tensors_sha256"] = digest(tensors, metadata["texts_sha256"])
    save_file(tensors, path, metadata)
