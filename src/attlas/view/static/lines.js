// Tokens in two columns with a line for each weight: who looks at whom in a window of a few tokens.

import { make } from "./elements.js";
import { digits, percent, whole } from "./numbers.js";
import { visible } from "./tokens.js";
import { isWeighted, numberName, unitOf } from "./weighting.js";
import { t } from "./words.js";

const WINDOW = 64; // tokens on each side, at most
const ROW = 17; // CSS pixels of a token
const LEAST = 0.01; // weights below this get no line
const ACROSS = 240; // pixels between the two columns
const SVG = "http://www.w3.org/2000/svg";

/** The tokens that are shown around a place of the map: {r0, r1, c0, c1}; where positions are shared, the same on both sides. */
export function windowOf({ m, n, first_query: firstQuery, first_key: firstKey }, row, column) {
  const begin = (at, size) => Math.min(Math.max(0, size - WINDOW), Math.max(0, Math.floor(at) - WINDOW / 2));
  const r0 = begin(row, m);
  const shared = Math.abs(firstQuery + row - firstKey - column) < n; // else another text is looked at
  const c0 = begin(shared ? r0 + firstQuery - firstKey + WINDOW / 2 : column, n);
  return { r0, r1: Math.min(m, r0 + WINDOW), c0, c1: Math.min(n, c0 + WINDOW) };
}

