// Codes, weights and colours. A code is the logarithm of a weight in 16 bits; one table turns it into a colour,
// so that colours can change without fetching anything.

import { hexToOklab, oklabToSrgb, toLinear } from "./oklab.js";
import { getPaletteBytes } from "./palettes.js";
import { areShares, getUnit, isSigned } from "../data/weighting.js";

export const MASKED = 0;
export const ZERO = 1;
export const PENDING = 65535;
const FIRST_CODE = 2;
const CODE_STEPS = 65532; // codes 2 to 65534 stand for log2 weights -64 to 0
const LOG2_MIN = -64;
// Codes of weights that are no shares: 2 to 32767 are positive, as many behind them negative; log2 sizes from -48 to 16.
const LAST_POSITIVE = 32767;
const SIGNED_STEPS = LAST_POSITIVE - FIRST_CODE;
const SIGNED_MIN = -48;
const SIGNED_OCTAVES = 64;
const SHOWN_OCTAVES = 12; // octaves below the largest size that a scale of both signs shows
const BAR_OCTAVES = 16; // and those that its bar has room for, on each side,
const BAR_ABOVE = 2; // and above

/**
 * The weight that a code stands for: 0 for masked and for zero, NaN for what is not computed yet.
 *
 * @param {number} code
 * @param {boolean} [shares] whether the code is that of a share
 */
export function decode(code, shares = true) {
  if (code === PENDING) return NaN;
  if (code < FIRST_CODE) return 0;
  if (shares) return 2 ** decodeLog2(code);
  return (code > LAST_POSITIVE ? -1 : 1) * 2 ** decodeSignedLog2(code);
}

/**
 * log2 of the size of the weight of a code with a sign.
 *
 * @param {number} code
 */
