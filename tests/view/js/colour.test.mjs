import assert from "node:assert/strict";
import test from "node:test";
import * as colour from "../../../src/attlas/view/static/map/colour.js";
import { DEFAULTS, PALETTES } from "../../../src/attlas/view/static/data/state.js";

const state = (changes = {}) => ({ ...DEFAULTS, info: { entries: [{ n: 1000 }] }, ...changes });
const parts = (css) => css.match(/\d+/g).map(Number);
const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const contrast = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
const rgbOf = (word) => [word & 255, (word >> 8) & 255, (word >> 16) & 255];
const palettes = PALETTES;

test("a code is its weight to 0.034 percent", () => {
  let worst = 0;
  for (let k = 0; k < 20000; k++) {
    const weight = 2 ** (-63.9 * Math.random());
    worst = Math.max(worst, Math.abs(colour.decode(colour.encode(weight)) / weight - 1));
  }
  assert.ok(worst < 0.00034, `${worst}`);
});

test("the codes that mean something else", () => {
  assert.equal(colour.decode(0), 0);
  assert.equal(colour.decode(1), 0);
  assert.ok(Number.isNaN(colour.decode(65535)));
  assert.equal(colour.decode(2), 2 ** -64);
  assert.equal(colour.decode(65534), 1);
  assert.equal(colour.encode(0), 1);
  assert.equal(colour.encode(1e-30), 1);
  assert.equal(colour.encode(1), 65534);
  assert.equal(colour.encode(NaN), 65535);
});

test("a number has the colour that the map gives it", () => {
  for (const palette of palettes) {
    for (const scale of [{ colour: "log", low: -20, high: -1 }, { colour: "linear", low: 0.01, high: 0.3 }]) {
      const here = state({ palette, ...scale });
      const table = colour.makeLut(here);
      for (let k = 0; k < 500; k++) {
        const weight = 2 ** (-30 * Math.random());
        assert.deepEqual(parts(colour.getColour(weight, here)), rgbOf(table[colour.encode(weight)]));
      }
      assert.equal(table[0], 0);
      assert.equal(table[65535], 0);
    }
  }
});

test("lightness goes one way in every palette, so that colour vision is not needed", () => {
  for (const dark of [false, true]) {
    for (const palette of palettes) {
      const table = colour.getColours(state({ palette, dark }));
      const light = Array.from({ length: 256 }, (_, i) => luminance(table.slice(3 * i, 3 * i + 3)));
      const sign = Math.sign(light[255] - light[0]);
      for (let i = 4; i < 256; i++) assert.ok(sign * (light[i] - light[i - 4]) > -0.002, `${palette} ${i}`);
      assert.ok(Math.abs(light[255] - light[0]) > 0.5, palette);
    }
  }
});

test("the two sides of a comparison are equally light, and of different hue", () => {
  for (const dark of [false, true]) {
    const table = colour.getDivergingColours(state({ dark }));
    const at = (i) => [...table.slice(3 * i, 3 * i + 3)];
    for (const step of [40, 80, 127]) {
      const [less, more] = [at(127 - step), at(128 + step)];
      assert.ok(Math.abs(luminance(less) ** (1 / 3) - luminance(more) ** (1 / 3)) < 0.13, `${step}`);
      assert.ok(less[2] > less[0] && more[0] > more[2]);
    }
    for (const [compare, end] of [["ratio", 6], ["difference", 0.1]]) {
      const shown = state({ dark, compare });
      assert.equal(colour.getContrastColour(99, shown), colour.getContrastColour(end, shown));
      assert.equal(colour.getContrastColour(colour.computeContrast(0.02, 0.01, shown), shown) === colour.getContrastColour(0, shown), false);
      assert.equal(colour.getContrastColour(colour.computeContrast(0.02, 0.02, shown), shown), colour.getContrastColour(0, shown));
    }
  }
});

test("numbers can be read on every colour", () => {
  for (const dark of [false, true]) {
    for (const palette of palettes) {
      const table = colour.getColours(state({ palette, dark }));
      for (let i = 0; i < 256; i++) {
        const css = `rgb(${table[3 * i]} ${table[3 * i + 1]} ${table[3 * i + 2]})`;
        const ink = colour.chooseTextColour(css).match(/[0-9a-f]{2}/g).map((hex) => parseInt(hex, 16));
        assert.ok(contrast(luminance(ink), luminance(table.slice(3 * i, 3 * i + 3))) > 4.4, `${palette} ${i}`);
      }
    }
  }
});

test("a range that belongs to the other kind of scale is replaced", () => {
  assert.deepEqual(colour.getRange(state({ colour: "linear", low: -14, high: 0 })), { low: 0, high: 1 });
  assert.deepEqual(colour.getRange(state({ colour: "log", low: 0, high: 0.5 })), { low: -14, high: 0 });
  assert.deepEqual(colour.getRange(state({ colour: "log", low: -9, high: -2 })), { low: -9, high: -2 });
});

const both = (changes = {}) => state({ info: { entries: [{ n: 1000, shares: false, signed: true, largest: { plain: 3 } }] }, ...changes });

test("a code with a sign is its weight to 0.068 percent", () => {
  let worst = 0;
  for (let k = 0; k < 20000; k++) {
    const weight = (k % 2 ? -1 : 1) * 2 ** (16 - 63.9 * Math.random());
    const code = colour.encode(weight, false);
    assert.ok(code > 1 && code < 65535);
    worst = Math.max(worst, Math.abs(colour.decode(code, false) / weight - 1));
  }
  assert.ok(worst < 0.00068, `${worst}`);
  assert.deepEqual([0, 1e-20, NaN, 1e9, -1e9].map((weight) => colour.encode(weight, false)), [1, 1, 65535, 32767, 65534]);
  assert.ok(Number.isNaN(colour.decode(65535, false)));
});

test("both signs have colours of their own, the same on the bar, in the map and beside a number", () => {
  for (const dark of [false, true]) {
    for (const scale of ["log", "linear"]) {
      const here = both({ dark, colour: scale });
      const table = colour.makeLut(here);
      const bytes = colour.getWeightColours(here);
      for (const size of [0.02, 0.4, 3]) {
        const [above, below] = [size, -size].map((weight) => parts(colour.getColour(weight, here)));
        assert.ok(below[0] - below[2] > above[0] - above[2], `${size}`);
        for (const weight of [size, -size]) {
          const pixel = rgbOf(table[colour.encode(weight / 3, false)]);
          assert.deepEqual(parts(colour.getColour(weight, here)), pixel);
          const offset = colour.getBarOffset(colour.toBar(weight / 3, here), here);
          assert.ok(pixel.every((part, each) => Math.abs(part - bytes[offset + each]) < 4));
        }
      }
      assert.deepEqual(rgbOf(table[1]), [...bytes.slice(3 * 128, 3 * 128 + 3)]); // 0 is the paper
      for (const share of [0.3, 1]) {
        const [less, more] = [127 - Math.round(127 * share), 128 + Math.round(127 * share)].map((i) => luminance(bytes.slice(3 * i, 3 * i + 3)));
        assert.ok(Math.abs(less ** (1 / 3) - more ** (1 / 3)) < 0.2, `${share}`);
      }
    }
  }
  assert.equal(colour.fromBar(colour.toBar(-0.01, both()), both()).toFixed(6), "-0.010000");
  assert.deepEqual(colour.getRange(both()), { low: -12, high: 0 });
  assert.deepEqual(colour.getRange(both({ colour: "linear", low: 0.2, high: 0.4 })), { low: 0, high: 1 });
});
