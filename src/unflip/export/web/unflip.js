// Runs packed 1-bit networks (.unflip files) with WebAssembly: in browsers, in workers and in node. No dependencies.
//
//   import { load } from "unflip";
//   const net = await load("resnet20.unflip");
//   const { label, probability } = net.run(context.getImageData(0, 0, width, height)).top(1)[0];
//
// The scores have the same bits as those of the native runtime.
import { covering, gray } from "./pictures.js";

const WARM_UP = 100; // milliseconds
const KERNELS = ["relaxed", "simd", "scalar"]; // best first

// Modules of one function each. A browser accepts them if it has the instruction: i8x16.popcnt, i8x16.relaxed_swizzle.
const HEAD = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10];
const PROBES = {
  relaxed: [...HEAD, 15, 1, 13, 0, 65, 1, 253, 15, 65, 2, 253, 15, 253, 128, 2, 11],
  simd: [...HEAD, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11],
};

/** A file or an input that cannot be used. The message says what is wrong, where, and what to do. */
export class UnflipError extends Error {
  name = "UnflipError";
}

/** The kernels that this browser can run, best first. */
export function supportedKernels() {
  return KERNELS.filter((name) => !(name in PROBES) || WebAssembly.validate(new Uint8Array(PROBES[name])));
}

const compiled = new Map(); // kernels to the promise of a module: compiled once, used by every network

/**
 * Loads and checks a network.
 *
 * source: a URL, or the file's bytes. options.kernels: "relaxed", "simd" or "scalar"; by default the best that the browser
 * supports. options.modules: the WebAssembly modules by these names, as bytes or URLs; by default the files next to this one.
 * options.maxMemory, options.maxWork: the limits of the runtime, see the documentation of the C API.
 */
export async function load(source, options = {}) {
  const kernels = options.kernels ?? supportedKernels()[0];
  if (!KERNELS.includes(kernels)) throw new UnflipError(`kernels must be one of ${KERNELS.join(", ")}, not ${kernels}`);
  const [file, module] = await Promise.all([bytesOf(source), moduleOf(kernels, options.modules)]);
  const instance = await instantiate(module);
  if (!instance.exports.usable()) return load(file, { ...options, kernels: "simd" }); // its multiply-adds round twice
  return new Network(instance, module, file, { ...options, checked: true });
}

// A new memory for every network: after an error it is dropped.
async function instantiate(module) {
  const given = imports();
  const instance = await WebAssembly.instantiate(module, given);
  given.box.memory = instance.exports.memory;
  instance.exports._initialize();
  return instance;
}

function moduleOf(kernels, modules) {
  const given = modules?.[kernels];
  if (given !== undefined) return bytesOf(given).then((bytes) => WebAssembly.compile(bytes));
  if (!compiled.has(kernels)) {
    const url = new URL(`./unflip-${kernels}.wasm`, import.meta.url);
    const module = bytesOf(url).then((bytes) => WebAssembly.compile(bytes));
    module.catch(() => compiled.delete(kernels)); // try again at the next load
    compiled.set(kernels, module);
  }
  return compiled.get(kernels);
}

