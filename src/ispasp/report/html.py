"""`report.html`: a pruned model on one page that needs no other file."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ispasp.errors import visible
from ispasp.report import svg

Curves = Mapping[str, tuple[Sequence[int], Sequence[float]]]
Record = Mapping[str, Any]

_COMPENSATION = {"dense": "compensated towards the dense network", "local": "compensated layer by layer"}
_FACETS = 24  # curves that are visible without a click
_DASH = '<span class="dim">–</span>'
_MEASURES = {"macs": "MACs for one example", "params": "Parameters", "latency": "Milliseconds of a call"}


def html(result: Record, curves: Curves | None = None, tradeoffs: Record | None = None) -> str:
    """One page from `json.loads(result.to_json())`: opens offline, in light and dark, readable without its script.

    `curves`: hidden dimension -> (kept units, squared relative errors). `tradeoffs` are those of the result: the page
    then has a slider for the budget. `result` may also hold "command" (what was typed), "model" (its name), "warnings"
    (sentences at the top) and "no_curves" (why there are none).
    """
    layers, rows = list(result.get("layers", ())), _in_order(result)
    settings = result.get("settings", {})
    title = f"{result.get('model') or result.get('plan', {}).get('model') or 'Network'}, pruned"
    parts = [
        _header(title, settings),
        *(f'<p class="warning">{escape(str(text))}</p>' for text in result.get("warnings", ())),
        _tiles(result),
        *(f'<p class="advice">{escape(str(text))}</p>' for text in result.get("advice", ())),
        _play(tradeoffs) if tradeoffs else "",
        _widths(rows),
        _table(rows, bool(settings.get("compensate"))),
        _curves(layers, curves or {}, str(result.get("no_curves", ""))),
        _section("Notes", [{"name": layer["name"], "reason": n} for layer in layers for n in layer.get("notes", ())]),
        _section("Left whole", result.get("whole", ())),
        _section("Frozen, and why", result.get("frozen", ())),
        _settings(settings, str(result.get("command") or "")),
        _certificate(result, layers),
    ]
    return page(title, "\n".join(part for part in parts if part), _file("report.js") if tradeoffs else "")


def comparison(told: Record, advice: Sequence[str]) -> str:
    """One page from `json.loads(versus.to_json())`: totals, features on the way, examples."""
    title, where = f"{told['model']}, dense and pruned", f"{told['examples']:,} examples"
    tiles, rate = _costs(told["cost"], told["latency"]), told["agreement"]
    tiles.insert(0, _tile("Divergence of the outputs", f"{told['divergence']:.3g}", where))
    if _finite(rate):
        tiles.insert(0, _tile("Predictions as the dense model's", _percent(rate), where, share=rate))
    features = "Relative error of what both networks have, after these modules." if told["layers"] else told["note"]
    parts = [
        f"<header>{svg.MARK}<h1>{_breakable(title)}</h1></header>",
        f'<div class="tiles">{"".join(tiles)}</div>',
        *(f'<p class="advice">{escape(text)}</p>' for text in advice),
        _bars("On the way", escape(features), told["layers"], _percent),
        _bars("Worst examples", "Their numbers, from 0, and how far outputs diverge.", told["worst"], "{:.3g}".format),
    ]
    return page(title, "\n".join(parts))


def _bars(title: str, about: str, errors: Mapping[str, float], text: Callable[[float], str]) -> str:
    most = max(errors.values(), default=0.0) or 1.0
    row = '<tr><td class="name">{}</td><td class="bar">{}</td><td class="r">{}</td></tr>'
    cells = [(_breakable(name), _meter(error / most, "error"), text(error)) for name, error in errors.items()]
    rows = "".join(row.format(*each) for each in cells)
    return f'<section><h2>{title}</h2><p>{about}</p><table class="bars"><tbody>{rows}</tbody></table></section>'


def page(title: str, body: str, script: str = "") -> str:
    """A whole page around a body, with a script that runs at its end.

    Browsers load nothing from outside: charts, styles and the script are in the page, and only this script may run.
    """
    digest = b64encode(sha256(script.encode()).digest()).decode()
    allowed, element = (f"'sha256-{digest}'", f"<script>{script}</script>\n") if script else ("'none'", "")
    values = {"title": escape(title), "css": _file("style.css"), "body": body}
    text = _filled("page.html", allowed=allowed, script=element, **values)
    return visible(f"{text}\n")  # names may hold control characters


def _file(name: str) -> str:
    return files("ispasp.report").joinpath(name).read_text("utf-8")


def _filled(name: str, **values: object) -> str:
    """A file of markup with values in the place of its $names."""
    return Template(_file(name)).substitute(values).rstrip()


def _play(tradeoffs: Record) -> str:
    """The slider, what it changes, and the data that the script reads. Hidden until the script runs."""
    names = [name for name in _MEASURES if name in tradeoffs["measures"]]
    start = names[-1] if "latency" in names else names[0]
    button = '<label><input type="radio" name="measure" value="{}"{}>{}</label>'
    short = {name: _MEASURES[name].partition(" ")[0].replace("Milliseconds", "Latency") for name in names}
    options = "".join(button.format(name, " checked" * (name == start), text) for name, text in short.items())
    tiles = "".join(
        f'<div class="tile"><div class="label">{label}</div><div class="value"><span class="{name}"></span></div>'
        f'<div class="under {name}-under"></div></div>'
        for name, label in (("error", "Predicted error"), *((name, _MEASURES[name]) for name in names))
    )
    text = json.dumps(tradeoffs, separators=(",", ":"))  # ASCII; "<" could end the element
    held = text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
    keys = {"kept": svg.KEPT_KEY, "gone": svg.GONE_KEY, "stays": svg.STAYS_KEY}
    count = len(tradeoffs["dimensions"])
    return _filled("budgets.html", options=options, tiles=tiles, count=count, held=held, **keys)


def _header(title: str, settings: Record) -> str:
    how = [f"method {settings.get('method', 'unknown')}"]
    how += [f"{settings['order']} order"] if settings.get("order") else []
    how.append(_COMPENSATION.get(str(settings.get("compensate")), "not compensated"))
    return f"<header>{svg.MARK}<div><h1>{_breakable(title)}</h1><p>{escape(', '.join(how))}</p></div></header>"


def _in_order(result: Record) -> list[Record]:
    """Pruned and whole layers, in the order of the network."""
    found = {row["name"]: row for row in result.get("layers", ())}
    if not found:
        return []
    found |= {row["name"]: {**row, "kept": row["units"]} for row in result.get("whole", ())}
    names = dict.fromkeys([*result.get("plan", {}).get("dimensions", ()), *found])
    return [found[name] for name in names if name in found]


def _tiles(result: Record) -> str:
    """Scores and agreement first, then sizes."""
    cost, scores, agreement = result["cost"], result.get("scores") or {}, result.get("agreement") or {}
    tiles = []
    for name, after in scores.get("after", {}).items():
        now, before = (f"{v:.4g}" if _finite(v) else "–" for v in (after, scores["before"].get(name)))
        tiles.append(_tile(escape(str(name)), now, f"{before} before pruning"))
    rate, difference = agreement.get("rate"), agreement.get("difference")
    under = f"{agreement.get('examples', 0):,} {'held-out' if agreement.get('held_out') else 'calibration'} examples"
    if _finite(rate):
        under = f"{agreement.get('predictions', 0):,} predictions, {under}; outputs differ by {_percent(difference)}"
        tiles.append(_tile("Predictions as the dense model's", _percent(rate), under, share=rate))
    elif _finite(difference):
        tiles.append(_tile("Outputs differ by", _percent(difference), under))
    return f'<div class="tiles">{"".join([*tiles, *_costs(cost, result.get("latency"))])}</div>'


def _costs(cost: Record, timed: Record | None) -> list[str]:
    tiles = []
    for label, key in (("Parameters", "params"), ("MACs for one example", "macs")):
        after, before = cost[key], cost[f"dense_{key}"]
        times = f"<small>{before / after:.1f}× fewer</small>" if after and before >= 1.1 * after else ""
        share = after / before if before else 1.0
        tiles.append(_tile(label, _count(after), f"{100 * share:.1f}&#8239;% of {_count(before)}", times, share))
    if timed:
        here, there = (f"±{timed[f'{name}_spread'] / 2:.0%}" for name in ("pruned", "dense"))
        under = f"{_percent(timed['pruned'] / timed['dense'])} of {timed['dense']:.3g} ms {there}, "
        under, beside = under + escape(timed["runtime"]), f"<small>{here}</small>"
        tiles.append(_tile("Milliseconds of a call", f"{timed['pruned']:.3g}", under, beside))
    return tiles


def _tile(label: str, value: str, under: str, beside: str = "", share: float | None = None) -> str:
    top = f'<div class="label">{label}</div><div class="value"><span>{value}</span>{beside}</div>'
    bar = "" if share is None else _meter(share, label)
    return f'<div class="tile">{top}{bar}<div class="under">{under}</div></div>'


def _meter(share: float, label: str) -> str:
    """A track filled as far as units stay. All tracks have one length: 12 heads stand beside 4,096 neurons."""
    fill = f'<i style="width:{100 * min(share, 1.0):.1f}%"></i>'
    return f'<div class="meter" role="img" aria-label="{label}">{fill}</div>'


def _widths(rows: Sequence[Record]) -> str:
    if not rows:
        return "<section><h2>Widths</h2><p>No layer lost a unit.</p></section>"
    most = max(row["units"] for row in rows) or 1
    bars = []
    for number, row in enumerate(rows, 1):
        high, filled = 100 * math.sqrt(row["units"] / most), 100 * row["kept"] / max(row["units"], 1)
        hint = escape(f"{number}. {row['name']}: {row['kept']} of {row['units']} units stay")
        bars.append(f'<i style="height:{max(high, 4):.1f}%" title="{hint}"><b style="height:{filled:.1f}%"></b></i>')
    return _filled("widths.html", kept=svg.KEPT_KEY, gone=svg.GONE_KEY, width=64 * len(bars), bars="".join(bars))


def _table(rows: Sequence[Record], compensated: bool) -> str:
    if not rows:
        return ""
    keys = {"error": "relative_error"}
    legend = held = ""
    if compensated:
        keys = {"before": "uncompensated_error", "after": "relative_error", "held out": "held_out_error"}
        held = " Held out: the same on examples that the fit has not seen; expect this of new data."
        marks = f"<span>{svg.BEFORE_KEY}before compensation</span><span>{svg.AFTER_KEY}after it</span>"
        legend = f'<div class="legend">{marks}</div>'
    head = "".join(f'<th class="r">{title}</th>' for title in keys)
    body = "".join(_row(i + 1, row, keys) for i, row in enumerate(rows))
    return _filled("layers.html", held=held, legend=legend, head=head, body=body)


def _row(number: int, row: Record, keys: Mapping[str, str]) -> str:
    kept, units = row["kept"], row["units"]
    texts = {label: _percent(row.get(key)) for label, key in keys.items()}
    cells = "".join(f'<td class="r number" data-label="{label}">{text}</td>' for label, text in texts.items())
    if kept < units:
        whole, errors = "", svg.dumbbell(row.get(keys.get("before", "")), row.get("relative_error"))
        stay = f'{kept:,} <span class="dim">of {units:,}</span>'
    else:
        whole, errors = ' class="whole"', '<span class="dim">left whole</span>'
        stay = f'<span class="dim">all {units:,}</span>'
    bar = _meter(kept / max(units, 1), f"{kept} of {units} units stay")
    return (
        f'<tr{whole}><td class="r dim">{number}</td><td class="name">{_breakable(row["name"])}</td>'
        f'<td class="dim">{escape(str(row.get("kind", "")))}</td><td class="bar">{bar}</td>'
        f'<td class="r">{stay}</td><td class="error">{errors}</td>{cells}</tr>'
    )


def _curves(layers: Sequence[Record], curves: Curves, without: str) -> str:
    kept = {layer["name"]: layer["kept"] for layer in layers}
    names = [name for name in dict.fromkeys([*kept, *curves]) if name in curves and len(curves[name][0])]
    if not names and not without:
        return ""
    about = "Predicted error of each layer at other widths. The dot is the chosen width with its error."
    facets = []
    for name in names:
        errors = [math.sqrt(max(error, 0.0)) for error in curves[name][1]]
        facets.append(f"<div><h3>{_breakable(name)}</h3>{svg.curve(curves[name][0], errors, kept.get(name))}</div>")
    shown, folded = "".join(facets[:_FACETS]), facets[_FACETS:]
    hidden = f'<div class="facets">{"".join(folded)}</div>'
    more = _details("more layers", len(folded), hidden) if folded else ""
    content = f'<p>{about if names else escape(without)}</p><div class="facets">{shown}</div>{more}'
    return f"<section><h2>Error against kept units</h2>{content}</section>"


def _details(summary: str, count: int, content: str, opened: str = "") -> str:
    return f"<details{opened}><summary>{summary} <b>{count}</b></summary>{content}</details>"


def _section(title: str, rows: Sequence[Record]) -> str:
    return f"<section><h2>{title}</h2>{_grouped(rows)}</section>" if rows else ""


def _grouped(rows: Sequence[Record]) -> str:
    """Names under the reason they share, most frequent first; short lists are open."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        node = f' <span class="dim">({escape(str(row["node"]))})</span>' if row.get("node") else ""
        text = f'<li><span class="name">{_breakable(row["name"])}</span>{node}</li>'
        groups.setdefault(str(row["reason"]), []).append(text)
    opened = " open" if len(rows) <= 12 else ""
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return "".join(_details(escape(why), len(names), f"<ul>{''.join(names)}</ul>", opened) for why, names in ordered)


