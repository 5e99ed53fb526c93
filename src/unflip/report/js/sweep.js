// Accuracy over a swept value.

function sweepPart(section, base) {
  const points = section.arms
    .map((arm, i) => ({ arm, i }))
    .filter(({ arm }) => arm.x !== null && arm.mean !== null)
    .sort((p, q) => p.arm.x - q.arm.x);
  if (points.length < 2) return [];
  const references = section.arms
    .map((arm, i) => ({ arm, i }))
    .filter(({ arm }) => arm.x === null && arm.mean !== null)
    .slice(0, 5);
  const plot = el("div", { class: "plot wide" });
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  const draw = () => drawSweep(plot, tip, points, references, base);
  new ResizeObserver(() => {
    if (plot.clientWidth !== +plot.dataset.width) draw();
  }).observe(plot);
  return [
    el("h3", null, "Sweep"),
    el(
      "figure",
      { class: "sweep" },
      el(
        "figcaption",
        null,
        el(
          "span",
          null,
          `Accuracy, ${section.evaluated_on}`,
          el("span", { class: "quiet" }, ", %"),
        ),
      ),
      plot,
    ),
    el(
      "p",
      { class: "meta" },
      "Points are means over the seeds, bars are ± one standard deviation, " +
        "diamonds are the paper’s results. " +
        (references.length ? "Dashed lines are arms outside the sweep." : ""),
    ),
  ];
}

function sweepScale(points, from, to) {
  const xs = points.map(({ arm }) => arm.x);
  const positive = xs.filter((x) => x > 0);
  const wide = positive.length > 1 && xs[0] >= 0 && positive.at(-1) / positive[0] >= 20;
  return wide ? logScale(xs, from, to) : linearScale(xs[0], xs.at(-1), from, to);
}

function drawSweep(plot, tip, points, references, base) {
  const width = plot.clientWidth;
  const height = width < 420 ? 250 : 310;
  const edge = { left: 46, right: 20, top: 12, bottom: 34 };
  plot.dataset.width = width;
  if (!width) return;
  const x = sweepScale(points, edge.left + 16, width - edge.right);
  const bottom = height - edge.bottom;
  const values = [...points, ...references].flatMap(({ arm }) => [
    arm.mean - (arm.std || 0),
    arm.mean + (arm.std || 0),
    ...(arm.paper ? [arm.paper.mean] : []),
  ]);
  const low = Math.min(...values);
  const high = Math.max(...values);
  const pad = (high - low) * 0.06;
  const y = linearScale(low - pad, high + pad, bottom, edge.top);
  const canvas = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    height,
    tabindex: 0,
    role: "img",
    "aria-label": "accuracy over the swept value; arrow keys move along it",
  });
  sweepAxes(canvas, x, y, points, { width, bottom, edge });
  // Labels of lines that are close to each other must not overlap.
  let lowest = -Infinity;
  for (const { arm, i } of references.sort((p, q) => q.arm.mean - p.arm.mean)) {
    lowest = Math.max(y(arm.mean) - 5, lowest + 13);
    canvas.append(
      svg("line", {
        x1: edge.left,
        x2: width - edge.right,
        y1: y(arm.mean),
        y2: y(arm.mean),
        "stroke-dasharray": "5 4",
        "stroke-width": 1.4,
        style: `stroke:${color(i)}`,
      }),
      svg(
        "text",
        {
          x: width - edge.right,
          y: lowest,
          "text-anchor": "end",
          class: "halo",
          style: `fill:${color(i)}`,
        },
        arm.label,
      ),
    );
  }
  canvas.append(
    svg("path", {
      d: `M${points.map(({ arm }) => `${x(arm.x)} ${y(arm.mean)}`).join("L")}`,
      fill: "none",
      "stroke-width": 1.4,
      style: "stroke:var(--soft)",
    }),
  );
  points.forEach(({ arm }) => canvas.append(...sweepPoint(x(arm.x), y, arm)));
  const cross = svg("line", { class: "cross", y1: edge.top, y2: bottom, visibility: "hidden" });
  canvas.append(cross);
  plot.replaceChildren(canvas, tip);
  listenSweep(canvas, cross, tip, plot, points, x, base);
}

