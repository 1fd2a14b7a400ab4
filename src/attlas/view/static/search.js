// The search box: token text, a range of positions ("50000-60000"), or one cell ("60321,102").

import { debounced, make } from "./elements.js";
import { beyondDiagonal } from "./geometry.js";
import { whole } from "./numbers.js";
import { same } from "./state.js";
import { t } from "./words.js";

const most = 1000; // matches that are asked for; the count is of all

// What was typed: {kind: "text" | "range" | "cell" | "nothing", ...}. Quotes make text of numbers: "50-60".
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

// Where a stretch of text or a cell lies in the matrix of an entry, or what is wrong with it, in one sentence.
export function placeQuery(query, entry) {
  const { m, n, first_query: firstQuery, first_key: firstKey } = entry;
  if (query.kind === "cell") {
    const [i, j] = [query.query - firstQuery, query.key - firstKey];
    if (i < 0 || i >= m) return { error: t("Queries stand at {0} to {1}, not at {2}.", whole(firstQuery), whole(firstQuery + m - 1), whole(query.query)) };
    if (j < 0 || j >= n) return { error: t("Keys stand at {0} to {1}, not at {2}.", whole(firstKey), whole(firstKey + n - 1), whole(query.key)) };
    return { i, j };
  }
  if (query.stop < query.start) return { error: t("A range runs upwards: {0}-{1}.", whole(query.stop), whole(query.start)) };
  const rows = [Math.max(0, query.start - firstQuery), Math.min(m - 1, query.stop - firstQuery)];
  const columns = [Math.max(0, query.start - firstKey), Math.min(n - 1, query.stop - firstKey)];
  const [anyRows, anyColumns] = [rows[0] <= rows[1], columns[0] <= columns[1]];
  if (!anyRows && !anyColumns) {
    const last = Math.max(firstQuery + m, firstKey + n) - 1;
    return { error: t("The matrix covers positions {0} to {1}.", whole(Math.min(firstQuery, firstKey)), whole(last)) };
  }
  return { rows: anyRows ? rows : null, columns: anyColumns ? columns : null };
}

