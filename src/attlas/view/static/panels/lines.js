// Queries and keys in two columns, with a line for each weight of a head, or of several in a colour each, for a few tokens.

import { listColoured } from "../data/coloured.js";
import { getPlace } from "../data/state.js";
import { createSvg } from "./figure.js";
import { clamp } from "../map/geometry.js";
import { make } from "./elements.js";
import { formatNumber, formatPercent, formatInteger, getHeadMark, getHeadName } from "../data/numbers.js";
import { showWhitespace } from "../data/tokens.js";
import { areShares, isWeighted, getNumberName, getUnit } from "../data/weighting.js";
import { t } from "../words/words.js";

const WINDOW_SIZE = 64; // tokens on each side, at most
const ROW_HEIGHT = 17; // CSS pixels of a token
const MIN_WEIGHT = 0.01; // weights below this get no line,
const MIN_SIZE = 0.05; // and sizes below this share of the largest, where weights are no shares
const LINES_WIDTH = 240; // pixels between the two columns
const GAP = 2.5; // pixels between the lines of two heads for the same cell

/**
 * The tokens that are shown around a place of the map: {r0, r1, c0, c1}; where positions are shared, the same on both sides.
 *
 * @param {Entry} entry
 * @param {number} row
 * @param {number} column
 * @returns {Region}
 */
function getWindow({ m, n, kind, first_query: firstQuery, first_key: firstKey }, row, column) {
  const getStart = (/** @type {number} */ index, /** @type {number} */ size) => Math.min(Math.max(0, size - WINDOW_SIZE), Math.max(0, Math.floor(index) - WINDOW_SIZE / 2));
  const r0 = getStart(row, m);
  const shared = kind !== "cross" && Math.abs(firstQuery + row - firstKey - column) < n; // else another text is looked at
  const c0 = getStart(shared ? r0 + firstQuery - firstKey + WINDOW_SIZE / 2 : column, n);
  return { r0, r1: Math.min(m, r0 + WINDOW_SIZE), c0, c1: Math.min(n, c0 + WINDOW_SIZE) };
}

