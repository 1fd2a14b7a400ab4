// Bytes as text and back, compressed where the browser can.

const chunk = 0x8000;

function toText(bytes) {
  let binary = "";
  for (let at = 0; at < bytes.length; at += chunk) binary += String.fromCharCode(...bytes.subarray(at, at + chunk));
  return btoa(binary);
}
function fromText(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}
const through = async (bytes, stream) => new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());

// Neighbouring codes differ little: high and low bytes apart compress better. The order is undone on reading.
function split(bytes, width) {
  const out = new Uint8Array(bytes.length);
  const count = bytes.length / width;
  for (let i = 0; i < count; i++) for (let k = 0; k < width; k++) out[k * count + i] = bytes[i * width + k];
  return out;
}
function join(bytes, width) {
  const out = new Uint8Array(bytes.length);
  const count = bytes.length / width;
  for (let i = 0; i < count; i++) for (let k = 0; k < width; k++) out[i * width + k] = bytes[k * count + i];
  return out;
}

// A buffer of numbers of `width` bytes each as {text, width, deflated}.
export async function pack(buffer, width) {
  const bytes = split(new Uint8Array(buffer), width);
  if (typeof CompressionStream === "undefined") return { text: toText(bytes), width, deflated: false };
  return { text: toText(await through(bytes, new CompressionStream("deflate-raw"))), width, deflated: true };
}
export async function unpack({ text, width, deflated }) {
  const bytes = fromText(text);
  const whole = deflated ? await through(bytes, new DecompressionStream("deflate-raw")) : bytes;
  return join(whole, width).buffer;
}
