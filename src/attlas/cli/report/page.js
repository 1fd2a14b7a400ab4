// The page: a grid of heads, one head close up, the text, the table.

// Of a long text only excerpts are shown; a token's row is its place among what is shown.
const n = data.n;
const places = data.shown.flatMap(([start, stop]) => Array.from({ length: stop - start }, (_, i) => start + i));
const rowOf = new Map(places.map((place, row) => [place, row]));
const textOf = (i) => (rowOf.has(i) ? data.tokens[rowOf.get(i)] : data.elsewhere[i] ?? "");
const inText = (i) => i.toLocaleString("en");
const k = data.k;
const values = words16(data.values);
const indices = (data.wide ? words32 : words16)(data.indices);
const received = bytes(data.received);
const state = { head: data.telling, view: "close", pinned: data.query, shown: null };

const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && name !== "style") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍").replaceAll(" ", "␣") || "⋯";
const nameOf = (head) => `Layer ${head.layer}, head ${head.head}`;

// ------------------------------------------------------------------------------------------------ the grid of heads

const plots = [];
function buildAtlas() {
  const atlas = byId("atlas");
  atlas.append(make("span"));
  for (let h = 0; h < data.perLayer; h++) {
    const label = make("span", { className: "across" });
    label.append(make("b", { style: "font-weight:400" }, "head "), String(data.heads[h].head));
    atlas.append(label);
  }
  data.heads.forEach((head, i) => {
    if (i % data.perLayer === 0) {
      const label = make("span", { className: "down" });
      label.append(make("b", { style: "font-weight:400" }, "layer "), String(head.layer));
      atlas.append(label);
    }
    const canvas = make("canvas");
    const kind = make("span", { className: "kind" }, head.short);
    kind.dataset.kind = head.measure;
    const value = make("span", { className: "value" }, head.value);
    const button = make("button", { className: "plot", type: "button" }, canvas, make("span", { className: "plot-words" }, kind, value));
    button.setAttribute("aria-label", `${nameOf(head)}: ${head.kind} ${head.value}`);
    button.title = `${nameOf(head)}: ${head.does}`;
    button.addEventListener("click", () => choose(i));
    plots.push({ button, canvas });
    atlas.append(button);
  });
}

// ------------------------------------------------------------------------------------------------------- the text

const spans = [];
function buildText() {
  const page = document.createDocumentFragment();
  data.tokens.forEach((token, row) => {
    const i = places[row];
    if (i !== (row ? places[row - 1] + 1 : 0)) page.append(gap(row ? places[row - 1] + 1 : 0, i));
    const span = make("span", { className: "t" });
    span.dataset.i = i;
    if (token === "") {
      span.append(make("span", { className: "part", title: "part of the next character" }, "⋯"));
    } else {
      token.split(/(\n)/).forEach((piece) => {
        if (piece === "\n") span.append(make("span", { className: "nl" }, "↵"), "\n");
        else if (piece) span.append(piece);
      });
    }
    spans.push(span);
    page.append(span);
  });
  if (places.at(-1) < n - 1) page.append(gap(places.at(-1) + 1, n));
  byId("text").append(page);
  byId("excerpts").hidden = places.length === n;
}
const gap = (from, to) => make("span", { className: "gap" }, `${inText(to - from)} tokens are not shown`);

let marked = [];
function shade(i, strength, strong) {
  const span = spans[rowOf.get(i)];
  if (!span) return;
  span.style.setProperty("--a", strength.toFixed(3));
  span.classList.toggle("strong", strong);
}

function showReceived() {
  const text = byId("text");
  text.classList.add("idle");
  const from = state.head * places.length;
  places.forEach((place, row) => shade(place, received[from + row] / 255, false));
  marked = [...places];
}

function showQuery(i) {
  byId("text").classList.remove("idle");
  for (const j of marked) shade(j, 0, false);
  marked = [];
  const from = (state.head * places.length + rowOf.get(i)) * k;
  for (let r = 0; r < k; r++) {
    const w = values[from + r] / 65535;
    if (w <= 0) continue;
    const j = indices[from + r];
    shade(j, Math.min(1, 0.06 + 0.94 * Math.sqrt(w)), w > 0.45);
    marked.push(j);
  }
}

function show(i) {
  if (state.shown !== null) spans[rowOf.get(state.shown)].classList.remove("query");
  state.shown = i;
  if (i === null) showReceived();
  else {
    spans[rowOf.get(i)].classList.add("query");
    showQuery(i);
  }
  readOut(i);
  hairs(i);
}

