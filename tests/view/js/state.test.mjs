import assert from "node:assert/strict";
import test from "node:test";
import { DEFAULTS, FIELD_NAMES, bindHash, createStore, readHash, isEqual, writeHash } from "../../../src/attlas/view/static/data/state.js";
import { repairState } from "../../../src/attlas/view/static/main.js";
import { stepHead, stepLayer } from "../../../src/attlas/view/static/panels/shell.js";

const full = {
  entry: 3, head: "mean", batch: 1, pool: "mean", variant: "nosink", second: { entry: 2, head: 5 }, compare: "ratio", row: 60321.5, column: 102.25,
  zoom: -6.75, colour: "linear", low: 0.001, high: 0.5, ratio: 3, palette: "cividis", theme: "dark", pin: { i: 60321, j: 102 }, by: "key",
  sort: "entropy", filter: { kinds: ["induction"], from: 0.25 }, panel: "help", aside: "none", text: 2, more: "3.1,2.4", view: "lines",
  difference: 0.25, language: "zh", span: { start: 3, stop: 9 }, heat: "agree", ink: "log", tour: 1, story: 2, off: "2.4;12-15",
  outline: "off", minimap: "off",
};

test("a link holds everything and gives it back", () => {
  const link = writeHash({ ...DEFAULTS, ...full });
  assert.deepEqual(Object.keys(full).sort(), [...FIELD_NAMES].sort());
  assert.deepEqual(readHash(`#${link}`), full);
  assert.doesNotMatch(link, /[\s"<>]/);
});

test("what is at its default is left out", () => {
  assert.equal(writeHash(DEFAULTS), "");
  assert.equal(writeHash({ ...DEFAULTS, head: 3, hover: { i: 1, j: 2 } }), "h=3");
});

test("nonsense in a link is left out", () => {
  const found = readHash("#e=-1&h=<b>&b=1.5&p=median&s=1&m=&r=NaN&c=Infinity&z=1e400&lo=x&pal=__proto__&pin=1.2.3&q=~{&unknown=1&__proto__=2");
  assert.deepEqual(found, {});
  assert.equal(readHash("#z=99").zoom, 6);
  assert.equal({}.polluted, undefined);
});

test("listeners hear of what they asked for, once, and only of changes", () => {
  const store = createStore({ entry: 1 });
  const heard = [];
  const off = store.on(["entry", "pin"], (state, changed) => heard.push(changed));
  store.set({ entry: 1 });
  store.set({ row: 4 });
  store.set({ entry: 2, row: 5, pin: { i: 1, j: 2 } });
  store.set({ pin: { i: 1, j: 2 } });
  assert.deepEqual(heard, [["entry", "row", "pin"]]);
  off();
  store.set({ entry: 7 });
  assert.equal(heard.length, 1);
  assert.throws(() => {
    store.state.entry = 9;
  }, TypeError);
});

test("equal values are equal", () => {
  assert.ok(isEqual({ i: 1, j: 2 }, { i: 1, j: 2 }));
  assert.ok(!isEqual({ i: 1, j: 2 }, { i: 1, j: 3 }));
  assert.ok(!isEqual(null, { i: 1 }));
  assert.ok(isEqual(NaN, NaN));
});

test("the hash follows the store, and the store the hash", async () => {
  const listeners = {};
  const view = {
    location: { hash: "" },
    history: { replaceState: (_, __, hash) => (view.location.hash = hash) },
    addEventListener: (name, run) => (listeners[name] = run),
    removeEventListener: (name) => delete listeners[name],
  };
  const store = createStore();
  const end = bindHash(store, view);
  store.set({ head: 4, row: 1, column: 2, zoom: -3 });
  await new Promise((go) => setTimeout(go, 220));
  assert.equal(view.location.hash, "#h=4&r=1&c=2&z=-3");
  view.location.hash = "#h=2&z=1";
  listeners.hashchange();
  assert.equal(store.state.head, 2);
  assert.equal(store.state.zoom, 1);
  assert.equal(store.state.row, 1); // a link without a place keeps the place
  end();
  assert.equal(listeners.hashchange, undefined);
});

const info = { entries: [{ heads: [0, 1, 2], m: 10, n: 10, batch: 1 }, { heads: [4, 7], m: 20, n: 30, batch: 2 }] };

test("a state is repaired to what there is", () => {
  const broken = { ...DEFAULTS, info, entry: 9, head: 7, batch: 3, second: { entry: 5, head: 0 }, pin: { i: 10, j: 0 }, low: 3, high: 2 };
  const patch = repairState(broken);
  assert.deepEqual(patch, { entry: 0, head: 2, batch: 0, second: null, pin: null, low: -8, high: 0 });
  assert.deepEqual(repairState({ ...broken, ...patch }), {});
});

test("[ and ] walk through all heads, { and } through layers", () => {
  let at = { info, entry: 0, head: 0 };
  const seen = [];
  for (let k = 0; k < 5; k++) {
    seen.push(`${at.entry}.${at.head}`);
    at = { ...at, ...stepHead(at, 1) };
  }
  assert.deepEqual(seen, ["0.0", "0.1", "0.2", "1.0", "1.1"]);
  assert.deepEqual([at.entry, at.head], [0, 0]);
  assert.deepEqual(stepHead(at, -1), { entry: 1, head: 1 });
  assert.deepEqual(stepLayer({ info, entry: 0, head: 2 }, 1), { entry: 1, head: 1 });
  assert.deepEqual(stepHead({ info, entry: 0, head: "mean" }, 1), { entry: 1, head: "mean" });
});
