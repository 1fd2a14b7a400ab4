// Where a flight stays: the whole matrix and two words, or the bookmarks of the recording.

import { formatInteger, getHeadName } from "../data/numbers.js";
import { readHash, readView } from "../data/state.js";
import { fetchStrongest } from "../data/strongest.js";
import { showWhitespace } from "../data/tokens.js";
import { areShares, formatAmount, isWeighted } from "../data/weighting.js";
import { describeHead } from "./says.js";
import { t } from "../words/words.js";

const WORD_ZOOM = Math.log2(26); // of two words: 26 CSS pixels for a cell, with tokens beside it
const LONGEST_WORD = 24; // characters of a token in a title

/**
 * The stops of a flight from what is shown: the whole matrix first, then the bookmarks, or the pair of words that is
 * pinned, that shows best what the head does, or that the query in the middle gives most of its weight.
 *
 * @param {Pick<PageContext, "store" | "transport" | "texts">} context
 * @param {AbortSignal} signal
 * @returns {Promise<FlightStop[]>}
 */
export async function fetchStops(context, signal) {
  const { state } = context.store;
  const marks = (state.info.bookmarks ?? []).map(createMarkStop);
  const found = marks.length ? marks : [await fetchPairStop(context, signal)];
  const first = { ...found[0].fields, pin: null, span: null };
  const { headline, sentence, onText } = describeHead({ ...state, ...first });
  return [{ fields: first, place: null, title: headline, says: [sentence, onText].filter(Boolean).join(" ") }, ...found];
}

/**
 * @param {Bookmark} bookmark
 * @returns {FlightStop}
 */
function createMarkStop({ name, at, says }) {
  const { row, column, zoom, pin } = readHash(at);
  const fields = { ...readView(at), view: /** @type {const} */ ("map"), panel: "", tour: null };
  delete fields.row;
  delete fields.column;
  delete fields.zoom;
  const isPlaced = typeof row === "number" && typeof column === "number" && typeof zoom === "number";
  const place = isPlaced ? { row, column, zoom } : pin ? placeOfPair(pin) : null;
  return { fields, place, title: name, says };
}

/**
 * @param {Pick<PageContext, "store" | "transport" | "texts">} context
 * @param {AbortSignal} signal
 * @returns {Promise<FlightStop>}
 */
async function fetchPairStop({ store, transport, texts }, signal) {
  const { state } = store;
  const { info, entry, head, batch, variant, second, compare, heads } = state;
  const { m, n, first_query: firstQuery, first_key: firstKey } = info.entries[entry];
  const source = { entry, head, batch, variant };
  const telling = heads?.telling?.entry === entry && heads.telling.head === head ? heads.telling.pin : null;
  const fetchRow = async (/** @type {Cell} */ { i }) => ({ weights: new Float32Array((await transport.get("row", { ...source, i }, { signal })).buffer) });
  const middle = { i: m >> 1, j: Math.min(n - 1, m >> 1) };
  const pin = state.pin ?? telling ?? (await fetchStrongest(fetchRow, "query", middle));
  const { query, key } = texts.of(state);
  const fetchToken = (/** @type {Tokens} */ tokens, /** @type {number} */ position) => tokens.range(position, position + 1).then(([token]) => token, () => undefined);
  const [answer, from, to] = await Promise.all([
    transport.get("cell", { ...source, ...pin }, { signal }).catch(() => null),
    fetchToken(query, firstQuery + pin.i),
    fetchToken(key, firstKey + pin.j),
  ]);
  const title = from === undefined || to === undefined ? t("Query {0} attends to key {1}", formatInteger(firstQuery + pin.i), formatInteger(firstKey + pin.j)) : t("“{0}” attends to “{1}”", formatWord(from), formatWord(to));
  const fields = { entry, head, batch, second, compare, variant, view: /** @type {const} */ ("map"), panel: "", tour: null, pin };
  return { fields, place: placeOfPair(pin), title, says: describeWeight(answer?.json.weight ?? null, state) };
}

/**
 * @param {number | null} weight
 * @param {State} state
 */
function describeWeight(weight, state) {
  const name = getHeadName(state.info, state.entry, state.head);
  if (weight === null) return name;
  const amount = formatAmount(weight, state);
  return areShares(state) && !isWeighted(state) ? t("with {0} of its attention, in {1}", amount, name) : t("with a weight of {0}, in {1}", amount, name);
}

/** @param {Cell} pair */
const placeOfPair = ({ i, j }) => ({ row: i + 0.5, column: j + 0.5, zoom: WORD_ZOOM });

/** @param {string} token */
function formatWord(token) {
  const word = token.trim() || showWhitespace(token);
  return word.length > LONGEST_WORD ? `${word.slice(0, LONGEST_WORD)}…` : word;
}
