// One chart of curves over the epochs.

class Chart {
  constructor(state, curve) {
    this.state = state;
    this.curve = curve;
    this.log = curve.log === true;
    this.svg = svg("svg", { tabindex: 0, role: "img", "aria-label": this.describe() });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.plot = el("div", { class: "plot" }, this.svg, this.tip);
    this.beyond = el("p", { class: "meta beyond", hidden: true });
    const title = el(
      "span",
      null,
      this.title(),
      curve.unit ? el("span", { class: "quiet" }, `, ${curve.unit}`) : null,
    );
    const scale =
      curve.log === null
        ? null
        : switcher(
            "scale",
            [
              [false, "linear"],
              [true, "log"],
            ],
            this.log,
            (log) => {
              this.log = log;
              this.draw();
            },
          );
    this.figure = el(
      "figure",
      { "data-curve": curve.key },
      el("figcaption", null, title, scale),
      this.plot,
      this.beyond,
    );
    this.listen();
    new ResizeObserver(() => {
      if (this.plot.clientWidth !== this.width) this.draw();
    }).observe(this.plot);
  }

  title() {
    return this.curve.key === "accuracy"
      ? `Accuracy, ${this.state.section.evaluated_on}`
      : this.curve.title;
  }

  describe() {
    return `${this.title()} by epoch; arrow keys move along the epochs`;
  }

