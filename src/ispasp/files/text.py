"""JSON that may come from anyone: bounded, without duplicate keys, and wrong in one way only."""

from __future__ import annotations

import json
from typing import Any

LIMIT = 64 * 2**20  # bytes of a text that is read whole
_DIGITS = 19  # every whole number that a plan needs fits into 64 bits


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError says what is wrong with it.

    >>> parsed('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands twice in one object
    >>> parsed(b'[\\xff]')
    Traceback (most recent call last):
    ValueError: not UTF-8 at byte 1
    """
    if len(text) > LIMIT:
        raise ValueError(f"{len(text):,} bytes, more than the {LIMIT:,} that a text may have")
    try:
        if not isinstance(text, str):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_int=_number)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1) if len(names) < 1000 else "..."
        raise ValueError(f"the key {twice[:80]!r} stands twice in one object")
    return found


def _number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a whole number of {len(digits):,} digits")
    return int(digits)
