"use strict";
// Draws the page from the JSON in #data: rows (as of qsparse.measure), kernels (as of qsparse bench), insides, notes.
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F"]; // Okabe & Ito, 2008
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star"];
const byId = (id) => document.getElementById(id);
const NUMBER = new Intl.NumberFormat("en");

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const digits = (value) => (value >= 1000 ? value.toFixed(0) : value.toPrecision(3));
function time(us) {
  if (us < 999.5) return `${digits(us)} µs`;
  return us < 999.5e3 ? `${digits(us / 1e3)} ms` : `${digits(us / 1e6)} s`;
}
const percent = (fraction) => `${(100 * fraction).toFixed(2)} %`;
const device = (row) => row.gpu || row.device || "?";
const at = (row, field, batch) => (row[field] || {})[batch];

// The table's columns: head, value to sort by, text to show (of a value that is there).
const BATCHES = [...new Set(DATA.rows.flatMap((row) => Object.keys(row.latency_us || {})))].sort((a, b) => a - b);
const COLUMNS = [
  ["run", (row) => row.run, null],
  ["variant", (row) => row.variant, null],
  ["accuracy", (row) => (row.accuracy == null ? null : 100 * row.accuracy), (value) => value.toFixed(2) + " %"],
  ["change", (row) => row.accuracy_change, (value) => (value > 0 ? "+" : "") + value.toFixed(2)],
  ["agrees", (row) => (row.agreement == null ? null : 100 * row.agreement), (value) => value.toFixed(2) + " %"],
  ...BATCHES.map((batch) => [`batch ${batch}`, (row) => at(row, "latency_us", batch), time]),
  ...BATCHES.map((batch) => [`speed-up ${batch}`, (row) => at(row, "speedup", batch), (value) => digits(value) + "x"]),
  ["bytes", (row) => row.weight_bytes, (value) => NUMBER.format(value)],
  ["dtype", (row) => row.dtype, null],
  ["format", (row) => row.format, null],
  ["density", (row) => row.density, (value) => String(+value.toPrecision(4))],
  ["method", (row) => row.method, null],
  ["kernel", (row) => row.kernel, null],
  ["device", device, null],
  ["seed", (row) => row.seed, String],
  ["date", (row) => row.date, null],
];
const NAMES = new Map(COLUMNS.map(([head], place) => [head.replace(/ /g, ""), place]));
const TABLE = DATA.rows.map((row) => {
  const values = COLUMNS.map(([, value]) => value(row) ?? null);
  const texts = COLUMNS.map(([, , show], place) => (values[place] === null ? "-" : show ? show(values[place]) : String(values[place])));
  return { row, values, texts, all: texts.join("\n").toLowerCase() + (row.simulated ? "\nsimulated" : "") };
});
let shown = TABLE; // what the filter lets through
let order = TABLE; // by the last sort
let most = 300; // rows in the table

function settings(row) {
  // What a person wants to know of a point: the variant and all that was chosen for it.
  const lines = [`<b>${escaped(row.variant)}</b>${row.simulated ? " (simulated)" : ""}`, `run ${escaped(row.run)}`];
  for (const field of ["sizes", "dtype", "layers", "activations", "granularity", "calibration", "method", "format", "density",
    "distribution", "pattern", "finetune_epochs", "kernel", "seed"]) {
    const value = row[field];
    if (value === null || value === undefined || value === "") continue;
    const text = field === "density" ? +value.toPrecision(4) : field === "sizes" ? value.join("-") : value;
    lines.push(`${field} ${escaped(typeof text === "object" ? JSON.stringify(text) : String(text))}`);
  }
  lines.push(escaped(device(row)));
  return lines.join("<br>");
}
const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");

function theme() {
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
  return { ink, soft, line };
}

