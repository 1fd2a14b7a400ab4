// The scene of a frame: panes, the heads drawn in them, and the cell at each position.

import { getCausalOffset, chooseLevel, computePanes, placePane } from "./geometry.js";
import { createLayer, createPatchLayer } from "./layers.js";
import { getMarkedHeadName } from "../data/numbers.js";
import { canDivide, haveSameCells } from "../data/comparable.js";
import { findPatch, getFinestLevel, getBlockSide, listPatches } from "../data/held.js";
import { listColoured } from "../data/coloured.js";
import { isContrast, getPlace } from "../data/state.js";
import { isWeighted } from "../data/weighting.js";
import { createSource } from "./tiles.js";
import { t } from "../words/words.js";

const TICK_ROOM = 14; // CSS pixels that the number of the last tick reaches over the edge

const LARGE_CELL = 8; // CSS pixels from which a cut cell is seen as such
const LEAST_RING = 9; // CSS pixels of the ring about a cell, at least

/**
 * Whether an entry has a kind of numbers.
 *
 * @param {Entry} entry
 * @param {Variant} variant
 */
const hasVariant = (entry, variant) => (isWeighted({ variant }) ? variant in (entry.largest_norms ?? {}) : variant === "plain" || entry.softmax !== false);

/**
 * Why the chosen comparison cannot be drawn, in words; null when it can, or when none is chosen.
 *
 * @param {Pick<State, "info" | "entry" | "head" | "second" | "compare" | "more" | "variant">} state
 */
export function explainRefusal(state) {
  const { info, entry, second, compare } = state;
  if (compare === "none") return null;
  if (!second) return t("choose a second head to compare with");
  const [a, b] = [info.entries[entry], info.entries[second.entry]];
  const sameCells = compare === "colours" ? listColoured(state).every((each) => haveSameCells(a, info.entries[each.entry])) : haveSameCells(a, b);
  if (compare !== "side" && !sameCells) return t("the two heads are of different parts of the text");
  if (compare === "colours" && !listColoured(state).every((each) => canDivide(info, entry, each.entry))) return t("weights that may be negative have no colour of a head");
  if (compare === "colours" && !listColoured(state).every((each) => hasVariant(info.entries[each.entry], state.variant))) return t("one of the heads does not have these numbers");
  if (compare === "ratio" && !canDivide(info, entry, second.entry)) return t("weights that may be negative are not divided");
  if (compare === "triangle" && !(a.causal && b.causal)) return t("only causal matrices leave a triangle empty");
  return null;
}

/**
 * The names written into a pane where two heads are shown: at its upper right and lower left.
 *
 * @param {Info} info
 * @param {Compare} compare
 * @param {Source} source
 * @param {Source | null} other
 */
function getPaneNames(info, compare, source, other) {
  const getName = (/** @type {HeadPlace} */ { entry, head }) => getMarkedHeadName(info, entry, head);
  if (compare === "side") return { upper: getName(source) };
  if (!other) return {};
  if (compare === "triangle") return { upper: getName(other), lower: getName(source) };
  return {}; // the headline over the map names both
}

/**
 * The scene of a state on a stage of `width` x `height` CSS pixels.
 *
 * @param {State} state
 * @param {number} width
 * @param {number} height
 * @param {number} dpr
 * @param {boolean} hasBand
 * @returns {Scene}
 */
export function createScene(state, width, height, dpr, hasBand) {
  const { info, batch, variant, pool, second } = state;
  const { row, column, zoom } = getPlace(state);
  const scale = 2 ** zoom;
  const refusal = explainRefusal(state);
  const compare = refusal ? "none" : state.compare;
  const first = createSource({ entry: state.entry, head: state.head, batch, variant, pool });
  const other = second && compare !== "none" ? createSource({ ...second, batch, variant, pool }) : null;
  const mixed = compare === "colours" ? listColoured(state).map((place) => createSource({ ...place, batch, variant, pool })) : [];
  const sources = compare === "side" && other ? [first, other] : [first];
  const finest = getFinestLevel(info, first, ...(other ? [other] : []), ...mixed);
  const boxes = computePanes(width, height, scale, { side: compare === "side", hasBand });
  const panes = boxes.map((box, index) => {
    const source = sources[index];
    const entry = info.entries[source.entry];
    const placed = placePane(box, { row, column, scale, dpr, m: entry.m, n: entry.n });
    const pane = /** @type {ScenePane} */ (Object.assign(placed, { source, entry, firstKey: entry.first_key, firstQuery: entry.first_query }));
    // Of some layers only statistics were kept: there is nothing to draw.
    pane.readable = entry.readable !== false && (!other || info.entries[other.entry].readable !== false);
    pane.names = getPaneNames(info, compare, source, other);
    pane.layers = [createLayer(pane, source, entry, { scale, dpr, finest, other: isContrast(compare) ? other : null, mixed })];
    pane.legend = mixed.map(({ entry: each, head }) => getMarkedHeadName(info, each, head));
    if (compare === "triangle" && other) {
      const shift = getCausalOffset(entry);
      pane.layers.unshift(createLayer(pane, other, info.entries[other.entry], { scale, dpr, finest, transposed: true, shift }));
    }
    pane.patches = createPatchLayers(info, pane.layers, compare, scale * dpr);
    return pane;
  });
  const level = chooseLevel(scale * dpr, panes[0].entry.levels, finest);
  return { info, panes: /** @type {Scene["panes"]} */ (panes), scale, dpr, level, compare, refusal, width, height };
}

