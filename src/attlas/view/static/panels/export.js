// The export dialog: a link, pictures, a table, Python, an offline page.

import { createDialog, download, make, createSegmented, encodePng } from "./elements.js";
import { canCompare } from "../data/comparable.js";
import { clampRegion, countCells, csvLimit, fetchRegion, formatTable } from "../data/csv.js";
import { formatBytes, getHeadMark, formatInteger } from "../data/numbers.js";
import { dataMark, createFile, listPackedHeads, createPackQuery, getViewState } from "../data/pack.js";
import { drawCard } from "./card.js";
import { chooseFilmType } from "./film.js";
import { describeHead } from "./says.js";
import { createPdf } from "./pdf.js";
import { formatPython } from "./python.js";
import { writeView } from "../data/state.js";
import { drawPicture, nameFile, readPictureStyle } from "./picture.js";
import { explainRefusal } from "../map/scene.js";
import { vectorLimit, createVector, listDrawnHeads, wrapPicture } from "./vector.js";
import { t } from "../words/words.js";

const POLL_INTERVAL = 700; // ms between two requests for the progress of an offline page

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountExport(element, { store, transport, map, texts, announce, uid, root }) {
  /** @type {AbortController | null} */
  let request = null;
  const openButton = make("button", { type: "button", class: "toggle", title: t("Copy a link, save a picture, a table, or a page that works offline") }, t("Export"));
  openButton.addEventListener("click", () => store.set({ panel: "export" }));
  element.append(openButton);
  const dialog = createDialog(root, t("Export"), uid, () => {
    request?.abort();
    if (store.state.panel === "export") store.set({ panel: "" });
  });
  const messageElement = make("p", { class: "export-line", role: "status" });
  const progressBar = make("progress", { max: 1, value: 0, hidden: true, "aria-label": t("Progress of the export") });
  const cancelButton = make("button", { type: "button", class: "text-button", hidden: true }, t("cancel"));
  cancelButton.addEventListener("click", () => request?.abort());

  /** @type {Omit<ExportKind, "says" | "button">[]} */
  const offers = [
    { name: "link", title: t("Copy link"), run: copyLink, words: () => (store.state.info.held ? t("This view of this file: head, place, zoom, colours, pin.") : t("This view: head, place, zoom, colours, pin. Once this viewer is closed, attlas view run.atlas --at LINK opens it.")) },
    { name: "png", title: t("Picture"), run: savePicture, words: () => t("The map as it is shown, with axes, colour bar and a caption, as chosen below.") },
    { name: "card", title: t("Card"), run: saveCard, words: () => t("PNG of 1200 × 630 pixels to share: what this head does, and the map as it is shown.") },
    { name: "film", title: t("Film"), run: recordFilm, words: describeFilm },
    { name: "svg", title: t("Vector picture"), run: saveVector, words: describeVector },
    { name: "python", title: "Python", run: copyPython, words: () => (getShownState().compare === "none" ? t("Copies the lines that draw these cells with attlas: PDF, SVG, or PNG of any density.") : t("Copies the lines that draw these cells of the first head with attlas.")) },
    { name: "csv", title: t("Table"), run: saveTable, words: describeTable },
    { name: "html", title: t("Offline page"), run: savePage, words: describePage },
  ];
  let pixelRatio = 2;
  const densityButtons = createSegmented(t("Pixels of the picture for one of the screen"), [1, 2, 4].map((value) => ({ value, text: `${value}×` })), (value) => {
    pixelRatio = value;
    densityButtons.set(pixelRatio);
  });
  densityButtons.set(pixelRatio);
  let format = "png";
  const formatButtons = createSegmented(t("File of the picture"), ["png", "pdf"].map((value) => ({ value, text: value.toUpperCase() })), (value) => {
    format = value;
    formatButtons.set(format);
  });
  formatButtons.set(format);
  const kinds = offers.map((offer) => {
    const says = make("span", { class: "export-words" });
    const button = make("button", { type: "button", class: "export-kind", "data-export": offer.name }, make("b", {}, offer.title), says);
    const kind = { ...offer, says, button };
    button.addEventListener("click", () => run(kind));
    return kind;
  });
  dialog.body.append(make("div", { class: "export-kinds" }, ...kinds.map((kind) => kind.button)), make("div", { class: "export-density" }, make("span", {}, t("Picture as")), formatButtons.element, densityButtons.element), make("div", { class: "export-foot" }, messageElement, progressBar, cancelButton));
  dialog.element.classList.add("export");

  // A comparison that cannot be drawn is not shown.
  const getShownState = () => (explainRefusal(store.state) ? { ...store.state, compare: /** @type {Compare} */ ("none") } : store.state);
  const getCells = () => clampRegion(map.visibleRegion(), store.state.info.entries[store.state.entry]);
  function describeTable() {
    const count = countCells(getCells());
    const limit = t("at most {0}", formatInteger(csvLimit));
    if (count > csvLimit) return t("{0} cells are in view, {1} fit: zoom in.", formatInteger(count), limit);
    const { info } = store.state;
    const numbers = info.held ? t("weights as far as this file has their digits") : t("exact float32 weights");
    const many = listPackedHeads(store.state).length;
    const heads = many > 2 ? t(" of {0} heads", many) : many > 1 ? t(" of both heads") : "";
    return t("CSV of the {0} cells in view, {1}{2}, with positions and tokens ({3}).", formatInteger(count), numbers, heads, limit);
  }
  function describeVector() {
    const count = countCells(getCells());
    const limit = t("at most {0}", formatInteger(vectorLimit));
    if (count > vectorLimit) return t("SVG with the map as pixels: {0} cells are in view, {1} are drawn one by one. Zoom in for those.", formatInteger(count), limit);
    if (!listDrawnHeads(getShownState())) return t("SVG with the maps of both heads as pixels.");
    return t("SVG of the {0} cells in view with their tokens, for print ({1}).", formatInteger(count), limit);
  }
  function describePage() {
    const { state } = store;
    if (state.info.held) return t("This file again; it opens at what is shown now.");
    const heads = listPackedHeads(state);
    const names = heads.map((each) => getHeadMark(state.info, each.entry, each.head)).join(t(" and "));
    return t("One HTML file with head {0}, tokens, tracks and bookmarks. The page says what is not in it.", names);
  }
  function describeFilm() {
    const film = chooseFilmType();
    if (!film) return t("This browser cannot record films.");
    const { length } = store.state.info.bookmarks ?? [];
    return length ? t("{0}: a flight from the whole matrix along the bookmarks, recorded while it is shown.", film.name) : t("{0} of 15 seconds: from the whole matrix to two words, recorded while it is shown.", film.name);
  }
  function describe() {
    const { info } = store.state;
    if (!info) return;
    for (const kind of kinds) kind.says.textContent = kind.words();
    const count = countCells(getCells());
    for (const { name, button } of kinds) {
      if (name === "svg" || name === "csv") button.disabled = (name === "csv" && count > csvLimit) || count === 0;
      else if (name === "film") button.disabled = !chooseFilmType();
      // Python has no single matrix for a mean of heads or for rows without the first key.
      else if (name === "python") button.disabled = store.state.head === "mean" || store.state.variant !== "plain";
    }
    const readable = info.entries[store.state.entry].readable !== false;
    if (!readable) for (const kind of kinds.slice(2)) kind.button.disabled = true;
  }
  const showMessage = (/** @type {string} */ text) => {
    messageElement.textContent = text;
  };

  /** @param {ExportKind} kind */
  async function run(kind) {
    request?.abort();
    const controller = new AbortController();
    request = controller;
    progressBar.hidden = cancelButton.hidden = ["link", "png", "card", "film", "python"].includes(kind.name);
    progressBar.removeAttribute("value");
    showMessage("");
    try {
      const message = await kind.run(controller.signal);
      if (!controller.signal.aborted) {
        showMessage(message);
        announce(message);
      }
    } catch (error) {
      showMessage(controller.signal.aborted ? t("Cancelled.") : `${error.message}.`);
    } finally {
      if (request === controller) {
        request = null;
        progressBar.hidden = cancelButton.hidden = true;
      }
    }
  }
  // Copy a text to the clipboard; returns whether that worked.
  /** @param {string} value */
  async function copyText(value) {
    try {
      await navigator.clipboard.writeText(value);
      return true;
    } catch {
      // No permission, or no secure context: the older method needs neither.
      const area = make("textarea", { value, readOnly: true, class: "unseen" });
      dialog.body.append(area);
      area.select();
      const copied = document.execCommand("copy");
      area.remove();
      return copied;
    }
  }
  async function copyLink() {
    const link = `${window.location.href.split("#")[0]}#${writeView(store.state)}`;
    return (await copyText(link)) ? t("Link copied.") : link;
  }
  async function copyPython() {
    const text = formatPython(store.state, getCells());
    return (await copyText(text)) ? t("Python copied.") : text;
  }
  const createFileName = (/** @type {string} */ ending) => nameFile(store.state, ending);
  const readStyles = () => readPictureStyle(root);
  /**
   * Fetch the tokens of the rows and columns of some cells: functions that return that of a position.
   *
   * @param {Region} region
   * @param {State} state
   * @returns {Promise<TextOf>}
   */
  async function fetchTexts({ r0, r1, c0, c1 }, state) {
    const { first_query: firstQuery, first_key: firstKey } = state.info.entries[state.entry];
    const { query, key } = texts.of(state);
    const [rows, columns] = await Promise.all([query.range(firstQuery + r0, firstQuery + r1), key.range(firstKey + c0, firstKey + c1)]);
    return { query: (position) => rows[position - firstQuery - r0] ?? "", key: (position) => columns[position - firstKey - c0] ?? "" };
  }
  /** @param {AbortSignal} signal */
  async function saveVector(signal) {
    const state = getShownState();
    const { batch, variant } = state;
    const cells = getCells();
    const drawn = countCells(cells) <= vectorLimit ? listDrawnHeads(state) : null;
    const save = (/** @type {string} */ text) => download(createFileName("svg"), new Blob([text], { type: "image/svg+xml;charset=utf-8" }));
    if (!drawn) {
      const canvas = await draw(signal);
      save(wrapPicture(canvas, pixelRatio));
      return t("Picture of {0} × {1} pixels saved.", formatInteger(canvas.width), formatInteger(canvas.height));
    }
    /** @type {Float32Array[]} */
    const weights = [];
    for (const { entry, head } of drawn) weights.push((await fetchRegion(transport, { entry, head, batch, variant }, cells, { signal })).weights);
    const textOf = await fetchTexts(cells, state);
    save(createVector({ weights, cells, state, style: readStyles(), textOf }));
    return t("{0} cells saved.", formatInteger(countCells(cells)));
  }
  /** @param {AbortSignal} signal */
  async function draw(signal) {
    const view = map.visibleRegion();
    return drawPicture(await map.picture(pixelRatio, signal), view, getShownState(), readStyles());
  }
  /** @param {AbortSignal} signal */
  async function savePicture(signal) {
    const canvas = await draw(signal);
    download(createFileName(format), await (format === "pdf" ? createPdf(canvas, pixelRatio) : encodePng(canvas)));
    return t("Picture of {0} × {1} pixels saved.", formatInteger(canvas.width), formatInteger(canvas.height));
  }
  /** @param {AbortSignal} signal */
  async function saveCard(signal) {
    const { state } = store;
    const { info } = state;
    const title = [info.title, info.model].filter((part, at, all) => part && !all.slice(0, at).some((before) => before.includes(part))).join(" · ");
    const canvas = drawCard(await map.picture(2, signal), describeHead(state), title, readStyles(), info.project ?? "");
    download(createFileName("card.png"), await encodePng(canvas));
    return t("Picture of {0} × {1} pixels saved.", formatInteger(canvas.width), formatInteger(canvas.height));
  }
  async function recordFilm() {
    store.set({ panel: "", flight: "record" });
    return "";
  }
  /** @param {AbortSignal} signal */
  async function saveTable(signal) {
    const { state } = store;
    const { info, batch, variant } = state;
    const entryInfo = info.entries[state.entry];
    const cells = getCells();
    /** @type {TableHead[]} */
    const heads = [];
    const chosen = listPackedHeads(state).filter(({ entry }) => canCompare(info, state.entry, entry));
    for (const [at, { entry, head }] of chosen.entries()) {
      const weights = await fetchRegion(transport, { entry, head, batch, variant }, cells, {
        signal,
        onPart: (share) => {
          progressBar.value = (at + share) / chosen.length;
        },
      });
      heads.push({ name: getHeadMark(info, entry, head).replace("·", "_"), ...weights });
    }
    const textOf = await fetchTexts(cells, state);
    download(createFileName("csv"), new Blob([formatTable(heads, cells, entryInfo, textOf)], { type: "text/csv;charset=utf-8" }));
    return t("{0} cells saved.", formatInteger(countCells(cells)));
  }
  /** @param {AbortSignal} signal */
  async function savePage(signal) {
    const { state } = store;
    showMessage(t("The page is being put together …"));
    const timer = setInterval(async () => {
      const status = await transport.get("status").catch(() => null);
      if (status?.json.packing) progressBar.value = status.json.packing;
    }, POLL_INTERVAL);
    try {
      const { json } = await transport.get("offline", createPackQuery(state), { signal });
      const data = { ...json.data, state: { ...getViewState(state), pool: state.pool } };
      return downloadPage(createFile(json.page ?? serialisePage(), data));
    } finally {
      clearInterval(timer);
    }
  }
  /** @param {string} text */
  function downloadPage(text) {
    const blob = new Blob([text], { type: "text/html;charset=utf-8" });
    download(createFileName("html"), blob);
    return t("Page of {0} saved; it opens without a server.", formatBytes(blob.size));
  }
  const subscriptions = [
    store.on(["panel"], () => {
      if (store.state.panel !== "export") return dialog.close();
      describe();
      showMessage("");
      dialog.open();
      return undefined;
    }),
  ];
  // In a notebook the viewer has no address of its own.
  kinds[0].button.hidden = !root.classList.contains("attlas-page");
  if (store.state.panel === "export") {
    describe();
    dialog.open();
  }
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      request?.abort();
      dialog.destroy();
      element.replaceChildren();
    },
  };
}

// The HTML of this offline page, with a marker in place of its data.
function serialisePage() {
  const copy = /** @type {HTMLElement} */ (document.documentElement.cloneNode(true));
  copy.querySelector("#attlas-data")?.replaceChildren(dataMark);
  copy.querySelector(".attlas")?.replaceChildren();
  return `<!doctype html>\n${copy.outerHTML}`;
}
