// Exact weights of short texts from queries, keys and the log-sum-exp of each row, and the pictures and curves made of them.

import { encode, MASKED } from "../map/colour.js";
import { TILE } from "../map/geometry.js";

const BUSY = 12; // ms that are computed at once; the page stays free in between
const KEPT = 6; // matrices that are kept
const THUMBNAIL = 64; // pixels of a side

/**
 * All weights of a head of one text, row by row: exp(scale · q·k - lse), 0 where masked. Sums are of float64.
 *
 * @param {StoredHead} head
 * @param {(row: number) => number} [rowAt] which rows are computed: the first is `rowAt(0)`
 * @param {number} [rows] how many
 */
export async function computeWeights({ q, k, lse, m, n, width, scale, causal }, rowAt = (row) => row, rows = m) {
  const weights = new Float32Array(rows * n);
  let since = performance.now();
  for (let at = 0; at < rows; at++) {
    const i = rowAt(at);
    const stop = causal ? Math.min(n, i + 1) : n;
    for (let j = 0; j < stop; j++) {
      let sum = 0;
      for (let c = 0; c < width; c++) sum += q[i * width + c] * k[j * width + c];
      weights[at * n + j] = Math.exp(scale * sum - lse[i]);
    }
    if (performance.now() - since > BUSY) {
      await new Promise((resolve) => setTimeout(resolve));
      since = performance.now();
    }
  }
  return weights;
}

/**
 * A tile of codes: the largest weight of each block of 2^level × 2^level cells, `MASKED` where none is allowed.
 *
 * @param {Float32Array} weights
 * @param {Pick<StoredHead, "m" | "n" | "causal">} head
 * @param {number} level
 * @param {number} y
 * @param {number} x
 */
export function computeTile(weights, { m, n, causal }, level, y, x) {
  const side = 2 ** level;
  const largest = new Float64Array(TILE * TILE).fill(-1);
  const [bottom, right] = [Math.min(m, (y + 1) * TILE * side), Math.min(n, (x + 1) * TILE * side)];
  for (let i = y * TILE * side; i < bottom; i++) {
    const line = ((i >> level) - y * TILE) * TILE - x * TILE;
    const stop = causal ? Math.min(right, i + 1) : right;
    for (let j = x * TILE * side; j < stop; j++) {
      const place = line + (j >> level);
      if (weights[i * n + j] > largest[place]) largest[place] = weights[i * n + j];
    }
  }
  return Uint16Array.from(largest, (weight) => (weight < 0 ? MASKED : encode(weight)));
}

/**
 * The small picture of a head: the largest weights of one query for each of its rows.
 *
 * @param {StoredHead} head
 */
export async function computeThumbnail(head) {
  const { m, n, causal } = head;
  const [high, wide] = [Math.min(m, THUMBNAIL), Math.min(n, THUMBNAIL)];
  const rowAt = (/** @type {number} */ row) => Math.floor(((row + 0.5) * m) / high);
  const weights = await computeWeights(head, rowAt, high);
  const codes = new Uint16Array(THUMBNAIL * THUMBNAIL).fill(MASKED);
  for (let row = 0; row < high; row++) {
    for (let column = 0; column < wide; column++) {
      const [start, end] = [Math.floor((column * n) / wide), Math.floor(((column + 1) * n) / wide)];
      const stop = causal ? Math.min(end, rowAt(row) + 1) : end;
      if (stop > start) codes[row * THUMBNAIL + column] = encode(weights.subarray(row * n + start, row * n + stop).reduce((most, weight) => Math.max(most, weight), 0));
    }
  }
  return codes;
}

/**
 * The curve along an edge: a number for each row or column.
 *
 * @param {Float32Array} weights
 * @param {Pick<StoredHead, "m" | "n">} head
 * @param {TrackName} name
 */
export function computeTrack(weights, { m, n }, name) {
  if (name === "column_mass" || name === "column_max") {
    const found = new Float64Array(n);
    for (let i = 0; i < m; i++) {
      for (let j = 0; j < n; j++) found[j] = name === "column_mass" ? found[j] + weights[i * n + j] : Math.max(found[j], weights[i * n + j]);
    }
    return Float32Array.from(found);
  }
  return Float32Array.from({ length: m }, (_, i) => {
    const row = weights.subarray(i * n, (i + 1) * n);
    if (name === "max_weight") return row.reduce((most, weight) => Math.max(most, weight), 0);
    const entropy = row.reduce((sum, weight) => (weight > 0 ? sum - weight * Math.log(weight) : sum), 0);
    return name === "entropy" ? entropy : Math.exp(entropy);
  });
}

/**
 * What a page asks of heads, by the names of the parts of an offline page: `exact:ENTRY:HEAD`, `tile:ENTRY:HEAD:LEVEL:Y:X`,
 * `track:ENTRY:HEAD:NAME`, `thumbnail:ENTRY:HEAD`. The last matrices are kept.
 *
 * @param {(entry: number, head: number) => Promise<StoredHead>} fetchHead
 */
export function createComputedParts(fetchHead) {
  /** @type {Map<string, Promise<Float32Array>>} */
  const matrices = new Map(); // the least recently used first

  /**
   * @param {string} name
   * @param {StoredHead} head
   */
  function getMatrix(name, head) {
    const weights = matrices.get(name) ?? computeWeights(head);
    matrices.delete(name);
    matrices.set(name, weights);
    if (matrices.size > KEPT) matrices.delete(/** @type {string} */ (matrices.keys().next().value));
    return weights;
  }
  /**
   * @param {string} part
   * @returns {Promise<ArrayBuffer | null>}
   */
  return async (part) => {
    const [kind, entry, index, ...rest] = part.split(":");
    if (!["exact", "tile", "track", "thumbnail"].includes(kind)) return null;
    const head = await fetchHead(Number(entry), Number(index));
    if (kind === "thumbnail") return /** @type {ArrayBuffer} */ ((await computeThumbnail(head)).buffer);
    const weights = await getMatrix(`${entry}:${index}`, head);
    if (kind === "exact") return /** @type {ArrayBuffer} */ (weights.buffer);
    if (kind === "track") return /** @type {ArrayBuffer} */ (computeTrack(weights, head, /** @type {TrackName} */ (rest[0])).buffer);
    const [level, y, x] = rest.map(Number);
    return /** @type {ArrayBuffer} */ (computeTile(weights, head, level, y, x).buffer);
  };
}
