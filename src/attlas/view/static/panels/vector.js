// The visible cells as SVG, for print: those of one head, of a comparison of two, or of several with a colour each.

import { computeContrast, getColour, getContrastColour } from "../map/colour.js";
import { getHues, getMixedColour } from "../map/hues.js";
import { getHeadName, computeTicks, formatInteger } from "../data/numbers.js";
import { listColoured } from "../data/coloured.js";
import { isContrast } from "../data/state.js";
import { formatCaption } from "./picture.js";
import { describeBar, listBarColours, listBarMarks } from "./scale.js";
import { showWhitespace } from "../data/tokens.js";
import { t } from "../words/words.js";

export const vectorLimit = 65_536; // cells
const maxNamed = 80; // largest number of rows or columns that are labelled with tokens
const [left, top, side, maxCharacters] = [110, 130, 640, 14]; // places in the picture, and characters of a token
const [barWidth, barSteps, legendLine] = [360, 120, 18]; // of the colour bar, and of a head that has a colour of its own

/** @type {Record<string, string>} */
const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
// Characters that XML cannot hold become one that it can.
/** @param {string} text */
const escapeXml = (text) => text.replace(/[\u0000-\u001f\ud800-\udfff\ufffe\uffff]/gu, "\ufffd").replace(/[&<>"]/g, (mark) => ENTITIES[mark]);
/** @param {number} number */
const roundTo2 = (number) => Number(number.toFixed(2));

/**
 * The heads whose weights colour the cells of a map that shows each cell once; null where it shows two triangles or two maps.
 *
 * @param {State} state
 * @returns {HeadPlace[] | null}
 */
export function listDrawnHeads(state) {
  const { entry, head, second, compare } = state;
  if (compare === "colours") return listColoured(state);
  if (compare === "side" || compare === "triangle") return null;
  return isContrast(compare) && second ? [{ entry, head }, second] : [{ entry, head }];
}

/**
 * The text of the file. `cells`: the region; `weights`: of each of the drawn heads its weights, row by row;
 * `textOf.query(position)`, `textOf.key(position)`: tokens.
 *
 * @param {{ weights: Float32Array[], cells: Region, state: State, style: PictureStyle, textOf: TextOf }} options
 */
export function createVector({ weights, cells, state, style, textOf }) {
  const entry = state.info.entries[state.entry];
  const [rows, columns] = [cells.r1 - cells.r0, cells.c1 - cells.c0];
  const unit = side / Math.max(rows, columns);
  const [width, height] = [columns * unit, rows * unit];
  /** @type {WriteText} */
  const createText = (x, y, text, more = "") => `<text x="${roundTo2(x)}" y="${roundTo2(y)}" ${more}>${escapeXml(text)}</text>`;
  const parts = [createText(left, 28, getHeadName(state.info, state.entry, state.head), `font-size="16" font-weight="600" fill="${style.ink}"`), createText(left, 48, formatCaption(state, { side: 1, framed: false }))];
  parts.push(`<rect x="${left}" y="${top}" width="${roundTo2(width)}" height="${roundTo2(height)}" fill="${style.land}"/>`);
  const drawn = [...createPaths(createColouring(weights, state), cells, entry)].map(([colour, path]) => `<path fill="${colour}" d="${path}"/>`);
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
  const legend = createLegend(state, style, top + height + 92, createText);
  parts.push(...legend);
  const box = [left + Math.max(width, 380) + 24, top + height + 84 + legendLine * (legend.length / 2)].map(Math.ceil).join(" ");
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
 * The function that gives the colour of a cell, by its place among the weights.
 *
 * @param {Float32Array[]} weights
 * @param {State} state
 * @returns {(place: number) => string}
 */
function createColouring(weights, state) {
  const [first, second] = weights;
  if (isContrast(state.compare)) return (place) => getContrastColour(computeContrast(first[place], second[place], state), state);
  if (state.compare !== "colours") return (place) => getColour(first[place], state);
  const entries = listColoured(state).map(({ entry }) => entry);
  return (place) => getMixedColour(weights.map((each) => each[place]), state, entries);
}

/**
 * One path for each colour, made of runs of equal cells in each row; masked cells are left out.
 *
 * @param {(place: number) => string} getCellColour
 * @param {Region} region
 * @param {Entry} entry
 */
function createPaths(getCellColour, { r0, r1, c0, c1 }, entry) {
  /** @type {Map<string, string>} */
  const paths = new Map();
  const width = c1 - c0;
  for (let r = 0; r < r1 - r0; r++) {
    const visibleColumns = entry.causal ? Math.min(width, Math.max(0, entry.first_query + r0 + r - entry.first_key - c0 + 1)) : width;
    const colours = Array.from({ length: visibleColumns }, (_, c) => getCellColour(r * width + c));
    for (let c = 0; c < visibleColumns; ) {
      let end = c + 1;
      while (end < visibleColumns && colours[end] === colours[c]) end++;
      paths.set(colours[c], `${paths.get(colours[c]) ?? ""}M${c} ${r}h${end - c}v1h${c - end}z`);
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
  const bars = listBarColours(state, barSteps);
  const [width, height] = [barWidth / barSteps, 12 / bars.length];
  const steps = bars.flatMap((colours, bar) => colours.map((colour, step) => `<rect x="${left + width * step}" y="${roundTo2(y + bar * height)}" width="${width + 0.5}" height="${roundTo2(height)}" fill="${colour}"/>`));
  const labels = listBarMarks(state, barWidth).map(({ share, text }) => createText(left + barWidth * share, y + 27, text, 'text-anchor="middle" font-size="11"'));
  const frame = `<rect x="${left}" y="${y}" width="${barWidth}" height="12" fill="none" stroke="${style.line}"/>`;
  return [steps.join(""), frame, ...labels, createText(left, y + 44, describeBar(state), 'font-size="11"')];
}

/**
 * Of each head that has a colour of its own the colour and the name, one below the other.
 *
 * @param {State} state
 * @param {PictureStyle} style
 * @param {number} y
 * @param {WriteText} createText
 */
function createLegend(state, style, y, createText) {
  if (state.compare !== "colours") return [];
  const hues = getHues(state);
  return listColoured(state).flatMap(({ entry, head }, index) => {
    const line = roundTo2(y + legendLine * index);
    return [`<rect x="${left}" y="${line - 10}" width="11" height="11" fill="${hues[index]}"/>`, createText(left + 18, line, getHeadName(state.info, entry, head), `font-size="11" fill="${style.ink}"`)];
  });
}