/**
 * Mount the columns in `element`, over the map; they show while `view` is "lines".
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountLines(element, { store, transport, texts, map, tools }) {
  /** @type {AbortController | null} */
  let controller = null;
  /** @type {ShownLines | null} */
  let shown = null;
  let builtFor = ""; // what the columns were built for
  /** @type {LineToken | null} */
  let focused = null; // {side: "query" | "key", index}
  const openButton = make("button", { type: "button", title: t("Tokens in two columns, with lines for the weights, 64 at a time") }, t("Lines"));
  openButton.addEventListener("click", () => store.set({ view: store.state.view === "lines" ? "map" : "lines" }));
  const buttonBox = make("div", {}, openButton);
  tools.prepend(buttonBox);
  const message = make("p", { class: "lines-says", role: "status" });
  const createStepButton = (/** @type {string} */ text, /** @type {number} */ by) => {
    const button = make("button", { type: "button", class: "text-button" }, text);
    button.addEventListener("click", () => {
      const { row, column } = getPlace(store.state);
      const entryInfo = getEntry();
      map.centre(clamp(row + by, 0, entryInfo.m - 1), clamp(column + by, 0, entryInfo.n - 1));
    });
    return button;
  };
  const [earlier, later] = [createStepButton(t("↑ earlier"), -WINDOW_SIZE / 2), createStepButton(t("later ↓"), WINDOW_SIZE / 2)];
  const queries = make("div", { class: "lines-column", role: "group", "aria-label": t("Queries") });
  const keys = make("div", { class: "lines-column", role: "group", "aria-label": t("Keys") });
  const svg = createSvg("svg", { "aria-hidden": "true" });
  const box = make("div", { class: "lines-box" }, queries, svg, keys);
  const legend = make("ul", { class: "lines-legend", "aria-label": t("Heads with a colour"), hidden: true });
  element.append(make("div", { class: "lines-head" }, message, earlier, later), legend, make("div", { class: "lines-scroll" }, box));

  const getMark = (/** @type {number} */ head) => getHeadMark(store.state.info, getShown().heads[head].entry, getShown().heads[head].head);
  const getEntry = () => store.state.info.entries[store.state.entry];
  // What is shown, where something is.
  const getShown = () => /** @type {ShownLines} */ (shown);
  const getWeight = (/** @type {number} */ query, /** @type {number} */ key, head = 0) => getShown().weights[head][query * (getShown().c1 - getShown().c0) + key] / getUnit({ ...store.state, entry: getShown().heads[head].entry });

  async function load() {
    const { state } = store;
    const { entry, head, batch, variant, row, column } = state;
    const heads = state.compare === "colours" ? listColoured(state) : [{ entry, head }];
    element.hidden = state.view !== "lines";
    openButton.setAttribute("aria-pressed", String(!element.hidden));
    if (element.hidden || row === null || column === null) return;
    const place = getWindow(getEntry(), row, column);
    const key = JSON.stringify([heads, batch, variant, place]);
    if (key === builtFor) return;
    builtFor = key;
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    const { first_query: firstQuery, first_key: firstKey } = getEntry();
    const tokens = texts.of(state);
    try {
      const [answers] = await Promise.all([
        Promise.all(heads.map((each) => transport.get("region", { ...each, batch, variant, ...place }, { signal }))),
        tokens.query.range(firstQuery + place.r0, firstQuery + place.r1),
        tokens.key.range(firstKey + place.c0, firstKey + place.c1),
      ]);
      if (signal.aborted) return;
      shown = { ...place, heads, weights: answers.map(({ buffer }) => new Float32Array(buffer)), tokens, firstQuery: firstQuery + place.r0, firstKey: firstKey + place.c0 };
      focused = null;
      build();
    } catch (error) {
      if (signal.aborted) return;
      [shown, builtFor] = [null, ""];
      for (const column of [queries, keys]) column.replaceChildren();
      svg.replaceChildren();
      message.textContent = `${error.message}.`;
    }
  }
  function build() {
    const { r0, r1, c0, c1, firstQuery, firstKey, heads } = getShown();
    const fillColumn = (/** @type {HTMLElement} */ column, /** @type {Side} */ side, /** @type {number} */ first, /** @type {number} */ count) => column.replaceChildren(...Array.from({ length: count }, (_, index) => createToken(side, index, first + index)));
    fillColumn(queries, "query", firstQuery, r1 - r0);
    fillColumn(keys, "key", firstKey, c1 - c0);
    legend.hidden = heads.length < 2;
    legend.replaceChildren(...heads.map(({ entry, head }, index) => make("li", {}, make("i", { class: "hue", "data-hue": String(index) }), getHeadName(store.state.info, entry, head))));
    const height = ROW_HEIGHT * Math.max(r1 - r0, c1 - c0);
    svg.setAttribute("viewBox", `0 0 ${LINES_WIDTH} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.style.height = `${height}px`;
    const lines = [];
    for (let i = 0; i < r1 - r0; i++) {
      for (let j = 0; j < c1 - c0; j++) {
        for (const head of heads.keys()) {
          const weight = Math.min(1, Math.abs(getWeight(i, j, head)));
          if (!(weight >= (areShares(store.state) ? MIN_WEIGHT : MIN_SIZE))) continue;
          const sign = getWeight(i, j, head) < 0 ? "below" : areShares(store.state) ? null : "above";
          const strength = { opacity: String(0.12 + 0.88 * Math.sqrt(weight)), "stroke-width": String(0.5 + 3 * weight) }; // not rounded
          const shift = GAP * (head - (heads.length - 1) / 2);
          const ends = { x1: 0, y1: ROW_HEIGHT * (i + 0.5) + shift, x2: LINES_WIDTH, y2: ROW_HEIGHT * (j + 0.5) + shift };
          lines.push(createSvg("line", { ...ends, ...strength, "data-query": i, "data-key": j, ...(heads.length > 1 ? { "data-hue": head } : {}), class: sign }));
        }
      }
    }
    svg.replaceChildren(...lines);
    [earlier.disabled, later.disabled] = [r0 === 0 && c0 === 0, r1 === getEntry().m && c1 === getEntry().n];
    updateStyles();
    const { side, index } = getActive() ?? { side: "query", index: Math.floor((r1 - r0) / 2) };
    (side === "query" ? queries : keys).children[index]?.scrollIntoView({ block: "center" });
  }
  /**
   * @param {Side} side
   * @param {number} index
   * @param {number} position
   */
  function createToken(side, index, position) {
    const text = getShown().tokens[side].peek(position);
    const button = make("button", { type: "button", tabIndex: index ? -1 : 0, "data-at": index, title: formatInteger(position) }, text === null ? formatInteger(position) : showWhitespace(text));
    const focusThis = () => focusToken({ side, index });
    button.addEventListener("pointerenter", focusThis);
    button.addEventListener("focus", focusThis);
    button.addEventListener("click", () => pinToken(side, index));
    return button;
  }
  /** @param {LineToken | null} next */
  function focusToken(next) {
    focused = next;
    const { state } = store;
    if (focused?.side === "query" && state.pin === null) store.set({ by: "query", pointed: getCell(focused) });
    updateStyles();
  }
  /**
   * @param {LineToken} lineToken
   * @returns {Cell}
   */
  function getCell({ side, index }) {
    const { m, n, first_query: firstQuery, first_key: firstKey } = getEntry();
    const shift = firstQuery - firstKey;
    const { r0, c0 } = getShown();
    return side === "query" ? { i: r0 + index, j: clamp(r0 + index + shift, 0, n - 1) } : { i: clamp(c0 + index - shift, 0, m - 1), j: c0 + index };
  }
  /**
   * @param {Side} side
   * @param {number} index
   */
  function pinToken(side, index) {
    store.set({ by: side, pin: getCell({ side, index }), pointed: null });
  }
  // The hovered token, else the pinned one.
  /** @returns {LineToken | null} */
  function getActive() {
    if (focused) return focused;
    const { pin, by } = store.state;
    if (!pin || !shown) return null;
    const index = by === "query" ? pin.i - shown.r0 : pin.j - shown.c0;
    return index >= 0 && index < (by === "query" ? shown.r1 - shown.r0 : shown.c1 - shown.c0) ? { side: by, index } : null;
  }
  function updateStyles() {
    if (!shown) return;
    const active = getActive();
    for (const line of /** @type {Iterable<SVGLineElement>} */ (svg.children)) line.classList.toggle("out", active !== null && Number(line.dataset[active.side]) !== active.index);
    const heads = [...shown.heads.keys()];
    const sums = heads.map(() => 0);
    for (const { side, column } of [{ side: "query", column: queries }, { side: "key", column: keys }]) {
      for (const [index, button] of /** @type {HTMLElement[]} */ ([...column.children]).entries()) {
        const other = active && active.side !== side;
        const shares = heads.map((head) => (other ? (side === "key" ? getWeight(active.index, index, head) : getWeight(index, active.index, head)) : 0));
        for (const head of heads) if (!Number.isNaN(shares[head])) sums[head] += shares[head];
        const strongest = heads.reduce((best, head) => (Math.abs(shares[head]) > Math.abs(shares[best]) ? head : best), 0);
        const share = shares[strongest];
        const colour = heads.length > 1 ? `--hue-${strongest}` : areShares(store.state) ? "--glow" : share < 0 ? "--below" : "--above";
        button.style.background = Math.abs(share) >= 0.005 ? `color-mix(in srgb, var(${colour}) ${((heads.length > 1 ? 45 : 100) * Math.min(1, Math.abs(share))).toFixed(1)}%, transparent)` : "";
        button.classList.toggle("own", active !== null && active.side === side && active.index === index);
      }
    }
    const { r0, r1, firstQuery } = shown;
    // One number, or that of each head with its name.
    const list = (/** @type {(head: number) => string} */ format) => heads.map((head) => (heads.length > 1 ? `${format(head)} (${getMark(head)})` : format(head))).join(", ");
    if (!active && !areShares(store.state)) message.textContent = t("Queries {0} to {1} at the left, keys at the right; a line for each weight from a size of 5 % of the largest on.", formatInteger(firstQuery), formatInteger(firstQuery + r1 - r0 - 1));
    else if (!active) message.textContent = t("Queries {0} to {1} at the left, keys at the right; a line for each weight from 1 % on.", formatInteger(firstQuery), formatInteger(firstQuery + r1 - r0 - 1));
    else if (isWeighted(store.state) || !areShares(store.state)) message.textContent = t("{0} in all: {1}.", getNumberName(store.state), list((head) => formatNumber(sums[head] * getUnit({ ...store.state, entry: getShown().heads[head].entry }))));
    else if (active.side === "query") message.textContent = t("{0} of the attention of query {1} goes to these keys.", list((head) => formatPercent(Math.min(1, sums[head]))), formatInteger(firstQuery + active.index));
    else message.textContent = t("These queries give key {0} {1} in all.", formatInteger(shown.firstKey + active.index), list((head) => sums[head].toFixed(2)));
  }
  box.addEventListener("pointerleave", () => focusToken(null));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const column = { ArrowLeft: queries, ArrowRight: keys }[event.key];
    if (by === undefined && !column) return;
    event.preventDefault();
    event.stopPropagation();
    const button = /** @type {HTMLElement} */ (event.target);
    const index = Number(button.dataset.at);
    const next = column ? column.children[Math.min(index, column.children.length - 1)] : button.parentElement?.children[index + (by ?? 0)];
    /** @type {HTMLElement | undefined} */ (next)?.focus();
  });
  const subscriptions = [
    store.on(["view", "row", "column", "entry", "head", "second", "more", "compare", "batch", "variant"], load),
    store.on(["pin", "by"], updateStyles),
  ];
  load();
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      controller?.abort();
      buttonBox.remove();
      element.replaceChildren();
    },
  };
}
