import assert from "node:assert/strict";
import test from "node:test";
import { TILE, isBeyondDiagonal, computeFit, chooseLevel, computePanes, placePane } from "../../../src/attlas/view/static/map/geometry.js";
import { getZoomLimit } from "../../../src/attlas/view/static/data/held.js";
import { describeGrain, findCell, explainRefusal, createScene, getTarget } from "../../../src/attlas/view/static/map/scene.js";
import { listWantedTiles } from "../../../src/attlas/view/static/map/layers.js";
import { createCamera } from "../../../src/attlas/view/static/map/camera.js";
import { computeWheelZoom, computeArrowStep } from "../../../src/attlas/view/static/map/gestures.js";
import { createSource, createTiles, fillRatio, getTileKey } from "../../../src/attlas/view/static/map/tiles.js";
import { findEmptyRuns, computeTrackRange, summarise } from "../../../src/attlas/view/static/map/tracks.js";
import { formatShortRatio, formatShortWeight } from "../../../src/attlas/view/static/map/cells.js";
import { showWhitespace, createTexts } from "../../../src/attlas/view/static/data/tokens.js";
import { DEFAULTS, createStore } from "../../../src/attlas/view/static/data/state.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";

setTranslations({});

const entry = (changes = {}) => ({ heads: [0, 1], m: 5000, n: 5000, first_query: 0, first_key: 0, batch: 1, levels: 6, causal: true, readable: true, ...changes });
const state = (changes = {}) => ({ ...DEFAULTS, info: { entries: [entry(), entry()], on_demand_level: 4 }, row: 2500, column: 2500, zoom: -3, ...changes });

test("a block is one to two device pixels wide, or a cell", () => {
  for (let zoom = -12; zoom < 6; zoom += 0.01) {
    const pixels = 2 ** zoom;
    const level = chooseLevel(pixels, 30);
    const block = pixels * 2 ** level;
    assert.ok(block >= 0.999 && (block < 2 || level === 0), `${zoom}`);
  }
  assert.equal(chooseLevel(2 ** -20, 5), 4);
});

test("cells and pixels are each other's inverse", () => {
  const [pane] = computePanes(900, 700, 4, { hasBand: true });
  const here = placePane(pane, { row: 1234.5, column: 987.25, scale: 4, dpr: 2, m: 5000, n: 5000 });
  for (const j of [900, 987.25, 1100]) assert.ok(Math.abs(here.column(here.X(j)) - j) < 1e-9);
  assert.equal(here.X(987.25), pane.cx);
  assert.equal(here.py(1300), Math.round(2 * here.Y(1300)));
  assert.ok(here.region.r0 <= 1234 && here.region.r1 >= 1235 && here.region.r0 >= 0);
});

test("fit shows the whole matrix, of every shape and in every window", () => {
  for (const [m, n] of [[5000, 5000], [1, 4000], [300, 100000], [12, 9], [1000000, 1000000]]) {
    for (const [width, height] of [[680, 640], [390, 500], [1500, 900], [300, 250]]) {
      const { row, column, zoom } = computeFit(width, height, { m, n }, { hasBand: true }, 6);
      const [pane] = computePanes(width, height, 2 ** zoom, { hasBand: true });
      const here = placePane(pane, { row, column, scale: 2 ** zoom, dpr: 1, m, n });
      const box = [here.X(0) - pane.field.x, here.Y(0) - pane.field.y, width - here.X(n), height - here.Y(m)];
      for (const gap of box) assert.ok(gap > -0.01, `${[m, n, width, height]}: ${box}`);
    }
  }
});

test("the centre stays where it is when the gutters open for tokens", () => {
  for (const zoom of [0, 3, 3.2, 3.4, 3.6, 6]) {
    const [pane] = computePanes(900, 700, 2 ** zoom, {});
    assert.equal(pane.cx, computePanes(900, 700, 1, {})[0].cx);
    assert.equal(pane.cy, computePanes(900, 700, 1, {})[0].cy);
  }
});

test("only tiles behind the diagonal are left out", () => {
  for (const first_query of [0, 300, 1000]) {
    const one = entry({ first_query });
    for (const size of [256, 512, 1024]) {
      for (let y = 0; y * size < one.m; y++) {
        for (let x = 0; x * size < one.n; x++) {
          const r1 = Math.min(one.m, (y + 1) * size);
          const any = x * size <= r1 - 1 + first_query; // its lower left cell
          assert.equal(isBeyondDiagonal(one, r1, x * size), !any);
        }
      }
    }
  }
});

