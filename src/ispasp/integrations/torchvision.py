"""Import torchvision beside a CPU-only PyTorch."""

from types import ModuleType

import torch

_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[torch.library.Library] = []  # a declaration lives as long as its library object


def import_torchvision() -> ModuleType:
    """Return torchvision, declaring first the two operators that its PyPI wheel lacks without CUDA.

    The wheel's compiled part does not load there, and its Python part then fails with "operator
    torchvision::nms does not exist". No classification model calls these operators.
    """
    try:
        import torchvision
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        _libraries.append(library)
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(name + _NMS)  # type: ignore[no-untyped-call]
        import torchvision
    return torchvision  # type: ignore[no-any-return]