function layout(title, x, y, more = {}) {
  const { ink, line } = theme();
  const axis = (text) => ({ title: { text }, gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true });
  return {
    title: { text: title, font: { size: 15 }, x: 0, xanchor: "left", pad: { l: 8 } },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink },
    margin: { l: 56, r: 12, t: 40, b: 48 }, hovermode: "closest", showlegend: true,
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" },
    ...more,
    xaxis: { ...axis(x), ...more.xaxis }, yaxis: { ...axis(y), ...more.yaxis },
  };
}

function plot(id, traces, shape, label) {
  const place = typeof id === "string" ? byId(id) : id;
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  return Plotly.react(place, traces, shape, { responsive: true, displaylogo: false });
}

function front(points) {
  // Of points with x (less is better) and y (more is better): those that no other beats in both, from left to right.
  const best = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || b.y - a.y)) {
    if (!best.length || point.y > best[best.length - 1].y) best.push(point);
  }
  return best;
}

function kind(row) {
  if (row.variant === "baseline") return "baseline";
  if (row.peer) return "library";
  return (row.format && row.format !== "dense" ? `${row.format} ` : "") + (row.dtype || "?") + (row.simulated ? " simulated" : "");
}
const KINDS = [...new Set(DATA.rows.map(kind))];

function marker(name, soft) {
  if (name === "baseline") return { color: theme().ink, symbol: "circle", size: 10 };
  const place = KINDS.filter((each) => each !== "baseline").indexOf(name);
  const symbol = SYMBOLS[Math.floor(place / COLOURS.length) % SYMBOLS.length] + (soft ? "-open" : "");
  return { color: COLOURS[place % COLOURS.length], symbol, size: 9, line: { width: soft ? 2 : 0.5, color: soft ? undefined : theme().line } };
}

function pareto(id, title, axis, x, show, spread) {
  const points = shown
    .map(({ row }) => ({ row, x: x(row), y: row.accuracy == null ? null : 100 * row.accuracy }))
    .filter((point) => point.x > 0 && point.y !== null);
  const traces = [];
  const best = front(points);
  traces.push({
    x: best.map((p) => p.x), y: best.map((p) => p.y), mode: "lines", hoverinfo: "skip", showlegend: false,
    line: { shape: "hv", color: theme().soft, width: 1, dash: "dot" },
  });
  for (const name of KINDS) {
    const own = points.filter((point) => kind(point.row) === name);
    if (!own.length) continue;
    const bars = spread ? own.map((p) => spread(p.row)) : [];
    traces.push({
      x: own.map((p) => p.x), y: own.map((p) => p.y), name, mode: "markers", marker: marker(name, name === "library"),
      text: own.map((p) => `${settings(p.row)}<br><b>${p.y.toFixed(2)} %, ${show(p.x)}</b>`),
      hovertemplate: "%{text}<extra></extra>",
      ...(bars.length && bars.every(([low, high]) => low && high)
        ? { error_x: { type: "data", symmetric: false, thickness: 1, width: 0, array: own.map((p, i) => Math.max(bars[i][1] - p.x, 0)), arrayminus: own.map((p, i) => Math.max(p.x - bars[i][0], 0)) } }
        : {}),
    });
  }
  const listed = best.map((point) => `${point.row.variant} of ${point.row.run}, ${point.y.toFixed(2)} %, ${show(point.x)}`);
  const some = listed.length > 8 ? [...listed.slice(0, 8), `and ${listed.length - 8} more`] : listed;
  plot(id, traces, layout(title, axis, "accuracy on the test set (%)", { xaxis: { type: "log" } }),
    `${title}: ${points.length} points. No other row beats in both: ${some.join("; ") || "none"}.`);
  return listed;
}

function drawPareto() {
  const batch = byId("batch").value;
  const lists = [
    [`Accuracy against latency at batch ${batch}`, pareto("latency", `Accuracy against latency at batch ${batch}`, "latency in µs, logarithmic",
      (row) => at(row, "latency_us", batch), time, (row) => [at(row, "latency_us_p10", batch), at(row, "latency_us_p90", batch)])],
    ["Accuracy against stored bytes", pareto("bytes", "Accuracy against stored bytes", "weight bytes, logarithmic",
      (row) => row.weight_bytes, (bytes) => `${NUMBER.format(bytes)} bytes`)],
  ];
  byId("fronts").replaceChildren(...lists.flatMap(([title, lines]) => {
    const list = element("ul");
    list.append(...lines.map((line) => element("li", line)));
    return [element("h3", title), list];
  }));
}

