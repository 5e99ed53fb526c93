// The curves of a section: which lines are shown, the legend, the charts.

// With more lines than this a chart is hard to read: at first it shows only the reference, the
// BEST and the worst.
const MANY_LINES = 8;
const BEST = 4;
const CURVES = [
  { key: "loss", title: "Training loss", unit: "", log: false, digits: "sig4" },
  { key: "accuracy", title: "Accuracy", unit: "%", log: null, digits: "fixed2" },
  {
    key: "flips_percent",
    title: "Signs flipped in the epoch",
    unit: "%",
    log: true,
    digits: "sig3",
  },
];

function curvesPart(section, base) {
  const has = section.arms.map((arm) => arm.curves !== null);
  const missing = section.arms.flatMap((arm) => arm.notes);
  if (!has.some(Boolean))
    return [
      el("h3", null, "Curves"),
      el(
        "p",
        { class: "note" },
        "No finished run with metrics was found, so there are no curves to draw.",
      ),
    ];
  const first = firstLines(section, has);
  const state = { section, base, shown: first, epoch: null, active: null, late: false, charts: [] };
  state.charts = CURVES.filter((curve) =>
    section.arms.some((arm) => arm.curves && arm.curves[curve.key]),
  ).map((curve) => new Chart(state, curve));
  state.late = state.charts.some((chart) => chart.squashed());
  const range = switcher(
    "range of the vertical axis",
    [
      [false, "whole range"],
      [true, "final half"],
    ],
    state.late,
    (late) => {
      state.late = late;
      redraw(state);
    },
  );
  const several = section.arms.some((arm) => arm.runs.length > 1);
  return [
    el("h3", null, "Curves"),
    el(
      "ul",
      { class: "legend", "aria-label": "lines shown" },
      legendItems(state, has, first).map((item) => el("li", null, item)),
      el("li", null, range),
    ),
    el(
      "div",
      { class: "charts" },
      state.charts.map((chart) => chart.figure),
    ),
    el(
      "p",
      { class: "meta" },
      (several ? "Mean over the seeds, with a band of ± one standard deviation. " : "") +
        (section.arms.some((arm) => arm.start)
          ? "The epochs of an arm that starts from another run are counted from that start. "
          : "") +
        shownAtFirst(section, has, first) +
        (state.late
          ? "At first, linear vertical axes show the range of the final half of training. "
          : "") +
        "Point, tap or use the arrow keys for values.",
    ),
    missing.map((note) => el("p", { class: "note" }, note)),
  ];
}

// Arms that start from a baseline are compared with each other, as in a study's own figures. The
// baseline's curve is several times as long and has a different range: it would squash the others.
function comparedArms(section) {
  const started = section.arms.map((arm) => arm.start !== null && arm.curves !== null);
  return started.filter(Boolean).length > 1 ? started : section.arms.map(() => true);
}

// If there are many lines: the reference, the best and the worst. All others lie between these.
function firstLines(section, has) {
  const compared = comparedArms(section);
  const accuracy = (i) => section.arms[i].mean;
  const drawn = section.arms.map((_, i) => i).filter((i) => has[i] && compared[i]);
  const ranked = drawn
    .filter((i) => accuracy(i) !== null)
    .sort((i, j) => accuracy(j) - accuracy(i));
  const few =
    drawn.length > MANY_LINES && ranked.length
      ? [section.reference_arm, ...ranked.slice(0, BEST), ranked.at(-1)]
      : drawn;
  return has.map((_, i) => drawn.includes(i) && few.includes(i));
}

function shownAtFirst(section, has, first) {
  const compared = comparedArms(section);
  const hidden = (here, i) => here && !first[i];
  const reference = first[section.reference_arm] ? `the reference (${section.reference}), ` : "";
  const scratch = has.some((here, i) => hidden(here, i) && !compared[i]);
  const many = has.some((here, i) => hidden(here, i) && compared[i]);
  return [
    scratch ? "Arms trained from scratch are hidden at first: their epochs differ. " : "",
    many ? `There are many arms, so these are shown at first: ${reference}` : "",
    many ? `the ${BEST} with the highest final accuracy, and the one with the lowest. ` : "",
    many ? "Use the legend to show the others. " : "",
  ].join("");
}

// A toggle per line and, if some lines are hidden at first, a switch between those shown first
// and all.
function legendItems(state, has, first) {
  const set = (lines) => {
    state.shown = lines;
    mark();
    redraw(state);
  };
  const button = (pressed, lines, attributes, ...inside) => [
    el("button", { type: "button", ...attributes, onclick: () => set(lines()) }, inside),
    pressed,
  ];
  const toggles = state.section.arms
    .map((arm, i) => [arm, i])
    .filter(([, i]) => has[i])
    .map(([arm, i]) =>
      button(
        () => state.shown[i],
        () => state.shown.map((here, k) => here !== (k === i)),
        { class: "toggle" },
        keySample(i),
        el("span", null, arm.label),
      ),
    );
  const groups = [
    [first, "these lines"],
    [has, "all lines"],
  ].map(([lines, name]) =>
    button(
      () => lines.every((here, i) => here === state.shown[i]),
      () => lines,
      null,
      name,
    ),
  );
  const mark = () =>
    [...toggles, ...groups].forEach(([node, pressed]) =>
      node.setAttribute("aria-pressed", String(pressed())),
    );
  mark();
  const some = has.some((here, i) => here && !first[i]);
  return [
    ...toggles.map(([node]) => node),
    ...(some
      ? [
          el(
            "span",
            { class: "switch", role: "group", "aria-label": "which lines" },
            groups.map(([node]) => node),
          ),
        ]
      : []),
  ];
}

function redraw(state) {
  for (const chart of state.charts) chart.draw();
}

function point(state, epoch, active) {
  state.epoch = epoch;
  state.active = active;
  for (const chart of state.charts) chart.mark();
}
