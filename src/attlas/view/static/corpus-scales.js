// From numbers to places and colours in a scatter.

import { domainOf, valuesOf } from "./corpus-data.js";
import { colours } from "./colour.js";
import { digits, ticks, whole } from "./numbers.js";

/** A scale from a domain to pixels; logarithmic steps are powers of ten, or their 1, 2 and 5. */
export function scaleOf([low, high], log, from, to) {
  const forth = log ? Math.log10 : Number;
  const back = log ? (value) => 10 ** value : Number;
  const pad = 0.05 * (forth(high) - forth(low)) || 0.1;
  const [a, b] = [forth(low) - pad, forth(high) + pad];
  return {
    at: (value) => from + ((forth(value) - a) / (b - a)) * (to - from),
    value: (pixel) => back(a + ((pixel - from) / (to - from)) * (b - a)),
    ticks: (most) => (log ? logTicks(10 ** a, 10 ** b, most) : ticks(a, b, most)),
  };
}
function logTicks(low, high, most) {
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, at) => 10 ** (Math.floor(Math.log10(low)) + at));
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    const found = powers.flatMap((power) => factors.map((factor) => factor * power)).filter((value) => value >= low && value <= high);
    if (found.length <= most + 1 || factors.length === 1) return found.length > 1 ? found : ticks(low, high, most);
  }
  return [];
}

// Hues for kinds of head, told apart by people who do not see red or green too; the last one is for heads of no kind.
const KINDS = {
  light: ["#c8421a", "#e0a100", "#2f6fb2", "#58a9c9", "#14866d", "#7b8790", "#8bb53c", "#a4508f", "#c99a6b", "#c3cbcf"],
  dark: ["#ff8f63", "#f2c14e", "#6fa8e8", "#8ed3ea", "#4cc3a5", "#a9b6bf", "#b5d96a", "#d98cc6", "#d9b48f", "#4d5b66"],
};

/** What colours the heads of a corpus: for each row its colour, and what a legend says of it. */
export function tintsOf(info, corpus, { colour, dark }, look) {
  if (colour === "kind") {
    const names = corpus.kinds.map(([name]) => name);
    const hues = KINDS[dark ? "dark" : "light"];
    const hueOf = (name) => hues[name === names.at(-1) ? hues.length - 1 : names.indexOf(name) % (hues.length - 1)];
    const present = names.filter((name) => info.corpora.some((each) => each.rows.kind?.includes(name)));
    return { fills: corpus.rows.kind.map(hueOf), kinds: present.map((name) => ({ name, fill: hueOf(name) })) };
  }
  const domain = domainOf(info, colour);
  const palette = paletteOf(dark);
  return { fills: valuesOf(corpus, colour).map((value) => (value === null ? look.empty : palette(shareOf(value, domain)))), domain, palette };
}

/** A colour for each share from 0 to 1: the palette of the page without its end that is the paper's. */
function paletteOf(dark) {
  const bytes = colours({ palette: "depth", dark });
  return (share) => {
    const place = 3 * Math.round(255 * (0.22 + 0.78 * Math.min(1, Math.max(0, share))));
    return `rgb(${bytes[place]},${bytes[place + 1]},${bytes[place + 2]})`;
  };
}
export const shareOf = (value, [low, high]) => (value - low) / (high - low);
export const tickText = (value) => (Number.isInteger(value) ? whole(value).replace("-", "−") : digits(value, 4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""));
