"use strict";
// Everything shown comes from the JSON in #data. A number is written by num(path), never by hand; names and labels
// are text nodes, never HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 7;
const FEW_TESTS = 10;
const MANY_LINES = 8;  // more than these in one chart are told apart by nobody: at first it has the BEST, and the worst
const BEST = 4;
const FAR = 5;  // a loss so many times the others' is of another kind: a teacher's
const SQUASHED = 2;  // an axis so many times as long as the final half needs
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
const CURVES = [
  { key: "loss", title: "Training loss", unit: "", log: false, digits: "sig4" },
  { key: "accuracy", title: "Accuracy", unit: "%", log: null, digits: "fixed2" },
  { key: "flips_percent", title: "Signs flipped in the epoch", unit: "%", log: true, digits: "sig3" },
];

/* ---------- small helpers ---------- */

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
function at(path) {
  return path.split(".").reduce((value, key) => value[key], DATA);
}
function written(value, as) {
  const [, kind, digits] = /^([a-z]+)(\d*)$/.exec(as);
  if (kind === "int") return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  const text = kind === "sig" ? shortest(value, +digits) : value.toFixed(+digits);
  return (kind === "signed" && value > 0 ? "+" : "") + text.replace(/-/g, "−");
}
function shortest(value, digits) {
  const text = value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(digits - 1) : value.toPrecision(digits);
  return text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
}
// A number of the data, by its place there. `as`: fixedN, signedN (with a plus), sigN or int.
function num(path, as, unit) {
  const value = at(path);
  if (value === null || value === undefined) return el("span", { class: "quiet" }, "–");
  const shown = el("data", { value: String(value), "data-at": path, "data-as": as }, written(value, as));
  return unit ? el("span", { class: "figures" }, shown, "\u202f" + unit) : shown;
}
function plusMinus(base, as, mean = "mean", std = "std") {
  const spread = at(`${base}.${std}`);
  const hasSpread = spread !== null && spread !== undefined;
  return el("span", { class: "figures" }, num(`${base}.${mean}`, as), hasSpread ? " ± " : null, hasSpread ? num(`${base}.${std}`, as) : null);
}
function colour(index) {
  return `var(--c${index % COLOURS})`;
}
function dash(index) {
  return DASHES[Math.floor(index / COLOURS) % DASHES.length];
}
function keySample(index) {
  return svg("svg", { class: "key", viewBox: "0 0 22 8", "aria-hidden": "true" },
    svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": 2.5, "stroke-dasharray": dash(index), style: `stroke:${colour(index)}` }));
}
function copyButton(text, what) {
  const button = el("button", { type: "button", class: "copy", "aria-label": `copy ${what}` }, "copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text)) ? "copied" : "select it";
    setTimeout(() => { button.textContent = "copy"; }, 1600);
  });
  return button;
}
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // a file opened from disk may have no clipboard
    const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
function switcher(label, options, chosen, change) {
  const buttons = options.map(([value, name]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => choose(value) }, name));
  const choose = (value) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === value)));
    change(value);
  };
  return el("span", { class: "switch", role: "group", "aria-label": label }, buttons);
}
function headings(...names) {
  return el("thead", null, el("tr", null, names.map((name) =>
    el("th", { scope: "col", class: /^›/.test(name) ? "right" : null }, name.replace(/^›/, "")))));
}

/* ---------- tables ---------- */