export function mountSearch(element, { store, transport, map, announce, uid }) {
  let matches = [];
  let total = 0;
  let index = -1;
  let asked = null;
  let pinned = null; // the cell that the search itself has pinned

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
  const step = (name, sign, by) => {
    const button = make("button", { type: "button", class: "icon", "aria-label": name, title: name, disabled: true }, sign);
    button.addEventListener("click", () => go(by));
    return button;
  };
  const [previous, next] = [step(t("Previous match"), "‹", -1), step(t("Next match"), "›", 1)];
  element.classList.add("search");
  element.append(make("div", { class: "search-box" }, input, result, previous, next));

  const say = (text, wrong = false) => {
    result.textContent = text;
    result.classList.toggle("wrong", wrong);
    element.classList.toggle("has-result", text !== "");
  };
  const settle = () => {
    previous.disabled = next.disabled = matches.length < 2;
    store.set({ found: matches.length ? { matches, index } : null });
  };
  const forget = () => {
    asked?.abort();
    asked = null;
    [matches, total, index] = [[], 0, -1];
    settle();
  };

  // The cell that shows a token: in the row (or column) that somebody has pinned, where the mask allows it. Else the
  // token itself is pinned, and the text shows its weights.
  const cellOf = ([start, stop]) => {
    const { info, entry, pin, by } = store.state;
    const given = info.entries[entry];
    const { m, n, first_query: firstQuery, first_key: firstKey } = given;
    const position = Math.floor((start + stop - 1) / 2);
    const row = Math.min(m - 1, Math.max(0, position - firstQuery));
    const column = Math.min(n - 1, Math.max(0, position - firstKey));
    if (pin !== null && !same(pin, pinned)) {
      const cell = by === "key" ? { i: row, j: pin.j } : { i: pin.i, j: column };
      if (!beyondDiagonal(given, cell.i + 1, cell.j)) return { cell, own: false };
    }
    return { cell: { i: row, j: column }, own: true };
  };
  const show = () => {
    const { cell, own } = cellOf(matches[index]);
    const { info, entry } = store.state;
    const { c0, c1 } = map.view();
    // At the diagonal of a causal map, what the query may look at lies to the left.
    const aside = own && info.entries[entry].causal ? Math.min(cell.j, 0.3 * (c1 - c0)) : 0;
    map.centre(cell.i, cell.j - aside);
    if (own) pinned = cell;
    store.set({ ...(own ? { pin: cell } : {}), hover: cell, reading: null, found: { matches, index } });
    const shown = t("{0} of {1}{2}", whole(index + 1), whole(total), total > matches.length ? t(" (the first {0})", whole(matches.length)) : "");
    say(shown);
    announce(t("Match {0}, position {1}", shown, whole(matches[index][0])));
  };
  const go = (by) => {
    if (!matches.length) return;
    index = (index + by + matches.length) % matches.length;
    show();
  };

  async function find(text) {
    forget();
    asked = new AbortController();
    const { signal } = asked;
    say("…");
    try {
      const { json } = await transport.get("search", { text, limit: String(most) }, { signal });
      if (signal.aborted) return;
      [matches, total] = [json.matches, json.total];
      settle();
      if (!matches.length) {
        say(t("no match"));
        announce(t("No match"));
        return;
      }
      const from = firstFromView();
      index = from;
      show();
    } catch (error) {
      if (!signal.aborted) say(error.message ?? t("the search failed"), true);
    }
  }
  // The first match at or behind what one looks at, so that the map does not jump to the start of the text.
  function firstFromView() {
    const { info, entry } = store.state;
    const position = map.visibleRegion().c0 + info.entries[entry].first_key;
    const found = matches.findIndex(([start]) => start >= position);
    return found < 0 ? 0 : found;
  }

  function jump(query) {
    forget();
    const { info, entry } = store.state;
    const place = placeQuery(query, info.entries[entry]);
    if (place.error) {
      say(place.error, true);
      announce(place.error);
      return;
    }
    if (query.kind === "cell") {
      map.centre(place.i, place.j, { zoom: Math.max(store.state.zoom, 3) });
      store.set({ pin: { i: place.i, j: place.j }, hover: { i: place.i, j: place.j }, reading: null });
      say("");
      announce(t("Cell {0}, {1}", whole(query.query), whole(query.key)));
      return;
    }
    const spans = [place.rows, place.columns].filter(Boolean);
    const cells = Math.max(...spans.map(([a, b]) => b - a + 1));
    const { r0, r1, c0, c1, scale } = map.view();
    const pixels = Math.min((r1 - r0) * scale, (c1 - c0) * scale);
    const middle = (span, otherwise) => (span ? (span[0] + span[1]) / 2 : otherwise);
    map.centre(middle(place.rows, (r0 + r1) / 2), middle(place.columns, (c0 + c1) / 2), { zoom: Math.log2(pixels / cells) });
    say("");
    announce(t("Positions {0} to {1}", whole(query.start), whole(query.stop)));
  }

  function run(typed, entered) {
    const query = parseQuery(typed);
    if (query.kind === "nothing") {
      forget();
      say("");
    } else if (query.kind === "text") find(query.text);
    else if (entered) jump(query); // half-typed numbers go nowhere
    else {
      forget();
      say(t("↵ goes there"));
    }
  }
  let last = "";
  const later = debounced(() => {
    last = input.value;
    run(input.value, false);
  }, 250);
  input.addEventListener("input", later);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      later.cancel();
      const kind = parseQuery(input.value).kind;
      if (kind === "text" && input.value === last && matches.length) go(event.shiftKey ? -1 : 1);
      else run(input.value, true);
      last = input.value;
    } else if (event.key === "Escape") {
      if (input.value === "") input.blur();
      input.value = last = "";
      later.cancel();
      forget();
      say("");
    } else return;
    event.stopPropagation();
  });
  // "/" opens the search by its name; the panel is the box itself.
  const off = store.on(["panel"], () => {
    if (store.state.panel !== "search") return;
    store.set({ panel: "" });
    input.focus();
    input.select();
  });
  return {
    destroy() {
      off();
      later.cancel();
      asked?.abort();
      element.replaceChildren();
    },
  };
}
