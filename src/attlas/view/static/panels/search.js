// The search box: token text, a range of positions ("50000-60000"), or one cell ("60321,102").

import { debounce, make } from "./elements.js";
import { isBeyondDiagonal, clamp } from "../map/geometry.js";
import { fetchStrongest } from "../data/strongest.js";
import { formatInteger } from "../data/numbers.js";
import { isEqual, getPlace } from "../data/state.js";
import { t } from "../words/words.js";

const maxMatches = 1000; // matches that are asked for; the count is of all
const MATCH_ZOOM = 3; // doublings at which a match is shown at least: 8 pixels a cell

/**
 * Parse what was typed: {kind: "text" | "range" | "cell" | "nothing", ...}. Quotes make text of numbers: "50-60".
 *
 * @param {string} typed
 * @returns {SearchQuery}
 */
export function parseQuery(typed) {
  const text = typed.trim();
  if (text === "") return typed === "" ? { kind: "nothing" } : { kind: "text", text: typed };
  const quoted = /^"([^]+)"$/.exec(text);
  if (quoted) return { kind: "text", text: quoted[1] };
  const range = /^(\d+)\s*(?:-|–|\.\.)\s*(\d+)$/.exec(text);
  if (range) return { kind: "range", start: Number(range[1]), stop: Number(range[2]) };
  const cell = /^(\d+)\s*,\s*(\d+)$/.exec(text);
  if (cell) return { kind: "cell", query: Number(cell[1]), key: Number(cell[2]) };
  return { kind: "text", text: typed };
}

/**
 * The rows and columns of a range or a cell in the matrix of an entry, or {error}, a sentence.
 *
 * @param {PlaceQuery} query
 * @param {Entry} entry
 * @returns {{ error: string } | SearchPlace}
 */
