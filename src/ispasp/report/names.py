"""Module paths for people: shortened where there is no room, and told together where they are alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import prod

_DOTS = "..."
_NUMBER = re.compile("([0-9]+)")


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Names of at most so many letters, cut in the middle; different names stay different, or are not cut at all.

    >>> shortened(["encoder.layer.11.attention.output", "encoder.layer.9.mlp"], 20)
    ['encode...tion.output', 'encoder.layer.9.mlp']
    >>> shortened(["encoder.layer.11.attention", "encoder.layer.12.attention"], 18)
    ['...er.11.attention', '...er.12.attention']
    """
    for cut in (_middle, _front):
        found = [cut(name, width) for name in names]
        if len(set(found)) == len(set(names)):
            return found
    return list(names)


def _middle(name: str, width: int) -> str:
    if len(name) <= width:
        return name
    front = (width - len(_DOTS)) * 2 // 5  # the end of a path tells more than its beginning
    return name[:front] + _DOTS + name[front + len(_DOTS) + len(name) - width :]


def _front(name: str, width: int) -> str:
    return name if len(name) <= width else _DOTS + name[len(name) - width + len(_DOTS) :]


def alike(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """Names and what is said of them, with rows that differ in numbers only as one: (name, text, how many).

    >>> alike((f"encoder.layer.{i}.output", "is a stream") for i in range(12))
    [('encoder.layer.{0..11}.output', 'is a stream', 12)]
    >>> alike([("layer1.0.conv2", "a"), ("layer1.1.conv2", "a"), ("layer2.0.conv2", "a"), ("fc", "b")])
    [('layer1.{0..1}.conv2', 'a', 2), ('layer2.0.conv2', 'a', 1), ('fc', 'b', 1)]
    """
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, text in rows:
        groups.setdefault((_NUMBER.sub("#", name), _NUMBER.sub("#", text)), []).append((name, text))
    found: list[tuple[str, str, int]] = []
    for group in groups.values():
        text = _common([text for _, text in group])
        found += [(label, text, count) for label, count in _labels(list(dict.fromkeys(name for name, _ in group)))]
    return found


def _common(texts: Sequence[str]) -> str:
    """Texts that differ in numbers only as one, with a star for these.

    >>> _common(["layers.3 has 2 heads", "layers.4 has 2 heads"])
    'layers.* has 2 heads'
    """
    parts = zip(*(_NUMBER.split(text) for text in texts), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _labels(names: Sequence[str]) -> list[tuple[str, int]]:
    """Names that differ in numbers only, as patterns that stand for exactly these."""
    if len(names) == 1:
        return [(names[0], 1)]
    parts = [_NUMBER.split(name) for name in names]
    numbers = [sorted({part[k] for part in parts}, key=_size) for k in range(1, len(parts[0]), 2)]
    if prod(map(len, numbers)) == len(names):
        label = parts[0][0]
        for k, values in enumerate(numbers):
            label += _span(values) + parts[0][2 * k + 2]
        return [(label, len(names))]
    first = 2 * next(k for k, values in enumerate(numbers) if len(values) > 1) + 1
    rows = sorted(zip((part[first] for part in parts), names, strict=True), key=lambda row: _size(row[0]))
    return [row for _, group in groupby(rows, key=lambda row: row[0]) for row in _labels([name for _, name in group])]


def _size(number: str) -> tuple[int, str]:
    return len(number), number  # numbers in names may have thousands of digits, or begin with zeros


def _span(values: Sequence[str]) -> str:
    """Ascending numbers in braces, neighbours together.

    >>> _span(["7"]), _span(["0", "1", "2", "5", "8", "9"]), _span(["01", "2"])
    ('7', '{0..2,5,8..9}', '{01,2}')
    """
    if len(values) == 1:
        return values[0]
    if len(values[-1]) > 9 or any(value != str(int(value)) for value in values):
        return f"{{{','.join(values)}}}"
    runs: list[list[int]] = []
    for value in map(int, values):
        if runs and runs[-1][-1] == value - 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    return f"{{{','.join('..'.join(map(str, run)) for run in runs)}}}"


def told(rows: Iterable[tuple[str, str]], details: Mapping[str, str] | None = None) -> list[str]:
    """Lines "name: text", rows that are alike in one; `details` of a name follow where it stands alone.

    >>> told([("a.0", "why"), ("a.1", "why"), ("b", "else")], {"a.0": "node 1", "b": "node 2"})
    ['a.{0..1} (2 alike): why', 'b: else (node 2)']
    """
    lines = []
    for name, text, count in alike(rows):
        detail = (details or {}).get(name) if count == 1 else None
        lines.append(f"{name}{f' ({count} alike)' if count > 1 else ''}: {text}{f' ({detail})' if detail else ''}")
    return lines
