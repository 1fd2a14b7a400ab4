// The visible cells as a table, with exact weights.

import { float32Text } from "./numbers.js";

export const csvLimit = 1_000_000; // cells: what a spreadsheet holds
const atOnce = 65_536; // cells that one request may ask for

// The whole cells of a region of the map, inside the matrix.
export function cellsOf(region, { m, n }) {
  const inside = (value, size) => Math.min(size, Math.max(0, value));
  return {
    r0: inside(Math.floor(region.r0), m),
    r1: inside(Math.ceil(region.r1), m),
    c0: inside(Math.floor(region.c0), n),
    c1: inside(Math.ceil(region.c1), n),
  };
}
export function countOf({ r0, r1, c0, c1 }) {
  return Math.max(0, r1 - r0) * Math.max(0, c1 - c0);
}

// Parts of a region that one request may ask for each: bands of rows, cut where even one row is too long.
export function partsOf({ r0, r1, c0, c1 }) {
  const parts = [];
  const width = Math.min(c1 - c0, atOnce);
  const height = Math.max(1, Math.floor(atOnce / width));
  for (let r = r0; r < r1; r += height) {
    for (let c = c0; c < c1; c += width) parts.push({ r0: r, r1: Math.min(r1, r + height), c0: c, c1: Math.min(c1, c + width) });
  }
  return parts;
}

// The exact weights of a region, row-major; `onPart(share done)` after each request.
export async function fetchRegion(transport, shared, region, { signal, onPart = () => {} }) {
  const width = region.c1 - region.c0;
  const weights = new Float32Array((region.r1 - region.r0) * width);
  const parts = partsOf(region);
  for (const [done, part] of parts.entries()) {
    const { buffer } = await transport.get("region", { ...shared, ...part }, { signal });
    const values = new Float32Array(buffer);
    const across = part.c1 - part.c0;
    for (let r = part.r0; r < part.r1; r++) {
      weights.set(values.subarray((r - part.r0) * across, (r - part.r0 + 1) * across), (r - region.r0) * width + part.c0 - region.c0);
    }
    onPart((done + 1) / parts.length);
  }
  return weights;
}

// A token as a field: its JSON text. Whitespace is unambiguous, and no field begins with a sign that a spreadsheet runs.
export function field(text) {
  return `"${JSON.stringify(text).replaceAll('"', '""')}"`;
}

// One line for each cell: positions, tokens, weight. Numbers read back as the same float32.
export function table(weights, region, entry, textOf) {
  const lines = ["query,key,query_token,key_token,weight"];
  const width = region.c1 - region.c0;
  const keyTexts = Array.from({ length: width }, (_, c) => field(textOf(entry.first_key + region.c0 + c)));
  for (let r = region.r0; r < region.r1; r++) {
    const query = entry.first_query + r;
    const text = field(textOf(query));
    for (let c = 0; c < width; c++) {
      lines.push(`${query},${entry.first_key + region.c0 + c},${text},${keyTexts[c]},${float32Text(weights[(r - region.r0) * width + c])}`);
    }
  }
  return `${lines.join("\n")}\n`;
}