/**
 * The patches in view of a pane that shows blocks elsewhere, once a cell is a device pixel wide.
 *
 * @param {Info} info
 * @param {Layer[]} layers
 * @param {Compare} compare
 * @param {number} pixels
 */
function createPatchLayers(info, layers, compare, pixels) {
  const [main] = layers;
  if (compare === "triangle" || pixels < 1 || getBlockSide(info, main.source, main.level) === 1) return [];
  const sources = main.mixed.length ? main.mixed : main.other ? [main.source, main.other] : [main.source];
  return listPatches(info, ...sources).map((patch) => createPatchLayer(main, patch)).filter((layer) => layer !== null);
}

/**
 * What a pixel shows: `side`, cells along a side of its block; `framed`, whether single cells are drawn within frames.
 *
 * @param {Scene} scene
 * @returns {Grain}
 */
export function describeGrain({ info, panes: [pane], level }) {
  const { r0, r1, c0, c1 } = pane.region;
  const isCovered = pane.patches.some(({ region }) => region.r0 === r0 && region.r1 === r1 && region.c0 === c0 && region.c1 === c1);
  return isCovered ? { side: 1, framed: false } : { side: getBlockSide(info, pane.source, level), framed: pane.patches.length > 0 };
}

/**
 * What cell (i, j) of a pane shows: its head, whether the mask allows it, and the block of its pixel.
 * `toPaneCell(r, c)` returns the cell of the pane that shows a cell of that head.
 *
 * @param {Scene} scene
 * @param {ScenePane} pane
 * @param {number} i
 * @param {number} j
 * @returns {Target | null}
 */
export function getTarget(scene, pane, i, j) {
  const { entry, source } = pane;
  const { info, compare } = scene;
  const offset = getCausalOffset(entry);
  const main = pane.layers[pane.layers.length - 1];
  let [r, c] = [i, j];
  /** @type {Pick<Target, "source" | "entry" | "other" | "mixed" | "name" | "toPaneCell">} */
  let target = { source, entry, other: main.other, mixed: main.mixed, name: "", toPaneCell: (r, c) => ({ i: r, j: c }) };
  if (compare === "triangle" && j > i + offset) {
    const second = pane.layers[0];
    [r, c] = [j - offset, i + offset];
    target = { source: second.source, entry: second.entry, other: null, mixed: [], name: t("second head"), toPaneCell: (r, c) => ({ i: c - offset, j: r + offset }) };
    if (r < 0 || c < 0 || r >= entry.m || c >= entry.n) return null;
  }
  const patches = pane.patches.map((layer) => layer.patch);
  const level = target.source === source && findPatch(patches, r, c) ? 0 : scene.level;
  const size = level < scene.level ? 1 : getBlockSide(info, target.source, level);
  const [r0, c0] = [Math.floor(r / size) * size, Math.floor(c / size) * size];
  const block = { r0, r1: Math.min(entry.m, r0 + size), c0, c1: Math.min(entry.n, c0 + size) };
  // A block is masked when all its cells are.
  const allowed = !entry.causal || block.c0 <= block.r1 - 1 + offset;
  const [firstQuery, firstKey] = [entry.first_query, entry.first_key];
  return { ...target, i: r, j: c, level, side: size, block, allowed, firstQuery, firstKey, query: r + firstQuery, key: c + firstKey };
}

/**
 * The pane at a place of the stage, and the cell there; null outside the matrix.
 *
 * @param {Scene} scene
 * @param {number} x
 * @param {number} y
 * @returns {Hit | null}
 */
export function findCell(scene, x, y) {
  for (const pane of scene.panes) {
    if (!pane.readable || x < pane.left || y < pane.top || x >= pane.right || y >= pane.bottom) continue;
    const cell = { i: Math.floor(pane.row(y)), j: Math.floor(pane.column(x)) };
    if (cell.i < 0 || cell.j < 0 || cell.i >= pane.entry.m || cell.j >= pane.entry.n) continue;
    return { pane, ...cell };
  }
  return null;
}

