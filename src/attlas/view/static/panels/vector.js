// The visible cells of one head as SVG, for print.

import { getBarOffset, getColour, getWeightColours } from "../map/colour.js";
import { getBarRange, getBarTicks } from "./colourbar.js";
import { getHeadName, computeTicks, formatInteger } from "../data/numbers.js";
import { formatCaption } from "./picture.js";
import { showWhitespace } from "../data/tokens.js";
import { describeVariant, isSigned, isWeighted } from "../data/weighting.js";
import { t } from "../words/words.js";

export const vectorLimit = 65_536; // cells
const maxNamed = 80; // largest number of rows or columns that are labelled with tokens
const [left, top, side, maxCharacters] = [110, 130, 640, 14]; // places in the picture, and characters of a token

/** @type {Record<string, string>} */
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
// Characters that XML cannot hold become one that it can.
/** @param {string} text */
const escapeXml = (text) => text.replace(/[\u0000-\u001f\ud800-\udfff\ufffe\uffff]/gu, "\ufffd").replace(/[&<>"]/g, (mark) => ENTITIES[mark]);
/** @param {number} number */
const roundTo2 = (number) => Number(number.toFixed(2));

/**
 * The text of the file. `cells`: the region; `weights`: its weights, row by row; `textOf.query(position)`, `textOf.key(position)`: tokens.
 *
 * @param {{ weights: Float32Array, cells: Region, state: State, style: PictureStyle, textOf: TextOf }} options
 */
export function createVector({ weights, cells, state, style, textOf }) {
  const entry = state.info.entries[state.entry];
  const [rows, columns] = [cells.r1 - cells.r0, cells.c1 - cells.c0];
  const unit = side / Math.max(rows, columns);
  const [width, height] = [columns * unit, rows * unit];
  /** @type {WriteText} */
  const createText = (x, y, text, more = "") => `<text x="${roundTo2(x)}" y="${roundTo2(y)}" ${more}>${escapeXml(text)}</text>`;
  const parts = [createText(left, 28, getHeadName(state.info, state.entry, state.head), `font-size="16" font-weight="600" fill="${style.ink}"`), createText(left, 48, formatCaption({ ...state, compare: "none" }, { side: 1, framed: false }))];
  parts.push(`<rect x="${left}" y="${top}" width="${roundTo2(width)}" height="${roundTo2(height)}" fill="${style.land}"/>`);
  const drawn = [...createPaths(weights, cells, entry, state)].map(([colour, path]) => `<path fill="${colour}" d="${path}"/>`);
  parts.push(`<g transform="translate(${left} ${top}) scale(${roundTo2(unit * 1e4) / 1e4})" shape-rendering="crispEdges">${drawn.join("")}</g>`);
  /** @type {{ textAt: (position: number) => string, first: number, from: number, to: number, write: (at: number, text: string) => string }[]} */
  const axes = [
    { textAt: textOf.query, first: entry.first_query, from: cells.r0, to: cells.r1, write: (at, text) => createText(left - 6, top + (at + 0.5) * unit + 4, text, 'text-anchor="end"') },
    { textAt: textOf.key, first: entry.first_key, from: cells.c0, to: cells.c1, write: (at, text) => createText(0, 0, text, `transform="translate(${roundTo2(left + (at + 0.5) * unit + 4)} ${top - 6}) rotate(-90)"`) },
  ];
  for (const { textAt, first, from, to, write } of axes) {
    const tokens = to - from <= maxNamed && textAt(first + from) !== "";
    const places = tokens ? Array.from({ length: to - from }, (_, at) => from + at) : computeTicks(from, to - 1, 8).filter((place) => place >= from && Number.isInteger(place));
    for (const place of places) parts.push(write(place - from, tokens ? [...showWhitespace(textAt(first + place))].slice(0, maxCharacters).join("") : formatInteger(first + place)));
  }
  parts.push(...createScale(state, style, top + height + 24, createText));
  const box = [left + Math.max(width, 380) + 24, top + height + 84].map(Math.ceil).join(" ");
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${box}" font-family="${escapeXml(style.sans)}" font-size="${roundTo2(Math.max(6, Math.min(12, unit * 0.8)))}" fill="${style.soft}">\n<rect width="100%" height="100%" fill="${style.card}"/>\n${parts.join("\n")}\n</svg>\n`;
}

/**
 * A picture of pixels as SVG, as large as it is on the screen.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {number} ratio
 */
export function wrapPicture(canvas, ratio) {
  const size = `width="${roundTo2(canvas.width / ratio)}" height="${roundTo2(canvas.height / ratio)}"`;
  return `<svg xmlns="http://www.w3.org/2000/svg" ${size}>\n<image ${size} href="${canvas.toDataURL()}"/>\n</svg>\n`;
}

/**
 * One path for each colour, made of runs of equal cells in each row; masked cells are left out.
 *
 * @param {Float32Array} weights
 * @param {Region} region
 * @param {Entry} entry
 * @param {State} state
 */
function createPaths(weights, { r0, r1, c0, c1 }, entry, state) {
  /** @type {Map<string, string>} */
  const paths = new Map();
  const width = c1 - c0;
  for (let r = 0; r < r1 - r0; r++) {
    const visibleColumns = entry.causal ? Math.min(width, Math.max(0, entry.first_query + r0 + r - entry.first_key - c0 + 1)) : width;
    for (let c = 0; c < visibleColumns; ) {
      const colour = getColour(weights[r * width + c], state);
      let end = c + 1;
      while (end < visibleColumns && getColour(weights[r * width + end], state) === colour) end++;
      paths.set(colour, `${paths.get(colour) ?? ""}M${c} ${r}h${end - c}v1h${c - end}z`);
      c = end;
    }
  }
  return paths;
}

/**
 * @param {State} state
 * @param {PictureStyle} style
 * @param {number} y
 * @param {WriteText} createText
 */
function createScale(state, style, y, createText) {
  const bar = getBarRange(state);
  const bytes = getWeightColours(state);
  const steps = Array.from({ length: 120 }, (_, i) => {
    const value = bar.min + ((i + 0.5) / 120) * (bar.max - bar.min);
    const place = getBarOffset(value, state);
    return `<rect x="${left + 3 * i}" y="${y}" width="3.5" height="12" fill="rgb(${[...bytes.slice(place, place + 3)].join()})"/>`;
  });
  const labels = getBarTicks(state, bar, 360).map(({ at: i, text }) => createText(left + (360 * (i - bar.min)) / (bar.max - bar.min), y + 27, text, 'text-anchor="middle" font-size="11"'));
  const frame = `<rect x="${left}" y="${y}" width="360" height="12" fill="none" stroke="${style.line}"/>`;
  return [steps.join(""), frame, ...labels, createText(left, y + 44, isWeighted(state) ? describeVariant(state) : isSigned(state) ? t("weight, which may be negative") : t("attention weight"), 'font-size="11"')];
}
