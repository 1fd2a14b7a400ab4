// The layout: header, heads at the left, map in the middle, text at the right, colour bar and status below.

import { listHeads } from "../data/state.js";
import { connectThemeButton } from "../map/look.js";
import { createLogo } from "./figure.js";
import { createToolbar, make } from "./elements.js";
import { getLayerName, isRollout } from "../data/numbers.js";
import { holdsHead } from "../data/held.js";
import { t } from "../words/words.js";

/**
 * Build the layout in `root`; `connect(context)` connects its controls to the store.
 *
 * @param {HTMLElement} root
 * @param {MakeId} uid
 */
export function createShell(root, uid) {
  /**
   * @param {string} name
   * @param {"div" | "aside" | "section"} tag
   * @param {Attributes} attributes
   */
  const createSlot = (name, tag = "div", attributes = {}) => make(tag, { class: `slot-${name}`, ...attributes });
  const title = make("h1", { class: "title" });
  const text = make("select", { class: "pick-text", "aria-label": t("Text that was read"), "data-keep": "pick-text", hidden: true });
  const layer = make("select", { class: "pick-layer", "aria-label": t("Layer") });
  const head = make("select", { class: "pick-head", "aria-label": t("Head") });
  const batch = make("select", { class: "pick-batch", "aria-label": t("Text of the batch"), hidden: true });
  const createStepButton = (/** @type {string} */ text, /** @type {string} */ label) => make("button", { type: "button", class: "step", title: label, "aria-label": label }, text);
  const previousButton = createStepButton("‹", t("Previous head  ["));
  const nextButton = createStepButton("›", t("Next head  ]"));
  const headsButton = make("button", { type: "button", class: "toggle" }, t("Heads"));
  const textButton = make("button", { type: "button", class: "toggle" }, t("Text"));
  const theme = make("button", { type: "button", class: "icon theme" });
  const notice = make("p", { class: "notice", role: "status" }, t("Opening the atlas …"));
  const liveRegion = make("div", { class: "unseen", "aria-live": "polite", "aria-atomic": "true" });
  const slots = {
    search: createSlot("search"),
    compare: createSlot("compare"),
    export: createSlot("export"),
    help: createSlot("help"),
    bookmarks: createSlot("bookmarks"),
    heads: createSlot("heads", "aside", { "aria-label": t("Heads"), id: uid("heads") }),
    map: createSlot("map", "section", { "aria-label": t("Attention map") }),
    lines: make("div", { class: "lines", hidden: true }),
    reading: make("div", { class: "reading", hidden: true }),
    image: make("div", { class: "image", hidden: true }),
    text: make("div"),
    colourbar: createSlot("colourbar"),
    status: createSlot("status"),
    says: make("div", { class: "says" }),
    tour: make("div", { class: "tour", role: "group", "aria-label": t("Tour"), hidden: true }),
    tools: make("div", { class: "map-tools" }),
  };
  headsButton.setAttribute("aria-controls", slots.heads.id);
  const textPane = createSlot("text", "aside", { "aria-label": t("Text"), id: uid("text") });
  textPane.append(slots.reading, slots.image, slots.text);
  textButton.setAttribute("aria-controls", textPane.id);
  const scrim = make("div", { class: "scrim", hidden: true });
  const picker = make("div", { class: "head-picker" }, previousButton, layer, head, batch, nextButton);
  const tools = make("div", { class: "tools" }, slots.compare, slots.export, headsButton, textButton, slots.bookmarks, theme, slots.help);
  const brand = make("div", { class: "brand" }, createLogo(), make("span", { class: "brand-name" }, "attlas"));
  // The page of a text of a corpus has that of the corpus above it.
  const isOfCorpus = /\/text\/\d+\/$/.test(window.location.pathname);
  const back = make("a", { class: "back", href: "../../", hidden: !isOfCorpus }, t("‹ corpus"));
  back.addEventListener("click", (event) => {
    if (window.history.length < 2) return;
    event.preventDefault();
    window.history.back(); // to the head of the corpus that led here
  });
  const header = make("header", { class: "top" }, brand, back, title, text, picker, slots.search, tools);
  const middle = make("main", { class: "middle" }, slots.tour, make("div", { class: "middle-head" }, slots.says, slots.tools), slots.map);
  const body = make("div", { class: "body" }, slots.heads, middle, textPane, scrim);
  const footer = make("footer", { class: "foot" }, slots.colourbar, slots.status);
  slots.map.append(notice, slots.lines);
  const noscript = [...root.childNodes];
  root.replaceChildren(header, body, footer, liveRegion);

  /** @type {(() => void)[]} */
  const cleanups = [];
  const listen = (/** @type {HTMLElement} */ element, /** @type {string} */ event, /** @type {() => void} */ run) => {
    element.addEventListener(event, run);
    cleanups.push(() => element.removeEventListener(event, run));
  };

  /** @param {Pick<PageContext, "store" | "reopen">} context */
  function connect({ store, reopen }) {
    const { info } = store.state;
    notice.remove();
    title.textContent = info.title;
    title.title = [info.title, info.model].filter(Boolean).join(" · ");
    const readTexts = info.reading?.texts ?? [];
    text.replaceChildren(...readTexts.map((each) => make("option", { value: String(each.number) }, each.name)));
    text.value = String(store.state.text);
    text.hidden = readTexts.length < 2;
    title.classList.toggle("unseen", !text.hidden); // the list says it
    listen(text, "change", () => reopen?.({ ...store.state, text: Number(text.value) }, false));
    const formatLayerName = (/** @type {Entry} */ entry) => getLayerName(info, info.entries.indexOf(entry));
    const listHeldHeads = (/** @type {number} */ index) => listHeads(info.entries[index]).filter((each) => holdsHead(info, index, each));
    const getMissingAttributes = (/** @type {number} */ index, /** @type {HeadIndex} */ each) => (holdsHead(info, index, each) ? {} : { disabled: true, title: t("not in this file") });
    layer.replaceChildren(...info.entries.map((entry, index) => make("option", { value: String(index), disabled: !listHeldHeads(index).length }, formatLayerName(entry))));
    listen(layer, "change", () => {
      const entry = Number(layer.value);
      const [heldHeads, shownHead] = [listHeldHeads(entry), store.state.head];
      store.set({ entry, head: heldHeads.includes(shownHead) ? shownHead : heldHeads.findLast((each) => each !== "mean") ?? "mean" });
    });
    listen(head, "change", () => store.set({ head: head.value === "mean" ? "mean" : Number(head.value) }));
    listen(batch, "change", () => store.set({ batch: Number(batch.value) }));
    listen(previousButton, "click", () => store.set(stepHead(store.state, -1)));
    listen(nextButton, "click", () => store.set(stepHead(store.state, 1)));
    listen(headsButton, "click", () => store.set(togglePane(store.state, "heads", isNarrow())));
    listen(textButton, "click", () => store.set(togglePane(store.state, "text", isNarrow())));
    listen(scrim, "click", () => store.set({ panel: "" }));
    const isNarrow = () => root.clientWidth < 720;
    const showHead = (/** @type {State} */ state) => {
      const entry = info.entries[state.entry];
      const formatHead = (/** @type {HeadIndex} */ each) => (each === "mean" ? t("mean of {0}", entry.heads.length) : isRollout(entry) ? t("up to layer {0}", entry.heads[each]) : t("head {0}", entry.heads[each]));
      head.replaceChildren(...listHeads(entry).map((each) => make("option", { value: String(each), ...getMissingAttributes(state.entry, each) }, formatHead(each))));
      const texts = Array.from({ length: entry.batch ?? 1 }, (_, index) => make("option", { value: String(index) }, t("text {0}", index)));
      batch.replaceChildren(...texts);
      batch.hidden = texts.length < 2;
      layer.value = String(state.entry);
      head.value = String(state.head);
      batch.value = String(state.batch);
    };
    const showPanes = (/** @type {State} */ state) => {
      const { panel, aside } = state;
      root.dataset.view = state.view;
      root.dataset.aside = aside;
      root.dataset.panel = panel;
      scrim.hidden = panel !== "heads" && panel !== "text";
      for (const { button, name } of [{ button: headsButton, name: "heads" }, { button: textButton, name: "text" }]) {
        const shown = isNarrow() ? panel === name : aside === "both" || aside === name;
        button.setAttribute("aria-expanded", String(shown));
      }
    };
    showHead(store.state);
    showPanes(store.state);
    queueMicrotask(() => cleanups.push(createToolbar(tools, t("Tools")), createToolbar(slots.tools, t("Tools of the map")))); // once the panels have put their buttons there
    cleanups.push(store.on(["entry", "head", "batch"], showHead));
    cleanups.push(store.on(["panel", "aside", "view"], showPanes));
    cleanups.push(connectThemeButton(theme, store));
    const resizeObserver = new ResizeObserver(() => showPanes(store.state));
    resizeObserver.observe(root);
    cleanups.push(() => resizeObserver.disconnect());
    return () => cleanups.forEach((cleanup) => cleanup());
  }

  let announceTimer = 0;
  return {
    ...slots,
    connect,
    /**
     * Announce a line to screen readers.
     *
     * @param {string} text
     */
    announce(text) {
      clearTimeout(announceTimer);
      announceTimer = setTimeout(() => {
        liveRegion.textContent = text;
      }, 60);
    },
    fail(/** @type {string} */ text) {
      notice.textContent = t("The atlas cannot be shown: {0}.", text);
      notice.classList.add("bad");
    },
    destroy() {
      clearTimeout(announceTimer);
      root.replaceChildren(...noscript);
    },
  };
}