function resultsTable(section, base) {
  const span = strips(section);
  const paper = section.arms.some((arm) => arm.paper), compared = section.arms.some((arm) => arm.against);
  const beside = !paper && !section.arms.some(hasP);  // on a phone: short enough to stand beside the other figures
  const head = el("thead", null, el("tr", null,
    el("th", { scope: "col" }, "arm"), el("th", { scope: "col", class: "right" }, "n"),
    el("th", { scope: "col", class: "right" }, "mean ± std, %"), el("th", { scope: "col", class: "right" }, "best, %"),
    paper ? el("th", { scope: "col", class: "right" }, "paper, %") : null,
    compared ? el("th", { scope: "col", class: "right difference" }, `difference from ${section.reference}`) : null,
    el("th", { scope: "col" }, "seeds", span ? el("span", { class: "strip-axis", "aria-hidden": "true" }, el("span", null, tickText(span[0])), el("span", null, tickText(span[1]))) : null),
    el("th", { scope: "col" }, "command")));
  const rows = section.arms.map((arm, i) => {
    const here = `${base}.arms.${i}`;
    const stopped = arm.runs.filter((run) => run.stopped).length;
    return el("tr", null,
      el("th", { scope: "row" }, el("span", { class: "label" }, keySample(i), el("span", null, arm.label)), arm.start ? el("div", { class: "quiet" }, "from ", arm.start) : null),
      el("td", { class: "right", "data-head": "n" }, num(`${here}.n`, "int")),
      el("td", { class: "right", "data-head": "mean ± std, %" }, el("span", null, plusMinus(here, "fixed2"), stopped ? el("span", { class: "quiet" }, " (some stopped)") : null)),
      el("td", { class: "right", "data-head": "best, %" }, num(`${here}.best`, "fixed2")),
      paper ? el("td", { class: arm.paper ? "right" : "right none", "data-head": "paper, %" }, arm.paper ? plusMinus(`${here}.paper`, "fixed2") : el("span", { class: "quiet" }, "–")) : null,
      compared ? el("td", { class: ["right difference", beside ? "beside" : "", arm.against ? "" : "none"].join(" "), "data-head": "difference" }, difference(arm, here)) : null,
      el("td", { class: "strip-cell", "data-head": "seeds" }, span ? strip(arm, i, span) : null),
      el("td", { class: "command-cell", "data-head": "command" }, foldedCommand(arm)));
  });
  return el("table", { class: "results" }, el("caption", { class: "unseen" }, "Accuracy of each arm"), head, el("tbody", null, rows));
}
function hasP({ against }) {
  return against !== null && (against.p !== null || against.paired_p !== null);
}
function difference(arm, here) {
  if (!arm.against) return el("span", { class: "quiet" }, "–");
  const p = [["p", "p "], ["paired_p", "paired "]].filter(([field]) => arm.against[field] !== null);
  // over the seeds that both arms have, where one has more
  const inCommon = arm.against.paired_difference === null ? [] : [num(`${here}.against.paired_difference`, "signed2"), ", "];
  const tested = p.flatMap(([field, name], k) => [k ? "; " : "(", name, ...(field === "paired_p" ? inCommon : []), num(`${here}.against.${field}`, "sig2")]);
  return el("span", { class: "figures" }, num(`${here}.against.difference`, "signed2"), p.length ? [" ", el("span", { class: "quiet" }, tested, ")")] : null);
}
function resultsNote(section) {
  const tested = section.arms.some(hasP) ? ", with p as in the t-tests below." : ".";
  return "n: seeds that were trained to the end; std: of the sample. A dot is a seed, the bar mean ± std" + (section.arms.some((arm) => arm.paper) ? ", the diamond the paper’s figure." : ".") +
    (section.arms.some((arm) => arm.against) ? ` The difference is that of the means from ${section.reference}, in points${tested}` : "") +
    (section.arms.some((arm) => arm.against && arm.against.paired_difference !== null) ? " One beside “paired” is the mean over the seeds that both arms have." : "");
}
// Arms of one study have nearly the same command: a wall of text where they are compared. It is copied without unfolding.
function foldedCommand(arm) {
  return el("div", { class: "command" }, el("details", null, el("summary", { "aria-label": `command of ${arm.label}` }, "command"), codeWords(arm.command)),
    copyButton(arm.command, `the command of ${arm.label}`));
}
function command(arm) {
  return el("div", { class: "command" }, codeWords(arm.command), copyButton(arm.command, `the command of ${arm.label}`));
}
// Lines break between words, not after the hyphens of an option.
function codeWords(text) {
  return el("code", null, text.split(" ").flatMap((word, k) => [k ? " " : "", el("span", null, word)]));
}
function strips(section) {
  const all = section.arms.flatMap((arm) => [
    ...arm.runs.map((run) => run.accuracy), arm.paper && arm.paper.mean,
    ...(arm.std === null || arm.mean === null ? [] : [arm.mean - arm.std, arm.mean + arm.std])]).filter((v) => v !== null && v !== undefined);
  if (!all.length) return null;
  const ticks = niceTicks(Math.min(...all), Math.max(...all), 4);
  const step = ticks[1] - ticks[0];
  return [Math.floor(Math.min(...all) / step) * step, Math.ceil(Math.max(...all) / step + 1e-9) * step];
}
// Seeds as dots, mean ± std as a bar, the paper's figure as a diamond, on one scale for all arms.
function strip(arm, index, [low, high]) {
  const x = (v) => `${(100 * (v - low) / (high - low)).toFixed(2)}%`, ink = `stroke:${colour(index)}`;
  const marks = [svg("line", { x1: "0%", x2: "100%", y1: 12, y2: 12, class: "grid" })];
  if (arm.mean !== null) {
    const spread = arm.std || 0;
    marks.push(svg("line", { x1: x(arm.mean - spread), x2: x(arm.mean + spread), y1: 12, y2: 12, "stroke-width": 6, "stroke-opacity": .3, style: ink }),
      svg("line", { x1: x(arm.mean), x2: x(arm.mean), y1: 4, y2: 20, "stroke-width": 2, style: ink }));
  }
  for (const run of arm.runs) if (run.accuracy !== null) marks.push(svg("circle", { cx: x(run.accuracy), cy: 12, r: 2.8, style: `fill:${colour(index)}` }));
  if (arm.paper) marks.push(svg("svg", { x: x(arm.paper.mean), overflow: "visible" }, svg("path", { d: "M0 6l5 6l-5 6l-5-6z", style: "fill:var(--paper);stroke:var(--ink);stroke-width:1.3" })));
  return svg("svg", { class: "strip", "aria-hidden": "true" }, marks);
}
// Comparisons with the study's reference are what it was run for; the other pairs, which may be hundreds, are folded.
function testsPart(section, base, key, title, about) {
  const tests = section[key].map((test, i) => ({ test, here: `${base}.${key}.${i}` }));
  if (!tests.length) return [];
  const few = section.reference === null && tests.length <= FEW_TESTS;
  const open = tests.filter(({ test }) => few || test.with_reference), folded = tests.filter((one) => !open.includes(one));
  const corrected = tests.some(({ test }) => test.holm !== null);
  return [el("h3", null, title), el("div", { class: "wide", "data-tests": key }, open.length ? testsTable(open, few ? null : section.reference) : null,
    folded.length ? el("details", null, el("summary", null, section.reference === null ? "All pairs" : "Other pairs"), el("div", null, testsTable(folded, null))) : null),
    el("p", { class: "meta" }, `${about} p is two-sided, not corrected for the number of tests`, corrected ? `; by Holm: corrected for the comparisons with ${section.reference ?? "the reference"}.` : ".")];
}
function testsTable(tests, reference) {
  const some = (field) => tests.some(({ test }) => test[field] !== null);
  const columns = [["difference", "difference", "signed2"], ["n", "n", "int"], ["t", "t", "fixed2"], ["df", "df", "fixed1"], ["p", "p", "sig2"], ["holm", "p, Holm", "sig2"]]
    .filter(([field]) => !["n", "holm"].includes(field) || some(field));
  const against = (name) => [el("span", { class: "quiet" }, " against "), name];
  const rows = tests.map(({ test, here }) => el("tr", null, el("th", { scope: "row" }, test.a, reference === null ? against(test.b) : null),
    columns.map(([field, , as]) => el("td", { class: "right" }, num(`${here}.${field}`, as)))));
  const head = el("thead", null, el("tr", null, el("th", { scope: "col" }, "arm", reference === null ? null : against(reference)),
    columns.map(([, name]) => el("th", { scope: "col", class: "right" }, name))));
  return el("div", { class: "scroll" }, el("table", { class: "tests", style: `--after-first:${columns.length - 1}` }, head, el("tbody", null, rows)));
}
function runsTable(arm, base) {
  const rows = arm.runs.map((run, i) => {
    const here = `${base}.runs.${i}`;
    const made = [run.device, run.torch && `torch ${run.torch}`, run.unflip && `unflip ${run.unflip}`, run.finished, run.given].filter(Boolean).join(", ");
    return el("tr", null, el("th", { scope: "row" }, num(`${here}.seed`, "int")),
      el("td", { class: "right" }, run.stopped ? el("span", { class: "quiet stopped" }, run.stopped) : num(`${here}.accuracy`, "fixed2")),
      el("td", { class: "right" }, num(`${here}.best_accuracy`, "fixed2")), el("td", { class: "right" }, num(`${here}.epochs`, "int")),
      el("td", { class: "right" }, num(`${here}.seconds`, "fixed1")), el("td", null, made || el("span", { class: "quiet" }, "not recorded")));
  });
  return el("div", { class: "scroll" }, el("table", { class: "runs" }, headings("seed", "›accuracy, %", "›best epoch, %", "›epochs", "›seconds", "made with"), el("tbody", null, rows)));
}
function reproduce(section, base) {
  return section.arms.map((arm, i) => el("details", null, el("summary", null, arm.label),
    el("div", null, command(arm),
      arm.own_recipe ? el("p", { class: "meta" }, "The recipe is none that ships: save the text below under that name first.") : null,
      el("div", { style: "margin-top:1rem" }, runsTable(arm, `${base}.arms.${i}`)),
      arm.notes.map((note) => el("p", { class: "note" }, note)),
      el("div", { class: "command", style: "margin-top:1rem" }, el("span", { style: "flex:1", class: "quiet" }, "Recipe"), copyButton(arm.yaml, `the recipe of ${arm.label}`)),
      el("pre", { tabindex: 0, "aria-label": `recipe of ${arm.label}` }, arm.yaml))));
}

