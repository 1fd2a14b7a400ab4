// Several heads in one map: how their colours mix, and which heads have one.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { encode } from "../../../src/attlas/view/static/map/colour.js";
import { fillMixture, getHues, getMixedColour, makeHueBar, makeMixture } from "../../../src/attlas/view/static/map/hues.js";
import { hexToOklab } from "../../../src/attlas/view/static/map/oklab.js";
import { listColoured, readMore, toggleColoured, writeMore } from "../../../src/attlas/view/static/data/coloured.js";
import { listPackedHeads, createPackQuery } from "../../../src/attlas/view/static/data/pack.js";
import { DEFAULTS, readHash, writeHash } from "../../../src/attlas/view/static/data/state.js";

const ENTRY = { n: 1000, m: 1000, heads: [0, 1, 2, 3] };
const state = (changes = {}) => ({ ...DEFAULTS, compare: "colours", info: { entries: [ENTRY, ENTRY] }, ...changes });
const parts = (css) => css.match(/\d+/g).map(Number);
const pixel = (word) => [word & 255, (word >> 8) & 255, (word >> 16) & 255];
const hex = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
const near = (a, b, most) => a.every((part, i) => Math.abs(part - b[i]) <= most);

test("one head alone has its own colour, the stronger the larger the weight", () => {
  for (const dark of [false, true]) {
    for (const [head, colour] of getHues({ dark }).entries()) {
      const weights = (weight) => [0, 1, 2, 3].map((each) => (each === head ? weight : 0));
      const get = (weight) => parts(getMixedColour(weights(weight), state({ dark }), [0, 0, 0, 0]));
      assert.ok(near(get(1), hex(colour), 1), `${colour}: ${get(1)}`);
      const distances = [1, 2 ** -4, 2 ** -8, 2 ** -12, 0].map((weight) => Math.hypot(...get(weight).map((part, i) => part - get(0)[i])));
      assert.deepEqual(distances, [...distances].sort((a, b) => b - a));
      assert.equal(distances.at(-1), 0);
    }
  }
});

test("a cell has the colour of the head that gives it more, and both are mixed by weight where they are alike", () => {
  const shown = state({ colour: "linear", low: 0, high: 1 });
  const [blue, orange] = getHues(shown).map(hexToOklab);
  const toLab = (css) => hexToOklab(`#${parts(css).map((part) => part.toString(16).padStart(2, "0")).join("")}`);
  const distance = (a, b) => Math.hypot(...a.map((part, i) => part - b[i]));
  const more = toLab(getMixedColour([1, 0.02], shown, [0, 0]));
  assert.ok(distance(more, blue) < 0.05);
  const half = toLab(getMixedColour([1, 1], shown, [0, 0]));
  assert.ok(distance(half, blue.map((part, i) => (part + orange[i]) / 2)) < 0.02);
  const shares = [0, 0.25, 0.5, 0.75, 1].map((share) => distance(toLab(getMixedColour([1 - share, share], state({ colour: "linear", low: 0, high: 0.5 }), [0, 0])), orange));
  assert.deepEqual(shares, [...shares].sort((a, b) => b - a));
});

test("a tile has the colour that the number of its cell has", () => {
  for (const scale of [{ colour: "log", low: -14, high: 0 }, { colour: "linear", low: 0, high: 0.4 }]) {
    for (const dark of [false, true]) {
      const shown = state({ dark, ...scale });
      const weights = Array.from({ length: 300 }, (_, k) => [2 ** (-0.05 * k), 2 ** (-15 + 0.05 * k), k % 3 ? 0.01 : 0]);
      const codes = [0, 1, 2].map((head) => Uint16Array.from(weights, (each) => encode(each[head])));
      const words = new Uint32Array(300);
      fillMixture(words, codes, makeMixture(shown, [0, 1, 1]));
      weights.forEach((each, k) => assert.ok(near(pixel(words[k]), parts(getMixedColour(each, shown, [0, 1, 1])), 1), `${each}`));
      assert.ok(words.every((word) => word >>> 24 === 255));
    }
  }
});

test("what no head may see is transparent, and so is what one has not computed yet", () => {
  const words = new Uint32Array(4);
  fillMixture(words, [Uint16Array.of(0, 0, 65535, 65534), Uint16Array.of(0, 65534, 65534, 0)], makeMixture(state(), [0, 0]));
  assert.equal(words[0], 0);
  assert.equal(words[2], 0);
  assert.ok(near(pixel(words[1]), hex(getHues(state())[1]), 1)); // masked in the other alone
  assert.ok(near(pixel(words[3]), hex(getHues(state())[0]), 1));
});

