// The cell that answers what a token looks at, or who looks at it: the one of largest size in its row or column.

/**
 * The cell of largest size in the row (by queries) or the column (by keys) of `place`; `place` where none is known.
 *
 * @param {(place: Cell) => Promise<{ weights: Float32Array }>} fetchWeights
 * @param {Side} by
 * @param {Cell} place
 * @returns {Promise<Cell>}
 */
export async function fetchStrongest(fetchWeights, by, place) {
  const line = await fetchWeights(place).catch(() => null);
  if (!line) return place;
  let [best, largest] = [-1, 0];
  line.weights.forEach((weight, at) => {
    if (Math.abs(weight) > largest) [best, largest] = [at, Math.abs(weight)];
  });
  if (best < 0) return place;
  return by === "query" ? { i: place.i, j: best } : { i: best, j: place.j };
}