/* ---------- scales ---------- */

function niceTicks(low, high, count) {
  if (!(high > low)) { low -= Math.abs(low) * .05 || .5; high += Math.abs(high) * .05 || .5; }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(+(k * step).toPrecision(12));
  return ticks;
}
function tickText(value) {
  const text = Math.abs(value) < 1e-4 && value !== 0 ? value.toExponential(0) : String(+value.toPrecision(6));
  return text.replace("-", "−");
}
function linearScale(low, high, from, to) {
  if (!(high > low)) { const pad = Math.abs(low) * .02 || .5; low -= pad; high += pad; }
  const scale = (v) => from + (to - from) * (v - low) / (high - low);
  scale.ticks = (count) => niceTicks(low, high, count).filter((t) => t >= low - 1e-12 && t <= high + 1e-12);
  scale.back = (p) => low + (high - low) * (p - from) / (to - from);
  return scale;
}
// Zero has no logarithm but is what flips end at: it lies on the floor, half a decade below the least value.
function logScale(values, from, to) {
  const positive = values.filter((v) => v > 0), zero = positive.length < values.length || !positive.length;
  const least = positive.length ? Math.min(...positive) : 1, most = positive.length ? Math.max(...positive) : 10;
  const a = Math.log10(least) - (zero ? .5 : .03), b = Math.max(Math.log10(most) + .03, a + .1);
  const scale = (v) => from + (to - from) * Math.max(0, (v > 0 ? Math.log10(v) - a : 0) / (b - a));
  scale.ticks = () => logTicks(zero ? Math.log10(least) - .05 : a, b, zero);
  return scale;
}
function logTicks(a, b, zero) {
  const steps = b - a < .7 ? [1, 1.5, 2, 3, 4, 5, 7] : b - a < 1.6 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((b - a) / 6)), ticks = zero ? [0] : [];
  for (let power = Math.floor(a); power <= b; power++)
    for (const step of power % every === 0 ? steps : []) {
      const exponent = power + Math.log10(step);
      if (exponent >= a && exponent <= b) ticks.push(+(step * 10 ** power).toPrecision(3));
    }
  return ticks;
}

/* ---------- curves ---------- */

function curvesPart(section, base) {
  const has = section.arms.map((arm) => arm.curves !== null);
  const missing = section.arms.flatMap((arm) => arm.notes);
  if (!has.some(Boolean)) return [el("h3", null, "Curves"), el("p", { class: "note" }, "No run here is over and has kept its metrics, so there is nothing to draw.")];
  const first = firstLines(section, has);
  const state = { section, base, shown: first, epoch: null, active: null, late: false, charts: [] };
  state.charts = CURVES.filter((curve) => section.arms.some((arm) => arm.curves && arm.curves[curve.key])).map((curve) => new Chart(state, curve));
  state.late = state.charts.some((chart) => chart.squashed());
  const range = switcher("range of the vertical axis", [[false, "whole range"], [true, "final half"]], state.late, (late) => { state.late = late; redraw(state); });
  const several = section.arms.some((arm) => arm.runs.length > 1);
  return [el("h3", null, "Curves"), el("ul", { class: "legend", "aria-label": "lines shown" }, legendItems(state, has, first).map((item) => el("li", null, item)), el("li", null, range)),
    el("div", { class: "charts" }, state.charts.map((chart) => chart.figure)),
    el("p", { class: "meta" }, (several ? "Mean over the seeds, with a band of ± one standard deviation. " : "") +
      (section.arms.some((arm) => arm.start) ? "An arm that starts from another counts its own epochs. " : "") +
      shownAtFirst(section, has, first) + (state.late ? "At first a linear vertical axis is that of the final half of the training. " : "") + "Point, tap or use the arrow keys for values."),
    missing.map((note) => el("p", { class: "note" }, note))];
}
// As a study's own figures: arms that start from a baseline are compared with each other; its curve, several times as
// long and over another range, would press theirs together.
function comparedArms(section) {
  const started = section.arms.map((arm) => arm.start !== null && arm.curves !== null);
  return started.filter(Boolean).length > 1 ? started : section.arms.map(() => true);
}
// Of many lines the reference, the best and the worst: between those two are all others.
function firstLines(section, has) {
  const compared = comparedArms(section), accuracy = (i) => section.arms[i].mean;
  const drawn = section.arms.map((_, i) => i).filter((i) => has[i] && compared[i]);
  const ranked = drawn.filter((i) => accuracy(i) !== null).sort((i, j) => accuracy(j) - accuracy(i));
  const few = drawn.length > MANY_LINES && ranked.length ? [section.reference_arm, ...ranked.slice(0, BEST), ranked.at(-1)] : drawn;
  return has.map((_, i) => drawn.includes(i) && few.includes(i));
}
function shownAtFirst(section, has, first) {
  const compared = comparedArms(section), hidden = (here, i) => here && !first[i];
  const reference = first[section.reference_arm] ? `the reference (${section.reference}), ` : "";
  return (has.some((here, i) => hidden(here, i) && !compared[i]) ? "Arms from scratch, whose epochs are others, are hidden at first. " : "") +
    (has.some((here, i) => hidden(here, i) && compared[i]) ? `Of so many arms these are shown at first: ${reference}the ${BEST} with the highest accuracy at the end, and the one with the lowest. The legend shows the others. ` : "");
}
// A toggle for each line; where some are hidden at first, a switch between those and all.
function legendItems(state, has, first) {
  const set = (lines) => { state.shown = lines; mark(); redraw(state); };
  const button = (pressed, lines, attributes, ...inside) => [el("button", { type: "button", ...attributes, onclick: () => set(lines()) }, inside), pressed];
  const toggles = state.section.arms.map((arm, i) => [arm, i]).filter(([, i]) => has[i]).map(([arm, i]) =>
    button(() => state.shown[i], () => state.shown.map((here, k) => here !== (k === i)), { class: "toggle" }, keySample(i), el("span", null, arm.label)));
  const groups = [[first, "these lines"], [has, "all lines"]].map(([lines, name]) => button(() => lines.every((here, i) => here === state.shown[i]), () => lines, null, name));
  const mark = () => [...toggles, ...groups].forEach(([node, pressed]) => node.setAttribute("aria-pressed", String(pressed())));
  mark();
  const some = has.some((here, i) => here && !first[i]);
  return [...toggles.map(([node]) => node), ...(some ? [el("span", { class: "switch", role: "group", "aria-label": "which lines" }, groups.map(([node]) => node))] : [])];
}
function redraw(state) {
  for (const chart of state.charts) chart.draw();
}
function point(state, epoch, active) {
  state.epoch = epoch;
  state.active = active;
  for (const chart of state.charts) chart.mark();
}

