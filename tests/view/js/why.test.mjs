// The panel of Why?: what it asks for, what it says of a cell and of a map, and what a page without a server explains.

import assert from "node:assert/strict";
import test from "node:test";
import { deflateRawSync } from "node:zlib";
import { createPackedTransport } from "../../../src/attlas/view/static/data/packed.js";
import { holdsReason, listReasons } from "../../../src/attlas/view/static/data/reasons.js";
import { createStore } from "../../../src/attlas/view/static/data/state.js";
import { findLargest, formatSigned, listShown, mountWhy } from "../../../src/attlas/view/static/panels/why.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";
import { createDocument, settled, until } from "./dom.mjs";

setTranslations({});

const tokens = [..."abcdefghij"];
const part = (name, logit, layer = null, head = null) => ({ name, kind: head === null ? "MLP" : "head", layer, head, role: "", logit });
const cell = {
  layer: 1, head: 0, cell: [7, 3], logit: 9, weight: 0.75, total: 9, remainder: 1e-7, relative: true, above: 6, mean: 3,
  keys: [part("head 0·1", 5, 0, 1), part("MLP 0", 2), part("token", -1)],
  queries: [part("token", 6)],
  pairs: [{ query: part("token", 6), key: part("head 0·1", 5, 0, 1), logit: 5 }],
  writer: { ...part("head 0·1", 5, 0, 1), sources: [{ at: 2, logit: 4.9 }], others: 0.1, row: 3, without: { logit: 4, weight: 0.1 }, place: { entry: 0, head: 1 } },
  notes: [],
};
const table = { layer: 1, head: 0, queries: [part("token", 3)], keys: [part("head 0·1", 2, 0, 1), part("MLP 0", 1)], others: [0, 0], table: [[2, 1]], total: 3, notes: [] };
const entryOf = (layer, parts = true) => ({ layer, kind: "self", heads: [0, 1], m: 10, n: 10, first_query: 0, first_key: 0, batch: 1, parts, readable: true, texts: [[0, 0]], recording: "" });
const infoOf = (changes = {}) => ({ title: "t", entries: [entryOf(0), entryOf(1)], texts: [10], bookmarks: [], ...changes });

/** Mount the panel over answers by their names, with a state that has some changes. */
function mount({ answers = { why: cell, why_map: table }, transport, info = infoOf(), ...changes } = {}) {
  const root = createDocument();
  const asked = [];
  const centred = [];
  const store = createStore({ info, entry: 1, head: 0, batch: 0, pin: { i: 7, j: 3 }, panel: "", heads: null, ...changes });
  const own = { async get(name, params) {
    asked.push([name, params]);
    if (answers[name] instanceof Error) throw answers[name];
    return { json: answers[name] };
  } };
  const side = { length: 10, range: async (start, stop) => tokens.slice(start, stop) };
  const text = { query: side, key: side };
  const panel = mountWhy(root, { store, transport: transport ?? own, texts: { of: () => text }, uid: (name) => name, root, map: { centre: (...place) => centred.push(place) } });
  const say = (selector) => root.querySelectorAll(selector).map((element) => element.textContent);
  const press = (words) => root.querySelectorAll("button").find((button) => button.textContent === words).click();
  return { root, store, panel, asked, centred, say, press };
}

test("numbers have a sign, and the tokens about a place are those of the text", () => {
  assert.deepEqual([1.26, -0.04, -2, 0].map(formatSigned), ["+1.3", "+0.0", "−2.0", "+0.0"]);
  assert.deepEqual(listShown([0, 9], 10, 1), [0, 1, 8, 9]);
  assert.deepEqual(findLargest([[1, 2, 9], [3, 0, 9]], 2, 2), { row: 1, column: 0, value: 3 });
  assert.equal(findLargest([[-1]], 1, 1), null);
});

