// Codes, weights and colours. A code is the logarithm of a weight in 16 bits; one table turns it into a colour,
// so that colours can change without fetching anything.

import { hexToOklab, oklabToSrgb, toLinear } from "./oklab.js";
import { getPaletteBytes } from "./palettes.js";
import { getUnit } from "../data/weighting.js";

export const MASKED = 0;
export const ZERO = 1;
export const PENDING = 65535;
const FIRST_CODE = 2;
const CODE_STEPS = 65532; // codes 2 to 65534 stand for log2 weights -64 to 0
const LOG2_MIN = -64;

/**
 * The weight that a code stands for: 0 for masked and for zero, NaN for what is not computed yet.
 *
 * @param {number} code
 */
export function decode(code) {
  if (code === PENDING) return NaN;
  return code < FIRST_CODE ? 0 : 2 ** decodeLog2(code);
}

/**
 * log2 of the weight of a code from 2 to 65534.
 *
 * @param {number} code
 */
function decodeLog2(code) {
  return LOG2_MIN - (LOG2_MIN * (code - FIRST_CODE)) / CODE_STEPS;
}

/**
 * The code of a weight of an allowed pair.
 *
 * @param {number} weight
 */
export function encode(weight) {
  if (!(weight > 0)) return Number.isNaN(weight) ? PENDING : ZERO;
  const log2 = Math.log2(weight);
  return log2 < LOG2_MIN ? ZERO : FIRST_CODE + Math.round(((Math.min(log2, 0) - LOG2_MIN) * CODE_STEPS) / -LOG2_MIN);
}

/**
 * The range of a colour bar that shows a matrix with n keys: from a sixteenth of an even weight up to `most`.
 *
 * @param {Scale} colour
 * @param {number} n
 * @param {number} [most]
 */
export function getDefaultRange(colour, n, most = 1) {
  const top = Math.min(0, Math.ceil(4 * Math.log2(most)) / 4);
  return colour === "log" ? { low: Math.max(-40, top - Math.ceil(Math.log2(Math.max(2, n))) - 4), high: top } : { low: 0, high: most };
}

/**
 * The range in use: what was chosen, where it fits the kind of scale, else the default.
 *
 * @param {RangeState} state
 */
export function getRange(state) {
  const { n = 1024, largest_norms: norms } = state.info?.entries[state.entry] ?? {};
  const { colour, low, high } = state;
  const fits = low !== null && high !== null && low < high && (colour === "log" ? high <= 0 : low >= 0);
  return fits ? { low, high } : getDefaultRange(colour, n, (norms?.[state.variant] || getUnit(state)) / getUnit(state));
}

// Two hues with even lightness at the ends: blue where the second head has more, orange where the first has.
const DIVERGING = {
  light: ["#0a3a6b", "#2f7ab8", "#9cc4de", "#f3f1ec", "#f0b27f", "#c9601c", "#6f2806"],
  dark: ["#b5dcff", "#5fa5dc", "#2a587d", "#1b232a", "#7c4520", "#d9813f", "#ffd2a6"],
};
// Palettes that follow the theme, so that the smallest weights are the nearest to the paper. "depth" is that of the
// report and of pictures.
const DEPTH = ["#f4f8f6", "#cfe7e1", "#8fcbc8", "#4f9fb2", "#27708f", "#174268", "#0d1b38"];
/** @type {Record<string, { light: string[], dark: string[] }>} */
const THEMED = {
  depth: { light: DEPTH, dark: [...DEPTH].reverse() },
  grey: { light: ["#fbfbfa", "#0c0f12"], dark: ["#0d1217", "#f4f6f6"] },
};

// Colours between the stops, even to the eye: mixed in Oklab.
/** @param {string[]} stops */
function blendStops(stops) {
  const points = stops.map(hexToOklab);
  const bytes = new Uint8Array(768);
  for (let i = 0; i < 256; i++) {
    const position = ((points.length - 1) * i) / 255;
    const from = Math.min(Math.floor(position), points.length - 2);
    bytes.set(oklabToSrgb(points[from].map((c, k) => c + (position - from) * (points[from + 1][k] - c))), 3 * i);
  }
  return bytes;
}

/** @type {Map<string, Uint8Array>} */
const blendCache = new Map();
/**
 * @param {string} name
 * @param {string[]} stops
 */
function getBlended(name, stops) {
  const known = blendCache.get(name) ?? blendStops(stops);
  blendCache.set(name, known);
  return known;
}

/**
 * The 256 colours of the chosen palette, as 768 bytes.
 *
 * @param {PaletteState} state
 */
export function getColours(state) {
  const theme = state.dark ? "dark" : "light";
  const stops = THEMED[state.palette];
  return stops ? getBlended(`${state.palette}-${theme}`, stops[theme]) : getPaletteBytes(state.palette);
}

/**
 * The 256 colours of a comparison, from "second head has more" over "equal" to "first head has more".
 *
 * @param {Pick<State, "dark">} state
 */
export function getDivergingColours(state) {
  const theme = state.dark ? "dark" : "light";
  return getBlended(`diverging-${theme}`, DIVERGING[theme]);
}

