import assert from "node:assert/strict";
import test from "node:test";
import { backoff, createRequests } from "../../../src/attlas/view/static/data/requests.js";
import { TransportError } from "../../../src/attlas/view/static/data/transport.js";
import { setTranslations } from "../../../src/attlas/view/static/words/words.js";

setTranslations({});

const turn = () => new Promise((go) => setTimeout(go, 2));

// A transport that answers when it is told to.
function held() {
  const open = [];
  return {
    open,
    get(name, params, { signal }) {
      return new Promise((resolve, reject) => {
        const job = { name, params, resolve: () => (drop(), resolve({ name, params })), reject: (error) => (drop(), reject(error)) };
        const drop = () => open.splice(open.indexOf(job), 1);
        signal.addEventListener("abort", () => job.reject(new TransportError(499, "given up", true)));
        open.push(job);
      });
    },
  };
}

test("six at once, nearest first", async () => {
  const inner = held();
  const queue = createRequests(inner);
  const order = [3, 9, 1, 7, 2, 8, 5, 4, 6, 0];
  const done = order.map((away) => queue.get("tile", { away }, { distance: () => away }));
  assert.equal(inner.open.length, 6);
  const started = [];
  while (inner.open.length) {
    assert.ok(inner.open.length <= 6);
    started.push(inner.open[0].params.away);
    inner.open[0].resolve();
    await turn();
  }
  await Promise.all(done);
  assert.deepEqual(started, [3, 9, 1, 7, 2, 8, 0, 4, 5, 6]);
});

test("what a reader waits for passes the tiles; slow pictures take two places", async () => {
  const inner = held();
  const queue = createRequests(inner, { limit: 3 });
  for (let k = 0; k < 4; k++) queue.get("thumbnail", { k }).catch(() => {});
  assert.equal(inner.open.length, 2);
  queue.get("tile", { k: 0 });
  queue.get("tile", { k: 1 });
  queue.get("cell", {});
  assert.deepEqual(inner.open.map((job) => job.name), ["thumbnail", "thumbnail", "tile"]);
  inner.open[2].resolve();
  await turn();
  assert.equal(inner.open[2].name, "cell");
});

test("given up: a waiting one at once, a flying one through the transport", async () => {
  const inner = held();
  const queue = createRequests(inner, { limit: 1 });
  const [first, second] = [new AbortController(), new AbortController()];
  const flying = queue.get("tile", { k: 0 }, { signal: first.signal });
  const waiting = queue.get("tile", { k: 1 }, { signal: second.signal });
  second.abort();
  await assert.rejects(waiting, { aborted: true });
  assert.deepEqual(queue.counts(), { waiting: 0, flying: 1 });
  first.abort();
  await assert.rejects(flying, { aborted: true });
  assert.deepEqual(queue.counts(), { waiting: 0, flying: 0 });
  await assert.rejects(queue.get("tile", {}, { signal: first.signal }), { aborted: true });
});

test("tried again when the server has trouble, and said so until it is over", async () => {
  let left = 2;
  const inner = { get: async () => { if (left-- > 0) throw new TransportError(503, "busy"); return { json: 7 }; } };
  const queue = createRequests(inner, { wait: () => 1 });
  const told = [];
  queue.trouble((text) => told.push(text));
  assert.equal((await queue.get("info")).json, 7);
  assert.deepEqual(told, ["busy; trying again", "busy; trying again", null]);
});

test("a wrong question is not asked again; a dead server only a few times", async () => {
  let asked = 0;
  const wrong = createRequests({ get: async () => { asked += 1; throw new TransportError(404, "no such head"); } }, { wait: () => 1 });
  await assert.rejects(wrong.get("tile"), { status: 404 });
  assert.equal(asked, 1);
  const dead = createRequests({ get: async () => { asked += 1; throw new TransportError(0, "the server does not answer"); } }, { wait: () => 1 });
  const told = [];
  dead.trouble((text) => told.push(text));
  await assert.rejects(dead.get("tile"), { status: 0 });
  assert.equal(asked, 6);
  assert.equal(told.at(-1), "the server does not answer"); // until it is heard again
});

test("a lost server is said to be lost until something comes", async () => {
  let up = false;
  const inner = { get: async () => { if (!up) throw new TransportError(0, "the server does not answer"); return {}; } };
  const queue = createRequests(inner, { wait: () => 1 });
  const told = [];
  queue.trouble((text) => told.push(text));
  await assert.rejects(queue.get("tile"));
  assert.equal(told.at(-1), "the server does not answer");
  up = true;
  await queue.get("cell");
  assert.equal(told.at(-1), null);
});

test("waits grow, and are bounded", () => {
  assert.ok(backoff(1, 0.5) < backoff(3, 0.5));
  assert.ok(backoff(40, 1) <= 10000);
});

test("destroyed: nothing is left, nothing new is asked", async () => {
  const inner = held();
  const queue = createRequests(inner, { limit: 1 });
  const all = [0, 1, 2].map((k) => queue.get("tile", { k }));
  queue.destroy();
  for (const one of all) await assert.rejects(one, { aborted: true });
  await assert.rejects(queue.get("info"), { aborted: true });
  assert.equal(inner.open.length, 0);
});