test("a pinned cell: who wrote the key, from which token, and the way to that head", async () => {
  const { store, asked, centred, say, press } = mount({ panel: "why" });
  await settled();
  assert.deepEqual(asked, [["why", { entry: 1, head: 0, batch: 0, i: 7, j: 3 }]]);
  assert.deepEqual(say("p.reasons-lead"), ["Layer 1, head 0 at “h” looks at “d” with weight 0.750. Most of it stands in the key: head 0·1 wrote +5.0 of the +6.0 by which the logit lies above its row. It took that from “c”, the token before. Without this part the weight would be 0.100, if all norms kept their scales."]);
  assert.deepEqual(say("dt").slice(0, 3), ["head 0·1", "MLP 0", "token"]);
  assert.deepEqual(say("dd").slice(0, 3), ["+5.0", "+2.0", "−1.0"]);
  assert.deepEqual(say("span.reasons-token").join(""), "abcdefghij");
  assert.deepEqual(say("p.reasons-held"), []); // a server explains every cell
  press("Open head 0·1 where it read this →");
  assert.deepEqual([store.state.entry, store.state.head, store.state.pin, store.state.panel], [0, 1, { i: 3, j: 2 }, ""]);
  assert.deepEqual(centred, [[3, 2]]);
});

test("the whole map is a table, without a pinned cell and on request", async () => {
  const { asked, say, press } = mount({ panel: "why" });
  await settled();
  press("The whole map");
  await settled();
  assert.deepEqual(asked.at(-1), ["why_map", { entry: 1, head: 0, batch: 0 }]);
  assert.deepEqual(say("td"), ["", "+2.0", "+1.0"]);
  assert.match(say("p.reasons-lead")[0], /^Layer 1, head 0: .* Most of it, \+2.0: token in the query meets head 0·1 in the key\.$/);
  press("The pinned cell");
  await settled();
  assert.equal(asked.at(-1)[0], "why");
});

test("what a head is stands behind its name once that is known", async () => {
  const { store, say } = mount({ panel: "why" });
  await settled();
  store.set({ heads: { rows: [{ entry: 0, head: 1, kinds: ["previous token"] }] } });
  assert.equal(say("dt")[0], "head 0·1 (previous token)");
});

test("what cannot be explained says why", async () => {
  const without = infoOf({ entries: [entryOf(0, false), entryOf(1, false)] });
  const says = async (options) => {
    const mounted = mount({ panel: "why", ...options });
    await settled();
    return [mounted.say("p.reasons-note"), mounted.asked.length];
  };
  assert.deepEqual(await says({ head: "mean" }), [["The mean of heads has no logits: choose one head."], 0]);
  assert.deepEqual(await says({ info: without }), [["This recording has no parts: attlas record --parts, or record(model, parts=True), keeps them."], 0]);
  // Of a typed text the server knows the reason.
  const typed = { ...without, reading: { number: 2 } };
  assert.deepEqual(await says({ info: typed, answers: { why: new Error("its parts made room") } }), [["its parts made room."], 1]);
});

test("the button is there for a pinned cell, and for maps that can be explained", () => {
  const { root, store } = mount({ pin: null });
  const box = root.firstElementChild;
  const isHidden = (patch) => (store.set(patch), box.hidden);
  assert.deepEqual([isHidden({ pin: null }), isHidden({ head: "mean" }), isHidden({ head: 1 })], [false, true, false]);
  store.set({ info: infoOf({ entries: [entryOf(0, false), entryOf(1, false)] }) });
  assert.deepEqual([isHidden({ pin: { i: 1, j: 0 } }), isHidden({ pin: null })], [false, true]);
});

test("a closed panel gives up its question, and leaves nothing behind", async () => {
  const { root, store, panel, say } = mount({ panel: "why" });
  store.set({ panel: "" });
  await settled();
  assert.deepEqual(say("p.reasons-lead"), []);
  assert.equal(root.querySelectorAll("dialog[open]").length, 0);
  panel.destroy();
  assert.equal(root.children.length, 0);
  store.set({ panel: "why" });
  assert.equal(root.children.length, 0);
});