class Chart {
  constructor(state, curve) {
    this.state = state;
    this.curve = curve;
    this.log = curve.log === true;
    this.svg = svg("svg", { tabindex: 0, role: "img", "aria-label": this.describe() });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.plot = el("div", { class: "plot" }, this.svg, this.tip);
    this.beyond = el("p", { class: "meta beyond", hidden: true });
    const title = el("span", null, this.title(), curve.unit ? el("span", { class: "quiet" }, `, ${curve.unit}`) : null);
    const scale = curve.log === null ? null : switcher("scale", [[false, "linear"], [true, "log"]], this.log, (log) => { this.log = log; this.draw(); });
    this.figure = el("figure", { "data-curve": curve.key }, el("figcaption", null, title, scale), this.plot, this.beyond);
    this.listen();
    new ResizeObserver(() => { if (this.plot.clientWidth !== this.width) this.draw(); }).observe(this.plot);
  }
  title() {
    return this.curve.key === "accuracy" ? `Accuracy, ${this.state.section.evaluated_on}` : this.curve.title;
  }
  describe() {
    return `${this.title()} by epoch; arrow keys move along the epochs`;
  }
  lines() {
    return this.state.section.arms.map((arm, i) => ({ arm, i, curve: arm.curves && arm.curves[this.curve.key] }))
      .filter(({ i, curve }) => curve && this.state.shown[i]);
  }
  listen() {
    const locate = (event) => {
      if (!this.x) return;
      const epoch = Math.round(this.x.back(event.clientX - this.svg.getBoundingClientRect().left));
      point(this.state, Math.max(1, Math.min(this.last, epoch)), this);
    };
    this.svg.addEventListener("pointermove", locate);
    this.svg.addEventListener("pointerdown", locate);
    this.svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(this.state, null, null); });
    this.svg.addEventListener("blur", () => point(this.state, null, null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }
  key(event) {
    const now = this.state.epoch, page = Math.max(1, Math.round(this.last / 10));
    const next = { ArrowLeft: (now ?? this.last + 1) - 1, ArrowRight: (now ?? 0) + 1, PageUp: (now ?? 0) + page, PageDown: (now ?? this.last) - page, Home: 1, End: this.last, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    point(this.state, next === null ? null : Math.max(1, Math.min(this.last, next)), next === null ? null : this);
  }
  draw() {
    const width = this.width = this.plot.clientWidth, height = width < 420 ? 230 : 270;
    if (!width) return;
    const lines = this.lines(), edge = { left: 46, right: 14, top: 8, bottom: 34 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    const near = this.near(lines, this.late()), far = lines.filter((line) => !near.includes(line)).map(({ arm }) => arm.label);
    this.beyond.hidden = !far.length;
    this.beyond.textContent = `Above this range: ${far.join("; ")}.`;
    if (!lines.length) {
      this.x = null;
      this.svg.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no line chosen"));
      return this.mark();
    }
    this.last = Math.max(...lines.map(({ arm }) => arm.curves.epochs.at(-1)));
    this.x = linearScale(1, this.last, edge.left, width - edge.right);
    this.y = this.vertical(lines, height - edge.bottom, edge.top);
    this.floor = height - edge.bottom;
    this.ceiling = edge.top;
    this.axes(width, height, edge);
    const clip = `clip-${Chart.count = (Chart.count || 0) + 1}`;
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    this.svg.append(svg("clipPath", { id: clip }, svg("rect", { x: edge.left - 3, y: edge.top - 4, width: width - edge.left - edge.right + 6, height: this.floor - edge.top + 7 })), inside);
    for (const line of lines) inside.append(...this.bandAndLine(line));
    this.top = svg("g", { "pointer-events": "none" });
    this.svg.append(this.top);
    this.mark();
  }
  // A logarithm leaves room for the beginning, and for whatever is far from the others.
  late() {
    return this.state.late && !this.log;
  }
  near(lines, late) {
    if (!late || this.curve.key !== "loss") return lines;
    const last = lines.map(({ curve }) => curve.mean.findLast((mean) => mean !== null));
    const middle = [...last].sort((a, b) => a - b)[Math.floor((last.length - 1) / 2)];
    return lines.filter((_, k) => last[k] <= FAR * middle);
  }
  values(lines, late) {
    const values = this.near(lines, late).flatMap(({ arm, curve }) => curve.mean.flatMap((mean, k) => {
      if (mean === null || (late && arm.curves.epochs[k] < arm.curves.epochs.at(-1) / 2)) return [];
      const std = curve.std[k];
      return std === null ? [mean] : this.log ? [mean, mean + std] : [mean - std, mean + std];
    }));
    return values.length || !late ? values : this.values(lines, false);  // nothing may be measured in the final half
  }
  // Whether the beginning, or a line far from the others, leaves them little of the axis at the end.
  squashed() {
    const lines = this.lines(), spread = (values) => Math.max(...values) - Math.min(...values);
    return !this.log && lines.length > 1 && spread(this.values(lines, false)) > SQUASHED * spread(this.values(lines, true));
  }
  vertical(lines, from, to) {
    const values = this.values(lines, this.late());
    if (this.log) return logScale(values, from, to);
    const low = Math.min(...values), high = Math.max(...values), pad = (high - low) * .04;
    return linearScale(this.curve.key === "flips_percent" ? Math.max(0, low - pad) : low - pad, high + pad, from, to);
  }
  axes(width, height, edge) {
    for (const tick of this.y.ticks(5)) {
      const y = Math.round(this.y(tick));
      this.svg.append(svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y, y2: y }),
        svg("text", { x: edge.left - 6, y: y + 4, "text-anchor": "end" }, tickText(tick)));
    }
    this.svg.append(svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: this.floor, y2: this.floor }));
    for (const tick of this.x.ticks(width / 70).filter((t) => Number.isInteger(t) && t >= 1)) {
      const x = Math.round(this.x(tick));
      this.svg.append(svg("line", { class: "axis", x1: x, x2: x, y1: this.floor, y2: this.floor + 4 }),
        svg("text", { x, y: this.floor + 16, "text-anchor": "middle" }, tickText(tick)));
    }
    this.svg.append(svg("text", { x: width - edge.right, y: height - 3, "text-anchor": "end" }, "epoch"));
  }
  bandAndLine({ arm, i, curve }) {
    const upper = [], lower = [], path = [];
    arm.curves.epochs.forEach((epoch, k) => {
      const mean = curve.mean[k], std = curve.std[k];
      if (mean === null) return;
      const x = this.x(epoch).toFixed(1);
      path.push(`${x} ${this.y(mean).toFixed(1)}`);
      if (std !== null) {
        upper.push(`${x} ${this.y(mean + std).toFixed(1)}`);
        lower.unshift(`${x} ${this.y(mean - std).toFixed(1)}`);
      }
    });
    const made = [];
    if (upper.length) made.push(svg("path", { d: `M${[...upper, ...lower].join("L")}Z`, "fill-opacity": .16, style: `fill:${colour(i)}` }));
    if (path.length === 1) made.push(svg("circle", { cx: path[0].split(" ")[0], cy: path[0].split(" ")[1], r: 3.5, style: `fill:${colour(i)}` }));
    made.push(svg("path", { class: "line", "data-arm": i, d: `M${path.join("L")}`, fill: "none", "stroke-width": 1.9, "stroke-linejoin": "round", "stroke-dasharray": dash(i), style: `stroke:${colour(i)}` }));
    return made;
  }
  mark() {
    const epoch = this.state.epoch;
    this.tip.hidden = true;
    if (this.top) this.top.replaceChildren();
    if (epoch === null || !this.x || epoch > this.last) return;
    const x = this.x(epoch);
    this.top.append(svg("line", { class: "cross", x1: x, x2: x, y1: 4, y2: this.floor }));
    const rows = [];
    for (const { arm, i, curve } of this.lines()) {
      const k = arm.curves.epochs.indexOf(epoch);
      if (k < 0 || curve.mean[k] === null) continue;
      const y = this.y(curve.mean[k]);
      if (y > this.ceiling - 4 && y < this.floor + 4) this.top.append(svg("circle", { cx: x, cy: y, r: 3.5, style: `fill:${colour(i)};stroke:var(--paper)` }));
      rows.push(keySample(i), el("span", { class: "name" }, arm.label), el("span", { class: "value" }, this.value(arm, i, k)));
    }
    if (this.state.active !== this) return;
    this.tip.replaceChildren(el("b", null, `epoch ${epoch}`), el("div", { class: "rows" }, rows));
    this.tip.hidden = false;
    placeTip(this.tip, this.plot, x);
  }
  value(arm, i, k) {
    const here = `${this.state.base}.arms.${i}.curves.${this.curve.key}`, std = arm.curves[this.curve.key].std[k];
    return [num(`${here}.mean.${k}`, this.curve.digits), ...(std === null ? [] : [" ± ", num(`${here}.std.${k}`, this.curve.digits === "fixed2" ? "fixed2" : "sig2")])];
  }
}
// Beside the crosshair where there is room; across the plot's foot, under the finger, where there is not.
function placeTip(tip, plot, x) {
  const room = plot.clientWidth, wide = tip.offsetWidth;
  const beside = x > room / 2 ? x - wide - 10 : x + 10;
  const fits = beside >= 0 && beside + wide <= room;
  tip.style.left = `${fits ? beside : Math.max(0, (room - wide) / 2)}px`;
  tip.style.top = fits ? "6px" : "calc(100% + 2px)";
}

