// The heads that are selected, or all of them, as a table beside the scatter: sorted by any column, a click opens.

import { getHead, formatHeadLabel, formatHeadTitle, LETTERS, haveSameHeads, getMeasure, listMeasures, getOpenHeads, formatValue, getSelection, getShownValues } from "./data.js";
import { formatField } from "../data/csv.js";
import { download, make } from "../panels/elements.js";
import { formatInteger } from "../data/numbers.js";
import { t } from "../words/words.js";

const pageSize = 100; // rows; more on request, so that thousands of heads cost nothing

/** @param {CorpusContext} context */
export function createTable({ store, announce, uid }) {
  const { info } = store.state;
  const several = info.corpora.length > 1;
  const shared = several && haveSameHeads(info);
  let shownRows = pageSize;
  const title = make("h2", { id: uid("table") });
  const clearButton = make("button", { type: "button", class: "text-button", title: t("Select all heads again  Esc") }, t("clear"));
  clearButton.addEventListener("click", () => store.set({ brush: null }));
  const csvButton = make("button", { type: "button", class: "text-button", title: t("Save all numbers of these heads as a table") }, "CSV");
  csvButton.addEventListener("click", saveTable);
  const findInput = make("input", { type: "search", class: "table-find", placeholder: t("layer, or layer.head"), "aria-label": t("Find heads: a layer, or layer.head"), autocomplete: "off", spellcheck: false });
  findInput.addEventListener("input", () => store.set({ find: findInput.value.trim() }));
  const headElement = make("thead");
  const bodyElement = make("tbody");
  const tableFrame = make("div", { class: "table-frame", tabIndex: 0, role: "region", "aria-labelledby": title.id }, make("table", { class: "heads-table" }, headElement, bodyElement));
  const moreButton = make("button", { type: "button", class: "text-button" });
  moreButton.addEventListener("click", () => {
    shownRows += 4 * pageSize;
    render();
  });
  const empty = make("p", { class: "table-empty" }, t("No head is in the selection."));
  const element = make("section", { class: "selection" }, make("div", { class: "selection-head" }, title, clearButton, findInput, csvButton), tableFrame, empty, moreButton);

  // The rows of the table: {corpus, row} of each head; where corpora share their heads, of the first corpus.
  /** @param {CorpusState} state */
  function listRows(state) {
    const selected = getSelection(state);
    const query = /^(\d+)(?:[.·](\d*))?$/.exec(state.find);
    /** @type {CorpusPlace[]} */
    const result = [];
    for (const [corpus, each] of info.corpora.entries()) {
      if (shared && corpus > 0) break;
      for (let row = 0; row < each.rows.layer.length; row++) {
        if (selected[corpus] && !selected[corpus].has(row)) continue;
        if (query && (each.rows.layer[row] !== Number(query[1]) || (query[2] && !String(each.rows.head[row]).startsWith(query[2])))) continue;
        result.push({ corpus, row });
      }
    }
    return result;
  }
  /**
   * The columns: the measures that the scatter shows, for each corpus where they share their heads.
   *
   * @param {CorpusState} corpusState
   * @returns {TableColumn[]}
   */
  function listColumns({ x, y, size, colour }) {
    const names = [...new Set([x, y, size, colour])].filter((name) => name && name !== "layer" && !(shared && name === "kind"));
    return names.flatMap((name) => {
      const measure = getMeasure(info, name);
      const createColumn = (/** @type {number} */ corpus) => ({ name, key: shared ? `${name}@${corpus}` : name, label: shared ? `${measure.label} ${LETTERS[corpus]}` : measure.label, title: measure.description, value: (/** @type {CorpusPlace} */ place) => getShownValues(info.corpora[shared ? corpus : place.corpus], name)[place.row] });
      return shared ? info.corpora.map((_, corpus) => createColumn(corpus)) : [createColumn(0)];
    });
  }
  /**
   * @param {CorpusPlace[]} heads
   * @param {TableColumn[]} list
   * @param {Pick<CorpusState, "sort">} state
   */
  function sortRows(heads, list, { sort }) {
    const key = sort.replace(/^-/, "");
    const column = list.find((each) => each.key === key);
    const sign = sort.startsWith("-") ? -1 : 1;
    if (!column) return key === "head" && sign < 0 ? heads.reverse() : heads;
    const getSortValue = (/** @type {CorpusPlace} */ place) => column.value(place) ?? -Infinity * sign;
    const compareValues = (/** @type {number | string} */ a, /** @type {number | string} */ b) => (typeof a === "string" ? a.localeCompare(String(b)) : a - Number(b));
    return heads.sort((a, b) => sign * compareValues(getSortValue(a), getSortValue(b)) || a.corpus - b.corpus || a.row - b.row);
  }
  /**
   * @param {string} label
   * @param {string} key
   * @param {string} hint
   */
  function createHeading(label, key, hint) {
    const { sort } = store.state;
    const isSorted = sort.replace(/^-/, "") === key || (key === "head" && !sort);
    const ascending = !sort.startsWith("-");
    const button = make("button", { type: "button", title: hint }, label, make("span", { class: "sort-sign", "aria-hidden": "true" }, isSorted ? (ascending ? " ↑" : " ↓") : ""));
    button.addEventListener("click", () => {
      // The first click sorts numbers descending, and heads and kinds ascending.
      const first = key === "head" ? "" : key.startsWith("kind") ? key : `-${key}`;
      store.set({ sort: sort !== first ? first : first.startsWith("-") ? key : `-${key}` });
      /** @type {HTMLElement | null} */ (headElement.querySelector(`[data-key="${CSS.escape(key)}"] button`))?.focus();
    });
    return make("th", { scope: "col", "data-key": key, "aria-sort": isSorted ? (ascending ? "ascending" : "descending") : "none" }, button);
  }
  /**
   * @param {CorpusPlace} place
   * @param {TableColumn[]} list
   */
  function createRow(place, list) {
    const corpus = info.corpora[place.corpus];
    const open = make("button", { type: "button", class: "head-link", "aria-label": formatHeadTitle(getHead(corpus, place.row)) }, several && !shared ? `${LETTERS[place.corpus]} ` : "", formatHeadLabel(corpus, place.row));
    const cells = list.map((column) => make("td", { class: column.name === "kind" ? "word" : "" }, formatValue({}, column.value(place))));
    const element = make("tr", {}, make("th", { scope: "row" }, open), ...cells);
    element.addEventListener("click", () => store.set({ open: getOpenHeads(store.state, place.corpus, getHead(corpus, place.row)), hover: null }));
    element.addEventListener("pointerenter", () => store.set({ hover: place }));
    element.addEventListener("pointerleave", () => store.set({ hover: null }));
    open.addEventListener("focus", () => store.set({ hover: place }));
    open.addEventListener("blur", () => store.set({ hover: null }));
    element.dataset.row = `${place.corpus}/${place.row}`;
    return element;
  }
  function render() {
    const { state } = store;
    const list = listColumns(state);
    const heads = sortRows(listRows(state), list, state);
    const total = shared ? info.corpora[0].rows.layer.length : info.corpora.reduce((sum, corpus) => sum + corpus.rows.layer.length, 0);
    title.textContent = heads.length === total ? t("{0} heads", formatInteger(total)) : t("{0} of {1} heads", formatInteger(heads.length), formatInteger(total));
    clearButton.hidden = !state.brush;
    if (document.activeElement !== findInput) findInput.value = state.find;
    headElement.replaceChildren(make("tr", {}, createHeading(t("Head"), "head", t("Layer and head")), ...list.map(({ label, key, title: hint }) => createHeading(label, key, hint))));
    bodyElement.replaceChildren(...heads.slice(0, shownRows).map((place) => createRow(place, list)));
    tableFrame.hidden = !heads.length;
    empty.hidden = heads.length > 0;
    moreButton.hidden = heads.length <= shownRows;
    moreButton.textContent = t("show {0} more of {1}", formatInteger(Math.min(4 * pageSize, heads.length - shownRows)), formatInteger(heads.length));
    markHovered();
  }
  function markHovered() {
    const { hover } = store.state;
    for (const marked of bodyElement.querySelectorAll(".marked")) marked.classList.remove("marked");
    if (hover) bodyElement.querySelector(`[data-row="${shared ? 0 : hover.corpus}/${hover.row}"]`)?.classList.add("marked");
  }
  function saveTable() {
    const heads = sortRows(listRows(store.state), listColumns(store.state), store.state);
    const names = listMeasures(info, true).map(({ name }) => name).filter((name) => name !== "layer");
    const lines = [[...(several ? ["corpus"] : []), "layer", "head", ...names].join()];
    for (const place of heads) {
      for (const corpus of shared ? info.corpora.keys() : [place.corpus]) {
        const each = info.corpora[corpus];
        lines.push([...(several ? [formatField(each.title)] : []), each.rows.layer[place.row], each.rows.head[place.row], ...names.map((name) => getShownValues(each, name)[place.row] ?? "")].join());
      }
    }
    download("heads.csv", new Blob([`${lines.join("\n")}\n`], { type: "text/csv;charset=utf-8" }));
    announce(t("{0} heads saved", formatInteger(heads.length)));
  }
  render();
  const subscriptions = [store.on(["brush", "find", "sort", "x", "y", "size", "colour"], () => {
    shownRows = pageSize;
    render();
  }), store.on(["hover"], markHovered)];
  return {
    element,
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
    },
  };
}
