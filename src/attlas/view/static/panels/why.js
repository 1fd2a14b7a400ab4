// Why the pinned weight is where it is: two arrows over the text, a sentence, and what each part of the key adds; and
// why the whole map is what it is: a table of what pairs of parts add.

import { createDialog, make } from "./elements.js";
import { holdsHead } from "../data/held.js";
import { formatInteger, formatNumber, getHeadMark, getHeadName } from "../data/numbers.js";
import { holdsReason, listReasons } from "../data/reasons.js";
import { showWhitespace } from "../data/tokens.js";
import { t } from "../words/words.js";

const SHOWN_PARTS = 6; // parts that have a bar of their own
const NEAR = 3; // tokens shown around each of the three
const SVG = "http://www.w3.org/2000/svg";

/**
 * Mount the button among the tools of the map, which a pinned cell shows, and its dialog.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountWhy(element, { store, transport, texts, uid, root, map }) {
  const openButton = make("button", { type: "button", title: t("What made the pinned weight, or the map: logits, part by part  w") }, t("Why?"));
  openButton.addEventListener("click", () => store.set({ panel: "why" }));
  const buttonBox = make("div", { hidden: true }, openButton);
  element.prepend(buttonBox);
  const dialog = createDialog(root, t("Why this weight"), uid, () => {
    if (store.state.panel === "why") store.set({ panel: "" });
  });
  dialog.element.classList.add("reasons");
  dialog.body.tabIndex = 0;
  /** @type {AbortController | null} */
  let pending = null;
  /** @type {(() => void) | null} */
  let redraw = null; // draws the arrows again where the dialog has another width
  /** @type {(() => void) | null} */
  let rename = null; // fills the dialog again when it is known what the heads are
  let isWhole = false; // whether the whole map is explained, though a cell is pinned
  const observer = new ResizeObserver(() => redraw?.());
  observer.observe(dialog.body);

  const showMessage = (/** @type {string} */ text) => dialog.body.replaceChildren(make("p", { class: "reasons-note", role: "status" }, text));
  const showButton = (/** @type {State} */ { pin, head, entry, info }) => {
    const shown = info.entries[entry];
    buttonBox.hidden = (pin === null && !shown.parts) || head === "mean" || !shown.readable;
  };
  const showWhole = (/** @type {boolean} */ whole) => {
    isWhole = whole;
    load(store.state);
    dialog.body.focus();
  };

  async function load(/** @type {State} */ state) {
    pending?.abort();
    redraw = rename = null;
    if (state.panel !== "why") {
      isWhole = false;
      return dialog.close();
    }
    const { info, entry, head, batch, pin } = state;
    const shown = info.entries[entry];
    dialog.open();
    if (head === "mean") return showMessage(t("The mean of heads has no logits: choose one head."));
    // Of a text that was typed the server says why it has none.
    if (!shown.parts && !info.reading?.number) return showMessage(t("This recording has no parts: attlas record --parts, or record(model, parts=True), keeps them."));
    const isOfMap = pin === null || isWhole;
    if (!holdsReason(info, { entry, head }, isOfMap ? null : pin)) return fillMissing(state, isOfMap);
    showMessage(t("computing …"));
    const controller = new AbortController();
    pending = controller;
    try {
      if (isOfMap) {
        const { json: map } = await transport.get("why_map", { entry, head, batch }, { signal: controller.signal });
        if (controller.signal.aborted) return undefined;
        fillWhole(state, map);
        rename = () => fillWhole(store.state, map);
        return undefined;
      }
      const { json } = await transport.get("why", { entry, head, batch, i: pin.i, j: pin.j }, { signal: controller.signal });
      const words = await fetchWords(state, json);
      if (controller.signal.aborted) return undefined;
      fill(state, json, words);
      rename = () => dialog.body.querySelector("details[open]") ?? fill(store.state, json, words);
    } catch (error) {
      if (!controller.signal.aborted) showMessage(`${error.message}.`);
    }
    return undefined;
  }

  /**
   * The texts of the tokens that the picture shows, by their positions.
   *
   * @param {State} state
   * @param {Why} why
   */
  async function fetchWords({ info, entry, batch, pin }, why) {
    const { first_query: firstQuery, first_key: firstKey } = info.entries[entry];
    const { query, key } = texts.of({ entry, batch });
    const [i, j] = [firstQuery + (pin?.i ?? 0), firstKey + (pin?.j ?? 0)];
    const source = why.writer?.sources[0]?.at ?? null;
    const places = [i, j, ...(source === null ? [] : [source])];
    const shown = query === key ? listShown(places, query.length, NEAR) : [j, i];
    /** @type {Map<number, string>} */
    const words = new Map();
    await Promise.all(
      shown.map(async (position) => {
        const [word] = await (position === i ? query : key).range(position, position + 1);
        words.set(position, word === undefined ? `${position}` : showWhitespace(word));
      }),
    );
    return { words, length: query === key ? query.length : 0, i, j, source: query === key ? source : null };
  }

  /**
   * @param {State} state
   * @param {Why} why
   * @param {WhyWords} found
   */
  function fill(state, why, found) {
    const { info, entry, head } = state;
    const { words, i, j, source } = found;
    const quote = (/** @type {number} */ position) => `“${words.get(position) ?? position}”`;
    const headName = getHeadName(info, entry, head);
    const { writer } = why;
    const sentences = [t("{0} at {1} looks at {2} with weight {3}.", headName, quote(i), quote(j), formatNumber(why.weight))];
    if (writer) {
      const name = describePart(state, writer);
      const sum = why.relative ? t("{0} of the {1} by which the logit lies above its row", formatSigned(writer.logit), formatSigned(why.above)) : t("{0} of the logit {1}", formatSigned(writer.logit), formatSigned(why.logit));
      sentences.push(t("Most of it stands in the key: {0} wrote {1}.", name, sum));
      if (source !== null) sentences.push(source === j ? t("It took that from the token itself.") : source === j - 1 ? t("It took that from {0}, the token before.", quote(source)) : t("It took that from {0}, {1} tokens earlier.", quote(source), formatInteger(j - source)));
      if (writer.without) sentences.push(t("Without this part the weight would be {0}, if all norms kept their scales.", formatNumber(writer.without.weight)));
    }
    const figure = make("div", { class: "reasons-text", tabIndex: 0, role: "img", "aria-label": sentences.join(t(" ")) });
    const chart = createBars(state, why.keys, writer);
    const asked = createBars(state, why.queries, null);
    const evidence = make(
      "details",
      { class: "reasons-more" },
      make("summary", {}, t("The evidence")),
      make("h3", {}, t("What each part of the query adds")),
      asked,
      make("h3", {}, t("Largest pairs: part of the query → part of the key")),
      make("ol", { class: "reasons-pairs" }, ...why.pairs.map((pair) => make("li", {}, make("span", {}, `${describePart(state, pair.query)} → ${describePart(state, pair.key)}`), make("b", {}, formatSigned(pair.logit))))),
      ...(writer?.sources.length ? [make("h3", {}, t("Tokens that {0} took it from", describePart(state, writer))), make("ol", { class: "reasons-pairs" }, ...writer.sources.map(({ at, logit }) => make("li", {}, make("span", {}, `${formatInteger(at)} ${words.get(at) ?? ""}`), make("b", {}, formatSigned(logit)))), make("li", {}, make("span", {}, t("all others")), make("b", {}, formatSigned(writer.others ?? 0))))] : []),
      make("p", {}, t("Logit {0} = the sum of all pairs, {1}; they differ by {2}. The mean of the row is {3}.", why.logit.toFixed(3), why.total.toFixed(3), why.remainder.toExponential(0), why.mean.toFixed(3))),
      ...why.notes.map((note) => make("p", {}, `${t(note)}.`)),
    );
    const place = writer?.place;
    const row = writer?.row ?? null;
    const follow = place && row !== null && holdsHead(info, place.entry, place.head) ? make("button", { type: "button", class: "toggle" }, t("Open {0} where it read this →", describePart(state, writer))) : null;
    follow?.addEventListener("click", () => {
      const other = info.entries[/** @type {HeadPlace} */ (place).entry];
      const cell = { i: /** @type {number} */ (row) - other.first_query, j: (writer?.sources[0].at ?? 0) - other.first_key };
      store.set({ panel: "", ...place, pin: cell, span: null, second: null, compare: "none" });
      map.centre(cell.i, cell.j);
    });
    dialog.body.replaceChildren(
      make("p", { class: "reasons-lead" }, sentences.join(t(" "))),
      figure,
      make("h3", {}, why.relative ? t("What each part of the key adds to the logit, above the mean of its row") : t("What each part of the key adds to the logit")),
      chart,
      make("p", { class: "reasons-follow" }, ...(follow ? [follow] : []), ...createSwitches(state, true)),
      evidence,
      make("p", { class: "reasons-note" }, t("This explains a logit, exactly: the parts sum to it. It does not explain the weight alone, which is a softmax over all keys, and not what the model answers. The number without a part is a prediction: a model computes its norms again, and gives back a share of the logit.")),
      ...createHeld(state),
    );
    redraw = () => drawText(figure, found);
    redraw();
  }

  /**
   * The button that shows the whole map, or the pinned cell again; none where the page cannot explain that.
   *
   * @param {State} state
   * @param {boolean} whole
   */
  function createSwitches({ info, entry, head, pin }, whole) {
    if (pin === null || !holdsReason(info, { entry, head }, whole ? null : pin)) return [];
    const button = make("button", { type: "button", class: "toggle" }, whole ? t("The whole map") : t("The pinned cell"));
    button.addEventListener("click", () => showWhole(whole));
    return [button];
  }

  /**
   * Of an offline page, which cells it explains, each with a button; nothing where a server explains every cell.
   *
   * @param {State} state
   */
  function createHeld({ info, entry, head }) {
    if (!info.held) return [];
    const cells = listReasons(info, { entry, head });
    const known = cells.length ? t("This page explains the cells below. The viewer explains every cell: attlas view, with the recording.") : t("This page explains no cell. The viewer explains every cell: attlas view, with the recording.");
    const buttons = cells.map((cell) => {
      const { first_query: firstQuery, first_key: firstKey } = info.entries[cell.entry];
      const button = make("button", { type: "button", class: "toggle" }, t("{0}: {1}, {2}", getHeadMark(info, cell.entry, cell.head), formatInteger(firstQuery + cell.i), formatInteger(firstKey + cell.j)));
      button.addEventListener("click", () => {
        store.set({ entry: cell.entry, head: cell.head, pin: { i: cell.i, j: cell.j }, span: null, second: null, compare: "none" });
        map.centre(cell.i, cell.j);
        showWhole(false);
      });
      return button;
    });
    return [make("p", { class: "reasons-note" }, known), make("p", { class: "reasons-follow reasons-held" }, ...buttons)];
  }

  /**
   * @param {State} state
   * @param {boolean} isOfMap
   */
  function fillMissing(state, isOfMap) {
    dialog.body.replaceChildren(
      make("p", { class: "reasons-lead", role: "status" }, isOfMap ? t("This page does not explain the whole map of this head.") : t("This page does not explain this cell.")),
      make("p", { class: "reasons-follow" }, ...createSwitches(state, !isOfMap)),
      ...createHeld(state),
    );
  }

  /**
   * @param {State} state
   * @param {WhyMap} map
   */
  function fillWhole(state, map) {
    const headName = getHeadName(state.info, state.entry, state.head);
    const best = findLargest(map.table, map.queries.length, map.keys.length);
    const sentences = [t("{0}: where it looks, its logits lie {1} above the mean of the keys, in the mean over all queries.", headName, formatSigned(map.total))];
    if (best) sentences.push(t("Most of it, {0}: {1} in the query meets {2} in the key.", formatSigned(best.value), describePart(state, map.queries[best.row]), describePart(state, map.keys[best.column])));
    dialog.body.replaceChildren(
      make("p", { class: "reasons-lead" }, sentences.join(t(" "))),
      make("h3", {}, t("What each part of the queries (rows) and of the keys (columns) adds together")),
      createTable(state, map),
      ...(state.pin !== null ? [make("p", { class: "reasons-follow" }, ...createSwitches(state, false))] : state.info.held ? [] : [make("p", { class: "reasons-follow" }, t("Click a cell of the map to see why its weight is where it is."))]),
      ...map.notes.map((note) => make("p", { class: "reasons-note" }, `${t(note)}.`)),
      make("p", { class: "reasons-note" }, t("Each number is weighted by the attention weights, less the same with equal weights: what is the same for all keys adds 0. All numbers sum to the total. This explains logits, not what the model answers.")),
      ...createHeld(state),
    );
  }

  showButton(store.state);
  load(store.state);
  const subscriptions = [store.on(["pin", "head", "entry"], showButton), store.on(["panel", "pin", "entry", "head", "batch"], load), store.on(["heads"], () => rename?.())];
  return {
    destroy() {
      pending?.abort();
      observer.disconnect();
      for (const unsubscribe of subscriptions) unsubscribe();
      dialog.destroy();
      buttonBox.remove();
    },
  };
}