/* ---------- sweep ---------- */

function sweepPart(section, base) {
  const points = section.arms.map((arm, i) => ({ arm, i })).filter(({ arm }) => arm.x !== null && arm.mean !== null).sort((p, q) => p.arm.x - q.arm.x);
  if (points.length < 2) return [];
  const references = section.arms.map((arm, i) => ({ arm, i })).filter(({ arm }) => arm.x === null && arm.mean !== null).slice(0, 5);
  const plot = el("div", { class: "plot wide" });
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  const draw = () => drawSweep(plot, tip, points, references, base);
  new ResizeObserver(() => { if (plot.clientWidth !== +plot.dataset.width) draw(); }).observe(plot);
  return [el("h3", null, "Sweep"), el("figure", { class: "sweep" }, el("figcaption", null, el("span", null, `Accuracy, ${section.evaluated_on}`, el("span", { class: "quiet" }, ", %"))), plot),
    el("p", { class: "meta" }, "Points are means, bars ± one standard deviation over the seeds, diamonds the paper’s. " + (references.length ? "Dashed: arms outside the sweep." : ""))];
}
function sweepScale(points, from, to) {
  const xs = points.map(({ arm }) => arm.x), positive = xs.filter((x) => x > 0);
  const wide = positive.length > 1 && xs[0] >= 0 && positive.at(-1) / positive[0] >= 20;
  return wide ? logScale(xs, from, to) : linearScale(xs[0], xs.at(-1), from, to);
}
function drawSweep(plot, tip, points, references, base) {
  const width = plot.clientWidth, height = width < 420 ? 250 : 310, edge = { left: 46, right: 20, top: 12, bottom: 34 };
  plot.dataset.width = width;
  if (!width) return;
  const x = sweepScale(points, edge.left + 16, width - edge.right), bottom = height - edge.bottom;
  const values = [...points, ...references].flatMap(({ arm }) => [arm.mean - (arm.std || 0), arm.mean + (arm.std || 0), ...(arm.paper ? [arm.paper.mean] : [])]);
  const low = Math.min(...values), high = Math.max(...values), pad = (high - low) * .06;
  const y = linearScale(low - pad, high + pad, bottom, edge.top);
  const canvas = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img", "aria-label": "accuracy over the swept value; arrow keys move along it" });
  sweepAxes(canvas, x, y, points, { width, bottom, edge });
  let lowest = -Infinity;  // labels of lines that are close must not cover each other
  for (const { arm, i } of references.sort((p, q) => q.arm.mean - p.arm.mean)) {
    lowest = Math.max(y(arm.mean) - 5, lowest + 13);
    canvas.append(svg("line", { x1: edge.left, x2: width - edge.right, y1: y(arm.mean), y2: y(arm.mean), "stroke-dasharray": "5 4", "stroke-width": 1.4, style: `stroke:${colour(i)}` }),
      svg("text", { x: width - edge.right, y: lowest, "text-anchor": "end", class: "halo", style: `fill:${colour(i)}` }, arm.label));
  }
  canvas.append(svg("path", { d: `M${points.map(({ arm }) => `${x(arm.x)} ${y(arm.mean)}`).join("L")}`, fill: "none", "stroke-width": 1.4, style: "stroke:var(--soft)" }));
  points.forEach(({ arm }) => canvas.append(...sweepPoint(x(arm.x), y, arm)));
  const cross = svg("line", { class: "cross", y1: edge.top, y2: bottom, visibility: "hidden" });
  canvas.append(cross);
  plot.replaceChildren(canvas, tip);
  listenSweep(canvas, cross, tip, plot, points, x, base);
}
function sweepAxes(canvas, x, y, points, { width, bottom, edge }) {
  for (const tick of y.ticks(6)) canvas.append(
    svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: Math.round(y(tick)), y2: Math.round(y(tick)) }),
    svg("text", { x: edge.left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)));
  canvas.append(svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: bottom, y2: bottom }));
  canvas.append(svg("text", { x: width - edge.right, y: bottom + 31, "text-anchor": "end" }, sharedName(points.map(({ arm }) => arm.label))));
  let free = -Infinity;
  for (const { arm } of points) {
    canvas.append(svg("line", { class: "axis", x1: x(arm.x), x2: x(arm.x), y1: bottom, y2: bottom + 4 }));
    const text = tickText(arm.x), half = text.length * 3.4;
    if (x(arm.x) - half < free) continue;
    canvas.append(svg("text", { x: x(arm.x), y: bottom + 16, "text-anchor": "middle" }, text));
    free = x(arm.x) + half + 6;
  }
}
// "LNS, α = 0" and "LNS, α = 10" are a sweep of "LNS, α".
function sharedName(labels) {
  let shared = labels[0];
  for (const label of labels) while (!label.startsWith(shared)) shared = shared.slice(0, -1);
  return shared.replace(/[\s\d.,=:(−-]+$/, "") || "x";
}
function sweepPoint(x, y, arm) {
  const made = [];
  if (arm.std !== null) {
    const top = y(arm.mean + arm.std), foot = y(arm.mean - arm.std);
    made.push(svg("path", { d: `M${x} ${top}V${foot}M${x - 4} ${top}h8M${x - 4} ${foot}h8`, "stroke-width": 1.4, fill: "none", style: "stroke:var(--ink)" }));
  }
  made.push(svg("circle", { class: "sweep-point", cx: x, cy: y(arm.mean), r: 4.2, style: "fill:var(--ink);stroke:var(--paper)" }));
  if (arm.paper) made.push(svg("path", { d: `M${x} ${y(arm.paper.mean) - 6}l5 6l-5 6l-5-6z`, style: "fill:var(--paper);stroke:var(--ink);stroke-width:1.3" }));
  return made;
}
function listenSweep(canvas, cross, tip, plot, points, x, base) {
  let chosen = null;
  const show = (k) => {
    chosen = k;
    tip.hidden = k === null;
    cross.setAttribute("visibility", k === null ? "hidden" : "visible");
    if (k === null) return;
    const { arm, i } = points[k], here = `${base}.arms.${i}`;
    cross.setAttribute("x1", x(arm.x));
    cross.setAttribute("x2", x(arm.x));
    tip.replaceChildren(el("b", null, arm.label), el("div", null, "x = ", num(`${here}.x`, "sig6")), el("div", null, plusMinus(here, "fixed2"), " %, n = ", num(`${here}.n`, "int")));
    placeTip(tip, plot, x(arm.x));
  };
  const locate = (event) => {
    const here = event.clientX - canvas.getBoundingClientRect().left;
    const gaps = points.map(({ arm }) => Math.abs(x(arm.x) - here));
    show(gaps.indexOf(Math.min(...gaps)));
  };
  canvas.addEventListener("pointermove", locate);
  canvas.addEventListener("pointerdown", locate);
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") show(null); });
  canvas.addEventListener("blur", () => show(null));
  canvas.addEventListener("keydown", (event) => {
    const next = { ArrowLeft: (chosen ?? points.length) - 1, ArrowRight: (chosen ?? -1) + 1, Home: 0, End: points.length - 1, Escape: null }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next === null ? null : Math.max(0, Math.min(points.length - 1, next)));
  });
}

