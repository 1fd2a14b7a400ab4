// The text pane: the weights of one query or one key, as colours of the tokens and as a list. It is the query or key
// of the pinned cell; while nothing is pinned, that of the hovered token.

import { clamp } from "../map/geometry.js";
import { getDefaultRange } from "../map/colour.js";
import { make, createSegmented } from "./elements.js";
import { fetchStrongest } from "../data/strongest.js";
import { formatNumber, formatPercent, formatInteger } from "../data/numbers.js";
import { createFlow } from "./flow.js";
import { isEqual } from "../data/state.js";
import { showWhitespace } from "../data/tokens.js";
import { areShares, formatAmount, isSigned, isWeighted, getNumberName, getUnit, describeVariant } from "../data/weighting.js";
import { createWhose } from "./whose.js";
import { t } from "../words/words.js";

const initialCount = 8; // entries of the list at first
const expandedCount = 48; // and after "more"
const maxCachedLines = 24;
/** @type {Side[]} */
const SIDES = ["query", "key"];
const SIGNED_INK_OCTAVES = 12; // octaves below the largest size that the text shows of weights of both signs
const HOVER_DELAY = 40; // ms of hover before the row of a token is requested

/**
 * The indices of the `count` numbers of largest size in descending order, in one pass without sorting all.
 *
 * @param {Float32Array} values
 * @param {number} count
 */
export function findLargest(values, count) {
  /** @type {number[]} */
  const best = []; // ascending by size, at most `count` places
  const getSize = (/** @type {number} */ index) => Math.abs(values[index]);
  for (let index = 0; index < values.length; index++) {
    const size = getSize(index);
    if (!(size > 0) || (best.length === count && size <= getSize(best[0]))) continue;
    let rank = 0;
    while (rank < best.length && getSize(best[rank]) < size) rank++;
    best.splice(rank, 0, index);
    if (best.length > count) best.shift();
  }
  return best.reverse();
}

/**
 * Whether two states have the same pinned cell of the same numbers.
 *
 * @param {State | null} before
 * @param {State} state
 */
const isSameCell = (before, state) => before !== null && /** @type {(keyof State)[]} */ (["entry", "head", "batch", "variant", "pin"]).every((field) => isEqual(before[field], state[field]));

/** @param {number} weight */
const isKnown = (weight) => Math.abs(weight) > 0; // weights that a page without a server does not hold are NaN
/** @param {Float32Array} weights */
const sumKnown = (weights) => weights.reduce((sum, weight) => (isKnown(weight) ? sum + weight : sum), 0);
/**
 * Describe the weights that are not in the list.
 *
 * @param {State} state
 * @param {number} remaining
 * @param {number | null} total
 * @param {number} named
 */
function describeOthers(state, remaining, total, named) {
  const { by } = state;
  if (by === "key" || isWeighted(state) || !areShares(state)) {
    const kind = by === "query" ? remaining === 1 ? t("key") : t("keys") : remaining === 1 ? t("query") : t("queries");
    return total === null ? t("{0} other {1}.", formatInteger(remaining), kind) : t("{0} other {1}; {2} in all.", formatInteger(remaining), kind, formatNumber(total));
  }
  const kind = remaining === 1 ? t("key") : t("keys");
  return total === null ? t("{0} other {1}.", formatInteger(remaining), kind) : t("{0} on {1} other {2}.", formatPercent(Math.max(0, total - named)), formatInteger(remaining), kind);
}
/**
 * @param {Float32Array} weights
 * @param {(weight: number) => boolean} passes
 */
