// The text: what a query looks at, or who looks at a key, token by token and as a list. It is the query or key of the
// pinned cell; while nothing is pinned, that of the token that is pointed at.

import { defaultRange } from "./colour.js";
import { make, segmented } from "./elements.js";
import { digits, percent, whole } from "./numbers.js";
import { createFlow } from "./flow.js";
import { visible } from "./tokens.js";
import { amount, isWeighted, numberName, unitOf, variantText } from "./weighting.js";
import { t } from "./words.js";

const listed = 8; // entries of the list at first
const most = 48; // and after "more"
const keptLines = 24;
const REST = 40; // ms over a token until its row is asked for

// The places of the `count` largest numbers, in descending order, in one pass and without sorting all.
export function largest(values, count) {
  const best = []; // ascending by value, at most `count` places
  for (let place = 0; place < values.length; place++) {
    const value = values[place];
    if (!(value > 0) || (best.length === count && value <= values[best[0]])) continue;
    let at = 0;
    while (at < best.length && values[best[at]] < value) at++;
    best.splice(at, 0, place);
    if (best.length > count) best.shift();
  }
  return best.reverse();
}

const isKnown = (weight) => weight > 0; // weights that a page without a server does not hold are NaN
const sumOf = (weights) => weights.reduce((sum, weight) => (isKnown(weight) ? sum + weight : sum), 0);
// What a list leaves out.
function othersText({ by, variant }, left, total, named) {
  if (by === "key" || isWeighted({ variant })) {
    const kind = by === "query" ? left === 1 ? t("key") : t("keys") : left === 1 ? t("query") : t("queries");
    return total === null ? t("{0} other {1}.", whole(left), kind) : t("{0} other {1}; {2} in all.", whole(left), kind, digits(total));
  }
  const kind = left === 1 ? t("key") : t("keys");
  return total === null ? t("{0} other {1}.", whole(left), kind) : t("{0} on {1} other {2}.", percent(Math.max(0, total - named)), whole(left), kind);
}
const countOf = (weights, passes) => weights.reduce((count, weight) => count + passes(weight), 0);

