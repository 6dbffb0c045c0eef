"""The errors of the library: each says what was given, what was expected and what to do."""

from __future__ import annotations


class IspaspError(Exception):
    """Base of every error this library raises on purpose."""


class InputError(IspaspError, ValueError):
    """An argument cannot be used: a shape, a count or a value is wrong."""


class MissingExtraError(IspaspError, ImportError):
    """An optional package is needed and not installed."""
