// Conversions between sRGB and Oklab, for palettes whose steps look equal.

/** @param {number} x */
const cube = (x) => x * x * x;
/**
 * An sRGB channel, 0 to 1, as linear light.
 *
 * @param {number} c
 */
export const toLinear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
/** @param {number} c */
const encodeSrgb = (c) => {
  const bounded = Math.min(1, Math.max(0, c));
  return Math.round(255 * (bounded <= 0.0031308 ? 12.92 * bounded : 1.055 * bounded ** (1 / 2.4) - 0.055));
};

/**
 * A colour "#rrggbb" in Oklab, where equal steps look equal.
 *
 * @param {string} hex
 */
export function hexToOklab(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => toLinear(parseInt(hex.slice(i, i + 2), 16) / 255));
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

/**
 * The linear light of a colour in Oklab: red, green and blue, which lie outside of 0 to 1 where no screen has the colour.
 *
 * @param {number} L
 * @param {number} a
 * @param {number} b
 */
export function oklabToLinear(L, a, b) {
  const l = cube(L + 0.3963377774 * a + 0.2158037573 * b);
  const m = cube(L - 0.1055613458 * a - 0.0638541728 * b);
  const s = cube(L - 0.0894841775 * a - 1.291485548 * b);
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
}

/**
 * The three bytes of a colour in Oklab.
 *
 * @param {number[]} colour
 */
export const oklabToSrgb = ([L, a, b]) => oklabToLinear(L, a, b).map(encodeSrgb);
