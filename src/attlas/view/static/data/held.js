// What a page that works offline holds of its heads: of some every cell, of others blocks, and of these every cell at
// some places, the patches. A page that asks a server has every cell of every head.

import { listPackedHeads } from "./pack.js";
import { ZOOM_MAX } from "./state.js";

const BLOCK_ZOOM = 5; // log2 of the CSS pixels that a block may have
const NEAR = 16; // cells beside a patch that may be in the middle of the map when it shows single cells

/**
 * What the page holds of a head: {finest, block, patches, ...}; null in a page that asks a server, or where it holds none.
 *
 * @param {Info} info
 * @param {HeadPlace} headPlace
 * @returns {HeldHead | null}
 */
function findHeldHead(info, { entry, head }) {
  return info.held?.find((each) => each.entry === entry && each.head === head) ?? null;
}

/**
 * Whether the numbers of a head are here.
 *
 * @param {Info} info
 * @param {number} entry
 * @param {HeadIndex} head
 */
export function holdsHead(info, entry, head) {
  return !info.held || findHeldHead(info, { entry, head }) !== null;
}

/**
 * The finest level of the pictures of some heads that all of them have here.
 *
 * @param {Info} info
 * @param {...HeadPlace} sources
 */
export function getFinestLevel(info, ...sources) {
  return Math.max(0, ...sources.map((source) => findHeldHead(info, source)?.finest ?? 0));
}

/**
 * How many cells a pixel of a level stands for, along each side.
 *
 * @param {Info} info
 * @param {HeadPlace} source
 * @param {number} level
 */
export function getBlockSide(info, source, level) {
  return Math.max(2 ** level, findHeldHead(info, source)?.block ?? 1);
}

/**
 * Cells between two lines of the grid of a pane; 0 for pictures whose blocks are no whole pixels.
 *
 * @param {Info} info
 * @param {Pick<ScenePane, "layers">} pane
 */
export function getGridSide(info, { layers }) {
  const { source, level } = layers[layers.length - 1];
  return getBlockSide(info, source, level) === 2 ** level ? 2 ** level : 0;
}

/**
 * The places where all of some heads have every cell, though they are blocks elsewhere: [{r0, r1, c0, c1}].
 *
 * @param {Info} info
 * @param {...HeadPlace} sources
 * @returns {Region[]}
 */
export function listPatches(info, ...sources) {
  const [first, ...others] = sources.map((source) => findHeldHead(info, source)?.patches ?? []);
  const isSame = (/** @type {Region} */ a) => (/** @type {Region} */ b) => a.r0 === b.r0 && a.r1 === b.r1 && a.c0 === b.c0 && a.c1 === b.c1;
  return first.filter((patch) => others.every((patches) => patches.some(isSame(patch))));
}

/**
 * The patch that a cell lies in, or within `margin` cells of; undefined where there is none.
 *
 * @param {Region[]} patches
 * @param {number} i
 * @param {number} j
 * @param {number} [margin]
 */
export function findPatch(patches, i, j, margin = 0) {
  return patches.find(({ r0, r1, c0, c1 }) => i >= r0 - margin && i < r1 + margin && j >= c0 - margin && j < c1 + margin);
}

/**
 * log2 of the CSS pixels that a cell may have at a place of the shown heads: blocks are not drawn as large as cells are.
 *
 * @param {Info} info
 * @param {Pick<State, "entry" | "head" | "second" | "compare" | "more">} state
 * @param {number} row
 * @param {number} column
 */
export function getZoomLimit(info, state, row, column) {
  const sources = listPackedHeads(state);
  const finest = getFinestLevel(info, ...sources);
  return finest && !findPatch(listPatches(info, ...sources), row, column, NEAR) ? BLOCK_ZOOM - finest : ZOOM_MAX;
}
