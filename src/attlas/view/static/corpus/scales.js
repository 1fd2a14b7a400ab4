// Scales of the scatter: numbers to pixels and colours.

import { computeDomain, getValues } from "./data.js";
import { getColours } from "../map/colour.js";
import { formatNumber, computeTicks, formatInteger } from "../data/numbers.js";

/**
 * A scale from a domain to pixels; logarithmic steps are powers of ten, or their 1, 2 and 5.
 *
 * @param {[low: number, high: number]} domain
 * @param {boolean} log
 * @param {number} from
 * @param {number} to
 * @returns {AxisScale}
 */
export function createScale([low, high], log, from, to) {
  const transform = log ? Math.log10 : Number;
  const invert = log ? (/** @type {number} */ value) => 10 ** value : Number;
  const padding = 0.05 * (transform(high) - transform(low)) || 0.1;
  const [a, b] = [transform(low) - padding, transform(high) + padding];
  return {
    at: (/** @type {number} */ value) => from + ((transform(value) - a) / (b - a)) * (to - from),
    value: (/** @type {number} */ pixel) => invert(a + ((pixel - from) / (to - from)) * (b - a)),
    ticks: (/** @type {number} */ maxTicks) => (log ? logTicks(10 ** a, 10 ** b, maxTicks) : computeTicks(a, b, maxTicks)),
  };
}
/**
 * @param {number} low
 * @param {number} high
 * @param {number} maxTicks
 */
function logTicks(low, high, maxTicks) {
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, index) => 10 ** (Math.floor(Math.log10(low)) + index));
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    const values = powers.flatMap((power) => factors.map((factor) => factor * power)).filter((value) => value >= low && value <= high);
    if (values.length <= maxTicks + 1 || factors.length === 1) return values.length > 1 ? values : computeTicks(low, high, maxTicks);
  }
  return [];
}

// Hues for kinds of head, chosen for colour-blind readers too; the last one is for heads of no kind.
const KINDS = {
  light: ["#c8421a", "#e0a100", "#2f6fb2", "#58a9c9", "#14866d", "#7b8790", "#8bb53c", "#a4508f", "#c99a6b", "#c3cbcf"],
  dark: ["#ff8f63", "#f2c14e", "#6fa8e8", "#8ed3ea", "#4cc3a5", "#a9b6bf", "#b5d96a", "#d98cc6", "#d9b48f", "#4d5b66"],
};

/**
 * The colour of each head of a corpus, and what the legend needs.
 *
 * @param {CorporaInfo<Corpus>} info
 * @param {Corpus} corpus
 * @param {Pick<CorpusState, "colour" | "dark">} state
 * @param {Pick<Look, "empty">} look
 * @returns {Tints}
 */
export function getTints(info, corpus, { colour, dark }, look) {
  if (colour === "kind") {
    const names = corpus.kinds.map(([name]) => name);
    const hues = KINDS[dark ? "dark" : "light"];
    const getHue = (/** @type {string} */ name) => hues[name === names.at(-1) ? hues.length - 1 : names.indexOf(name) % (hues.length - 1)];
    const present = names.filter((name) => info.corpora.some((each) => each.rows.kind?.includes(name)));
    return { fills: (corpus.rows.kind ?? []).map(getHue), kinds: present.map((name) => ({ name, fill: getHue(name) })) };
  }
  const domain = computeDomain(info, colour);
  const palette = createColourScale(dark);
  return { fills: getValues(corpus, colour).map((value) => (value === null ? look.empty : palette(normalise(value, domain)))), domain, palette };
}

/**
 * A function from a share, 0 to 1, to a colour: the palette without its palest part.
 *
 * @param {boolean} dark
 */
function createColourScale(dark) {
  const bytes = getColours({ palette: "depth", dark });
  return (/** @type {number} */ share) => {
    const offset = 3 * Math.round(255 * (0.22 + 0.78 * Math.min(1, Math.max(0, share))));
    return `rgb(${bytes[offset]},${bytes[offset + 1]},${bytes[offset + 2]})`;
  };
}
/**
 * @param {number} value
 * @param {[low: number, high: number]} domain
 */
export const normalise = (value, [low, high]) => (value - low) / (high - low);
/** @param {number} value */
export const formatTick = (value) => (Number.isInteger(value) ? formatInteger(value).replace("-", "−") : formatNumber(value, 4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""));
