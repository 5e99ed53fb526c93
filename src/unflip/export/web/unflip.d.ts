/** Kernels that a module may have: relaxed SIMD, SIMD, or neither. */
export type Kernels = "relaxed" | "simd" | "scalar";

export type Source = string | URL | ArrayBuffer | ArrayBufferView | Blob;

/** RGBA bytes, as in the browser's ImageData. */
export interface Image {
  data: Uint8ClampedArray | Uint8Array;
  width: number;
  height: number;
}

export interface LoadOptions {
  /** By default the best that the browser supports. */
  kernels?: Kernels;
  /** The WebAssembly modules, as bytes or URLs. By default the files next to unflip.js. */
  modules?: Partial<Record<Kernels, Source>>;
  /** The most bytes for loading the network and running one sample. By default 2^30. */
  maxMemory?: number;
  /** The most work for loading, and for one sample, in units of about a nanosecond. By default 10^10. */
  maxWork?: number;
}

export interface Layer {
  kind: string;
  name: string;
  shape: [number, number, number];
}

export interface Measurement {
  /** The smallest mean of a group of runs. */
  milliseconds: number;
  median: number;
  runs: number;
}

export interface Class {
  index: number;
  label: string;
  probability: number;
}

/** A file or an input that cannot be used. The message says what is wrong, where, and what to do. */
export class UnflipError extends Error {}

/** The kernels that this browser can run, best first. */
export function supportedKernels(): Kernels[];

/** Loads and checks a network. */
export function load(source: Source, options?: LoadOptions): Promise<Network>;

/** A network that is ready to run. */
export class Network {
  private constructor();
  /** [channels, height, width] of the input. */
  readonly shape: [number, number, number];
  /** The names of the classes, or null if the file has none. */
  readonly labels: string[] | null;
  readonly outputs: { name: string; shape: [number, number, number] }[];
  /** The input is (pixel / 255 - mean) / std. */
  readonly preprocess: { mean: number[]; std: number[] } | null;
  readonly layers: Layer[];
  /** Bytes of the file. */
  readonly size: number;
  /** A bound on the bytes for loading the network and running one sample. */
  readonly memory: number;
  /** "relaxed-simd", "simd128" or "portable". */
  readonly kernels: string;
  readonly binaryWeights: number;
  /** An image of any size, or normalized numbers C × H × W. */
  run(input: Image | Float32Array): Result;
  /** The time of a run, on the latest input. */
  bench(options?: { seconds?: number }): Measurement;
  /** The mean time of each op, on the latest input. */
  profile(options?: { seconds?: number }): (Layer & { milliseconds: number })[];
  /** The same network after a part (0 .. 1) of its binary weights has changed sign. */
  flipped(part: number, seed?: number): Promise<Network>;
  /** An image as the bytes that the network sees, C × H × W. */
  pixels(image: Image): Uint8Array;
}

/** What a run gives. */
export class Result {
  private constructor();
  /** The first output. */
  readonly scores: Float32Array;
  /** All outputs by name, each C × H × W. */
  readonly outputs: Record<string, Float32Array>;
  readonly labels: string[] | null;
  /** Of the network, without preparing the image. */
  readonly milliseconds: number;
  /** Whether the network itself computes probabilities. */
  readonly areProbabilities: boolean;
  probabilities(): Float64Array;
  /** The most probable classes, best first. */
  top(most?: number): Class[];
}
