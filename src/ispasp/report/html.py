"""A pruned model on one page: HTML that needs nothing beside itself."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ispasp.errors import visible
from ispasp.report import html_svg as svg
from ispasp.report.html_style import CSS

Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]

_METHOD = {"dense": "compensated towards the dense network", "local": "compensated layer by layer"}
_ERRORS = "Error against kept units"
_FACETS = 24  # curves that are seen without asking for more
# The browser itself refuses everything from outside; charts and styles are inside.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html(result: Mapping[str, Any], curves: Curves | None = None) -> str:
    """One page from `json.loads(result.to_json())`: opens offline, in light and dark, without scripts.

    `curves`: hidden dimension -> (kept units, relative errors). Beside what `Result.to_json` gives, `result` may hold
    "command" (what was typed), "model" (its name), "warnings" (sentences that everyone must see) and "no_curves" (why
    there are none).

    >>> cost = {"params": 5, "macs": 5, "dense_params": 10, "dense_macs": 10}
    >>> layer = {"name": "fc<1>", "kind": "neuron", "units": 8, "kept": 4, "relative_error": 0.1, "certificate": 1e-8}
    >>> page = html({"settings": {"method": "l1"}, "verified": 1e-8, "cost": cost, "layers": [layer], "frozen": []})
    >>> page.startswith("<!doctype html>"), "fc&lt;1&gt;" in page, "fc<1>" in page
    (True, True, False)
    """
    layers = list(result.get("layers", ()))
    title = f"{result.get('model') or result.get('plan', {}).get('model') or 'Network'}, pruned"
    parts = [
        _header(title, result.get("settings", {})),
        *(f'<p class="warning">{escape(str(text))}</p>' for text in result.get("warnings", ())),
        _tiles(result, layers),
        _widths(layers),
        _table(layers, bool(result.get("settings", {}).get("compensate"))),
        _curves(layers, curves or {}, str(result.get("no_curves", ""))),
        _notes(layers),
        _frozen(result.get("frozen", ())),
        _settings(result),
    ]
    return visible(  # names may hold what a terminal or an editor obeys
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def roots(curves: Curves) -> Curves:
    """Relative errors of `Result.curves`, which hold their squares: the scale of all other errors on the page.

    >>> roots({"fc": ((1, 2), (0.25, 0.0))})
    {'fc': ((1, 2), [0.5, 0.0])}
    """
    return {name: (kept, [math.sqrt(max(e, 0.0)) for e in errors]) for name, (kept, errors) in curves.items()}


def count(number: float) -> str:
    """A count as people say it.

    >>> count(50_826), count(21_797_672), count(3_664_000_000), count(77)
    ('50.8 K', '21.8 M', '3.66 G', '77')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'K' else size):.3g} {letter}"
    return f"{number:,.0f}"


def _percent(value: Any) -> str:
    if not _finite(value):
        return '<span class="dim">–</span>'
    if 0 < value < 5e-5:
        return "&lt;&thinsp;0.01&thinsp;%"
    return f"{100 * value:.2f}&thinsp;%" if abs(value) < 0.1 else f"{100 * value:.1f}&thinsp;%"


def _rounding(value: Any) -> str:
    return f"{value:.0e}" if _finite(value) and value else "0" if value == 0 else '<span class="dim">–</span>'


def _name(text: Any) -> str:
    """A module path that may break after its signs, and inside its words only where it must."""
    return re.sub(r"([._:/])", r"\1<wbr>", escape(str(text)))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _header(title: str, settings: Mapping[str, Any]) -> str:
    said = [f"method {settings.get('method', 'unknown')}"]
    said += [f"{settings['order']} order"] if settings.get("order") else []
    said.append(_METHOD.get(str(settings.get("compensate")), "not compensated"))
    return f"<header>{svg.MARK}<div><h1>{_name(title)}</h1><p>{escape(', '.join(said))}</p></div></header>"