// As packing.py writes an answer.
const pack = (answer) => ({ text: deflateRawSync(Buffer.from(JSON.stringify(answer))).toString("base64"), width: 1 });
const held = (head, why, entry = 1) => ({ entry, head, finest: 0, block: null, exact: true, kept: 0, patches: [], why });
function createOffline() {
  const transport = createPackedTransport({
    info: infoOf(), state: { entry: 1, head: 0, batch: 0, variant: "plain", pool: "max" },
    packed: [held(0, { cells: [[7, 3]], map: true }), held(1, { cells: [[9, 8], [2, 1]], map: false }), held(0, { cells: [], map: false }, 0)],
    heads: { rows: [], columns: [] }, texts: { 0: { tokens, joined: [] } },
    parts: { "why:1:0:7:3": pack(cell), "why_map:1:0": pack(table), "why:1:1:9:8": pack({ ...cell, head: 1, weight: 0.5 }) },
  });
  return transport;
}
const offlineInfo = async () => (await createOffline().get("info")).json;

test("a page without a server explains what it holds", async () => {
  const info = await offlineInfo();
  assert.deepEqual([holdsReason(info, { entry: 1, head: 0 }, { i: 7, j: 3 }), holdsReason(info, { entry: 1, head: 0 }, null), holdsReason(info, { entry: 1, head: 1 }, null), holdsReason(info, { entry: 0, head: 1 }, { i: 7, j: 3 })], [true, true, false, false]);
  assert.equal(holdsReason(infoOf(), { entry: 0, head: 1 }, { i: 5, j: 3 }), true);
  assert.deepEqual(listReasons(info, { entry: 1, head: 1 }).map(({ head, i, j }) => [head, i, j]), [[1, 9, 8], [1, 2, 1], [0, 7, 3]]);
  const transport = createOffline();
  assert.deepEqual((await transport.get("why", { entry: 1, head: 0, batch: 0, i: 7, j: 3 })).json, cell);
  assert.deepEqual((await transport.get("why_map", { entry: 1, head: 0, batch: 0 })).json, table);
  await assert.rejects(transport.get("why", { entry: 1, head: 0, batch: 1, i: 7, j: 3 }), { status: 404, message: "This file does not hold this batch" });
  await assert.rejects(transport.get("why", { entry: 1, head: 0, i: 8, j: 3 }), { status: 404, message: "This file does not hold why this is where it is" });
});

test("it lists its cells, opens them, and says what it does not explain", async () => {
  const { store, centred, say, press } = mount({ info: await offlineInfo(), transport: createOffline(), panel: "why" });
  const lead = (pattern) => until(() => pattern.test(say("p.reasons-lead")[0] ?? ""));
  await lead(/with weight 0\.750/);
  assert.match(say("p.reasons-note").at(-1), /^This page explains the cells below\. The viewer explains every cell/);
  assert.equal(say("button").some((words) => words.startsWith("Open head 0·1")), false); // the page does not hold that head
  press("1·1: 9, 8");
  await lead(/^Layer 1, head 1 .* with weight 0\.500\./);
  assert.deepEqual([store.state.head, store.state.pin, centred], [1, { i: 9, j: 8 }, [[9, 8]]]);
  assert.equal(say("button").includes("The whole map"), false); // nor that map
  store.set({ pin: { i: 4, j: 4 } });
  await lead(/^This page does not explain this cell\.$/);
  assert.deepEqual(say("p.reasons-held"), ["1·1: 9, 81·1: 2, 11·0: 7, 3"]);
  store.set({ pin: null });
  await lead(/^This page does not explain the whole map of this head\.$/);
  store.set({ head: 0 });
  await lead(/^Layer 1, head 0: where it looks/);
});
