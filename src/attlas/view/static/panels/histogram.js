// How a statistic is spread over the heads, with a range that filters them.

import { make } from "./elements.js";
import { formatNumber } from "../data/numbers.js";
import { createRange } from "./range.js";
import { t } from "../words/words.js";

const binCount = 32;

/** @param {(within: [low: number, high: number] | null) => void} onRange */
export function createHistogram(onRange) {
  let [min, max] = [0, 1];
  let label = "";
  const bars = make("div", { class: "histogram-bars", "aria-hidden": "true" });
  const barElements = Array.from({ length: binCount }, () => make("i"));
  bars.append(...barElements);
  const range = createRange({
    label: t("Heads whose statistic is within"),
    names: [t("from"), t("to")],
    step: () => (max - min) / 100 || 0.01,
    formatValue: (value) => `${label} ${formatNumber(value)}`,
    onInput: (low, high) => {
      markOutside(low, high);
      showEnds(low, high);
      onRange(low <= min && high >= max ? null : [low, high]);
    },
  });
  const endElements = [make("span"), make("span", { class: "middle" }), make("span")];
  const element = make(
    "div",
    { class: "histogram" },
    make("div", { class: "histogram-plot" }, bars, range.element),
    make("div", { class: "histogram-ends" }, ...endElements),
  );
  /**
   * @param {number} low
   * @param {number} high
   */
  function markOutside(low, high) {
    const width = (max - min) / binCount;
    barElements.forEach((bar, i) => {
      const [from, to] = [min + i * width, min + (i + 1) * width];
      bar.classList.toggle("out", to <= low || from >= high);
    });
  }
  /**
   * @param {number} low
   * @param {number} high
   */
  function showEnds(low, high) {
    let precision = 3;
    while (precision < 9 && formatNumber(min, precision) === formatNumber(max, precision)) precision += 1;
    endElements[0].textContent = formatNumber(min, precision);
    endElements[2].textContent = formatNumber(max, precision);
    endElements[1].textContent = low > min || high < max ? t("{0} to {1}", formatNumber(low), formatNumber(high)) : "";
  }
  return {
    element,
    set(/** @type {string} */ name, /** @type {number[]} */ values, /** @type {[low: number, high: number] | null} */ chosen) {
      label = name;
      const known = values.filter((value) => Number.isFinite(value));
      element.hidden = known.length < 2 || Math.min(...known) === Math.max(...known);
      if (element.hidden) return;
      [min, max] = [Math.min(...known), Math.max(...known)];
      const counts = new Array(binCount).fill(0);
      for (const value of known) counts[Math.min(binCount - 1, Math.floor(((value - min) / (max - min)) * binCount))] += 1;
      const maxCount = Math.max(...counts);
      barElements.forEach((bar, i) => {
        // The square root keeps small counts visible.
        bar.style.height = counts[i] ? `${Math.max(8, 100 * Math.sqrt(counts[i] / maxCount))}%` : "0";
      });
      const [low, high] = chosen ? [Math.max(min, chosen[0]), Math.min(max, chosen[1])] : [min, max];
      range.set({ min, max, low: Math.min(low, high), high: Math.max(low, high) });
      markOutside(low, high);
      showEnds(low, high);
    },
  };
}