export function mountText(element, { store, transport, map, tokens, announce, uid }) {
  let weights = null; // Float32Array of the row or column that is shown
  let rounded = false; // whether they are
  let total = null; // their sum, null where it is not known
  let asked = null;
  let shownCount = listed;
  let timer = 0;
  const lines = new Map(); // rows and columns that came last: key -> {weights, rounded, total}

  const by = segmented(
    t("Whose weights"),
    [
      { value: "query", text: t("query → keys"), title: t("What the query looks at") },
      { value: "key", text: t("key ← queries"), title: t("Who looks at the key") },
    ],
    (value) => store.set({ by: value }),
  );
  const log = make("button", { type: "button", class: "toggle", title: t("Colour the text by the logarithm of the weights, so that small ones show too") }, t("log"));
  log.addEventListener("click", () => store.set({ ink: store.state.ink === "log" ? "linear" : "log" }));
  const subject = make("p", { class: "subject" });
  const facts = make("dl", { class: "cell-facts" });
  const release = make("button", { type: "button", class: "text-button", title: t("Let go of the pinned cell  Esc") }, t("unpin"));
  release.addEventListener("click", () => store.set({ pin: null }));
  const list = make("ol", { class: "largest", "aria-label": t("Largest weights") });
  const more = make("button", { type: "button", class: "text-button" }, t("more"));
  more.addEventListener("click", () => {
    shownCount = shownCount === listed ? most : listed;
    showList();
  });
  const rest = make("p", { class: "largest-rest" });
  const hasText = store.state.info.texts > 0;
  const hint = make("p", { class: "text-hint" }, hasText ? t("Point at a token: the text is coloured by what it looks at, in proportion to the weights. A click pins it.") : t("Click a cell of the map: here are the largest weights of its row."));
  const shown = make("div", { hidden: true }, make("div", { class: "subject-line" }, subject, release), facts, list, make("div", { class: "largest-foot" }, rest, more));
  // As high with words as with numbers, so that the text stays where it is when a token is clicked.
  const pinned = make("div", { class: "pinned" }, hint, shown);
  const flow = createFlow({ tokens, label: t("Text"), uid, paint, onHover, onPick });
  flow.element.hidden = !hasText;
  element.classList.add("text");
  element.append(make("h2", { class: "unseen" }, t("Text")), make("div", { class: "text-head" }, by.element, hasText ? log : null), flow.element, pinned);

  const entryOf = (state) => state.info.entries[state.entry];
  const chip = (position) => {
    const joined = tokens.joined(position);
    const text = tokens.peek(position);
    if (text === null) return "";
    if (!joined) return make("code", { class: "token" }, visible(text));
    const which = `${position - joined.start + 1}/${joined.stop - joined.start}`;
    return make("code", { class: "token", title: t("part {0} of {1}", which, joined.text) }, visible(joined.text), make("small", {}, ` ${which}`));
  };

  // ------------------------------------------------------------------------------------- the row that is shown

  const heldOf = (state) => state.pin ?? state.pointed;
  // One end of the pairs that are coloured: position of the first one, and how many.
  function others(state) {
    const { m, n, first_query: firstQuery, first_key: firstKey } = entryOf(state);
    return state.by === "query" ? { first: firstKey, count: n } : { first: firstQuery, count: m };
  }
  function own(state) {
    const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const { i, j } = heldOf(state);
    return state.by === "query" ? firstQuery + i : firstKey + j;
  }

  // The weights of the row or column of a cell.
  async function lineOf(state, { i, j }, signal) {
    const { entry, head, batch, variant, by: which } = state;
    const [name, place] = which === "query" ? ["row", { i }] : ["column", { j }];
    const key = `${entry}/${head}/${batch}/${variant}/${name}/${i}/${j}`;
    if (!lines.has(key)) {
      const answer = await transport.get(name, { entry, head, batch, variant, ...place }, { signal });
      const found = new Float32Array(answer.buffer);
      lines.set(key, { weights: found, rounded: Boolean(answer.rounded), total: answer.total === undefined ? sumOf(found) : answer.total });
      if (lines.size > keptLines) lines.delete(lines.keys().next().value);
    }
    return lines.get(key);
  }

  async function load() {
    clearTimeout(timer);
    asked?.abort();
    asked = null;
    const { state } = store;
    by.set(state.by);
    const held = heldOf(state);
    shown.hidden = held === null;
    hint.hidden = held !== null;
    facts.hidden = release.hidden = state.pin === null;
    if (held === null) {
      weights = null;
      flow.repaint();
      return;
    }
    asked = new AbortController();
    const { signal } = asked;
    const { entry, head, batch, variant, pin } = state;
    showSubject();
    shown.classList.add("loading");
    tokens.prefetch(own(state), own(state) + 1);
    try {
      const line = lineOf(state, held, signal);
      const cell = pin && transport.get("cell", { entry, head, batch, variant, i: pin.i, j: pin.j }, { signal });
      cell?.catch(() => {}); // told below, after the row
      const found = await line;
      if (signal.aborted) return;
      ({ weights, rounded, total } = found);
      shownCount = listed;
      flow.repaint();
      await showList();
      if (!pin) return;
      flow.reveal(own(state));
      const { json } = await cell;
      if (signal.aborted) return;
      showFacts(json);
      const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
      announce(t("Pinned query {0}, key {1}: weight {2}", whole(firstQuery + pin.i), whole(firstKey + pin.j), digits(json.weight)));
    } catch (error) {
      if (signal.aborted) return;
      if (weights === null || error.status === 404) {
        weights = null;
        list.replaceChildren();
        facts.replaceChildren();
        flow.repaint();
        if (pin) flow.reveal(own(state));
      }
      rest.textContent = `${error.message}.`;
    } finally {
      if (!signal.aborted) shown.classList.remove("loading");
    }
  }
  function showSubject() {
    const { state } = store;
    const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const { i, j } = heldOf(state);
    const [q, k] = [firstQuery + i, firstKey + j];
    const place = (position) => make("span", { class: "place" }, ` ${whole(position)}`);
    if (state.by === "query") subject.replaceChildren(t("Query "), chip(q), place(q), t(" looks at"));
    else subject.replaceChildren(t("Key "), chip(k), place(k), t(" is looked at by"));
  }
  function showFacts(cell) {
    const { state } = store;
    const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const pair = [`${whole(firstQuery + state.pin.i)}, ${whole(firstKey + state.pin.j)}`, t("query and key of the pinned cell")];
    const weight = cell.weight === null ? `≤ ${digits(cell.below)}` : cell.rounded ? `≈ ${digits(cell.weight)}` : digits(cell.weight, 4);
    const lines = [[t("cell"), ...pair], [numberName(state), cell.allowed === false ? t("masked") : weight, isWeighted(state) ? variantText(state) : t("attention weight of this pair")]];
    if (cell.share) lines.push([t("weight"), digits(cell.share, 4), t("attention weight of this pair")], [t("norm"), digits(cell.weight / cell.share, 4), t("norm of the key’s value")]);
    if (cell.allowed !== false) {
      if (!cell.rounded) lines.push([t("rank"), cell.rank === null ? "–" : `${whole(cell.rank)}`, t("place of the weight in its row, 1 is the largest")]);
      if (cell.logit !== null) lines.push([t("logit"), digits(cell.logit), t("before softmax, in nats")]);
    }
    lines.push([t("row entropy"), digits(cell.row_entropy), t("of the query’s weights, in nats")]);
    if (cell.column_mass !== null && cell.column_mass !== undefined) lines.push([t("key’s mass"), digits(cell.column_mass), t("sum of the weights that all queries give to this key")]);
    facts.replaceChildren(...lines.map(([name, value, title]) => make("div", { title }, make("dt", {}, name), make("dd", {}, value))));
  }

  async function showList() {
    const { state } = store;
    if (weights === null || heldOf(state) === null) return;
    const { first } = others(state);
    const places = largest(weights, shownCount);
    const found = weights;
    // Texts of far tokens are fetched first, so that the list does not change under the pointer.
    await Promise.all(places.map((place) => tokens.range(first + place, first + place + 1).catch(() => [])));
    const held = heldOf(store.state);
    if (found !== weights || held === null) return;
    showSubject();
    const scale = weights[places[0]] || 1;
    const named = places.reduce((sum, place) => sum + weights[place], 0);
    list.replaceChildren(
      ...places.map((place) => {
        const weight = weights[place];
        const bar = make("i", { class: "largest-bar" });
        bar.style.width = `${(100 * weight) / scale}%`;
        const button = make(
          "button",
          { type: "button", title: t("Weight {0}{1} · position {2}", rounded ? "≈ " : "", digits(weight, rounded ? 3 : 5), whole(first + place)) },
          chip(first + place),
          make("span", { class: "place" }, whole(first + place)),
          make("span", { class: "share" }, amount(weight, state)),
          bar,
        );
        const cell = state.by === "query" ? { i: held.i, j: place } : { i: place, j: held.j };
        const point = () => store.set({ hover: cell, reading: weight });
        button.addEventListener("click", () => {
          map.centre(cell.i, cell.j);
          point();
          flow.reveal(first + place);
        });
        button.addEventListener("focus", point);
        button.addEventListener("pointerenter", point);
        return make("li", {}, button);
      }),
    );
    const left = countOf(weights, (weight) => weight !== 0) - places.length;
    rest.textContent = places.length ? (left > 0 ? othersText(state, left, total, named) : "") : t("No key may be looked at here.");
    more.hidden = countOf(weights, isKnown) <= places.length && shownCount === listed;
    more.textContent = shownCount === listed ? t("more") : t("fewer");
  }

  // ------------------------------------------------------------------------------------------------------- the flow

  let top = { of: null, value: 0 }; // the largest weight of the row

  // What a token looks like: its colour, and whether it is the query, a masked key, or a found one.
  function paint(position) {
    const { state } = store;
    const classes = [];
    let background = "";
    if (state.found?.matches.some(([start, stop]) => start <= position && position < stop)) classes.push("found");
    if (heldOf(state) !== null && weights !== null) {
      const weight = weightAt(position);
      if (weight === null || weight === 0) classes.push("masked");
      else {
        const share = shareOf(weight);
        if (share >= 0.005) background = `color-mix(in srgb, var(--glow) ${(100 * share).toFixed(1)}%, transparent)`;
      }
      if (position === own(state)) classes.push("own");
    }
    const entry = entryOf(state);
    const { hover } = state;
    if (hover && position === entry.first_query + hover.i) classes.push("at-query");
    if (hover && position === entry.first_key + hover.j) classes.push("at-key");
    return { classes, background };
  }
  // The weight of a token in the row that is shown; null where it is no part of it.
  function weightAt(position) {
    const { first, count } = others(store.state);
    return position >= first && position < first + count ? weights[position - first] : null;
  }
  // How much colour a weight gets: paper at 0, all of it at the largest of the row.
  function shareOf(weight) {
    if (top.of !== weights) top = { of: weights, value: weights.reduce((a, b) => (b > a ? b : a), 0) };
    if (store.state.ink === "linear") return weight / top.value;
    const low = defaultRange("log", weights.length).low + Math.log2(unitOf(store.state));
    return Math.max(0, (Math.log2(weight) - low) / (Math.log2(top.value) - low));
  }
  // The cell that a token means: in the pinned row or column, else on the diagonal.
  function cellOf(position) {
    const { state } = store;
    const { m, n, first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const [i, j] = [position - firstQuery, position - firstKey];
    const [inRows, inColumns] = [i >= 0 && i < m, j >= 0 && j < n];
    if (state.pin !== null && state.by === "query") return inColumns ? { i: state.pin.i, j } : null;
    if (state.pin !== null) return inRows ? { i, j: state.pin.j } : null;
    return inRows || inColumns ? { i: Math.min(m - 1, Math.max(0, i)), j: Math.min(n - 1, Math.max(0, j)) } : null;
  }
  function onHover(position) {
    const { pin } = store.state;
    const cell = position === null ? null : cellOf(position);
    store.set({ hover: cell, reading: cell && pin && weights && isKnown(weightAt(position)) ? weightAt(position) : null });
    if (cell && !pin) store.set({ pointed: cell }); // it stays, so that one can go on to the list
  }
  function onPick(position) {
    const { state } = store;
    const { m, n, first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const [i, j] = [position - firstQuery, position - firstKey];
    const inside = (at, size) => Math.min(size - 1, Math.max(0, at));
    if (state.by === "query" && (i < 0 || i >= m)) return announce(t("Token {0} is no query of this head", whole(position)));
    if (state.by === "key" && (j < 0 || j >= n)) return announce(t("Token {0} is no key of this head", whole(position)));
    const pin = state.by === "query" ? { i, j: inside(state.pin?.j ?? j, n) } : { i: inside(state.pin?.i ?? i, m), j };
    if (state.pin === null) Object.assign(pin, { i: inside(i, m), j: inside(j, n) });
    store.set({ pin, hover: null, reading: null, pointed: null });
    const view = map.visibleRegion();
    const seen = pin.i >= view.r0 && pin.i < view.r1 && pin.j >= view.c0 && pin.j < view.c1;
    if (!seen) map.centre(pin.i, pin.j);
    return undefined;
  }

  const off = [
    store.on(["pin", "by", "entry", "head", "batch", "variant"], load),
    store.on(["pointed"], () => {
      clearTimeout(timer);
      timer = setTimeout(load, store.state.pointed ? REST : 0);
    }),
    store.on(["ink"], showInk),
    store.on(["found"], () => {
      const { found } = store.state;
      flow.repaint();
      if (found && found.index >= 0) flow.reveal(found.matches[found.index][0]);
    }),
    store.on(["hover"], () => {
      const { state } = store;
      const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
      flow.mark(state.hover ? [firstQuery + state.hover.i, firstKey + state.hover.j] : []);
    }),
    tokens.on(() => flow.refresh()),
  ];
  function showInk() {
    log.setAttribute("aria-pressed", String(store.state.ink === "log"));
    flow.repaint();
  }
  const extent = () => {
    const { info } = store.state;
    const ends = info.entries.map((entry) => Math.max(entry.first_query + entry.m, entry.first_key + entry.n));
    return Math.max(info.text_length, ...ends);
  };
  flow.start(extent(), store.state.info.text_length);
  showInk();
  load();
  if (store.state.pointed) flow.reveal(own(store.state)); // a page may begin with a query
  return {
    destroy() {
      for (const end of off) end();
      asked?.abort();
      clearTimeout(timer);
      flow.destroy();
      element.replaceChildren();
    },
  };
}