/**
 * The track at a place of the stage, and the rows or columns `from` to `to` - 1 of its pixel; null elsewhere.
 *
 * @param {Scene} scene
 * @param {number} x
 * @param {number} y
 * @returns {TrackHit | null}
 */
export function findTrack(scene, x, y) {
  for (const pane of scene.panes) {
    const { gutter, left, top, right, bottom, entry } = pane;
    const getRange = (/** @type {number} */ value, /** @type {number} */ next, /** @type {number} */ count) => {
      const from = Math.min(count - 1, Math.max(0, Math.floor(value)));
      return { from, to: Math.min(count, Math.max(from + 1, Math.floor(next))) };
    };
    const base = { top: top - gutter.band - gutter.top, left: left - gutter.band - gutter.left };
    if (x >= left && x < right && y <= base.top && y > base.top - gutter.track) {
      return { pane, side: "top", ...getRange(pane.column(x), pane.column(x + 1), entry.n) };
    }
    if (y >= top && y < bottom && x <= base.left && x > base.left - gutter.track) {
      return { pane, side: "left", ...getRange(pane.row(y), pane.row(y + 1), entry.m) };
    }
  }
  return null;
}

/**
 * The track whose label is at a place of the stage, in the upper left corner of its pane; null elsewhere.
 *
 * @param {Scene} scene
 * @param {number} x
 * @param {number} y
 * @returns {{ pane: ScenePane, side: "top" | "left" } | null}
 */
export function findTrackLabel(scene, x, y) {
  for (const pane of scene.panes) {
    const { gutter, left, top } = pane;
    const edge = top - gutter.band - gutter.top; // between the upper track and the axis
    if (x < pane.x || x >= left || y < edge - gutter.track || y >= top - 14) continue;
    if (y < edge) return { pane, side: "top" };
    return gutter.track < 30 ? null : { pane, side: "left" }; // narrow panes have no label of the left track
  }
  return null;
}

/**
 * The integer rows and columns in view, for questions about "what is seen now".
 *
 * @param {Scene} scene
 * @returns {Region}
 */
export function getRegion(scene) {
  const { r0, r1, c0, c1 } = scene.panes[0].region;
  return { r0, r1: Math.max(r0, r1), c0, c1: Math.max(c0, c1) };
}

/**
 * Whether this level needs a pass over the whole matrix.
 *
 * @param {Info} info
 * @param {number} level
 */
export function needsPass(info, level) {
  return level > (info.on_demand_level ?? 4);
}

/**
 * The same without the cells that the window cuts at the right and below, where cells are large; and the pinned cell.
 *
 * @param {Scene} scene
 * @param {Cell | null} pin
 * @returns {{ whole: Box, ring: Box | null }}
 */
export function computeWhole(scene, pin) {
  const whole = computeBox(scene);
  const { panes: [pane], scale } = scene;
  if (scene.panes.length === 1 && scale >= LARGE_CELL) {
    const [column, row] = [Math.floor(pane.column(pane.right) + 1e-3), Math.floor(pane.row(pane.bottom) + 1e-3)];
    if (column < pane.region.c1) whole.w = pane.X(column) - whole.x;
    if (row < pane.region.r1) whole.h = pane.Y(row) - whole.y;
  }
  if (!pin) return { whole, ring: null };
  const side = Math.max(scale, LEAST_RING);
  const [x, y] = [pane.X(pin.j + 0.5) - side / 2, pane.Y(pin.i + 0.5) - side / 2];
  const isInside = x >= pane.left && y >= pane.top && x + side <= whole.x + whole.w + 1 && y + side <= whole.y + whole.h + 1;
  return { whole, ring: isInside ? { x, y, w: side, h: side } : null };
}

/**
 * The part of a scene that its panes fill with their axes and tracks, in CSS pixels: {x, y, w, h}.
 *
 * @param {Pick<Scene, "panes" | "width" | "height">} scene
 * @returns {Box}
 */
export function computeBox({ panes, width, height }) {
  const getStart = (/** @type {ScenePane} */ pane, /** @type {"left" | "top"} */ side) => Math.max(0, pane[side] - pane.gutter[side] - pane.gutter.band - pane.gutter.track);
  const getLeast = (/** @type {"left" | "top"} */ side) => Math.min(...panes.map((pane) => getStart(pane, side)));
  const [x, y] = [getLeast("left"), getLeast("top")];
  const getEnd = (/** @type {"right" | "bottom"} */ side, /** @type {number} */ most) => Math.min(most, Math.max(...panes.map((pane) => pane[side])) + TICK_ROOM);
  return { x, y, w: getEnd("right", width) - x, h: getEnd("bottom", height) - y };
}