  lines() {
    return this.state.section.arms
      .map((arm, i) => ({ arm, i, curve: arm.curves && arm.curves[this.curve.key] }))
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
    this.svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") point(this.state, null, null);
    });
    this.svg.addEventListener("blur", () => point(this.state, null, null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const now = this.state.epoch;
    const page = Math.max(1, Math.round(this.last / 10));
    const next = {
      ArrowLeft: (now ?? this.last + 1) - 1,
      ArrowRight: (now ?? 0) + 1,
      PageUp: (now ?? 0) + page,
      PageDown: (now ?? this.last) - page,
      Home: 1,
      End: this.last,
      Escape: null,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    point(
      this.state,
      next === null ? null : Math.max(1, Math.min(this.last, next)),
      next === null ? null : this,
    );
  }

  draw() {
    const width = (this.width = this.plot.clientWidth);
    const height = width < 420 ? 230 : 270;
    if (!width) return;
    const lines = this.lines();
    const edge = { left: 46, right: 14, top: 8, bottom: 34 };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren();
    const near = nearLines(lines, this.curve.key, this.late());
    const far = lines.filter((line) => !near.includes(line)).map(({ arm }) => arm.label);
    this.beyond.hidden = !far.length;
    this.beyond.textContent = `Above this range: ${far.join("; ")}.`;
    if (!lines.length) {
      this.x = null;
      this.svg.append(
        svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no line chosen"),
      );
      return this.mark();
    }
    this.last = Math.max(...lines.map(({ arm }) => arm.curves.epochs.at(-1)));
    this.x = linearScale(1, this.last, edge.left, width - edge.right);
    this.y = this.vertical(lines, height - edge.bottom, edge.top);
    this.floor = height - edge.bottom;
    this.ceiling = edge.top;
    this.axes(width, height, edge);
    const clip = `clip-${this.state.base.replace(".", "-")}-${this.curve.key}`;
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    this.svg.append(
      svg(
        "clipPath",
        { id: clip },
        svg("rect", {
          x: edge.left - 3,
          y: edge.top - 4,
          width: width - edge.left - edge.right + 6,
          height: this.floor - edge.top + 7,
        }),
      ),
      inside,
    );
    for (const line of lines) inside.append(...this.bandAndLine(line));
    this.top = svg("g", { "pointer-events": "none" });
    this.svg.append(this.top);
    this.mark();
  }

  // Only linear axes are cut: on a logarithmic axis outliers do not squash the rest.
  late() {
    return this.state.late && !this.log;
  }

  squashed() {
    return !this.log && isSquashed(this.lines(), this.curve.key);
  }

  vertical(lines, from, to) {
    const values = rangeValues(lines, this.curve.key, this.late(), this.log);
    if (this.log) return logScale(values, from, to);
    const low = Math.min(...values);
    const high = Math.max(...values);
    const pad = (high - low) * 0.04;
    const floor = this.curve.key === "flips_percent" ? 0 : -Infinity;
    return linearScale(Math.max(floor, low - pad), high + pad, from, to);
  }

  axes(width, height, edge) {
    for (const tick of this.y.ticks(5)) {
      const y = Math.round(this.y(tick));
      this.svg.append(
        svg("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y, y2: y }),
        svg("text", { x: edge.left - 6, y: y + 4, "text-anchor": "end" }, tickText(tick)),
      );
    }
    this.svg.append(
      svg("line", {
        class: "axis",
        x1: edge.left,
        x2: width - edge.right,
        y1: this.floor,
        y2: this.floor,
      }),
    );
    for (const tick of this.x.ticks(width / 70).filter((t) => Number.isInteger(t) && t >= 1)) {
      const x = Math.round(this.x(tick));
      this.svg.append(
        svg("line", { class: "axis", x1: x, x2: x, y1: this.floor, y2: this.floor + 4 }),
        svg("text", { x, y: this.floor + 16, "text-anchor": "middle" }, tickText(tick)),
      );
    }
    this.svg.append(
      svg("text", { x: width - edge.right, y: height - 3, "text-anchor": "end" }, "epoch"),
    );
  }

  bandAndLine({ arm, i, curve }) {
    const upper = [];
    const lower = [];
    const path = [];
    arm.curves.epochs.forEach((epoch, k) => {
      const mean = curve.mean[k];
      const std = curve.std[k];
      if (mean === null) return;
      const x = this.x(epoch).toFixed(1);
      path.push(`${x} ${this.y(mean).toFixed(1)}`);
      if (std !== null) {
        upper.push(`${x} ${this.y(mean + std).toFixed(1)}`);
        lower.unshift(`${x} ${this.y(mean - std).toFixed(1)}`);
      }
    });
    const made = [];
    if (upper.length)
      made.push(
        svg("path", {
          d: `M${[...upper, ...lower].join("L")}Z`,
          "fill-opacity": 0.16,
          style: `fill:${color(i)}`,
        }),
      );
    if (path.length === 1)
      made.push(
        svg("circle", {
          cx: path[0].split(" ")[0],
          cy: path[0].split(" ")[1],
          r: 3.5,
          style: `fill:${color(i)}`,
        }),
      );
    made.push(
      svg("path", {
        class: "line",
        "data-arm": i,
        d: `M${path.join("L")}`,
        fill: "none",
        "stroke-width": 1.9,
        "stroke-linejoin": "round",
        "stroke-dasharray": dash(i),
        style: `stroke:${color(i)}`,
      }),
    );
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
      if (y > this.ceiling - 4 && y < this.floor + 4)
        this.top.append(
          svg("circle", { cx: x, cy: y, r: 3.5, style: `fill:${color(i)};stroke:var(--paper)` }),
        );
      rows.push(
        keySample(i),
        el("span", { class: "name" }, arm.label),
        el("span", { class: "value" }, this.value(arm, i, k)),
      );
    }
    if (this.state.active !== this) return;
    this.tip.replaceChildren(el("b", null, `epoch ${epoch}`), el("div", { class: "rows" }, rows));
    this.tip.hidden = false;
    placeTip(this.tip, this.plot, x);
  }

  value(arm, i, k) {
    const here = `${this.state.base}.arms.${i}.curves.${this.curve.key}`;
    const std = arm.curves[this.curve.key].std[k];
    return [
      num(`${here}.mean.${k}`, this.curve.digits),
      ...(std === null
        ? []
        : [" ± ", num(`${here}.std.${k}`, this.curve.digits === "fixed2" ? "fixed2" : "sig2")]),
    ];
  }
}