function placeQuery(query, entry) {
  const { m, n, first_query: firstQuery, first_key: firstKey } = entry;
  if (query.kind === "cell") {
    const [i, j] = [query.query - firstQuery, query.key - firstKey];
    if (i < 0 || i >= m) return { error: t("Queries stand at {0} to {1}, not at {2}.", formatInteger(firstQuery), formatInteger(firstQuery + m - 1), formatInteger(query.query)) };
    if (j < 0 || j >= n) return { error: t("Keys stand at {0} to {1}, not at {2}.", formatInteger(firstKey), formatInteger(firstKey + n - 1), formatInteger(query.key)) };
    return { i, j };
  }
  if (query.stop < query.start) return { error: t("A range runs upwards: {0}-{1}.", formatInteger(query.stop), formatInteger(query.start)) };
  /** @type {[first: number, last: number]} */
  const rows = [Math.max(0, query.start - firstQuery), Math.min(m - 1, query.stop - firstQuery)];
  /** @type {[first: number, last: number]} */
  const columns = [Math.max(0, query.start - firstKey), Math.min(n - 1, query.stop - firstKey)];
  const [anyRows, anyColumns] = [rows[0] <= rows[1], columns[0] <= columns[1]];
  if (!anyRows && !anyColumns) {
    const lastTyped = Math.max(firstQuery + m, firstKey + n) - 1;
    return { error: t("The matrix covers positions {0} to {1}.", formatInteger(Math.min(firstQuery, firstKey)), formatInteger(lastTyped)) };
  }
  return { rows: anyRows ? rows : null, columns: anyColumns ? columns : null };
}

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountSearch(element, { store, transport, texts, map, announce, uid }) {
  /** @type {Match[]} */
  let matches = []; // [start, stop, side]: a text of queries and keys counts as that of the keys
  /** @type {SideTokens | null} */
  let searched = null; // the texts that were searched: {query, key}
  let total = 0;
  let index = -1;
  /** @type {AbortController | null} */
  let controller = null;
  /** @type {Cell | null} */
  let ownPin = null; // the cell that the search itself has pinned

  const input = make("input", {
    type: "search",
    class: "search-input",
    placeholder: window.matchMedia("(max-width: 719px)").matches ? t("Search") : t("Search tokens"), // cut off on a phone
    autocomplete: "off",
    spellcheck: false,
    "aria-label": t("Search: token text, a range 50000-60000, or a cell 60321,102"),
    "aria-describedby": uid("search-result"),
    "data-focus": "search",
  });
  const result = make("span", { class: "search-result", id: input.getAttribute("aria-describedby") });
  const createStepButton = (/** @type {string} */ name, /** @type {string} */ symbol, /** @type {number} */ by) => {
    const button = make("button", { type: "button", class: "icon", "aria-label": name, title: name, disabled: true }, symbol);
    button.addEventListener("click", () => goTo(by));
    return button;
  };
  const [previous, next] = [createStepButton(t("Previous match"), "‹", -1), createStepButton(t("Next match"), "›", 1)];
  element.classList.add("search");
  element.append(make("div", { class: "search-box" }, input, result, previous, next));

  const showResult = (/** @type {string} */ text, /** @type {boolean} */ wrong = false) => {
    result.textContent = text;
    result.classList.toggle("wrong", wrong);
    element.classList.toggle("has-result", text !== "");
  };
  const publish = () => {
    previous.disabled = next.disabled = matches.length < 2;
    store.set({ searchResult: matches.length ? { matches, index } : null });
  };
  const clear = () => {
    controller?.abort();
    controller = null;
    [matches, total, index] = [[], 0, -1];
    publish();
  };

  // The cell that shows a match: in the row or column that the user has pinned, if the mask allows it. Else that of the
  // largest weight of the token, which is then pinned.
  const chooseCell = (/** @type {Match} */ [start, stop, side]) => {
    const { info, entry, pin, by, row: centreRow, column: centreColumn } = store.state;
    const entryInfo = info.entries[entry];
    const { m, n, first_query: firstQuery, first_key: firstKey } = entryInfo;
    const position = Math.floor((start + stop - 1) / 2);
    const row = clamp(position - firstQuery, 0, m - 1);
    const column = clamp(position - firstKey, 0, n - 1);
    if (entryInfo.kind === "cross") {
      const { i, j } = pin ?? { i: clamp(Math.floor(centreRow ?? 0), 0, m - 1), j: clamp(Math.floor(centreColumn ?? 0), 0, n - 1) };
      const isTokenCell = pin === null || isEqual(pin, ownPin);
      return { cell: side === "query" ? { i: row, j } : { i, j: column }, isTokenCell, by: side };
    }
    if (pin !== null && !isEqual(pin, ownPin)) {
      const cell = by === "key" ? { i: row, j: pin.j } : { i: pin.i, j: column };
      if (!isBeyondDiagonal(entryInfo, cell.i + 1, cell.j)) return { cell, isTokenCell: false, by };
    }
    return { cell: { i: row, j: column }, isTokenCell: true, by };
  };
  /**
   * The weights of the row or column of a token.
   *
   * @param {Side} by
   * @param {AbortSignal | undefined} signal
   * @returns {(place: Cell) => Promise<{ weights: Float32Array }>}
   */
  const createFetch = (by, signal) => async ({ i, j }) => {
    const { entry, head, batch, variant } = store.state;
    const { buffer } = await transport.get(by === "query" ? "row" : "column", { entry, head, batch, variant, ...(by === "query" ? { i } : { j }) }, { signal });
    return { weights: new Float32Array(buffer) };
  };
  async function showMatch() {
    const match = matches[index];
    const { cell: place, isTokenCell, by } = chooseCell(match);
    const cell = isTokenCell ? await fetchStrongest(createFetch(by, controller?.signal), by, place) : place;
    if (matches[index] !== match) return; // another one was asked for meanwhile
    map.centre(cell.i, cell.j, { zoom: Math.max(getPlace(store.state).zoom, MATCH_ZOOM) });
    if (isTokenCell) ownPin = cell;
    store.set({ ...(isTokenCell ? { pin: cell } : {}), hover: cell, reading: null, searchResult: { matches, index } });
    const shown = t("{0} of {1}{2}", formatInteger(index + 1), formatInteger(total), total > matches.length ? t(" (the first {0})", formatInteger(matches.length)) : "");
    showResult(shown);
    announce(t("Match {0}, position {1}", shown, formatInteger(match[0])));
  }
  const goTo = (/** @type {number} */ by) => {
    if (!matches.length) return;
    index = (index + by + matches.length) % matches.length;
    showMatch();
  };

  /** @param {string} text */
  async function searchText(text) {
    clear();
    controller = new AbortController();
    const { signal } = controller;
    showResult("…");
    try {
      const tokens = texts.of(store.state);
      searched = tokens;
      /** @type {Side[]} */
      const sides = tokens.query === tokens.key ? ["key"] : ["query", "key"];
      const found = await Promise.all(sides.map((side) => (tokens[side].length ? transport.get("search", { of: tokens[side].of, text, limit: String(maxMatches) }, { signal }) : null)));
      if (signal.aborted) return;
      matches = found.flatMap((answer, at) => answer?.json.matches.map((span) => /** @type {Match} */ ([...span, sides[at]])) ?? []);
      total = found.reduce((sum, answer) => sum + (answer?.json.total ?? 0), 0);
      publish();
      if (!matches.length) {
        showResult(t("no match"));
        announce(t("No match"));
        return;
      }
      const from = findFirstInView();
      index = from;
      showMatch();
    } catch (error) {
      if (!signal.aborted) showResult(error.message ?? t("the search failed"), true);
    }
  }
  // The first match at or after the view, so that the map does not jump to the start of the text.
  function findFirstInView() {
    const { info, entry } = store.state;
    const { r0, c0 } = map.visibleRegion();
    const first = { query: r0 + info.entries[entry].first_query, key: c0 + info.entries[entry].first_key };
    const matchIndex = matches.findIndex(([start, , side]) => start >= first[side]);
    return matchIndex < 0 ? 0 : matchIndex;
  }

  /** @param {PlaceQuery} query */
  function goToPlace(query) {
    clear();
    const { info, entry } = store.state;
    const place = placeQuery(query, info.entries[entry]);
    if (place.error !== undefined) {
      showResult(place.error, true);
      announce(place.error);
      return;
    }
    if (query.kind === "cell" && "i" in place) {
      map.centre(place.i, place.j, { zoom: Math.max(getPlace(store.state).zoom, MATCH_ZOOM) });
      store.set({ pin: { i: place.i, j: place.j }, hover: { i: place.i, j: place.j }, reading: null });
      showResult("");
      announce(t("Cell {0}, {1}", formatInteger(query.query), formatInteger(query.key)));
      return;
    }
    if (query.kind === "cell" || "i" in place) return;
    const { first_query: firstQuery, first_key: firstKey } = info.entries[entry];
    const toSpan = (/** @type {[number, number] | null} */ range, /** @type {number} */ first) => range && { start: range[0] + first, stop: range[1] + first + 1 };
    map.showPositions(toSpan(place.rows, firstQuery), toSpan(place.columns, firstKey));
    showResult("");
    announce(t("Positions {0} to {1}", formatInteger(query.start), formatInteger(query.stop)));
  }

  /**
   * @param {string} typed
   * @param {boolean} isFinal
   */
  function runQuery(typed, isFinal) {
    const query = parseQuery(typed);
    if (query.kind === "nothing") {
      clear();
      showResult("");
    } else if (query.kind === "text") searchText(query.text);
    else if (isFinal) goToPlace(query); // not while numbers are being typed
    else {
      clear();
      showResult(t("↵ goes there"));
    }
  }
  let lastTyped = "";
  const scheduleRun = debounce(() => {
    lastTyped = input.value;
    runQuery(input.value, false);
  }, 250);
  input.addEventListener("input", scheduleRun);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      scheduleRun.cancel();
      const kind = parseQuery(input.value).kind;
      if (kind === "text" && input.value === lastTyped && matches.length) goTo(event.shiftKey ? -1 : 1);
      else runQuery(input.value, true);
      lastTyped = input.value;
    } else if (event.key === "Escape") {
      if (input.value === "") input.blur();
      input.value = lastTyped = "";
      scheduleRun.cancel();
      clear();
      showResult("");
    } else return;
    event.stopPropagation();
  });
  // The panel "search" means to focus the input.
  const unsubscribePanel = store.on(["panel"], () => {
    if (store.state.panel !== "search") return;
    store.set({ panel: "" });
    input.focus();
    input.select();
  });
  // Matches are of the texts that were searched; Enter searches those that are shown now.
  const unsubscribeTexts = store.on(["entry", "batch"], () => {
    const { query, key } = texts.of(store.state);
    if (!searched || (searched.query === query && searched.key === key)) return;
    searched = null;
    clear();
    showResult("");
  });
  return {
    destroy() {
      unsubscribePanel();
      unsubscribeTexts();
      scheduleRun.cancel();
      controller?.abort();
      element.replaceChildren();
    },
  };
}
