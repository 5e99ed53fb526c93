"use strict";
// Small helpers: nodes, numbers, colors, buttons.
//
// Everything shown comes from the JSON in #data. num(path) writes every number. Names and labels
// are text nodes, never HTML, because they may contain anything.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLORS = 7;
const DASHES = ["", "7 3", "2 3", "9 3 2 3"];

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
  const text =
    value !== 0 && Math.abs(value) < 1e-4
      ? value.toExponential(digits - 1)
      : value.toPrecision(digits);
  return text.includes("e") || !text.includes(".") ? text : text.replace(/\.?0+$/, "");
}

// The number at a path in the data. `as`: fixedN, signedN (with a plus sign), sigN or int.
function num(path, as, unit) {
  const value = at(path);
  if (value === null || value === undefined) return none();
  const shown = el(
    "data",
    { value: String(value), "data-at": path, "data-as": as },
    written(value, as),
  );
  return unit ? el("span", { class: "figures" }, shown, "\u202f" + unit) : shown;
}

function none() {
  return el("span", { class: "quiet" }, "–");
}

function plusMinus(base, as, mean = "mean", std = "std") {
  const spread = at(`${base}.${std}`);
  const hasSpread = spread !== null && spread !== undefined;
  return el(
    "span",
    { class: "figures" },
    num(`${base}.${mean}`, as),
    hasSpread ? " ± " : null,
    hasSpread ? num(`${base}.${std}`, as) : null,
  );
}

function color(index) {
  return `var(--c${index % COLORS})`;
}

function dash(index) {
  return DASHES[Math.floor(index / COLORS) % DASHES.length];
}

function keySample(index) {
  return svg(
    "svg",
    { class: "key", viewBox: "0 0 22 8", "aria-hidden": "true" },
    svg("line", {
      x1: 0,
      x2: 22,
      y1: 4,
      y2: 4,
      "stroke-width": 2.5,
      "stroke-dasharray": dash(index),
      style: `stroke:${color(index)}`,
    }),
  );
}

function copyButton(text, what) {
  const button = el(
    "button",
    { type: "button", class: "copy", "aria-label": `copy ${what}` },
    "copy",
  );
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text)) ? "copied" : "copy failed";
    setTimeout(() => {
      button.textContent = "copy";
    }, 1600);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // A file opened from disk may have no access to the clipboard.
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
    el(
      "button",
      { type: "button", "aria-pressed": String(value === chosen), onclick: () => choose(value) },
      name,
    ),
  );
  const choose = (value) => {
    buttons.forEach((button, i) =>
      button.setAttribute("aria-pressed", String(options[i][0] === value)),
    );
    change(value);
  };
  return el("span", { class: "switch", role: "group", "aria-label": label }, buttons);
}
