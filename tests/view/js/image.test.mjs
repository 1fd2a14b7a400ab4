import assert from "node:assert/strict";
import test from "node:test";
import { getPatchColour, listPatches } from "../../../src/attlas/view/static/panels/image.js";

const tile = (rows, columns, box, keys, thumbnail = false) => ({ rows, columns, box, keys, thumbnail });
const close = (a, b) => assert.ok(Math.abs(a - b) < 1e-6, `${a} is not ${b}`);

test("each patch has the weight of its key and its place on the picture", () => {
  const row = new Float32Array([0, 0.1, 0.2, 0.3, 0.4]);
  const patches = listPatches([tile(2, 2, [0, 0, 1, 1], [5, 6, 7, -1])], row, 4);
  assert.deepEqual(patches.map(({ r, c, key }) => [r, c, key]), [[0, 0, 1], [0, 1, 2], [1, 0, 3], [1, 1, -1]]);
  close(patches[2].weight, 0.3);
  assert.ok(Number.isNaN(patches[3].weight));
  assert.deepEqual([patches[3].x, patches[3].y, patches[3].width, patches[3].height], [0.5, 0.5, 0.5, 0.5]);
});

test("a thumbnail gives its weight to the patches that it covers", () => {
  const row = new Float32Array([0.1, 0.2, 0.3, 0.4, 0.6]);
  const tiles = [tile(1, 4, [0, 0, 1, 1], [0, 1, 2, 3]), tile(1, 1, [0, 0, 1, 1], [4], true)];
  const patches = listPatches(tiles, row, 0);
  patches.forEach(({ weight }, at) => close(weight, row[at] + 0.15));
  close(listPatches([tiles[1]], row, 0)[0].weight, 0.6);
});

test("colours tell the sign, and opacity the size", () => {
  assert.equal(getPatchColour(0, 1), "rgba(13, 60, 110, 0)");
  assert.equal(getPatchColour(1, 1), "rgba(13, 60, 110, 0.85)");
  assert.equal(getPatchColour(-0.25, 1), "rgba(120, 38, 20, 0.425)");
});
