import assert from "node:assert/strict";
import { test } from "node:test";

import { getLegendHeight } from "../../../src/attlas/view/static/map/legend.js";
import { chooseCorner } from "../../../src/attlas/view/static/map/minimap.js";

const pane = { left: 100, top: 50, right: 700, bottom: 550, X: (j) => 100 + 10 * j, Y: (i) => 50 + 10 * i, names: {}, legend: [] };
const side = { w: 120, h: 120 };

test("the minimap stands below the names of heads that have a colour", () => {
  const alone = chooseCorner(pane, side, null);
  const below = chooseCorner({ ...pane, legend: ["Layer 0, head 1", "Layer 2, head 4"] }, side, null);
  assert.equal(below.x, alone.x);
  assert.equal(below.y - alone.y, getLegendHeight({ legend: ["a", "b"] }));
  assert.ok(getLegendHeight({ legend: ["a", "b"] }) >= 48);
  assert.equal(getLegendHeight(pane), 0);
});

test("the minimap leaves the pinned cell free", () => {
  const { x, y } = chooseCorner(pane, side, { i: 5, j: 52 });
  assert.ok(y > 300 || x < 400);
});
