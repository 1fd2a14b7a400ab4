// The offline page of what is looked at: the server packs its numbers, here they get their state and become a file.

export const dataMark = "/*data*/"; // where the packed numbers go in a page

// The tiles of a level that hold an allowed pair: those above the diagonal of a causal map are left out.
export function listTiles(entry, level) {
  const side = 256 * 2 ** level;
  const tiles = [];
  for (let y = 0; y * side < entry.m; y++) {
    for (let x = 0; x * side < entry.n; x++) {
      const lastQuery = entry.first_query + Math.min(entry.m, (y + 1) * side) - 1;
      if (!entry.causal || entry.first_key + x * side <= lastQuery) tiles.push({ level, y, x });
    }
  }
  return tiles;
}

// The heads that are looked at: the first, and the second where two are compared.
export function listPackedHeads({ entry, head, second, compare }) {
  const first = { entry, head };
  return second !== null && compare !== "none" && !(second.entry === entry && second.head === head) ? [first, second] : [first];
}

/** What the server is asked for: the heads that are looked at, how, and the pinned cell. */
export function createPackQuery(state) {
  const [first, second] = listPackedHeads(state);
  const { batch, variant, pool, pin } = state;
  const other = second ? { second_entry: second.entry, second_head: second.head } : {};
  return { ...first, ...other, batch, variant, pool, ...(pin ? { i: pin.i, j: pin.j } : {}) };
}

/** What the offline page begins with: the state, less what belongs to a window. */
export function getViewState(state) {
  const { info, heads, hover, reading, pointed, progress, panel, step, pairs, dark, ...view } = state;
  return view;
}

// The file: the page without data, and the data where its mark is. "<" is escaped, so that no token ends the script.
export function createFile(page, data) {
  const text = JSON.stringify(data).replaceAll("<", "\\u003c").replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
  const start = page.indexOf(dataMark);
  return page.slice(0, start) + text + page.slice(start + dataMark.length);
}
