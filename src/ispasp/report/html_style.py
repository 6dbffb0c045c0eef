"""The style sheet of the report: one accent, light and dark, no resource from anywhere."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16202e; --soft: #5a6778; --line: #e1e6ec; --track: #dbe1e9;
  --accent: #1f62d6; --other: #c2570c; --good: #17795e; --good-soft: #dcf2ea;
  --warn-soft: #fdeeda;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", "Segoe UI Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e131a; --card: #171e28; --ink: #e8edf4; --soft: #9aa7b8; --line: #2a3443; --track: #364254;
    --accent: #6ba1ff; --other: #f59a52; --good: #57cba6; --good-soft: #143229;
    --warn-soft: #3b2a14;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 56px; }
header { display: flex; gap: 18px; align-items: center; margin-bottom: 28px; }
header svg { flex: none; width: 60px; height: 60px; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 18px; letter-spacing: -0.01em; }
h3 { margin: 0 0 2px; font: 600 12.5px/1.4 var(--mono); overflow-wrap: anywhere; }
p { margin: 4px 0 0; color: var(--soft); max-width: 80ch; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 22px 24px;
  margin-top: 18px; }
code, .name { font-family: var(--mono); font-size: 12.5px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 14px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 14px; padding: 18px 20px; }
.tile .label { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 34px; font-weight: 650; letter-spacing: -0.03em; line-height: 1.25; display: flex;
  flex-wrap: wrap; align-items: baseline; column-gap: 10px; }
.tile .value span { white-space: nowrap; }
.tile .value small { font-size: 15px; font-weight: 500; color: var(--soft); letter-spacing: 0; }
.tile .under { color: var(--soft); font-size: 13px; margin-top: 8px; }
.meter { height: 8px; border-radius: 4px; background: var(--track); overflow: hidden; margin-top: 8px; }
.meter i { display: block; height: 100%; background: var(--accent); border-radius: 4px; min-width: 2px; }
.proof { background: var(--good-soft); border-color: transparent; }
.proof .value { color: var(--good); font-size: 28px; font-weight: 650; }
table { width: 100%; margin-top: 14px; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 12.5px; padding: 6px 12px 6px 0;
  border-bottom: 1px solid var(--line); white-space: nowrap; vertical-align: bottom; }
td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); font-size: 13.5px; }
tr:last-child td { border-bottom: 0; }
th:last-child, td:last-child { padding-right: 0; }
.r { text-align: right; white-space: nowrap; }
.dim { color: var(--soft); }
.none { color: var(--soft); font-style: italic; }
td svg { display: block; }
.scale { width: 140px; }
.scale span { display: inline-block; width: 33%; text-align: center; }
.scale span:first-child { text-align: left; } .scale span:last-child { text-align: right; }
svg text { font-family: inherit; font-size: 11px; fill: var(--soft); }
svg .track { fill: var(--track); }
svg .kept { fill: var(--accent); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--soft); stroke-width: 1; opacity: 0.55; }
svg .area { fill: var(--accent); opacity: 0.13; }
svg .curve { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .here { fill: var(--accent); stroke: var(--card); stroke-width: 2; }
svg .drop { stroke: var(--accent); stroke-width: 1; stroke-dasharray: 2 3; }
svg .said { fill: var(--ink); font-weight: 600; }
svg .before { fill: var(--card); stroke: var(--other); stroke-width: 2; }
svg .link { stroke: var(--track); stroke-width: 2; }
.column:hover .track { fill: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; color: var(--soft); font-size: 13px; margin-top: 8px; }
.legend svg { width: 12px; height: 12px; vertical-align: -1px; margin-right: 6px; }
.facets { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 20px 22px;
  margin-top: 16px; }
.facets > div { display: flex; flex-direction: column; justify-content: space-between; }
.facets svg { width: 100%; height: auto; display: block; }
details { border-top: 1px solid var(--line); padding: 10px 0; }
details:first-of-type { margin-top: 12px; }
details:last-of-type { padding-bottom: 0; }
summary { cursor: pointer; }
summary b { color: var(--soft); font-weight: 500; margin-left: 6px; font-variant-numeric: tabular-nums; }
details ul { margin: 8px 0 2px; padding-left: 22px; columns: 260px 3; column-gap: 28px; }
details li { break-inside: avoid; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 12px 22px; margin: 14px 0 0; }
dt { color: var(--soft); font-size: 13px; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 14px 0 0; padding: 12px 14px; background: var(--page); border: 1px solid var(--line); border-radius: 8px;
  font: 12.5px/1.5 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; }
.warning { background: var(--warn-soft); border-left: 4px solid var(--other); border-radius: 6px; padding: 10px 14px;
  margin: 0 0 16px; color: var(--ink); max-width: none; overflow-wrap: anywhere; }
.advice { border-left: 4px solid var(--accent); padding: 6px 14px; margin: 16px 0 0; color: var(--ink);
  max-width: none; overflow-wrap: anywhere; }
td.name { min-width: 150px; }
.more { margin-top: 18px; }
@media (max-width: 640px) {
  main { padding: 24px 14px; } section { padding: 16px; } header svg, .roomy { display: none; }
  h1 { font-size: 24px; } .tile .value { font-size: 28px; }
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: flex; flex-wrap: wrap; gap: 3px 14px; align-items: center; padding: 10px 0;
    border-bottom: 1px solid var(--line); }
  td { border: 0; padding: 0; }
  td.name { min-width: 0; flex: 1 1 calc(100% - 130px); } td.bar { flex: 1 1 50%; } td.error { flex: 1 1 100%; }
  td.number { padding: 0; } td.number::before { content: attr(data-label) " "; color: var(--soft); }
  .whole td.number { display: none; }
  details ul { columns: auto; }
}
@media print {
  body { background: #fff; } section, .tile { break-inside: avoid; }
}
"""
