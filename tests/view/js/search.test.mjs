import assert from "node:assert/strict";
import test from "node:test";
import { parseQuery } from "../../../src/attlas/view/static/panels/search.js";

test("what is typed is understood", () => {
  const cases = [
    ["60321,102", { kind: "cell", query: 60321, key: 102 }],
    [" 60321 , 102 ", { kind: "cell", query: 60321, key: 102 }],
    ["50000-60000", { kind: "range", start: 50000, stop: 60000 }],
    ["50..60", { kind: "range", start: 50, stop: 60 }],
    ['"50-60"', { kind: "text", text: "50-60" }],
    ["日本", { kind: "text", text: "日本" }],
    [" ", { kind: "text", text: " " }],
    ["", { kind: "nothing" }],
    ["1,2,3", { kind: "text", text: "1,2,3" }],
  ];
  for (const [typed, wanted] of cases) assert.deepEqual(parseQuery(typed), wanted);
});
