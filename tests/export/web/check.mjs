// What tests ask of the library in node, as JSON: node check.mjs FOLDER_OF_UNFLIP_JS KERNELS FOLDER
//
// For NAME.unflip in the folder: the bits of its outputs for NAME.input, or the message of its error. NAME.rgba is an image
// instead of an input, 8 bytes of width and height before its pixels: then the pixels that the network sees.
import { existsSync, readFileSync, readdirSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [library, kernels, folder] = process.argv.slice(2);
const { load } = await import(pathToFileURL(`${library}/unflip.js`));
const modules = { [kernels]: readFileSync(`${library}/unflip-${kernels}.wasm`) };
const bytesOf = (name) => new Uint8Array(readFileSync(`${folder}/${name}`));

async function result(name) {
  const net = await load(bytesOf(`${name}.unflip`), { kernels, modules });
  if (existsSync(`${folder}/${name}.rgba`)) {
    const bytes = bytesOf(`${name}.rgba`);
    const [width, height] = new Uint32Array(bytes.buffer, 0, 2);
    return { pixels: [...net.pixels({ data: bytes.subarray(8), width, height })] };
  }
  const { outputs } = net.run(new Float32Array(bytesOf(`${name}.input`).buffer));
  return { isa: net.kernels, bits: net.outputs.flatMap(({ name }) => [...new Uint32Array(outputs[name].buffer)]) };
}

const results = {};
for (const file of readdirSync(folder).filter((one) => one.endsWith(".unflip"))) {
  const name = file.slice(0, -".unflip".length);
  results[name] = await result(name).catch((error) => ({ error: error.message }));
}
console.log(JSON.stringify(results));
