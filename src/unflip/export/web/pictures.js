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
  const columns = weightsOf(width, wide).slice(left, left + outWidth);
  const rows = weightsOf(height, high).slice(top, top + outHeight);
  const out = new Uint8Array(channels * outWidth * outHeight);
  for (let c = 0; c < channels; c++) {
    const across = resampled(pixels, c, height, columns, width * step, step); // height × outWidth
    const down = resampled(across, 0, outWidth, rows, 1, outWidth); // outWidth × outHeight
    const start = c * outWidth * outHeight;
    for (let y = 0; y < outHeight; y++)
      for (let x = 0; x < outWidth; x++) out[start + y * outWidth + x] = down[x * outHeight + y];
  }
  return out;
}

function roundToEven(x) {
  const below = Math.floor(x);
  if (x - below !== 0.5) return Math.round(x);
  return below % 2 === 0 ? below : below + 1;
}

// For each place of the output: the first place of the input that it reads, and the weights from there on.
function weightsOf(size, outSize) {
  const scale = size / outSize;
  const support = Math.max(scale, 1);
  return Array.from({ length: outSize }, (_, place) => {
    if (size === outSize) return { first: place, weights: [1 << BITS] };
    const center = (place + 0.5) * scale;
    const first = Math.max(Math.trunc(center - support + 0.5), 0);
    const count = Math.min(Math.trunc(center + support + 0.5), size) - first;
    const triangle = Array.from({ length: count }, (_, i) =>
      Math.max(1 - Math.abs((i + first - center + 0.5) * (1 / support)), 0));
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
