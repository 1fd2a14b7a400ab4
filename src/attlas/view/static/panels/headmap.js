// Layers × heads as a small map: a statistic of every head or, once a cell is pinned, the weight that every head gives
// to this pair of tokens, and how far each head agrees with the one that is shown.

import { getColour, getColours } from "../map/colour.js";
import { canCompare } from "../data/comparable.js";
import { make, createSegmented } from "./elements.js";
import { formatNumber, getHeadMark, getHeadName, formatPercent, formatInteger, isRollout } from "../data/numbers.js";
import { holdsHead } from "../data/held.js";
import { areShares, formatAmount, getNumberName, getUnit, hasVariant, isWeighted } from "../data/weighting.js";
import { t } from "../words/words.js";

const REQUEST_DELAY = 120; // ms without another change after which heads are asked
const MAX_NAMED = 3; // heads that are named in words

/**
 * The columns of the table of heads that a pinned cell adds, as the server describes its own.
 *
 * @param {Pick<State, "pin" | "span" | "info" | "entry" | "head" | "variant">} state
 * @returns {Column[]}
 */
export function createPairColumns({ pin, span, info, entry, head, variant }) {
  if (!pin) return [];
  const entryInfo = info.entries[entry];
  const query = formatInteger(entryInfo.first_query + pin.i);
  const [start, stop] = getKeyRange({ pin, span, entryInfo });
  const keys = stop - start > 1 ? t("keys {0} to {1}", formatInteger(start), formatInteger(stop - 1)) : t("key {0}", formatInteger(start));
  return [
    { name: "pair", label: t("pinned pair"), unit: "", description: isWeighted({ variant }) ? t("{0} of query {1} and {2}", getNumberName({ variant }), query, keys) : t("Weight that query {0} gives to {1}", query, keys) },
    ...(areShares({ info, entry }) ? [{ name: "agree", label: t("agreement"), unit: "", description: t("Share of the attention of query {0} that goes where that of {1} goes: the sum over keys of the smaller weight", query, getHeadMark(info, entry, head)) }] : []),
  ];
}

// Whether a query and a key of one entry are those of the other: rollouts are of self-attention.
/**
 * @param {Entry} a
 * @param {Entry} b
 */
const haveSameTexts = (a, b) => a.kind === b.kind || (isRollout(a) ? b.kind !== "cross" : isRollout(b) && a.kind !== "cross");

// Positions of the keys that are asked about: the span, else the pinned key alone.
/** @param {{ pin: Cell, span: Span | null, entryInfo: Entry }} place */
function getKeyRange({ pin, span, entryInfo }) {
  return span ? [span.start, span.stop] : [entryInfo.first_key + pin.j, entryInfo.first_key + pin.j + 1];
}

/**
 * What was typed: "147 → 120-140 > 10 %" as {query, start, stop, least}; `least` is null without a share; null if it is no condition.
 *
 * @param {string} text
 */
function readCondition(text) {
  const condition = /^\s*(\d{1,9})\s*(?:→|->|,)\s*(\d{1,9})(?:\s*[-–]\s*(\d{1,9}))?\s*(?:[>≥]=?\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?))?\s*$/.exec(text);
  if (!condition) return null;
  const [query, first, last] = [condition[1], condition[2], condition[3] ?? condition[2]].map(Number);
  const least = condition[4] === undefined ? null : Number(condition[4]) / (condition[5] ? 100 : 1);
  return last < first || (least !== null && least > 1) ? null : { query, start: first, stop: last + 1, least };
}

/**
 * Mount the map; what it finds goes to `pairs` of the state.
 *
 * @param {HTMLElement} element
 * @param {Pick<PageContext, "store" | "transport" | "announce" | "uid">} context
 * @returns {Panel}
 */
