// Several heads in one map, a colour each: a cell has the colour of the head that gives it most, or a mixture.

import { MASKED, PENDING, createStrength, fromBar, getCodeTables } from "./colour.js";
import { hexToOklab, oklabToLinear } from "./oklab.js";
import { getUnit } from "../data/weighting.js";

// Four colours of the largest weights, which protanopes, deuteranopes and tritanopes tell apart too, and the paper.
const HUES = {
  light: ["#0a4ea3", "#e8590c", "#12a594", "#6b1d5c"],
  dark: ["#4f9dff", "#ffa23d", "#d9f7a0", "#d35fc0"],
};
const PAPER = { light: "#f4f8f6", dark: "#141c26" };
const BYTE_STEPS = 4096; // of linear light, for which bytes are looked up

/** @type {Uint8Array | null} */
let bytesOfLight = null;
// The byte of each step of linear light, from 0 to 1.
function getBytesOfLight() {
  bytesOfLight ??= Uint8Array.from({ length: BYTE_STEPS + 1 }, (_, step) => {
    const light = step / BYTE_STEPS;
    return Math.round(255 * (light <= 0.0031308 ? 12.92 * light : 1.055 * light ** (1 / 2.4) - 0.055));
  });
  return bytesOfLight;
}

/** @param {number} light */
const toStep = (light) => (light <= 0 ? 0 : light >= 1 ? BYTE_STEPS : Math.round(BYTE_STEPS * light));

/**
 * The colour of the largest weights of each head, in order: "#rrggbb".
 *
 * @param {Pick<State, "dark">} state
 */
export const getHues = ({ dark }) => HUES[dark ? "dark" : "light"];

/**
 * The colours of a state, in Oklab: the paper, and one for each head.
 *
 * @param {Pick<State, "dark">} state
 */
const getPoints = (state) => ({ paper: hexToOklab(PAPER[state.dark ? "dark" : "light"]), ends: getHues(state).map(hexToOklab) });

/**
 * What mixes the codes of heads of some entries: how strong each code is, and its weight.
 *
 * @param {State} state
 * @param {number[]} entries
 * @returns {MixtureTable}
 */
export function makeMixture(state, entries) {
  const { weight, log2 } = getCodeTables(true);
  const tables = entries.map((entry) => {
    const getStrength = createStrength({ ...state, entry });
    const unit = getUnit({ ...state, entry }) / getUnit(state);
    const strengths = new Float32Array(PENDING + 1);
    const weights = new Float32Array(PENDING + 1);
    for (let code = MASKED + 1; code < PENDING; code++) {
      strengths[code] = getStrength(weight[code], log2[code]);
      weights[code] = unit * weight[code];
    }
    return { strengths, weights };
  });
  return { tables, ...getPoints(state) };
}

/**
 * A colour in Oklab, as a pixel: between the paper and the mean of the colours, by their weights.
 *
 * @param {{ paper: number[], ends: number[][] }} points
 * @param {number} strength from 0, the paper, to 1
 * @param {(head: number) => number} getWeight
 * @param {number} heads
 * @returns {[red: number, green: number, blue: number]}
 */
function mix({ paper, ends }, strength, getWeight, heads) {
  let [total, l, a, b] = [0, 0, 0, 0];
  for (let head = 0; head < heads; head++) {
    const weight = getWeight(head);
    const end = ends[head];
    total += weight;
    l += weight * end[0];
    a += weight * end[1];
    b += weight * end[2];
  }
  const share = total > 0 ? strength / total : 0;
  const rest = total > 0 ? 1 - strength : 1;
  const light = oklabToLinear(rest * paper[0] + share * l, rest * paper[1] + share * a, rest * paper[2] + share * b);
  const bytes = getBytesOfLight();
  return [bytes[toStep(light[0])], bytes[toStep(light[1])], bytes[toStep(light[2])]];
}

/**
 * Mix the tiles of some heads into the pixels of one; masked in all of them, or missing in one: transparent.
 *
 * @param {Uint32Array} words
 * @param {Uint16Array[]} codes
 * @param {MixtureTable} table
 */
export function fillMixture(words, codes, table) {
  const heads = codes.length;
  const { tables } = table;
  let place = 0;
  const getWeight = (/** @type {number} */ head) => tables[head].weights[codes[head][place]];
  for (place = 0; place < words.length; place++) {
    let strength = 0;
    let isMasked = true;
    let isPending = false;
    for (let head = 0; head < heads; head++) {
      const code = codes[head][place];
      if (code !== MASKED) isMasked = false;
      if (code === PENDING) isPending = true;
      strength = Math.max(strength, tables[head].strengths[code]);
    }
    if (isMasked || isPending) words[place] = 0;
    else {
      const [red, green, blue] = mix(table, strength, getWeight, heads);
      words[place] = (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
    }
  }
}

/**
 * The colour of a cell as CSS text, from the weight that each head gives it.
 *
 * @param {number[]} weights
 * @param {State} state
 * @param {number[]} entries
 */
export function getMixedColour(weights, state, entries) {
  const strengths = weights.map((weight, head) => {
    const place = { ...state, entry: entries[head] };
    const share = weight / getUnit(place);
    return share > 0 ? createStrength(place)(share, Math.log2(share)) : 0;
  });
  const [red, green, blue] = mix(getPoints(state), Math.max(0, ...strengths), (head) => weights[head], weights.length);
  return `rgb(${red} ${green} ${blue})`;
}

/**
 * The colour bar of one head, from the paper to its largest weights: RGBA bytes of `steps` pixels.
 *
 * @param {number} head
 * @param {State} state
 * @param {BarRange} bar
 * @param {number} steps
 */
export function makeHueBar(head, state, { min, max }, steps) {
  const { paper, ends } = getPoints(state);
  const getStrength = createStrength(state);
  const bytes = new Uint8ClampedArray(4 * steps);
  for (let step = 0; step < steps; step++) {
    const weight = fromBar(min + ((step + 0.5) / steps) * (max - min), state);
    bytes.set([...mix({ paper, ends: [ends[head]] }, getStrength(weight, Math.log2(weight)), () => 1, 1), 255], 4 * step);
  }
  return bytes;
}