/**
 * Positions of the tokens up to `near` places from some places, ascending, in a text of `length` tokens.
 *
 * @param {number[]} places
 * @param {number} length
 * @param {number} near
 */
export function listShown(places, length, near) {
  const shown = new Set();
  for (const place of places) {
    for (let at = Math.max(0, place - near); at <= Math.min(length - 1, place + near); at++) shown.add(at);
  }
  return [...shown].sort((a, b) => a - b);
}

/**
 * A part of a query or key in the language of the page, with what the head is.
 *
 * @param {Pick<State, "info" | "heads">} state
 * @param {WhyPart} part
 */
export function describePart({ info, heads }, part) {
  if (part.kind !== "head" || part.layer === null || part.head === null) return t(part.name);
  const { layer, head } = part;
  const entry = info.entries.findIndex((each) => each.layer === layer && each.kind === "self" && each.heads.includes(head));
  const row = entry < 0 ? undefined : heads?.rows.find((each) => each.entry === entry && each.head === info.entries[entry].heads.indexOf(head));
  const kind = row?.kinds[0];
  const name = t("head {0}·{1}", layer, head);
  return kind && kind !== "mixed" ? t("{0} ({1})", name, t(kind)) : name;
}

/**
 * A number with its sign, one digit behind the point.
 *
 * @param {number} value
 */
