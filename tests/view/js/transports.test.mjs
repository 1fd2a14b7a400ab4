// The three ways to an answer: HTTP, messages of a notebook, and the numbers of a file. Each gives the same.

import assert from "node:assert/strict";
import test from "node:test";
import { deflateRawSync } from "node:zlib";
import { unpack } from "../../../src/attlas/view/static/data/base64.js";
import { createMessageTransport } from "../../../src/attlas/view/static/data/messages.js";
import { createPackedTransport, describeMissing } from "../../../src/attlas/view/static/data/packed.js";
import { createHttpTransport } from "../../../src/attlas/view/static/data/transport.js";
import { decode, encode } from "../../../src/attlas/view/static/map/colour.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";

setTranslations({});

const json = (content, options = {}) => new Response(JSON.stringify(content), { headers: { "Content-Type": "application/json", ...options.headers }, status: options.status ?? 200 });

test("HTTP: the key of the content is part of each address behind the first", async () => {
  const asked = [];
  globalThis.fetch = async (address) => {
    asked.push(address);
    if (address.includes("api/info")) return json({ key: "k1" });
    return new Response(new Uint8Array([1, 2]), { headers: { "Attlas-Progress": "0.5", "Attlas-Sampled": "1", "Cache-Control": "private, immutable" } });
  };
  const transport = createHttpTransport("./");
  assert.deepEqual((await transport.get("info")).json, { key: "k1" });
  const tile = await transport.get("tile", { entry: 0, head: "mean" });
  assert.deepEqual(asked, ["./api/info?", "./api/tile?entry=0&head=mean&v=k1"]);
  assert.deepEqual([...new Uint8Array(tile.buffer)], [1, 2]);
  assert.deepEqual([tile.progress, tile.sampled, tile.final], [0.5, true, true]);
});

test("HTTP: what failed says why", async () => {
  const transport = createHttpTransport();
  const known = new Response('{"error": "no such head"}', { status: 404, headers: { "Attlas-Progress": "1" } });
  // A server that does not know the page at all says nothing of a progress.
  const answers = [() => known, () => json({ error: "Not Found" }, { status: 404 }), () => json({ reason: ["not in {0}", "a"] }, { status: 409 }), () => new Response("", { status: 500 })];
  const expected = [[404, "no such head", false], [410, "Not Found", false], [409, "not in a", false], [500, "status 500", false]];
  for (const [at, answer] of answers.entries()) {
    globalThis.fetch = async () => answer();
    await assert.rejects(transport.get("cell"), (error) => (assert.deepEqual([error.status, error.message, error.aborted], expected[at]), true));
  }
  globalThis.fetch = async () => Promise.reject(Object.assign(new Error("x"), { name: "AbortError" }));
  await assert.rejects(transport.get("cell"), { status: 499, aborted: true });
  globalThis.fetch = async () => Promise.reject(new TypeError("x"));
  await assert.rejects(transport.get("cell"), { status: 0, aborted: false, message: "the server does not answer" });
});

// The model of a notebook widget: keeps what is sent, and gives messages back.
function createModel() {
  const listeners = new Set();
  const sent = [];
  return {
    sent,
    answer: (message, ...buffers) => listeners.forEach((listener) => listener({ type: "answer", ...message }, buffers)),
    on: (_, listener) => listeners.add(listener),
    off: (_, listener) => listeners.delete(listener),
    send: (message) => sent.push(message),
  };
}

test("messages: an answer goes to its question, copied from a view at an odd offset", async () => {
  const model = createModel();
  const transport = createMessageTransport(model);
  const [first, second] = [transport.get("tile", { level: 3 }), transport.get("info")];
  assert.deepEqual(model.sent.map(({ type, name, params }) => [type, name, params]), [["get", "tile", { level: "3" }], ["get", "info", {}]]);
  const [a, b] = model.sent.map(({ id }) => id);
  const told = { status: 200, progress: 1, final: true, sampled: false };
  model.answer({ id: b, kind: "json", ...told }, new TextEncoder().encode('{"key": 1}'));
  model.answer({ id: "of another page", kind: "json", ...told }, new Uint8Array());
  model.answer({ id: a, kind: "binary", ...told }, new DataView(new Uint8Array([9, 1, 0, 2, 0]).buffer, 1, 4));
  assert.deepEqual([...new Uint16Array((await first).buffer)], [1, 2]);
  assert.deepEqual((await second).json, { key: 1 });
});