function readOut(i) {
  const box = byId("readout");
  const say = make("p", { className: "readout-query" });
  if (i === null) {
    say.append("Shaded: how much attention each token gets from the queries that may see it, the first token aside. Point at a token to ask where this head looks from there.");
    box.replaceChildren(say);
    return;
  }
  say.append("From ", make("code", { className: "token" }, visible(textOf(i))), ` (token ${i.toLocaleString("en")}) this head looks at`);
  const list = make("ol", { className: "readout-list" });
  const from = (state.head * places.length + rowOf.get(i)) * k;
  let [rest, named] = [65535, 0];
  for (let r = 0; r < Math.min(k, i + 1); r++) {
    const w = values[from + r];
    if (w < 33 && named > 0) break; // below 0.05 %: it would read 0.0
    named += 1;
    rest -= w;
    const j = indices[from + r];
    const bar = make("i");
    bar.style.setProperty("--v", w / 65535);
    const back = i - j;
    const item = make("li", { title: back === 0 ? "the token itself" : `token ${j}, ${back} back` }, make("code", {}, visible(textOf(j))), percent(w / 65535), bar);
    item.addEventListener("click", () => pin(j, true));
    list.append(item);
  }
  const parts = [say, list];
  const others = i + 1 - named;
  if (others > 0 && rest > 3) parts.push(make("p", { className: "rest" }, `and ${percent(rest / 65535)} on ${others.toLocaleString("en")} other token${others > 1 ? "s" : ""}`));
  box.replaceChildren(...parts);
}

// The shown token that is nearest to a place of the text.
function nearest(i) {
  if (rowOf.has(i)) return i;
  return places.reduce((best, place) => (Math.abs(place - i) < Math.abs(best - i) ? place : best));
}

function pin(i, follow) {
  if (i !== null) i = nearest(i);
  state.pinned = i;
  show(i);
  if (i === null || !follow) return;
  const text = byId("text");
  const [a, b] = [spans[rowOf.get(i)].getBoundingClientRect(), text.getBoundingClientRect()];
  if (a.top < b.top + 20 || a.bottom > b.bottom - 20) text.scrollTop += a.top - b.top - b.height / 2;
}

// ------------------------------------------------------------------------------------------------- one head, close up

const captions = {
  text: () => `Largest weight in each block of ${data.block} × ${data.block} cells, all ${n.toLocaleString("en")} tokens. Point to read, click to go to the query.`,
  close: () => `Tokens ${data.window[0].toLocaleString("en")} to ${(data.window[1] - 1).toLocaleString("en")}, ${data.exact ? "every cell a weight" : `the ${k} largest weights of each query`}. Queries down, keys across.`,
  repeat: () => `${data.period} random tokens, twice. A stripe in the lower left quarter is a head that looks back at the first time: on the diagonal at the same token, one to the right at what came next.`,
};

function drawHead() {
  const view = state.view;
  const plate = byId("plate");
  const { side } = sets[view];
  paint(byId("map"), mapOf(view, state.head), side);
  byId("caption").textContent = captions[view]();
  for (const tab of document.querySelectorAll(".tabs button")) tab.setAttribute("aria-selected", String(tab.dataset.view === view));
  plate.classList.toggle("labelled", view === "close");
  const [top, left] = [byId("plate-top"), byId("plate-left")];
  top.replaceChildren();
  left.replaceChildren();
  if (view === "close") {
    for (let i = 0; i < side; i++) {
      const word = visible(textOf(data.window[0] + i));
      left.append(make("span", { style: `top:${((i + 0.5) / side) * 100}%` }, word));
      top.append(make("span", { style: `left:${((i + 0.5) / side) * 100}%` }, word));
    }
  }
  hairs(state.shown);
}

function hairs(i) {
  const { side } = sets[state.view];
  let at = null;
  if (i !== null && state.view === "text") at = (i + 0.5) / n;
  if (i !== null && state.view === "close" && i >= data.window[0] && i < data.window[1]) at = (i - data.window[0] + 0.5) / side;
  const [row, column] = [byId("row"), byId("column")];
  row.style.display = at === null ? "none" : "block";
  column.style.display = "none";
  if (at !== null) row.style.top = `${100 * at}%`;
}

function pointAtMap(event, go) {
  const { side } = sets[state.view];
  const box = byId("map").getBoundingClientRect();
  const place = (x) => Math.min(side - 1, Math.max(0, Math.floor(x * side)));
  const [r, c] = [place((event.clientY - box.top) / box.height), place((event.clientX - box.left) / box.width)];
  const byte = mapOf(state.view, state.head)[r * side + c];
  let words = captions[state.view]();
  if (!byte) words = "The future: a query may not look there.";
  else if (state.view === "text") {
    const [q, key] = [Math.floor((r / side) * n), Math.floor((c / side) * n)];
    words = `From around token ${q.toLocaleString("en")} to around token ${key.toLocaleString("en")}: at most ${percent(weightOf(byte))}.`;
    if (go) pin(q, true);
  } else if (state.view === "close") {
    const most = byte === 1 ? "less than " : "";
    const [q, key] = [data.window[0] + r, data.window[0] + c];
    words = `“${visible(textOf(q))}” looks at “${visible(textOf(key))}”, ${q - key} back: ${most}${percent(weightOf(byte))}.`;
    for (const [box, on] of [[byId("plate-left"), r], [byId("plate-top"), c]]) [...box.children].forEach((label, i) => label.classList.toggle("on", i === on));
    if (go) pin(q, true);
  } else {
    const scale = (2 * data.period) / side;
    words = `From place ${Math.floor(r * scale)} to place ${Math.floor(c * scale)}: at most ${percent(weightOf(byte))}.`;
  }
  byId("caption").textContent = words;
}

