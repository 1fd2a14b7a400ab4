// What the page of a corpus computes by itself.

import assert from "node:assert/strict";
import test from "node:test";
import { rebin } from "../../../src/attlas/view/static/corpus/charts.js";
import { CORPUS_DEFAULTS, readCorpusHash, writeCorpusHash } from "../../../src/attlas/view/static/corpus/state.js";
import { computeDomain, haveSameHeads, getOpenHeads, getSelection } from "../../../src/attlas/view/static/corpus/data.js";
import { createScale, formatTick, getTints } from "../../../src/attlas/view/static/corpus/scales.js";
import { indexWeights } from "../../../src/attlas/view/static/corpus/text.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";

setTranslations({});

const corpus = (rows) => ({ title: "a", measures: [{ name: "u" }, { name: "v" }], rows });
const rows = { layer: [0, 0, 1], head: [0, 1, 0], u: [1, 2, 4], v: [0.5, null, 0.25] };

test("a link brings the state back", () => {
  const state = { ...CORPUS_DEFAULTS, x: "u", xlog: true, brush: { corpus: 1, x0: -0.5, x1: 2, y0: 1e-7, y1: 3 }, open: [{ layer: 2, head: 4 }, null], interval: 3, find: "2.", sort: "-u" };
  const { brush, ...found } = readCorpusHash(writeCorpusHash(state));
  assert.deepEqual(found, { x: "u", xlog: true, find: "2.", sort: "-u", open: state.open, interval: 3 });
  assert.deepEqual(brush, state.brush);
  assert.deepEqual(readCorpusHash("b=1_2_x_3_4&h=nothing&i=-1&t=blue"), {});
  assert.equal(writeCorpusHash({ ...CORPUS_DEFAULTS, xlog: false }, { ...CORPUS_DEFAULTS, xlog: true }), "xl=0");
});

test("bins of a wider domain keep every text", () => {
  const found = { min: 2, max: 4, counts: [3, 0, 1, 6] };
  for (const domain of [[2, 4], [0, 10], [2, 4.0001], [-5, 4]]) {
    const { edges, values } = rebin(found, domain);
    assert.equal(edges.length, values.length + 1);
    assert.ok(Math.abs(values.reduce((a, b) => a + b) - 10) < 1e-9, String(domain));
  }
  const even = rebin(found, [2, 4], 4).values;
  assert.deepEqual(even.map((value) => Math.round(value)), [3, 0, 1, 6]);
  assert.equal(rebin({ min: 1, max: 1, counts: [7] }, [0, 1], 4).values[3], 7);
});

test("a brush selects the same heads of a corpus of the same model, and by number elsewhere", () => {
  const info = { corpora: [corpus(rows), corpus({ ...rows, u: [9, 9, 9] })] };
  const brush = { corpus: 0, x0: 0.5, x1: 4, y0: 0, y1: 1 };
  assert.ok(haveSameHeads(info));
  assert.deepEqual(getSelection({ info, brush, x: "u", y: "v" }).map((set) => [...set]), [[0, 2], [0, 2]]);
  const other = { corpora: [corpus(rows), corpus({ layer: [0, 0], head: [0, 1], u: [9, 1], v: [0.5, 0.5] })] };
  assert.ok(!haveSameHeads(other));
  assert.deepEqual(getSelection({ info: other, brush, x: "u", y: "v" }).map((set) => [...set]), [[0, 2], [1]]);
  assert.deepEqual(computeDomain(other, "v"), [0.25, 0.5]);
  assert.deepEqual(getOpenHeads({ info: other, open: null }, 0, { layer: 1, head: 0 }), [{ layer: 1, head: 0 }, { layer: 0, head: 0 }]);
});

test("the weights of a window are found by query and by key", () => {
  const { getPairs } = indexWeights({ first: 10, counts: [1, 2, 2], keys: [10, 10, 3, 11, 12], weights: [1, 0.2, 0.7, 0.4, 0.5] });
  assert.deepEqual(getPairs(1), { keys: [[-7, 0.7], [0, 0.2]], queries: [[2, 0.4]] });
  assert.deepEqual(getPairs(0), { keys: [[0, 1]], queries: [[0, 1], [1, 0.2]] });
});

test("a scale leads from numbers to pixels and back, and its steps lie within it", () => {
  for (const [domain, log] of [[[-3, 7], false], [[0.002, 40], true], [[5, 5.01], true]]) {
    const scale = createScale(domain, log, 300, 20);
    for (const value of domain) assert.ok(Math.abs(scale.value(scale.at(value)) / value - 1) < 1e-9);
    assert.ok(scale.at(domain[0]) < 300 && scale.at(domain[1]) > 20 && scale.at(domain[0]) > scale.at(domain[1]));
    const ticks = scale.ticks(6);
    assert.ok(ticks.length >= 2 && ticks.length <= 7, `${domain}: ${ticks}`);
    for (const tick of ticks) assert.ok(scale.at(tick) <= 300 && scale.at(tick) >= 20);
  }
  assert.deepEqual(createScale([0.002, 40], true, 0, 100).ticks(6), [0.01, 0.1, 1, 10]);
  assert.deepEqual([3, -2, 0.25, 1200].map(formatTick), ["3", "−2", "0.25", "1,200"]);
});

test("heads of one kind have one hue, and unknown numbers that of nothing", () => {
  const info = { corpora: [{ ...corpus({ ...rows, kind: ["a", "none", "a"] }), kinds: [["a", ""], ["b", ""], ["none", ""]] }] };
  const kinds = getTints(info, info.corpora[0], { colour: "kind", dark: false }, {});
  assert.equal(kinds.fills[0], kinds.fills[2]);
  assert.notEqual(kinds.fills[0], kinds.fills[1]);
  assert.deepEqual(kinds.kinds.map(({ name }) => name), ["a", "none"]);
  const numbers = getTints(info, info.corpora[0], { colour: "v", dark: true }, { empty: "#eee" });
  assert.equal(numbers.fills[1], "#eee");
  assert.deepEqual(numbers.domain, [0.25, 0.5]);
  assert.equal(new Set(numbers.fills).size, 3);
});
