// The theme: its choice, its colours for canvases, and the patterns and tables made of them.

import { t } from "../words/words.js";
import { PENDING, makeDifference, makeLut, makeRatioLut } from "./colour.js";

const NAMES = {
  paper: "--paper", card: "--card", ink: "--ink", soft: "--soft", faint: "--faint", line: "--line", land: "--land", hatch: "--hatch",
  pending: "--pending", empty: "--empty", frame: "--frame", accent: "--accent", sea: "--sea", track: "--track", trackLight: "--track-light",
  spanA: "--span-a", spanB: "--span-b", hair: "--hair", shade: "--shade", pin: "--pin", sans: "--sans", mono: "--mono",
};

/** Read the custom properties of style.css at an element. */
export function readLook(element) {
  const style = getComputedStyle(element);
  return Object.fromEntries(Object.entries(NAMES).map(([name, token]) => [name, style.getPropertyValue(token).trim()]));
}

/** A tile of the hatching of masked areas, for a pattern. */
export function createHatching(look, dpr) {
  const side = Math.round(7 * dpr);
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = side;
  const ctx = canvas.getContext("2d");
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

const toPixel = (colour) => {
  const ctx = document.createElement("canvas").getContext("2d");
  ctx.fillStyle = colour;
  ctx.fillRect(0, 0, 1, 1);
  return new Uint32Array(ctx.getImageData(0, 0, 1, 1).data.buffer)[0];
};

const VEIL_ALPHA = 150; // of 255: opacity over the replacement of a tile

let versions = 0;

/** The colour tables of tiles. The version tells whether a tile was painted with older tables. */
export function makePalette(state, look) {
  const lut = makeLut(state);
  lut[PENDING] = (toPixel(look.pending) & 0xffffff) | (VEIL_ALPHA << 24); // half covers the replacement below it
  return { version: ++versions, lut, ratio: state.compare === "ratio" ? makeRatioLut(state) : null, difference: state.compare === "difference" ? makeDifference(state) : null };
}

/** Keep the theme of the page at the chosen one, or at that of the system. Returns the function that ends it. */
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

/** Let a button show the chosen theme, and choose the next one. Returns the function that ends it. */
export function connectThemeButton(button, store) {
  button.addEventListener("click", () => store.set({ theme: { auto: "light", light: "dark", dark: "auto" }[store.state.theme] }));
  const show = ({ theme }) => {
    const label = t("Theme: {0}", { auto: t("following the system"), light: t("light"), dark: t("dark") }[theme]);
    button.textContent = { auto: "◐", light: "○", dark: "●" }[theme];
    button.title = label;
    button.setAttribute("aria-label", label);
  };
  show(store.state);
  return store.on("theme", show);
}