function drawCrossover() {
  const batch = byId("batch").value;
  const groups = new Map();
  const add = (name, x, y, text) => {
    if (!(x > 0 && y > 0)) return;
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push({ x, y, text });
  };
  for (const { row } of shown) {
    if (row.density != null) add(`${kind(row)}, ${(row.sizes || []).join("-")} at batch ${batch}`, row.density, at(row, "speedup", batch), settings(row));
  }
  for (const row of DATA.kernels) {
    if (row.density != null) add(`${row.op} ${row.dtype} over ${row.peer}`, row.density, row.ratio, `${escaped(row.op)}:${escaped(row.tier)} ${row.shape.join(", ")}<br>${escaped(row.gpu || "cpu")}`);
  }
  byId("crossover-section").hidden = !groups.size;
  if (!groups.size) return;
  const traces = [...groups].map(([name, points], place) => {
    points.sort((a, b) => a.x - b.x);
    return {
      x: points.map((p) => p.x), y: points.map((p) => p.y), text: points.map((p) => p.text), name, mode: "markers",
      marker: { color: COLOURS[place % COLOURS.length], symbol: SYMBOLS[Math.floor(place / COLOURS.length) % SYMBOLS.length], size: 8 },
      hovertemplate: "%{text}<br><b>density %{x:.4g}: %{y:.3g}x</b><extra></extra>",
    };
  });
  const { soft } = theme();
  const said = [...groups].map(([name, points]) => `${name}: ${points.filter((p) => p.y > 1).length} of ${points.length} faster`);
  plot("crossover", traces, layout("Speed-up against density", "density (fraction of the weights that stay), logarithmic", "speed-up, logarithmic", {
    xaxis: { type: "log" }, yaxis: { type: "log" },
    shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: soft, dash: "dash" } }],
  }), `Speed-up against density. ${said.join("; ")}.`);
}

const ROOFS = new Map();
for (const row of DATA.kernels) {
  if (!(row.tflops > 0 && row.gbps > 0 && row.us > 0)) continue;
  const name = `${row.gpu || row.cpu || "cpu"}, ${row.dtype}`;
  if (!ROOFS.has(name)) ROOFS.set(name, []);
  ROOFS.get(name).push(row);
}

