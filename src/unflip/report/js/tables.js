// The tables of tests and runs, and the recipes.

// Without a reference, this many tests or fewer are shown; more are folded.
const FEW_TESTS = 10;

// Comparisons with the study's reference are shown. There may be hundreds of other pairs: they are
// folded.
function testsPart(section, base, key, title, about) {
  const tests = section[key].map((test, i) => ({ test, here: `${base}.${key}.${i}` }));
  if (!tests.length) return [];
  const few = section.reference === null && tests.length <= FEW_TESTS;
  const open = tests.filter(({ test }) => few || test.with_reference);
  const folded = tests.filter((one) => !open.includes(one));
  const reference = section.reference ?? "the reference";
  const corrected = tests.some(({ test }) => test.holm !== null);
  return [
    el("h3", null, title),
    el(
      "div",
      { class: "wide", "data-tests": key },
      open.length ? testsTable(open, few ? null : section.reference) : null,
      folded.length
        ? el(
            "details",
            null,
            el("summary", null, section.reference === null ? "All pairs" : "Other pairs"),
            el("div", null, testsTable(folded, null)),
          )
        : null,
    ),
    el(
      "p",
      { class: "meta" },
      `${about} p is two-sided and not corrected for the number of tests.`,
      corrected ? ` “p, Holm” is corrected for the comparisons with ${reference}.` : "",
    ),
  ];
}

function testsTable(tests, reference) {
  const some = (field) => tests.some(({ test }) => test[field] !== null);
  const columns = [
    ["difference", "difference", "signed2"],
    ["n", "n", "int"],
    ["t", "t", "fixed2"],
    ["df", "df", "fixed1"],
    ["p", "p", "sig2"],
    ["holm", "p, Holm", "sig2"],
  ].filter(([field]) => !["n", "holm"].includes(field) || some(field));
  const against = (name) => [el("span", { class: "quiet" }, " against "), name];
  const rows = tests.map(({ test, here }) =>
    el(
      "tr",
      null,
      el("th", { scope: "row" }, test.a, reference === null ? against(test.b) : null),
      columns.map(([field, , as]) => el("td", { class: "right" }, num(`${here}.${field}`, as))),
    ),
  );
  const head = el(
    "thead",
    null,
    el(
      "tr",
      null,
      el("th", { scope: "col" }, "arm", reference === null ? null : against(reference)),
      columns.map(([, name]) => el("th", { scope: "col", class: "right" }, name)),
    ),
  );
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "tests", style: `--after-first:${columns.length - 1}` },
      head,
      el("tbody", null, rows),
    ),
  );
}

function runsTable(arm, base) {
  const rows = arm.runs.map((run, i) => {
    const here = `${base}.runs.${i}`;
    const made = [
      run.device,
      run.torch && `torch ${run.torch}`,
      run.unflip && `unflip ${run.unflip}`,
      run.finished,
      run.given,
    ]
      .filter(Boolean)
      .join(", ");
    return el(
      "tr",
      null,
      el("th", { scope: "row" }, num(`${here}.seed`, "int")),
      el(
        "td",
        { class: "right" },
        run.stopped
          ? el("span", { class: "quiet stopped" }, run.stopped)
          : num(`${here}.accuracy`, "fixed2"),
      ),
      el("td", { class: "right" }, num(`${here}.best_accuracy`, "fixed2")),
      el("td", { class: "right" }, num(`${here}.epochs`, "int")),
      el("td", { class: "right" }, num(`${here}.seconds`, "fixed1")),
      el("td", null, made || el("span", { class: "quiet" }, "not recorded")),
    );
  });
  return el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "runs" },
      headings("seed", "›accuracy, %", "›best epoch, %", "›epochs", "›seconds", "made with"),
      el("tbody", null, rows),
    ),
  );
}

function reproduce(section, base) {
  return section.arms.map((arm, i) =>
    el(
      "details",
      null,
      el("summary", null, arm.label),
      el(
        "div",
        null,
        command(arm),
        arm.own_recipe
          ? el(
              "p",
              { class: "meta" },
              "This recipe does not ship with unflip. Save the text below under that name first.",
            )
          : null,
        el("div", { style: "margin-top:1rem" }, runsTable(arm, `${base}.arms.${i}`)),
        arm.notes.map((note) => el("p", { class: "note" }, note)),
        el(
          "div",
          { class: "command", style: "margin-top:1rem" },
          el("span", { style: "flex:1", class: "quiet" }, "Recipe"),
          copyButton(arm.yaml, `the recipe of ${arm.label}`),
        ),
        el("pre", { tabindex: 0, "aria-label": `recipe of ${arm.label}` }, arm.yaml),
      ),
    ),
  );
}

// A name that begins with › is a column of numbers, aligned to the right.
function headings(...names) {
  return el(
    "thead",
    null,
    el(
      "tr",
      null,
      names.map((name) =>
        el(
          "th",
          { scope: "col", class: name.startsWith("›") ? "right" : null },
          name.replace(/^›/, ""),
        ),
      ),
    ),
  );
}

function command(arm) {
  return el(
    "div",
    { class: "command" },
    codeWords(arm.command),
    copyButton(arm.command, `the command of ${arm.label}`),
  );
}
