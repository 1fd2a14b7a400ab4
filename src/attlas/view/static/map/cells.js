// Single cells: grid lines, the numbers in the cells, and the details of one cell.

import { getColour, getContrastColour, computeContrast, chooseTextColour } from "./colour.js";
import { getMixedColour } from "./hues.js";

const GRID_FROM = 9; // pixels a cell
const NUMBERS_FROM = 36;
const FAINT = 1e-3; // smaller weights are written paler
const BLOCK = 32; // cells of a side that are fetched together
const KEPT_BLOCKS = 160;
const KEPT_CELLS = 400;

/**
 * A number that fits into a cell of `pixels`, with at most three digits, which codes have too.
 *
 * @param {number} weight
 * @param {number} pixels
 * @returns {string}
 */
export function formatShortWeight(weight, pixels) {
  if (weight === 0) return "0";
  if (weight < 0) return `−${formatShortWeight(-weight, pixels)}`;
  if (weight >= 1e4) return weight.toExponential(0).replace("+", "");
  if (weight >= 1.0005) return weight >= 100 ? weight.toFixed(0) : weight.toPrecision(3);
  const decimals = pixels >= 54 && weight < 0.1 ? 4 : 3;
  const fixed = weight.toFixed(decimals);
  if (fixed.startsWith("1")) return "1.0";
  if (weight >= 0.95 * 10 ** -decimals) return fixed.slice(1);
  return weight.toExponential(pixels >= 54 ? 1 : 0).replace("-", "−");
}

/**
 * A difference in log2, with its sign.
 *
 * @param {number} log2
 */
export function formatShortRatio(log2) {
  if (!Number.isFinite(log2)) return log2 > 0 ? "∞" : log2 < 0 ? "−∞" : "";
  return `${log2 > 0 ? "+" : log2 < 0 ? "−" : ""}${Math.abs(log2).toFixed(1)}`;
}

/**
 * A cache of exact weights: fetched in blocks for the numbers in cells, one by one for the hovered cell.
 *
 * @param {Pick<Requests, "get">} transport
 * @param {{ changed: () => void }} options
 */
export function createCells(transport, { changed }) {
  /** @type {Map<string, { values: Float32Array, width: number } | null>} */
  const blocks = new Map();
  const cells = new Map();
  let destroyed = false;

  const evictOldest = (/** @type {Map<string, unknown>} */ map, /** @type {number} */ max) => {
    for (const key of map.keys()) {
      if (map.size <= max) return;
      map.delete(key);
    }
  };

  /**
   * @param {string} key
   * @param {Source} source
   * @param {Entry} entry
   * @param {number} y
   * @param {number} x
   */
  async function fetchBlock(key, source, entry, y, x) {
    const { head, batch, variant } = source;
    const [r0, c0] = [y * BLOCK, x * BLOCK];
    const [r1, c1] = [Math.min(entry.m, r0 + BLOCK), Math.min(entry.n, c0 + BLOCK)];
    try {
      const { buffer } = await transport.get("region", { entry: source.entry, head, batch, variant, r0, r1, c0, c1 });
      blocks.set(key, { values: new Float32Array(buffer), width: c1 - c0 });
      evictOldest(blocks, KEPT_BLOCKS);
      if (!destroyed) changed();
    } catch {
      blocks.delete(key); // requested again at the next drawing
    }
  }

  const getCellKey = (/** @type {Source} */ { entry, head, batch, variant }, /** @type {number} */ i, /** @type {number} */ j) => `${entry}/${head}/${batch}/${variant}/${i}/${j}`;

  return {
    /**
     * The exact weight of a cell if its block is loaded; else null, and the block is requested.
     *
     * @param {Source} source
     * @param {Entry} entry
     * @param {number} i
     * @param {number} j
     */
    weight(source, entry, i, j) {
      const [y, x] = [Math.floor(i / BLOCK), Math.floor(j / BLOCK)];
      const key = `${source.entry}/${source.head}/${source.batch}/${source.variant}/${y}/${x}`;
      const block = blocks.get(key);
      if (block === undefined) {
        blocks.set(key, null);
        fetchBlock(key, source, entry, y, x);
      }
      return block ? block.values[(i - y * BLOCK) * block.width + (j - x * BLOCK)] : null;
    },
    /** The details of a cell if they are cached, else null. */
    known: (/** @type {Source} */ source, /** @type {number} */ i, /** @type {number} */ j) => cells.get(getCellKey(source, i, j)) ?? null,
    /**
     * Fetch the details of one cell: {weight, logit, lse, allowed, rank, row_entropy, column_mass}.
     *
     * @param {Source} source
     * @param {number} i
     * @param {number} j
     * @param {AbortSignal} [signal]
     */
    async exact(source, i, j, signal) {
      const key = getCellKey(source, i, j);
      if (!cells.has(key)) {
        const { entry, head, batch, variant } = source;
        const { json } = await transport.get("cell", { entry, head, batch, variant, i, j }, { signal });
        cells.set(key, json);
        evictOldest(cells, KEPT_CELLS);
      }
      return cells.get(key);
    },
    /**
     * Fetch the largest cell of a block: [i, j, weight, whether the weight is rounded], or null.
     *
     * @param {Source} source
     * @param {Region} region
     * @param {AbortSignal} [signal]
     */
    async largest(source, { r0, r1, c0, c1 }, signal) {
      const key = `top/${source.entry}/${source.head}/${source.batch}/${source.variant}/${r0}/${r1}/${c0}/${c1}`;
      if (!cells.has(key)) {
        const { entry, head, batch, variant } = source;
        const { json } = await transport.get("top", { entry, head, batch, variant, k: 1, r0, r1, c0, c1 }, { signal });
        cells.set(key, json.cells.length ? [...json.cells[0], json.rounded ?? false] : null);
        evictOldest(cells, KEPT_CELLS);
      }
      return cells.get(key);
    },
    destroy() {
      destroyed = true;
    },
  };
}

