// The heads that one map shows together, a colour each: the first, the second, and further ones.

export const MOST_COLOURED = 4;

/**
 * The further heads of a link: "3.1,2.4" as entries and heads; what cannot be read is left out.
 *
 * @param {string} text
 * @returns {HeadPlace[]}
 */
export function readMore(text) {
  const places = text.split(",").map((part) => /^(\d{1,6})\.(mean|\d{1,6})$/.exec(part));
  return places.flatMap((found) => (found ? [{ entry: Number(found[1]), head: found[2] === "mean" ? "mean" : Number(found[2]) }] : []));
}

/** @param {HeadPlace[]} places */
export const writeMore = (places) => places.map(({ entry, head }) => `${entry}.${head}`).join();

/**
 * @param {HeadPlace} a
 * @param {HeadPlace} b
 */
export const isSameHead = (a, b) => a.entry === b.entry && a.head === b.head;

/**
 * The heads that have a colour, each once: the first one is that of the text, the tracks and the statistics.
 *
 * @param {Pick<State, "entry" | "head" | "second" | "more">} state
 * @returns {HeadPlace[]}
 */
export function listColoured({ entry, head, second, more }) {
  const all = [{ entry, head }, ...(second ? [second] : []), ...readMore(more)];
  return all.filter((place, index) => all.findIndex((other) => isSameHead(other, place)) === index).slice(0, MOST_COLOURED);
}

/**
 * The fields of a state that shows a head in a colour too, or no longer; null where all colours are taken.
 *
 * @param {Pick<State, "entry" | "head" | "second" | "more" | "compare">} state
 * @param {HeadPlace} place
 * @returns {Partial<View> | null}
 */
export function toggleColoured(state, place) {
  const shown = state.compare === "colours" ? listColoured(state) : listColoured({ ...state, second: null, more: "" });
  const rest = shown.filter((each) => !isSameHead(each, place));
  const next = rest.length < shown.length ? rest : [...shown, { entry: place.entry, head: place.head }];
  if (!next.length || next.length > MOST_COLOURED) return null;
  const [first, second = null, ...more] = next;
  return { ...first, second, more: writeMore(more), compare: second ? "colours" : "none" };
}
