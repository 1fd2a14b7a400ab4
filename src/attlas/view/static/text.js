// The text: what the pinned query looks at, or who looks at the pinned key, token by token and as a list.

import { colourOf, inkOn, rangeOf } from "./colour.js";
import { make, segmented } from "./elements.js";
import { digits, percent, whole } from "./numbers.js";
import { createFlow } from "./flow.js";
import { visible } from "./tokens.js";

const listed = 8; // entries of the list at first
const most = 48; // and after "more"

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

export function mountText(element, { store, transport, map, tokens, announce, uid }) {
  let weights = null; // Float32Array of the pinned row or column
  let asked = null;
  let shownCount = listed;

  const by = segmented(
    "Whose weights",
    [
      { value: "query", text: "query → keys", title: "What the pinned query looks at" },
      { value: "key", text: "key ← queries", title: "Who looks at the pinned key" },
    ],
    (value) => store.set({ by: value }),
  );
  const subject = make("p", { class: "subject" });
  const facts = make("dl", { class: "cell-facts" });
  const release = make("button", { type: "button", class: "text-button", title: "Let go of the pinned cell  Esc" }, "unpin");
  release.addEventListener("click", () => store.set({ pin: null }));
  const list = make("ol", { class: "largest", "aria-label": "Largest weights" });
  const more = make("button", { type: "button", class: "text-button" }, "more");
  more.addEventListener("click", () => {
    shownCount = shownCount === listed ? most : listed;
    showList();
  });
  const rest = make("p", { class: "largest-rest" });
  const hint = make("p", { class: "text-hint" }, "Click a cell of the map or a token to pin it. The text is then coloured by its row of exact weights, on the scale of the colour bar.");
  const pinned = make("div", { class: "pinned", hidden: true }, subject, facts, list, make("div", { class: "largest-foot" }, rest, more));
  const flow = createFlow({ tokens, label: "Text", uid, paint, onHover, onPick });
  element.classList.add("text");
  element.append(
    make("div", { class: "text-head" }, make("h2", {}, "Text"), by.element, release),
    hint,
    pinned,
    flow.element,
  );

  const entryOf = (state) => state.info.entries[state.entry];
  const chip = (position) => {
    const joined = tokens.joined(position);
    const text = tokens.peek(position);
    if (text === null) return make("code", { class: "token" }, whole(position));
    if (!joined) return make("code", { class: "token" }, visible(text));
    const which = `${position - joined.start + 1}/${joined.stop - joined.start}`;
    return make("code", { class: "token", title: `part ${which} of ${joined.text}` }, visible(joined.text), make("small", {}, ` ${which}`));
  };

  // ------------------------------------------------------------------------------------------------- the pinned cell

  // One end of the pairs that are coloured: position of the first one, and how many.
  function others(state) {
    const { m, n, first_query: firstQuery, first_key: firstKey } = entryOf(state);
    return state.by === "query" ? { first: firstKey, count: n } : { first: firstQuery, count: m };
  }
  function own(state) {
    const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
    return state.by === "query" ? firstQuery + state.pin.i : firstKey + state.pin.j;
  }

  async function load() {
    asked?.abort();
    asked = null;
    const { state } = store;
    by.set(state.by);
    const held = state.pin !== null && state.info !== null;
    pinned.hidden = release.hidden = !held;
    hint.hidden = held;
    if (!held) {
      weights = null;
      flow.repaint();
      return;
    }
    asked = new AbortController();
    const { signal } = asked;
    const { entry, head, batch, variant, pin } = state;
    const shared = { entry, head, batch, variant };
    showSubject();
    pinned.classList.add("loading");
    tokens.prefetch(own(state), own(state) + 1);
    try {
      const line = state.by === "query" ? transport.get("row", { ...shared, i: pin.i }, { signal }) : transport.get("column", { ...shared, j: pin.j }, { signal });
      const cell = transport.get("cell", { ...shared, i: pin.i, j: pin.j }, { signal });
      cell.catch(() => {}); // told below, after the row
      const { buffer } = await line;
      if (signal.aborted) return;
      weights = new Float32Array(buffer);
      shownCount = listed;
      flow.repaint();
      await showList();
      const { json } = await cell;
      if (signal.aborted) return;
      showFacts(json);
      flow.reveal(own(state)); // now that the list above has its height
      const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
      announce(`Pinned query ${whole(firstQuery + pin.i)}, key ${whole(firstKey + pin.j)}: weight ${digits(json.weight)}`);
    } catch (error) {
      if (signal.aborted) return;
      if (weights === null || error.status === 404) {
        weights = null;
        list.replaceChildren();
        facts.replaceChildren();
        flow.repaint();
        flow.reveal(own(state));
      }
      rest.textContent = `${error.message}.`;
    } finally {
      if (!signal.aborted) pinned.classList.remove("loading");
    }
  }
  function showSubject() {
    const { state } = store;
    const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const [q, k] = [firstQuery + state.pin.i, firstKey + state.pin.j];
    const place = (position) => make("span", { class: "place" }, ` ${whole(position)}`);
    if (state.by === "query") subject.replaceChildren("Query ", chip(q), place(q), " looks at");
    else subject.replaceChildren("Key ", chip(k), place(k), " is looked at by");
  }
  function showFacts(cell) {
    const { state } = store;
    const { first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const pair = [`${whole(firstQuery + state.pin.i)}, ${whole(firstKey + state.pin.j)}`, "query and key of the pinned cell"];
    const lines = [["cell", ...pair], ["weight", cell.allowed === false ? "masked" : digits(cell.weight, 4), "attention weight of this pair"]];
    if (cell.allowed !== false) {
      lines.push(["rank", cell.rank === null ? "–" : `${whole(cell.rank)}`, "place of the weight in its row, 1 is the largest"]);
      lines.push(["logit", digits(cell.logit), "before softmax, in nats"]);
    }
    lines.push(["row entropy", digits(cell.row_entropy), "of the query’s weights, in nats"]);
    if (cell.column_mass !== null && cell.column_mass !== undefined) lines.push(["key’s mass", digits(cell.column_mass), "sum of the weights that all queries give to this key"]);
    facts.replaceChildren(...lines.map(([name, value, title]) => make("div", { title }, make("dt", {}, name), make("dd", {}, value))));
  }

  async function showList() {
    const { state } = store;
    if (weights === null || state.pin === null) return;
    const { first } = others(state);
    const places = largest(weights, shownCount);
    const found = weights;
    // Texts of far tokens are fetched first, so that the list does not change under the pointer.
    await Promise.all(places.map((place) => tokens.range(first + place, first + place + 1).catch(() => [])));
    if (found !== weights || store.state.pin === null) return;
    showSubject();
    const scale = weights[places[0]] || 1;
    const total = weights.reduce((sum, value) => sum + value, 0);
    const named = places.reduce((sum, place) => sum + weights[place], 0);
    list.replaceChildren(
      ...places.map((place) => {
        const weight = weights[place];
        const bar = make("i", { class: "largest-bar" });
        bar.style.width = `${(100 * weight) / scale}%`;
        const button = make(
          "button",
          { type: "button", title: `Weight ${digits(weight, 5)} · position ${whole(first + place)}` },
          chip(first + place),
          make("span", { class: "place" }, whole(first + place)),
          make("span", { class: "share" }, percent(weight)),
          bar,
        );
        const cell = () => (store.state.by === "query" ? { i: store.state.pin.i, j: place } : { i: place, j: store.state.pin.j });
        button.addEventListener("click", () => {
          const target = cell();
          map.centre(target.i, target.j);
          store.set({ hover: target });
          flow.reveal(first + place);
        });
        button.addEventListener("focus", () => store.set({ hover: cell() }));
        button.addEventListener("pointerenter", () => store.set({ hover: cell() }));
        return make("li", {}, button);
      }),
    );
    const left = weights.reduce((count, value) => count + (value > 0), 0) - places.length;
    const tail = state.by === "query" ? ` ${percent(Math.max(0, total - named))} on ${whole(left)} other ${left === 1 ? "key" : "keys"}` : ` ${whole(left)} other ${left === 1 ? "query" : "queries"}; ${digits(total)} in all`;
    rest.textContent = places.length ? (left > 0 ? `${tail.trim()}.` : "") : "No key may be looked at here.";
    more.hidden = left <= 0 && shownCount === listed;
    more.textContent = shownCount === listed ? "more" : "fewer";
  }

  // ------------------------------------------------------------------------------------------------------- the flow

  // What a token looks like: its colour, and whether it is the query, a masked key, or a found one.
  function paint(position) {
    const { state } = store;
    const classes = [];
    let [background, ink] = ["", ""];
    if (state.found?.matches.some(([start, stop]) => start <= position && position < stop)) classes.push("found");
    if (state.pin !== null && weights !== null) {
      const { first, count } = others(state);
      const weight = position >= first && position < first + count ? weights[position - first] : null;
      const { low } = rangeOf(state);
      if (weight === null || weight === 0) classes.push("masked");
      else if ((state.colour === "log" ? Math.log2(weight) : weight) > low) {
        // Below the range everything has one colour: left plain, the text stays readable.
        background = colourOf(weight, state);
        ink = background === "transparent" ? "" : inkOn(background);
      }
      if (position === own(state)) classes.push("own");
    }
    const entry = entryOf(state);
    const { hover } = state;
    if (hover && position === entry.first_query + hover.i) classes.push("at-query");
    if (hover && position === entry.first_key + hover.j) classes.push("at-key");
    return { classes, background, ink };
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
    store.set({ hover: position === null ? null : cellOf(position) });
  }
  function onPick(position) {
    const { state } = store;
    const { m, n, first_query: firstQuery, first_key: firstKey } = entryOf(state);
    const [i, j] = [position - firstQuery, position - firstKey];
    const inside = (at, size) => Math.min(size - 1, Math.max(0, at));
    if (state.by === "query" && (i < 0 || i >= m)) return announce(`Token ${whole(position)} is no query of this head`);
    if (state.by === "key" && (j < 0 || j >= n)) return announce(`Token ${whole(position)} is no key of this head`);
    const pin = state.by === "query" ? { i, j: inside(state.pin?.j ?? j, n) } : { i: inside(state.pin?.i ?? i, m), j };
    if (state.pin === null) Object.assign(pin, { i: inside(i, m), j: inside(j, n) });
    store.set({ pin, hover: null });
    const view = map.visibleRegion();
    const seen = pin.i >= view.r0 && pin.i < view.r1 && pin.j >= view.c0 && pin.j < view.c1;
    if (!seen) map.centre(pin.i, pin.j);
    return undefined;
  }

  const off = [
    store.on(["pin", "by", "entry", "head", "batch", "variant"], () => load()),
    store.on(["colour", "low", "high", "palette", "dark"], () => flow.repaint()),
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
  const extent = () => {
    const { info } = store.state;
    const ends = info.entries.map((entry) => Math.max(entry.first_query + entry.m, entry.first_key + entry.n));
    return Math.max(info.text_length, ...ends);
  };
  flow.start(extent(), store.state.info.text_length);
  load();
  return {
    destroy() {
      for (const end of off) end();
      asked?.abort();
      flow.destroy();
      element.replaceChildren();
    },
  };
}
