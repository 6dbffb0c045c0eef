"""A pruned model on one page: HTML that needs nothing beside itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ispasp.errors import visible
from ispasp.report import html_svg as svg
from ispasp.report.html_style import CSS
from ispasp.report.html_text import broken, count, finite, percent, rounding, setting

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
    layers, rows = list(result.get("layers", ())), _in_order(result)
    title = f"{result.get('model') or result.get('plan', {}).get('model') or 'Network'}, pruned"
    parts = [
        _header(title, result.get("settings", {})),
        *(f'<p class="warning">{escape(str(text))}</p>' for text in result.get("warnings", ())),
        _tiles(result),
        *(f'<p class="advice">{escape(str(text))}</p>' for text in result.get("advice", ())),
        _widths(rows),
        _table(rows, bool(result.get("settings", {}).get("compensate"))),
        _curves(layers, curves or {}, str(result.get("no_curves", ""))),
        _section("Notes", [{"name": layer["name"], "reason": n} for layer in layers for n in layer.get("notes", ())]),
        _section("Left whole", result.get("whole", ())),
        _section("Frozen, and why", result.get("frozen", ())),
        _settings(result),
        _certificate(result, layers),
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


def _header(title: str, settings: Mapping[str, Any]) -> str:
    said = [f"method {settings.get('method', 'unknown')}"]
    said += [f"{settings['order']} order"] if settings.get("order") else []
    said.append(_METHOD.get(str(settings.get("compensate")), "not compensated"))
    return f"<header>{svg.MARK}<div><h1>{broken(title)}</h1><p>{escape(', '.join(said))}</p></div></header>"


def _in_order(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Layers that lost units and layers that stay whole, in the order of the network."""
    found = {row["name"]: row for row in result.get("layers", ())}
    if not found:
        return []
    found |= {row["name"]: {**row, "kept": row["units"]} for row in result.get("whole", ())}
    names = dict.fromkeys([*result.get("plan", {}).get("dimensions", ()), *found])
    return [found[name] for name in names if name in found]


def _tiles(result: Mapping[str, Any]) -> str:
    """Evaluation and agreement first: what the network has lost; then what it has become smaller by."""
    cost, agreement = result["cost"], result.get("agreement") or {}
    tiles = [_score(name, scores) for scores in [result.get("scores") or {}] for name in scores.get("after", ())]
    rate, difference = agreement.get("rate"), agreement.get("difference")
    if finite(rate) or finite(difference):
        kind = "held-out" if agreement.get("held_out") else "calibration"
        about = f"{agreement.get('predictions', 0):,} predictions, " if finite(rate) else ""
        about += f"{agreement.get('examples', 0):,} {kind} examples"
        about += f"; outputs differ by {percent(difference)}" if finite(rate) and finite(difference) else ""
        label = "Predictions as the dense model's" if finite(rate) else "Outputs differ by"
        tiles.append(_tile(label, percent(rate if finite(rate) else difference), "", about, rate))
    for label, key in (("Parameters", "params"), ("MACs for one example", "macs")):
        after, before = cost[key], cost[f"dense_{key}"]
        times = f"{before / after:.1f}× fewer" if after and before >= 1.1 * after else ""
        share = after / before if before else 1.0
        tiles.append(_tile(label, count(after), times, f"{100 * share:.1f}&thinsp;% of {count(before)}", share))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _score(name: str, scores: Mapping[str, Any]) -> str:
    before, after = (f"{v:.4g}" if finite(v) else "–" for v in (scores["before"].get(name), scores["after"][name]))
    return _tile(escape(str(name)), after, "", f"{before} before pruning")


def _tile(label: str, value: str, beside: str, under: str, share: float | None = None) -> str:
    meter = f'<div class="meter"><i style="width:{100 * min(share, 1.0):.1f}%"></i></div>' if share is not None else ""
    small = f"<small>{beside}</small>" if beside else ""
    return (
        f'<div class="tile"><div class="label">{label}</div><div class="value"><span>{value}</span>{small}</div>'
        f'{meter}<div class="under">{under}</div></div>'
    )