/**
 * The previous or next head, across layers; for the mean of heads, that of the previous or next layer.
 *
 * @param {HeadPlace & { info: Info }} place
 * @param {number} by
 * @returns {Partial<State>}
 */
export function stepHead({ info, entry, head }, by) {
  if (info.held) return stepHeldHead({ info, entry, head }, by);
  if (head === "mean") return stepLayer({ info, entry, head }, by);
  const next = head + by;
  if (next >= 0 && next < info.entries[entry].heads.length) return { head: next };
  const other = (entry + by + info.entries.length) % info.entries.length;
  return { entry: other, head: by > 0 ? 0 : info.entries[other].heads.length - 1 };
}

/**
 * The same head, one layer before or after.
 *
 * @param {HeadPlace & { info: Info }} place
 * @param {number} by
 * @returns {Partial<State>}
 */
export function stepLayer({ info, entry, head }, by) {
  if (info.held) return stepHeldHead({ info, entry, head }, by);
  const other = (entry + by + info.entries.length) % info.entries.length;
  return { entry: other, head: head === "mean" ? head : Math.min(head, info.entries[other].heads.length - 1) };
}

/**
 * The previous or next head of those that an offline page holds.
 *
 * @param {HeadPlace & { info: Info }} place
 * @param {number} by
 * @returns {HeadPlace}
 */
function stepHeldHead({ info, entry, head }, by) {
  const held = info.held ?? [];
  const index = held.findIndex((each) => each.entry === entry && each.head === head);
  return held[(index + by + held.length) % held.length];
}

/**
 * Wide pages show or hide a pane; narrow ones open it over the map.
 *
 * @param {Pick<State, "panel" | "aside">} state
 * @param {"heads" | "text"} name
 * @param {boolean} isNarrow
 * @returns {Partial<State>}
 */
function togglePane({ panel, aside }, name, isNarrow) {
  if (isNarrow) return { panel: panel === name ? "" : name };
  const open = { heads: aside === "both" || aside === "heads", text: aside === "both" || aside === "text" };
  open[name] = !open[name];
  return { aside: open.heads && open.text ? "both" : open.heads ? "heads" : open.text ? "text" : "none" };
}
