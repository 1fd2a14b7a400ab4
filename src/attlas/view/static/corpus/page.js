// Starts the page of one or more corpora: all heads as a scatter with a table, and a page for each head.

import { connectThemeButton, followTheme } from "../map/look.js";
import { CORPUS_DEFAULTS, bindCorpusHash, readCorpusHash } from "./state.js";
import { getHead, formatHeadTitle, findMeasure, listMeasures, getOpenHeads, findRow, getSelection } from "./data.js";
import { createHeadColumn } from "./head.js";
import { createPickers, createScatter } from "./scatter.js";
import { createTable } from "./table.js";
import { createDialog, createLanguageButton, createProjectLink, make } from "../panels/elements.js";
import { createLogo } from "../panels/figure.js";
import { formatInteger } from "../data/numbers.js";
import { createStore } from "../data/state.js";
import { language, t } from "../words/words.js";

/** @returns {[key: string, does: string][]} */
const listKeys = () => [
  [t("drag"), t("select heads; a selection can be dragged")],
  [t("click, Enter"), t("open a head")],
  ["← ↑ → ↓", t("in the scatter: from point to point, with Shift they select; in a text: from token to token")],
  ["[ ]", t("previous, next head; of the selection where there is one")],
  ["Esc", t("back to all heads, clear the selection")],
  ["?", t("this box")],
];

/**
 * Start the page in `root` on the answers of `transport`; `options.initial`: fields of the state to start with.
 *
 * @param {HTMLElement} root
 * @param {Transport<CorpusQuestions>} transport
 * @param {{ initial?: Partial<CorpusState> }} [options]
 */
