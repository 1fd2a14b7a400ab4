import assert from "node:assert/strict";
import test from "node:test";

import { readNumbers, readTensors } from "../../../src/attlas/view/static/live/tensors.js";
import { computeThumbnail, computeTile, computeTrack, computeWeights, createComputedParts } from "../../../src/attlas/view/static/live/weights.js";
import { readContents, readAddress } from "../../../src/attlas/view/static/live/open.js";
import { decode, MASKED } from "../../../src/attlas/view/static/map/colour.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";

setTranslations({});
const close = (a, b, off = 1e-6) => assert.ok(Math.abs(a - b) <= off * Math.max(1e-9, Math.abs(b)), `${a} is not ${b}`);

function createFile(tensors) {
  const header = {};
  let offset = 0;
  for (const [name, [dtype, shape, bytes]] of Object.entries(tensors)) {
    header[name] = { dtype, shape, data_offsets: [offset, offset + bytes.byteLength] };
    offset += bytes.byteLength;
  }
  const text = new TextEncoder().encode(JSON.stringify({ __metadata__: { format: "pt" }, ...header }));
  const file = new Uint8Array(8 + text.length + offset);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length), true);
  file.set(text, 8);
  let place = 8 + text.length;
  for (const [, , bytes] of Object.values(tensors)) {
    file.set(new Uint8Array(bytes.buffer), place);
    place += bytes.byteLength;
  }
  return file.buffer;
}

test("tensors of each type are read, at places that are no multiples of their size", () => {
  const file = createFile({
    odd: ["BF16", [3], new Uint16Array([0x3f80, 0xc040, 0x0000])],
    half: ["F16", [5], new Uint16Array([0x3c00, 0xc200, 0x0001, 0x7c00, 0x7e00])],
    single: ["F32", [1, 2], new Float32Array([0.1, -7])],
    double: ["F64", [2], new Float64Array([Math.PI, -1e300])],
  });
  const tensors = readTensors(file);
  assert.deepEqual([...readNumbers(tensors.odd)], [1, -3, 0]);
  assert.deepEqual([...readNumbers(tensors.half)], [1, -3, 2 ** -24, Infinity, NaN]);
  assert.deepEqual([...readNumbers(tensors.single)], [Math.fround(0.1), -7]);
  assert.deepEqual([...readNumbers(tensors.double)], [Math.PI, -1e300]);
});

test("a file that is cut off is refused, and so is another type", () => {
  const file = createFile({ a: ["F32", [2], new Float32Array(2)], b: ["I64", [1], new BigInt64Array(1)] });
  for (const stop of [4, 20, file.byteLength - 1]) assert.throws(() => readTensors(file.slice(0, stop)), /cut off or damaged/);
  assert.throws(() => readNumbers(readTensors(file).b), /type I64/);
  assert.throws(() => readNumbers({ ...readTensors(file).a, shape: [3] }), /cut off or damaged/);
});

function createHead(m, n, causal, width = 5, seed = 1) {
  let state = seed;
  const next = () => ((state = (state * 48271) % 2147483647) / 2147483647 - 0.5) * 4;
  const [q, k] = [m, n].map((size) => Float32Array.from({ length: size * width }, next));
  const scale = 1 / Math.sqrt(width);
  const logits = Array.from({ length: m }, (_, i) => Array.from({ length: n }, (_, j) => (causal && j > i ? -Infinity : scale * Array.from({ length: width }, (_, c) => q[i * width + c] * k[j * width + c]).reduce((a, b) => a + b, 0))));
  const lse = Float64Array.from(logits, (row) => Math.log(row.reduce((sum, logit) => sum + Math.exp(logit), 0)));
  return { head: { q, k, lse, m, n, width, scale, causal }, expected: logits.map((row, i) => row.map((logit) => Math.exp(logit - lse[i]))) };
}

