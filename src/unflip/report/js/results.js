// The table of results: one row per arm.

function resultsTable(section, base) {
  const columns = {
    span: strips(section),
    paper: section.arms.some((arm) => arm.paper),
    compared: section.arms.some((arm) => arm.against),
  };
  // On a phone, a short difference fits next to the other numbers.
  columns.beside = !columns.paper && !section.arms.some(hasP);
  const rows = section.arms.map((arm, i) => resultsRow(arm, i, base, columns));
  return el(
    "table",
    { class: "results" },
    el("caption", { class: "unseen" }, "Accuracy of each arm"),
    resultsHead(section, columns),
    el("tbody", null, rows),
  );
}

function resultsHead(section, { span, paper, compared }) {
  return el(
    "thead",
    null,
    el(
      "tr",
      null,
      el("th", { scope: "col" }, "arm"),
      el("th", { scope: "col", class: "right" }, "n"),
      el("th", { scope: "col", class: "right" }, "mean ± std, %"),
      el("th", { scope: "col", class: "right" }, "best, %"),
      paper ? el("th", { scope: "col", class: "right" }, "paper, %") : null,
      compared
        ? el(
            "th",
            { scope: "col", class: "right difference" },
            `difference from ${section.reference}`,
          )
        : null,
      el(
        "th",
        { scope: "col" },
        "seeds",
        span
          ? el(
              "span",
              { class: "strip-axis", "aria-hidden": "true" },
              el("span", null, tickText(span[0])),
              el("span", null, tickText(span[1])),
            )
          : null,
      ),
      el("th", { scope: "col" }, "command"),
    ),
  );
}

function resultsRow(arm, i, base, { span, paper, compared, beside }) {
  const here = `${base}.arms.${i}`;
  const stopped = arm.runs.filter((run) => run.stopped).length;
  return el(
    "tr",
    null,
    el(
      "th",
      { scope: "row" },
      el("span", { class: "label" }, keySample(i), el("span", null, arm.label)),
      arm.start ? el("div", { class: "quiet" }, "from ", arm.start) : null,
    ),
    el("td", { class: "right", "data-head": "n" }, num(`${here}.n`, "int")),
    el(
      "td",
      { class: "right", "data-head": "mean ± std, %" },
      el(
        "span",
        null,
        plusMinus(here, "fixed2"),
        stopped ? el("span", { class: "quiet" }, " (some stopped)") : null,
      ),
    ),
    el("td", { class: "right", "data-head": "best, %" }, num(`${here}.best`, "fixed2")),
    paper
      ? el(
          "td",
          { class: arm.paper ? "right" : "right none", "data-head": "paper, %" },
          arm.paper ? plusMinus(`${here}.paper`, "fixed2") : none(),
        )
      : null,
    compared
      ? el(
          "td",
          {
            class: ["right difference", beside ? "beside" : "", arm.against ? "" : "none"].join(
              " ",
            ),
            "data-head": "difference",
          },
          difference(arm, here),
        )
      : null,
    el("td", { class: "strip-cell", "data-head": "seeds" }, span ? strip(arm, i, span) : null),
    el("td", { class: "command-cell", "data-head": "command" }, foldedCommand(arm)),
  );
}

function hasP({ against }) {
  return against !== null && (against.p !== null || against.paired_p !== null);
}

function difference(arm, here) {
  if (!arm.against) return none();
  const p = [
    ["p", "p "],
    ["paired_p", "paired "],
  ].filter(([field]) => arm.against[field] !== null);
  // The mean over the seeds that both arms have, if one arm has more.
  const inCommon =
    arm.against.paired_difference === null
      ? []
      : [num(`${here}.against.paired_difference`, "signed2"), ", "];
  const tested = p.flatMap(([field, name], k) => [
    k ? "; " : "(",
    name,
    ...(field === "paired_p" ? inCommon : []),
    num(`${here}.against.${field}`, "sig2"),
  ]);
  return el(
    "span",
    { class: "figures" },
    num(`${here}.against.difference`, "signed2"),
    p.length ? [" ", el("span", { class: "quiet" }, tested, ")")] : null,
  );
}

function resultsNote(section) {
  const some = (has) => section.arms.some(has);
  const paired = ({ against }) => against && against.paired_difference !== null;
  const p = some(hasP) ? ", with p as in the t-tests below" : "";
  return [
    "n: seeds trained to the end; std: sample standard deviation. ",
    "Each dot is a seed, the bar is mean ± std",
    some((arm) => arm.paper) ? ", the diamond is the paper’s result." : ".",
    some((arm) => arm.against)
      ? ` The difference of the means from ${section.reference} is in percentage points${p}.`
      : "",
    some(paired)
      ? " A difference next to “paired” is the mean over the seeds that both arms have."
      : "",
  ].join("");
}

// The commands of a study are long and nearly the same, so they are folded. The copy button works
// without unfolding.
function foldedCommand(arm) {
  return el(
    "div",
    { class: "command" },
    el(
      "details",
      null,
      el("summary", { "aria-label": `command of ${arm.label}` }, "command"),
      codeWords(arm.command),
    ),
    copyButton(arm.command, `the command of ${arm.label}`),
  );
}

// One span per word: lines break between words, not after the hyphens of an option.
function codeWords(text) {
  return el(
    "code",
    null,
    text.split(" ").flatMap((word, k) => [k ? " " : "", el("span", null, word)]),
  );
}

function strips(section) {
  const all = section.arms
    .flatMap((arm) => [
      ...arm.runs.map((run) => run.accuracy),
      arm.paper && arm.paper.mean,
      ...(arm.std === null || arm.mean === null ? [] : [arm.mean - arm.std, arm.mean + arm.std]),
    ])
    .filter((v) => v !== null && v !== undefined);
  if (!all.length) return null;
  const ticks = niceTicks(Math.min(...all), Math.max(...all), 4);
  const step = ticks[1] - ticks[0];
  return [
    Math.floor(Math.min(...all) / step) * step,
    Math.ceil(Math.max(...all) / step + 1e-9) * step,
  ];
}

// Seeds as dots, mean ± std as a bar, the paper's result as a diamond, on one scale for all arms.
function strip(arm, index, [low, high]) {
  const x = (v) => `${((100 * (v - low)) / (high - low)).toFixed(2)}%`;
  const ink = `stroke:${color(index)}`;
  const marks = [svg("line", { x1: "0%", x2: "100%", y1: 12, y2: 12, class: "grid" })];
  if (arm.mean !== null) {
    const spread = arm.std || 0;
    marks.push(
      svg("line", {
        x1: x(arm.mean - spread),
        x2: x(arm.mean + spread),
        y1: 12,
        y2: 12,
        "stroke-width": 6,
        "stroke-opacity": 0.3,
        style: ink,
      }),
      svg("line", {
        x1: x(arm.mean),
        x2: x(arm.mean),
        y1: 4,
        y2: 20,
        "stroke-width": 2,
        style: ink,
      }),
    );
  }
  for (const run of arm.runs)
    if (run.accuracy !== null)
      marks.push(
        svg("circle", { cx: x(run.accuracy), cy: 12, r: 2.8, style: `fill:${color(index)}` }),
      );
  if (arm.paper)
    marks.push(
      svg(
        "svg",
        { x: x(arm.paper.mean), overflow: "visible" },
        svg("path", {
          d: "M0 6l5 6l-5 6l-5-6z",
          style: "fill:var(--paper);stroke:var(--ink);stroke-width:1.3",
        }),
      ),
    );
  return svg("svg", { class: "strip", "aria-hidden": "true" }, marks);
}
