// One filter: a square per weight, with the kernels of its channels side by side. All panels have
// the same layout.
class Kernels {
  constructor(layer, place, index) {
    const filter = layer.filters[index];
    Object.assign(this, { layer, filter, here: `${place}.filters.${index}`, chosen: null });
    [this.rows, this.columns] = layer.kernel;
    this.count = filter.channels.length;
    this.across = Math.ceil(Math.sqrt((this.count * this.rows) / this.columns));
    this.largest = {
      w: Math.max(...filter.w.map(Math.abs)) || 1,
      f: filter.f ? Math.max(...filter.f.map(Math.abs)) || 1 : 1,
    };
    const signOf = (value) => (value < 0 ? -1 : 1);
    const bit = (text) => (j) => (text[j] === "+" ? 1 : -1);
    const before = bit(filter.before);
    const after = bit(filter.after);
    const own = (j) => signOf(filter.w[j]);
    const changed = (j) => filter.before[j] !== filter.after[j];
    const overruled = (j) => own(j) !== after(j);
    this.changed = changed;
    this.panels = [
      this.panel("baseline’s signs", before, changed, null),
      this.panel("latent weights W", (j) => filter.w[j] / this.largest.w, null, null),
      this.panel("sign(W)", own, null, overruled),
      filter.f
        ? this.panel("prediction f(W)", (j) => filter.f[j] / this.largest.f, null, null)
        : null,
      this.panel("binary weights", after, changed, overruled),
    ].filter(Boolean);
    this.readout = el("p", { class: "readout", role: "status" });
    this.node = el(
      "div",
      {
        tabindex: 0,
        class: "kernels",
        role: "group",
        "aria-label": "weights of the filter; arrow keys move from weight to weight",
        onkeydown: (event) => this.key(event),
      },
      el(
        "div",
        { class: "panels" },
        this.panels.map(({ figure }) => figure),
      ),
      this.legend(),
      this.readout,
    );
    this.choose(null);
  }

  spot(j) {
    const size = this.rows * this.columns;
    const k = Math.floor(j / size);
    const r = Math.floor((j % size) / this.columns);
    const c = j % this.columns;
    const gap = size > 1 ? 0.7 : 0.12;
    return [
      (k % this.across) * (this.columns + gap) + c,
      Math.floor(k / this.across) * (this.rows + gap) + r,
    ];
  }

  panel(title, value, dot, ring) {
    const length = this.filter.w.length;
    const gap = this.rows * this.columns > 1 ? 0.7 : 0.12;
    const wide = Math.min(this.across, this.count) * (this.columns + gap) - gap;
    const high = Math.ceil(this.count / this.across) * (this.rows + gap) - gap;
    const drawing = svg("svg", {
      viewBox: `-.35 -.35 ${wide + 0.7} ${high + 0.7}`,
      style: `max-width:${Math.round(wide * 18)}px`,
      "aria-hidden": "true",
    });
    const marks = [];
    if (dot) drawing.append(...this.grounds(dot));
    for (let j = 0; j < length; j++) {
      const [x, y] = this.spot(j);
      drawing.append(
        svg("rect", {
          x: x + 0.03,
          y: y + 0.03,
          width: 0.94,
          height: 0.94,
          "data-cell": j,
          style: `fill:${shade(value(j))}`,
        }),
      );
      if (ring && ring(j))
        marks.push(
          svg("rect", { class: "mark-ring", x: x + 0.1, y: y + 0.1, width: 0.8, height: 0.8 }),
        );
      if (dot && dot(j))
        marks.push(svg("circle", { class: "mark-dot", cx: x + 0.5, cy: y + 0.5, r: 0.27 }));
    }
    const picked = svg("rect", { class: "picked", width: 1, height: 1, visibility: "hidden" });
    drawing.append(svg("g", { "pointer-events": "none" }, marks, picked));
    const locate = (event) => {
      if (event.target.dataset.cell) this.choose(+event.target.dataset.cell);
    };
    drawing.addEventListener("pointermove", locate);
    drawing.addEventListener("pointerdown", locate);
    return { figure: el("figure", null, el("figcaption", null, title), drawing), picked };
  }

