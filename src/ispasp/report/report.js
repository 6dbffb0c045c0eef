/* Other budgets: predicts widths, errors and costs from what the page holds, and writes plans. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("tradeoffs").textContent);
  const { dimensions, measures, layers } = data;
  const box = document.getElementById("play");
  const at = (name) => box.querySelector("." + name);
  const make = (tag, kind, text) => Object.assign(document.createElement(tag), { className: kind, textContent: text ?? "" });
  const slider = at("budget");
  const dense = dimensions.map((d) => d.units);
  const pruned = dimensions.map((d) => d.pruned);
  const labels = { macs: "MACs", params: "parameters", latency: "time of a call" };
  let measure = "macs", paths = {}, widths = dense;

  /* Costs. A length is a sum of products of widths, a term a factor times lengths: see budget/tradeoffs.py. */
  const lengthOf = (length, w) =>
    length.reduce((sum, [size, ...which]) => sum + which.reduce((n, i) => n * w[i], size), 0);
  function cost(name, w) {
    const { terms, tables, fixed, per, folded } = measures[name];
    let total = fixed;
    for (const [factor, lengths] of terms) {
      total += lengths.reduce((n, [length, table]) => {
        const size = lengthOf(length, w);
        return n * (table < 0 ? size : tables[table][size]);
      }, factor);
    }
    for (const [count, which] of folded ?? []) total += which.every((i) => w[i] === dense[i]) ? count : 0;
    return per ? Math.floor(total / per) : total;
  }

  /* Errors: linear between the points of the curve. Their sum predicts the error of the network. */
  function between(xs, ys, x) {
    const k = xs.findIndex((each) => each >= x);
    if (k <= 0) return ys[k < 0 ? ys.length - 1 : 0];
    return ys[k - 1] + ((ys[k] - ys[k - 1]) * (x - xs[k - 1])) / (xs[k] - xs[k - 1]);
  }
  const errorAt = (i, width) => between(...dimensions[i].curve, width);
  const error = (w) => Math.sqrt(w.reduce((sum, width, i) => sum + Math.max(errorAt(i, width), 0), 0));

  /* From dense to narrowest: each step narrows the dimension that loses least for what it saves. */
  function descend(name) {
    const w = [...dense], place = dimensions.map((d) => d.widths.length - 1);
    const path = [{ widths: [...w], cost: cost(name, w) }];
    for (;;) {
      const now = path.at(-1).cost;
      let best = null;
      dimensions.forEach((d, i) => {
        const k = place[i] - 1;
        if (k < 0) return;
        const saved = now - cost(name, w.with(i, d.widths[k]));
        const price = (d.hull[k] - d.hull[k + 1]) / Math.max(saved, 1e-12);
        if (!best || price < best.price) best = { i, price };
      });
      if (!best) return path;
      w[best.i] = dimensions[best.i].widths[(place[best.i] -= 1)];
      path.push({ widths: [...w], cost: cost(name, w), moved: best.i });
    }
  }

  /* The first network of the path within the limit; its last step goes only as far as it must. */
  function spend(name, limit) {
    const path = paths[name];
    const k = path.findIndex((step) => step.cost <= limit);
    if (k <= 0) return path.at(k).widths;
    const { moved: i, widths: narrow } = path[k], { step } = dimensions[i];
    for (let width = path[k - 1].widths[i] - 1; step && width > narrow[i]; width--) {
      const tried = path[k - 1].widths.with(i, width);
      if (width % step === 0 && cost(name, tried) <= limit) return tried;
    }
    return narrow;
  }

  /* The plan: the first units of each order stay. What it does not narrow, it does not fold. */
  function plan() {
    const found = structuredClone(data.plan), cut = new Set();
    dimensions.forEach(({ name, units, order }, i) => {
      if (widths[i] === units) return;
      cut.add(name);
      found.dimensions[name].kept = order.slice(0, widths[i]).sort((a, b) => a - b);
    });
    const holds = (tensor) =>
      tensor && Object.values(tensor.axes).some((axis) => axis.flat().some(([name]) => cut.has(name)));
    found.folded = found.folded.filter((path) => ["weight", "bias"].some((n) => holds(found.tensors[`${path}.${n}`])));
    return JSON.stringify(found);
  }

  /* Texts */
  const digits = (x) => (x < 1 ? x && x.toPrecision(2) : x < 1e3 ? x.toPrecision(3) : x.toLocaleString("en", { maximumFractionDigits: 0 }));
  const percent = (x) => (x > 0 && x < 5e-5 ? "<\u202f0.01" : digits(100 * x)) + "\u202f%";
  const times = (x) => (x > 100 ? "over 100" : digits(x));
  function count(n) {
    if (n < 1e4) return n.toLocaleString("en", { maximumFractionDigits: n < 100 ? 2 : 0 });
    const [size, letter] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "K"]].find(([s]) => n >= s);
    return (n / size).toPrecision(3) + "\u202f" + letter;
  }

  /* The drawing of error against cost */
  const [high, edge, ground] = [170, 8, 148];
  const chart = at("tradeoff");
  let wide = 600;
  function place(share, lost) {
    const path = paths[measure], all = measures[measure].dense;
    const least = path.at(-1).cost / all;
    const x = edge + ((wide - 2 * edge) * (share - least)) / Math.max(1 - least, 1e-12);
    return [Math.min(Math.max(x, edge), wide - edge), ground - (ground - 18) * Math.min(lost / most(), 1)];
  }
  function most() {
    const last = paths[measure].at(-1).error;
    return Math.min(last, Math.max(4 * error(pruned), error(widths)) || last) || 1;  /* steep ends are cut off */
  }
  const label = (x, y, anchor, text) => `<text x="${x}" y="${y}" text-anchor="${anchor}">${text}</text>`;
  function scale() {
    const rows = [1, 0.5].map((part) => {
      const y = place(0, part * most())[1];
      return `<line class="grid" x1="${edge}" x2="${wide - edge}" y1="${y}" y2="${y}"/>` +
        label(wide - edge, y - 5, "end", (part === 1 ? "predicted error " : "") + percent(part * most()));
    });
    const least = percent(paths[measure].at(-1).cost / measures[measure].dense);
    return rows.join("") + label(edge, high - 5, "start", least) + label(wide - edge, high - 5, "end", "100\u202f%") +
      `<line class="axis" x1="${edge}" x2="${wide - edge}" y1="${ground}" y2="${ground}"/>`;
  }
  function draw() {
    const all = measures[measure].dense;
    wide = chart.clientWidth;
    chart.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    const line = paths[measure].map((step) => place(step.cost / all, step.error).map((v) => v.toFixed(1)).join());
    const [[x, y], [rx, ry]] = [widths, pruned].map((w) => place(cost(measure, w) / all, error(w)));
    chart.innerHTML =
      scale() +
      `<polygon class="area" points="${line.join(" ")} ${edge},${ground} ${wide - edge},${ground}"/>` +
      `<polyline class="curve" points="${line.join(" ")}"/>` +
      `<line class="drop" x1="${x}" x2="${x}" y1="${y}" y2="${ground}"/>` +
      `<circle class="before" cx="${rx}" cy="${ry}" r="5"/><circle class="here" cx="${x}" cy="${y}" r="7"/>`;
  }

  /* The sketch: a bar for every layer, as high as the root of its channels, filled as far as they stay */
  const sketch = at("sketch"), info = at("info");
  const tallest = Math.max(...layers.map((layer) => lengthOf(layer.length, dense)));
  const bars = layers.map((layer) => {
    const bar = make("i", layer.reason ? "stays" : ""), all = lengthOf(layer.length, dense);
    bar.style.height = Math.max(100 * Math.sqrt(all / tallest), 4) + "%";
    bar.append(make("b"));
    sketch.append(bar);
    return bar;
  });
  sketch.style.maxWidth = 64 * bars.length + "px";
  let pointed = -1;
  function tell(k) {
    bars[pointed]?.classList.remove("pointed");
    pointed = Math.min(Math.max(k, 0), bars.length - 1);
    bars[pointed].classList.add("pointed");
    const { name, length, reason } = layers[pointed], all = lengthOf(length, dense), now = lengthOf(length, widths);
    info.textContent = `${name}: ` + (reason ? `all ${all} channels stay, ${reason}` : `${now} of ${all} channels`);
  }
  sketch.addEventListener("pointermove", (event) => {
    const { left, width } = sketch.getBoundingClientRect();
    tell(Math.floor(((event.clientX - left) / width) * bars.length));
  });
  sketch.addEventListener("pointerdown", (event) => sketch.dispatchEvent(new PointerEvent("pointermove", event)));
  sketch.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { tell(pointed + step); event.preventDefault(); }
  });

  /* The list of widths */
  const rows = dimensions.map((d) => {
    const row = make("li"), meter = make("div", "meter"), text = make("span", "dim");
    meter.append(make("i"));
    row.append(make("span", "name", d.name), meter, text);
    at("list").append(row);
    return { fill: meter.firstChild, text };
  });
  at("list").parentElement.open = dimensions.length <= 24;

  function show() {
    Object.keys(measures).forEach((name) => {
      const now = cost(name, widths), all = measures[name].dense;
      at(name).textContent = count(now);
      at(name).title = now;
      at(name + "-under").textContent = `${percent(now / all)} of ${count(all)}${name === "latency" ? "\u202fms" : ""}`;
    });
    const lost = error(widths), ours = error(pruned);
    at("error").textContent = percent(lost);
    at("error-under").textContent = ours > 0 ? `${times(lost / ours)} times that of this network` : "";
    rows.forEach(({ fill, text }, i) => {
      fill.style.width = (100 * widths[i]) / dense[i] + "%";
      text.textContent = `${widths[i]} of ${dense[i]}, error ${percent(Math.sqrt(Math.max(errorAt(i, widths[i]), 0)))}`;
    });
    bars.forEach((bar, k) => {
      const { length } = layers[k];
      bar.firstChild.style.height = (100 * lengthOf(length, widths)) / lengthOf(length, dense) + "%";
    });
    if (pointed >= 0) tell(pointed);
    draw();
  }
  function move() {
    const share = slider.value / 100;
    widths = spend(measure, share * measures[measure].dense * (1 + 1e-9));
    slider.setAttribute("aria-valuetext", `${slider.value} % of the dense network's ${labels[measure]}`);
    at("chosen").textContent = `${slider.value}\u202f% of the dense network's ${labels[measure]}`;
    show();
  }
  function choose(name) {
    measure = name;
    if (!paths[name]) paths[name] = descend(name).map((step) => ({ ...step, error: error(step.widths) }));
    const all = measures[name].dense, least = (100 * paths[name].at(-1).cost) / all;
    slider.min = Math.min(Math.ceil(10 * least) / 10, 100);
    slider.value = Math.ceil((1000 * cost(name, pruned)) / all) / 10;
    move();
  }

  box.querySelectorAll("input[name=measure]").forEach((input) =>
    input.addEventListener("change", () => choose(input.value)));
  slider.addEventListener("input", move);
  addEventListener("resize", draw);
  at("download").addEventListener("click", () => {
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([plan()], { type: "application/json" }));
    link.download = `plan-${measure}-${slider.value}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1e4);
  });
  box.hidden = false;
  choose(box.querySelector("input[name=measure]:checked").value);
})();
