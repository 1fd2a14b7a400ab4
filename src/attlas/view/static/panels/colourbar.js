// The colour bar: which weights get which colours, and how cells become one pixel.

import { getContext } from "../map/canvas.js";
import { fitSigned, fromBar, getBarOffset, getColour, getDivergingColours, getRange, getSignedReach, getWeightColours, setSignedReach, toBar } from "../map/colour.js";
import { getMixedColour, makeHueBar } from "../map/hues.js";
import { listColoured } from "../data/coloured.js";
import { make, createPicker, createSegmented } from "./elements.js";
import { formatNumber, formatSuperscript, computeTicks, formatInteger } from "../data/numbers.js";
import { createRange } from "./range.js";
import { PALETTES, isContrast } from "../data/state.js";
import { WEIGHTED, formatSigned, isSigned, isWeighted, getNumberName, getUnit } from "../data/weighting.js";
import { t } from "../words/words.js";

const MIN_LOG2 = -64; // log2 of the smallest weight that a code tells apart
const FIT_OCTAVES = 16; // octaves below the largest weight in view that "fit" shows
const RATIO_OCTAVES = 12; // octaves to each side that the bar of a comparison shows

/**
 * The range over which the bar is drawn: wider than the chosen range, so that its handles can be dragged outwards.
 *
 * @param {State} state
 * @returns {BarRange}
 */
export function getBarRange(state) {
  const { low, high } = getRange(state);
  if (isSigned(state)) return { min: -getSignedReach(state).end, max: getSignedReach(state).end };
  if (state.colour === "log") return { min: low < -40 ? MIN_LOG2 : Math.min(-24, Math.floor(low / 8) * 8), max: 0 };
  let max = 1;
  // 1, 0.5, 0.2, 0.1, ...: the smallest that leaves a fifth of the bar free.
  for (const smaller of generateSteps()) {
    if (smaller < high * 1.25) break;
    max = smaller;
  }
  return { min: 0, max };
}
/**
 * The range over which the bar of a comparison is drawn; 0 is in the middle.
 *
 * @param {Pick<State, "compare" | "difference">} state
 * @param {number | null} [reach]
 * @returns {BarRange}
 */
export function getContrastBarRange({ compare, difference }, reach = null) {
  let max = reach ?? RATIO_OCTAVES;
  if (compare === "difference" && reach === null) {
    max = 1;
    for (const smaller of generateSteps()) if (smaller >= difference * 1.25) max = smaller;
  }
  return { min: -max, max };
}

/**
 * The ticks of the bar of a comparison.
 *
 * @param {State} state
 * @param {Pick<BarRange, "max">} bar
 * @returns {Tick[]}
 */
export function getContrastTicks({ compare, ...state }, { max }) {
  const formatTick = (/** @type {number} */ value) => {
    if (value === 0) return t("equal");
    return compare === "ratio" ? `${value > 0 ? "" : "1/"}${formatNumber(2 ** Math.abs(value), 2)}×` : `${value > 0 ? "+" : "−"}${formatNumber(Math.abs(value) * getUnit(state), 2)}`;
  };
  return [-max, -max / 2, 0, max / 2, max].map((at) => ({ at, text: formatTick(at) }));
}

function* generateSteps() {
  for (let power = 0; power > -12; power--) {
    for (const factor of [1, 0.5, 0.2]) yield factor * 10 ** power;
  }
}

/**
 * The ticks of the bar: [{at (a value of the scale), text}]; powers of ten on a log scale.
 *
 * @param {State} state
 * @param {BarRange} barRange
 * @param {number} width
 * @returns {Tick[]}
 */
export function getBarTicks(state, { min, max }, width) {
  const unit = getUnit(state);
  if (isSigned(state)) return getSignedTicks(state, max, width);
  if (state.colour === "linear") return computeTicks(unit * min, unit * max, width / 64).map((at) => ({ at: at / unit, text: at === 0 ? "0" : formatNumber(at, 2).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "") }));
  const decades = (max - min) / Math.log2(10);
  const powerStep = Math.max(1, Math.ceil(decades / Math.max(1, Math.floor(width / 52))));
  /** @type {Tick[]} */
  const marks = [];
  const shift = Math.log2(unit);
  for (let power = Math.floor(Math.log10(unit) + 1e-9); power * Math.log2(10) - shift >= min - 1e-9; power -= powerStep) {
    const text = power >= -2 && power < 5 ? String(Number((10 ** power).toFixed(2))) : `10${formatSuperscript(power)}`;
    marks.push({ at: power * Math.log2(10) - shift, text });
  }
  return marks;
}

/**
 * The ticks of a bar of both signs: 0 in the middle, and the same sizes on both sides.
 *
 * @param {State} state
 * @param {number} max
 * @param {number} width
 * @returns {Tick[]}
 */