test("what is in view is wanted, nearest first, with a ring only when all is calm", () => {
  const scene = createScene(state(), 900, 700, 1, false);
  const [layer] = scene.panes[0].layers;
  assert.equal(layer.level, 3);
  const busy = listWantedTiles(layer, false);
  const calm = listWantedTiles(layer, true);
  assert.ok(calm.length > busy.length || layer.region.r1 === 5000);
  const size = TILE * 8;
  for (const item of busy.filter((one) => one.params.level === 3)) {
    const { y, x } = item.params;
    assert.ok((y + 1) * size > layer.region.r0 && y * size < layer.region.r1);
    assert.ok(x * size <= Math.min(5000, (y + 1) * size) - 1);
  }
  assert.equal(new Set(calm.map((item) => item.key)).size, calm.length);
  assert.ok(calm.some((item) => item.params.level === 5)); // the whole, as a stand-in
});

test("every cell of a pane is found again under its pixel", () => {
  const scene = createScene(state({ zoom: 3, row: 100.5, column: 90.5 }), 900, 700, 1, false);
  const [pane] = scene.panes;
  const found = findCell(scene, pane.X(93.5), pane.Y(101.5));
  assert.deepEqual([found.i, found.j], [101, 93]);
  assert.equal(findCell(scene, pane.left - 1, pane.Y(100)), null);
  assert.equal(getTarget(scene, pane, 101, 93).allowed, true);
  assert.equal(getTarget(scene, pane, 93, 101).allowed, false);
});

test("triangle: a cell of the empty triangle is the second head's mirrored one", () => {
  const scene = createScene(state({ zoom: 3, second: { entry: 1, head: 1 }, compare: "triangle" }), 900, 700, 1, false);
  const target = getTarget(scene, scene.panes[0], 2490, 2510);
  assert.deepEqual([target.i, target.j, target.source.entry, target.source.head, target.allowed], [2510, 2490, 1, 1, true]);
  assert.equal(getTarget(scene, scene.panes[0], 2510, 2490).source.entry, 0);
});

test("comparisons that cannot be drawn say why", () => {
  assert.equal(explainRefusal(state()), null);
  assert.match(explainRefusal(state({ compare: "ratio" })), /choose a second head/);
  const other = { entries: [entry(), entry({ m: 10 })] };
  assert.match(explainRefusal(state({ compare: "ratio", second: { entry: 1, head: 0 }, info: other })), /different parts/);
  assert.equal(explainRefusal(state({ compare: "side", second: { entry: 1, head: 0 }, info: other })), null);
  const open = { entries: [entry({ causal: false }), entry()] };
  assert.match(explainRefusal(state({ compare: "triangle", second: { entry: 1, head: 0 }, info: open })), /causal/);
});

test("a zoom keeps the cell under the pointer, and stays within bounds", () => {
  const store = createStore({ row: 100, column: 200, zoom: 1 });
  const frame = () => ({ cx: 400, cy: 300 });
  const bounds = () => ({ m: 1000, n: 1000, least: -1 });
  const getLimit = () => 6;
  const camera = createCamera({ store, frame, bounds, getLimit, moved() {}, reduced: () => true });
  const under = () => [store.state.row + (350 - 300) / 2 ** store.state.zoom, store.state.column + (450 - 400) / 2 ** store.state.zoom];
  const before = under();
  camera.zoomBy(1.7, 450, 350);
  under().forEach((value, k) => assert.ok(Math.abs(value - before[k]) < 1e-9));
  camera.zoomBy(99, 450, 350);
  assert.equal(store.state.zoom, 6);
  camera.zoomBy(-99, 450, 350);
  assert.equal(store.state.zoom, -1);
  camera.panBy(1e9, -1e9);
  assert.deepEqual([store.state.row, store.state.column], [1000, 0]);
});

const patches = [{ r0: 96, r1: 160, c0: 64, c1: 128 }];
const held = { entries: [entry(), entry()], held: [{ entry: 0, head: 0, finest: 4, block: null, patches }, { entry: 1, head: 0, finest: 1, block: null, patches: [] }] };

