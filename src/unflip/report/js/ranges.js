// Which values the vertical axis of a chart covers: all, or those of the final half of training.

// A final loss this many times the median is a different quantity, such as the distance to a
// teacher.
const FAR = 5;
// The final half's range is shown at first if the whole range is longer by more than this factor.
const SQUASHED = 2;

// The lines that decide the range: for losses of the final half, those not far above the median.
function nearLines(lines, key, late) {
  if (!late || key !== "loss") return lines;
  const last = lines.map(({ curve }) => curve.mean.findLast((mean) => mean !== null));
  const middle = [...last].sort((a, b) => a - b)[Math.floor((last.length - 1) / 2)];
  return lines.filter((_, k) => last[k] <= FAR * middle);
}

function rangeValues(lines, key, late, log) {
  const values = nearLines(lines, key, late).flatMap(({ arm, curve }) =>
    curve.mean.flatMap((mean, k) => {
      const { epochs } = arm.curves;
      if (mean === null || (late && epochs[k] < epochs.at(-1) / 2)) return [];
      const std = curve.std[k];
      return std === null ? [mean] : log ? [mean, mean + std] : [mean - std, mean + std];
    }),
  );
  // The final half may have no measurement.
  return values.length || !late ? values : rangeValues(lines, key, false, log);
}

// Whether the first epochs, or one outlying line, leave little of the axis for the end of training.
function isSquashed(lines, key) {
  if (lines.length < 2) return false;
  const spread = (values) => Math.max(...values) - Math.min(...values);
  const whole = spread(rangeValues(lines, key, false, false));
  return whole > SQUASHED * spread(rangeValues(lines, key, true, false));
}
