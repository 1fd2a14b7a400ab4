// The offline page of the shown heads: the server packs the numbers, here the state is added and the file made.

import { listColoured } from "./coloured.js";

const CELL_ZOOM = 0; // from this zoom on a cell is a pixel
const PREFIXES = ["second", "third", "fourth"]; // of the heads behind the first, in the question for an offline page

export const dataMark = "/*data*/"; // the place of the packed numbers in a page

/**
 * The tiles of a level that hold an allowed pair: those above the diagonal of a causal map are left out.
 *
 * @param {Pick<Entry, "m" | "n" | "first_query" | "first_key" | "causal">} entry
 * @param {number} level
 */
export function listTiles(entry, level) {
  const side = 256 * 2 ** level;
  const tiles = [];
  for (let y = 0; y * side < entry.m; y++) {
    for (let x = 0; x * side < entry.n; x++) {
      const lastQuery = entry.first_query + Math.min(entry.m, (y + 1) * side) - 1;
      if (!entry.causal || entry.first_key + x * side <= lastQuery) tiles.push({ level, y, x });
    }
  }
  return tiles;
}

/**
 * The shown heads: the first, the second where two are compared, and all that have a colour.
 *
 * @param {Pick<State, "entry" | "head" | "second" | "compare" | "more">} state
 * @returns {HeadPlace[]}
 */
export function listPackedHeads(state) {
  return listColoured({ ...state, second: state.compare === "none" ? null : state.second, more: state.compare === "colours" ? state.more : "" });
}

/**
 * The parameters of the request for an offline page: the shown heads, the view, the pinned cell, and the middle of the map where it shows cells.
 *
 * @param {State} state
 */
export function createPackQuery(state) {
  const [first, ...others] = listPackedHeads(state);
  const { batch, variant, pool, pin, row, column, zoom } = state;
  const named = others.flatMap(({ entry, head }, index) => [[`${PREFIXES[index]}_entry`, entry], [`${PREFIXES[index]}_head`, head]]);
  return { ...first, ...Object.fromEntries(named), batch, variant, pool, ...(pin ? { i: pin.i, j: pin.j } : {}), ...(zoom !== null && zoom >= CELL_ZOOM ? { r: Math.floor(row ?? 0), c: Math.floor(column ?? 0) } : {}) };
}

/**
 * The state with which the offline page begins: without the fields of the open page.
 *
 * @param {State} state
 */
export function getViewState(state) {
  const { info, grain, heads, hover, reading, pointed, progress, panel, step, flight, pairs, dark, ...view } = state;
  return view;
}

/**
 * The file: the page with the data in place of the marker. "<" is escaped, so that no token ends the script.
 *
 * @param {string} page
 * @param {unknown} data
 */
export function createFile(page, data) {
  const text = JSON.stringify(data).replaceAll("<", "\\u003c").replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
  const start = page.indexOf(dataMark);
  return page.slice(0, start) + text + page.slice(start + dataMark.length);
}