test("blocks are not drawn as large as cells, but where the cells are in the file", () => {
  const limit = (changes, row, column) => getZoomLimit(held, { ...state(), ...changes }, row, column);
  assert.equal(limit({}, 500, 500), 1); // 16 cells of 2 pixels
  assert.equal(limit({}, 100, 100), 6);
  assert.equal(limit({}, 90, 140), 6); // near
  assert.equal(limit({ entry: 1 }, 100, 100), 4);
  assert.equal(limit({ second: { entry: 1, head: 0 }, compare: "ratio" }, 100, 100), 1); // the other one has no cells here
  assert.equal(getZoomLimit({ entries: held.entries }, state(), 500, 500), 6); // a server has every cell
  const store = createStore({ row: 110, column: 90, zoom: 0 });
  const camera = createCamera({ store, frame: () => ({ cx: 400, cy: 300 }), bounds: () => ({ m: 5000, n: 5000, least: -1 }), getLimit: (row, column) => limit({}, row, column), moved() {}, reduced: () => true });
  camera.zoomBy(99, 700, 300); // the pointer is on blocks
  assert.equal(store.state.zoom, 1);
  camera.goTo(110, 90, 5);
  assert.equal(store.state.zoom, 5);
  camera.panBy(-9000, 0);
  camera.zoomBy(1, 400, 300); // closer than blocks may be, and it stays there
  assert.equal(store.state.zoom, 5);
  camera.zoomBy(-1, 400, 300);
  assert.equal(store.state.zoom, 1);
});

test("what is pointed at is a cell in the frame, and a block beside it", () => {
  const scene = createScene(state({ info: held, row: 128, column: 96, zoom: 2 }), 900, 700, 1, false);
  const [pane] = scene.panes;
  assert.deepEqual(describeGrain(scene), { side: 16, framed: true });
  const [inside, beside] = [getTarget(scene, pane, 130, 70), getTarget(scene, pane, 170, 70)];
  assert.deepEqual([inside.side, inside.level, inside.block], [1, 0, { r0: 130, r1: 131, c0: 70, c1: 71 }]);
  assert.deepEqual([beside.side, beside.level, beside.block], [16, 4, { r0: 160, r1: 176, c0: 64, c1: 80 }]);
  assert.ok(pane.patches.every((layer) => listWantedTiles(layer, true).every(({ params }) => params.level === 5 || (params.level === 0 && params.y === 0 && params.x === 0))));
  const close = createScene(state({ info: held, row: 128, column: 96, zoom: 5 }), 900, 700, 1, false);
  assert.deepEqual(describeGrain(close), { side: 1, framed: false });
  const far = createScene(state({ info: held, row: 128, column: 96, zoom: -0.5 }), 900, 700, 1, false);
  assert.deepEqual(describeGrain(far), { side: 16, framed: false });
  const triangle = createScene(state({ info: held, row: 128, column: 96, zoom: 2, second: { entry: 1, head: 0 }, compare: "triangle" }), 900, 700, 1, false);
  assert.equal(triangle.panes[0].patches.length, 0);
});

test("wheels of all kinds zoom by bounded steps", () => {
  assert.ok(computeWheelZoom({ deltaY: -100, deltaMode: 0, ctrlKey: false }) > 0);
  assert.ok(computeWheelZoom({ deltaY: 3, deltaMode: 1, ctrlKey: false }) < 0);
  assert.ok(Math.abs(computeWheelZoom({ deltaY: 1e9, deltaMode: 2, ctrlKey: true })) < 4);
  assert.equal(computeArrowStep(64, 600, false), 1);
  assert.ok(computeArrowStep(0.01, 600, true) > computeArrowStep(0.01, 600, false));
});

test("a ratio is masked where either is, and even where they are equal", () => {
  const lut = Uint32Array.from({ length: 65536 }, (_, k) => k + 1);
  const words = new Uint32Array(6);
  fillRatio(words, [0, 500, 65535, 700, 40000, 1], [500, 0, 500, 700, 30000, 65534], lut);
  assert.deepEqual([...words], [0, 0, 0, 32769, 32769 + 5000, 32769 - 32767]);
});

test("tracks: largest and mean of a stretch, empty rows, one scale for all", () => {
  const values = Float32Array.from([NaN, 2, 4, NaN, NaN, 1]);
  assert.deepEqual(summarise(values, 0, 3), { largest: 4, mean: 3 });
  assert.ok(Number.isNaN(summarise(values, 3, 5).largest));
  assert.deepEqual(findEmptyRuns(values), [[0, 1], [3, 5]]);
  const even = Float32Array.from({ length: 5000 }, (_, k) => 1 + (k % 7) / 10);
  assert.equal(computeTrackRange(even, { log: true }).log, false);
  even[0] = 4000;
  const spread = computeTrackRange(even, { log: true });
  assert.ok(spread.log && spread.low > 0 && spread.high === 4000);
});

