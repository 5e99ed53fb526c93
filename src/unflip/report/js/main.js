// Puts the page together. The last script: everything else is defined before it runs.

function sectionNode(section, i) {
  const base = `sections.${i}`;
  const seeds =
    section.seeds.length === 1 ? `seed ${section.seeds[0]}` : `seeds ${section.seeds.join(", ")}`;
  const images = section.evaluated_on === "test" ? "test images" : "held-out training images";
  const meta = [
    section.data,
    `accuracy on ${images}, last epoch`,
    seeds,
    section.epochs_note.replace(/\.$/, ""),
    section.changes.length && `with ${section.changes.join(", ")}`,
    section.unflip && `unflip ${section.unflip}`,
  ];
  const alone = DATA.sections.length === 1 && DATA.title === section.title;
  return el(
    "section",
    { id: `section-${i}` },
    alone ? null : el("h2", null, section.title),
    el("p", { class: "meta" }, meta.filter(Boolean).join(" · ")),
    el("h3", null, "Results"),
    resultsTable(section, base),
    el("p", { class: "meta" }, resultsNote(section)),
    ...sweepPart(section, base),
    ...testsPart(
      section,
      base,
      "tests",
      "Welch’s t-tests",
      "The difference of the means is in percentage points.",
    ),
    ...testsPart(
      section,
      base,
      "paired",
      "Paired t-tests",
      "A pair is two runs with the same seed. The difference is the mean, in percentage points.",
    ),
    ...curvesPart(section, base),
    ...signsPart(section, base),
    el("h3", null, "Runs and recipes"),
    ...reproduce(section, base),
  );
}

// Closed <details> print nothing, so the commands are unfolded for printing.
function unfoldForPrint() {
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll(".command details:not([open])")];
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
  });
}

function page() {
  document.title = DATA.title;
  const links = DATA.sections.map((section, i) =>
    el("a", { href: `#section-${i}` }, section.title),
  );
  const main = document.getElementById("page");
  main.replaceChildren(
    el(
      "header",
      null,
      el("h1", null, DATA.title),
      DATA.date ? el("p", { class: "meta" }, DATA.date) : null,
      links.length > 1 ? el("nav", { "aria-label": "sections" }, links) : null,
    ),
    ...DATA.sections.map(sectionNode),
    el(
      "footer",
      { class: "meta" },
      el(
        "p",
        null,
        `Written by unflip ${DATA.unflip}. All numbers come from the JSON inside this file. `,
        "The page loads nothing from the network.",
      ),
    ),
  );
  unfoldForPrint();
}

page();
