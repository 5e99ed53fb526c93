// Which signs changed: pickers, the table of layers, and one filter.

function signsPart(section, base) {
  if (!section.signs.length) return [];
  const heading = el("h3", null, "Which signs changed");
  const usable = section.signs
    .map((entry, k) => ({ entry, k }))
    .filter(({ entry }) => entry.seeds.length);
  const notes = signNotes(section);
  if (!usable.length)
    return [
      heading,
      el("p", { class: "note" }, "The signs cannot be compared, because weights are missing:"),
      notes,
    ];
  const others = notes.length
    ? el(
        "div",
        null,
        el(
          "details",
          null,
          el("summary", null, "Runs whose signs could not be compared"),
          el("div", null, notes),
        ),
      )
    : null;
  return [heading, new Signs(section, base, usable).node, others];
}

// A note that several arms share is shown once.
function signNotes(section) {
  const arms = new Map();
  for (const { arm, notes } of section.signs)
    for (const note of notes) arms.set(note, [...(arms.get(note) ?? []), section.arms[arm].label]);
  const whose = (labels) =>
    labels.length > 1 && labels.length === section.signs.length
      ? "All arms with a baseline"
      : labels.join("; ");
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
    const [armLabel, arm] = picker("arm", "arm");
    const [seedLabel, seed] = picker("seed", "seed");
    const [layerLabel, layer] = picker("layer", "layer");
    const [filterLabel, filter] = picker("filter", "filter");
    this.pick = { arm, seed, layer, filter };
    this.layers = el("div");
    this.viewer = el("div", { class: "viewer" });
    this.total = el("p", { class: "total" });
    setOptions(
      arm,
      usable.map(({ entry }, i) => [i, section.arms[entry.arm].label]),
      this.opening(),
    );
    arm.addEventListener("change", () => this.showArm());
    seed.addEventListener("change", () => this.showSeed());
    layer.addEventListener("change", () => this.showLayer(+layer.value));
    filter.addEventListener("change", () => this.showFilter());
    this.kernelControls = el("div", { class: "controls" }, layerLabel, filterLabel);
    this.node = el(
      "div",
      null,
      el("div", { class: "controls" }, armLabel, seedLabel),
      this.total,
      el("div", { class: "signs" }, this.layers, el("div", null, this.kernelControls, this.viewer)),
    );
    this.showArm();
  }

  // An arm that has the name of its method is the method as published. Without such an arm, take
  // the last arm with f: later arms of a study add parts.
  opening() {
    const mapped = ({ entry }) =>
      entry.kernels && entry.kernels.layers.some((layer) => layer.filters.some((one) => one.f));
    const published = ({ entry }) => {
      const arm = this.section.arms[entry.arm];
      return arm.name === arm.method;
    };
    const found = this.usable.findIndex((one) => mapped(one) && published(one));
    return Math.max(0, found >= 0 ? found : this.usable.findLastIndex(mapped));
  }

  get entry() {
    return this.usable[+this.pick.arm.value].entry;
  }

  get place() {
    return `${this.base}.signs.${this.usable[+this.pick.arm.value].k}`;
  }

  showArm() {
    setOptions(
      this.pick.seed,
      this.entry.seeds.map((seed, i) => [i, String(seed.seed)]),
      this.pick.seed.value,
    );
    const layers = this.entry.kernels ? this.entry.kernels.layers : [];
    const kept = layers.findIndex((layer) => layer.name === this.layerName);
    this.kernelControls.hidden = !layers.length;
    setOptions(
      this.pick.layer,
      layers.map((layer, i) => [i, layer.name]),
    );
    this.showSeed();
    if (layers.length) this.showLayer(kept >= 0 ? kept : this.mostChanged(layers));
    else
      this.viewer.replaceChildren(
        el("p", { class: "note" }, "This report contains no filters of this arm."),
      );
  }

  mostChanged(layers) {
    const changes = layers.map((layer) =>
      Math.max(...layer.filters.map((filter) => filter.changed)),
    );
    return changes.indexOf(Math.max(...changes));
  }

  showSeed() {
    const k = +this.pick.seed.value;
    const here = `${this.place}.seeds.${k}`;
    const seed = this.entry.seeds[k];
    this.total.replaceChildren(
      num(`${here}.changed`, "int"),
      " of ",
      num(`${here}.weights`, "int"),
      " signs (",
      num(`${here}.percent`, "sig3", "%"),
      ") differ from those of ",
      el("b", null, this.entry.baseline),
      " after ",
      num(`${here}.epoch`, "int"),
      seed.epoch === 1 ? " epoch." : " epochs.",
    );
    const most = Math.max(...seed.layers.map((layer) => layer.percent)) || 1;
    const rows = seed.layers.map((layer, i) =>
      el(
        "tr",
        { "data-layer": layer.name },
        el("th", { scope: "row" }, this.layerButton(layer.name)),
        el(
          "td",
          { class: "bar" },
          el("span", { style: `width:${(100 * layer.percent) / most}%`, "aria-hidden": "true" }),
        ),
        el("td", { class: "right" }, num(`${here}.layers.${i}.percent`, "sig3", "%")),
        el("td", { class: "right" }, num(`${here}.layers.${i}.changed`, "int")),
        el("td", { class: "right" }, num(`${here}.layers.${i}.weights`, "int")),
      ),
    );
    this.layers.replaceChildren(
      el(
        "table",
        { class: "layers" },
        el(
          "thead",
          null,
          el(
            "tr",
            null,
            el("th", { scope: "col" }, "layer"),
            el("th", { scope: "col", colspan: 2, class: "right" }, "share"),
            el("th", { scope: "col", class: "right" }, "changed"),
            el("th", { scope: "col", class: "right" }, "weights"),
          ),
        ),
        el("tbody", null, rows),
      ),
    );
    this.highlight();
  }

  layerButton(name) {
    const index = this.entry.kernels
      ? this.entry.kernels.layers.findIndex((layer) => layer.name === name)
      : -1;
    if (index < 0) return name;
    return el(
      "button",
      {
        type: "button",
        onclick: () => {
          this.pick.layer.value = index;
          this.showLayer(index);
        },
      },
      name,
    );
  }

  highlight() {
    for (const row of this.layers.querySelectorAll("tbody tr"))
      row.classList.toggle("chosen", row.dataset.layer === this.layerName);
  }

  showLayer(index) {
    const layer = this.entry.kernels.layers[index];
    this.layer = index;
    this.layerName = layer.name;
    this.pick.layer.value = index;
    const most = Math.max(...layer.filters.map((filter) => filter.changed));
    setOptions(
      this.pick.filter,
      layer.filters.map((filter, i) => [i, `${filter.index} (${filter.changed} changed)`]),
      layer.filters.findIndex((filter) => filter.changed === most),
    );
    this.highlight();
    this.showFilter();
  }

  showFilter() {
    const layer = this.entry.kernels.layers[this.layer];
    const k = +this.pick.filter.value;
    this.kernel = new Kernels(layer, `${this.place}.kernels.layers.${this.layer}`, k);
    const here = `${this.place}.kernels`;
    const place = `${here}.layers.${this.layer}`;
    const some = layer.filters[k].channels.length < layer.channels_in_filter;
    const count = el(
      "p",
      { class: "meta" },
      "Seed ",
      num(`${here}.seed`, "int"),
      ". ",
      layer.filters.length < layer.filters_in_layer
        ? [
            "The ",
            num(`${here}.filters`, "int"),
            " of ",
            num(`${place}.filters_in_layer`, "int"),
            " filters with the most changed signs are shown",
          ]
        : ["All ", num(`${place}.filters_in_layer`, "int"), " filters are shown"],
      some
        ? [
            ", each with the ",
            num("channels", "int"),
            " of ",
            num(`${place}.channels_in_filter`, "int"),
            " channels that changed most",
          ]
        : [", each with all its channels"],
      ". In this filter, ",
      num(`${place}.filters.${k}.changed`, "int"),
      " signs differ from the baseline and ",
      num(`${place}.filters.${k}.off_sign`, "int"),
      " differ from sign(W).",
    );
    this.viewer.replaceChildren(this.kernel.node, count);
  }
}