test("messages: given up, refused, and ended", async () => {
  const model = createModel();
  const transport = createMessageTransport(model);
  const controller = new AbortController();
  const given = transport.get("row", {}, { signal: controller.signal });
  controller.abort();
  await assert.rejects(given, { status: 499, aborted: true });
  assert.deepEqual(model.sent.at(-1), { type: "cancel", id: model.sent[0].id });
  const refused = transport.get("row");
  model.answer({ id: model.sent.at(-1).id, status: 404, error: "no row" });
  await assert.rejects(refused, { status: 404, message: "no row" });
  const left = transport.get("row");
  transport.destroy();
  await assert.rejects(left, { status: 499 });
  await assert.rejects(transport.get("row", {}, { signal: controller.signal }), { status: 499 });
});

// As packing.py writes numbers: all first bytes, then all second bytes, deflated.
function pack(values) {
  const [bytes, width] = [new Uint8Array(values.buffer), values.BYTES_PER_ELEMENT];
  const planes = Uint8Array.from({ length: bytes.length }, (_, at) => bytes[(at % values.length) * width + Math.floor(at / values.length)]);
  return { text: deflateRawSync(planes).toString("base64"), width };
}

test("packed numbers are what they were", async () => {
  const values = Float32Array.from({ length: 777 }, (_, at) => Math.fround(Math.sin(at) * 10 ** (at % 9)));
  assert.deepEqual(new Float32Array(await unpack(pack(values))), values);
});

// Two heads of 300 queries and keys: of the first the weights at cell level, of the second blocks and 4 weights a query.
const n = 300;
const weightAt = (i, j) => (j <= i ? Math.fround((1 + ((7 * i + 3 * j) % 11)) / (6 * (i + 1))) : 0);
function createData(changes = {}) {
  const tile = (y, x, level) => Uint16Array.from({ length: 256 * 256 }, (_, at) => {
    const [i, j] = [(256 * y + Math.floor(at / 256)) << level, (256 * x + (at % 256)) << level];
    return i < n && j < n && j <= i ? encode(weightAt(i, j)) : 0;
  });
  const [kept, gaps] = [new Uint16Array(4 * n), new Int32Array(4 * n)];
  for (let i = 0; i < n; i++) {
    const keys = Array.from({ length: i + 1 }, (_, j) => j).sort((a, b) => weightAt(i, b) - weightAt(i, a)).slice(0, 4);
    keys.forEach((j, at) => ([kept[4 * i + at], gaps[4 * i + at]] = [encode(weightAt(i, j)), i - j]));
  }
  const entry = { name: "layer", layer: 0, heads: [0, 1, 2], m: n, n, first_query: 0, first_key: 0, batch: 1, levels: 2, causal: true, texts: [[0, 0]] };
  return {
    info: { title: "t", entries: [entry], texts: [4], bookmarks: [] },
    state: { entry: 0, head: 0, batch: 0, variant: "plain", pool: "max" },
    packed: [
      { entry: 0, head: 0, finest: 0, block: null, exact: false, kept: 0, patches: [] },
      { entry: 0, head: 1, finest: 1, block: null, exact: false, kept: 4, patches: [{ r0: 64, r1: 128, c0: 64, c1: 128 }] },
    ],
    heads: { progress: 1, rows: [], columns: [] },
    texts: { 0: { tokens: ["One", " fish", "⟨e2⟩", "⟨82ac⟩"], joined: [[2, 4, "€"]] } },
    parts: {
      "tile:0:0:0:0:0": pack(tile(0, 0, 0)),
      "tile:0:0:0:1:0": pack(tile(1, 0, 0)),
      "tile:0:0:0:1:1": pack(tile(1, 1, 0)),
      "tile:0:1:1:0:0": pack(tile(0, 0, 1)),
      "kept:0:1": pack(kept),
      "gaps:0:1": pack(gaps),
      "patch:0:1:64:64": pack(Float32Array.from({ length: 64 * 64 }, (_, at) => (at % 64 <= at / 64 ? weightAt(64 + Math.floor(at / 64), 64 + (at % 64)) : NaN))),
      ...changes.parts,
    },
  };
}
const head = (number) => ({ entry: 0, head: number, batch: 0, variant: "plain" });
const close = (found, wanted) => found.forEach((value, at) => assert.ok(Math.abs(value - wanted[at]) <= 3.5e-4 * wanted[at], `${at}: ${value}, not ${wanted[at]}`));