function decodeSignedLog2(code) {
  return SIGNED_MIN + (SIGNED_OCTAVES * (code - FIRST_CODE - (code > LAST_POSITIVE ? LAST_POSITIVE : 0))) / SIGNED_STEPS;
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
 * @param {boolean} [shares]
 */
export function encode(weight, shares = true) {
  if (!shares) return encodeSigned(weight);
  if (!(weight > 0)) return Number.isNaN(weight) ? PENDING : ZERO;
  const log2 = Math.log2(weight);
  return log2 < LOG2_MIN ? ZERO : FIRST_CODE + Math.round(((Math.min(log2, 0) - LOG2_MIN) * CODE_STEPS) / -LOG2_MIN);
}

/** @param {number} weight */
function encodeSigned(weight) {
  if (Number.isNaN(weight)) return PENDING;
  const log2 = Math.log2(Math.abs(weight));
  if (log2 < SIGNED_MIN) return ZERO;
  const code = FIRST_CODE + Math.round(((Math.min(log2, SIGNED_MIN + SIGNED_OCTAVES) - SIGNED_MIN) * SIGNED_STEPS) / SIGNED_OCTAVES);
  return weight < 0 ? code + LAST_POSITIVE : code;
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
  if (isSigned(state)) {
    // From the sizes that have no colour to those that have the darkest; in proportion, from 0 on.
    const fits = low !== null && high !== null && low < high && (colour === "log" ? high <= SIGNED_MIN + SIGNED_OCTAVES : low === 0);
    return fits ? { low, high } : colour === "log" ? { low: -SHOWN_OCTAVES, high: 0 } : { low: 0, high: 1 };
  }
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

// Weights that may be negative: above 0 the palette "depth", below 0 as far to dark red, as in pictures; without the
// darkest colours, which look the same on both sides.
const SIGNED = {
  light: ["#782614", "#ae3d1f", "#d66c47", "#e8a386", "#f3d6c6", "#f4f8f6", "#cfe7e1", "#8fcbc8", "#4f9fb2", "#27708f", "#174268"],
  dark: ["#ffd9c4", "#ffb08c", "#ec7d55", "#b9502f", "#79321f", "#3e2220", "#141c26", "#16304a", "#1c4f70", "#2f7f9c", "#5db0bd", "#9fd8d2", "#def5ee"],
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
 * The 256 colours of the weights of the shown entry: those of the palette, or of both signs.
 *
 * @param {PaletteState & RangeState} state
 */
export function getWeightColours(state) {
  const theme = state.dark ? "dark" : "light";
  return isSigned(state) ? getBlended(`signed-${theme}`, SIGNED[theme]) : getColours(state);
}

/** @param {number} value */
const clampShare = (value) => Math.min(1, Math.max(0, value));

/**
 * The function that gives the index of the colour of a weight, by the weight and log2 of its size.
 *
 * @param {RangeState} state
 * @returns {(weight: number, log2: number) => number}
 */
function createIndex(state) {
  if (!isSigned(state)) {
    const getStrength = createStrength(state);
    return (weight, log2) => Math.round(255 * getStrength(weight, log2));
  }
  const { low, high } = getRange(state);
  const isLog = state.colour === "log";
  return (weight, log2) => Math.round(127.5 + 127.5 * Math.sign(weight) * clampShare(((isLog ? log2 : Math.abs(weight)) - low) / (high - low)));
}

/**
 * The function that gives how far along the colour bar a weight that is a share lies, from 0 to 1, by the weight and its log2.
 *
 * @param {RangeState} state
 * @returns {(weight: number, log2: number) => number}
 */
export function createStrength(state) {
  const { low, high } = getRange(state);
  const isLog = state.colour === "log";
  return (weight, log2) => clampShare(((isLog ? log2 : weight) - low) / (high - low));
}

/**
 * The place of a weight on the colour bar, in the numbers of the bar. On a logarithmic one of both signs these are octaves
 * above the smallest size of the bar, negative for a negative weight.
 *
 * @param {number} weight
 * @param {RangeState} state
 */
export function toBar(weight, state) {
  if (state.colour === "linear") return weight;
  const log2 = Math.log2(Math.abs(weight));
  return isSigned(state) ? Math.sign(weight) * Math.max(0, log2 + BAR_OCTAVES) : log2;
}

/**
 * The weight at a place of the colour bar.
 *
 * @param {number} place
 * @param {RangeState} state
 */
export function fromBar(place, state) {
  if (state.colour === "linear") return place;
  return isSigned(state) ? Math.sign(place) * 2 ** (Math.abs(place) - BAR_OCTAVES) : 2 ** place;
}

/**
 * How far the colours of both signs reach on the bar, to each side; the bar ends further out.
 *
 * @param {RangeState} state
 */
export function getSignedReach(state) {
  const { high } = getRange(state);
  if (state.colour === "log") return { reach: Math.max(0.5, high + BAR_OCTAVES), end: Math.max(high, 0) + BAR_OCTAVES + BAR_ABOVE };
  return { reach: high, end: 1.25 * Math.max(high, 1) };
}

/**
 * The range that puts the end of the colours of both signs at a place of the bar.
 *
 * @param {number} reach
 * @param {RangeState} state
 */
export function setSignedReach(reach, state) {
  if (state.colour === "linear") return { low: 0, high: reach };
  const high = reach - BAR_OCTAVES;
  return { low: Math.min(getRange(state).low, high - 1), high };
}

/**
 * The range of both signs whose darkest colours are those of a size.
 *
 * @param {number} size
 * @param {Scale} colour
 */
export function fitSigned(size, colour) {
  if (colour === "linear") return { low: 0, high: size };
  const high = Math.ceil(4 * Math.log2(size)) / 4;
  return { low: high - SHOWN_OCTAVES, high };
}

/**
 * The colour at a place of the bar, as an offset in the bytes of `getWeightColours`.
 *
 * @param {number} place
 * @param {RangeState} state
 */
export function getBarOffset(place, state) {
  const weight = fromBar(place, state);
  return 3 * createIndex(state)(weight, Math.log2(Math.abs(weight)));
}

/**
 * @param {Uint8Array} bytes
 * @param {number} i
 */
const packPixel = (bytes, i) => (0xff000000 | (bytes[3 * i + 2] << 16) | (bytes[3 * i + 1] << 8) | bytes[3 * i]) >>> 0;

// log2 of the size and weight of every code, computed once: a new colour table needs no powers.
/** @type {Map<boolean, { log2: Float64Array, weight: Float64Array }>} */
const tablesByCode = new Map();
/** @param {boolean} shares */
export function getCodeTables(shares) {
  let tables = tablesByCode.get(shares);
  if (!tables) {
    const log2 = Float64Array.from({ length: PENDING }, (_, code) => (code < FIRST_CODE ? -Infinity : shares ? decodeLog2(code) : decodeSignedLog2(code)));
    tables = { log2, weight: log2.map((value, code) => (!shares && code > LAST_POSITIVE ? -1 : 1) * 2 ** value) };
    tablesByCode.set(shares, tables);
  }
  return tables;
}

/**
 * The colour of every code, as little-endian RGBA words; masked and not yet computed are transparent.
 *
 * @param {PaletteState & RangeState} state
 */
export function makeLut(state) {
  const bytes = getWeightColours(state);
  const words = Uint32Array.from({ length: 256 }, (_, i) => packPixel(bytes, i));
  const { weight, log2 } = getCodeTables(areShares(state));
  const getIndex = createIndex(state);
  const table = new Uint32Array(65536);
  for (let code = ZERO; code < PENDING; code++) table[code] = words[getIndex(code === ZERO ? 0 : weight[code], log2[code])];
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
 * The weights of every code of two heads, in units of the first, for differences; and the colours of 256 steps.
 *
 * @param {State} state
 * @param {number} first entries of the heads
 * @param {number} second
 * @returns {DifferenceTable}
 */
export function makeDifference(state, first, second) {
  const bytes = getDivergingColours(state);
  const [one, other] = [first, second].map((entry) => ({ ...state, entry }));
  return {
    weights: getCodeTables(areShares(one)).weight,
    others: getCodeTables(areShares(other)).weight,
    factor: getUnit(other) / getUnit(one),
    words: Uint32Array.from({ length: 256 }, (_, i) => packPixel(bytes, i)),
    limit: state.difference,
  };
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
  const code = encode(weight / getUnit(state), areShares(state)); // rounded to a code, as in the map: both have the same colour
  const { weight: weights, log2 } = getCodeTables(areShares(state));
  return createIndex(state)(code === ZERO ? 0 : weights[code], log2[code]);
}

/**
 * The colour of a weight as CSS text; "transparent" where there is none.
 *
 * @param {number | null} weight
 * @param {PaletteState & RangeState} state
 */
export function getColour(weight, state) {
  return weight === null || Number.isNaN(weight) ? "transparent" : formatCss(getWeightColours(state), getColourIndex(weight, state));
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
