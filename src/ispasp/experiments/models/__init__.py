"""Real pretrained networks."""

from ispasp.experiments.models.cifar_resnet import CifarResNet, resnet20, resnet56
from ispasp.experiments.models.pretrained import mobilenet_v2

__all__ = ["CifarResNet", "mobilenet_v2", "resnet20", "resnet56"]
