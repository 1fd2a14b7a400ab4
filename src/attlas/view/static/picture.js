// The map as a picture to keep: with axes, a colour bar, and what is shown in words.

import { colours, divergingColours, rangeOf } from "./colour.js";
import { barOf, contrastBar, contrastMarks, marksOf } from "./colourbar.js";
import { headName, whole } from "./numbers.js";
import { isContrast } from "./state.js";
import { blockText } from "./status.js";
import { variantText } from "./weighting.js";
import { t } from "./words.js";

// What a picture says under its title; every choice that changes the numbers is named.
export function captionOf(state, level) {
  const { info, compare, second } = state;
  const parts = [info.title];
  if (info.model && !info.title.includes(info.model)) parts.push(info.model);
  parts.push(blockText(level, state));
  if (variantText(state)) parts.push(variantText(state));
  if (second !== null && compare !== "none") {
    const other = headName(info, second.entry, second.head);
    const words = { side: t("beside it"), triangle: t("upper triangle"), ratio: t("log-ratio of the first over"), difference: t("first less") }[compare];
    parts.push(isContrast(compare) ? `${words} ${other}` : t("{0}: {1}", words, other));
  }
  return parts.join(" · ");
}

/** `shown`: what `map.picture` gives; `view`: the region of cells that it shows. */
export function drawPicture({ canvas: source, width, height, level }, view, state, style) {
  const ratio = source.width / Math.max(1, width);
  const top = 58;
  const bottom = 62;
  const canvas = document.createElement("canvas");
  canvas.width = Math.round((width + 32) * ratio);
  canvas.height = Math.round((height + top + bottom) * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = style.card;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = style.ink;
  pen.textBaseline = "alphabetic";
  pen.font = `600 16px ${style.sans}`;
  pen.fillText(headName(state.info, state.entry, state.head), 16, 26, width);
  pen.font = `12px ${style.sans}`;
  pen.fillStyle = style.soft;
  pen.fillText(captionOf(state, level), 16, 45, width);
  pen.drawImage(source, 16, top, width, height);
  drawScale(pen, state, style, 16, top + height + 14, Math.min(360, width));
  const { first_query: firstQuery, first_key: firstKey } = state.info.entries[state.entry];
  const range = (first, a, b) => t("{0} to {1}", whole(first + Math.floor(a)), whole(first + Math.max(Math.floor(a), Math.ceil(b) - 1)));
  const words = [t("queries {0}", range(firstQuery, view.r0, view.r1)), t("keys {0}", range(firstKey, view.c0, view.c1))];
  pen.fillStyle = style.soft;
  pen.textAlign = "right";
  if (width > 560) words.forEach((text, line) => pen.fillText(text, 16 + width, top + height + 24 + 16 * line));
  return canvas;
}

function drawScale(pen, state, style, left, top, width) {
  const isRatio = isContrast(state.compare);
  const bar = isRatio ? contrastBar(state, state[state.compare]) : barOf(state);
  const { low, high } = rangeOf(state);
  const bytes = isRatio ? divergingColours(state) : colours(state);
  for (let x = 0; x < width; x++) {
    const value = bar.min + ((x + 0.5) / width) * (bar.max - bar.min);
    const place = isRatio ? (x + 0.5) / width : Math.min(1, Math.max(0, (value - low) / (high - low)));
    const at = 3 * Math.round(255 * place);
    pen.fillStyle = `rgb(${bytes[at]} ${bytes[at + 1]} ${bytes[at + 2]})`;
    pen.fillRect(left + x, top, 1.5, 12);
  }
  pen.strokeStyle = style.line;
  pen.strokeRect(left + 0.5, top + 0.5, width, 12);
  pen.fillStyle = style.soft;
  pen.font = `11px ${style.sans}`;
  const marks = isRatio ? contrastMarks(state, bar) : marksOf(state, bar, width);
  for (const { at, text } of marks) {
    const x = left + ((at - bar.min) / (bar.max - bar.min)) * width;
    pen.textAlign = x < left + 8 ? "left" : x > left + width - 8 ? "right" : "center";
    pen.fillText(text, x, top + 26);
  }
  pen.textAlign = "left";
  pen.fillText(state.compare === "difference" ? t("weight of the first head less that of the second") : isRatio ? t("weight of the first head over that of the second") : t("attention weight"), left, top + 40);
}
