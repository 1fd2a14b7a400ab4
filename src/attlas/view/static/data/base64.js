// Decodes the packed numbers of an offline page.

function decodeBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
const pipeThrough = async (bytes, stream) => new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());

// The file stores all first bytes, then all second bytes, and so on, which compresses better.
function interleave(bytes, width) {
  const joined = new Uint8Array(bytes.length);
  const count = bytes.length / width;
  for (let i = 0; i < count; i++) for (let k = 0; k < width; k++) joined[i * width + k] = bytes[k * count + i];
  return joined;
}

/** The numbers of `width` bytes each, as `packed` of packing.py has written them. */
export async function unpack({ text, width }) {
  return interleave(await pipeThrough(decodeBase64(text), new DecompressionStream("deflate-raw")), width).buffer;
}