/** Mount the columns in `element`, over the map; they show while `view` is "lines". */
export function mountLines(element, { store, transport, tokens, map, tools }) {
  let asked = null;
  let shown = null; // {r0, r1, c0, c1, weights}
  let kept = ""; // what the columns were built for
  let focus = null; // {side: "query" | "key", at}
  const open = make("button", { type: "button", title: t("Tokens in two columns, with lines for the weights, 64 at a time") }, t("Lines"));
  open.addEventListener("click", () => store.set({ view: store.state.view === "lines" ? "map" : "lines" }));
  const holder = make("div", {}, open);
  tools.prepend(holder);
  const says = make("p", { class: "lines-says", role: "status" });
  const step = (text, by) => {
    const button = make("button", { type: "button", class: "text-button" }, text);
    button.addEventListener("click", () => {
      const { row, column, info, entry } = store.state;
      const inside = (at, size) => Math.min(size - 1, Math.max(0, at));
      const given = info.entries[entry];
      map.centre(inside(row + by, given.m), inside(column + by, given.n));
    });
    return button;
  };
  const [earlier, later] = [step(t("↑ earlier"), -WINDOW / 2), step(t("later ↓"), WINDOW / 2)];
  const queries = make("div", { class: "lines-column", role: "group", "aria-label": t("Queries") });
  const keys = make("div", { class: "lines-column", role: "group", "aria-label": t("Keys") });
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  const box = make("div", { class: "lines-box" }, queries, svg, keys);
  element.append(make("div", { class: "lines-head" }, says, earlier, later), make("div", { class: "lines-scroll" }, box));

  const given = () => store.state.info.entries[store.state.entry];
  const weight = (query, key) => shown.weights[query * (shown.c1 - shown.c0) + key] / unitOf(store.state);

  async function load() {
    const { state } = store;
    const { entry, head, batch, variant, row, column } = state;
    element.hidden = state.view !== "lines";
    open.setAttribute("aria-pressed", String(!element.hidden));
    if (element.hidden || row === null) return;
    const place = windowOf(given(), row, column);
    const key = JSON.stringify([entry, head, batch, variant, place]);
    if (key === kept) return;
    kept = key;
    asked?.abort();
    asked = new AbortController();
    const { signal } = asked;
    const { first_query: firstQuery, first_key: firstKey } = given();
    try {
      const [answer] = await Promise.all([
        transport.get("region", { entry, head, batch, variant, ...place }, { signal }),
        tokens.range(firstQuery + place.r0, firstQuery + place.r1),
        tokens.range(firstKey + place.c0, firstKey + place.c1),
      ]);
      if (signal.aborted) return;
      shown = { ...place, weights: new Float32Array(answer.buffer), firstQuery: firstQuery + place.r0, firstKey: firstKey + place.c0 };
      focus = null;
      build();
    } catch (error) {
      if (signal.aborted) return;
      [shown, kept] = [null, ""];
      for (const column of [queries, keys]) column.replaceChildren();
      svg.replaceChildren();
      says.textContent = `${error.message}.`;
    }
  }
  function build() {
    const { r0, r1, c0, c1, firstQuery, firstKey } = shown;
    const list = (column, side, first, count) => column.replaceChildren(...Array.from({ length: count }, (_, at) => token(side, at, first + at)));
    list(queries, "query", firstQuery, r1 - r0);
    list(keys, "key", firstKey, c1 - c0);
    const height = ROW * Math.max(r1 - r0, c1 - c0);
    svg.setAttribute("viewBox", `0 0 ${ACROSS} ${height}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.style.height = `${height}px`;
    const lines = [];
    for (let i = 0; i < r1 - r0; i++) {
      for (let j = 0; j < c1 - c0; j++) {
        if (!(weight(i, j) >= LEAST)) continue;
        const line = document.createElementNS(SVG, "line");
        for (const [name, value] of Object.entries({ x1: 0, y1: ROW * (i + 0.5), x2: ACROSS, y2: ROW * (j + 0.5), opacity: Math.max(0.06, weight(i, j)), "stroke-width": 0.5 + 3 * weight(i, j), "data-query": i, "data-key": j })) line.setAttribute(name, value);
        lines.push(line);
      }
    }
    svg.replaceChildren(...lines);
    [earlier.disabled, later.disabled] = [r0 === 0 && c0 === 0, r1 === given().m && c1 === given().n];
    dress();
    const { side, at } = held() ?? { side: "query", at: Math.floor((r1 - r0) / 2) };
    (side === "query" ? queries : keys).children[at]?.scrollIntoView({ block: "center" });
  }
  function token(side, at, position) {
    const text = tokens.peek(position);
    const button = make("button", { type: "button", tabIndex: at ? -1 : 0, "data-at": at, title: whole(position) }, text === null ? whole(position) : visible(text));
    const point = () => light({ side, at });
    button.addEventListener("pointerenter", point);
    button.addEventListener("focus", point);
    button.addEventListener("click", () => pick(side, at));
    return button;
  }
  function light(next) {
    focus = next;
    const { state } = store;
    if (focus?.side === "query" && state.pin === null) store.set({ by: "query", pointed: cellOf(focus) });
    dress();
  }
  function cellOf({ side, at }) {
    const { m, n, first_query: firstQuery, first_key: firstKey } = given();
    const shift = firstQuery - firstKey;
    return side === "query" ? { i: shown.r0 + at, j: Math.min(n - 1, Math.max(0, shown.r0 + at + shift)) } : { i: Math.min(m - 1, Math.max(0, shown.c0 + at - shift)), j: shown.c0 + at };
  }
  function pick(side, at) {
    store.set({ by: side, pin: cellOf({ side, at }), pointed: null });
  }
  // The token that is pointed at, else the pinned one.
  function held() {
    if (focus) return focus;
    const { pin, by } = store.state;
    if (!pin || !shown) return null;
    const at = by === "query" ? pin.i - shown.r0 : pin.j - shown.c0;
    return at >= 0 && at < (by === "query" ? shown.r1 - shown.r0 : shown.c1 - shown.c0) ? { side: by, at } : null;
  }
  function dress() {
    if (!shown) return;
    const chosen = held();
    for (const line of svg.children) line.classList.toggle("out", chosen !== null && Number(line.dataset[chosen.side]) !== chosen.at);
    let sum = 0;
    for (const [side, column] of [["query", queries], ["key", keys]]) {
      for (const [at, button] of [...column.children].entries()) {
        const other = chosen && chosen.side !== side;
        const share = other ? (side === "key" ? weight(chosen.at, at) : weight(at, chosen.at)) : 0;
        if (other && share > 0) sum += share;
        button.style.background = share >= 0.005 ? `color-mix(in srgb, var(--glow) ${(100 * Math.min(1, share)).toFixed(1)}%, transparent)` : "";
        button.classList.toggle("own", chosen !== null && chosen.side === side && chosen.at === at);
      }
    }
    const { r0, r1, firstQuery } = shown;
    if (!chosen) says.textContent = t("Queries {0} to {1} at the left, keys at the right; a line for each weight from 1 % on.", whole(firstQuery), whole(firstQuery + r1 - r0 - 1));
    else if (isWeighted(store.state)) says.textContent = t("{0} in all: {1}.", numberName(store.state), digits(sum * unitOf(store.state)));
    else if (chosen.side === "query") says.textContent = t("{0} of the attention of query {1} goes to these keys.", percent(Math.min(1, sum)), whole(firstQuery + chosen.at));
    else says.textContent = t("These queries give key {0} {1} in all.", whole(shown.firstKey + chosen.at), sum.toFixed(2));
  }
  box.addEventListener("pointerleave", () => light(null));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const column = { ArrowLeft: queries, ArrowRight: keys }[event.key];
    if (by === undefined && !column) return;
    event.preventDefault();
    event.stopPropagation();
    const at = Number(event.target.dataset.at);
    const next = column ? column.children[Math.min(at, column.children.length - 1)] : event.target.parentElement.children[at + by];
    next?.focus();
  });
  const off = [
    store.on(["view", "row", "column", "entry", "head", "batch", "variant"], load),
    store.on(["pin", "by"], dress),
  ];
  load();
  return {
    destroy() {
      for (const end of off) end();
      asked?.abort();
      holder.remove();
      element.replaceChildren();
    },
  };
}
