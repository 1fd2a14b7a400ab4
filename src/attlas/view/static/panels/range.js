// A range slider with two handles, over a colour bar or a histogram.

import { clamp } from "../map/geometry.js";
import { make } from "./elements.js";
import { t } from "../words/words.js";

const pageSteps = 10; // steps that Page Up and Page Down take

/** @param {{ label: string, names: [low: string, high: string], step: () => number, formatValue: (value: number) => string, onInput: (low: number, high: number) => void, onDone?: (low: number, high: number) => void }} options */
export function createRange({ label, names, step, formatValue, onInput, onDone = () => {} }) {
  let [min, max, low, high] = [0, 1, 0, 1];
  /** @type {{ which: number } | { which?: undefined, from: number, low: number, high: number } | null} */
  let drag = null;
  const band = make("div", { class: "range-band" });
  const handles = names.map((name, which) =>
    make("div", {
      class: "range-handle",
      role: "slider",
      tabIndex: 0,
      "data-which": which ? "high" : "low",
      "aria-label": t("{0}: {1}", label, name),
      "aria-orientation": "horizontal",
    }),
  );
  const element = make("div", { class: "range" }, band, ...handles);

  const getShare = (/** @type {number} */ value) => (max > min ? Math.min(1, Math.max(0, (value - min) / (max - min))) : 0);
  const update = () => {
    const [a, b] = [getShare(low), getShare(high)];
    band.style.left = `${100 * a}%`;
    band.style.width = `${100 * (b - a)}%`;
    handles.forEach((handle, which) => {
      const value = which ? high : low;
      handle.style.left = `${100 * (which ? b : a)}%`;
      handle.setAttribute("aria-valuemin", String(which ? low : min));
      handle.setAttribute("aria-valuemax", String(which ? max : high));
      handle.setAttribute("aria-valuenow", String(value));
      handle.setAttribute("aria-valuetext", formatValue(value));
    });
  };
  const setValues = (/** @type {number} */ nextLow, /** @type {number} */ nextHigh) => {
    if (nextLow === low && nextHigh === high) return;
    [low, high] = [nextLow, nextHigh];
    update();
    onInput(low, high);
  };
  const move = (/** @type {number} */ which, /** @type {number} */ value) => {
    const gap = step();
    if (which) setValues(low, clamp(value, Math.min(low + gap, max), max));
    else setValues(clamp(value, min, Math.max(high - gap, min)), high);
  };
  const getValue = (/** @type {PointerEvent} */ event) => {
    const box = element.getBoundingClientRect();
    return min + ((event.clientX - box.left) / box.width) * (max - min);
  };

  element.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    event.preventDefault();
    const box = element.getBoundingClientRect();
    const pixels = [low, high].map((value) => box.left + getShare(value) * box.width - event.clientX);
    const near = Math.min(...pixels.map(Math.abs)) < 12;
    const value = getValue(event);
    if (!near && value > low && value < high) drag = { from: value, low, high };
    else {
      const [a, b] = pixels.map(Math.abs);
      // Both handles are at the same distance: the side of the pointer decides.
      drag = { which: a === b ? Number(value > low) : Number(b < a) };
      handles[drag.which].focus();
      if (!near) move(drag.which, value);
    }
    element.setPointerCapture(event.pointerId);
  });
  element.addEventListener("pointermove", (event) => {
    if (drag === null) return;
    const value = getValue(event);
    if (drag.which !== undefined) move(drag.which, value);
    else {
      const shift = clamp(value - drag.from, min - drag.low, max - drag.high);
      setValues(drag.low + shift, drag.high + shift);
    }
  });
  const endDrag = () => {
    if (drag === null) return;
    drag = null;
    onDone(low, high);
  };
  element.addEventListener("pointerup", endDrag);
  element.addEventListener("pointercancel", endDrag);
  element.addEventListener("lostpointercapture", endDrag);
  handles.forEach((handle, which) =>
    handle.addEventListener("keydown", (event) => {
      const value = which ? high : low;
      const next = {
        ArrowLeft: value - step(),
        ArrowDown: value - step(),
        ArrowRight: value + step(),
        ArrowUp: value + step(),
        PageDown: value - pageSteps * step(),
        PageUp: value + pageSteps * step(),
        Home: which ? low : min,
        End: which ? max : high,
      }[event.key];
      if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation(); // the arrows would move the map
      move(which, next);
      onDone(low, high);
    }),
  );
  return {
    element,
    dragging: () => drag !== null,
    set(/** @type {{ min?: number, max?: number, low?: number, high?: number }} */ next) {
      if (drag !== null) return; // a drag is not interrupted
      ({ min, max, low, high } = { min, max, low, high, ...next });
      update();
    },
  };
}
