import assert from "node:assert/strict";
import test from "node:test";

import { createPath, planFlight } from "../../../src/attlas/view/static/map/flight.js";

const close = (a, b, off = 1e-6) => assert.ok(Math.abs(a - b) <= off * Math.max(1, Math.abs(b)), `${a} is not ${b}`);
const whole = { row: 1024, column: 1024, zoom: -1.7 };
const near = { row: 147.5, column: 133.5, zoom: 4.7 };
const stop = (fields, place, title) => ({ fields, place, title, says: "" });
const getWhole = ({ entry = 0 }) => ({ ...whole, row: 1024 + entry });

test("a path begins and ends at its places, and in between goes neither past them nor closer than both", () => {
  for (const [from, to] of [[whole, near], [near, whole], [near, { ...near, row: 1900.5 }], [near, { ...near, zoom: 1 }], [near, near]]) {
    const path = createPath(from, to, 600);
    for (const field of ["row", "column", "zoom"]) {
      close(path.at(0)[field], from[field]);
      close(path.at(1)[field], to[field]);
    }
    assert.ok(path.length >= 0 && Number.isFinite(path.length));
    for (let share = 0; share <= 1; share += 0.05) {
      const { row, zoom } = path.at(share);
      assert.ok(row >= Math.min(from.row, to.row) - 1e-6 && row <= Math.max(from.row, to.row) + 1e-6);
      assert.ok(zoom <= Math.max(from.zoom, to.zoom) + 1e-6);
    }
  }
});

test("between far cells a path goes away from the map, and its speed on the screen is the same all the way", () => {
  const [from, to] = [near, { ...near, row: 1900.5, column: 1700.5 }];
  const path = createPath(from, to, 600);
  assert.ok(path.at(0.5).zoom < near.zoom - 2);
  // The metric of van Wijk and Nuij: rho² times what moves in widths of the view, and what the width changes by.
  const speeds = [];
  for (let share = 0.05; share < 0.95; share += 0.1) {
    const [a, b] = [path.at(share), path.at(share + 1e-4)];
    const width = 600 / 2 ** a.zoom;
    const moved = Math.hypot(b.row - a.row, b.column - a.column) / width;
    speeds.push(Math.hypot(2 * moved, Math.LN2 * (b.zoom - a.zoom)) / 1e-4);
  }
  for (const speed of speeds) close(speed, speeds[0], 1e-3);
});

test("15 seconds from the whole matrix to two words: it stands, moves without a jump, and stands", () => {
  const plan = planFlight([stop({ entry: 0, head: 1, pin: null }, null, "all"), stop({ entry: 0, head: 1, pin: { i: 147, j: 133 } }, near, "pair")], getWhole, 600);
  close(plan.seconds, 15);
  assert.deepEqual([plan.at(0).place, plan.at(0).said.title, plan.at(0).view.fields.pin], [getWhole({}), "all", null]);
  assert.deepEqual(plan.at(1.9).place, getWhole({}));
  assert.deepEqual(plan.at(11.6).place, near);
  assert.deepEqual([plan.at(15).place, plan.at(99).place, plan.at(15).said.title], [near, near, "pair"]);
  let before = plan.at(0).place;
  for (let time = 0; time <= 15; time += 1 / 30) {
    const { place } = plan.at(time);
    assert.ok(Math.abs(place.zoom - before.zoom) < 0.12, `a jump of the zoom at ${time}`);
    before = place;
  }
  // Each word is shown in full, and fades where the next one comes.
  assert.equal(plan.at(1).opacity, 1);
  const change = [...Array(1501).keys()].map((k) => k / 100).find((time) => plan.at(time).said.title === "pair");
  assert.ok(plan.at(change).opacity < 0.1 && plan.at(change - 0.01).opacity < 0.1);
});

test("to another head it goes over the whole matrix, where the head changes", () => {
  const marks = [stop({ entry: 0, head: 1 }, null, "all"), stop({ entry: 0, head: 1 }, near, "one"), stop({ entry: 2, head: 0 }, { ...near, row: 700 }, "two"), stop({ entry: 2, head: 0 }, null, "three")];
  const plan = planFlight(marks, getWhole, 600);
  close(plan.seconds, 20);
  let [entry, head] = [0, 1];
  let changes = 0;
  for (let time = 0; time <= plan.seconds; time += 0.02) {
    const { view, place } = plan.at(time);
    if (view.fields.entry === entry && view.fields.head === head) continue;
    changes += 1;
    [entry, head] = [view.fields.entry, view.fields.head];
    assert.deepEqual(place, getWhole({ entry }));
  }
  assert.equal(changes, 1);
  const told = new Set([...Array(2000).keys()].map((k) => plan.at((k * plan.seconds) / 2000).said.title));
  assert.deepEqual([...told], ["all", "one", "two", "three"]);
});

test("a still flight is only ever at its stops", () => {
  const plan = planFlight([stop({ head: 0 }, null, "all"), stop({ head: 0 }, near, "pair")], getWhole, 600);
  const places = new Set([...Array(300).keys()].map((k) => JSON.stringify(plan.at(k / 20, true).place)));
  assert.deepEqual([...places].map((text) => JSON.parse(text)), [getWhole({}), near]);
});