function drawRoofline() {
  byId("roofline-section").hidden = !ROOFS.size;
  if (!ROOFS.size) return;
  const rows = ROOFS.get(byId("roof").value);
  const intensity = (row) => (1e3 * row.tflops) / row.gbps; // FLOP a byte
  const what = (row) => `${escaped(row.op)}:${escaped(row.tier)} ${row.shape.join(", ")}${row.epilogue && row.epilogue !== "none" ? " " + escaped(row.epilogue) : ""}`;
  const ours = new Map(rows.map((row) => [`${what(row)} ${row.us}`, row]));
  const compute = Math.max(0, ...rows.map((row) => row.ceiling_tflops || 0));
  const copy = Math.max(0, ...rows.map((row) => row.ceiling_gbps || 0));
  const traces = [
    { name: "qsparse", marker: { color: COLOURS[0], symbol: "circle", size: 8 }, list: [...ours.values()], rate: (row) => row.tflops, text: what },
    ...[...new Set(rows.map((row) => row.peer).filter(Boolean))].map((peer, place) => ({
      name: peer, marker: { color: COLOURS[1 + (place % (COLOURS.length - 1))], symbol: "diamond-open", size: 8 },
      list: rows.filter((row) => row.peer === peer && row.peer_us > 0), rate: (row) => (row.tflops * row.us) / row.peer_us,
      text: (row) => `${escaped(peer)} ${row.shape.join(", ")}`,
    })),
  ].map(({ name, marker, list, rate, text }) => ({
    x: list.map(intensity), y: list.map(rate), text: list.map(text), name, mode: "markers", marker,
    hovertemplate: "%{text}<br><b>%{y:.4g} TFLOP/s, %{x:.4g} FLOP/byte</b><extra></extra>",
  }));
  if (compute && copy) {
    const knee = (1e3 * compute) / copy;
    const low = Math.min(knee, ...rows.map(intensity)) / 2, high = Math.max(knee, ...rows.map(intensity)) * 2;
    traces.unshift({
      x: [low, knee, high], y: [(low * copy) / 1e3, compute, compute], mode: "lines", name: "measured roof",
      line: { color: theme().soft, width: 1.5 }, hoverinfo: "skip",
    });
  }
  const best = [...ours.values()].reduce((a, b) => (a.tflops > b.tflops ? a : b));
  plot("roofline", traces, layout(`Roofline: ${byId("roof").value}`, "FLOP per byte, logarithmic", "TFLOP/s, logarithmic",
    { xaxis: { type: "log" }, yaxis: { type: "log" } }),
    `Roofline of ${byId("roof").value}: ${ours.size} points. The fastest is ${what(best)} at ${digits(best.tflops)} TFLOP/s` +
    (compute ? `, of ${digits(compute)} measured as the ceiling.` : "."));
}

// The table

const BODY = byId("rows").tBodies[0];
const TEXT = new Set(["run", "variant", "dtype", "format", "method", "kernel", "device", "date"]);

function fillTable() {
  const head = element("tr");
  COLUMNS.forEach(([name], place) => {
    const cell = element("th", undefined, { scope: "col", class: TEXT.has(name) ? "text" : "" });
    const button = element("button", name, { type: "button" });
    button.addEventListener("click", () => sort(place, cell.getAttribute("aria-sort") === "ascending"));
    cell.append(button);
    head.append(cell);
  });
  byId("rows").tHead.append(head);
}

function lineOf(entry) {
  if (!entry.line) {
    entry.line = element("tr");
    entry.texts.forEach((text, place) => {
      const name = COLUMNS[place][0];
      entry.line.append(element("td", text, TEXT.has(name) ? { class: name === "kernel" ? "text wrap" : "text" } : {}));
    });
  }
  return entry.line;
}