const countWhere = (weights, passes) => weights.reduce((count, weight) => count + Number(passes(weight)), 0);

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountText(element, { store, transport, map, texts, announce, uid }) {
  /** @type {ShownLine | null} */
  let shown = null; // the row or column whose subject, list and colours are shown, all of the same token
  /** @type {State | null} */
  let factsOf = null; // the state whose cell the facts are about
  /** @type {AbortController | null} */
  let controller = null;
  /** @type {AbortController | null} */
  let picking = null; // the row or column of a token that was clicked
  let shownCount = initialCount;
  let timer = 0;
  /** @type {Partial<Record<Side, { tokens: Tokens, extent: number }>>} */
  const started = {}; // what each flow shows: {tokens, extent}
  /** @type {Map<string, Line>} */
  const lineCache = new Map(); // rows and columns that came last: key -> {weights, rounded, total}

  const sideButtons = createSegmented(
    t("Whose weights"),
    [
      { value: "query", text: t("query → keys"), title: t("What the query looks at") },
      { value: "key", text: t("key ← queries"), title: t("Who looks at the key") },
    ],
    (value) => store.set({ by: value }),
  );
  const logButton = make("button", { type: "button", class: "toggle", title: t("Colour the text by the logarithm of the weights, so that small ones show too") }, t("log"));
  logButton.addEventListener("click", () => store.set({ ink: store.state.ink === "log" ? "linear" : "log" }));
  const subject = make("p", { class: "subject" });
  const facts = make("dl", { class: "cell-facts" });
  const release = make("button", { type: "button", class: "text-button", title: t("Let go of the pinned cell  Esc") }, t("unpin"));
  release.addEventListener("click", () => store.set({ pin: null }));
  const list = make("ol", { class: "largest", "aria-label": t("Largest weights") });
  const moreButton = make("button", { type: "button", class: "text-button" }, t("more"));
  moreButton.addEventListener("click", changeLength);
  const restElement = make("p", { class: "largest-rest" });
  const hintElement = make("p", { class: "text-hint" });
  const detailsElement = make("div", { hidden: true }, make("div", { class: "subject-line" }, subject, release), facts, list, make("div", { class: "largest-foot" }, restElement, moreButton));
  // Its height is fixed, so that the text does not move when a token is clicked.
  const pinnedElement = make("div", { class: "pinned" }, hintElement, detailsElement);
  // In cross-attention queries and keys are of two texts, one above the other; else the flow of the keys has both.
  const flowsElement = make("div", { class: "flows" });
  const headings = { query: make("h3", { class: "flow-side" }, t("Queries")), key: make("h3", { class: "flow-side" }, t("Keys")) };
  const createSideFlow = (/** @type {Side} */ side) => createFlow({ label: t("Text"), uid, paint: (position) => paint(position, side), onHover: (position) => onHover(position, side), onPick: (position) => onPick(position, side) });
  const flows = { query: createSideFlow("query"), key: createSideFlow("key") };
  const repaint = () => Object.values(flows).forEach((flow) => flow.repaint());
  element.classList.add("text");
  const whose = createWhose(store);
  element.append(make("h2", { class: "unseen" }, t("Text")), make("div", { class: "text-head" }, sideButtons.element, logButton, whose.element), flowsElement, pinnedElement);

  const getEntry = (/** @type {State} */ state) => state.info.entries[state.entry];
  const isCross = (/** @type {State} */ state) => getEntry(state).kind === "cross";
  const getFlow = (/** @type {Side} */ side) => flows[isCross(store.state) ? side : "key"];
  const getOther = (/** @type {Pick<State, "by">} */ { by }) => (by === "query" ? "key" : "query");
  const createTokenChip = (/** @type {number} */ position, /** @type {Side} */ side, /** @type {State} */ state) => {
    const tokens = texts.of(state)[side];
    const joined = tokens.joined(position);
    const text = tokens.peek(position);
    if (text === null) return "";
    if (!joined) return make("code", { class: "token" }, showWhitespace(text));
    const part = `${position - joined.start + 1}/${joined.stop - joined.start}`;
    return make("code", { class: "token", title: t("part {0} of {1}", part, joined.text) }, showWhitespace(joined.text), make("small", {}, ` ${part}`));
  };

  // ------------------------------------------------------------------------------------- the row that is shown

  const getActiveCell = (/** @type {State} */ state) => state.pin ?? state.pointed;
  // The coloured side of the pairs: the position of its first token, and their number.
  /** @param {State} state */
  function getOtherSide(state) {
    const { m, n, first_query: firstQuery, first_key: firstKey } = getEntry(state);
    return state.by === "query" ? { first: firstKey, count: n } : { first: firstQuery, count: m };
  }
  /**
   * @param {State} state
   * @param {Cell} cell
   */
  function getOwnPosition(state, { i, j }) {
    const { first_query: firstQuery, first_key: firstKey } = getEntry(state);
    return state.by === "query" ? firstQuery + i : firstKey + j;
  }

  /**
   * The weights of the row or column of a cell.
   *
   * @param {State} state
   * @param {Cell} cell
   * @param {AbortSignal} signal
   */
  async function fetchLine(state, { i, j }, signal) {
    const { entry, head, batch, variant, by: side } = state;
    const name = side === "query" ? "row" : "column";
    const key = `${entry}/${head}/${batch}/${variant}/${name}/${i}/${j}`;
    const known = lineCache.get(key);
    if (known) return known;
    const answer = await transport.get(name, { entry, head, batch, variant, ...(side === "query" ? { i } : { j }) }, { signal });
    const fetched = new Float32Array(answer.buffer);
    const line = { weights: fetched, rounded: Boolean(answer.rounded), total: answer.total === undefined ? sumKnown(fetched) : answer.total };
    lineCache.set(key, line);
    if (lineCache.size > maxCachedLines) lineCache.delete([...lineCache.keys()][0]);
    return line;
  }

  async function load() {
    clearTimeout(timer);
    controller?.abort();
    controller = null;
    const { state } = store;
    sideButtons.set(state.by);
    const activeCell = getActiveCell(state);
    detailsElement.hidden = activeCell === null;
    hintElement.hidden = activeCell !== null;
    facts.hidden = release.hidden = state.pin === null;
    if (activeCell === null) {
      shown = null;
      repaint();
      return;
    }
    controller = new AbortController();
    const { signal } = controller;
    const { entry, head, batch, variant, pin } = state;
    const position = getOwnPosition(state, activeCell);
    if (shown === null) showSubject(state, activeCell); // else it changes together with the list
    detailsElement.classList.add("loading");
    texts.of(state)[state.by].prefetch(position, position + 1);
    try {
      const line = fetchLine(state, activeCell, signal);
      const cell = pin && transport.get("cell", { entry, head, batch, variant, i: pin.i, j: pin.j }, { signal });
      cell?.catch(() => {}); // awaited below, after the row
      const next = { ...(await line), state, cell: activeCell };
      if (signal.aborted) return;
      const places = findLargest(next.weights, initialCount);
      await fetchTokens(next, places);
      if (signal.aborted) return;
      [shown, shownCount] = [next, initialCount];
      if (!isSameCell(factsOf, state)) facts.replaceChildren();
      repaint();
      showList(places);
      if (!pin || !cell) return;
      getFlow(state.by).reveal(position);
      const { json } = await cell;
      if (signal.aborted) return;
      showFacts(json);
      factsOf = state;
      const { first_query: firstQuery, first_key: firstKey } = getEntry(state);
      announce(t("Pinned query {0}, key {1}: weight {2}", formatInteger(firstQuery + pin.i), formatInteger(firstKey + pin.j), formatNumber(json.weight)));
    } catch (error) {
      if (signal.aborted) return;
      if (shown?.state !== state) {
        shown = null; // what is shown is of another token
        list.replaceChildren();
        facts.replaceChildren();
        moreButton.hidden = true;
        showSubject(state, activeCell);
        repaint();
        if (pin) getFlow(state.by).reveal(position);
      }
      restElement.textContent = `${error.message}.`;
    } finally {
      if (!signal.aborted) detailsElement.classList.remove("loading");
    }
  }
  /**
   * @param {State} state
   * @param {Cell} cell
   */
  function showSubject(state, cell) {
    const position = getOwnPosition(state, cell);
    const place = make("span", { class: "place" }, ` ${formatInteger(position)}`);
    if (state.by === "query") subject.replaceChildren(t("Query "), createTokenChip(position, "query", state), place, t(" looks at"));
    else subject.replaceChildren(t("Key "), createTokenChip(position, "key", state), place, t(" is looked at by"));
  }
  /** @param {CellDetails} cell */
  function showFacts(cell) {
    const { state } = store;
    const { first_query: firstQuery, first_key: firstKey } = getEntry(state);
    const { i, j } = /** @type {Cell} */ (state.pin);
    const pair = `${formatInteger(firstQuery + i)}, ${formatInteger(firstKey + j)}`;
    const weight = cell.weight === null ? `≤ ${formatNumber(cell.below)}` : cell.rounded ? `≈ ${formatNumber(cell.weight)}` : formatNumber(cell.weight, 4);
    /** @type {[name: string, value: string, title: string][]} */
    const lineCache = [[t("cell"), pair, t("query and key of the pinned cell")], [getNumberName(state), cell.allowed === false ? t("masked") : weight, isWeighted(state) ? describeVariant(state) : isSigned(state) ? t("weight of this pair, which may be negative") : t("attention weight of this pair")]];
    if (cell.share) lineCache.push([t("weight"), formatNumber(cell.share, 4), t("attention weight of this pair")], [t("norm"), formatNumber((cell.weight ?? 0) / cell.share, 4), t("norm of the key’s value")]);
    if (cell.allowed !== false) {
      if (cell.rank !== null) lineCache.push([t("rank"), formatInteger(cell.rank), isSigned(state) ? t("place of the weight in its row by size, 1 is the largest") : t("place of the weight in its row, 1 is the largest")]);
      if (cell.logit !== null) lineCache.push([t("logit"), formatNumber(cell.logit), t("before softmax, in nats")]);
    }
    if (areShares(state)) lineCache.push([t("row entropy"), formatNumber(cell.row_entropy), t("of the query’s weights, in nats")]);
    else if (cell.row_mass !== undefined) lineCache.push([t("row sum"), formatNumber(cell.row_mass), t("sum of the query’s weights")]);
    if (cell.column_mass !== null && cell.column_mass !== undefined) lineCache.push([t("key’s mass"), formatNumber(cell.column_mass), t("sum of the weights that all queries give to this key")]);
    facts.replaceChildren(...lineCache.map(([name, value, title]) => make("div", { title }, make("dt", {}, name), make("dd", {}, value))));
  }

  // The texts of some tokens of a line: they are there before its list is shown, so that it does not change under the pointer.
  /**
   * @param {ShownLine} line
   * @param {number[]} places
   */
  function fetchTokens({ state }, places) {
    const tokens = texts.of(state)[getOther(state)];
    const { first } = getOtherSide(state);
    return Promise.all(places.map((place) => tokens.range(first + place, first + place + 1).catch(() => [])));
  }
  async function changeLength() {
    shownCount = shownCount === initialCount ? expandedCount : initialCount;
    const line = shown;
    if (line === null) return;
    const places = findLargest(line.weights, shownCount);
    await fetchTokens(line, places);
    if (shown === line) showList(places);
  }
  // The subject and its largest weights, whose texts are known.
  /** @param {number[]} places */
  function showList(places) {
    const { state, cell: shownCell, weights, rounded, total } = /** @type {ShownLine} */ (shown);
    const { first } = getOtherSide(state);
    const other = getOther(state);
    showSubject(state, shownCell);
    const scale = weights[places[0]] || 1;
    const named = places.reduce((sum, place) => sum + weights[place], 0);
    list.replaceChildren(
      ...places.map((place) => {
        const weight = weights[place];
        const bar = make("i", { class: `largest-bar${isSigned(state) ? (weight < 0 ? " below" : " above") : ""}` });
        bar.style.width = `${Math.abs((100 * weight) / scale)}%`;
        const button = make(
          "button",
          { type: "button", title: t("Weight {0}{1} · position {2}", rounded ? "≈ " : "", formatNumber(weight, rounded ? 3 : 5), formatInteger(first + place)) },
          createTokenChip(first + place, other, state),
          make("span", { class: "place" }, formatInteger(first + place)),
          make("span", { class: "share" }, formatAmount(weight, state)),
          bar,
        );
        const cell = state.by === "query" ? { i: shownCell.i, j: place } : { i: place, j: shownCell.j };
        const showHover = () => store.set({ hover: cell, reading: weight });
        button.addEventListener("click", () => {
          map.centre(cell.i, cell.j);
          showHover();
          getFlow(other).reveal(first + place);
        });
        button.addEventListener("focus", showHover);
        button.addEventListener("pointerenter", showHover);
        return make("li", {}, button);
      }),
    );
    const remaining = countWhere(weights, (weight) => weight !== 0) - places.length;
    restElement.textContent = places.length ? (remaining > 0 ? describeOthers(state, remaining, total, named) : "") : t("No key may be looked at here.");
    moreButton.hidden = countWhere(weights, isKnown) <= places.length && shownCount === initialCount;
    moreButton.textContent = shownCount === initialCount ? t("more") : t("fewer");
  }

  // ------------------------------------------------------------------------------------------------------- the flow

  /** @type {{ of: Float32Array | null, value: number }} */
  let rowMaximum = { of: null, value: 0 }; // the largest weight of the row

  /**
   * The style of a token: its background, and classes for the active token, masked tokens and search results.
   *
   * @param {number} position
   * @param {Side} flowSide
   * @returns {TokenStyle}
   */
  function paint(position, flowSide) {
    const { state } = store;
    const hasSide = (/** @type {Side} */ side) => !isCross(state) || side === flowSide;
    const classes = [];
    let background = "";
    if (state.searchResult?.matches.some(([start, stop, side]) => side === flowSide && start <= position && position < stop)) classes.push("found");
    if (shown !== null) {
      const weight = getWeight(position);
      if (!hasSide(getOther(shown.state))) background = ""; // the other text is coloured
      else if (weight === null || weight === 0) classes.push("masked");
      else {
        const share = getColourShare(Math.abs(weight));
        const colour = !isSigned(shown.state) ? "--glow" : weight < 0 ? "--below" : "--above";
        if (share >= 0.005) background = `color-mix(in srgb, var(${colour}) ${(100 * share).toFixed(1)}%, transparent)`;
      }
      if (hasSide(shown.state.by) && position === getOwnPosition(shown.state, shown.cell)) classes.push("own");
    }
    const entry = getEntry(state);
    const { hover } = state;
    if (hover && hasSide("query") && position === entry.first_query + hover.i) classes.push("at-query");
    if (hover && hasSide("key") && position === entry.first_key + hover.j) classes.push("at-key");
    return { classes, background };
  }
  // The weight of a token in the shown row; null where the row does not contain it.
  /** @param {number} position */
  function getWeight(position) {
    if (!shown) return null;
    const { first, count } = getOtherSide(shown.state);
    return position >= first && position < first + count ? shown.weights[position - first] : null;
  }
  // The share of colour of the size of a weight: none at 0, full at the largest weight of the row.
  /** @param {number} weight */
  function getColourShare(weight) {
    if (!shown) return 0;
    const { weights } = shown;
    if (rowMaximum.of !== weights) rowMaximum = { of: weights, value: weights.reduce((a, b) => (Math.abs(b) > a ? Math.abs(b) : a), 0) };
    if (store.state.ink === "linear") return weight / rowMaximum.value;
    const low = (isSigned(shown.state) ? -SIGNED_INK_OCTAVES : getDefaultRange("log", weights.length).low) + Math.log2(getUnit(shown.state));
    return Math.max(0, (Math.log2(weight) - low) / (Math.log2(rowMaximum.value) - low));
  }
  /**
   * The cell of a token: in the pinned row or column, else on the diagonal; in cross-attention in the active row or column.
   *
   * @param {number} position
   * @param {Side} side
   * @returns {Cell | null}
   */
  function getCell(position, side) {
    const { state } = store;
    const { m, n, first_query: firstQuery, first_key: firstKey } = getEntry(state);
    const [i, j] = [position - firstQuery, position - firstKey];
    const [inRows, inColumns] = [i >= 0 && i < m, j >= 0 && j < n];
    if (isCross(state)) {
      const active = getActiveCell(state) ?? (side === state.by ? { i: 0, j: 0 } : null);
      if (!active || !(side === "query" ? inRows : inColumns)) return null;
      return side === "query" ? { i, j: active.j } : { i: active.i, j };
    }
    if (state.pin !== null && state.by === "query") return inColumns ? { i: state.pin.i, j } : null;
    if (state.pin !== null) return inRows ? { i, j: state.pin.j } : null;
    return inRows || inColumns ? { i: clamp(i, 0, m - 1), j: clamp(j, 0, n - 1) } : null;
  }
  /**
   * @param {number | null} position
   * @param {Side} side
   */
  function onHover(position, side) {
    const { state } = store;
    const cell = position === null ? null : getCell(position, side);
    const reads = isCross(state) ? side === getOther(state) : state.pin;
    const weight = cell && reads && position !== null ? getWeight(position) : null;
    store.set({ hover: cell, reading: weight !== null && isKnown(weight) ? weight : null });
    if (cell && !state.pin && !(isCross(state) && reads)) store.set({ pointed: cell }); // not reset, so that the pointer can move to the list
  }
  /**
   * @param {number} position
   * @param {Side} side
   */
  async function onPick(position, side) {
    const { state } = store;
    if (isCross(state) && (side !== state.by || state.pin)) return pinCell(getCell(position, side));
    const { m, n, first_query: firstQuery, first_key: firstKey } = getEntry(state);
    const [i, j] = [position - firstQuery, position - firstKey];
    if (state.by === "query" && (i < 0 || i >= m)) return announce(t("Token {0} is no query of this head", formatInteger(position)));
    if (state.by === "key" && (j < 0 || j >= n)) return announce(t("Token {0} is no key of this head", formatInteger(position)));
    picking?.abort();
    picking = new AbortController();
    const { signal } = picking;
    const place = { i: clamp(i, 0, m - 1), j: clamp(j, 0, n - 1) };
    const pin = await fetchStrongest((cell) => fetchLine(state, cell, signal), state.by, place);
    const isSame = /** @type {(keyof State)[]} */ (["entry", "head", "batch", "variant", "by"]).every((field) => store.state[field] === state[field]);
    return signal.aborted || !isSame ? undefined : pinCell(pin);
  }
  /** @param {Cell | null} pin */
  function pinCell(pin) {
    if (pin === null) return;
    store.set({ pin, hover: null, reading: null, pointed: null });
    const view = map.visibleRegion();
    const isVisible = pin.i >= view.r0 && pin.i < view.r1 && pin.j >= view.c0 && pin.j < view.c1;
    if (!isVisible) map.centre(pin.i, pin.j);
  }

  const subscriptions = [
    store.on(["entry", "batch"], showTexts),
    store.on(["pin", "by", "entry", "head", "batch", "variant"], load),
    store.on(["pointed"], () => {
      clearTimeout(timer);
      timer = setTimeout(load, store.state.pointed ? HOVER_DELAY : 0);
    }),
    store.on(["ink"], showInk),
    store.on(["searchResult"], () => {
      const { searchResult } = store.state;
      repaint();
      if (!searchResult || searchResult.index < 0) return;
      const [start, , side] = searchResult.matches[searchResult.index];
      flows[side].reveal(start);
    }),
    store.on(["hover"], () => {
      const { state } = store;
      const { first_query: firstQuery, first_key: firstKey } = getEntry(state);
      /** @type {Partial<Record<Side, number>>} */
      const marks = state.hover ? { query: firstQuery + state.hover.i, key: firstKey + state.hover.j } : {};
      for (const side of SIDES) flows[side].mark(isCross(state) ? [marks[side] ?? -1] : Object.values(marks));
    }),
    texts.on(() => Object.values(flows).forEach((flow) => flow.refresh())),
  ];
  function showInk() {
    logButton.setAttribute("aria-pressed", String(store.state.ink === "log"));
    repaint();
  }
  // Show the texts of the entry and the sequence; a text that is not known is not shown.
  function showTexts() {
    const { state } = store;
    const { m, n, first_query: firstQuery, first_key: firstKey } = getEntry(state);
    const tokens = texts.of(state);
    const cross = isCross(state);
    const parts = [];
    const ends = cross ? { query: firstQuery + m, key: firstKey + n } : { query: 0, key: Math.max(firstQuery + m, firstKey + n) };
    for (const side of SIDES) {
      const shown = tokens[side].length > 0 && ends[side] > 0;
      const extent = shown ? Math.max(ends[side], tokens[side].length) : 0;
      if (shown) parts.push(...(cross ? [headings[side]] : []), flows[side].element);
      const before = started[side];
      if (before?.tokens === tokens[side] && before.extent === extent) continue;
      started[side] = { tokens: tokens[side], extent };
      flows[side].start(extent, tokens[side]);
    }
    const { children } = flowsElement;
    if (parts.length !== children.length || parts.some((part, at) => part !== children[at])) flowsElement.replaceChildren(...parts);
    logButton.hidden = !parts.length;
    hintElement.textContent = logButton.hidden ? t("Click a cell of the map: here are the largest weights of its row.") : t("Point at a token: the text is coloured by what it looks at, in proportion to the weights. A click pins it.");
  }
  showTexts();
  showInk();
  load();
  if (store.state.pointed) getFlow(store.state.by).reveal(getOwnPosition(store.state, store.state.pointed)); // the state may begin with a hovered token
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      controller?.abort();
      picking?.abort();
      clearTimeout(timer);
      for (const flow of Object.values(flows)) flow.destroy();
      whose.destroy();
      element.replaceChildren();
    },
  };
}
