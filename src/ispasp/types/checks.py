"""Checks that more than one part of the library makes: each names what was given and what to do."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from ispasp.errors import InputError


def checked_tensor(what: str, given: object) -> Tensor:
    """Return `given` if it is a dense real tensor that has values.

    >>> checked_tensor("a weight", [[1.0]])
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: a weight is a list: pass a torch.Tensor
    """
    if not isinstance(given, Tensor):
        raise InputError(f"{what} is a {type(given).__name__}: pass a torch.Tensor")
    described = f"{what} of shape {tuple(given.shape)}"
    if given.is_meta:
        raise InputError(f"{described} is on the meta device and has no values: load the model's weights first")
    if given.layout != torch.strided:
        raise InputError(f"{described} has the layout {given.layout}: pass its .to_dense()")
    if given.is_quantized:
        raise InputError(f"{described} is quantized ({given.dtype}): pass its .dequantize()")
    if given.is_complex():
        raise InputError(f"{described} is complex ({given.dtype}): i-SpaSP is defined for real numbers only")
    return given


def check_finite(what: str, values: Tensor, remedy: str) -> None:
    """Refuse NaN and Inf in values of any shape.

    >>> check_finite("a weight", torch.tensor([1.0, torch.nan]), "repair it")
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: a weight has 1 NaN or Inf of 2 values: repair it
    """
    wide = values if values.dtype.itemsize > 1 else values.float()  # torch has no isfinite for 8-bit floats
    bad = int((~torch.isfinite(wide)).sum())
    if bad:
        raise InputError(f"{what} has {bad} NaN or Inf of {values.numel()} values: {remedy}")


def check_sum(what: str, total: object, examples: int, shape: tuple[int, ...]) -> None:
    """Refuse a sum over data that is empty, does not have the shape its consumer needs, or is not finite.

    >>> check_sum("the Gram matrix", torch.ones(1, 5, 5), examples=3, shape=(1, 4, 4))
    Traceback (most recent call last):
    ...
    ispasp.errors.InputError: the Gram matrix has shape (1, 5, 5), its consumer needs (1, 4, 4): ...
    """
    total = checked_tensor(what, total)
    if examples < 1:
        raise InputError(f"{what} holds no data (examples={examples}): calibrate on at least one example")
    if tuple(total.shape) != shape:
        raise InputError(
            f"{what} has shape {tuple(total.shape)}, its consumer needs {shape}: take it with measure(consumer, H)"
        )
    check_finite(what, total, "check the calibration data and the layers before, or run them in float32")


def is_integer(value: object) -> bool:
    """Whether the value is an integer, Python's or numpy's; a bool is none.

    >>> import numpy
    >>> is_integer(numpy.int64(3)), is_integer(True), is_integer(3.0)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)
