"""The errors of the library: each says what was given, what was expected and what to do."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with every character that does not print written as its escape; line ends and tabs stay.

    Names come from models and files, and a terminal obeys what does not print.

    >>> visible("fc\\x1b[2J"), visible("größe")
    ('fc\\\\x1b[2J', 'größe')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


_LONGEST = 4000  # characters of an error


class IspaspError(Exception):
    """Base of every error this library raises on purpose. Its text prints, and is bounded, whatever it quotes."""

    def __init__(self, *args: object) -> None:
        """Take the text of the error."""
        super().__init__(*(_bounded(visible(arg)) if isinstance(arg, str) else arg for arg in args))


def _bounded(text: str) -> str:
    """The text without its middle, where it is too long: the remedy stands at the end."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} ... {text[-half:]}"


class InputError(IspaspError, ValueError):
    """An argument cannot be used: a shape, a count or a value is wrong."""


class OptionError(InputError, TypeError):
    """An option has a name that the function does not know."""


class MissingExtraError(IspaspError, ImportError):
    """An optional package is needed and not installed."""


class TraceError(IspaspError, RuntimeError):
    """A model could not be turned into a graph."""


class NothingToPruneError(IspaspError, ValueError):
    """A model has no hidden dimension that can lose units."""


class PlanError(IspaspError, ValueError):
    """A plan is malformed, or does not fit the model."""


class SurgeryError(IspaspError, RuntimeError):
    """Removing units did not equal masking them; the model is as it was before."""


class SaveError(IspaspError, OSError):
    """A folder cannot be written or read."""


class ExportError(IspaspError, RuntimeError):
    """A model could not be exported, or the exported one does not compute the same."""


class DistributedError(IspaspError, RuntimeError):
    """Another rank failed, died or did not answer in time."""
