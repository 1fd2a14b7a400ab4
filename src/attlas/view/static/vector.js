// The visible cells of one head as SVG: for print, where a picture of pixels blurs.

import { colourOf, colours, rangeOf } from "./colour.js";
import { barOf, marksOf } from "./colourbar.js";
import { headName, ticks, whole } from "./numbers.js";
import { captionOf } from "./picture.js";
import { visible } from "./tokens.js";
import { isWeighted, variantText } from "./weighting.js";

export const vectorLimit = 65_536; // cells
const named = 80; // rows or columns up to which each carries its token
const [left, top, side, longest] = [110, 130, 640, 14]; // places in the picture, and characters of a token

const marks = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
// Characters that XML cannot hold become one that it can.
const escaped = (text) => text.replace(/[\u0000-\u001f\ud800-\udfff\ufffe\uffff]/gu, "\ufffd").replace(/[&<>"]/g, (mark) => marks[mark]);
const rounded = (number) => Number(number.toFixed(2));

/** The text of the file. `cells`: the region; `weights`: its weights, row by row; `textOf(position)`: a token. */
export function vectorOf({ weights, cells, state, style, textOf }) {
  const entry = state.info.entries[state.entry];
  const [rows, columns] = [cells.r1 - cells.r0, cells.c1 - cells.c0];
  const unit = side / Math.max(rows, columns);
  const [width, height] = [columns * unit, rows * unit];
  const words = (x, y, text, more = "") => `<text x="${rounded(x)}" y="${rounded(y)}" ${more}>${escaped(text)}</text>`;
  const parts = [words(left, 28, headName(state.info, state.entry, state.head), `font-size="16" font-weight="600" fill="${style.ink}"`), words(left, 48, captionOf({ ...state, compare: "none" }, 0))];
  parts.push(`<rect x="${left}" y="${top}" width="${rounded(width)}" height="${rounded(height)}" fill="${style.land}"/>`);
  const drawn = [...runsOf(weights, cells, entry, state)].map(([colour, path]) => `<path fill="${colour}" d="${path}"/>`);
  parts.push(`<g transform="translate(${left} ${top}) scale(${rounded(unit * 1e4) / 1e4})" shape-rendering="crispEdges">${drawn.join("")}</g>`);
  for (const [first, from, to, write] of [
    [entry.first_query, cells.r0, cells.r1, (at, text) => words(left - 6, top + (at + 0.5) * unit + 4, text, 'text-anchor="end"')],
    [entry.first_key, cells.c0, cells.c1, (at, text) => words(0, 0, text, `transform="translate(${rounded(left + (at + 0.5) * unit + 4)} ${top - 6}) rotate(-90)"`)],
  ]) {
    const tokens = to - from <= named && textOf(first + from) !== "";
    const places = tokens ? Array.from({ length: to - from }, (_, at) => from + at) : ticks(from, to - 1, 8).filter((place) => place >= from && Number.isInteger(place));
    for (const place of places) parts.push(write(place - from, tokens ? [...visible(textOf(first + place))].slice(0, longest).join("") : whole(first + place)));
  }
  parts.push(...scaleOf(state, style, top + height + 24, words));
  const box = [left + Math.max(width, 380) + 24, top + height + 84].map(Math.ceil).join(" ");
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${box}" font-family="${escaped(style.sans)}" font-size="${rounded(Math.max(6, Math.min(12, unit * 0.8)))}" fill="${style.soft}">\n<rect width="100%" height="100%" fill="${style.card}"/>\n${parts.join("\n")}\n</svg>\n`;
}

// One path for each colour, of the runs of equal cells of each row; cells that the mask hides are left out.
function runsOf(weights, { r0, r1, c0, c1 }, entry, state) {
  const paths = new Map();
  const width = c1 - c0;
  for (let r = 0; r < r1 - r0; r++) {
    const seen = entry.causal ? Math.min(width, Math.max(0, entry.first_query + r0 + r - entry.first_key - c0 + 1)) : width;
    for (let c = 0; c < seen; ) {
      const colour = colourOf(weights[r * width + c], state);
      let end = c + 1;
      while (end < seen && colourOf(weights[r * width + end], state) === colour) end++;
      paths.set(colour, `${paths.get(colour) ?? ""}M${c} ${r}h${end - c}v1h${c - end}z`);
      c = end;
    }
  }
  return paths;
}

function scaleOf(state, style, y, words) {
  const bar = barOf(state);
  const { low, high } = rangeOf(state);
  const bytes = colours(state);
  const steps = Array.from({ length: 120 }, (_, at) => {
    const value = bar.min + ((at + 0.5) / 120) * (bar.max - bar.min);
    const place = 3 * Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low))));
    return `<rect x="${left + 3 * at}" y="${y}" width="3.5" height="12" fill="rgb(${[...bytes.slice(place, place + 3)].join()})"/>`;
  });
  const labels = marksOf(state, bar, 360).map(({ at, text }) => words(left + (360 * (at - bar.min)) / (bar.max - bar.min), y + 27, text, 'text-anchor="middle" font-size="11"'));
  const frame = `<rect x="${left}" y="${y}" width="360" height="12" fill="none" stroke="${style.line}"/>`;
  return [steps.join(""), frame, ...labels, words(left, y + 44, isWeighted(state) ? variantText(state) : "attention weight", 'font-size="11"')];
}
