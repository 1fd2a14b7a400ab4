// The visible cells as a table.

import { clamp } from "../map/geometry.js";
import { formatFloat32 } from "./numbers.js";

export const csvLimit = 1_000_000; // cells: what a spreadsheet holds
const maxRequestCells = 65_536; // cells that one request may ask for

/**
 * The whole cells of a region of the map, inside the matrix.
 *
 * @param {Region} region
 * @param {{ m: number, n: number }} size
 * @returns {Region}
 */
export function clampRegion(region, { m, n }) {
  return {
    r0: clamp(Math.floor(region.r0), 0, m),
    r1: clamp(Math.ceil(region.r1), 0, m),
    c0: clamp(Math.floor(region.c0), 0, n),
    c1: clamp(Math.ceil(region.c1), 0, n),
  };
}
/** @param {Region} region */
export function countCells({ r0, r1, c0, c1 }) {
  return Math.max(0, r1 - r0) * Math.max(0, c1 - c0);
}

// Split a region into parts that one request may return each: bands of rows, or parts of rows.
/** @param {Region} region */
function splitRegion({ r0, r1, c0, c1 }) {
  /** @type {Region[]} */
  const parts = [];
  const width = Math.min(c1 - c0, maxRequestCells);
  const height = Math.max(1, Math.floor(maxRequestCells / width));
  for (let r = r0; r < r1; r += height) {
    for (let c = c0; c < c1; c += width) parts.push({ r0: r, r1: Math.min(r1, r + height), c0: c, c1: Math.min(c1, c + width) });
  }
  return parts;
}

/**
 * The weights of a region, row-major, and whether they are rounded; `onPart(share done)` after each request.
 *
 * @param {Transport} transport
 * @param {HeadPlace & Params} shared
 * @param {Region} region
 * @param {{ signal?: AbortSignal, onPart?: (share: number) => void }} options
 */
export async function fetchRegion(transport, shared, region, { signal, onPart = () => {} }) {
  const width = region.c1 - region.c0;
  const weights = new Float32Array((region.r1 - region.r0) * width);
  const parts = splitRegion(region);
  let rounded = false;
  for (const [done, part] of parts.entries()) {
    const answer = await transport.get("region", { ...shared, ...part }, { signal });
    rounded ||= Boolean(answer.rounded);
    const values = new Float32Array(answer.buffer);
    const partWidth = part.c1 - part.c0;
    for (let r = part.r0; r < part.r1; r++) {
      weights.set(values.subarray((r - part.r0) * partWidth, (r - part.r0 + 1) * partWidth), (r - region.r0) * width + part.c0 - region.c0);
    }
    onPart((done + 1) / parts.length);
  }
  return { weights, rounded };
}

// A token as a field: its JSON text. Whitespace is unambiguous, and no field can be read as a formula.
/** @param {string} text */
export function formatField(text) {
  return `"${JSON.stringify(text).replaceAll('"', '""')}"`;
}

/**
 * One line for each cell: positions, tokens, and the weight in each head, {name, weights, rounded}. Numbers read back as
 * the same float32; rounded numbers have three digits.
 *
 * @param {TableHead[]} heads
 * @param {Region} region
 * @param {Entry} entry
 * @param {TextOf} textOf
 */
export function formatTable(heads, region, entry, textOf) {
  const names = heads.length === 1 ? ["weight"] : heads.map(({ name }) => `weight_${name}`);
  const lines = [`query,key,query_token,key_token,${names.join()}`];
  const width = region.c1 - region.c0;
  const keyTexts = Array.from({ length: width }, (_, c) => formatField(textOf.key(entry.first_key + region.c0 + c)));
  for (let r = region.r0; r < region.r1; r++) {
    const query = entry.first_query + r;
    const text = formatField(textOf.query(query));
    for (let c = 0; c < width; c++) {
      const index = (r - region.r0) * width + c;
      const numbers = heads.map(({ weights, rounded }) => (rounded ? String(Number(weights[index].toPrecision(3))) : formatFloat32(weights[index])));
      lines.push(`${query},${entry.first_key + region.c0 + c},${text},${keyTexts[c]},${numbers.join()}`);
    }
  }
  return `${lines.join("\n")}\n`;
}
