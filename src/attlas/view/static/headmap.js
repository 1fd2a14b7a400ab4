// Layers × heads as a small map: a statistic of every head or, once a cell is pinned, the weight that every head gives
// to this pair of tokens, and how far each head agrees with the one that is shown.

import { colourOf, colours } from "./colour.js";
import { comparable } from "./compare.js";
import { make, segmented } from "./elements.js";
import { digits, headMark, headName, percent, whole } from "./numbers.js";
import { holds } from "./state.js";
import { amount, isWeighted, numberName, unitOf } from "./weighting.js";
import { t } from "./words.js";

const REST = 120; // ms without another change after which heads are asked
const NAMED = 3; // heads that are named in words

/** The columns of the table of heads that a pinned cell adds, as the server describes its own. */
export function pairColumns({ pin, span, info, entry, head, variant }) {
  if (!pin) return [];
  const given = info.entries[entry];
  const query = whole(given.first_query + pin.i);
  const [start, stop] = keysOf({ pin, span, given });
  const keys = stop - start > 1 ? t("keys {0} to {1}", whole(start), whole(stop - 1)) : t("key {0}", whole(start));
  return [
    { name: "pair", label: t("pinned pair"), unit: "", description: isWeighted({ variant }) ? t("{0} of query {1} and {2}", numberName({ variant }), query, keys) : t("Weight that query {0} gives to {1}", query, keys) },
    { name: "agree", label: t("agreement"), unit: "", description: t("Share of the attention of query {0} that goes where that of {1} goes: the sum over keys of the smaller weight", query, headMark(info, entry, head)) },
  ];
}

// Positions of the keys that are asked about: the span, else the pinned key alone.
function keysOf({ pin, span, given }) {
  return span ? [span.start, span.stop] : [given.first_key + pin.j, given.first_key + pin.j + 1];
}

/** What was typed: "147 → 120-140 > 10 %" as {query, start, stop, least}; `least` is null without a share; null if it is no condition. */
export function readCondition(text) {
  const found = /^\s*(\d{1,9})\s*(?:→|->|,)\s*(\d{1,9})(?:\s*[-–]\s*(\d{1,9}))?\s*(?:[>≥]=?\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?))?\s*$/.exec(text);
  if (!found) return null;
  const [query, first, last] = [found[1], found[2], found[3] ?? found[2]].map(Number);
  const least = found[4] === undefined ? null : Number(found[4]) / (found[5] ? 100 : 1);
  return last < first || least > 1 ? null : { query, start: first, stop: last + 1, least };
}