export function mountCorpus(root, transport, options = {}) {
  let ids = 0;
  const uid = (/** @type {string} */ name) => `corpus-${name}-${++ids}`;
  const liveRegion = make("div", { class: "unseen", "aria-live": "polite", "aria-atomic": "true" });
  let announceTimer = 0;
  const announce = (/** @type {string} */ text) => {
    clearTimeout(announceTimer);
    announceTimer = setTimeout(() => {
      liveRegion.textContent = text;
    }, 60);
  };
  const notice = make("p", { class: "notice", role: "status" }, t("Opening the corpus …"));
  root.replaceChildren(make("main", { class: "corpus-body" }, notice), liveRegion);

  async function start() {
    const info = translateInfo((await transport.get("info")).json);
    const names = listMeasures(info).map(({ name }) => name);
    const initial = { x: names[0], y: names[1] ?? names[0], colour: "layer", ...info.initial };
    const defaults = { ...CORPUS_DEFAULTS, ...initial, measure: initial.y, ...options.initial };
    const fields = readCorpusHash(window.location.hash);
    /** @type {Store<CorpusState>} */
    const store = createStore({ ...defaults, ...fields, info }, CORPUS_DEFAULTS);
    keepValid(store, defaults);
    const context = { store, transport, root, uid, announce };
    followTheme(root, store);
    build(context);
    bindCorpusHash(store, defaults);
    document.documentElement.lang = language;
    root.classList.add("attlas-ready");
    return context;
  }

  /** @param {CorpusContext} context */
  function build(context) {
    const { store } = context;
    const { info } = store.state;
    const dialog = createHelpDialog(context);
    const body = make("main", { class: "corpus-body" });
    const all = make("button", { type: "button", class: "toggle all-heads", title: t("Back to the scatter of all heads  Esc") }, `‹ ${t("All heads")}`);
    const createStepButton = (/** @type {string} */ text, /** @type {string} */ label, /** @type {number} */ by) => {
      const button = make("button", { type: "button", class: "step", title: label, "aria-label": label }, text);
      button.addEventListener("click", () => stepHead(store, by));
      return button;
    };
    const picker = make("div", { class: "head-picker" }, all, createStepButton("‹", t("Previous head  ["), -1), createStepButton("›", t("Next head  ]"), 1));
    all.addEventListener("click", () => store.set({ open: null }));
    const help = make("button", { type: "button", class: "icon", title: t("Keys, and what the numbers are  ?"), "aria-label": t("Help") }, "?");
    help.addEventListener("click", () => store.set({ panel: "help" }));
    const theme = make("button", { type: "button", class: "icon theme" });
    connectThemeButton(theme, store);
    const title = make("h1", { class: "title" }, joinNames(info.corpora.map(({ title, counts }) => title + (counts.complete ? "" : t(", not finished")))));
    const brand = make("div", { class: "brand" }, createLogo(), make("span", { class: "brand-name" }, "attlas"));
    const header = make("header", { class: "top" }, brand, title, picker, make("div", { class: "tools" }, theme, help));
    const foot = make("footer", { class: "foot corpus-foot" }, ...info.corpora.map((corpus) => make("span", {}, corpus.summary)), info.offline ? make("span", { class: "offline-words" }, describeOffline(info.offline), ...createProjectLink(info.offline)) : null);
    root.replaceChildren(header, body, foot, dialog, liveRegion);

    /** @type {{ element: HTMLElement, destroy: () => void }[]} */
    let parts = [];
    /** @type {string | null} */
    let opened = null;
    const clear = () => {
      parts.forEach((part) => part.destroy());
      parts = [];
    };
    function showAll() {
      const scatters = info.corpora.map((_, index) => createScatter(context, index));
      const table = createTable(context);
      const pickers = createPickers(context);
      parts = [...scatters, table, pickers];
      body.replaceChildren(make("div", { class: "overview" }, make("div", { class: "overview-main" }, pickers.element, make("div", { class: "scatters" }, ...scatters.map(({ element }) => element))), table.element));
    }
    /** @param {(CorpusHead | null)[]} heads */
    function showHeads(heads) {
      /** @type {HeadAnswer[]} */
      const answers = [];
      /** @type {ReturnType<typeof createHeadColumn>[]} */
      const columns = [];
      /** @type {HeadContext} */
      const columnContext = {
        ...context,
        openHead: (index, head) => store.set({ open: getOpenHeads(store.state, index, head) }),
        openMap: async (index, row, sample) => {
          const { json } = await context.transport.get("open", { corpus: index, row, text: sample.text, query: sample.query, key: sample.key });
          window.location.assign(json.path);
        },
        // Axes are shared between the columns: the others are drawn again when an answer has come.
        answered: (index, answer) => {
          answers[index] = answer;
          columns.forEach((column, each) => each !== index && answers[each] && column?.draw());
        },
      };
      heads.forEach((head, index) => {
        if (head) columns[index] = createHeadColumn(columnContext, index, head, () => answers.filter((_, each) => each !== index));
      });
      parts = columns.filter(Boolean);
      body.replaceChildren(make("div", { class: "head-columns" }, ...parts.map(({ element }) => element)));
      body.scrollTop = 0;
      announce(joinNames(heads.filter((head) => head !== null).map(formatHeadTitle)));
    }
    const show = (/** @type {Pick<CorpusState, "open">} */ { open }) => {
      const text = JSON.stringify(open);
      if (text === opened) return;
      const back = opened !== null && opened !== "null" && open === null;
      opened = text;
      clear();
      root.dataset.view = open ? "head" : "all";
      picker.hidden = !open;
      if (open) showHeads(open);
      else showAll();
      if (back) /** @type {HTMLElement | null} */ (body.querySelector(".scatter-plot"))?.focus({ preventScroll: true });
      const openHead = open?.find((head) => head !== null);
      const name = openHead ? formatHeadTitle(openHead) : t("All heads");
      document.title = `${name} · ${info.corpora.map((corpus) => corpus.title).join(", ")} · attlas`;
    };
    show(store.state);
    store.on(["open"], show);
    listenToKeys(context);
  }

  return { ready: start().catch((error) => {
    notice.textContent = t("The corpus cannot be shown: {0}.", error.message);
    notice.classList.add("bad");
  }) };
}

/** @param {string[]} names */
const joinNames = (names) => names.reduce((before, name) => t("{0} and {1}", before, name));

/**
 * Translate the texts that the server sends.
 *
 * @param {CorporaInfo} info
 * @returns {CorporaInfo<Corpus>}
 */
function translateInfo(info) {
  const corpora = info.corpora.map((corpus) => {
    const { model, counts } = corpus;
    const problems = [counts.complete ? "" : t(", not finished"), counts.failed ? t(", {0} texts failed", formatInteger(counts.failed)) : ""];
    const size = t("{0} tokens in {1} texts of up to {2}", formatInteger(corpus.tokens), formatInteger(corpus.texts), formatInteger(counts.length)) + problems.join("");
    const heads = formatInteger(corpus.rows.layer.length);
    const summary = t("{0}: {1} layers, {2} heads; {3}", model, formatInteger(counts.layers), heads, size);
    const { type, dtype, source, made, shown } = corpus.facts;
    /** @type {Corpus["about"]} */
    const about = [
      [t("Model"), t("{0} ({1}, {2}); {3} layers with attention", model, type, dtype, formatInteger(counts.layers))],
      [t("Texts"), `${source}: ${size}`],
      [t("Sums"), t("Numbers of a head are sums over all texts, divided by counts over all texts.")],
      [t("Made with"), shown ? t("attlas {0}; shown by attlas {1}", made, shown) : `attlas ${made}`],
    ];
    const measures = corpus.measures.map((measure) => ({ ...measure, label: t(measure.label), unit: t(measure.unit), description: t(measure.description) }));
    return { ...corpus, open: corpus.open && t(...corpus.open), summary, about, measures };
  });
  return { ...info, corpora };
}