test("numbers fit their cells", () => {
  assert.deepEqual([1, 0.9999999, 0.5, 0.0123, 0.0000321, 0].map((w) => formatShortWeight(w, 40)), ["1.0", "1.0", ".500", ".012", "3e−5", "0"]);
  assert.deepEqual([0.0123, 0.0000321].map((w) => formatShortWeight(w, 60)), [".0123", "3.2e−5"]);
  assert.deepEqual([1.25, -0.5, Infinity, 0].map(formatShortRatio), ["+1.3", "−0.5", "∞", "0.0"]);
});

test("whitespace is made visible, every script is left as it is", () => {
  assert.equal(showWhitespace(" a\n\tb "), "·a↵⇥b·");
  assert.equal(showWhitespace("日本語 العربية 👩‍🚀"), "日本語·العربية·👩‍🚀");
  assert.equal(showWhitespace(""), "∅");
  assert.equal(showWhitespace("\u0000\u007f"), "␀␡");
});

test("tokens are asked for once, in chunks, and again after a failure", async () => {
  const asked = [];
  let broken = true;
  const transport = {
    async get(name, { of, start, stop }) {
      asked.push([of, start, stop]);
      if (broken) throw new Error("gone");
      return { json: { start, tokens: Array.from({ length: stop - start }, (_, k) => `t${start + k}`), joined: [[3, 5, "日"]] } };
    },
  };
  const texts = createTexts(transport, { texts: [7, 5000], entries: [{ texts: [[0, null], [1, 1]] }] });
  const { query: tokens, key } = texts.of({ entry: 0, batch: 1 });
  assert.equal(key, tokens);
  await assert.rejects(tokens.range(0, 10));
  broken = false;
  assert.deepEqual(await tokens.range(2046, 2050), ["t2046", "t2047", "t2048", "t2049"]);
  assert.equal(tokens.peek(2047), "t2047");
  assert.equal(tokens.peek(4999), null);
  assert.deepEqual(tokens.joined(4), { start: 3, stop: 5, text: "日" });
  assert.equal(tokens.joined(5), null);
  const before = asked.length;
  await tokens.range(0, 4096);
  assert.equal(asked.length, before);
  assert.deepEqual(await tokens.range(4999, 9999), ["t4999"]);
  assert.ok(asked.every(([of]) => of === 1));
  const cross = texts.of({ entry: 0, batch: 0 });
  assert.deepEqual([await cross.query.range(6, 9), await cross.key.range(0, 5), cross.key.peek(0)], [["t6"], [], null]);
  assert.deepEqual(asked.at(-1), [0, 0, 7]);
  assert.equal(texts.of({ entry: 0, batch: 2 }).query.length, 0);
});

test("the cache of tiles is bounded in bytes, drops the oldest, and gives up what is not wanted", async () => {
  const source = createSource({ entry: 0, head: 1, batch: 0, variant: "plain", pool: "max" });
  const aborted = [];
  const asked = [];
  let slow = false;
  const transport = {
    get: (name, { x }, { signal }) =>
      new Promise((resolve, reject) => {
        asked.push(x);
        signal.addEventListener("abort", () => (aborted.push(x), reject(Object.assign(new Error("given up"), { aborted: true }))));
        if (!slow) resolve({ buffer: new Uint16Array(TILE * TILE).fill(x + 2).buffer, progress: 1 });
      }),
  };
  const limit = 8 * 2 * TILE * TILE;
  const tiles = createTiles(transport, { bytes: limit, changed() {} });
  const item = (x) => ({ key: getTileKey(source, 0, 0, x), name: "tile", params: { x }, distance: x });
  for (let x = 0; x < 30; x++) {
    tiles.begin();
    tiles.want([item(x)]);
    await new Promise((go) => setTimeout(go, 0));
    assert.ok(tiles.bytes() <= limit);
  }
  assert.equal(tiles.get(item(0).key), null);
  assert.equal(tiles.get(item(29).key).codes[7], 31);
  slow = true;
  asked.length = 0;
  tiles.want([item(51), item(50)]);
  assert.deepEqual(asked, [50, 51]); // the nearest first
  tiles.want([item(51)]);
  assert.deepEqual(aborted, [50]);
  assert.ok(tiles.busy());
  tiles.destroy();
  assert.deepEqual(aborted, [50, 51]);
});
