// The map as a picture to save: with axes, a colour bar, a title and a caption.

import { getContext } from "../map/canvas.js";
import { formatFileName } from "./elements.js";
import { getHeadMark, getHeadName, formatInteger } from "../data/numbers.js";
import { listColoured } from "../data/coloured.js";
import { isContrast } from "../data/state.js";
import { describeBar, listBarColours, listBarMarks } from "./scale.js";
import { describeBlock } from "./status.js";
import { describeVariant } from "../data/weighting.js";
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
  const bars = listBarColours(state, Math.ceil(width));
  const height = 12 / bars.length;
  bars.forEach((colours, bar) => {
    colours.forEach((colour, x) => {
      ctx.fillStyle = colour;
      ctx.fillRect(left + x, top + bar * height, 1.5, height);
    });
  });
  ctx.strokeStyle = style.line;
  ctx.strokeRect(left + 0.5, top + 0.5, width, 12);
  ctx.fillStyle = style.soft;
  ctx.font = `11px ${style.sans}`;
  for (const { share, text } of listBarMarks(state, width)) {
    const x = left + share * width;
    ctx.textAlign = x < left + 8 ? "left" : x > left + width - 8 ? "right" : "center";
    ctx.fillText(text, x, top + 26);
  }
  ctx.textAlign = "left";
  ctx.fillText(describeBar(state), left, top + 40);
}