def _widths(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<section><h2>Widths</h2><p>No layer lost a unit.</p></section>"
    return (
        '<section class="roomy"><h2>Widths</h2><p>Units of every hidden dimension, from first to last. All names and '
        "numbers are in the table below.</p>"
        f'<div class="legend"><span>{svg.KEPT_KEY}stay</span><span>{svg.GONE_KEY}removed</span></div>'
        f"{svg.skyline(rows)}</section>"
    )


def _table(rows: Sequence[Mapping[str, Any]], compensated: bool) -> str:
    if not rows:
        return ""
    legend = (
        f'<div class="legend"><span>{svg.BEFORE_KEY}before compensation</span>'
        f"<span>{svg.AFTER_KEY}after it</span></div>"
        if compensated
        else ""
    )
    titles = ["before", "after", "held out"] if compensated else ["error"]
    head = "".join(f'<th class="r">{title}</th>' for title in titles)
    body = "".join(_row(i + 1, row, compensated) for i, row in enumerate(rows))
    held = " Held out: the same on examples that the fit has not seen; expect this of new data." if compensated else ""
    return (
        "<section><h2>Layers</h2><p>Error: how far the outputs of the layers that read these units are from what they "
        f"should be, relative to their size.{held}</p>{legend}"
        '<table><thead><tr><th class="r">#</th><th>hidden dimension</th><th>kind</th>'
        '<th>units that stay</th><th class="r"></th><th class="scale"><span>0</span><span>error</span>'
        f"<span>100&thinsp;%</span></th>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


def _row(number: int, row: Mapping[str, Any], compensated: bool) -> str:
    kept, units, after = row["kept"], row["units"], row.get("relative_error")
    before = row.get("uncompensated_error") if compensated else None
    values = {"error": after}
    if compensated:
        values = {"before": before, "after": after, "held out": row.get("held_out_error")}
    stay = (
        f'{kept:,} <span class="dim">of {units:,}</span>' if kept < units else f'<span class="dim">all {units:,}</span>'
    )
    errors = svg.dumbbell(before, after) if kept < units else '<span class="dim">left whole</span>'
    cells = "".join(f'<td class="r number" data-label="{key}">{percent(v)}</td>' for key, v in values.items())
    whole = "" if kept < units else ' class="whole"'
    return (
        f'<tr{whole}><td class="r dim">{number}</td><td class="name">{broken(row["name"])}</td>'
        f'<td class="dim">{escape(str(row.get("kind", "")))}</td><td class="bar">{svg.bar(kept, units)}</td>'
        f'<td class="r">{stay}</td><td class="error">{errors}</td>{cells}</tr>'
    )


def _curves(layers: Sequence[Mapping[str, Any]], curves: Curves, without: str) -> str:
    drawn = {name: points for name, points in curves.items() if len(points[0])}
    if not drawn:
        return f"<section><h2>{_ERRORS}</h2><p>{escape(without)}</p></section>" if without else ""
    kept = {layer["name"]: layer["kept"] for layer in layers}
    order = [name for name in kept if name in drawn] + [name for name in drawn if name not in kept]
    facets = [f"<div><h3>{broken(name)}</h3>{svg.curve(*drawn[name], kept.get(name))}</div>" for name in order]
    shown = f'<div class="facets">{"".join(facets[:_FACETS])}</div>'
    if facets[_FACETS:]:
        shown += (
            f'<details class="more"><summary>more layers <b>{len(facets) - _FACETS}</b></summary>'
            f'<div class="facets">{"".join(facets[_FACETS:])}</div></details>'
        )
    return (
        f"<section><h2>{_ERRORS}</h2><p>What the method would lose at other widths, as predicted from the calibration "
        "data, layer by layer and without compensation. The dot is the chosen width with its error.</p>"
        f"{shown}</section>"
    )


def _section(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    return f"<section><h2>{title}</h2>{_grouped(rows)}</section>" if rows else ""


def _grouped(rows: Sequence[Mapping[str, Any]]) -> str:
    """Names under what is said of them, most frequent first; open where that is not long."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        node = f' <span class="dim">({escape(str(row["node"]))})</span>' if row.get("node") else ""
        text = f'<li><span class="name">{broken(row["name"])}</span>{node}</li>'
        groups.setdefault(str(row["reason"]), []).append(text)
    opened = " open" if len(rows) <= 12 else ""
    return "".join(
        f"<details{opened}><summary>{escape(reason)} <b>{len(names)}</b></summary><ul>{''.join(names)}</ul></details>"
        for reason, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    )


def _settings(result: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<div><dt>{escape(str(key).replace('_', ' '))}</dt><dd>{setting(value)}</dd></div>"
        for key, value in result.get("settings", {}).items()
    )
    command = f"<pre>{escape(str(result['command']))}</pre>" if result.get("command") else ""
    return f"<section><h2>How it was made</h2><dl>{rows}</dl>{command}</section>"


def _certificate(result: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> str:
    """What was proved about the surgery, and what was not."""
    said = escape(
        str(result.get("proof") or "Largest relative difference to the dense network with removed units masked")
    )
    rows = "".join(
        f'<li><span class="name">{broken(row["name"])}</span> {rounding(row.get("certificate"))}</li>' for row in layers
    )
    each = f"<details><summary>layer by layer <b>{len(layers)}</b></summary><ul>{rows}</ul></details>" if rows else ""
    missing = [{"name": name, "reason": why} for name, why in (result.get("unproved") or {}).items()]
    return (
        f'<section class="proof"><h2>Removed equals masked</h2><p class="value">{rounding(result.get("verified"))}</p>'
        f"<p>{said}. Rounding only: otherwise pruning stops with an error.</p>{each}"
        f"{'<h2>Not proved</h2>' + _grouped(missing) if missing else ''}</section>"
    )