def _tiles(result: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> str:
    cost = result["cost"]
    units, kept = (sum(layer[key] for layer in layers) for key in ("units", "kept"))
    rows = [
        ("Parameters", cost["params"], cost["dense_params"]),
        ("MACs for one example", cost["macs"], cost["dense_macs"]),
        ("Units of the pruned layers", kept, units),
    ]
    tiles = [_tile(label, after, before) for label, after, before in rows]
    verified = result.get("verified")
    tiles.append(
        f'<div class="tile proof"><div class="label">Removed equals masked</div>'
        f'<div class="value">{_rounding(verified)}</div>'
        '<div class="under">relative difference to the dense network with removed units masked: rounding only'
        "</div></div>"
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(label: str, after: int, before: int) -> str:
    share = after / before if before else 1.0
    times = f"<small>{before / after:.1f}× fewer</small>" if after and before >= 1.1 * after else ""
    return (
        f'<div class="tile"><div class="label">{label}</div><div class="value"><span>{count(after)}</span>{times}</div>'
        f'<div class="meter"><i style="width:{100 * share:.1f}%"></i></div>'
        f'<div class="under">{100 * share:.1f}&thinsp;% of {count(before)}</div></div>'
    )


def _widths(layers: Sequence[Mapping[str, Any]]) -> str:
    if not layers:
        return "<section><h2>Widths</h2><p>No layer lost a unit.</p></section>"
    return (
        "<section><h2>Widths</h2><p>Every pruned hidden dimension from first to last. Point at a column for its name "
        "and numbers.</p>"
        f'<div class="legend"><span>{svg.KEPT_KEY}stay</span><span>{svg.GONE_KEY}removed</span></div>'
        f'<div class="wide">{svg.skyline(layers)}</div></section>'
    )


def _table(layers: Sequence[Mapping[str, Any]], compensated: bool) -> str:
    if not layers:
        return ""
    errors: list[Any] = [layer.get(key) for layer in layers for key in ("relative_error", "uncompensated_error")]
    top = svg.ceiling(max((e for e in errors if _finite(e)), default=1.0))
    rows = "".join(_row(i + 1, layer, top, compensated) for i, layer in enumerate(layers))
    legend = (
        f'<div class="legend"><span>{svg.BEFORE_KEY}before compensation</span>'
        f"<span>{svg.AFTER_KEY}after it</span></div>"
        if compensated
        else ""
    )
    before = '<th class="r">before</th><th class="r">after</th>' if compensated else '<th class="r"></th>'
    return (
        "<section><h2>Layers</h2><p>Error: how far the outputs of the layers that read these units are from what they "
        "should be, relative to their size. Certificate: the largest relative difference at these layers between the "
        f"pruned model and the masked dense one.</p>{legend}"
        '<div class="wide"><table><thead><tr><th class="r">#</th><th>hidden dimension</th><th>kind</th>'
        f'<th>units that stay</th><th class="r"></th><th>error, 0 to {100 * top:.3g}&thinsp;%</th>{before}'
        f'<th class="r">certificate</th></tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _row(number: int, layer: Mapping[str, Any], top: float, compensated: bool) -> str:
    kept, units, after = layer["kept"], layer["units"], layer.get("relative_error")
    before = layer.get("uncompensated_error") if compensated else None
    certificate = layer.get("certificate")
    numbers = [_percent(before), _percent(after)] if compensated else [_percent(after)]
    numbers.append(_rounding(certificate))
    cells = "".join(f'<td class="r">{text}</td>' for text in numbers)
    return (
        f'<tr><td class="r dim">{number}</td><td class="name">{_name(layer["name"])}</td>'
        f'<td class="dim">{escape(str(layer.get("kind", "")))}</td><td>{svg.bar(kept, units)}</td>'
        f'<td class="r">{kept:,} <span class="dim">of {units:,}</span></td>'
        f"<td>{svg.dumbbell(before, after, top)}</td>{cells}</tr>"
    )


def _curves(layers: Sequence[Mapping[str, Any]], curves: Curves, without: str) -> str:
    drawn = {name: points for name, points in curves.items() if len(points[0])}
    if not drawn:
        return f"<section><h2>{_ERRORS}</h2><p>{escape(without)}</p></section>" if without else ""
    kept = {layer["name"]: layer["kept"] for layer in layers}
    order = [name for name in kept if name in drawn] + [name for name in drawn if name not in kept]
    top = svg.ceiling(max((e for _, errors in drawn.values() for e in errors if _finite(e)), default=1.0))
    facets = [f"<div><h3>{_name(name)}</h3>{svg.curve(*drawn[name], kept.get(name), top)}</div>" for name in order]
    shown = f'<div class="facets">{"".join(facets[:_FACETS])}</div>'
    if facets[_FACETS:]:
        shown += (
            f'<details class="more"><summary>more layers <b>{len(facets) - _FACETS}</b></summary>'
            f'<div class="facets">{"".join(facets[_FACETS:])}</div></details>'
        )
    return (
        f"<section><h2>{_ERRORS}</h2><p>What the method would lose at other widths, as predicted from "
        "the calibration data, layer by layer and without compensation. The dot is the width that was chosen.</p>"
        f"{shown}</section>"
    )


def _notes(layers: Sequence[Mapping[str, Any]]) -> str:
    rows = [{"name": layer["name"], "reason": note} for layer in layers for note in layer.get("notes", ())]
    return f"<section><h2>Notes</h2>{_grouped(rows)}</section>" if rows else ""


def _frozen(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"<section><h2>Left whole, and why</h2>{_grouped(rows)}</section>" if rows else ""


def _grouped(rows: Sequence[Mapping[str, Any]]) -> str:
    """Names under what is said of them, most frequent first; open where that is not long."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        node = f' <span class="dim">({escape(str(row["node"]))})</span>' if row.get("node") else ""
        text = f'<li><span class="name">{_name(row["name"])}</span>{node}</li>'
        groups.setdefault(str(row["reason"]), []).append(text)
    opened = " open" if len(rows) <= 12 else ""
    return "".join(
        f"<details{opened}><summary>{escape(reason)} <b>{len(names)}</b></summary><ul>{''.join(names)}</ul></details>"
        for reason, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    )


def _settings(result: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<div><dt>{escape(str(key).replace('_', ' '))}</dt><dd>{_setting(value)}</dd></div>"
        for key, value in result.get("settings", {}).items()
    )
    command = f"<pre>{escape(str(result['command']))}</pre>" if result.get("command") else ""
    return f"<section><h2>How it was made</h2><dl>{rows}</dl>{command}</section>"


def _setting(value: Any) -> str:
    return f"<code>{escape(str(value))}</code>" if value is not None else '<span class="none">none</span>'