export function mountHeadmap(element, { store, transport, announce, uid }) {
  let timer = 0;
  /** @type {AbortController | null} */
  let controller = null;
  /** @type {{ button: HTMLButtonElement, entry: number, head: number }[]} */
  let cells = []; // {button, entry, head}
  const { info } = store.state;
  const width = Math.max(...info.entries.map((entry) => entry.heads.length));
  const help = make("p", { class: "unseen", id: uid("condition") }, t("As in 147 → 120-140 > 10 %: heads in which this query gives these keys more than this share."));
  const input = make("input", { class: "condition", placeholder: "147 → 120-140 > 10 %", autocomplete: "off", spellcheck: false, "aria-label": t("Find heads: query → keys > share"), "aria-describedby": help.id });
  /** @type {Option<Heat>[]} */
  const options = [
    { value: "statistic", text: t("statistic"), title: t("Every head by the statistic below") },
    { value: "pair", text: t("pair"), title: t("The weight that every head gives to the pinned pair") },
    { value: "agree", text: t("agree"), title: t("How far every head looks where this one looks, from the pinned query") },
  ];
  const kindButtons = createSegmented(t("What the map of heads shows"), options, (heat) => store.set({ heat }));
  const grid = make("div", { class: "headmap-grid", role: "group", "aria-label": t("Layers and heads") });
  const message = make("p", { class: "headmap-says" });
  grid.style.setProperty("--heads", String(width));
  grid.style.setProperty("--layers", String(info.entries.length));
  element.classList.add("headmap");
  element.append(make("div", { class: "headmap-line" }, kindButtons.element, input, help), grid, message);

  const isCompared = info.entries.some((each) => each.recording);
  for (const [entry, entryInfo] of info.entries.entries()) {
    const { recording } = entryInfo;
    // Beside a second recording, the rows of each have its name above them.
    if (isCompared && (entry === 0 || recording !== info.entries[entry - 1].recording)) {
      grid.append(make("p", { class: "headmap-owner", title: recording || info.first_title }, recording ? `② ${recording}` : info.first_title));
    }
    for (const head of entryInfo.heads.keys()) {
      const button = make("button", { type: "button", tabIndex: -1, disabled: !holdsHead(info, entry, head) });
      if (head === 0) button.style.gridColumn = "1";
      button.addEventListener("click", () => store.set({ entry, head }));
      cells.push({ button, entry, head });
      grid.append(button);
    }
  }
  grid.addEventListener("keydown", (event) => {
    const index = cells.findIndex(({ button }) => button === event.target);
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width, Home: -index, End: cells.length - 1 - index }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    cells[index + step]?.button.focus();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Escape") describe(store.state);
    else search();
  });

  function search() {
    const { state } = store;
    const entryInfo = state.info.entries[state.entry];
    const condition = readCondition(input.value);
    const [i, j] = condition ? [condition.query - entryInfo.first_query, condition.start - entryInfo.first_key] : [-1, -1];
    const isInside = condition && i >= 0 && i < entryInfo.m && j >= 0 && condition.stop - entryInfo.first_key <= entryInfo.n;
    input.setAttribute("aria-invalid", String(!isInside));
    if (!isInside) {
      message.textContent = condition ? t("Queries stand at {0} to {1}, keys at {2} to {3}.", formatInteger(entryInfo.first_query), formatInteger(entryInfo.first_query + entryInfo.m - 1), formatInteger(entryInfo.first_key), formatInteger(entryInfo.first_key + entryInfo.n - 1)) : t("A query, an arrow, a key or a range of keys, and a share: 147 → 120-140 > 10 %.");
      announce(message.textContent);
      return;
    }
    const span = condition.stop - condition.start > 1 ? { start: condition.start, stop: condition.stop } : null;
    store.set({ pin: { i, j }, span, heat: "pair", sort: "-pair", filter: condition.least === null ? "" : areShares(state) ? `within:${condition.least * getUnit(state)},${1.0001 * getUnit(state)}` : `within:${condition.least},1e9` });
  }
  /** @param {State} state */
  function describe({ pin, span, info: shown, entry }) {
    input.removeAttribute("aria-invalid");
    const shares = areShares({ info: shown, entry });
    input.placeholder = shares ? "147 → 120-140 > 10 %" : "147 → 120-140 > 0.1";
    help.textContent = shares ? t("As in 147 → 120-140 > 10 %: heads in which this query gives these keys more than this share.") : t("As in 147 → 120-140 > 0.1: heads in which this query gives these keys more than this weight.");
    if (!pin) {
      input.value = "";
      return;
    }
    const entryInfo = shown.entries[entry];
    const [start, stop] = getKeyRange({ pin, span, entryInfo });
    input.value = `${entryInfo.first_query + pin.i} → ${start}${stop - start > 1 ? `-${stop - 1}` : ""}`;
  }

  // Fetch the numbers of the pinned cell from every entry.
  async function load() {
    controller?.abort();
    clearTimeout(timer);
    const { pin, span, entry, head, batch, variant } = store.state;
    if (!pin) {
      store.set({ pairs: null });
      return;
    }
    controller = new AbortController();
    const { signal } = controller;
    const shownEntry = info.entries[entry];
    const [query, [start, stop]] = [shownEntry.first_query + pin.i, getKeyRange({ pin, span, entryInfo: shownEntry })];
    /** @type {Pairs} */
    const values = {};
    const fetchPair = async (/** @type {number} */ index) => {
      const entryInfo = info.entries[index];
      const [i, j0, j1] = [query - entryInfo.first_query, start - entryInfo.first_key, stop - entryInfo.first_key];
      const inside = i >= 0 && i < entryInfo.m && j0 >= 0 && j1 <= entryInfo.n && batch < (entryInfo.batch ?? 1);
      if (!haveSameTexts(entryInfo, shownEntry) || entryInfo.readable === false || !inside || !hasVariant(entryInfo, variant)) return;
      const other = canCompare(info, entry, index) ? { with_entry: entry, with_head: head } : {};
      const { json } = await transport.get("pair", { entry: index, head: "mean", batch, variant, i, j0, j1, ...other }, { signal });
      json.weights.forEach((pair, each) => (values[`${index}:${each}`] = { pair, agree: json.agreement?.[each] ?? null }));
    };
    await Promise.allSettled(info.entries.map((_, index) => fetchPair(index)));
    if (!signal.aborted) store.set({ pairs: values });
  }
  const scheduleLoad = () => {
    clearTimeout(timer);
    timer = setTimeout(load, REQUEST_DELAY);
  };

  const getShownKind = (/** @type {State} */ state) => (!state.pin ? "statistic" : state.heat === "agree" && !areShares(state) ? "pair" : state.heat);
  /** @param {State} state */
  function paint(state) {
    const kind = getShownKind(state);
    const { pairs, statistic, heads } = state;
    const rows = new Map((heads?.rows ?? []).map((row) => [`${row.entry}:${row.head}`, row.values]));
    const numbers = cells.map(({ entry, head }) => {
      const key = `${entry}:${head}`;
      return (kind === "statistic" ? rows.get(key)?.[statistic ?? ""] : pairs?.[key]?.[kind]) ?? null;
    });
    const known = numbers.filter((number) => number !== null);
    const [low, high] = kind === "statistic" ? [Math.min(...known), Math.max(...known)] : [0, 1];
    const bytes = getColours(state);
    const getCellColour = (/** @type {number} */ number, /** @type {number} */ entry) => {
      if (kind === "pair") return getColour(number, { ...state, entry });
      const index = 3 * Math.round(255 * Math.min(1, Math.max(0, (number - low) / (high - low || 1))));
      return `rgb(${bytes[index]} ${bytes[index + 1]} ${bytes[index + 2]})`;
    };
    const formatCell = (/** @type {number} */ number, /** @type {number} */ entry) => (kind === "statistic" ? formatNumber(number) : kind === "pair" ? formatAmount(number, { ...state, entry }) : formatPercent(number));
    cells.forEach(({ button, entry, head }, index) => {
      const number = numbers[index];
      const isShown = entry === state.entry && head === state.head;
      const label = t("{0}: {1}", getHeadName(info, entry, head), number === null ? t("not known") : formatCell(number, entry));
      button.style.background = number === null ? "" : getCellColour(number, entry);
      button.title = label;
      button.setAttribute("aria-label", label);
      button.setAttribute("aria-pressed", String(isShown));
      button.tabIndex = isShown || (state.head === "mean" && index === 0) ? 0 : -1;
    });
    kindButtons.set(kind, state.pin ? {} : { pair: t("Pin a cell first: click one in the map"), agree: t("Pin a cell first: click one in the map") });
    if (state.pin && !areShares(state)) kindButtons.set(kind, { agree: t("Agreement is defined for weights that are shares of a row") });
    message.textContent = describePairs(state, kind, numbers, formatCell).replaceAll(" %", "\u00a0%"); // no line begins with %
  }
  /**
   * @param {State} state
   * @param {Heat} kind
   * @param {(number | null)[]} numbers
   * @param {(value: number, entry: number) => string} formatCell
   */
  function describePairs(state, kind, numbers, formatCell) {
    if (kind === "statistic") return state.pin ? "" : t("Pin a cell: here stands the weight that every head gives to this pair.");
    if (!state.pairs) return "…";
    const [pair] = createPairColumns(state);
    const isHead = (/** @type {HeadPlace} */ { entry }) => !isRollout(info.entries[entry]);
    const others = kind === "agree" ? (/** @type {HeadPlace} */ { entry, head }) => entry !== state.entry || head !== state.head : () => true;
    const best = numbers.map((number, index) => ({ number: number ?? 0, cell: cells[index] })).filter(({ number, cell }) => number !== 0 && isHead(cell) && others(cell)).sort((a, b) => Math.abs(b.number) - Math.abs(a.number));
    const named = best.slice(0, MAX_NAMED).map(({ number, cell }) => `${getHeadMark(info, cell.entry, cell.head)} ${formatCell(number, cell.entry)}`);
    const what = kind === "pair" ? pair.description : t("From the pinned query the same keys as {0}", getHeadMark(info, state.entry, state.head));
    const own = numbers.filter((_, index) => cells[index] && isHead(cells[index]));
    const known = own.filter((number) => number !== null).length;
    const missing = info.held && known < own.length ? ` ${t("This file has it for {0} of {1} heads.", formatInteger(known), formatInteger(own.length))}` : "";
    return `${t("{0}: {1}.", what, named.join(", ") || t("no head"))}${missing}`;
  }

  const subscriptions = [
    store.on(["pin"], (state, changed) => {
      if (state.span && !changed.includes("span")) store.set({ span: null });
    }),
    store.on(["pin", "span", "entry", "head", "batch", "variant"], scheduleLoad),
    store.on(["pin", "span", "entry"], describe),
    store.on(["pairs", "heads", "statistic", "heat", "pin", "entry", "head", "colour", "low", "high", "palette", "dark"], paint),
  ];
  describe(store.state);
  paint(store.state);
  if (store.state.pin) load();
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      clearTimeout(timer);
      controller?.abort();
      element.replaceChildren();
    },
  };
}
