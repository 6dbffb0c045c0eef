"""Real data: found on this machine, never fetched."""

from ispasp_lab.data.folder import available, data_folder, find
from ispasp_lab.data.images import (
    Examples,
    Files,
    Labelled,
    Pixels,
    batches,
    cifar10,
    image_folder,
    imagenet_mini,
    mnist,
)

__all__ = [
    "Examples",
    "Files",
    "Labelled",
    "Pixels",
    "available",
    "batches",
    "cifar10",
    "data_folder",
    "find",
    "image_folder",
    "imagenet_mini",
    "mnist",
]