async function bytesOf(source) {
  if (source instanceof ArrayBuffer) return new Uint8Array(source);
  if (ArrayBuffer.isView(source)) return new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
  if (typeof Blob !== "undefined" && source instanceof Blob) return new Uint8Array(await source.arrayBuffer());
  if (typeof source !== "string" && !(source instanceof URL))
    throw new UnflipError("a network is loaded from a URL, an ArrayBuffer, a typed array or a Blob");
  if (source instanceof URL && source.protocol === "file:" && globalThis.process?.versions?.node) {
    const { readFile } = await import("node:fs/promises"); // node's fetch does not read files
    return bytesOf(await readFile(source)); // its slice() would not copy
  }
  const response = await fetch(source);
  if (!response.ok) throw new UnflipError(`${source}: the server answered ${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

// What a module calls. Each instance has its own memory, known after it was made.
function imports() {
  const box = { memory: null };
  const text = (address, size) => new TextDecoder().decode(new Uint8Array(box.memory.buffer, address, size));
  const now = (clock, precision, address) => {
    new DataView(box.memory.buffer).setBigUint64(address, BigInt(Math.round(performance.now() * 1e6)), true);
    return 0;
  };
  const missing = () => 8; // "bad file descriptor": there are no files
  return {
    box,
    unflip: {
      fail: (address, size) => {
        throw new UnflipError(text(address, size));
      },
      number: (address, size) => Number(text(address, size)),
    },
    wasi_snapshot_preview1: { clock_time_get: now, fd_write: missing, fd_close: missing, fd_seek: missing },
  };
}

// The header of a file that the module has checked.
function headerOf(file) {
  const view = new DataView(file.buffer, file.byteOffset, file.byteLength);
  const length = Number(view.getBigUint64(0, true));
  const tensors = JSON.parse(new TextDecoder().decode(file.subarray(8, 8 + length)));
  return { tensors, graph: JSON.parse(tensors.__metadata__.graph), data: 8 + length };
}

/** A network that is ready to run: what `load` returns. */
export class Network {
  #exports;
  #memory;
  #module;
  #file;
  #options;
  #header;
  #about;
  #pointer;
  #tables = null; // float values of pixels, for each channel; made for the first image
  #latest = false; // whether there was an input

  constructor(instance, module, file, options) {
    this.#exports = instance.exports;
    this.#memory = instance.exports.memory;
    this.#module = module;
    this.#file = file;
    this.#options = options;
    const address = this.#exports.allocate(file.length);
    new Uint8Array(this.#memory.buffer, address, file.length).set(file);
    const { maxMemory = 0, maxWork = 0, checked } = options;
    this.#pointer = this.#exports.load(address, file.length, maxMemory, maxWork, checked ? 1 : 0);
    this.#about = JSON.parse(this.#text(this.#exports.description(this.#pointer)));
    this.#header = headerOf(file);
  }

  /** [channels, height, width] of the input. */
  get shape() {
    return [...this.#about.shape];
  }
  /** The names of the classes, or null if the file has none. */
  get labels() {
    return this.#header.graph.labels ?? null;
  }
  /** Name and shape of each output. */
  get outputs() {
    return this.#about.outputs.map(({ name, shape }) => ({ name, shape: [...shape] }));
  }
  /** {mean, std} of pixel / 255, or null. */
  get preprocess() {
    return this.#header.graph.input.preprocess ?? null;
  }
  /** The bytes of the file. */
  get size() {
    return this.#file.length;
  }
  /** A bound on the bytes for loading the network and running one sample. */
  get memory() {
    return this.#about.memory;
  }
  /** The kernels in use: "relaxed-simd", "simd128" or "portable". */
  get kernels() {
    return this.#about.isa;
  }
  /** Kind, name and output shape of each op. */
  get layers() {
    return this.#about.ops.map((op) => ({ ...op, shape: [...op.shape] }));
  }
  /** How many weights are binary. */
  get binaryWeights() {
    return this.#binaryTensors().reduce((sum, { bits }) => sum + bits, 0);
  }

  /**
   * Runs the network. input: an ImageData, or any { data, width, height } with RGBA bytes, which is resized, cropped and
   * normalized as the file says; or a Float32Array of C × H × W, already normalized.
   */
  run(input) {
    const pixels = this.#write(input);
    const start = performance.now();
    this.#exports.run(this.#pointer, pixels ? 1 : 0, 0);
    const milliseconds = performance.now() - start;
    const outputs = Object.create(null); // any name is a plain key, also "__proto__"
    for (const { name, address, shape } of this.#about.outputs)
      outputs[name] = new Float32Array(this.#memory.buffer, address, count(shape)).slice();
    const scores = outputs[this.#about.outputs[0].name];
    return new Result(scores, outputs, this.labels, this.#hasProbabilities(), milliseconds);
  }

  /**
   * The time of one run, on the latest input. Clocks of browsers tick every 0.1 ms, so runs are timed in groups of 10 ms or more.
   * milliseconds is the smallest mean of a group.
   */
  bench({ seconds = 1 } = {}) {
    this.#needInput();
    for (const end = performance.now() + WARM_UP; performance.now() < end; ) this.#timed(1); // browsers compile while they run
    const group = Math.max(1, Math.ceil(10 / Math.max(this.#timed(4) / 4, 0.01)));
    const times = [];
    for (const end = performance.now() + 1000 * seconds; times.length < 3 || performance.now() < end; )
      times.push(this.#timed(group) / group);
    times.sort((a, b) => a - b);
    return { milliseconds: times[0], median: times[times.length >> 1], runs: group * times.length };
  }

  /** The mean time of each op, on the latest input. Ops that were fused into another take no time. */
  profile({ seconds = 1 } = {}) {
    this.#needInput();
    const { ops, seconds: address } = this.#about;
    const sums = () => new Float64Array(this.#memory.buffer, address, ops.length);
    sums().fill(0);
    let runs = 0;
    for (const end = performance.now() + 1000 * seconds; runs < 3 || performance.now() < end; runs++)
      this.#exports.run(this.#pointer, this.#latest.pixels ? 1 : 0, 1);
    const found = sums();
    return ops.map((op, i) => ({ ...op, shape: [...op.shape], milliseconds: (1000 * found[i]) / runs }));
  }

  /** The same network after a part (0 .. 1) of its binary weights has changed sign. The seed chooses which. */
  async flipped(part, seed = 1) {
    if (!(part >= 0 && part <= 1)) throw new UnflipError(`part must be 0 .. 1, not ${part}`);
    const file = this.#file.slice();
    const random = generator(seed);
    for (const { first, bits } of this.#binaryTensors())
      for (let i = 0; i < bits; i++) if (random() < part) file[first + (i >> 3)] ^= 1 << (i & 7);
    const instance = await instantiate(this.#module);
    return new Network(instance, this.#module, file, { ...this.#options, checked: false }); // its hash is another one now
  }

  #needInput() {
    if (!this.#latest) throw new UnflipError("run the network once before measuring it: times depend on the input");
  }

  #timed(runs) {
    const start = performance.now();
    for (let i = 0; i < runs; i++) this.#exports.run(this.#pointer, this.#latest.pixels ? 1 : 0, 0);
    return performance.now() - start;
  }

  #text(address) {
    const bytes = new Uint8Array(this.#memory.buffer, address);
    return new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)));
  }

  // The bits of every binary convolution: where they are in the file, and how many.
  #binaryTensors() {
    const { tensors, graph, data } = this.#header;
    return graph.ops.filter((op) => op.bits !== undefined).map((op) => ({
      first: data + tensors[op.bits].data_offsets[0],
      bits: tensors[op.scales].shape[0] * count(op.shape),
    }));
  }

  // Whether the last op already gives probabilities.
  #hasProbabilities() {
    return ["softmax", "sigmoid"].includes(this.#about.ops.at(-1)?.kind);
  }

  // In floats, each operation rounded, as the native runtime's users compute it.
  #normalization() {
    const round = Math.fround;
    const given = this.preprocess;
    return Array.from({ length: this.#about.shape[0] }, (_, c) => Float32Array.from({ length: 256 }, (_, pixel) => {
      const x = round(pixel / 255);
      return given === null ? x : round(round(x - round(given.mean[c])) / round(given.std[c]));
    }));
  }

  // Writes the input to the module's memory. Returns whether it was written as pixels.
  #write(input) {
    const [channels, height, width] = this.#about.shape;
    const pixels = !(input instanceof Float32Array) && this.#about.pixels !== null;
    if (input instanceof Float32Array) {
      if (input.length !== channels * height * width)
        throw new UnflipError(`the input has ${input.length} numbers; ${channels} × ${height} × ${width} are needed`);
      if (!input.every(Number.isFinite)) throw new UnflipError("the input has a NaN or an infinity");
      new Float32Array(this.#memory.buffer, this.#about.input, input.length).set(input);
    } else {
      const bytes = this.pixels(input);
      if (pixels) new Uint8Array(this.#memory.buffer, this.#about.pixels, bytes.length).set(bytes);
      else this.#writeFloats(bytes, height * width);
    }
    this.#latest = { pixels };
    return pixels;
  }

  #writeFloats(bytes, plane) {
    this.#tables ??= this.#normalization();
    const floats = new Float32Array(this.#memory.buffer, this.#about.input, bytes.length);
    for (let c = 0, i = 0; c < this.#tables.length; c++)
      for (const end = i + plane, table = this.#tables[c]; i < end; i++) floats[i] = table[bytes[i]];
  }

  /** An image as the pixels that the network sees: bytes, C × H × W. */
  pixels(image) {
    const [channels, height, width] = this.#about.shape;
    if (channels !== 1 && channels !== 3)
      throw new UnflipError(`this network has ${channels} channels, but an image has 1 or 3; give a Float32Array instead`);
    const { data, width: w, height: h } = image ?? {};
    if (!(w > 0 && h > 0) || data?.length !== 4 * w * h)
      throw new UnflipError("an input is an ImageData, { data, width, height } with RGBA bytes, or a Float32Array");
    const source = channels === 1 ? { pixels: gray(data), step: 1 } : { pixels: data, step: 4 };
    return covering({ ...source, width: w, height: h }, channels, width, height);
  }
}

/** What a run gives. */
export class Result {
  constructor(scores, outputs, labels, areProbabilities, milliseconds) {
    /** The first output. */
    this.scores = scores;
    /** A Float32Array per output, by name. */
    this.outputs = outputs;
    this.milliseconds = milliseconds;
    this.labels = labels;
    this.areProbabilities = areProbabilities;
  }

  /** A probability per class: the softmax of the scores, unless the network has computed it. */
  probabilities() {
    // Scores below 0 or above 1 are those of another op, and the last one has no use.
    if (this.areProbabilities && this.scores.every((x) => x >= 0 && x <= 1)) return Float64Array.from(this.scores);
    const most = this.scores.reduce((a, b) => Math.max(a, b), -Infinity);
    const powers = Float64Array.from(this.scores, (x) => Math.exp(x - most));
    const total = powers.reduce((a, b) => a + b, 0);
    return powers.map((x) => x / total);
  }

  /** The most probable classes, best first: [{ index, label, probability }]. */
  top(most = 5) {
    const all = Array.from(this.probabilities(), (probability, index) => ({
      index,
      label: this.labels?.length === this.scores.length ? this.labels[index] : String(index),
      probability,
    }));
    return all.sort((a, b) => b.probability - a.probability).slice(0, most);
  }
}

const count = (shape) => shape.reduce((a, b) => a * b, 1);

// Numbers 0 .. 1 that depend only on the seed (SplitMix32).
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x9e3779b9) >>> 0;
    let z = state;
    z = Math.imul(z ^ (z >>> 16), 0x21f0aaad);
    z = Math.imul(z ^ (z >>> 15), 0x735a2d97);
    return ((z ^ (z >>> 15)) >>> 0) / 2 ** 32;
  };
}