  // A kernel with a changed sign has a darker background. A frame would look like the mark of a
  // single weight.
  grounds(changed) {
    const size = this.rows * this.columns;
    const made = [];
    for (let k = 0; size > 1 && k < this.count; k++) {
      const [x, y] = this.spot(k * size);
      const some = Array.from({ length: size }, (_, m) => changed(k * size + m)).some(Boolean);
      if (some)
        made.push(
          svg("rect", {
            class: "mark-ground",
            x: x - 0.3,
            y: y - 0.3,
            width: this.columns + 0.6,
            height: this.rows + 0.6,
            rx: 0.3,
          }),
        );
    }
    return made;
  }

  groundSample() {
    const cells = [1, -1, -1, 1].map((value, j) =>
      svg("rect", {
        x: 0.35 + 1.15 * (j % 2),
        y: 0.35 + 1.15 * Math.floor(j / 2),
        width: 1.1,
        height: 1.1,
        style: `fill:${shade(value)}`,
      }),
    );
    return svg(
      "svg",
      { viewBox: "0 0 2.95 2.95", "aria-hidden": "true" },
      svg("rect", { class: "mark-ground", width: 2.95, height: 2.95, rx: 0.4 }),
      cells,
    );
  }

  legend() {
    const sample = (...shapes) => svg("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, shapes);
    const square = (value) => svg("rect", { width: 1, height: 1, style: `fill:${shade(value)}` });
    return el(
      "div",
      { class: "key-line" },
      el("span", null, sample(square(1)), "+1, or positive"),
      el("span", null, sample(square(-1)), "−1, or negative"),
      el(
        "span",
        null,
        sample(square(0.0), svg("circle", { class: "mark-dot", cx: 0.5, cy: 0.5, r: 0.27 })),
        "differs from the baseline",
      ),
      el(
        "span",
        null,
        sample(
          square(0.0),
          svg("rect", { class: "mark-ring", x: 0.1, y: 0.1, width: 0.8, height: 0.8 }),
        ),
        "differs from sign(W)",
      ),
      this.rows * this.columns > 1
        ? el("span", null, this.groundSample(), "kernel with a changed sign")
        : null,
    );
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
    if (j === null)
      return this.readout.replaceChildren(
        el("span", { class: "quiet" }, "Point at a weight, or tap it, for its values."),
      );
    const size = this.rows * this.columns;
    const k = Math.floor(j / size);
    const text = (plus) => (plus ? "+1" : "−1");
    const where =
      size > 1
        ? `, row ${Math.floor((j % size) / this.columns) + 1}, column ${(j % this.columns) + 1}`
        : "";
    this.readout.replaceChildren(
      el("b", null, "Channel ", num(`${this.here}.channels.${k}`, "int"), where),
      ": baseline ",
      text(this.filter.before[j] === "+"),
      ", W = ",
      num(`${this.here}.w.${j}`, "sig3"),
      ...(this.filter.f ? [", f(W) = ", num(`${this.here}.f.${j}`, "sig3")] : []),
      ", binary weight ",
      text(this.filter.after[j] === "+"),
      this.changed(j) ? ": changed." : ".",
    );
  }

  key(event) {
    const step = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -this.columns,
      ArrowDown: this.columns,
      Home: -Infinity,
      End: Infinity,
    }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (step === undefined) return;
    event.preventDefault();
    this.choose(
      Math.max(
        0,
        Math.min(
          this.filter.w.length - 1,
          (this.chosen ?? (step > 0 ? -1 : this.filter.w.length)) + step,
        ),
      ),
    );
  }
}

// Maps −1 .. +1 to orange, the page's color and blue. The square root keeps small weights
// distinguishable.
function shade(value) {
  const share = Math.round(100 * Math.sqrt(Math.min(1, Math.abs(value))));
  const end = value < 0 ? "--negative" : "--positive";
  return `color-mix(in srgb, var(${end}) ${share}%, var(--zero))`;
}