for (const [m, n, causal] of [[300, 300, true], [7, 90, false]]) {
  test(`weights of ${m} × ${n} and what is made of them are those of the definition`, async () => {
    const { head, expected } = createHead(m, n, causal);
    const weights = await computeWeights(head);
    for (let i = 0; i < m; i += 3) for (let j = 0; j < n; j++) close(weights[i * n + j], expected[i][j]);
    close(weights.reduce((sum, weight) => sum + weight, 0), m, 1e-5);
    const isAllowed = (i, j) => !causal || j <= i;
    for (const level of [0, 1]) {
      const side = 2 ** level;
      const tile = computeTile(weights, head, level, 0, 0);
      for (let r = 0; r * side < Math.min(m, 256 * side); r += 5) {
        for (let c = 0; c * side < Math.min(n, 256 * side); c += 3) {
          const block = [];
          for (let i = r * side; i < Math.min(m, (r + 1) * side); i++) for (let j = c * side; j < Math.min(n, (c + 1) * side); j++) if (isAllowed(i, j)) block.push(expected[i][j]);
          const code = tile[r * 256 + c];
          if (!block.length) assert.equal(code, MASKED);
          else close(decode(code), Math.max(...block), 4e-4);
        }
      }
    }
    const column = (j) => expected.map((row) => row[j]);
    close(computeTrack(weights, head, "column_mass")[4], column(4).reduce((a, b) => a + b, 0));
    close(computeTrack(weights, head, "column_max")[4], Math.max(...column(4)));
    close(computeTrack(weights, head, "max_weight")[6], Math.max(...expected[6]));
    const entropy = expected[6].reduce((sum, weight) => (weight > 0 ? sum - weight * Math.log(weight) : sum), 0);
    close(computeTrack(weights, head, "entropy")[6], entropy, 1e-5);
    close(computeTrack(weights, head, "effective_keys")[6], Math.exp(entropy), 1e-5);
    const thumbnail = await computeThumbnail(head);
    close(decode(thumbnail[0]), Math.max(...expected[Math.floor((0.5 * m) / Math.min(m, 64))].slice(0, Math.floor(n / 64))), 4e-4);
  });
}

test("parts are computed by their names, each matrix once", async () => {
  const { head, expected } = createHead(40, 40, true);
  let reads = 0;
  const compute = createComputedParts(async () => {
    reads += 1;
    return head;
  });
  assert.equal(await compute("row:0:0:3"), null);
  assert.equal(reads, 0);
  const exact = new Float32Array(await compute("exact:0:0"));
  close(exact[39 * 40 + 7], expected[39][7]);
  assert.equal((await compute("exact:0:0")), exact.buffer);
  assert.equal((await compute("tile:0:0:0:0:0")).byteLength, 2 * 256 ** 2);
  assert.equal((await compute("track:0:0:entropy")).byteLength, 4 * 40);
});

test("what is no page is refused by name, and nothing of a page is run", async () => {
  const wrap = (data) => `<!doctype html><script>globalThis.hit = 1</script><script type="application/json" id="attlas-data">${data}</script>`;
  const read = (text) => readContents({ name: "a.html", text });
  await assert.rejects(read("<p>hello"), /a.html is no page that attlas has exported/);
  await assert.rejects(read(wrap('{"format":1,')), /a.html is cut off or damaged/);
  await assert.rejects(read(wrap('{"format":2}')), /another version/);
  for (const data of ["null", "[]", '{"format":1}', '{"format":1,"packed":[],"info":{"entries":[]},"state":{},"parts":{},"texts":{},"heads":{}}']) await assert.rejects(read(wrap(data)), /a.html holds nothing to show/);
  const page = { format: 1, packed: [{}], info: { entries: [{}], project: "javascript:alert(1)" }, state: {}, parts: {}, texts: {}, heads: {} };
  assert.equal((await read(wrap(JSON.stringify(page)))).info.project, null);
  assert.deepEqual(Object.keys(await read(wrap('{"answers":{"info":{}}}'))), ["answers"]);
  assert.equal(globalThis.hit, undefined);
});

test("an address is a page or a folder, and one that is neither is refused", async () => {
  const asked = [];
  globalThis.fetch = async (url) => {
    asked.push(String(url));
    return new Response("text");
  };
  const base = "https://example.org/a/live.html?run=x#e=1";
  assert.deepEqual(await readAddress("../run.html", base), { name: "run.html", text: "text" });
  for (const address of ["run.atlas", "run.atlas/", "my%20runs/"]) await (await readAddress(address, base)).folder.read("atlas.json");
  assert.deepEqual(asked, ["https://example.org/run.html", "https://example.org/a/run.atlas/atlas.json", "https://example.org/a/run.atlas/atlas.json", "https://example.org/a/my%20runs/atlas.json"]);
  await assert.rejects(readAddress("javascript:alert(1)", base), /no address/);
  globalThis.fetch = async () => new Response("", { status: 404 });
  await assert.rejects(readAddress("run.html", base), /run.html is not there: the host answers 404/);
  globalThis.fetch = async () => {
    throw new TypeError("blocked");
  };
  await assert.rejects(readAddress("https://other.org/run.html", base), /must allow this page to read it \(CORS\)/);
});
