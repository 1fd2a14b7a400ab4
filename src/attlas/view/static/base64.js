// Packed numbers of a page without a server, back as bytes.

function fromText(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  return bytes;
}
const through = async (bytes, stream) => new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());

// High and low bytes are packed apart, which compresses better.
function join(bytes, width) {
  const out = new Uint8Array(bytes.length);
  const count = bytes.length / width;
  for (let i = 0; i < count; i++) for (let k = 0; k < width; k++) out[i * width + k] = bytes[k * count + i];
  return out;
}

/** The numbers of `width` bytes each, as `packed` of packing.py has written them. */
export async function unpack({ text, width }) {
  return join(await through(fromText(text), new DecompressionStream("deflate-raw")), width).buffer;
}