function sweepAxes(canvas, x, y, points, { width, bottom, edge }) {
  for (const tick of y.ticks(6))
    canvas.append(
      svg("line", {
        class: "grid",
        x1: edge.left,
        x2: width - edge.right,
        y1: Math.round(y(tick)),
        y2: Math.round(y(tick)),
      }),
      svg("text", { x: edge.left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickText(tick)),
    );
  canvas.append(
    svg("line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: bottom, y2: bottom }),
  );
  canvas.append(
    svg(
      "text",
      { x: width - edge.right, y: bottom + 31, "text-anchor": "end" },
      sharedName(points.map(({ arm }) => arm.label)),
    ),
  );
  let free = -Infinity;
  for (const { arm } of points) {
    canvas.append(
      svg("line", { class: "axis", x1: x(arm.x), x2: x(arm.x), y1: bottom, y2: bottom + 4 }),
    );
    const text = tickText(arm.x);
    const half = text.length * 3.4;
    if (x(arm.x) - half < free) continue;
    canvas.append(svg("text", { x: x(arm.x), y: bottom + 16, "text-anchor": "middle" }, text));
    free = x(arm.x) + half + 6;
  }
}

// "base, α = 0" and "base, α = 10" are a sweep of "base, α".
function sharedName(labels) {
  let shared = labels[0];
  for (const label of labels) while (!label.startsWith(shared)) shared = shared.slice(0, -1);
  return shared.replace(/[\s\d.,=:(−-]+$/, "") || "x";
}

function sweepPoint(x, y, arm) {
  const made = [];
  if (arm.std !== null) {
    const top = y(arm.mean + arm.std);
    const foot = y(arm.mean - arm.std);
    made.push(
      svg("path", {
        d: `M${x} ${top}V${foot}M${x - 4} ${top}h8M${x - 4} ${foot}h8`,
        "stroke-width": 1.4,
        fill: "none",
        style: "stroke:var(--ink)",
      }),
    );
  }
  made.push(
    svg("circle", {
      class: "sweep-point",
      cx: x,
      cy: y(arm.mean),
      r: 4.2,
      style: "fill:var(--ink);stroke:var(--paper)",
    }),
  );
  if (arm.paper)
    made.push(
      svg("path", {
        d: `M${x} ${y(arm.paper.mean) - 6}l5 6l-5 6l-5-6z`,
        style: "fill:var(--paper);stroke:var(--ink);stroke-width:1.3",
      }),
    );
  return made;
}

function listenSweep(canvas, cross, tip, plot, points, x, base) {
  let chosen = null;
  const show = (k) => {
    chosen = k;
    tip.hidden = k === null;
    cross.setAttribute("visibility", k === null ? "hidden" : "visible");
    if (k === null) return;
    const { arm, i } = points[k],
      here = `${base}.arms.${i}`;
    cross.setAttribute("x1", x(arm.x));
    cross.setAttribute("x2", x(arm.x));
    tip.replaceChildren(
      el("b", null, arm.label),
      el("div", null, "x = ", num(`${here}.x`, "sig6")),
      el("div", null, plusMinus(here, "fixed2"), " %, n = ", num(`${here}.n`, "int")),
    );
    placeTip(tip, plot, x(arm.x));
  };
  const locate = (event) => {
    const here = event.clientX - canvas.getBoundingClientRect().left;
    const gaps = points.map(({ arm }) => Math.abs(x(arm.x) - here));
    show(gaps.indexOf(Math.min(...gaps)));
  };
  canvas.addEventListener("pointermove", locate);
  canvas.addEventListener("pointerdown", locate);
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") show(null);
  });
  canvas.addEventListener("blur", () => show(null));
  canvas.addEventListener("keydown", (event) => {
    const next = {
      ArrowLeft: (chosen ?? points.length) - 1,
      ArrowRight: (chosen ?? -1) + 1,
      Home: 0,
      End: points.length - 1,
      Escape: null,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    show(next === null ? null : Math.max(0, Math.min(points.length - 1, next)));
  });
}