// Machado, Oliveira and Fernandes, 2009: severity 1, in linear light.
const BLINDNESS = {
  protanopia: [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  deuteranopia: [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  tritanopia: [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
  none: [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
};
const toLight = (byte) => (byte / 255 <= 0.04045 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4);
const toByte = (light) => Math.round(255 * (light <= 0.0031308 ? 12.92 * light : 1.055 * light ** (1 / 2.4) - 0.055));

test("the four colours can be told apart by everybody, in both themes, and from the paper", () => {
  for (const dark of [false, true]) {
    const paper = parts(getMixedColour([0], state({ dark }), [0]));
    for (const [name, matrix] of Object.entries(BLINDNESS)) {
      const seen = [...getHues({ dark }).map(hex), paper].map((bytes) => {
        const light = bytes.map(toLight);
        const seenBytes = matrix.map((row) => toByte(Math.min(1, Math.max(0, row.reduce((sum, factor, i) => sum + factor * light[i], 0)))));
        return hexToOklab(`#${seenBytes.map((part) => part.toString(16).padStart(2, "0")).join("")}`);
      });
      for (let a = 0; a < 5; a++) for (let b = 0; b < a; b++) assert.ok(Math.hypot(...seen[a].map((part, i) => part - seen[b][i])) > 0.09, `${name} ${dark} ${a} ${b}`);
    }
  }
});

test("the style sheet has the same colours", () => {
  const css = readFileSync(new URL("../../../src/attlas/view/static/style.css", import.meta.url), "utf8");
  for (let head = 0; head < 4; head++) {
    const found = [...css.matchAll(new RegExp(`--hue-${head}: (#[0-9a-f]{6})`, "g"))].map(([, colour]) => colour);
    assert.deepEqual(found, [getHues({ dark: false })[head], getHues({ dark: true })[head]]);
  }
});

test("the bar of a head goes from the paper to its colour", () => {
  const bytes = makeHueBar(2, state({ low: -10, high: 0 }), { min: -10, max: 0 }, 64);
  const at = (step) => [...bytes.slice(4 * step, 4 * step + 3)];
  assert.ok(near(at(63), hex(getHues(state())[2]), 6));
  assert.ok(near(at(0), parts(getMixedColour([0], state(), [0])), 3));
});

test("heads get and lose a colour, four at most, each once", () => {
  let shown = state({ compare: "none", second: null });
  const toggle = (place) => {
    const patch = toggleColoured(shown, place);
    if (patch) shown = { ...shown, ...patch };
    return patch;
  };
  toggle({ entry: 0, head: 1 });
  assert.deepEqual([shown.compare, shown.second, shown.more], ["colours", { entry: 0, head: 1 }, ""]);
  toggle({ entry: 1, head: 3 });
  toggle({ entry: 1, head: "mean" });
  assert.equal(shown.more, "1.3,1.mean");
  assert.equal(toggle({ entry: 1, head: 0 }), null);
  assert.equal(listColoured(shown).length, 4);
  toggle({ entry: 0, head: 0 }); // the first one: the next takes its place
  assert.deepEqual([shown.entry, shown.head, shown.second, shown.more], [0, 1, { entry: 1, head: 3 }, "1.mean"]);
  toggle({ entry: 1, head: 3 });
  toggle({ entry: 1, head: "mean" });
  assert.deepEqual([shown.compare, shown.second, shown.more], ["none", null, ""]);
  assert.equal(toggle({ entry: 0, head: 1 }), null); // the last one stays
});

test("a link and an offline page have all of them", () => {
  const shown = state({ entry: 1, head: 2, second: { entry: 0, head: 1 }, more: "1.3,1.2,0.0", row: 1, column: 1, zoom: -3 });
  assert.deepEqual(listColoured(shown), [{ entry: 1, head: 2 }, { entry: 0, head: 1 }, { entry: 1, head: 3 }, { entry: 0, head: 0 }]);
  const read = { ...DEFAULTS, ...readHash(writeHash(shown)) };
  assert.deepEqual(listColoured(read), listColoured(shown));
  assert.equal(read.compare, "colours");
  const query = createPackQuery(shown);
  assert.deepEqual([query.entry, query.second_entry, query.third_head, query.fourth_entry, query.fourth_head], [1, 0, 3, 0, 0]);
  assert.equal(listPackedHeads({ ...shown, compare: "side" }).length, 2);
  assert.equal(listPackedHeads({ ...shown, compare: "none" }).length, 1);
  assert.deepEqual(readMore("3.1,x,2.mean,4"), [{ entry: 3, head: 1 }, { entry: 2, head: "mean" }]);
  assert.equal(writeMore(readMore("3.1,2.mean")), "3.1,2.mean");
});
