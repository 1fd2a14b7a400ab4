// The heads that are selected, or all of them, as a table beside the scatter: sorted by any column, a click opens.

import { headAt, headLabel, headTitle, LETTERS, linked, measureOf, measuresOf, openedAt, say, selectionOf, valuesOf } from "./corpus-data.js";
import { field } from "./csv.js";
import { download, make } from "./elements.js";
import { whole } from "./numbers.js";
import { t } from "./words.js";

const atOnce = 100; // rows; more on request, so that thousands of heads cost nothing

export function createTable({ store, announce, uid }) {
  const { info } = store.state;
  const several = info.corpora.length > 1;
  const same = several && linked(info);
  let most = atOnce;
  const title = make("h2", { id: uid("table") });
  const clear = make("button", { type: "button", class: "text-button", title: t("Select all heads again  Esc") }, t("clear"));
  clear.addEventListener("click", () => store.set({ brush: null }));
  const csv = make("button", { type: "button", class: "text-button", title: t("Save all numbers of these heads as a table") }, "CSV");
  csv.addEventListener("click", saveTable);
  const find = make("input", { type: "search", class: "table-find", placeholder: t("layer, or layer.head"), "aria-label": t("Find heads: a layer, or layer.head"), autocomplete: "off", spellcheck: false });
  find.addEventListener("input", () => store.set({ find: find.value.trim() }));
  const head = make("thead");
  const body = make("tbody");
  const frame = make("div", { class: "table-frame", tabIndex: 0, role: "region", "aria-labelledby": title.id }, make("table", { class: "heads-table" }, head, body));
  const more = make("button", { type: "button", class: "text-button" });
  more.addEventListener("click", () => {
    most += 4 * atOnce;
    render();
  });
  const empty = make("p", { class: "table-empty" }, t("No head is in the selection."));
  const element = make("section", { class: "selection" }, make("div", { class: "selection-head" }, title, clear, find, csv), frame, empty, more);

  // What stands in each row: {corpus, row} of the first corpus that it is about.
  function rows(state) {
    const selected = selectionOf(state);
    const wanted = /^(\d+)(?:[.·](\d*))?$/.exec(state.find);
    const found = [];
    for (const [corpus, each] of info.corpora.entries()) {
      if (same && corpus > 0) break;
      for (let row = 0; row < each.rows.layer.length; row++) {
        if (selected[corpus] && !selected[corpus].has(row)) continue;
        if (wanted && (each.rows.layer[row] !== Number(wanted[1]) || (wanted[2] && !String(each.rows.head[row]).startsWith(wanted[2])))) continue;
        found.push({ corpus, row });
      }
    }
    return found;
  }
  // The columns: the measures that the scatter shows, for each corpus where they share their heads.
  function columns({ x, y, size, colour }) {
    const names = [...new Set([x, y, size, colour])].filter((name) => name && name !== "layer" && !(same && name === "kind"));
    return names.flatMap((name) => {
      const measure = measureOf(info, name);
      const of = (corpus) => ({ name, key: same ? `${name}@${corpus}` : name, label: same ? `${measure.label} ${LETTERS[corpus]}` : measure.label, title: measure.description, value: (at) => valuesOf(info.corpora[same ? corpus : at.corpus], name)[at.row] });
      return same ? info.corpora.map((_, corpus) => of(corpus)) : [of(0)];
    });
  }
  function sorted(found, list, { sort }) {
    const key = sort.replace(/^-/, "");
    const column = list.find((each) => each.key === key);
    const sign = sort.startsWith("-") ? -1 : 1;
    if (!column) return key === "head" && sign < 0 ? found.reverse() : found;
    const value = (at) => column.value(at) ?? -Infinity * sign;
    const order = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
    return found.sort((a, b) => sign * order(value(a), value(b)) || a.corpus - b.corpus || a.row - b.row);
  }
  function heading(label, key, hint) {
    const { sort } = store.state;
    const now = sort.replace(/^-/, "") === key || (key === "head" && !sort);
    const up = !sort.startsWith("-");
    const button = make("button", { type: "button", title: hint }, label, make("span", { class: "sort-sign", "aria-hidden": "true" }, now ? (up ? " ↑" : " ↓") : ""));
    button.addEventListener("click", () => {
      // Numbers begin with the largest, heads with the first.
      const first = key === "head" ? "" : key.startsWith("kind") ? key : `-${key}`;
      store.set({ sort: sort !== first ? first : first.startsWith("-") ? key : `-${key}` });
      head.querySelector(`[data-key="${CSS.escape(key)}"] button`)?.focus();
    });
    return make("th", { scope: "col", "data-key": key, "aria-sort": now ? (up ? "ascending" : "descending") : "none" }, button);
  }
  function line(at, list) {
    const corpus = info.corpora[at.corpus];
    const open = make("button", { type: "button", class: "head-link", "aria-label": headTitle(headAt(corpus, at.row)) }, several && !same ? `${LETTERS[at.corpus]} ` : "", headLabel(corpus, at.row));
    const cells = list.map((column) => make("td", { class: column.name === "kind" ? "word" : "" }, say({}, column.value(at))));
    const element = make("tr", {}, make("th", { scope: "row" }, open), ...cells);
    element.addEventListener("click", () => store.set({ open: openedAt(store.state, at.corpus, headAt(corpus, at.row)), hover: null }));
    element.addEventListener("pointerenter", () => store.set({ hover: at }));
    element.addEventListener("pointerleave", () => store.set({ hover: null }));
    open.addEventListener("focus", () => store.set({ hover: at }));
    open.addEventListener("blur", () => store.set({ hover: null }));
    element.dataset.row = `${at.corpus}/${at.row}`;
    return element;
  }
  function render() {
    const { state } = store;
    const list = columns(state);
    const found = sorted(rows(state), list, state);
    const total = same ? info.corpora[0].rows.layer.length : info.corpora.reduce((sum, corpus) => sum + corpus.rows.layer.length, 0);
    title.textContent = found.length === total ? t("{0} heads", whole(total)) : t("{0} of {1} heads", whole(found.length), whole(total));
    clear.hidden = !state.brush;
    if (document.activeElement !== find) find.value = state.find;
    head.replaceChildren(make("tr", {}, heading(t("Head"), "head", t("Layer and head")), ...list.map(({ label, key, title: hint }) => heading(label, key, hint))));
    body.replaceChildren(...found.slice(0, most).map((at) => line(at, list)));
    frame.hidden = !found.length;
    empty.hidden = found.length > 0;
    more.hidden = found.length <= most;
    more.textContent = t("show {0} more of {1}", whole(Math.min(4 * atOnce, found.length - most)), whole(found.length));
    mark();
  }
  function mark() {
    const { hover } = store.state;
    for (const marked of body.querySelectorAll(".marked")) marked.classList.remove("marked");
    if (hover) body.querySelector(`[data-row="${same ? 0 : hover.corpus}/${hover.row}"]`)?.classList.add("marked");
  }
  function saveTable() {
    const found = sorted(rows(store.state), columns(store.state), store.state);
    const names = measuresOf(info, true).map(({ name }) => name).filter((name) => name !== "layer");
    const lines = [[...(several ? ["corpus"] : []), "layer", "head", ...names].join()];
    for (const at of found) {
      for (const corpus of same ? info.corpora.keys() : [at.corpus]) {
        const each = info.corpora[corpus];
        lines.push([...(several ? [field(each.title)] : []), each.rows.layer[at.row], each.rows.head[at.row], ...names.map((name) => valuesOf(each, name)[at.row] ?? "")].join());
      }
    }
    download("heads.csv", new Blob([`${lines.join("\n")}\n`], { type: "text/csv;charset=utf-8" }));
    announce(t("{0} heads saved", whole(found.length)));
  }
  render();
  const off = [store.on(["brush", "find", "sort", "x", "y", "size", "colour"], () => {
    most = atOnce;
    render();
  }), store.on(["hover"], mark)];
  return {
    element,
    destroy() {
      for (const end of off) end();
    },
  };
}
