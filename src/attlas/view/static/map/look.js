// The theme: its choice, its colours for canvases, and the patterns and tables made of them.

import { getContext } from "./canvas.js";
import { t } from "../words/words.js";
import { PENDING, makeDifference, makeLut, makeRatioLut } from "./colour.js";
import { makeMixture } from "./hues.js";

const NAMES = {
  paper: "--paper", card: "--card", ink: "--ink", soft: "--soft", faint: "--faint", line: "--line", land: "--land", hatch: "--hatch",
  pending: "--pending", empty: "--empty", frame: "--frame", accent: "--accent", sea: "--sea", track: "--track", trackLight: "--track-light", trackBelow: "--track-below", trackBelowLight: "--track-below-light",
  spanA: "--span-a", spanB: "--span-b", hair: "--hair", shade: "--shade", pin: "--pin", sans: "--sans", mono: "--mono",
};

/**
 * Read the custom properties of style.css at an element.
 *
 * @param {Element} element
 */
export function readLook(element) {
  const style = getComputedStyle(element);
  const values = Object.entries(NAMES).map(([name, token]) => [name, style.getPropertyValue(token).trim()]);
  return /** @type {Record<keyof typeof NAMES, string>} */ (Object.fromEntries(values));
}

/**
 * A tile of the hatching of masked areas, for a pattern.
 *
 * @param {Look} look
 * @param {number} dpr
 */
export function createHatching(look, dpr) {
  const side = Math.round(7 * dpr);
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const ctx = getContext(canvas);
  ctx.fillStyle = look.land;
  ctx.fillRect(0, 0, side, side);
  ctx.strokeStyle = look.hatch;
  ctx.lineWidth = dpr;
  ctx.beginPath();
  for (const shift of [-side, 0, side]) {
    ctx.moveTo(shift - 1, side + 1);
    ctx.lineTo(shift + side + 1, -1);
  }
  ctx.stroke();
  return { canvas, side };
}

/** @param {string} colour */
const toPixel = (colour) => {
  const ctx = getContext(document.createElement("canvas"));
  ctx.fillStyle = colour;
  ctx.fillRect(0, 0, 1, 1);
  return new Uint32Array(ctx.getImageData(0, 0, 1, 1).data.buffer)[0];
};

const VEIL_ALPHA = 150; // of 255: opacity over the replacement of a tile

let versions = 0;

/**
 * A function of numbers that computes each result once.
 *
 * @template R
 * @param {(...numbers: number[]) => R} compute
 * @returns {(...numbers: number[]) => R}
 */
function keepResults(compute) {
  /** @type {Map<string, R>} */
  const results = new Map();
  return (...numbers) => {
    const key = numbers.join();
    const result = results.get(key) ?? compute(...numbers);
    results.set(key, result);
    return result;
  };
}

/**
 * The colour tables of tiles. The version tells whether a tile was painted with older tables.
 *
 * @param {State} state
 * @param {Look} look
 * @returns {Palette}
 */
export function makePalette(state, look) {
  const pending = ((toPixel(look.pending) & 0xffffff) | (VEIL_ALPHA << 24)) >>> 0; // half covers the replacement below it
  const lut = keepResults((/** @type {number} */ entry) => {
    const table = makeLut({ ...state, entry });
    table[PENDING] = pending;
    return table;
  });
  const difference = keepResults((/** @type {number} */ first, /** @type {number} */ second) => makeDifference(state, first, second));
  const mixture = keepResults((/** @type {number[]} */ ...entries) => makeMixture(state, entries));
  return { version: ++versions, lut, mixture: state.compare === "colours" ? mixture : null, ratio: state.compare === "ratio" ? makeRatioLut(state) : null, difference: state.compare === "difference" ? difference : null };
}

/**
 * Keep the theme of the page at the chosen one, or at that of the system. Returns the function that ends it.
 *
 * @param {HTMLElement} root
 * @param {ThemeStore} store
 */
export function followTheme(root, store) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const { theme } = store.state;
    const dark = theme === "auto" ? system.matches : theme === "dark";
    root.dataset.theme = dark ? "dark" : "light";
    store.set({ dark });
  };
  show();
  system.addEventListener("change", show);
  const unsubscribe = store.on("theme", show);
  return () => {
    unsubscribe();
    system.removeEventListener("change", show);
  };
}

/**
 * Let a button show the chosen theme, and choose the next one. Returns the function that ends it.
 *
 * @param {HTMLButtonElement} button
 * @param {ThemeStore} store
 */
export function connectThemeButton(button, store) {
  /** @type {Record<Theme, Theme>} */
  const next = { auto: "light", light: "dark", dark: "auto" };
  button.addEventListener("click", () => store.set({ theme: next[store.state.theme] }));
  const show = (/** @type {Pick<State, "theme">} */ { theme }) => {
    const label = t("Theme: {0}", { auto: t("following the system"), light: t("light"), dark: t("dark") }[theme]);
    button.textContent = { auto: "◐", light: "○", dark: "●" }[theme];
    button.title = label;
    button.setAttribute("aria-label", label);
  };
  show(store.state);
  return store.on("theme", show);
}