/** @param {OfflineFacts} offline */
function describeOffline({ texts, window: tokens }) {
  if (!texts) return t("Of each head, this file holds all numbers and no text.");
  return t("Of each head, this file holds all numbers and {0} sampled texts at most: {1} tokens about the largest weight.", formatInteger(texts), formatInteger(tokens));
}

/**
 * A link may name measures and heads that this corpus does not have.
 *
 * @param {Store<CorpusState>} store
 * @param {CorpusView} defaults
 */
function keepValid(store, defaults) {
  const check = () => {
    const { state } = store;
    const { info } = state;
    /** @type {Partial<CorpusState>} */
    const patch = {};
    const isKnown = (/** @type {string} */ name) => name !== "kind" && findMeasure(info, name);
    for (const field of /** @type {const} */ (["x", "y"])) if (!isKnown(state[field])) patch[field] = defaults[field];
    if (!findMeasure(info, state.colour)) patch.colour = defaults.colour;
    if (state.size && !isKnown(state.size)) patch.size = "";
    const spread = info.corpora[0].measures.filter((measure) => measure.spread && isKnown(measure.name)).map(({ name }) => name);
    if (!spread.includes(state.measure)) patch.measure = spread.includes(defaults.measure) ? defaults.measure : spread[0];
    if (state.brush && !info.corpora[state.brush.corpus]) patch.brush = null;
    const heads = state.open;
    if (heads) {
      const open = info.corpora.map((corpus, index) => (findRow(corpus, heads[index]) >= 0 ? heads[index] : null));
      if (JSON.stringify(open) !== JSON.stringify(state.open)) patch.open = open.some(Boolean) ? open : null;
    }
    if (Object.keys(patch).length) store.set(patch);
  };
  check();
  store.on(["x", "y", "colour", "size", "measure", "brush", "open"], check);
}

/**
 * Open the next or previous head, of the selected ones where there are some.
 *
 * @param {Store<CorpusState>} store
 * @param {number} by
 */
function stepHead(store, by) {
  const { state } = store;
  if (!state.open) return;
  const index = state.open.findIndex(Boolean);
  const corpus = state.info.corpora[index];
  const selected = getSelection(state)[index];
  const rows = selected?.size ? [...selected].sort((a, b) => a - b) : [...corpus.rows.layer.keys()];
  const now = rows.indexOf(findRow(corpus, state.open[index]));
  const next = now < 0 ? rows[0] : rows[(now + by + rows.length) % rows.length];
  store.set({ open: getOpenHeads(state, index, getHead(corpus, next)) });
}

/** @param {CorpusContext} context */
function listenToKeys({ store }) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /** @type {Element} */ (event.target).closest?.("input, textarea, select");
    if (typing && event.key !== "Escape") return;
    if (event.key === "[") stepHead(store, -1);
    else if (event.key === "]") stepHead(store, 1);
    else if (event.key === "?") store.set({ panel: "help" });
    else if (event.key === "Escape") store.set(store.state.open ? { open: null } : { brush: null, find: "" });
    else return;
    event.preventDefault();
  });
}

/** @param {CorpusContext} context */
function createHelpDialog({ store, root, uid }) {
  const { info } = store.state;
  const dialog = createDialog(root, t("Keys and numbers"), uid, () => store.set({ panel: "" }));
  dialog.element.classList.add("help");
  dialog.body.tabIndex = 0;
  dialog.element.querySelector(".dialog-close")?.before(createLanguageButton(store));
  const createPairs = (/** @type {[title: string, text: string][]} */ list) => list.map(([title, text]) => make("div", {}, make("dt", {}, title), make("dd", {}, text)));
  dialog.body.append(
    make("section", {}, make("h3", {}, t("Keys")), make("dl", { class: "keys" }, ...createPairs(listKeys()))),
    make("section", { class: "facts" }, make("h3", {}, t("The numbers, over all texts")), make("dl", {}, ...createPairs(listMeasures(info, true).map(({ label, description }) => [label, description])))),
    ...info.corpora.map((corpus) => make("section", { class: "facts about" }, make("h3", {}, corpus.title), make("dl", {}, ...createPairs(corpus.about)))),
  );
  store.on(["panel"], ({ panel }) => (panel === "help" ? dialog.open() : dialog.close()));
  if (store.state.panel === "help") queueMicrotask(() => dialog.open());
  return dialog.element;
}