/** Mount the map; what it finds goes to `pairs` of the state. */
export function mountHeadmap(element, { store, transport, announce, uid }) {
  let timer = 0;
  let asked = null;
  let cells = []; // {button, entry, head}
  const { info } = store.state;
  const width = Math.max(...info.entries.map((entry) => entry.heads.length));
  const help = make("p", { class: "unseen", id: uid("condition") }, t("As in 147 → 120-140 > 10 %: heads in which this query gives these keys more than this share."));
  const input = make("input", { class: "condition", placeholder: "147 → 120-140 > 10 %", autocomplete: "off", spellcheck: false, "aria-label": t("Find heads: query → keys > share"), "aria-describedby": help.id });
  const options = [
    { value: "statistic", text: t("statistic"), title: t("Every head by the statistic below") },
    { value: "pair", text: t("pair"), title: t("The weight that every head gives to the pinned pair") },
    { value: "agree", text: t("agree"), title: t("How far every head looks where this one looks, from the pinned query") },
  ];
  const how = segmented(t("What the map of heads shows"), options, (heat) => store.set({ heat }));
  const grid = make("div", { class: "headmap-grid", role: "group", "aria-label": t("Layers and heads") });
  const says = make("p", { class: "headmap-says" });
  grid.style.setProperty("--heads", String(width));
  grid.style.setProperty("--layers", String(info.entries.length));
  element.classList.add("headmap");
  element.append(make("div", { class: "headmap-line" }, how.element, input, help), grid, says);

  for (const [entry, given] of info.entries.entries()) {
    for (const head of given.heads.keys()) {
      const button = make("button", { type: "button", tabIndex: -1, disabled: !holds(info, entry, head) });
      if (head === 0) button.style.gridColumn = "1";
      button.addEventListener("click", () => store.set({ entry, head }));
      cells.push({ button, entry, head });
      grid.append(button);
    }
  }
  grid.addEventListener("keydown", (event) => {
    const at = cells.findIndex(({ button }) => button === event.target);
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -width, ArrowDown: width, Home: -at, End: cells.length - 1 - at }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    cells[at + step]?.button.focus();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "Escape") return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Escape") describe(store.state);
    else run();
  });

  function run() {
    const { state } = store;
    const given = state.info.entries[state.entry];
    const found = readCondition(input.value);
    const [i, j] = found ? [found.query - given.first_query, found.start - given.first_key] : [-1, -1];
    const fits = found && i >= 0 && i < given.m && j >= 0 && found.stop - given.first_key <= given.n;
    input.setAttribute("aria-invalid", String(!fits));
    if (!fits) {
      says.textContent = found ? t("Queries stand at {0} to {1}, keys at {2} to {3}.", whole(given.first_query), whole(given.first_query + given.m - 1), whole(given.first_key), whole(given.first_key + given.n - 1)) : t("A query, an arrow, a key or a range of keys, and a share: 147 → 120-140 > 10 %.");
      announce(says.textContent);
      return;
    }
    const span = found.stop - found.start > 1 ? { start: found.start, stop: found.stop } : null;
    store.set({ pin: { i, j }, span, heat: "pair", sort: "-pair", filter: found.least === null ? "" : `within:${found.least * unitOf(state)},${1.0001 * unitOf(state)}` });
  }
  function describe({ pin, span, info: shown, entry }) {
    input.removeAttribute("aria-invalid");
    if (!pin) {
      input.value = "";
      return;
    }
    const given = shown.entries[entry];
    const [start, stop] = keysOf({ pin, span, given });
    input.value = `${given.first_query + pin.i} → ${start}${stop - start > 1 ? `-${stop - 1}` : ""}`;
  }

  // What every entry says of the pinned cell, one after another.
  async function load() {
    asked?.abort();
    clearTimeout(timer);
    const { pin, span, entry, head, batch, variant } = store.state;
    if (!pin) {
      store.set({ pairs: null });
      return;
    }
    asked = new AbortController();
    const { signal } = asked;
    const here = info.entries[entry];
    // Counted from where the text of its recording begins.
    const from = here.origin ?? 0;
    const [query, [start, stop]] = [here.first_query + pin.i - from, keysOf({ pin, span, given: here }).map((at) => at - from)];
    const values = {};
    const ask = async (at) => {
      const given = info.entries[at];
      const to = given.origin ?? 0;
      const [i, j0, j1] = [query + to - given.first_query, start + to - given.first_key, stop + to - given.first_key];
      const inside = i >= 0 && i < given.m && j0 >= 0 && j1 <= given.n && batch < (given.batch ?? 1);
      if (given.kind !== here.kind || given.readable === false || !inside) return;
      const other = comparable(info, entry, at) ? { with_entry: entry, with_head: head } : {};
      const { json } = await transport.get("pair", { entry: at, head: "mean", batch, variant, i, j0, j1, ...other }, { signal });
      json.weights.forEach((pair, each) => (values[`${at}:${each}`] = { pair, agree: json.agreement?.[each] ?? null }));
    };
    await Promise.allSettled(info.entries.map((_, at) => ask(at)));
    if (!signal.aborted) store.set({ pairs: values });
  }
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(load, REST);
  };

  const shownOf = ({ heat, pin }) => (pin ? heat : "statistic");
  function paint(state) {
    const kind = shownOf(state);
    const { pairs, statistic, heads } = state;
    const rows = new Map((heads?.rows ?? []).map((row) => [`${row.entry}:${row.head}`, row.values]));
    const numbers = cells.map(({ entry, head }) => {
      const key = `${entry}:${head}`;
      return (kind === "statistic" ? rows.get(key)?.[statistic] : pairs?.[key]?.[kind]) ?? null;
    });
    const known = numbers.filter((number) => number !== null);
    const [low, high] = kind === "statistic" ? [Math.min(...known), Math.max(...known)] : [0, 1];
    const bytes = colours(state);
    const colour = (number) => {
      if (kind === "pair") return colourOf(number, state);
      const at = 3 * Math.round(255 * Math.min(1, Math.max(0, (number - low) / (high - low || 1))));
      return `rgb(${bytes[at]} ${bytes[at + 1]} ${bytes[at + 2]})`;
    };
    const text = (number) => (kind === "statistic" ? digits(number) : kind === "pair" ? amount(number, state) : percent(number));
    cells.forEach(({ button, entry, head }, at) => {
      const number = numbers[at];
      const here = entry === state.entry && head === state.head;
      const label = t("{0}: {1}", headName(info, entry, head), number === null ? t("not known") : text(number));
      button.style.background = number === null ? "" : colour(number);
      button.title = label;
      button.setAttribute("aria-label", label);
      button.setAttribute("aria-pressed", String(here));
      button.tabIndex = here || (state.head === "mean" && at === 0) ? 0 : -1;
    });
    how.set(kind, state.pin ? {} : { pair: t("Pin a cell first: click one in the map"), agree: t("Pin a cell first: click one in the map") });
    says.textContent = words(state, kind, numbers, text);
  }
  function words(state, kind, numbers, text) {
    if (kind === "statistic") return state.pin ? "" : t("Pin a cell: here stands the weight that every head gives to this pair.");
    if (!state.pairs) return "…";
    const [pair, agree] = pairColumns(state);
    const others = kind === "agree" ? ({ entry, head }) => entry !== state.entry || head !== state.head : () => true;
    const best = [...numbers.keys()].filter((at) => numbers[at] > 0 && others(cells[at])).sort((a, b) => numbers[b] - numbers[a]);
    const named = best.slice(0, NAMED).map((at) => `${headMark(info, cells[at].entry, cells[at].head)} ${text(numbers[at])}`);
    const what = kind === "pair" ? pair.description : t("From the pinned query the same keys as {0}", headMark(info, state.entry, state.head));
    const known = numbers.filter((number) => number !== null).length;
    const rest = info.held && known < numbers.length ? ` ${t("This file has it for {0} of {1} heads.", whole(known), whole(numbers.length))}` : "";
    return `${t("{0}: {1}.", what, named.join(", ") || t("no head"))}${rest}`;
  }

  const off = [
    store.on(["pin"], (state, changed) => {
      if (state.span && !changed.includes("span")) store.set({ span: null });
    }),
    store.on(["pin", "span", "entry", "head", "batch", "variant"], later),
    store.on(["pin", "span", "entry"], describe),
    store.on(["pairs", "heads", "statistic", "heat", "pin", "entry", "head", "colour", "low", "high", "palette", "dark"], paint),
  ];
  describe(store.state);
  paint(store.state);
  if (store.state.pin) load();
  return {
    destroy() {
      for (const end of off) end();
      clearTimeout(timer);
      asked?.abort();
      element.replaceChildren();
    },
  };
}
