"""Real pretrained networks."""

from ispasp_lab.models.cifar_resnet import CifarResNet, resnet20, resnet56
from ispasp_lab.models.pretrained import mobilenet_v2

__all__ = ["CifarResNet", "mobilenet_v2", "resnet20", "resnet56"]
