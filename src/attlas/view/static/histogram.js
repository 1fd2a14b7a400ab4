// How a statistic is spread over the heads, with a range that filters them.

import { make } from "./elements.js";
import { digits } from "./numbers.js";
import { createRange } from "./range.js";
import { t } from "./words.js";

const bins = 32;

export function createHistogram(onRange) {
  let [min, max] = [0, 1];
  let label = "";
  const bars = make("div", { class: "histogram-bars", "aria-hidden": "true" });
  for (let i = 0; i < bins; i++) bars.append(make("i"));
  const range = createRange({
    label: t("Heads whose statistic is within"),
    names: [t("from"), t("to")],
    step: () => (max - min) / 100 || 0.01,
    say: (value) => `${label} ${digits(value)}`,
    onInput: (low, high) => {
      shade(low, high);
      words(low, high);
      onRange(low <= min && high >= max ? null : [low, high]);
    },
  });
  const ends = [make("span"), make("span", { class: "middle" }), make("span")];
  const element = make(
    "div",
    { class: "histogram" },
    make("div", { class: "histogram-plot" }, bars, range.element),
    make("div", { class: "histogram-ends" }, ...ends),
  );
  function shade(low, high) {
    const width = (max - min) / bins;
    [...bars.children].forEach((bar, i) => {
      const [from, to] = [min + i * width, min + (i + 1) * width];
      bar.classList.toggle("out", to <= low || from >= high);
    });
  }
  function words(low, high) {
    let precision = 3;
    while (precision < 9 && digits(min, precision) === digits(max, precision)) precision += 1;
    ends[0].textContent = digits(min, precision);
    ends[2].textContent = digits(max, precision);
    ends[1].textContent = low > min || high < max ? t("{0} to {1}", digits(low), digits(high)) : "";
  }
  return {
    element,
    set(name, values, chosen) {
      label = name;
      const known = values.filter((value) => Number.isFinite(value));
      element.hidden = known.length < 2 || Math.min(...known) === Math.max(...known);
      if (element.hidden) return;
      [min, max] = [Math.min(...known), Math.max(...known)];
      const counts = new Array(bins).fill(0);
      for (const value of known) counts[Math.min(bins - 1, Math.floor(((value - min) / (max - min)) * bins))] += 1;
      const most = Math.max(...counts);
      [...bars.children].forEach((bar, i) => {
        // The root keeps a single head visible beside a bin of hundreds.
        bar.style.height = counts[i] ? `${Math.max(8, 100 * Math.sqrt(counts[i] / most))}%` : "0";
      });
      const [low, high] = chosen ? [Math.max(min, chosen[0]), Math.min(max, chosen[1])] : [min, max];
      range.set({ min, max, low: Math.min(low, high), high: Math.max(low, high) });
      shade(low, high);
      words(low, high);
    },
  };
}