function choose(head, view) {
  state.head = head;
  if (view) state.view = view;
  const facts = data.heads[head];
  byId("head-name").textContent = nameOf(facts);
  byId("head-kind").textContent = [facts.kind, ...facts.also].join(", ");
  byId("head-kind").dataset.kind = facts.measure;
  byId("head-does").textContent = facts.does;
  const evidence = facts.evidence.map(([label, shown, share]) => {
    const bar = make("i");
    bar.style.setProperty("--v", share === null ? 0 : Math.min(1, share));
    if (share === null) bar.style.visibility = "hidden";
    return make("div", {}, make("dt", {}, label), make("dd", { className: "share", ariaHidden: "true" }, bar), make("dd", {}, shown));
  });
  byId("evidence").replaceChildren(...evidence);
  plots.forEach(({ button }, i) => button.setAttribute("aria-pressed", String(i === head)));
  for (const chip of document.querySelectorAll(".chips button")) chip.setAttribute("aria-pressed", String(Number(chip.dataset.i) === head));
  for (const row of document.querySelectorAll("tbody tr")) row.classList.toggle("chosen", Number(row.dataset.i) === head);
  drawHead();
  show(state.shown);
}

// ------------------------------------------------------------------------------------------------------- the table

function sortBy(header, column) {
  const table = header.closest("table");
  const down = header.getAttribute("aria-sort") !== "descending";
  for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => row.children[column].dataset.v ?? row.children[column].textContent;
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    const order = Number.isNaN(Number(x)) ? String(x).localeCompare(String(y)) : Number(x) - Number(y);
    return (down ? -order : order) || Number(a.dataset.i) - Number(b.dataset.i);
  });
  table.tBodies[0].append(...rows);
}

// -------------------------------------------------------------------------------------------------------- together

function paintAll() {
  plots.forEach(({ canvas }, i) => paint(canvas, mapOf("text", i), data.side));
  paint(byId("hero"), mapOf(data.heroView, data.telling), sets[data.heroView].side);
  paintScale(byId("scale"));
  drawHead();
}

buildAtlas();
buildText();
choose(data.telling);
pin(data.query, true);
paintAll();
dark.addEventListener("change", paintAll);

const text = byId("text");
const tokenAt = (event) => {
  const span = event.target.closest?.(".t");
  return span ? Number(span.dataset.i) : null;
};
text.addEventListener("pointerover", (event) => {
  const i = tokenAt(event);
  if (i !== null && i !== state.shown && event.pointerType !== "touch") show(i);
});
text.addEventListener("pointerleave", () => {
  if (state.shown !== state.pinned) show(state.pinned);
});
text.addEventListener("click", (event) => {
  const i = tokenAt(event);
  if (i !== null) pin(i === state.pinned ? null : i, false);
});
text.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (step) {
    event.preventDefault();
    const row = rowOf.get(state.shown ?? data.query) + step;
    pin(places[Math.min(places.length - 1, Math.max(0, row))], true);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") pin(null, false);
});
byId("map").addEventListener("pointermove", (event) => pointAtMap(event, false));
byId("map").addEventListener("click", (event) => pointAtMap(event, true));
byId("map").addEventListener("pointerleave", () => {
  byId("caption").textContent = captions[state.view]();
  for (const label of document.querySelectorAll(".plate .on")) label.classList.remove("on");
});
for (const tab of document.querySelectorAll(".tabs button")) {
  tab.addEventListener("click", () => {
    state.view = tab.dataset.view;
    drawHead();
  });
}
document.querySelectorAll("th button").forEach((button) => {
  const header = button.parentElement;
  button.addEventListener("click", () => sortBy(header, header.cellIndex));
});
for (const chip of document.querySelectorAll(".chips button")) chip.addEventListener("click", () => choose(Number(chip.dataset.i)));
for (const row of document.querySelectorAll("tbody tr")) {
  row.addEventListener("click", () => {
    choose(Number(row.dataset.i));
    byId("reader").scrollIntoView();
  });
}