export function formatSigned(value) {
  const text = Math.abs(value).toFixed(1);
  return `${value < 0 && text !== "0.0" ? "−" : "+"}${text}`;
}

/**
 * A bar for each of the largest parts, and one for all others; that of the writer stands out.
 *
 * @param {State} state
 * @param {WhyPart[]} parts
 * @param {WhyPart | null} writer
 */
function createBars(state, parts, writer) {
  const first = parts.slice(0, SHOWN_PARTS);
  const rest = parts.slice(SHOWN_PARTS);
  /** @type {[string, number, boolean][]} */
  const rows = first.map((part) => [describePart(state, part), part.logit, part.name === writer?.name]);
  if (rest.length) rows.push([t("{0} other parts", rest.length), rest.reduce((sum, part) => sum + part.logit, 0), false]);
  const largest = Math.max(...rows.map(([, value]) => Math.abs(value)), 1e-9);
  const low = Math.min(...rows.map(([, value]) => value), 0);
  const zero = (100 * -low) / (largest - low);
  return make(
    "dl",
    { class: "reasons-bars" },
    ...rows.map(([name, value, stands]) => {
      const bar = make("i", { class: value < 0 ? "below" : "" });
      const width = (Math.abs(value) / (largest - low)) * 100;
      bar.style.width = `${width}%`;
      bar.style.left = `${value < 0 ? zero - width : zero}%`;
      return make("div", { class: stands ? "writer" : "" }, make("dt", {}, name), make("dd", {}, make("span", { "aria-hidden": "true" }, bar), make("b", {}, formatSigned(value))));
    }),
  );
}