/* ---------- signs ---------- */

function signsPart(section, base) {
  if (!section.signs.length) return [];
  const heading = el("h3", null, "Which signs changed");
  const usable = section.signs.map((entry, k) => ({ entry, k })).filter(({ entry }) => entry.seeds.length);
  const notes = signNotes(section);
  if (!usable.length) return [heading, el("p", { class: "note" }, "The weights needed to compare signs are not there:"), notes];
  const others = notes.length ? el("div", null, el("details", null, el("summary", null, "Runs whose signs could not be compared"), el("div", null, notes))) : null;
  return [heading, new Signs(section, base, usable).node, others];
}
// What is said of several arms is said once.
function signNotes(section) {
  const arms = new Map();
  for (const { arm, notes } of section.signs) for (const note of notes) arms.set(note, [...(arms.get(note) ?? []), section.arms[arm].label]);
  const whose = (labels) => labels.length > 1 && labels.length === section.signs.length ? "All arms with a baseline" : labels.join("; ");
  return [...arms].map(([note, labels]) => el("p", { class: "note" }, `${whose(labels)}. ${note}`));
}
function picker(label, name) {
  const select = el("select", { name });
  return [el("label", null, label, select), select];
}
function setOptions(select, options, value) {
  select.replaceChildren(...options.map(([key, text]) => el("option", { value: key }, text)));
  if (options.some(([key]) => String(key) === String(value))) select.value = value;
}

