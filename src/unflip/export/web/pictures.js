// Images of any size as the pixels of a network. The arithmetic is that of `unflip predict`: bilinear with whole numbers, as in
// Pillow, so that both give the same pixels.

const BITS = 22; // of the weights' fractional part: 32 bits, less 8 for a pixel and 2 for safety

/** One channel of gray, from RGBA. */
export function gray(rgba) {
  const out = new Uint8Array(rgba.length / 4);
  for (let i = 0, p = 0; i < out.length; i++, p += 4)
    out[i] = (rgba[p] * 19595 + rgba[p + 1] * 38470 + rgba[p + 2] * 7471 + 0x8000) >> 16;
  return out;
}

/**
 * The image is resized until it covers width × height, then its center is cropped. pixels: rows of `step` bytes per pixel, of
 * which the first `channels` are used. Returns channel after channel (C × H × W).
 */
export function covering({ pixels, width, height, step }, channels, outWidth, outHeight) {
  const scale = Math.max(outHeight / height, outWidth / width);
  const wide = Math.max(outWidth, roundToEven(width * scale));
  const high = Math.max(outHeight, roundToEven(height * scale));
  const left = (wide - outWidth) >> 1;
  const top = (high - outHeight) >> 1;
  const columns = weightsOf(width, wide, left, outWidth);
  const rows = weightsOf(height, high, top, outHeight);
  const lost = height - high;
  const rowsFirst = lost > 0 && lost > 2 * (width - wide); // as in Pillow 13; the order can change a value by 1
  const out = new Uint8Array(channels * outWidth * outHeight);
  for (let c = 0; c < channels; c++) {
    const image = { pixels, start: c, lineStep: width * step, step };
    out.set(rowsFirst ? byRows(image, width, columns, rows) : byColumns(image, height, columns, rows), c * outWidth * outHeight);
  }
  return out;
}

// One channel, rows of outWidth.
function byColumns({ pixels, start, lineStep, step }, height, columns, rows) {
  const across = resampled(pixels, start, height, columns, lineStep, step); // height × outWidth
  return transposed(resampled(across, 0, columns.length, rows, 1, columns.length), columns.length, rows.length);
}

function byRows({ pixels, start, lineStep, step }, width, columns, rows) {
  const down = resampled(pixels, start, width, rows, step, lineStep); // width × outHeight
  return resampled(down, 0, rows.length, columns, 1, rows.length);
}

function transposed(values, lines, length) {
  const out = new Uint8Array(values.length);
  for (let i = 0; i < lines; i++) for (let k = 0; k < length; k++) out[k * lines + i] = values[i * length + k];
  return out;
}

function roundToEven(x) {
  const below = Math.floor(x);
  if (x - below !== 0.5) return Math.round(x);
  return below % 2 === 0 ? below : below + 1;
}

// For `places` places of the output from `start` on: the first place of the input that it reads, and the weights from there on.
function weightsOf(size, outSize, start, places) {
  const scale = size / outSize;
  const support = Math.max(scale, 1);
  return Array.from({ length: places }, (_, i) => {
    const place = start + i;
    if (size === outSize) return { first: place, weights: [1 << BITS] };
    const center = (place + 0.5) * scale;
    const first = Math.max(Math.trunc(center - support + 0.5), 0);
    const count = Math.min(Math.trunc(center + support + 0.5), size) - first;
    const triangle = Array.from({ length: count }, (_, k) =>
      Math.max(1 - Math.abs((k + first - center + 0.5) * (1 / support)), 0));
    const total = triangle.reduce((sum, w) => sum + w, 0);
    return { first, weights: triangle.map((w) => Math.trunc(0.5 + (w === 0 ? 0 : w / total) * (1 << BITS))) };
  });
}

// `lines` lines, `lineStep` apart, each as long as `places`.
function resampled(pixels, start, lines, places, lineStep, step) {
  const out = new Uint8Array(lines * places.length);
  let to = 0;
  for (let line = 0; line < lines; line++)
    for (const { first, weights } of places) {
      let sum = 1 << (BITS - 1);
      let at = start + line * lineStep + first * step;
      for (let i = 0; i < weights.length; i++, at += step) sum += pixels[at] * weights[i];
      out[to++] = Math.min(sum >> BITS, 255);
    }
  return out;
}
