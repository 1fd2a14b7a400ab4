// Axes: tokens when they can be read, positions when not, and brackets about the named stretches of the text.

import { drawBrackets } from "./brackets.js";
import { truncate } from "./canvas.js";
import { getGutterOpening, showsTokens } from "./geometry.js";
import { computeTicks, formatInteger } from "../data/numbers.js";
import { showWhitespace } from "../data/tokens.js";
import { t } from "../words/words.js";

/**
 * The label of the token at a position. A token that is a part of a character shows the character and its number.
 *
 * @param {Tokens} tokens
 * @param {number} position
 */
export function formatTokenLabel(tokens, position) {
  const text = tokens.peek(position);
  if (text === null) return null;
  const joined = tokens.joined(position);
  if (!joined || joined.stop - joined.start < 2) return showWhitespace(text);
  return `${showWhitespace(joined.text)} ${position - joined.start + 1}/${joined.stop - joined.start}`;
}

/**
 * Draw both axes of a pane, in CSS pixels. `tokens`: {query, key}; `stretches`: what is bracketed.
 *
 * @param {Context} ctx
 * @param {ScenePane} pane
 * @param {Entry} entry
 * @param {{ scale: number, tokens: SideTokens, stretches: ShownStretches, look: Look }} options
 */
export function drawAxes(ctx, pane, entry, { scale, tokens, stretches, look }) {
  /** @type {Axis[]} */
  const axes = [
    { across: true, side: "key", first: entry.first_key, from: pane.region.c0, to: pane.region.c1, origin: pane.top, length: pane.gutter.top },
    { across: false, side: "query", first: entry.first_query, from: pane.region.r0, to: pane.region.r1, origin: pane.left, length: pane.gutter.left },
  ];
  for (const axis of axes) {
    if (axis.to <= axis.from) continue;
    const toPixel = axis.across ? pane.X : pane.Y;
    const [low, high] = axis.across ? [pane.left, pane.right] : [pane.top, pane.bottom];
    const placedAxis = { ...axis, toPixel, low, high, scale, band: pane.gutter.band, look };
    if (pane.gutter.band) drawBrackets(ctx, placedAxis, stretches[axis.side]);
    if (showsTokens(scale)) drawTokens(ctx, placedAxis, tokens[axis.side]);
    else drawTicks(ctx, placedAxis);
  }
  drawNames(ctx, pane, look);
}

/**
 * Draw at a position along an axis, `distance` pixels away from the map: above it or to its left.
 *
 * @param {Context} ctx
 * @param {PlacedAxis} axis
 * @param {number} position
 * @param {number} distance
 * @param {() => void} draw
 */
function drawAlong(ctx, { across, origin }, position, distance, draw) {
  ctx.save();
  if (across) ctx.translate(position, origin - distance);
  else ctx.translate(origin - distance, position);
  draw();
  ctx.restore();
}

/**
 * @param {Context} ctx
 * @param {PlacedAxis} axis
 */
function drawTicks(ctx, axis) {
  const { toPixel, low, high, band, first, across, from, to, scale, look } = axis;
  const maxTicks = (high - low) / (across ? 86 : 44);
  ctx.font = `11px ${look.sans}`;
  ctx.fillStyle = look.soft;
  ctx.strokeStyle = look.faint;
  ctx.lineWidth = 1;
  ctx.textBaseline = "middle";
  for (const position of computeTicks(from + first, to - 1 + first, maxTicks)) {
    if (!Number.isInteger(position)) continue;
    const place = toPixel(position - first) + scale / 2;
    if (place < low || place > high) continue;
    const line = Math.round(place) + 0.5;
    drawAlong(ctx, axis, line, band, () => {
      ctx.beginPath();
      ctx.moveTo(0, 0);
      ctx.lineTo(across ? 0 : -4, across ? -4 : 0);
      ctx.stroke();
      ctx.textAlign = across ? "center" : "right";
      const label = formatInteger(position);
      // The last label is shifted into the pane.
      const overflow = across ? Math.max(0, line + ctx.measureText(label).width / 2 - high - 6) : 0;
      ctx.fillText(label, across ? -overflow : -7, across ? -11 : 0.5);
    });
  }
}

/**
 * @param {Context} ctx
 * @param {PlacedAxis} axis
 * @param {Tokens} tokens
 */
function drawTokens(ctx, axis, tokens) {
  const { toPixel, low, high, band, first, across, from, to, scale, length, look } = axis;
  tokens.prefetch(from + first, to + first);
  const size = Math.min(13, Math.max(10, scale * 0.8));
  const numbers = length > 80;
  ctx.save();
  ctx.globalAlpha = getGutterOpening(scale);
  ctx.textBaseline = "middle";
  for (let index = from; index < to; index++) {
    const place = toPixel(index) + scale / 2;
    if (place < low + 6 || place > high - 4) continue; // there is no space for a whole label
    const label = formatTokenLabel(tokens, index + first);
    drawAlong(ctx, axis, place, band, () => {
      if (across) ctx.rotate(-Math.PI / 2);
      const distance = across ? 1 : -1;
      ctx.textAlign = across ? "left" : "right";
      if (label !== null) {
        ctx.font = `${size}px ${look.mono}`;
        ctx.fillStyle = look.ink;
        ctx.fillText(truncate(ctx, label, length - (numbers ? 42 : 10)), 6 * distance, 0.5);
      }
      if (numbers && (scale >= 26 || (index + first) % 5 === 0)) {
        ctx.textAlign = across ? "right" : "left";
        ctx.font = `10px ${look.sans}`;
        ctx.fillStyle = look.faint;
        ctx.fillText(formatInteger(index + first), (length - 4) * distance, 0.5);
      }
    });
  }
  ctx.restore();
}

/**
 * The corner says which axis is which.
 *
 * @param {Context} ctx
 * @param {ScenePane} pane
 * @param {Look} look
 */
function drawNames(ctx, pane, look) {
  ctx.font = `11px ${look.sans}`;
  ctx.fillStyle = look.faint;
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillText(pane.gutter.track < 30 ? t("query ↓") : t("query ↓  key →"), pane.left - pane.gutter.band - 7, pane.top - 8);
}
