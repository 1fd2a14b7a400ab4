// Codes, weights and colours. A code is the logarithm of a weight in 16 bits; one table turns it into a colour,
// so that colours can change without fetching anything.

import { oklabOf, srgbOf, toLinear } from "./oklab.js";
import { paletteBytes } from "./palettes.js";
import { unitOf } from "./weighting.js";

export const MASKED = 0;
export const ZERO = 1;
export const PENDING = 65535;
const FIRST = 2;
const STEPS = 65532; // codes 2 to 65534 stand for log2 weights -64 to 0
const LOG2_MIN = -64;

/** The weight that a code stands for: 0 for masked and for zero, NaN for what is not computed yet. */
export function decode(code) {
  if (code === PENDING) return NaN;
  return code < FIRST ? 0 : 2 ** log2Of(code);
}

/** log2 of the weight of a code from 2 to 65534. */
export function log2Of(code) {
  return LOG2_MIN - (LOG2_MIN * (code - FIRST)) / STEPS;
}

/** The code of a weight of an allowed pair. */
export function encode(weight) {
  if (!(weight > 0)) return Number.isNaN(weight) ? PENDING : ZERO;
  const log2 = Math.log2(weight);
  return log2 < LOG2_MIN ? ZERO : FIRST + Math.round(((Math.min(log2, 0) - LOG2_MIN) * STEPS) / -LOG2_MIN);
}

/** The range of a colour bar that shows a matrix with n keys: from a sixteenth of an even weight up to `most`. */
export function defaultRange(colour, n, most = 1) {
  const top = Math.min(0, Math.ceil(4 * Math.log2(most)) / 4);
  return colour === "log" ? { low: Math.max(-40, top - Math.ceil(Math.log2(Math.max(2, n))) - 4), high: top } : { low: 0, high: most };
}

/** The range in use: what was chosen, where it fits the kind of scale, else the default. */
export function rangeOf(state) {
  const { n = 1024, largest_norms: norms } = state.info?.entries[state.entry] ?? {};
  const { colour, low, high } = state;
  const fits = low !== null && high !== null && low < high && (colour === "log" ? high <= 0 : low >= 0);
  return fits ? { low, high } : defaultRange(colour, n, (norms?.[state.variant] || unitOf(state)) / unitOf(state));
}

// Two hues with even lightness at the ends: blue where the second head has more, orange where the first has.
const DIVERGING = {
  light: ["#0a3a6b", "#2f7ab8", "#9cc4de", "#f3f1ec", "#f0b27f", "#c9601c", "#6f2806"],
  dark: ["#b5dcff", "#5fa5dc", "#2a587d", "#1b232a", "#7c4520", "#d9813f", "#ffd2a6"],
};
// Palettes that follow the theme, so that the smallest weights are the nearest to the paper. "depth" is that of the
// report and of pictures.
const DEPTH = ["#f4f8f6", "#cfe7e1", "#8fcbc8", "#4f9fb2", "#27708f", "#174268", "#0d1b38"];
const THEMED = {
  depth: { light: DEPTH, dark: [...DEPTH].reverse() },
  grey: { light: ["#fbfbfa", "#0c0f12"], dark: ["#0d1217", "#f4f6f6"] },
};

// Colours between the stops, even to the eye: mixed in Oklab.
function blended(stops) {
  const points = stops.map(oklabOf);
  const bytes = new Uint8Array(768);
  for (let i = 0; i < 256; i++) {
    const at = ((points.length - 1) * i) / 255;
    const from = Math.min(Math.floor(at), points.length - 2);
    bytes.set(srgbOf(points[from].map((c, k) => c + (at - from) * (points[from + 1][k] - c))), 3 * i);
  }
  return bytes;
}

const mixed = new Map();
function blendedOnce(name, stops) {
  if (!mixed.has(name)) mixed.set(name, blended(stops));
  return mixed.get(name);
}

/** The 256 colours of the chosen palette, as 768 bytes. */
export function colours(state) {
  const theme = state.dark ? "dark" : "light";
  const stops = THEMED[state.palette];
  return stops ? blendedOnce(`${state.palette}-${theme}`, stops[theme]) : paletteBytes(state.palette);
}

