import assert from "node:assert/strict";
import test from "node:test";
import { computeTicks, formatBytes, formatFloat32, formatNumber, formatPercent, getHeadMark, getHeadName, getOrdinalSuffix } from "../../../src/attlas/view/static/data/numbers.js";
import { DEFAULTS } from "../../../src/attlas/view/static/data/state.js";
import { describeVariant, formatAmount, getNumberName, getUnit } from "../../../src/attlas/view/static/data/weighting.js";
import { getBarRange, getBarTicks, getContrastBarRange, getContrastTicks } from "../../../src/attlas/view/static/panels/colourbar.js";
import { findLargest } from "../../../src/attlas/view/static/panels/text.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";

setTranslations({});

test("numbers in tables read back as the same float32", () => {
  const values = [0, 1, 0.1, 1 / 3, 1e-7, 1.17549435e-38, 0.30000001192092896, 2 ** -149].map(Math.fround);
  for (const value of values) assert.equal(Math.fround(Number(formatFloat32(value))), value);
  assert.deepEqual(values.slice(0, 4).map(formatFloat32), ["0", "1", "0.1", "0.33333334"]);
});

test("the largest weights are found without sorting", () => {
  let seed = 7;
  const next = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  const values = Float32Array.from({ length: 5000 }, () => (next() < 0.2 ? 0 : next()));
  const sorted = [...values].sort((a, b) => b - a).slice(0, 48);
  assert.deepEqual(findLargest(values, 48).map((i) => values[i]), sorted);
  assert.deepEqual(findLargest(new Float32Array(9), 4), []);
});

test("numbers have three digits, as people write them", () => {
  const cases = [[0, "0"], [null, "–"], [NaN, "–"], [Infinity, "∞"], [-Infinity, "−∞"], [0.03125, "0.0313"], [-1.5, "−1.50"], [42, "42.0"], [1024, "1,024"], [3.12e-7, "3.12 × 10⁻⁷"], [-3.12e-7, "−3.12 × 10⁻⁷"], [12_345_678, "1.23 × 10⁷"]];
  for (const [value, text] of cases) assert.equal(formatNumber(value), text);
  const shares = [[0, "0 %"], [1, "100.0 %"], [0.421, "42.1 %"], [0.0312, "3.1 %"], [2e-4, "0.020 %"], [1e-6, "< 0.001 %"]];
  for (const [share, text] of shares) assert.equal(formatPercent(share), text);
  const sizes = [[999, "999 bytes"], [31_200_000, "31 MB"], [3_120_000, "3.1 MB"], [5e12, "5000 GB"]];
  for (const [size, text] of sizes) assert.equal(formatBytes(size), text);
  assert.deepEqual([1, 2, 3, 4, 11, 12, 13, 21, 112].map(getOrdinalSuffix), ["st", "nd", "rd", "th", "th", "th", "th", "st", "th"]);
});

test("the steps of an axis are round, and within it", () => {
  assert.deepEqual(computeTicks(0, 1, 5), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(computeTicks(-3, 7, 4), [0, 5]);
  assert.deepEqual(computeTicks(2, 2, 5), [2]);
  for (let low = -50; low < 50; low += 7.3) {
    const ticks = computeTicks(low, low + 31, 6);
    assert.ok(ticks.length >= 2 && ticks.length <= 7, `${low}: ${ticks}`);
    for (const tick of ticks) assert.ok(tick >= low && tick <= low + 31);
  }
});

test("a head is named by its layer, its kind, its pass and its recording", () => {
  const entries = [
    { layer: 0, kind: "self", heads: [0, 2], call: 0 },
    { layer: 0, kind: "cross", heads: [0, 1], call: 0 },
    { layer: 1, kind: "self", heads: [0, 1], call: 0 },
    { layer: 1, kind: "self", heads: [0, 1], call: 1 },
    { layer: 0, kind: "self", heads: [0, 2], call: 0, recording: "other" },
  ];
  const names = [[0, 1], [1, "mean"], [2, 0], [3, 0], [4, 0]].map(([entry, head]) => getHeadName({ entries }, entry, head));
  assert.deepEqual(names, ["Layer 0, head 2", "Layer 0 (cross), mean of 2 heads", "Layer 1, pass 0, head 0", "Layer 1, pass 1, head 0", "other: Layer 0, head 0"]);
  assert.deepEqual([[0, 1], [4, "mean"]].map(([entry, head]) => getHeadMark({ entries }, entry, head)), ["0·2", "② 0·mean"]);
  assert.equal(getHeadName({ entries }, 9, 0), "");
});

test("weighted numbers have a name, a unit and no percent", () => {
  const info = { units: { value: 8 } };
  assert.deepEqual(["plain", "nosink", "value", "output"].map((variant) => getNumberName({ variant })), ["weight", "renormalised", "‖A v‖", "‖A v W‖"]);
  assert.deepEqual(["plain", "value", "output"].map((variant) => getUnit({ info, variant })), [1, 8, 1]);
  assert.deepEqual(["plain", "value"].map((variant) => formatAmount(0.5, { variant })), ["50.0 %", "0.500"]);
  assert.equal(describeVariant({ variant: "plain" }), "");
});

test("the colour bar reaches beyond its range, and its ticks are powers of ten or round numbers", () => {
  const state = { ...DEFAULTS, info: { entries: [{ n: 1000 }] } };
  for (const low of [-63, -41, -30, -3]) {
    const bar = getBarRange({ ...state, low, high: -1 });
    assert.ok(bar.min <= low && bar.max === 0);
    const ticks = getBarTicks(state, bar, 360);
    assert.ok(ticks.length >= 2 && ticks.every(({ at }) => at >= bar.min - 1e-6 && at <= 0));
    assert.deepEqual(ticks[0], { at: 0, text: "1" });
  }
  const linear = { ...state, colour: "linear", low: 0, high: 0.03 };
  assert.deepEqual(getBarRange(linear), { min: 0, max: 0.05 });
  assert.deepEqual(getBarTicks(linear, { min: 0, max: 0.05 }, 360).map(({ text }) => text), ["0", "0.01", "0.02", "0.03", "0.04", "0.05"]);
});

test("the bar of a comparison has equal in its middle", () => {
  const ratio = { ...DEFAULTS, compare: "ratio" };
  assert.deepEqual(getContrastTicks(ratio, getContrastBarRange(ratio, 4)).map(({ text }) => text), ["1/16×", "1/4.0×", "equal", "4.0×", "16×"]);
  const difference = { ...DEFAULTS, compare: "difference", difference: 0.1 };
  assert.deepEqual(getContrastBarRange(difference), { min: -0.2, max: 0.2 });
  assert.deepEqual(getContrastTicks(difference, { max: 0.2 }).map(({ text }) => text), ["−0.20", "−0.10", "equal", "+0.10", "+0.20"]);
});
