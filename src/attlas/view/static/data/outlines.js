// The named stretches of the texts: documents, functions, paragraphs, sentences. Fetched once for each text, as trees.

/**
 * The outlines of the entries and sequences of a page.
 *
 * @param {Transport} transport
 * @param {Pick<Info, "entries">} info
 * @returns {Outlines}
 */
export function createOutlines(transport, { entries }) {
  const listeners = new Set();
  /** @type {OutlineSides} */
  const empty = { query: [], key: [] };
  /** @type {Map<string, OutlineSides>} */
  const known = new Map();

  /**
   * @param {string} place
   * @param {{ entry: number, batch: number }} question
   */
  async function fetchOutline(place, question) {
    try {
      const { json } = await transport.get("outline", question);
      const query = createTree(json.query);
      known.set(place, { query, key: json.key ? createTree(json.key) : query });
    } catch {
      return; // the map does without; the queue reports a lost server
    }
    listeners.forEach((listener) => listener());
  }

  return {
    /**
     * The outlines of the queries and of the keys of a sequence, the same tree where it is one text; empty until it is here.
     *
     * @param {{ entry: number, batch: number }} options
     */
    of({ entry, batch }) {
      // Entries with the same text have the same outline, and so have those whose documents are not known otherwise.
      const [query, key] = entries[entry].texts[batch] ?? [];
      const place = key === null || key === undefined ? `entry ${entry}, ${batch}` : `text ${query}, ${key}, ${entries[entry].kind}, ${entries[entry].spans}`;
      const outline = known.get(place);
      if (outline) return outline;
      known.set(place, empty);
      fetchOutline(place, { entry, batch });
      return empty;
    },
    /**
     * Call `listener()` when an outline has arrived; returns the function that ends it.
     *
     * @param {() => void} listener
     */
    on(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/**
 * Stretches as a tree: those within another one are its children. Outer ones come first.
 *
 * @param {StretchRow[]} rows
 * @returns {Stretch[]}
 */
export function createTree(rows) {
  /** @type {Stretch[]} */
  const roots = [];
  /** @type {Stretch[]} */
  const open = [];
  for (const [start, stop, kind, name] of rows) {
    while (open.length && open[open.length - 1].stop < stop) open.pop();
    while (open.length && open[open.length - 1].stop <= start) open.pop();
    const siblings = open.length ? open[open.length - 1].children : roots;
    const stretch = { start, stop, kind, name, number: siblings.length + 1, depth: open.length, children: [] };
    siblings.push(stretch);
    open.push(stretch);
  }
  return roots;
}

/**
 * The stretches to show at a scale, of which none lies within another: the finest whose siblings can be told apart.
 *
 * @param {Stretch[]} tree
 * @param {number} scale
 * @param {number} least
 * @returns {Stretch[]}
 */
export function chooseStretches(tree, scale, least) {
  return tree.flatMap((stretch) => {
    const { children } = stretch;
    const length = children.reduce((sum, { start, stop }) => sum + stop - start, 0);
    return children.length && (length / children.length) * scale >= least ? chooseStretches(children, scale, least) : [stretch];
  });
}

/**
 * A tree as a list, each stretch before what lies within it.
 *
 * @param {Stretch[]} tree
 * @returns {Stretch[]}
 */
export function listStretches(tree) {
  return tree.flatMap((stretch) => [stretch, ...listStretches(stretch.children)]);
}