/**
 * Lines between blocks of `side` cells, in device pixels, where the blocks are large enough.
 *
 * @param {Context} ctx
 * @param {Pick<PlacedPane, "region" | "px" | "py">} pane
 * @param {{ scale: number, dpr: number, look: Look, side: number }} options
 */
export function drawGrid(ctx, pane, { scale, dpr, look, side }) {
  const pixels = scale * side;
  if (pixels < GRID_FROM) return;
  const { region, px, py } = pane;
  const lineWidth = Math.max(1, Math.round(dpr * (pixels > 30 ? 1 : 0.6)));
  ctx.fillStyle = look.paper;
  ctx.globalAlpha = Math.min(0.8, (pixels - GRID_FROM) / 24 + 0.12);
  const [left, right, top, bottom] = [px(region.c0), px(region.c1), py(region.r0), py(region.r1)];
  const getNext = (/** @type {number} */ place) => (Math.floor(place / side) + 1) * side;
  for (let j = getNext(region.c0); j < region.c1; j += side) ctx.fillRect(px(j), top, lineWidth, bottom - top);
  for (let i = getNext(region.r0); i < region.r1; i += side) ctx.fillRect(left, py(i), right - left, lineWidth);
  ctx.globalAlpha = 1;
}

/**
 * Exact numbers in the cells where they fit, in CSS pixels. `targetAt(i, j)` returns the head and cell whose number is shown.
 *
 * @param {Context} ctx
 * @param {PlacedPane} pane
 * @param {Cells} cells
 * @param {{ scale: number, look: Look, state: State, targetAt: (i: number, j: number) => Target | null, layers: Layer[] }} options
 */
export function drawNumbers(ctx, pane, cells, { scale, look, state, targetAt, layers }) {
  if (scale < NUMBERS_FROM) return;
  const { region, X, Y } = pane;
  ctx.font = `${Math.min(13, Math.round(scale * 0.24 + 1))}px ${look.sans}`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  ctx.save();
  const { other: otherSource, mixed } = layers[0];
  for (let i = region.r0; i < region.r1; i++) {
    for (let j = region.c0; j < region.c1; j++) {
      const target = targetAt(i, j);
      if (!target || !target.allowed || target.side > 1) continue;
      const weight = cells.weight(target.source, target.entry, target.i, target.j);
      if (weight === null) continue;
      let [text, colour] = ["", ""];
      if (mixed.length) {
        // The largest weight that a head gives, in a cell that has the colours of all.
        const weights = mixed.map((source) => cells.weight(source, target.entry, target.i, target.j)).filter((each) => each !== null);
        if (weights.length < mixed.length) continue;
        [text, colour] = [formatShortWeight(Math.max(...weights), scale), getMixedColour(weights, state, mixed.map(({ entry }) => entry))];
      } else if (otherSource) {
        const other = cells.weight(otherSource, target.entry, target.i, target.j);
        if (other === null) continue;
        const value = computeContrast(weight, other, state);
        const short = state.compare === "difference" ? formatShortWeight(value, scale) : formatShortRatio(value);
        [text, colour] = [short, getContrastColour(value, state)];
      } else [text, colour] = [formatShortWeight(weight, scale), getColour(weight, { ...state, entry: target.source.entry })];
      if (colour === "transparent") continue;
      ctx.fillStyle = chooseTextColour(colour);
      ctx.globalAlpha = !otherSource && Math.abs(weight) < FAINT ? 0.62 : 1; // small weights are paler
      ctx.fillText(text, X(j + 0.5), Y(i + 0.5) + 0.5);
    }
  }
  ctx.restore();
}
