"""Numbers and names as the report writes them: HTML, escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from html import escape
from typing import Any


def count(number: float) -> str:
    """A count as people say it.

    >>> count(50_826), count(21_797_672), count(3_664_000_000), count(77)
    ('50.8 K', '21.8 M', '3.66 G', '77')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'K' else size):.3g} {letter}"
    return f"{number:,.0f}"


def percent(value: Any) -> str:
    """A fraction in percent; a dash for what is no number."""
    if not finite(value):
        return '<span class="dim">–</span>'
    if 0 < value < 5e-5:
        return "&lt;&thinsp;0.01&thinsp;%"
    return f"{100 * value:.2f}&thinsp;%" if abs(value) < 0.1 else f"{100 * value:.1f}&thinsp;%"


def rounding(value: Any) -> str:
    """A difference that should be rounding only."""
    return f"{value:.0e}" if finite(value) and value else "0" if value == 0 else '<span class="dim">–</span>'


def broken(text: Any) -> str:
    """A module path that may break after its signs, and inside its words only where it must."""
    return re.sub(r"([._:/])", r"\1<wbr>", escape(str(text)))


def finite(value: Any) -> bool:
    """Whether a value is a number to be drawn."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def setting(value: Any) -> str:
    """A setting: a mapping has a line for every name, a list has commas.

    >>> setting({"torch": "2.9", "mean": [0.485, 0.4560000001]}), setting(()), setting(True)
    ('<code>torch 2.9</code><br><code>mean 0.485, 0.456</code>', '<span class="none">none</span>', '<code>yes</code>')
    """
    if isinstance(value, Mapping) and value:
        return "<br>".join(f"<code>{escape(f'{key} {_plain(each)}')}</code>" for key, each in value.items())
    text = _plain(value)
    return f"<code>{escape(text)}</code>" if text else '<span class="none">none</span>'


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None or value == {} else str(value)