class Signs {
  constructor(section, base, usable) {
    Object.assign(this, { section, base, usable, layer: 0, cell: null });
    const [armLabel, arm] = picker("arm", "arm"), [seedLabel, seed] = picker("seed", "seed");
    const [layerLabel, layer] = picker("layer", "layer"), [filterLabel, filter] = picker("filter", "filter");
    this.pick = { arm, seed, layer, filter };
    this.layers = el("div");
    this.viewer = el("div", { class: "viewer" });
    this.total = el("p", { class: "total" });
    setOptions(arm, usable.map(({ entry }, i) => [i, section.arms[entry.arm].label]), this.opening());
    arm.addEventListener("change", () => this.showArm());
    seed.addEventListener("change", () => this.showSeed());
    layer.addEventListener("change", () => this.showLayer(+layer.value));
    filter.addEventListener("change", () => this.showFilter());
    this.kernelControls = el("div", { class: "controls" }, layerLabel, filterLabel);
    this.node = el("div", null, el("div", { class: "controls" }, armLabel, seedLabel), this.total,
      el("div", { class: "signs" }, this.layers, el("div", null, this.kernelControls, this.viewer)));
    this.showArm();
  }
  // The paper's picture is of LNS; where no arm is called so, the last one with f: studies add a part in each arm.
  opening() {
    const mapped = ({ entry }) => entry.kernels && entry.kernels.layers.some((layer) => layer.filters.some((one) => one.f));
    const named = this.usable.findIndex((one) => mapped(one) && this.section.arms[one.entry.arm].name === "lns");
    return Math.max(0, named >= 0 ? named : this.usable.findLastIndex(mapped));
  }
  get entry() { return this.usable[+this.pick.arm.value].entry; }
  get place() { return `${this.base}.signs.${this.usable[+this.pick.arm.value].k}`; }
  showArm() {
    setOptions(this.pick.seed, this.entry.seeds.map((seed, i) => [i, String(seed.seed)]), this.pick.seed.value);
    const layers = this.entry.kernels ? this.entry.kernels.layers : [];
    const kept = layers.findIndex((layer) => layer.name === this.layerName);
    this.kernelControls.hidden = !layers.length;
    setOptions(this.pick.layer, layers.map((layer, i) => [i, layer.name]));
    this.showSeed();
    if (layers.length) this.showLayer(kept >= 0 ? kept : this.mostChanged(layers));
    else this.viewer.replaceChildren(el("p", { class: "note" }, "No filters were embedded."));
  }
  mostChanged(layers) {
    const changes = layers.map((layer) => Math.max(...layer.filters.map((filter) => filter.changed)));
    return changes.indexOf(Math.max(...changes));
  }
  showSeed() {
    const k = +this.pick.seed.value, here = `${this.place}.seeds.${k}`, seed = this.entry.seeds[k];
    this.total.replaceChildren(num(`${here}.changed`, "int"), " of ", num(`${here}.weights`, "int"), " signs (", num(`${here}.percent`, "sig3", "%"),
      ") differ from those of ", el("b", null, this.entry.baseline), " after ", num(`${here}.epoch`, "int"), seed.epoch === 1 ? " epoch." : " epochs.");
    const most = Math.max(...seed.layers.map((layer) => layer.percent)) || 1;
    const rows = seed.layers.map((layer, i) => el("tr", { "data-layer": layer.name }, el("th", { scope: "row" }, this.layerButton(layer.name)),
      el("td", { class: "bar" }, el("span", { style: `width:${100 * layer.percent / most}%`, "aria-hidden": "true" })),
      el("td", { class: "right" }, num(`${here}.layers.${i}.percent`, "sig3", "%")),
      el("td", { class: "right" }, num(`${here}.layers.${i}.changed`, "int")), el("td", { class: "right" }, num(`${here}.layers.${i}.weights`, "int"))));
    this.layers.replaceChildren(el("table", { class: "layers" }, el("thead", null, el("tr", null, el("th", { scope: "col" }, "layer"),
      el("th", { scope: "col", colspan: 2, class: "right" }, "share"), el("th", { scope: "col", class: "right" }, "changed"), el("th", { scope: "col", class: "right" }, "weights"))),
      el("tbody", null, rows)));
    this.highlight();
  }
  layerButton(name) {
    const index = this.entry.kernels ? this.entry.kernels.layers.findIndex((layer) => layer.name === name) : -1;
    if (index < 0) return name;
    return el("button", { type: "button", onclick: () => { this.pick.layer.value = index; this.showLayer(index); } }, name);
  }
  highlight() {
    for (const row of this.layers.querySelectorAll("tbody tr")) row.classList.toggle("chosen", row.dataset.layer === this.layerName);
  }
  showLayer(index) {
    const layer = this.entry.kernels.layers[index];
    this.layer = index;
    this.layerName = layer.name;
    this.pick.layer.value = index;
    const most = Math.max(...layer.filters.map((filter) => filter.changed));
    setOptions(this.pick.filter, layer.filters.map((filter, i) => [i, `${filter.index} (${filter.changed} changed)`]), layer.filters.findIndex((filter) => filter.changed === most));
    this.highlight();
    this.showFilter();
  }
  showFilter() {
    const layer = this.entry.kernels.layers[this.layer], k = +this.pick.filter.value;
    this.kernel = new Kernels(layer, `${this.place}.kernels.layers.${this.layer}`, k);
    const here = `${this.place}.kernels`, place = `${here}.layers.${this.layer}`;
    const some = layer.filters[k].channels.length < layer.channels_in_filter;
    const count = el("p", { class: "meta" }, "Seed ", num(`${here}.seed`, "int"), ". ",
      layer.filters.length < layer.filters_in_layer ? ["Shown are the ", num(`${here}.filters`, "int"), " of ", num(`${place}.filters_in_layer`, "int"), " filters with most changed signs"] : ["All ", num(`${place}.filters_in_layer`, "int"), " filters are here"],
      some ? [", of each the ", num("channels", "int"), " of ", num(`${place}.channels_in_filter`, "int"), " channels with most"] : [", with all their channels"],
      ". Signs of this filter that differ from the baseline’s: ", num(`${place}.filters.${k}.changed`, "int"), "; from sign(W): ", num(`${place}.filters.${k}.off_sign`, "int"), ".");
    this.viewer.replaceChildren(this.kernel.node, count);
  }
}

