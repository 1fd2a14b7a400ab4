// What the page saves: tables, offline pages, Python, vector pictures, and the words of a caption.

import assert from "node:assert/strict";
import test from "node:test";
import { clampRegion, countCells, fetchRegion, formatField, formatTable } from "../../../src/attlas/view/static/data/csv.js";
import { createFile, createPackQuery, dataMark, getViewState, listPackedHeads } from "../../../src/attlas/view/static/data/pack.js";
import { DEFAULTS } from "../../../src/attlas/view/static/data/state.js";
import { canCompare } from "../../../src/attlas/view/static/data/comparable.js";
import { formatCaption } from "../../../src/attlas/view/static/panels/picture.js";
import { formatPython } from "../../../src/attlas/view/static/panels/python.js";
import { createVector } from "../../../src/attlas/view/static/panels/vector.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";

setTranslations({});

const entry = (changes = {}) => ({ name: "h.0", layer: 0, call: 0, kind: "self", heads: [0, 1], m: 200, n: 300, first_query: 100, first_key: 0, batch: 1, levels: 2, causal: true, texts: [[0, 0]], ...changes });
const state = (changes = {}) => ({ ...DEFAULTS, info: { title: "file.py", entries: [entry(), entry({ m: 100 })], texts: [300] }, row: 20.5, column: 30.5, zoom: 2, ...changes });

test("the cells of a region of the map are whole, and inside the matrix", () => {
  assert.deepEqual(clampRegion({ r0: -3.5, r1: 10.2, c0: 290.9, c1: 400 }, entry()), { r0: 0, r1: 11, c0: 290, c1: 300 });
  assert.equal(countCells({ r0: 0, r1: 11, c0: 290, c1: 300 }), 110);
  assert.equal(countCells({ r0: 5, r1: 2, c0: 0, c1: 9 }), 0);
});

test("a large region is fetched in parts and put together", async () => {
  const asked = [];
  const transport = {
    async get(name, { r0, r1, c0, c1 }) {
      asked.push([r0, r1, c0, c1]);
      assert.ok((r1 - r0) * (c1 - c0) <= 65536);
      const weights = new Float32Array((r1 - r0) * (c1 - c0));
      for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) weights[(r - r0) * (c1 - c0) + c - c0] = r + c / 1e6;
      return { buffer: weights.buffer, rounded: r0 > 0 };
    },
  };
  const shares = [];
  for (const [width, height] of [[70_000, 3], [300, 500]]) {
    asked.length = shares.length = 0;
    const region = { r0: 2, r1: 2 + height, c0: 5, c1: 5 + width };
    const { weights, rounded } = await fetchRegion(transport, {}, region, { onPart: (share) => shares.push(share) });
    assert.equal(weights.length, width * height);
    for (let at = 0; at < weights.length; at += 997) assert.equal(weights[at], Math.fround(2 + Math.floor(at / width) + (5 + (at % width)) / 1e6));
    assert.equal(rounded, true);
    assert.deepEqual([shares.length, shares.at(-1)], [asked.length, 1]);
    assert.ok(asked.length > 1);
  }
});

test("no token of a table is a formula, and its numbers read back", () => {
  assert.equal(formatField('=1+"a"\n'), '"""=1+\\""a\\""\\n"""');
  const textOf = { query: (position) => `q${position}`, key: (position) => `k${position}` };
  const weights = new Float32Array([0.1, 1 / 3, 0, 1]);
  const table = formatTable([{ name: "0_0", weights, rounded: false }, { name: "0_1", weights, rounded: true }], { r0: 1, r1: 3, c0: 0, c1: 2 }, entry(), textOf);
  const lines = table.trimEnd().split("\n");
  assert.equal(lines[0], "query,key,query_token,key_token,weight_0_0,weight_0_1");
  assert.equal(lines[2], '101,1,"""q101""","""k1""",0.33333334,0.333');
  assert.equal(lines.length, 5);
});