/**
 * The position of a weight on the colour bar, 0 to 1.
 *
 * @param {number} weight
 * @param {number} log2
 * @param {Scale} colour
 * @param {{ low: number, high: number }} range
 */
function getPosition(weight, log2, colour, { low, high }) {
  const value = colour === "log" ? log2 : weight;
  return Math.min(1, Math.max(0, (value - low) / (high - low)));
}

/**
 * @param {Uint8Array} bytes
 * @param {number} i
 */
const packPixel = (bytes, i) => (0xff000000 | (bytes[3 * i + 2] << 16) | (bytes[3 * i + 1] << 8) | bytes[3 * i]) >>> 0;

// log2 and weight of every code, computed once: a new colour table needs no powers.
/** @type {{ log2: Float64Array, weight: Float64Array } | null} */
let tablesByCode = null;
function getCodeTables() {
  if (!tablesByCode) {
    const log2 = Float64Array.from({ length: PENDING }, (_, code) => (code < FIRST_CODE ? -Infinity : decodeLog2(code)));
    tablesByCode = { log2, weight: log2.map((value) => 2 ** value) };
  }
  return tablesByCode;
}

/**
 * The colour of every code, as little-endian RGBA words; masked and not yet computed are transparent.
 *
 * @param {PaletteState & RangeState} state
 */
export function makeLut(state) {
  const bytes = getColours(state);
  const words = Uint32Array.from({ length: 256 }, (_, i) => packPixel(bytes, i));
  const { low, high } = getRange(state);
  const values = getCodeTables()[state.colour === "log" ? "log2" : "weight"];
  const table = new Uint32Array(65536);
  const factor = 255 / (high - low);
  for (let code = ZERO; code < PENDING; code++) {
    const place = (values[code] - low) * factor;
    table[code] = words[place <= 0 ? 0 : place >= 255 ? 255 : Math.round(place)];
  }
  return table;
}

/**
 * The colour of every difference of two codes: entry 32768 + (first - second) / 2.
 *
 * @param {Pick<State, "dark" | "ratio">} state
 */
export function makeRatioLut(state) {
  const bytes = getDivergingColours(state);
  const table = new Uint32Array(65536);
  for (let i = 0; i < 65536; i++) table[i] = packPixel(bytes, getRatioIndex(((2 * (i - 32768)) * -LOG2_MIN) / CODE_STEPS, state));
  return table;
}

/**
 * The weight of every code, for differences; and the colours of 256 steps of a difference.
 *
 * @param {Pick<State, "dark" | "difference">} state
 */
export function makeDifference(state) {
  const bytes = getDivergingColours(state);
  return { weights: getCodeTables().weight, words: Uint32Array.from({ length: 256 }, (_, i) => packPixel(bytes, i)), limit: state.difference };
}

/**
 * @param {number} value
 * @param {number} limit
 */
const getDifferenceIndex = (value, limit) => Math.round(127.5 + 127.5 * Math.min(1, Math.max(-1, value / limit)));

/**
 * @param {number} log2
 * @param {Pick<State, "ratio">} state
 */
const getRatioIndex = (log2, state) => Math.round(127.5 + 127.5 * Math.min(1, Math.max(-1, log2 / state.ratio)));

/**
 * @param {Uint8Array} bytes
 * @param {number} i
 */
const formatCss = (bytes, i) => `rgb(${bytes[3 * i]} ${bytes[3 * i + 1]} ${bytes[3 * i + 2]})`;

/**
 * @param {number} weight
 * @param {RangeState} state
 */
function getColourIndex(weight, state) {
  const code = encode(weight / getUnit(state)); // rounded to a code, as in the map: both have the same colour
  const log2 = code === ZERO ? -Infinity : decodeLog2(code);
  return Math.round(255 * getPosition(2 ** log2, log2, state.colour, getRange(state)));
}

/**
 * The colour of a weight as CSS text; "transparent" where there is none.
 *
 * @param {number | null} weight
 * @param {PaletteState & RangeState} state
 */
export function getColour(weight, state) {
  return weight === null || Number.isNaN(weight) ? "transparent" : formatCss(getColours(state), getColourIndex(weight, state));
}

/**
 * How two weights differ in the shown comparison: log2 of their ratio, or the first minus the second.
 *
 * @param {number} first
 * @param {number} second
 * @param {Pick<State, "compare">} state
 */
export function computeContrast(first, second, { compare }) {
  if (compare === "difference") return first - second;
  return first === second ? 0 : Math.log2(first) - Math.log2(second);
}

/**
 * The colour of a number that `computeContrast` returns.
 *
 * @param {number} value
 * @param {State} state
 */
export function getContrastColour(value, state) {
  if (Number.isNaN(value)) return "transparent";
  return formatCss(getDivergingColours(state), state.compare === "difference" ? getDifferenceIndex(value / getUnit(state), state.difference) : getRatioIndex(value, state));
}

/**
 * Black or white, whichever reads better on the colour of this weight (WCAG contrast).
 *
 * @param {string} colour
 */
export function chooseTextColour(colour) {
  const [r, g, b] = (colour.match(/\d+/g) ?? []).map((c) => toLinear(Number(c) / 255));
  const luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return (luminance + 0.05) ** 2 > 1.05 * 0.05 ? "#000000" : "#ffffff";
}