/**
 * The largest number of a table of parts, without those of parts that are joined.
 *
 * @param {number[][]} table
 * @param {number} rows
 * @param {number} columns
 */
export function findLargest(table, rows, columns) {
  const numbers = table.slice(0, rows).flatMap((line, row) => line.slice(0, columns).map((value, column) => ({ row, column, value })));
  const best = numbers.reduce((most, each) => (each.value > most.value ? each : most), { row: 0, column: 0, value: 0 });
  return best.value > 0 ? best : null;
}

/**
 * A heat map of what pairs of parts add, as a table.
 *
 * @param {State} state
 * @param {WhyMap} map
 */
function createTable(state, { queries, keys, others, table }) {
  const names = (/** @type {WhyPart[]} */ parts, /** @type {number} */ rest) => [...parts.map((part) => describePart(state, part)), ...(rest ? [t("{0} other parts", rest)] : [])];
  const [rows, columns] = [names(queries, others[0]), names(keys, others[1])];
  const largest = Math.max(...table.flat().map(Math.abs), 1e-9);
  const cells = (/** @type {number[]} */ line) =>
    line.map((value) => {
      const cell = make("td", { class: value < 0 ? "below" : "", title: formatSigned(value) }, Math.abs(value) < 0.05 ? "" : formatSigned(value));
      cell.style.setProperty("--share", `${(100 * Math.abs(value)) / largest}%`);
      return cell;
    });
  return make(
    "div",
    { class: "reasons-table", tabIndex: 0, role: "region", "aria-label": t("What each part of the queries (rows) and of the keys (columns) adds together") },
    make("table", {}, make("thead", {}, make("tr", {}, make("td", {}), ...columns.map((name) => make("th", { scope: "col" }, make("span", {}, name))))), make("tbody", {}, ...rows.map((name, row) => make("tr", {}, make("th", { scope: "row" }, name), ...cells(table[row]))))),
  );
}