test("an offline page is asked for with what is shown, and begins with it", () => {
  const compared = state({ second: { entry: 1, head: "mean" }, compare: "side", pin: { i: 7, j: 9 }, hover: { i: 1, j: 1 }, panel: "export" });
  assert.deepEqual(listPackedHeads(compared), [{ entry: 0, head: 0 }, { entry: 1, head: "mean" }]);
  assert.deepEqual(listPackedHeads({ ...compared, second: { entry: 0, head: 0 } }), [{ entry: 0, head: 0 }]);
  assert.deepEqual(createPackQuery(compared), { entry: 0, head: 0, second_entry: 1, second_head: "mean", batch: 0, variant: "plain", pool: "max", i: 7, j: 9, r: 20, c: 30 });
  assert.deepEqual(createPackQuery(state({ zoom: -1 })), { entry: 0, head: 0, batch: 0, variant: "plain", pool: "max" });
  const view = getViewState(compared);
  for (const field of ["info", "hover", "panel", "heads", "dark"]) assert.ok(!(field in view), field);
  assert.deepEqual(view.pin, { i: 7, j: 9 });
});

test("no text of an offline page ends its script", () => {
  const data = { text: "</script><!--\u2028\u2029" };
  const file = createFile(`<a>${dataMark}</a>"${dataMark}"`, data);
  const text = file.slice(3, file.indexOf("</a>"));
  assert.doesNotMatch(text, /[<\u2028\u2029]/);
  assert.deepEqual(JSON.parse(text), data);
  assert.ok(file.endsWith(`"${dataMark}"`)); // only the first mark is that of the data
});

test("the Python of a view names its head, its cells and its tokens", () => {
  const cells = { r0: 0, r1: 20, c0: 10, c1: 40 };
  assert.equal(formatPython(state({ head: 1, colour: "linear" }), cells), `import attlas

atlas = attlas.load("run.atlas")
A = atlas["h.0", 0]
queries, keys = atlas.texts_of(atlas.entry(("h.0", 0)))
figure = A[0, 1].plot(rows=(0, 20), columns=(10, 40), labels=(queries[0][100:120], keys[0][10:40]), pool="max", log=False)
figure.savefig("head.pdf")  # or .svg, or .png with dpi=200
`);
  const matrix = state({ info: { title: "", entries: [entry({ name: "matrix", heads: [0] })], texts: [] } });
  assert.match(formatPython(matrix, { r0: 0, r1: 200, c0: 0, c1: 300 }), /^# A is the matrix that the viewer shows\nfigure = A\.plot\(pool="max"\)\n/);
});

test("a caption names every choice that changes the numbers", () => {
  const info = { title: "file.py · tiny", model: "tiny", entries: [entry({ batch: undefined }), entry({ batch: 3, layer: 1 })] };
  const grain = { side: 4, framed: false };
  const block = "a pixel shows the largest weight of 4 × 4 cells";
  assert.equal(formatCaption(state({ info }), grain), `file.py · tiny · ${block}`);
  assert.equal(formatCaption(state({ info: { ...info, title: "file.py" }, entry: 1, batch: 2 }), grain), `file.py · tiny · sequence 2 of 3 · ${block}`);
  const compared = state({ info, variant: "nosink", second: { entry: 1, head: 1 }, compare: "ratio" });
  assert.equal(formatCaption(compared, { side: 1, framed: false }), "file.py · tiny · every cell is drawn · first key excluded, rows renormalised · log-ratio of the first over Layer 1, head 1");
});

test("a vector picture has one path for a colour, and no token is markup", () => {
  const cells = { r0: 0, r1: 2, c0: 99, c1: 102 };
  const weights = new Float32Array([0.25, 0.25, 0.5, 0.25, 0.25, 0.5]);
  const style = { card: "#fff", ink: "#000", soft: "#555", line: "#ccc", land: "#eee", sans: "sans" };
  const svg = createVector({ weights: [weights], cells, state: state({ dark: false }), style, textOf: { query: () => "<q>", key: () => "&k" } });
  const paths = [...svg.matchAll(/<path fill="([^"]+)" d="([^"]+)"/g)].map(([, , path]) => path);
  assert.deepEqual(paths, ["M0 0h2v1h-2zM0 1h2v1h-2z", "M2 1h1v1h-1z"]); // query 100 does not see key 101
  assert.match(svg, /&lt;q&gt;/);
  assert.match(svg, />file\.py · every cell is drawn</);
  assert.doesNotMatch(svg, /<q>/);
});

test("heads are compared where their cells are the same pairs", () => {
  const info = { entries: [entry(), entry(), entry({ n: 200 }), entry({ readable: false }), entry({ first_key: 5 })] };
  assert.deepEqual([0, 1, 2, 3, 4].map((other) => canCompare(info, 0, other)), [true, true, false, false, false]);
});
