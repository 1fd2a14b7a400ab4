// The map as a picture to save: with axes, a colour bar, a title and a caption.

import { getContext } from "../map/canvas.js";
import { getBarOffset, getDivergingColours, getWeightColours } from "../map/colour.js";
import { getBarRange, getContrastBarRange, getContrastTicks, getBarTicks } from "./colourbar.js";
import { formatFileName } from "./elements.js";
import { getHeadMark, getHeadName, formatInteger } from "../data/numbers.js";
import { listColoured } from "../data/coloured.js";
import { makeHueBar } from "../map/hues.js";
import { isContrast } from "../data/state.js";
import { describeBlock } from "./status.js";
import { describeVariant, isSigned } from "../data/weighting.js";
import { t } from "../words/words.js";

/**
 * The name of a file about the shown head.
 *
 * @param {Pick<State, "info" | "entry" | "head">} state
 * @param {string} ending
 */
export function nameFile({ info, entry, head }, ending) {
  const title = formatFileName(info.title, 60) || "attlas";
  return `${title}-${getHeadMark(info, entry, head).replace("·", "-")}.${ending}`;
}

/**
 * The colours and the font of what is saved of a page, from its style sheet.
 *
 * @param {HTMLElement} root
 */
export function readPictureStyle(root) {
  const styles = getComputedStyle(root);
  const names = ["card", "ink", "soft", "line", "land", "accent", "sans"];
  return /** @type {PictureStyle} */ (Object.fromEntries(names.map((name) => [name, styles.getPropertyValue(`--${name}`).trim()])));
}

/**
 * The caption of a picture; it names every choice that changes the numbers.
 *
 * @param {State} state
 * @param {Grain} grain
 */
export function formatCaption(state, grain) {
  const { info, compare, second } = state;
  const sequences = info.entries[state.entry].batch ?? 1;
  const parts = [info.title];
  if (info.model && !info.title.includes(info.model)) parts.push(info.model);
  if (sequences > 1) parts.push(t("sequence {0} of {1}", state.batch, sequences));
  parts.push(describeBlock(grain, state));
  if (describeVariant(state)) parts.push(describeVariant(state));
  if (second !== null && compare !== "none") {
    const other = getHeadName(info, second.entry, second.head);
    const words = { side: t("beside it"), triangle: t("upper triangle"), ratio: t("log-ratio of the first over"), difference: t("first less"), colours: "" }[compare];
    if (compare === "colours") parts.push(t("a colour each: {0}", listColoured(state).map((each) => getHeadMark(info, each.entry, each.head)).join(", ")));
    else parts.push(isContrast(compare) ? `${words} ${other}` : t("{0}: {1}", words, other));
  }
  return parts.join(" · ");
}

/**
 * Draw the picture that `map.picture` returns with title and colour bar; `view`: the region of cells that it shows.
 *
 * @param {MapPicture} picture
 * @param {Region} view
 * @param {State} state
 * @param {PictureStyle} style
 */
export function drawPicture({ canvas: source, width, height, grain }, view, state, style) {
  const ratio = source.width / Math.max(1, width);
  const top = 58;
  const bottom = 62;
  const canvas = document.createElement("canvas");
  canvas.width = Math.round((width + 32) * ratio);
  canvas.height = Math.round((height + top + bottom) * ratio);
  const ctx = getContext(canvas);
  ctx.scale(ratio, ratio);
  ctx.fillStyle = style.card;
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = style.ink;
  ctx.textBaseline = "alphabetic";
  ctx.font = `600 16px ${style.sans}`;
  ctx.fillText(getHeadName(state.info, state.entry, state.head), 16, 26, width);
  ctx.font = `12px ${style.sans}`;
  ctx.fillStyle = style.soft;
  ctx.fillText(formatCaption(state, grain), 16, 45, width);
  ctx.drawImage(source, 16, top, width, height);
  drawScale(ctx, state, style, 16, top + height + 14, Math.min(360, width));
  const { first_query: firstQuery, first_key: firstKey } = state.info.entries[state.entry];
  const formatRange = (/** @type {number} */ first, /** @type {number} */ a, /** @type {number} */ b) => t("{0} to {1}", formatInteger(first + Math.floor(a)), formatInteger(first + Math.max(Math.floor(a), Math.ceil(b) - 1)));
  const lines = [t("queries {0}", formatRange(firstQuery, view.r0, view.r1)), t("keys {0}", formatRange(firstKey, view.c0, view.c1))];
  ctx.fillStyle = style.soft;
  ctx.textAlign = "right";
  if (width > 560) lines.forEach((text, line) => ctx.fillText(text, 16 + width, top + height + 24 + 16 * line));
  return canvas;
}

/**
 * @param {Context} ctx
 * @param {State} state
 * @param {PictureStyle} style
 * @param {number} left
 * @param {number} top
 * @param {number} width
 */
function drawScale(ctx, state, style, left, top, width) {
  const { compare } = state;
  const isRatio = isContrast(compare);
  const bar = isContrast(compare) ? getContrastBarRange(state, state[compare]) : getBarRange(state);
  const bytes = isRatio ? getDivergingColours(state) : getWeightColours(state);
  const hues = compare === "colours" ? listColoured(state) : [];
  hues.forEach((_, index) => drawHue(ctx, state, bar, { index, left, width, top: top + (12 * index) / hues.length, height: 12 / hues.length }));
  for (let x = 0; x < (hues.length ? 0 : width); x++) {
    const value = bar.min + ((x + 0.5) / width) * (bar.max - bar.min);
    const offset = isRatio ? 3 * Math.round((255 * (x + 0.5)) / width) : getBarOffset(value, state);
    ctx.fillStyle = `rgb(${bytes[offset]} ${bytes[offset + 1]} ${bytes[offset + 2]})`;
    ctx.fillRect(left + x, top, 1.5, 12);
  }
  ctx.strokeStyle = style.line;
  ctx.strokeRect(left + 0.5, top + 0.5, width, 12);
  ctx.fillStyle = style.soft;
  ctx.font = `11px ${style.sans}`;
  const marks = isRatio ? getContrastTicks(state, bar) : getBarTicks(state, bar, width);
  for (const { at: offset, text } of marks) {
    const x = left + ((offset - bar.min) / (bar.max - bar.min)) * width;
    ctx.textAlign = x < left + 8 ? "left" : x > left + width - 8 ? "right" : "center";
    ctx.fillText(text, x, top + 26);
  }
  ctx.textAlign = "left";
  ctx.fillText(state.compare === "difference" ? t("weight of the first head less that of the second") : isRatio ? t("weight of the first head over that of the second") : isSigned(state) ? t("weight, which may be negative") : t("attention weight"), left, top + 40);
}

/**
 * Draw the part of the colour bar of a head that has a colour of its own.
 *
 * @param {Context} ctx
 * @param {State} state
 * @param {BarRange} bar
 * @param {{ index: number, left: number, top: number, width: number, height: number }} place
 */
function drawHue(ctx, state, bar, { index, left, top, width, height }) {
  const bytes = makeHueBar(index, state, bar, Math.ceil(width));
  for (let x = 0; x < width; x++) {
    ctx.fillStyle = `rgb(${bytes[4 * x]} ${bytes[4 * x + 1]} ${bytes[4 * x + 2]})`;
    ctx.fillRect(left + x, top, 1.5, height);
  }
}