// One filter: a small square for each weight, its channels' kernels side by side; the same in each panel.
class Kernels {
  constructor(layer, place, index) {
    const filter = layer.filters[index];
    Object.assign(this, { layer, filter, here: `${place}.filters.${index}`, chosen: null });
    [this.rows, this.columns] = layer.kernel;
    this.count = filter.channels.length;
    this.across = Math.ceil(Math.sqrt(this.count * this.rows / this.columns));
    this.largest = { w: Math.max(...filter.w.map(Math.abs)) || 1, f: filter.f ? Math.max(...filter.f.map(Math.abs)) || 1 : 1 };
    const signOf = (value) => (value < 0 ? -1 : 1), bit = (text) => (j) => (text[j] === "+" ? 1 : -1);
    const before = bit(filter.before), after = bit(filter.after), own = (j) => signOf(filter.w[j]);
    const changed = (j) => filter.before[j] !== filter.after[j], overruled = (j) => own(j) !== after(j);
    this.changed = changed;
    this.panels = [
      this.panel("baseline’s signs", before, changed, null),
      this.panel("latent weights W", (j) => filter.w[j] / this.largest.w, null, null),
      this.panel("sign(W)", own, null, overruled),
      filter.f ? this.panel("prediction f(W)", (j) => filter.f[j] / this.largest.f, null, null) : null,
      this.panel("binary weights", after, changed, overruled),
    ].filter(Boolean);
    this.readout = el("p", { class: "readout", role: "status" });
    this.node = el("div", { tabindex: 0, class: "kernels", role: "group", "aria-label": "weights of the filter; arrow keys move from weight to weight", onkeydown: (event) => this.key(event) },
      el("div", { class: "panels" }, this.panels.map(({ figure }) => figure)), this.legend(), this.readout);
    this.choose(null);
  }
  spot(j) {
    const size = this.rows * this.columns, k = Math.floor(j / size), r = Math.floor((j % size) / this.columns), c = j % this.columns;
    const gap = size > 1 ? .7 : .12;
    return [(k % this.across) * (this.columns + gap) + c, Math.floor(k / this.across) * (this.rows + gap) + r];
  }
  panel(title, value, dot, ring) {
    const length = this.filter.w.length, gap = this.rows * this.columns > 1 ? .7 : .12;
    const wide = Math.min(this.across, this.count) * (this.columns + gap) - gap, high = Math.ceil(this.count / this.across) * (this.rows + gap) - gap;
    const drawing = svg("svg", { viewBox: `-.35 -.35 ${wide + .7} ${high + .7}`, style: `max-width:${Math.round(wide * 18)}px`, "aria-hidden": "true" });
    const marks = [];
    if (dot) drawing.append(...this.grounds(dot));
    for (let j = 0; j < length; j++) {
      const [x, y] = this.spot(j);
      drawing.append(svg("rect", { x: x + .03, y: y + .03, width: .94, height: .94, "data-cell": j, style: `fill:${shade(value(j))}` }));
      if (ring && ring(j)) marks.push(svg("rect", { class: "mark-ring", x: x + .1, y: y + .1, width: .8, height: .8 }));
      if (dot && dot(j)) marks.push(svg("circle", { class: "mark-dot", cx: x + .5, cy: y + .5, r: .27 }));
    }
    const picked = svg("rect", { class: "picked", width: 1, height: 1, visibility: "hidden" });
    drawing.append(svg("g", { "pointer-events": "none" }, marks, picked));
    const locate = (event) => { if (event.target.dataset.cell) this.choose(+event.target.dataset.cell); };
    drawing.addEventListener("pointermove", locate);
    drawing.addEventListener("pointerdown", locate);
    return { figure: el("figure", null, el("figcaption", null, title), drawing), picked };
  }
  // Found at a glance: a kernel with a change has a ground. A frame round it would look like the mark of a weight.
  grounds(changed) {
    const size = this.rows * this.columns, made = [];
    for (let k = 0; size > 1 && k < this.count; k++) {
      const [x, y] = this.spot(k * size), some = Array.from({ length: size }, (_, m) => changed(k * size + m)).some(Boolean);
      if (some) made.push(svg("rect", { class: "mark-ground", x: x - .3, y: y - .3, width: this.columns + .6, height: this.rows + .6, rx: .3 }));
    }
    return made;
  }
  groundSample() {
    const cells = [1, -1, -1, 1].map((value, j) => svg("rect", { x: .35 + 1.15 * (j % 2), y: .35 + 1.15 * Math.floor(j / 2), width: 1.1, height: 1.1, style: `fill:${shade(value)}` }));
    return svg("svg", { viewBox: "0 0 2.95 2.95", "aria-hidden": "true" }, svg("rect", { class: "mark-ground", width: 2.95, height: 2.95, rx: .4 }), cells);
  }
  legend() {
    const sample = (...shapes) => svg("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, shapes);
    const square = (value) => svg("rect", { width: 1, height: 1, style: `fill:${shade(value)}` });
    return el("div", { class: "key-line" }, el("span", null, sample(square(1)), "+1, or positive"), el("span", null, sample(square(-1)), "−1, or negative"),
      el("span", null, sample(square(.0), svg("circle", { class: "mark-dot", cx: .5, cy: .5, r: .27 })), "differs from the baseline"),
      el("span", null, sample(square(.0), svg("rect", { class: "mark-ring", x: .1, y: .1, width: .8, height: .8 })), "differs from sign(W)"),
      this.rows * this.columns > 1 ? el("span", null, this.groundSample(), "kernel with a changed sign") : null);
  }
  choose(j) {
    this.chosen = j;
    for (const { picked } of this.panels) {
      picked.setAttribute("visibility", j === null ? "hidden" : "visible");
      if (j === null) continue;
      const [x, y] = this.spot(j);
      picked.setAttribute("x", x);
      picked.setAttribute("y", y);
    }
    if (j === null) return this.readout.replaceChildren(el("span", { class: "quiet" }, "Point at a weight, or tap it, for its values."));
    const size = this.rows * this.columns, k = Math.floor(j / size), text = (plus) => (plus ? "+1" : "−1");
    const where = size > 1 ? `, row ${Math.floor((j % size) / this.columns) + 1}, column ${(j % this.columns) + 1}` : "";
    this.readout.replaceChildren(el("b", null, "Channel ", num(`${this.here}.channels.${k}`, "int"), where), ": baseline ", text(this.filter.before[j] === "+"),
      ", W = ", num(`${this.here}.w.${j}`, "sig3"), ...(this.filter.f ? [", f(W) = ", num(`${this.here}.f.${j}`, "sig3")] : []),
      ", binary weight ", text(this.filter.after[j] === "+"), this.changed(j) ? ": changed." : ".");
  }
  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (step === undefined) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.filter.w.length - 1, (this.chosen ?? (step > 0 ? -1 : this.filter.w.length)) + step)));
  }
}
// −1 .. +1 on a scale from orange over the page's colour to blue; small weights are told apart too.
function shade(value) {
  const share = Math.round(100 * Math.sqrt(Math.min(1, Math.abs(value))));
  return `color-mix(in srgb, var(${value < 0 ? "--negative" : "--positive"}) ${share}%, var(--zero))`;
}

/* ---------- the page ---------- */

function sectionNode(section, i) {
  const base = `sections.${i}`;
  const seeds = section.seeds.length === 1 ? `seed ${section.seeds[0]}` : `seeds ${section.seeds.join(", ")}`;
  const meta = [section.data, `accuracy on ${section.evaluated_on === "test" ? "test images" : "held-out training images"}, last epoch`, seeds, section.epochs_note.replace(/\.$/, ""), section.changes.length && `with ${section.changes.join(", ")}`, section.unflip && `unflip ${section.unflip}`];
  const alone = DATA.sections.length === 1 && DATA.title === section.title;
  return el("section", { id: `section-${i}` }, alone ? null : el("h2", null, section.title), el("p", { class: "meta" }, meta.filter(Boolean).join(" · ")),
    el("h3", null, "Results"), resultsTable(section, base),
    el("p", { class: "meta" }, resultsNote(section)),
    ...sweepPart(section, base), ...testsPart(section, base, "tests", "Welch’s t-tests", "Difference of the means in points;"),
    ...testsPart(section, base, "paired", "Paired t-tests", "Runs of the same seed are pairs, n of them; the difference is their mean, in points;"),
    ...curvesPart(section, base), ...signsPart(section, base),
    el("h3", null, "Runs and recipes"), ...reproduce(section, base));
}
// A closed <details> would print nothing of the command.
function unfoldForPrint() {
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll(".command details:not([open])")];
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => { for (const details of folded) details.open = false; });
}
function page() {
  document.title = DATA.title;
  const links = DATA.sections.map((section, i) => el("a", { href: `#section-${i}` }, section.title));
  const main = document.getElementById("page");
  main.replaceChildren(el("header", null, el("h1", null, DATA.title), DATA.date ? el("p", { class: "meta" }, DATA.date) : null, links.length > 1 ? el("nav", { "aria-label": "sections" }, links) : null),
    ...DATA.sections.map(sectionNode),
    el("footer", { class: "meta" }, el("p", null, `Written by unflip ${DATA.unflip}. Every number here is drawn from the JSON inside this file, which loads nothing from elsewhere.`)));
  unfoldForPrint();
}
page();