function fillBody() {
  // The rows that the filter lets through, in the order of the last sort, at most `most`: a browser lays out no more at once.
  const those = new Set(shown);
  const lines = order.filter((entry) => those.has(entry));
  BODY.replaceChildren(...lines.slice(0, most).map(lineOf));
  byId("more").hidden = lines.length <= most;
  byId("more").textContent = `Show all ${NUMBER.format(lines.length)} rows`;
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null); // what is not there comes last, either way
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function sort(place, descending) {
  order = [...TABLE].sort((a, b) => {
    const [x, y] = [a.values[place], b.values[place]];
    return x === null || y === null || !descending ? compare(x, y) : compare(y, x);
  });
  fillBody();
  [...byId("rows").tHead.rows[0].cells].forEach((cell, index) => {
    if (index === place) cell.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

function condition(word) {
  // A word of the filter as a test of an entry of the table.
  const [, name, sign, value] = /^([^<>=]+)(<|>|=)(.+)$/.exec(word) || [];
  const place = name === undefined ? undefined : NAMES.get(name);
  if (place === undefined) return (entry) => entry.all.includes(word);
  if (sign === "=") {
    return (entry) => entry.texts[place].toLowerCase() === value || (typeof entry.values[place] === "number" && entry.values[place] === Number(value));
  }
  const limit = Number(value);
  return (entry) => typeof entry.values[place] === "number" && (sign === ">" ? entry.values[place] > limit : entry.values[place] < limit);
}

function filter() {
  const tests = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
  shown = TABLE.filter((entry) => tests.every((test) => test(entry)));
  fillBody();
  byId("count").textContent = `${NUMBER.format(shown.length)} of ${NUMBER.format(TABLE.length)} rows`;
  drawPareto();
  drawCrossover();
}

// Inside a variant

function histogram(place, layer) {
  const { soft } = theme();
  const traces = layer.bars.map(({ name, x, y, width }, index) => ({
    type: "bar", x, y, name, width, marker: { color: COLOURS[index], opacity: index ? 0.55 : 1 },
    hovertemplate: `${escaped(name)}: %{y} weights at %{x:.4g}<extra></extra>`,
  }));
  if (layer.grid) {
    traces.push({
      x: layer.grid, y: layer.grid.map(() => 0), name: `grid: ${layer.grid.length} levels`, mode: "markers",
      marker: { symbol: "line-ns-open", size: 14, color: soft, line: { width: 1, color: soft } }, hovertemplate: "level %{x:.4g}<extra></extra>",
    });
  }
  plot(place, traces, layout(layer.name, layer.axis, "weights", { barmode: "overlay", bargap: 0 }), layer.label);
}

function picture(source, label, caption, name) {
  const figure = element("figure");
  figure.append(element("img", undefined, { src: `data:image/png;base64,${source}`, alt: label, class: name }), element("figcaption", caption));
  return figure;
}

function drawInside() {
  byId("inside-section").hidden = !DATA.insides.length;
  if (!DATA.insides.length) return;
  const inside = DATA.insides[byId("variant").value];
  const pair = element("div", undefined, { class: "pair" });
  byId("layers").replaceChildren(pair);
  const places = inside.layers.map((layer) => {
    const figure = element("figure", undefined, { class: "wide" });
    const place = element("div", undefined, { class: "plot" });
    figure.append(place, element("figcaption", layer.note));
    pair.append(figure);
    return place;
  });
  places.forEach((place, index) => histogram(place, inside.layers[index])); // each now knows its width
  byId("masks").replaceChildren();
  if (inside.masks.length) {
    byId("masks").append(element("h3", "Input pixels that survive the pruning"));
    byId("masks").append(...inside.masks.map((mask) => picture(mask.png, mask.label, mask.caption, "mask")));
  }
  byId("changed").textContent = inside.changed;
  byId("digits").replaceChildren(...inside.digits.map(({ png, label, caption }) => picture(DATA.images[png], label, caption, "digit")));
}

// The page

function fillEnvironment() {
  const fields = ["device", "gpu", "cpu", "threads", "torch", "cuda", "commit", "timer", "dates", "rows"];
  const head = element("tr");
  head.append(...fields.map((field) => element("th", field, { scope: "col", class: "plain text" })));
  byId("environment").tHead.append(head);
  for (const place of DATA.environments) {
    const line = element("tr");
    line.append(...fields.map((field) => element("td", place[field] ?? "-", { class: "text" })));
    byId("environment").tBodies[0].append(line);
  }
  byId("notes").append(...DATA.notes.map((note) => element("li", note)));
  byId("summary").textContent = DATA.summary;
}

function drawAll() {
  filter();
  drawRoofline();
  drawInside();
}

function start() {
  const usual = BATCHES.includes("1024") ? "1024" : BATCHES[0];
  byId("batch").append(...BATCHES.map((batch) => element("option", NUMBER.format(batch), { value: batch })));
  if (usual) byId("batch").value = usual;
  byId("roof").append(...[...ROOFS.keys()].map((name) => element("option", name, { value: name })));
  byId("variant").append(...DATA.insides.map(({ run, variant }, index) => element("option", `${run}: ${variant}`, { value: index })));
  fillTable();
  fillEnvironment();
  drawAll();
  byId("batch").addEventListener("change", () => { drawPareto(); drawCrossover(); });
  byId("roof").addEventListener("change", drawRoofline);
  byId("variant").addEventListener("change", drawInside);
  byId("more").addEventListener("click", () => { most = Infinity; fillBody(); });
  let waiting;
  byId("filter").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
}
start();
