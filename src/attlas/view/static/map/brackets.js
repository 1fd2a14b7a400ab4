// Brackets along the axes about functions, sentences, documents, and thin lines at their borders across the map.

import { chooseStretches } from "../data/outlines.js";
import { truncate } from "./canvas.js";
import { t } from "../words/words.js";

const LEAST_CHILDREN = 30; // CSS pixels of the stretches within another one, from which on they are shown instead of it
const LEAST_BRACKET = 5; // CSS pixels from which a bracket is drawn,
const LEAST_NAME = 24; // its name is written,
const LEAST_BORDER = 14; // and its borders cross the map
const LEAST_GAP = 5; // CSS pixels between two borders
const LEAST_CELL = 4; // device pixels of a cell from which on borders are lines, and not dots
const DOT_GAP = 7; // between two dots, in their own size

/**
 * The stretches to draw beside a pane. What is shown depends on the zoom alone, so that nothing changes while the map moves.
 *
 * @param {Outlines | null} outlines
 * @param {Pick<ScenePane, "source" | "entry">} pane
 * @param {number} scale
 * @returns {ShownStretches}
 */
export function getShownStretches(outlines, { source }, scale) {
  if (!outlines) return { query: [], key: [] };
  const { query, key } = outlines.of(source);
  const keys = chooseStretches(key, scale, LEAST_CHILDREN);
  return { query: query === key ? keys : chooseStretches(query, scale, LEAST_CHILDREN), key: keys };
}

/**
 * The name of a stretch: what it is called, else what it is and its number.
 *
 * @param {Stretch} stretch
 */
export const getStretchName = ({ name, number }) => name || t("document {0}", number);

/** The kind of a stretch in words. */
export const describeKind = (/** @type {StretchKind} */ kind) =>
  ({ named: t("part"), document: t("document"), class: t("class"), function: t("function"), section: t("section"), paragraph: t("paragraph"), sentence: t("sentence") })[kind];

/**
 * Draw the brackets of an axis, in CSS pixels.
 *
 * @param {Context} ctx
 * @param {PlacedAxis} axis
 * @param {Stretch[]} stretches
 */
export function drawBrackets(ctx, { toPixel, low, high, band, first, across, origin, look }, stretches) {
  ctx.save();
  if (!across) ctx.transform(0, 1, 1, 0, 0, 0); // the axis of the rows is that of the columns, mirrored
  ctx.font = `10px ${look.sans}`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "center";
  const [outer, inner] = [origin - band + 0.5, origin - 1];
  for (const stretch of stretches) {
    const [start, stop] = [toPixel(stretch.start - first), toPixel(stretch.stop - first)];
    const [a, b] = [Math.max(low, Math.round(start) + 1), Math.min(high, Math.round(stop) - 1)];
    if (stop - start < LEAST_BRACKET || b - a < 1) continue;
    ctx.fillStyle = stretch.number % 2 ? look.spanA : look.spanB;
    ctx.fillRect(a, outer, b - a, inner - outer);
    ctx.strokeStyle = look.frame;
    ctx.lineWidth = 1;
    ctx.beginPath();
    if (start >= low - 1) ctx.moveTo(a + 0.5, inner);
    ctx.lineTo(a + 0.5, outer);
    ctx.lineTo(b - 0.5, outer);
    if (stop <= high + 1) ctx.lineTo(b - 0.5, inner);
    ctx.stroke();
    if (b - a < LEAST_NAME) continue;
    ctx.fillStyle = look.soft;
    const text = truncate(ctx, getStretchName(stretch), Math.floor(b - a - 8));
    ctx.save();
    ctx.translate((a + b) / 2, (outer + inner) / 2 - 0.5); // room for what hangs below the line
    if (!across) ctx.transform(-1, 0, 0, 1, 0, 0); // read from below, not mirrored
    ctx.fillText(text, 0, 0);
    ctx.restore();
  }
  ctx.restore();
}

/**
 * Draw the borders of stretches as lines across a pane, in device pixels; of a causal matrix up to its diagonal.
 *
 * @param {Context} ctx
 * @param {ScenePane} pane
 * @param {ShownStretches} shown
 * @param {{ scale: number, dpr: number, look: Look, whole: boolean }} options
 */
export function drawBorders(ctx, { px, py, region, entry, firstKey, firstQuery }, shown, { scale, dpr, look, whole }) {
  const shift = firstQuery - firstKey;
  const isCut = entry.causal && !whole;
  const line = Math.max(1, Math.round(dpr));
  const listBorders = (/** @type {Stretch[]} */ stretches, /** @type {number} */ first, /** @type {number} */ low, /** @type {number} */ high) => {
    const wide = stretches.filter(({ start, stop }) => (stop - start) * scale >= LEAST_BORDER);
    const borders = wide.flatMap(({ start, stop }) => [start - first, stop - first]).sort((a, b) => a - b);
    return borders.filter((border, at) => border > low && border < high && !(at && (border - borders[at - 1]) * scale < LEAST_GAP));
  };
  ctx.save();
  ctx.setTransform(1, 0, 0, 1, 0, 0);
  ctx.strokeStyle = look.frame;
  ctx.globalAlpha = 0.6;
  ctx.lineWidth = line;
  // A line takes the edge of large cells; small ones would lose a row, often that of a first token, so it is dotted there.
  if (scale * dpr < LEAST_CELL) ctx.setLineDash([line, DOT_GAP * line]);
  const drawLine = (/** @type {boolean} */ down, /** @type {number} */ at, /** @type {number} */ from, /** @type {number} */ to, /** @type {number} */ origin) => {
    ctx.lineDashOffset = from - origin; // dots move with the matrix
    ctx.beginPath();
    ctx.moveTo(...(down ? /** @type {const} */ ([at, from]) : /** @type {const} */ ([from, at])));
    ctx.lineTo(...(down ? /** @type {const} */ ([at, to]) : /** @type {const} */ ([to, at])));
    ctx.stroke();
  };
  for (const column of listBorders(shown.key, firstKey, region.c0, region.c1)) {
    const from = isCut ? Math.max(region.r0, column - shift) : region.r0;
    if (from < region.r1) drawLine(true, px(column) + line / 2, py(from), py(region.r1), py(0));
  }
  for (const row of listBorders(shown.query, firstQuery, region.r0, region.r1)) {
    const to = isCut ? Math.min(region.c1, row + shift) : region.c1;
    if (to > region.c0) drawLine(false, py(row) + line / 2, px(region.c0), px(to), px(0));
  }
  ctx.restore();
}

/**
 * The bracket at a place of the stage; null elsewhere.
 *
 * @param {Scene} scene
 * @param {Outlines | null} outlines
 * @param {number} x
 * @param {number} y
 * @returns {BracketHit | null}
 */
export function findBracket(scene, outlines, x, y) {
  for (const pane of scene.panes) {
    const { gutter, left, top, right, bottom } = pane;
    const isAbove = x >= left && x < right && y < top && y >= top - gutter.band;
    const isBeside = y >= top && y < bottom && x < left && x >= left - gutter.band;
    if (!isAbove && !isBeside) continue;
    const side = isAbove ? "key" : "query";
    const position = isAbove ? pane.column(x) + pane.firstKey : pane.row(y) + pane.firstQuery;
    const stretch = getShownStretches(outlines, pane, scene.scale)[side].find(({ start, stop }) => position >= start && position < stop && (stop - start) * scene.scale >= LEAST_BRACKET);
    return stretch ? { pane, side, stretch } : null;
  }
  return null;
}
