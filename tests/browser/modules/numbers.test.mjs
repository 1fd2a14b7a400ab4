import assert from "node:assert/strict";
import test from "node:test";

const { formatFloat32 } = await import(`${process.env.STATIC}/data/numbers.js`);
const { findLargest } = await import(`${process.env.STATIC}/panels/text.js`);

test("numbers in tables read back as the same float32", () => {
  const values = [0, 1, 0.1, 1 / 3, 1e-7, 1.17549435e-38, 0.30000001192092896, 2 ** -149].map(Math.fround);
  for (const value of values) assert.equal(Math.fround(Number(formatFloat32(value))), value);
  assert.deepEqual(values.slice(0, 4).map(formatFloat32), ["0", "1", "0.1", "0.33333334"]);
});

test("the largest weights are found without sorting", () => {
  let seed = 7;
  const next = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
  const values = Float32Array.from({ length: 5000 }, () => (next() < 0.2 ? 0 : next()));
  const sorted = [...values].sort((a, b) => b - a).slice(0, 48);
  assert.deepEqual(findLargest(values, 48).map((i) => values[i]), sorted);
  assert.deepEqual(findLargest(new Float32Array(9), 4), []);
});