def _settings(settings: Record, command: str) -> str:
    texts = {escape(str(key).replace("_", " ")): _setting(value) for key, value in settings.items()}
    rows = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in texts.items())
    typed = f"<pre>{escape(command)}</pre>" if command else ""
    return f"<section><h2>How it was made</h2><dl>{rows}</dl>{typed}</section>"


def _certificate(result: Record, layers: Sequence[Record]) -> str:
    """The proof that removing equals masking, and its gaps."""
    proof = result.get("proof") or "Largest relative difference to the dense network with removed units masked"
    texts = [(_breakable(row["name"]), _rounding(row.get("certificate"))) for row in layers]
    rows = "".join(f'<li><span class="name">{name}</span> {error}</li>' for name, error in texts)
    each = _details("layer by layer", len(layers), f"<ul>{rows}</ul>") if rows else ""
    unproved = [{"name": name, "reason": why} for name, why in (result.get("unproved") or {}).items()]
    missing = f"<h2>Not proved</h2>{_grouped(unproved)}" if unproved else ""
    error = _rounding(result.get("verified"))
    return _filled("proof.html", error=error, proof=escape(str(proof)), each=each, missing=missing)


def _count(number: float) -> str:
    """A count in K, M, G or T: 50.8 K, 21.8 M, 3.66 G."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(number) >= size:
            return f"{number / (1e3 if letter == 'K' else size):.3g} {letter}"
    return f"{number:,.0f}"


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _percent(value: Any) -> str:
    if not _finite(value):
        return _DASH
    if 0 < value < 5e-5:
        return "&lt;&#8239;0.01&#8239;%"
    return f"{100 * value:.2f}&#8239;%" if abs(value) < 0.1 else f"{100 * value:.1f}&#8239;%"


def _rounding(value: Any) -> str:
    return "0" if value == 0 else f"{value:.0e}" if _finite(value) else _DASH


def _breakable(text: Any) -> str:
    """A module path that browsers may break after its signs."""
    return re.sub(r"([._:/])", r"\1<wbr>", escape(str(text)))


def _setting(value: Any) -> str:
    """A setting: one line per name of a mapping, commas in a list."""
    if isinstance(value, Mapping) and value:
        return "<br>".join(f"<code>{escape(f'{key} {_text(each)}')}</code>" for key, each in value.items())
    text = _text(value)
    return f"<code>{escape(text)}</code>" if text else '<span class="none">none</span>'


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None or value == {} else str(value)
