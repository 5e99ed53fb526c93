// The page of `unflip export --html`: one image at a time through one network. All text of the file is set as text, never as HTML.
import { load, supportedKernels } from "./unflip.js";
import { SAMPLES } from "./samples.js";

const SHOWN = 5; // classes
const CAMERA_PAUSE = 150; // milliseconds between two frames
const MEASUREMENTS = 4; // of the time per image
const MOST_SIDE = 2048; // of an image, before the network's own resizing

const find = (id) => document.getElementById(id);

function make(tag, text = "", attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

const whole = (n) => Math.round(n).toLocaleString("en-US");
const milliseconds = (t) => `${t < 10 ? t.toFixed(3) : t.toFixed(1)} ms`;
const shown = (shape) => shape.join(" × ");

function report(error) {
  find("problem").textContent = error instanceof Error ? error.message : String(error);
  find("problem").hidden = false;
}

// Runs an action of the user; its error is shown on the page.
const tried = (action) => async (...values) => {
  try {
    find("problem").hidden = true;
    await action(...values);
  } catch (error) {
    report(error);
  }
};

// Base64 of gzip.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// ------------------------------------------------------------------------------------------------------------ images

async function pictureOf(blob) {
  let picture;
  try {
    picture = await createImageBitmap(blob); // upright, also if the camera was not
  } catch {
    throw new Error("This file is not an image that the browser can read. Try a JPEG or PNG file.");
  }
  const image = imageDataOf(picture, picture.width, picture.height);
  picture.close(); // it may have tens of megabytes
  return image;
}

function imageDataOf(source, width, height) {
  const scale = Math.min(1, MOST_SIDE / Math.max(width, height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff"; // behind what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(source, 0, 0, canvas.width, canvas.height);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

function stop(stream) {
  for (const track of stream.getTracks()) track.stop();
}

// A dark image with some noise: there is something to measure before the user gives an image.
function noise() {
  const side = 64;
  const data = new Uint8ClampedArray(4 * side * side);
  for (let i = 0; i < data.length; i++) data[i] = i % 4 === 3 ? 255 : 96 + ((i * 7919) % 61);
  return { data, width: side, height: side };
}

class Page {
  constructor(net, data) {
    this.net = net;
    this.data = data;
    this.changed = null; // the network with flipped weights
    this.image = noise();
    this.stream = null;
    this.choices = 0; // of an image or the camera, by the user: only the latest is shown
  }

  start() {
    this.writeFacts();
    this.writeC();
    this.writeLayers(null);
    this.listen();
    this.offerSamples();
    this.show();
    this.measure();
  }

  writeFacts() {
    const { net, data } = this;
    find("name").textContent = data.name;
    const facts = [
      `${whole(net.size)} bytes`,
      `${whole(net.binaryWeights)} binary weights`,
      `input ${shown(net.shape)}`,
      `WebAssembly, ${net.kernels}`,
    ];
    find("facts").textContent = facts.join(" · ");
    find("footer").textContent = "Made by unflip. This page contains everything it needs and sends nothing.";
  }

  writeC() {
    const { c } = this.data;
    const lines = c.refused
      ? [make("p", `This network cannot be written as C: ${c.refused}`)]
      : [
          make("p", `Flash: ${whole(c.flash)} bytes of constants and about 10 kB of code.`),
          make("p", `RAM: an arena of ${whole(c.arena)} bytes and about 1 kB of stack.`),
          make("p", "The scores have the same bits as here:"),
          make("code", c.command),
        ];
    find("c").replaceChildren(...lines);
  }

  // ------------------------------------------------------------------------------------------------------------ input

  listen() {
    const area = find("input");
    addEventListener("dragover", (event) => (event.preventDefault(), area.classList.add("over")));
    addEventListener("dragleave", () => area.classList.remove("over"));
    addEventListener("drop", (event) => {
      event.preventDefault();
      area.classList.remove("over");
      this.take(event.dataTransfer.files[0]);
    });
    addEventListener("paste", (event) => this.take([...event.clipboardData.files][0]));
    find("file").addEventListener("change", (event) => this.take(event.target.files[0]));
    find("camera").addEventListener("click", tried(() => this.toggleCamera()));
    find("part").addEventListener("input", tried(() => this.flip()));
    find("profile").addEventListener("click", tried(() => this.profile()));
  }

  take = tried(async (file) => {
    if (file === undefined) return;
    if (await this.choose(pictureOf(file))) this.measure();
  });

  // Shows an image when it is ready, unless the user has chosen something else by then.
  async choose(promise) {
    const choice = ++this.choices;
    this.stopCamera();
    const image = await promise;
    if (choice !== this.choices) return false;
    this.use(image);
    return true;
  }

  offerSamples() {
    const labels = this.net.labels ?? [];
    if (!SAMPLES.every(({ label }) => labels.includes(label))) return;
    const buttons = SAMPLES.map(({ label, svg }) => {
      const image = make("img", "", { alt: `a drawing: ${label}`, src: `data:image/svg+xml,${encodeURIComponent(svg)}` });
      const button = make("button", "", { type: "button", title: label });
      button.append(image);
      button.addEventListener("click", tried(() => this.choose(image.decode().then(() => imageDataOf(image, 64, 64)))));
      return button;
    });
    find("samples").replaceChildren(...buttons);
    find("samples").hidden = false;
    buttons[0].click();
  }

  async toggleCamera() {
    const choice = ++this.choices;
    if (this.stream) return this.stopCamera();
    if (!navigator.mediaDevices) throw new Error("This browser gives a page of this kind no camera. Open it over https.");
    const stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    if (choice !== this.choices) return stop(stream); // the user did not wait for it
    this.stream = stream;
    find("camera").textContent = "stop the camera";
    const video = find("video");
    video.srcObject = stream;
    await video.play();
    this.frame(stream);
  }

  frame(stream) {
    if (this.stream !== stream) return;
    const video = find("video");
    if (video.videoWidth) this.use(imageDataOf(video, video.videoWidth, video.videoHeight));
    setTimeout(() => this.frame(stream), CAMERA_PAUSE);
  }

  stopCamera() {
    if (this.stream) stop(this.stream);
    this.stream = null;
    find("camera").textContent = "use the camera";
  }

  use(image) {
    this.image = image;
    this.show();
  }

  // ------------------------------------------------------------------------------------------------------------ output

  show() {
    this.showSeen();
    const before = this.net.run(this.image);
    const after = this.changed ? this.changed.run(this.image) : before;
    const known = before.probabilities();
    const rows = after.top(SHOWN).map(({ label, index, probability }) => this.row(label, probability, known[index]));
    find("scores").replaceChildren(...rows);
  }

  row(label, now, before) {
    const row = make("div", "", { class: "score" });
    const track = make("span", "", { class: "track" });
    track.append(make("i", "", { style: `width: ${100 * now}%` }));
    if (this.changed) track.append(make("b", "", { style: `left: calc(${100 * before}% - 1px)` }));
    row.append(make("span", label, { title: label }), track, make("span", `${(100 * now).toFixed(1)} %`, { class: "number" }));
    return row;
  }

  // The pixels that the network sees.
  showSeen() {
    const [channels, height, width] = this.net.shape;
    const pixels = this.net.pixels(this.image);
    const seen = new ImageData(width, height);
    for (let i = 0, plane = width * height; i < plane; i++)
      for (let c = 0; c < 4; c++) seen.data[4 * i + c] = c === 3 ? 255 : pixels[channels === 1 ? i : c * plane + i];
    const canvas = find("seen");
    canvas.width = width;
    canvas.height = height;
    canvas.getContext("2d").putImageData(seen, 0, 0);
  }

  // Several times, because browsers compile the network's code again while it runs.
  async measure() {
    let time = Infinity;
    for (let i = 0; i < MEASUREMENTS; i++) {
      await new Promise((done) => setTimeout(done, 300));
      time = Math.min(time, this.net.bench({ seconds: 0.1 }).milliseconds);
      this.showTime(time);
    }
  }

  showTime(time) {
    find("time").textContent = `${milliseconds(time)} per image, ${whole(1000 / time)} images per second on one thread`;
  }

  // The slider's places grow with its square: the interesting part is below 10 %.
  async flip() {
    const part = 0.5 * (Number(find("part").value) / 100) ** 2;
    const wanted = (this.wanted = part);
    const changed = part === 0 ? null : await this.net.flipped(part);
    if (wanted !== this.wanted) return; // the slider has moved on
    this.changed = changed;
    const count = part * this.net.binaryWeights;
    find("flipped").textContent = part === 0 ? "none" : `${(100 * part).toFixed(2)} %, about ${whole(count)} weights`;
    this.show();
  }

  profile() {
    this.writeLayers(this.net.profile({ seconds: 0.5 }));
  }

  writeLayers(times) {
    const ops = times ?? this.net.layers;
    const total = ops.reduce((sum, { milliseconds: t = 0 }) => sum + t, 0);
    const most = Math.max(...ops.map(({ milliseconds: t = 0 }) => t));
    find("total").textContent = times ? `${milliseconds(total)} in all; an op without a time is part of another` : "";
    const head = make("tr");
    for (const name of ["op", "name", "time", "", "output"]) head.append(make("th", name, name === "time" ? { class: "number" } : {}));
    const rows = ops.map((op) => this.layer(op, most));
    find("layers").replaceChildren(head, ...rows);
  }

  layer({ kind, name, shape, milliseconds: time = 0 }, most) {
    const row = make("tr");
    const bar = make("td", "", { class: "time" });
    if (time > 0) {
      const track = make("div", "", { class: "track" });
      track.append(make("i", "", { style: `width: ${(100 * time) / most}%` }));
      bar.append(track);
    }
    row.append(make("td", kind), make("td", name), make("td", time > 0 ? milliseconds(time) : "", { class: "number" }));
    row.append(bar, make("td", shown(shape)));
    return row;
  }
}

async function main() {
  const data = JSON.parse(find("data").textContent);
  const kernels = supportedKernels()[0];
  const modules = {};
  // The second is used if the first cannot be, see load().
  for (const name of new Set([kernels, "simd"])) modules[name] = await unpacked(data.modules[name]);
  const net = await load(await unpacked(data.network), { kernels, modules });
  const page = new Page(net, data);
  page.start();
  globalThis.unflipPage = page; // for tests, and for the console
}

main().catch(report);
