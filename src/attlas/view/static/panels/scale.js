// The colour bar of a picture that is saved: its colours, its marks, and what its numbers are.

import { getBarOffset, getDivergingColours, getWeightColours } from "../map/colour.js";
import { makeHueBar } from "../map/hues.js";
import { listColoured } from "../data/coloured.js";
import { isContrast } from "../data/state.js";
import { describeVariant, isSigned, isWeighted } from "../data/weighting.js";
import { getBarRange, getBarTicks, getContrastBarRange, getContrastTicks } from "./colourbar.js";
import { t } from "../words/words.js";

/** @param {State} state */
const getRange = (state) => (isContrast(state.compare) ? getContrastBarRange(state, state[state.compare]) : getBarRange(state));

/**
 * The colours of the bar from the left to the right, as CSS: one row, or one for each head that has a colour of its own.
 *
 * @param {State} state
 * @param {number} steps
 * @returns {string[][]}
 */
export function listBarColours(state, steps) {
  const bar = getRange(state);
  const format = (/** @type {Uint8Array | Uint8ClampedArray} */ bytes, /** @type {number} */ at) => `rgb(${bytes[at]} ${bytes[at + 1]} ${bytes[at + 2]})`;
  const places = Array.from({ length: steps }, (_, step) => step);
  if (state.compare === "colours") {
    return listColoured(state).map((_, index) => {
      const bytes = makeHueBar(index, state, bar, steps);
      return places.map((step) => format(bytes, 4 * step));
    });
  }
  const isRatio = isContrast(state.compare);
  const bytes = isRatio ? getDivergingColours(state) : getWeightColours(state);
  return [places.map((step) => format(bytes, isRatio ? 3 * Math.round((255 * (step + 0.5)) / steps) : getBarOffset(bar.min + ((step + 0.5) / steps) * (bar.max - bar.min), state)))];
}

/**
 * The marks of the bar, each with its place from 0 to 1, for a bar that is `width` CSS pixels wide.
 *
 * @param {State} state
 * @param {number} width
 */
export function listBarMarks(state, width) {
  const bar = getRange(state);
  const ticks = isContrast(state.compare) ? getContrastTicks(state, bar) : getBarTicks(state, bar, width);
  return ticks.map(({ at, text }) => ({ share: (at - bar.min) / (bar.max - bar.min), text }));
}

/**
 * What the numbers of the bar are.
 *
 * @param {State} state
 */
export function describeBar(state) {
  if (state.compare === "difference") return t("weight of the first head less that of the second");
  if (state.compare === "ratio") return t("weight of the first head over that of the second");
  if (isWeighted(state)) return describeVariant(state);
  return isSigned(state) ? t("weight, which may be negative") : t("attention weight");
}