test("a file gives the weights of its cells, rounded to their codes", async () => {
  const transport = createPackedTransport(createData());
  const { buffer, rounded } = await transport.get("region", { ...head(0), r0: 250, r1: 260, c0: 100, c1: 270 });
  assert.equal(rounded, true);
  close(new Float32Array(buffer), Array.from({ length: 1700 }, (_, at) => weightAt(250 + Math.floor(at / 170), 100 + (at % 170))));
  const { json: largest } = await transport.get("top", { ...head(0), r0: 0, r1: n, c0: 0, c1: n, k: 1 });
  const best = Math.max(...Array.from({ length: n * n }, (_, at) => weightAt(Math.floor(at / n), at % n)));
  close([largest.cells[0][2]], [best]);
});

test("of a head in blocks a file has the largest weights of a query, and the cells of its patches", async () => {
  const transport = createPackedTransport(createData());
  const row = new Float32Array((await transport.get("row", { ...head(1), i: 200 })).buffer);
  const wanted = Array.from({ length: n }, (_, j) => weightAt(200, j));
  const known = [...row.keys()].filter((j) => row[j] > 0);
  assert.equal(known.length, 4);
  close(known.map((j) => row[j]), known.map((j) => wanted[j]));
  assert.ok(Math.min(...known.map((j) => wanted[j])) >= Math.max(...wanted.filter((_, j) => !known.includes(j))));
  assert.ok(Number.isNaN(row[[...wanted.keys()].find((j) => j <= 200 && !known.includes(j))]));
  assert.deepEqual([row[201], row[n - 1]], [0, 0]); // masked
  const { json: cell } = await transport.get("cell", { ...head(1), i: 100, j: 70 });
  assert.deepEqual([cell.weight, cell.rounded, cell.allowed], [weightAt(100, 70), false, true]);
  const masked = (await transport.get("cell", { ...head(1), i: 70, j: 100 })).json;
  assert.equal(masked.allowed, false);
  const codes = new Uint16Array((await transport.get("tile", { ...head(1), pool: "max", level: 0, y: 0, x: 0 })).buffer);
  close([decode(codes[100 * 256 + 70])], [weightAt(100, 70)]);
  assert.deepEqual([codes[0], codes[100 * 256 + 63]], [0, 0]); // outside of the patch
});

test("masked tiles are not in a file, and what it lacks is named", async () => {
  const transport = createPackedTransport(createData());
  assert.ok(new Uint16Array((await transport.get("tile", { ...head(0), pool: "max", level: 0, y: 0, x: 1 })).buffer).every((code) => code === 0));
  const lacks = [
    ["tile", { ...head(2), pool: "max", level: 0, y: 0, x: 0 }, "this head"],
    ["tile", { ...head(0), pool: "mean", level: 1, y: 0, x: 0 }, "means of blocks"],
    ["tile", { ...head(1), pool: "max", level: 0, y: 1, x: 1 }, "this level of detail"],
    ["row", { ...head(0), batch: 1, i: 3 }, "this batch"],
    ["row", { ...head(0), variant: "nosink", i: 3 }, "rows without the first key"],
    ["track", { ...head(0), name: "entropy" }, "this track"],
    ["pooling", head(0), "pooling"],
  ];
  for (const [name, params, what] of lacks) await assert.rejects(transport.get(name, params), { status: 404, message: `This file does not hold ${what}` });
});

test("a file is searched across its tokens", async () => {
  const transport = createPackedTransport(createData());
  const search = async (text) => (await transport.get("search", { of: 0, text, limit: "10" })).json;
  assert.deepEqual(await search("e FISH"), { matches: [[0, 2]], total: 1 });
  assert.deepEqual(await search("€"), { matches: [[2, 4]], total: 1 });
  assert.deepEqual((await transport.get("tokens", { of: 0, start: 1, stop: 3 })).json, { start: 1, tokens: [" fish", "⟨e2⟩"], joined: [[2, 4, "€"]] });
  assert.equal(describeMissing(createData()), "Offline copy of 2 of 3 heads; 0·0: every cell, overviews of the others; the 4 largest weights of each query; every cell at one place; blocks as maxima, with the first key.");
});