/** The 256 colours of a comparison, from "second head has more" over "equal" to "first head has more". */
export function divergingColours(state) {
  const theme = state.dark ? "dark" : "light";
  return blendedOnce(`diverging-${theme}`, DIVERGING[theme]);
}

// Where a weight stands on the colour bar, 0 to 1.
function placeOf(weight, log2, colour, { low, high }) {
  const value = colour === "log" ? log2 : weight;
  return Math.min(1, Math.max(0, (value - low) / (high - low)));
}

const packed = (bytes, i) => (0xff000000 | (bytes[3 * i + 2] << 16) | (bytes[3 * i + 1] << 8) | bytes[3 * i]) >>> 0;

// log2 and weight of every code; filled once, so that a colour table costs no powers while its range is dragged.
const ofCode = { log2: null, weight: null };
function codeTables() {
  if (!ofCode.log2) {
    ofCode.log2 = Float64Array.from({ length: PENDING }, (_, code) => (code < FIRST ? -Infinity : log2Of(code)));
    ofCode.weight = ofCode.log2.map((log2) => 2 ** log2);
  }
  return ofCode;
}

/** The colour of every code, as little-endian RGBA words; masked and not yet computed are transparent. */
export function makeLut(state) {
  const bytes = colours(state);
  const words = Uint32Array.from({ length: 256 }, (_, i) => packed(bytes, i));
  const { low, high } = rangeOf(state);
  const values = codeTables()[state.colour === "log" ? "log2" : "weight"];
  const table = new Uint32Array(65536);
  const factor = 255 / (high - low);
  for (let code = ZERO; code < PENDING; code++) {
    const place = (values[code] - low) * factor;
    table[code] = words[place <= 0 ? 0 : place >= 255 ? 255 : Math.round(place)];
  }
  return table;
}

/** The colour of every difference of two codes: entry 32768 + (first - second) / 2. */
export function makeRatioLut(state) {
  const bytes = divergingColours(state);
  const table = new Uint32Array(65536);
  for (let i = 0; i < 65536; i++) table[i] = packed(bytes, ratioIndex(((2 * (i - 32768)) * -LOG2_MIN) / STEPS, state));
  return table;
}

/** The weight of every code, for differences; and the colours of 256 steps of a difference. */
export function makeDifference(state) {
  const bytes = divergingColours(state);
  return { weights: codeTables().weight, words: Uint32Array.from({ length: 256 }, (_, i) => packed(bytes, i)), limit: state.difference };
}

const differenceIndex = (value, limit) => Math.round(127.5 + 127.5 * Math.min(1, Math.max(-1, value / limit)));

const ratioIndex = (log2, state) => Math.round(127.5 + 127.5 * Math.min(1, Math.max(-1, log2 / state.ratio)));

const css = (bytes, i) => `rgb(${bytes[3 * i]} ${bytes[3 * i + 1]} ${bytes[3 * i + 2]})`;

function indexOf(weight, state) {
  const code = encode(weight / unitOf(state)); // through the code, so that a number has the very colour that the map gives it
  const log2 = code === ZERO ? -Infinity : log2Of(code);
  return Math.round(255 * placeOf(2 ** log2, log2, state.colour, rangeOf(state)));
}

/** The colour of a weight as CSS text; "transparent" where there is none. */
export function colourOf(weight, state) {
  return weight === null || Number.isNaN(weight) ? "transparent" : css(colours(state), indexOf(weight, state));
}

/** How two weights differ, as the comparison that is shown counts it: log2 of their ratio, or the first less the second. */
export function contrastOf(first, second, { compare }) {
  if (compare === "difference") return first - second;
  return first === second ? 0 : Math.log2(first) - Math.log2(second);
}

/** The colour of such a number. */
export function contrastColourOf(value, state) {
  if (Number.isNaN(value)) return "transparent";
  return css(divergingColours(state), state.compare === "difference" ? differenceIndex(value / unitOf(state), state.difference) : ratioIndex(value, state));
}

/** Black or white, whichever reads better on the colour of this weight (WCAG contrast). */
export function inkOn(colour) {
  const [r, g, b] = colour.match(/\d+/g).map((c) => toLinear(Number(c) / 255));
  const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
  return (light + 0.05) ** 2 > 1.05 * 0.05 ? "#000000" : "#ffffff";
}
