// Reads what a page of one file holds, and decodes its packed numbers.

/** @param {string} text */
function decodeBase64(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}
/**
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @param {ReadableWritablePair<Uint8Array, BufferSource>} stream
 */
const pipeThrough = async (bytes, stream) => new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());

/**
 * The file stores all first bytes, then all second bytes, and so on, which compresses better.
 *
 * @param {Uint8Array} bytes
 * @param {number} width
 */
function interleave(bytes, width) {
  const joined = new Uint8Array(bytes.length);
  const count = bytes.length / width;
  for (let i = 0; i < count; i++) for (let k = 0; k < width; k++) joined[i * width + k] = bytes[k * count + i];
  return joined;
}

/**
 * The numbers of `width` bytes each, as `packed` of packing.py has written them.
 *
 * @param {PackedPart} packedPart
 * @returns {Promise<ArrayBuffer>}
 */
export async function unpack({ text, width }) {
  return interleave(await pipeThrough(decodeBase64(text), new DecompressionStream("deflate-raw")), width).buffer;
}

/** What the page of one file holds, and the element that it is built in. */
export function readData() {
  const [root, data] = [document.querySelector(".attlas"), document.getElementById("attlas-data")];
  return { root: /** @type {HTMLElement} */ (root), data: JSON.parse(data?.textContent ?? "") };
}