/**
 * Draw the tokens with an arrow from the query to its key, and one from the key to the token its writer read.
 *
 * @param {HTMLElement} figure
 * @param {WhyWords} found
 */
function drawText(figure, { words, length, i, j, source }) {
  for (let near = NEAR; near >= 0; near--) {
    const places = [i, j, ...(source === null ? [] : [source])];
    const line = drawTokens(figure, { words, i, j, source }, length ? listShown(places, length, near) : [j, i]);
    if (line.scrollWidth <= figure.clientWidth) break; // a narrow page shows fewer tokens between them
  }
}

/**
 * Draw some tokens with their arrows; returns the line.
 *
 * @param {HTMLElement} figure
 * @param {Omit<WhyWords, "length">} found
 * @param {number[]} shown
 */
function drawTokens(figure, { words, i, j, source }, shown) {
  const line = make("div", { class: "reasons-line" });
  /** @type {Map<number, HTMLElement>} */
  const tokens = new Map();
  shown.forEach((position, index) => {
    if (index && shown[index - 1] !== position - 1) line.append(make("span", { class: "reasons-gap" }, "…"));
    const role = position === i ? "query" : position === j ? "key" : position === source ? "source" : "";
    const token = make("span", { class: `reasons-token ${role}`, title: formatInteger(position) }, words.get(position) ?? "");
    tokens.set(position, token);
    line.append(token);
  });
  figure.replaceChildren(line);
  const width = line.scrollWidth;
  const middle = (/** @type {number} */ position) => {
    const token = /** @type {HTMLElement} */ (tokens.get(position));
    return token.offsetLeft + token.offsetWidth / 2;
  };
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "reasons-arrows");
  svg.setAttribute("width", `${width}`);
  svg.setAttribute("height", `${line.offsetHeight}`);
  svg.setAttribute("aria-hidden", "true");
  const [top, bottom] = [line.offsetHeight / 2 - 14, line.offsetHeight / 2 + 14];
  drawArrow(svg, middle(i), middle(j), top, -1, "query");
  if (source !== null && tokens.has(source) && source !== j) drawArrow(svg, middle(j), middle(source), bottom, 1, "source");
  line.append(svg);
  return line;
}

/**
 * An arrow in an arc over or below the line.
 *
 * @param {SVGElement} svg
 * @param {number} from
 * @param {number} to
 * @param {number} y
 * @param {1 | -1} side
 * @param {string} name
 */
function drawArrow(svg, from, to, y, side, name) {
  const lift = side * Math.min(36, 14 + Math.abs(to - from) / 8);
  const path = document.createElementNS(SVG, "path");
  const end = y + side * 3;
  path.setAttribute("d", `M${from} ${y} C${from} ${y + lift * 1.3} ${to} ${y + lift * 1.3} ${to} ${end}`);
  path.setAttribute("class", name);
  const tip = document.createElementNS(SVG, "path");
  tip.setAttribute("d", `M${to - 5} ${end + side * 8} L${to} ${end - side} L${to + 5} ${end + side * 8}`);
  tip.setAttribute("class", name);
  svg.append(path, tip);
}
