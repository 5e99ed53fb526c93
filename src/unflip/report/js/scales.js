// Scales and ticks of the axes.

function niceTicks(low, high, count) {
  if (!(high > low)) {
    low -= Math.abs(low) * 0.05 || 0.5;
    high += Math.abs(high) * 0.05 || 0.5;
  }
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++)
    ticks.push(+(k * step).toPrecision(12));
  return ticks;
}

function tickText(value) {
  const text =
    Math.abs(value) < 1e-4 && value !== 0 ? value.toExponential(0) : String(+value.toPrecision(6));
  return text.replace("-", "−");
}

function linearScale(low, high, from, to) {
  if (!(high > low)) {
    const pad = Math.abs(low) * 0.02 || 0.5;
    low -= pad;
    high += pad;
  }
  const scale = (v) => from + ((to - from) * (v - low)) / (high - low);
  scale.ticks = (count) =>
    niceTicks(low, high, count).filter((t) => t >= low - 1e-12 && t <= high + 1e-12);
  scale.back = (p) => low + ((high - low) * (p - from)) / (to - from);
  return scale;
}

// Flips end at zero, which has no logarithm. Zero is drawn half a decade below the smallest
// positive value.
function logScale(values, from, to) {
  const positive = values.filter((v) => v > 0);
  const zero = positive.length < values.length || !positive.length;
  const least = positive.length ? Math.min(...positive) : 1;
  const most = positive.length ? Math.max(...positive) : 10;
  const a = Math.log10(least) - (zero ? 0.5 : 0.03);
  const b = Math.max(Math.log10(most) + 0.03, a + 0.1);
  const scale = (v) => from + (to - from) * Math.max(0, (v > 0 ? Math.log10(v) - a : 0) / (b - a));
  scale.ticks = () => logTicks(zero ? Math.log10(least) - 0.05 : a, b, zero);
  return scale;
}

function logTicks(a, b, zero) {
  const steps = b - a < 0.7 ? [1, 1.5, 2, 3, 4, 5, 7] : b - a < 1.6 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((b - a) / 6));
  const ticks = zero ? [0] : [];
  for (let power = Math.floor(a); power <= b; power++)
    for (const step of power % every === 0 ? steps : []) {
      const exponent = power + Math.log10(step);
      if (exponent >= a && exponent <= b) ticks.push(+(step * 10 ** power).toPrecision(3));
    }
  return ticks;
}

// Next to the crosshair if there is room, otherwise below the plot.
function placeTip(tip, plot, x) {
  const room = plot.clientWidth;
  const wide = tip.offsetWidth;
  const beside = x > room / 2 ? x - wide - 10 : x + 10;
  const fits = beside >= 0 && beside + wide <= room;
  tip.style.left = `${fits ? beside : Math.max(0, (room - wide) / 2)}px`;
  tip.style.top = fits ? "6px" : "calc(100% + 2px)";
}
