"""Damage to bytes and to JSON values, at random but from a seed."""

from __future__ import annotations

import json
import random
from typing import Any

_DEEP = "DEEP-NESTING"
_LONG = "LONG-NUMBER"
HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 1.5, -0.0, 10**6, 10**12, 2**63, 10**30, float("nan"), float("inf"), "", "x",
    "\x1b[2J", "fc1", "fc1.weight", "0.weight", "float32", "..", "../../etc/passwd", "a" * 300, "\ud800", "\x00", "٣",
    [], {}, [[]], [None], [-1], [0, 0], [2**40, 2**40], [[["fc1", 8]]], [[[None, 8]]], {"a": 1}, {"0": []}, {"": None},
    {"ties": {}, "unsaved": {}}, _DEEP, _LONG,
)  # fmt: skip


def damaged_json(value: Any, rng: random.Random) -> str:
    """The text of a JSON value after one to three changes somewhere inside it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = _changed(value, rng) if rng.random() < 0.6 else _replaced(value, *_pair(value, rng))
    text = json.dumps(value)
    text = text.replace(f'"{_LONG}"', "7" * 5000)
    text = text.replace(f'"{_DEEP}"', "[" * 100_000 + "]" * 100_000)
    if '"' in text and rng.random() < 0.05:
        text = text.replace("{", '{"a": 1, "a": 2, ' if rng.random() < 0.5 else '{"format": 1,', 1)
    return text


def damaged_bytes(data: bytes, rng: random.Random, first: int = 0) -> bytes:
    """The bytes after one to four changes, more often among the first ones."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(max(1, min(first, len(found)) if first and rng.random() < 0.7 else len(found)))
        kind = rng.randrange(6)
        if kind == 0 and found:
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and found:
            found[place] = rng.choice((0, 0xFF, 0x80, 0x22, 0x7B, 0x39))
        elif kind == 2:
            del found[place:]
        elif kind == 3:
            del found[place : place + rng.randint(1, 16)]
        elif kind == 4:
            found[place:place] = rng.choice((b"\xff\xfe", b"\x1b[2J", b"0" * 40, b"{", b'"', rng.randbytes(8)))
        else:
            found[place : place + 8] = rng.choice((b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little")))
    return bytes(found)


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with one change: here, or deeper inside."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.85:
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        key = rng.choice(list(items))
        kind = rng.random()
        if kind < 0.75:
            items[key] = _changed(items[key], rng)
        elif kind < 0.83:
            del items[key]
        elif kind < 0.91:
            items[key] = rng.choice(list(items.values()))
        elif isinstance(value, dict):
            items = {(rng.choice(_KEYS) if k == key else k): v for k, v in items.items()}
        else:
            items[len(value)] = rng.choice((items[key], rng.choice(HOSTILE)))
        return items if isinstance(value, dict) else list(items.values())
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((-1, 1, -value, value, 10**9))
    if isinstance(value, str) and rng.random() < 0.5:
        return rng.choice((value + "\x1b[2J", value[1:], value.upper(), value + ".0", value * 2))
    return rng.choice(HOSTILE)


def _pair(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """A name or number that stands in the value, and what to write wherever it stands: the rest stays consistent."""
    leaves = [leaf for leaf in _leaves(value) if type(leaf) in (int, str)] or [0]
    old = rng.choice(leaves)
    others = [leaf for leaf in leaves if type(leaf) is type(old)]
    more = (old + 1, old * 2, 2**40, 1) if isinstance(old, int) else (f"{old}x", f"x.{old}", "", "\x1b[2J")
    return old, rng.choice((*more, rng.choice(others), rng.choice(others)))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in (key, *_leaves(inner))]
    return [leaf for inner in value for leaf in _leaves(inner)] if isinstance(value, list) else [value]


def _replaced(value: Any, old: Any, new: Any) -> Any:
    if isinstance(value, dict):
        return {_replaced(key, old, new) if isinstance(new, str) else key: _replaced(v, old, new)
                for key, v in value.items()}  # fmt: skip
    if isinstance(value, list):
        return [_replaced(inner, old, new) for inner in value]
    return new if type(value) is type(old) and value == old else value


_KEYS = ("", "x", "\x1b[2J", "0", "00", "-1", "9" * 30, "fc1", "fc1.weight", "version", "kept", "units", "٣")
