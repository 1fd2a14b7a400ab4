// What can be taken away: a link, a picture, a table, a page that works offline.

import { createDialog, download, make, segmented } from "./elements.js";
import { comparable } from "./compare.js";
import { cellsOf, countOf, csvLimit, fetchRegion, table } from "./csv.js";
import { bytes, headMark, whole } from "./numbers.js";
import { dataMark, fileOf, packedHeads, questionOf, viewState } from "./pack.js";
import { drawCard } from "./card.js";
import { headlineOf } from "./says.js";
import { pythonOf } from "./python.js";
import { drawPicture } from "./picture.js";
import { vectorLimit, vectorOf } from "./vector.js";
import { t } from "./words.js";

const LOOK = 700; // ms between two looks at how far the server is with a page

export function mountExport(element, { store, transport, map, tokens, announce, uid, root }) {
  let running = null;
  const open = make("button", { type: "button", class: "toggle", title: t("Copy a link, save a picture, a table, or a page that works offline") }, t("Export"));
  open.addEventListener("click", () => store.set({ panel: "export" }));
  element.append(open);
  const dialog = createDialog(root, t("Export"), uid, () => {
    running?.abort();
    if (store.state.panel === "export") store.set({ panel: "" });
  });
  const line = make("p", { class: "export-line", role: "status" });
  const bar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": t("Progress of the export") });
  const cancel = make("button", { type: "button", class: "text-button", hidden: true }, t("cancel"));
  cancel.addEventListener("click", () => running?.abort());

  const kinds = [
    { name: "link", title: t("Copy link"), run: copyLink, words: () => t("This view: head, place, zoom, colours, pin. Once this viewer is closed, attlas view run.atlas --at LINK opens it.") },
    { name: "png", title: t("Picture"), run: savePicture, words: () => t("PNG of the map as it is shown, with axes, colour bar and a caption, as dense as chosen below.") },
    { name: "card", title: t("Card"), run: saveCard, words: () => t("PNG of 1200 × 630 pixels to share: what this head does, and the map as it is shown.") },
    { name: "svg", title: t("Vector picture"), run: saveVector, words: vectorWords },
    { name: "python", title: "Python", run: copyPython, words: () => t("Copies the lines that draw these cells with attlas: PDF, SVG, or PNG of any density.") },
    { name: "csv", title: t("Table"), run: saveTable, words: tableWords },
    { name: "html", title: t("Offline page"), run: savePage, words: pageWords },
  ];
  let dense = 2;
  const density = segmented(t("Pixels of the picture for one of the screen"), [1, 2, 4].map((value) => ({ value, text: `${value}×` })), (value) => {
    dense = value;
    density.set(dense);
  });
  density.set(dense);
  for (const kind of kinds) {
    kind.says = make("span", { class: "export-words" });
    kind.button = make("button", { type: "button", class: "export-kind", "data-export": kind.name }, make("b", {}, kind.title), kind.says);
    kind.button.addEventListener("click", () => start(kind));
  }
  dialog.body.append(make("div", { class: "export-kinds" }, ...kinds.map((kind) => kind.button)), make("div", { class: "export-density" }, make("span", {}, t("Picture at")), density.element), make("div", { class: "export-foot" }, line, bar, cancel));
  dialog.element.classList.add("export");

  const region = () => cellsOf(map.visibleRegion(), store.state.info.entries[store.state.entry]);
  function tableWords() {
    const count = countOf(region());
    const limit = t("at most {0}", whole(csvLimit));
    if (count > csvLimit) return t("{0} cells are in view, {1} fit: zoom in.", whole(count), limit);
    const { info } = store.state;
    const numbers = info.held ? t("weights as far as this file has their digits") : t("exact float32 weights");
    const heads = packedHeads(store.state).length > 1 ? t(" of both heads") : "";
    return t("CSV of the {0} cells in view, {1}{2}, with positions and tokens ({3}).", whole(count), numbers, heads, limit);
  }
  function vectorWords() {
    const count = countOf(region());
    const limit = t("at most {0}", whole(vectorLimit));
    if (count > vectorLimit) return t("SVG of the cells in view, for print: {0} cells are in view, {1} fit: zoom in.", whole(count), limit);
    return t("SVG of the {0} cells in view with their tokens, for print ({1}).", whole(count), limit);
  }
  function pageWords() {
    const { state } = store;
    const heads = packedHeads(state);
    const names = heads.map((each) => headMark(state.info, each.entry, each.head)).join(t(" and "));
    return t("One HTML file with head {0}, tokens, tracks and bookmarks. The page says what is not in it.", names);
  }
  function describe() {
    const { info } = store.state;
    if (!info) return;
    for (const kind of kinds) kind.says.textContent = kind.words();
    const count = countOf(region());
    for (const [name, limit] of [["svg", vectorLimit], ["csv", csvLimit]]) {
      kinds.find((kind) => kind.name === name).button.disabled = count > limit || count === 0;
    }
    // Means of heads, and rows without the first key, are not one matrix in Python.
    kinds.find((kind) => kind.name === "python").button.disabled = store.state.head === "mean" || store.state.variant !== "plain";
    const readable = info.entries[store.state.entry].readable !== false;
    if (!readable) for (const kind of kinds.slice(2)) kind.button.disabled = true;
  }
  const tell = (text) => {
    line.textContent = text;
  };

  async function start(kind) {
    running?.abort();
    const stop = new AbortController();
    running = stop;
    bar.hidden = cancel.hidden = ["link", "png", "card", "python"].includes(kind.name);
    bar.removeAttribute("value");
    tell("");
    try {
      const done = await kind.run(stop.signal);
      if (!stop.signal.aborted) {
        tell(done);
        announce(done);
      }
    } catch (error) {
      tell(stop.signal.aborted ? t("Cancelled.") : `${error.message}.`);
    } finally {
      if (running === stop) {
        running = null;
        bar.hidden = cancel.hidden = true;
      }
    }
  }
  // Whether a text is on the clipboard now.
  async function copied(value) {
    try {
      await navigator.clipboard.writeText(value);
      return true;
    } catch {
      // No permission, or no secure context: the older way, which asks nobody.
      const area = make("textarea", { value, readOnly: true, class: "unseen" });
      dialog.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  }
  async function copyLink() {
    // The hash is written a little after the state changes.
    await new Promise((resolve) => setTimeout(resolve, 200));
    return (await copied(window.location.href)) ? t("Link copied.") : t("The link is the address of this page");
  }
  async function copyPython() {
    const text = pythonOf(store.state, region());
    return (await copied(text)) ? t("Python copied.") : text;
  }
  const fileName = (ending) => {
    const { info, entry, head } = store.state;
    const title = info.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "attlas";
    return `${title}-${headMark(info, entry, head).replace("·", "-")}.${ending}`;
  };
  function styleOf() {
    const read = getComputedStyle(root);
    return Object.fromEntries(["card", "ink", "soft", "line", "land", "sans"].map((name) => [name, read.getPropertyValue(`--${name}`).trim()]));
  }
  // The text of every token beside some cells.
  async function textsOf(cells, given) {
    const texts = new Map();
    const stretches = [
      [given.first_query + cells.r0, given.first_query + cells.r1],
      [given.first_key + cells.c0, given.first_key + cells.c1],
    ];
    for (const [start, stop] of stretches) (await tokens.range(start, stop)).forEach((text, at) => texts.set(start + at, text));
    return (position) => texts.get(position) ?? "";
  }
  async function saveVector(signal) {
    const { state } = store;
    const { entry, head, batch, variant } = state;
    const cells = region();
    const { weights } = await fetchRegion(transport, { entry, head, batch, variant }, cells, { signal });
    const textOf = await textsOf(cells, state.info.entries[entry]);
    download(fileName("svg"), new Blob([vectorOf({ weights, cells, state, style: styleOf(), textOf })], { type: "image/svg+xml;charset=utf-8" }));
    return t("{0} cells saved.", whole(countOf(cells)));
  }
  async function savePicture(signal) {
    const style = styleOf();
    const { state } = store;
    const view = map.visibleRegion();
    const canvas = drawPicture(await map.picture(dense, signal), view, state, style);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!blob) throw new Error(t("The browser could not make the picture"));
    download(fileName("png"), blob);
    return t("Picture of {0} × {1} pixels saved.", whole(canvas.width), whole(canvas.height));
  }
  async function saveCard(signal) {
    const { state } = store;
    const { info } = state;
    const title = [info.title, info.model].filter((part, at, all) => part && !all.slice(0, at).some((before) => before.includes(part))).join(" · ");
    const canvas = drawCard(await map.picture(2, signal), headlineOf(state), title, styleOf());
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!blob) throw new Error(t("The browser could not make the picture"));
    download(fileName("card.png"), blob);
    return t("Picture of {0} × {1} pixels saved.", whole(canvas.width), whole(canvas.height));
  }
  async function saveTable(signal) {
    const { state } = store;
    const { info, batch, variant } = state;
    const given = info.entries[state.entry];
    const cells = region();
    const heads = [];
    const chosen = packedHeads(state).filter(({ entry }) => comparable(info, state.entry, entry));
    for (const [at, { entry, head }] of chosen.entries()) {
      const found = await fetchRegion(transport, { entry, head, batch, variant }, cells, {
        signal,
        onPart: (share) => {
          bar.value = (at + share) / chosen.length;
        },
      });
      heads.push({ name: headMark(info, entry, head).replace("·", "_"), ...found });
    }
    const textOf = await textsOf(cells, given);
    // A blob of a million lines as one string would need twice its size: the table is small enough for one.
    download(fileName("csv"), new Blob([table(heads, cells, given, textOf)], { type: "text/csv;charset=utf-8" }));
    return t("{0} cells saved.", whole(countOf(cells)));
  }
  async function savePage(signal) {
    const { state } = store;
    tell(t("The page is being put together …"));
    const look = setInterval(async () => {
      const { json } = await transport.get("status").catch(() => ({ json: {} }));
      if (json.packing) bar.value = json.packing;
    }, LOOK);
    try {
      const { json } = await transport.get("offline", questionOf(state), { signal });
      const data = { ...json.data, state: { ...viewState(state), pool: state.pool } };
      return saved(fileOf(json.page ?? ownPage(), data));
    } finally {
      clearInterval(look);
    }
  }
  function saved(text) {
    const blob = new Blob([text], { type: "text/html;charset=utf-8" });
    download(fileName("html"), blob);
    return t("Page of {0} saved; it opens without a server.", bytes(blob.size));
  }
  const off = [
    store.on(["panel"], () => {
      if (store.state.panel !== "export") return dialog.close();
      describe();
      tell("");
      dialog.open();
      return undefined;
    }),
  ];
  // A guest in a notebook has no address of its own.
  kinds[0].button.hidden = !root.classList.contains("attlas-page");
  if (store.state.panel === "export") {
    describe();
    dialog.open();
  }
  return {
    destroy() {
      for (const end of off) end();
      running?.abort();
      dialog.destroy();
      element.replaceChildren();
    },
  };
}

// An offline page saves itself: its own scripts and styles, with the mark where the data was.
function ownPage() {
  const copy = document.documentElement.cloneNode(true);
  copy.querySelector("#attlas-data").textContent = dataMark;
  copy.querySelector(".attlas").replaceChildren();
  return `<!doctype html>\n${copy.outerHTML}`;
}