function getSignedTicks(state, max, width) {
  const unit = getUnit(state);
  const middle = [{ at: 0, text: "0" }];
  if (state.colour === "linear") {
    const sizes = computeTicks(0, unit * max, width / 128).filter((size) => size > 0);
    const getText = (/** @type {number} */ size) => formatNumber(size, 2).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
    return [...sizes.map((size) => ({ at: -size / unit, text: `−${getText(size)}` })).reverse(), ...middle, ...sizes.map((size) => ({ at: size / unit, text: `+${getText(size)}` }))];
  }
  const least = fromBar(1, state) * unit;
  const most = fromBar(max, state) * unit;
  const step = Math.max(1, Math.ceil(Math.log10(most / least) / Math.max(1, Math.floor(width / 2 / 52))));
  /** @type {Tick[]} */
  const ticks = [];
  for (let power = Math.floor(Math.log10(most)); 10 ** power > least; power -= step) {
    const at = toBar(10 ** power / unit, state);
    const text = power >= -2 && power < 5 ? String(Number((10 ** power).toFixed(2))) : `10${formatSuperscript(power)}`;
    ticks.unshift({ at: -at, text: `−${text}` });
    ticks.push({ at, text: `+${text}` });
  }
  return [...ticks.filter(({ at }) => at < 0), ...middle, ...ticks.filter(({ at }) => at > 0)];
}

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountColourbar(element, { store, transport, map, announce }) {
  let bar = { min: -24, max: 0 };
  /** @type {AbortController | null} */
  let fitRequest = null;
  const isComparison = () => isContrast(store.state.compare);
  const isLog = () => (isComparison() ? store.state.compare === "ratio" : store.state.colour === "log");

  const canvas = make("canvas", { class: "bar-canvas", height: 1, width: 256, "aria-hidden": "true" });
  const marker = make("i", { class: "bar-marker", hidden: true });
  const axis = make("div", { class: "bar-axis", "aria-hidden": "true" });
  const range = createRange({
    label: t("Colour range"),
    names: [t("lowest weight"), t("highest weight")],
    step: () => (isLog() ? 0.5 : (bar.max - bar.min) / 200),
    formatValue: (value) => (store.state.compare === "difference" ? formatNumber(value * getUnit(store.state), 2) : isComparison() ? t("{0} times", formatNumber(2 ** value, 2)) : `${getNumberName(store.state)} ${formatNumber(fromBar(value, store.state) * getUnit(store.state), 2)}`),
    onInput(low, high) {
      const { compare } = store.state;
      if (!isContrast(compare) && isSigned(store.state)) {
        const now = getSignedReach(store.state).reach;
        store.set(setSignedReach(Math.max(bar.max / 24, Math.abs(-low - now) > Math.abs(high - now) ? -low : high), store.state));
      } else if (!isContrast(compare)) store.set({ low, high });
      // The range of a comparison is symmetric: the moved handle sets both sides.
      else {
        const now = store.state[compare];
        store.set({ [compare]: Math.max(bar.max / 24, Math.abs(-low - now) > Math.abs(high - now) ? -low : high) });
      }
    },
    onDone: () => render(),
  });
  const readingElement = make("output", { class: "bar-read", "aria-live": "off" });
  const fit = make("button", { type: "button", class: "text-button", title: t("Fit the range to the largest weight in view") }, t("fit"));
  const reset = make("button", { type: "button", class: "text-button", title: t("The range that the page began with") }, t("reset"));
  const titleElement = make("span", { class: "bar-title" }, t("weight"));
  const scale = createSegmented(
    t("Colour scale"),
    [
      { value: "log", text: t("log"), title: t("Colour by the logarithm of the weight") },
      { value: "linear", text: t("linear"), title: t("Colour by the weight itself") },
    ],
    setScale,
  );
  const pool = createSegmented(
    t("A pixel of many cells shows"),
    [
      { value: "mean", text: t("mean"), title: t("A pixel of many cells shows the mean over its allowed pairs") },
      { value: "max", text: t("max"), title: t("A pixel of many cells shows the largest weight") },
    ],
    (value) => store.set({ pool: value }),
  );
  const palette = createPicker(t("Palette"), PALETTES.map((value) => ({ value, text: value })), (value) => store.set({ palette: value }));
  const weightedVariants = /** @type {Variant[]} */ (Object.keys(store.state.info?.units ?? {}));
  const variants = [{ value: /** @type {Variant} */ ("plain"), text: t("weight") }, ...weightedVariants.map((value) => ({ value, text: WEIGHTED[value] }))];
  const numbers = createPicker(t("Numbers"), variants, (variant) => {
    store.set({ variant, low: null, high: null });
    announce(getNumberName({ variant }));
  });
  numbers.select.title = t("‖A v‖: each weight times the norm of its value. ‖A v W‖: of its value behind the output projection, what the key adds to the residual stream.");
  const sink = make("input", { type: "checkbox" });
  const sinkLabel = make("label", { class: "sink" }, sink, make("span", {}, t("without first key")));
  sink.addEventListener("change", () => {
    store.set({ variant: sink.checked ? "nosink" : "plain" });
    announce(sink.checked ? t("The first key is left out, rows are renormalised") : t("All keys are shown"));
  });

  const plot = make("div", { class: "bar-plot" }, make("div", { class: "bar-strip" }, canvas, range.element, marker), axis);
  element.classList.add("colourbar");
  element.append(
    make("div", { class: "bar" }, make("div", { class: "bar-words" }, titleElement, readingElement), plot, make("div", { class: "bar-buttons" }, fit, reset)),
    make(
      "div",
      { class: "bar-controls" },
      createGroup(t("Colours"), scale.element, palette.element),
      createGroup(t("Pixel"), pool.element),
      numbers.select.length > 1 ? createGroup(t("Numbers"), numbers.element) : null,
      sinkLabel,
    ),
  );

  /** @param {Scale} colour */
  function setScale(colour) {
    const { state } = store;
    if (colour === state.colour) return;
    const { high } = getRange(state);
    const log = getRange({ ...state, colour: "log", low: null, high: null });
    const newRange = colour === "linear" ? { low: 0, high: 2 ** high } : { low: log.low, high: Math.max(Math.log2(high), log.low + 1) };
    store.set({ colour, ...newRange });
  }
  reset.addEventListener("click", () => store.set({ low: null, high: null, ratio: 4, difference: 0.1 }));
  fit.addEventListener("click", async () => {
    fitRequest?.abort();
    fitRequest = new AbortController();
    const { signal } = fitRequest;
    const { state } = store;
    fit.disabled = true;
    try {
      const { r0, r1, c0, c1 } = map.visibleRegion();
      const { entry, head, batch, variant } = state;
      const { json } = await transport.get("top", { entry, head, batch, variant, k: 1, r0, r1, c0, c1 }, { signal });
      const largestNumber = Math.abs(json.cells[0]?.[2] ?? 0);
      const largest = largestNumber / getUnit(state);
      if (signal.aborted || !(largest > 0)) return;
      if (isSigned(store.state)) store.set(fitSigned(largest, store.state.colour));
      else if (store.state.colour === "linear") store.set({ low: 0, high: largest });
      else {
        const high = Math.min(0, Math.ceil(4 * Math.log2(largest)) / 4);
        store.set({ low: Math.max(MIN_LOG2, high - FIT_OCTAVES), high });
      }
      announce(t("The largest weight in view is {0}", isSigned(state) ? formatSigned(json.cells[0][2]) : formatNumber(largestNumber)));
    } catch (error) {
      if (!signal.aborted) announce(error.message);
    } finally {
      fit.disabled = false;
    }
  });

  const getShownRange = (/** @type {State} */ state) => {
    if (isContrast(state.compare)) return { low: -state[state.compare], high: state[state.compare] };
    if (!isSigned(state)) return getRange(state);
    const { reach } = getSignedReach(state);
    return { low: -reach, high: reach };
  };
  /** @param {State} state */
  function paint(state) {
    const context = getContext(canvas);
    const hues = state.compare === "colours" ? listColoured(state) : [];
    canvas.height = Math.max(1, hues.length);
    canvas.style.imageRendering = hues.length ? "pixelated" : ""; // the bars of the heads do not blend
    hues.forEach((_, index) => context.putImageData(new ImageData(makeHueBar(index, state, bar, 256), 256, 1), 0, index));
    if (hues.length) return;
    const { low, high } = getShownRange(state);
    const contrast = isContrast(state.compare);
    const bytes = contrast ? getDivergingColours(state) : getWeightColours(state);
    const image = context.createImageData(256, 1);
    for (let x = 0; x < 256; x++) {
      const value = bar.min + ((x + 0.5) / 256) * (bar.max - bar.min);
      const offset = contrast ? 3 * Math.round(255 * Math.min(1, Math.max(0, (value - low) / (high - low)))) : getBarOffset(value, state);
      image.data.set([...bytes.slice(offset, offset + 3), 255], 4 * x);
    }
    context.putImageData(image, 0, 0);
  }
  const getPosition = (/** @type {number} */ value) => Math.min(1, Math.max(0, (value - bar.min) / (bar.max - bar.min)));
  /** @param {Tick[]} marks */
  function showMarks(marks) {
    axis.replaceChildren(
      ...marks.map(({ at, text }) => {
        const mark = make("span", {}, text);
        mark.style.left = `${100 * getPosition(at)}%`;
        mark.classList.toggle("first", getPosition(at) < 0.02);
        mark.classList.toggle("last", getPosition(at) > 0.98);
        return mark;
      }),
    );
  }
  function showReading() {
    const { state } = store;
    const { reading } = state;
    marker.hidden = reading === null || isContrast(state.compare) || Number.isNaN(reading);
    readingElement.textContent = "";
    if (marker.hidden || reading === null) return;
    marker.style.left = `${100 * getPosition(toBar(reading / getUnit(state), state))}%`;
    const patch = make("i", { class: "patch" });
    patch.style.background = state.compare === "colours" ? getMixedColour([reading], state, [state.entry]) : getColour(reading, state);
    readingElement.replaceChildren(patch, isSigned(state) ? formatSigned(reading) : formatNumber(reading));
  }
  /** @param {State} state */
  function showTitle(state) {
    const text = formatTitle(state, state.grain.side);
    if (titleElement.textContent !== text) titleElement.textContent = text;
  }
  function render() {
    const { state } = store;
    const ratio = isContrast(state.compare);
    element.classList.toggle("is-ratio", ratio);
    if (!range.dragging()) bar = ratio ? getContrastBarRange(state) : getBarRange(state);
    const width = plot.clientWidth || 320;
    paint(state);
    showTitle(state);
    if (ratio) showMarks(getContrastTicks(state, bar).filter((_, each) => width >= 260 || each % 2 === 0));
    else showMarks(getBarTicks(state, bar, width));
    range.set({ ...bar, ...getShownRange(state) });
    scale.set(state.colour, ratio ? { log: t("A comparison has a scale of its own"), linear: t("A comparison has a scale of its own") } : {});
    const { only } = state.info ?? {};
    pool.set(state.pool, !only ? {} : only.pool === "mean" ? { max: t("This file holds blocks as means only") } : { mean: t("This file holds blocks as maxima only") });
    palette.set(state.palette);
    palette.select.disabled = ratio || state.compare === "colours" || isSigned(state);
    palette.select.title = isSigned(state) && !ratio ? t("Weights of both signs have colours of their own") : "";
    fit.disabled = ratio;
    const entry = state.info?.entries[state.entry];
    sink.checked = state.variant === "nosink";
    const weighted = isWeighted(state);
    numbers.set(weighted ? state.variant : "plain");
    for (const option of numbers.select.options) option.disabled = Boolean(only) || (option.value in WEIGHTED && !(option.value in (entry?.largest_norms ?? {})));
    sink.disabled = Boolean(only) || weighted || entry?.softmax === false || (entry !== undefined && entry.n < 2);
    sinkLabel.title = entry?.softmax === false ? t("The rows of this matrix are no softmax: they cannot be renormalised") : only ? only.variant === "nosink" ? t("This file holds rows without the first key only") : t("This file holds rows with the first key only") : t("Leave out the first key and divide each row by what is left");
    showReading();
  }

  const unsubscribeReading = store.on(["reading"], showReading);
  const unsubscribeGrain = store.on(["grain"], showTitle);
  const unsubscribe = store.on(["info", "entry", "head", "batch", "pool", "variant", "second", "more", "compare", "colour", "low", "high", "ratio", "difference", "palette", "dark"], render);
  const resizeObserver = new ResizeObserver(render);
  resizeObserver.observe(plot);
  render();
  return {
    destroy() {
      unsubscribeReading();
      unsubscribeGrain();
      unsubscribe();
      resizeObserver.disconnect();
      fitRequest?.abort();
      element.replaceChildren();
    },
  };
}

/**
 * The title of the bar: what the colours show.
 *
 * @param {State} state
 * @param {number} side
 */
function formatTitle(state, side) {
  if (isContrast(state.compare)) return state.compare === "ratio" ? t("first ÷ second") : t("first − second");
  if (side === 1) return getNumberName(state);
  if (isWeighted(state)) return `${getNumberName(state)}, ${t(state.pool)}`;
  if (isSigned(state) && state.pool === "max") return t("largest size of {0} × {1}", formatInteger(side), formatInteger(side));
  return state.pool === "max" ? t("largest of {0} × {1}", formatInteger(side), formatInteger(side)) : t("mean of {0} × {1}", formatInteger(side), formatInteger(side));
}

/**
 * @param {string} title
 * @param {...Child} parts
 */
function createGroup(title, ...parts) {
  return make("div", { class: "control" }, make("span", { class: "control-title", "aria-hidden": "true" }, title), ...parts);
}
