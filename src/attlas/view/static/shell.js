// The layout: header, heads at the left, map in the middle, text at the right, colour bar and status below.

import { make } from "./elements.js";
import { layerName } from "./numbers.js";
import { holds } from "./state.js";
import { t } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

function mark() {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("aria-hidden", "true");
  for (const [name, d] of [["mark-land", "M1 1v14h14z"], ["mark-stripe", "M1 7l8 8"]]) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

/** Build the layout into `root`; `connect(context)` brings its own controls to life. */
export function createShell(root, uid) {
  const slot = (name, tag = "div", attributes = {}) => make(tag, { class: `slot-${name}`, ...attributes });
  const title = make("h1", { class: "title" });
  const layer = make("select", { class: "pick-layer", "aria-label": t("Layer") });
  const head = make("select", { class: "pick-head", "aria-label": t("Head") });
  const batch = make("select", { class: "pick-batch", "aria-label": t("Text of the batch"), hidden: true });
  const step = (text, label) => make("button", { type: "button", class: "step", title: label, "aria-label": label }, text);
  const previous = step("‹", t("Previous head  ["));
  const following = step("›", t("Next head  ]"));
  const headsButton = make("button", { type: "button", class: "toggle" }, t("Heads"));
  const textButton = make("button", { type: "button", class: "toggle" }, t("Text"));
  const theme = make("button", { type: "button", class: "icon theme" });
  const notice = make("p", { class: "notice", role: "status" }, t("Opening the atlas …"));
  const live = make("div", { class: "unseen", "aria-live": "polite", "aria-atomic": "true" });
  const part = {
    search: slot("search"),
    compare: slot("compare"),
    export: slot("export"),
    help: slot("help"),
    bookmarks: slot("bookmarks"),
    heads: slot("heads", "aside", { "aria-label": t("Heads"), id: uid("heads") }),
    map: slot("map", "main", { "aria-label": t("Attention map") }),
    lines: make("div", { class: "lines", hidden: true }),
    reading: make("div", { class: "reading", hidden: true }),
    text: make("div"),
    colourbar: slot("colourbar"),
    status: slot("status"),
    says: make("div", { class: "says" }),
    tour: make("div", { class: "tour", role: "group", "aria-label": t("Tour"), hidden: true }),
    tools: make("div", { class: "map-tools", role: "group", "aria-label": t("Zoom") }),
  };
  headsButton.setAttribute("aria-controls", part.heads.id);
  const textPane = slot("text", "aside", { "aria-label": t("Text"), id: uid("text") });
  textPane.append(part.reading, part.text);
  textButton.setAttribute("aria-controls", textPane.id);
  const scrim = make("div", { class: "scrim", hidden: true });
  const picker = make("div", { class: "head-picker" }, previous, layer, head, batch, following);
  const tools = make("div", { class: "tools" }, part.compare, part.export, headsButton, textButton, part.bookmarks, theme, part.help);
  const brand = make("div", { class: "brand" }, mark(), make("span", { class: "brand-name" }, "attlas"));
  const header = make("header", { class: "top" }, brand, title, picker, part.search, tools);
  const middle = make("div", { class: "middle" }, part.tour, make("div", { class: "middle-head" }, part.says, part.tools), part.map);
  const body = make("div", { class: "body" }, part.heads, middle, textPane, scrim);
  const footer = make("footer", { class: "foot" }, part.colourbar, part.status);
  part.map.append(notice, part.lines);
  const noscript = [...root.childNodes];
  root.replaceChildren(header, body, footer, live);

  const endings = [];
  const on = (element, event, run) => {
    element.addEventListener(event, run);
    endings.push(() => element.removeEventListener(event, run));
  };

  function connect({ store }) {
    const { info } = store.state;
    notice.remove();
    title.textContent = info.title;
    title.title = [info.title, info.model].filter(Boolean).join(" · ");
    const nameOf = (entry) => layerName(info, info.entries.indexOf(entry));
    const held = (at) => [...info.entries[at].heads.keys(), "mean"].filter((each) => holds(info, at, each));
    const missing = (at, each) => (holds(info, at, each) ? {} : { disabled: true, title: t("not in this file") });
    layer.replaceChildren(...info.entries.map((entry, at) => make("option", { value: String(at), disabled: !held(at).length }, nameOf(entry))));
    on(layer, "change", () => {
      const entry = Number(layer.value);
      const [here, now] = [held(entry), store.state.head];
      store.set({ entry, head: here.includes(now) ? now : here.findLast((each) => each !== "mean") ?? "mean" });
    });
    on(head, "change", () => store.set({ head: head.value === "mean" ? "mean" : Number(head.value) }));
    on(batch, "change", () => store.set({ batch: Number(batch.value) }));
    on(previous, "click", () => store.set(headStep(store.state, -1)));
    on(following, "click", () => store.set(headStep(store.state, 1)));
    on(theme, "click", () => store.set({ theme: nextTheme(store.state) }));
    on(headsButton, "click", () => store.set(paneStep(store.state, "heads", narrow())));
    on(textButton, "click", () => store.set(paneStep(store.state, "text", narrow())));
    on(scrim, "click", () => store.set({ panel: "" }));
    const narrow = () => root.clientWidth < 720;
    const showHead = (state) => {
      const entry = info.entries[state.entry];
      const options = entry.heads.map((number, at) => make("option", { value: String(at), ...missing(state.entry, at) }, t("head {0}", number)));
      options.push(make("option", { value: "mean", ...missing(state.entry, "mean") }, t("mean of {0}", entry.heads.length)));
      head.replaceChildren(...options);
      const texts = Array.from({ length: entry.batch ?? 1 }, (_, at) => make("option", { value: String(at) }, t("text {0}", at)));
      batch.replaceChildren(...texts);
      batch.hidden = texts.length < 2;
      layer.value = String(state.entry);
      head.value = String(state.head);
      batch.value = String(state.batch);
    };
    const showPanes = (state) => {
      const { panel, aside } = state;
      root.dataset.aside = aside;
      root.dataset.panel = panel;
      scrim.hidden = panel !== "heads" && panel !== "text";
      for (const [button, name] of [[headsButton, "heads"], [textButton, "text"]]) {
        const shown = narrow() ? panel === name : aside === "both" || aside === name;
        button.setAttribute("aria-expanded", String(shown));
      }
    };
    const showTheme = (state) => {
      const next = { auto: t("following the system"), light: t("light"), dark: t("dark") }[state.theme];
      theme.textContent = { auto: "◐", light: "○", dark: "●" }[state.theme];
      theme.title = t("Theme: {0}", next);
      theme.setAttribute("aria-label", t("Theme: {0}", next));
    };
    showHead(store.state);
    showPanes(store.state);
    showTheme(store.state);
    endings.push(store.on(["entry", "head", "batch"], showHead));
    endings.push(store.on(["panel", "aside"], showPanes));
    endings.push(store.on("theme", showTheme));
    const watch = new ResizeObserver(() => showPanes(store.state));
    watch.observe(root);
    endings.push(() => watch.disconnect());
    return () => endings.forEach((end) => end());
  }

  let said = 0;
  return {
    ...part,
    connect,
    /** Say a line to people who listen to the page. */
    announce(text) {
      clearTimeout(said);
      said = setTimeout(() => {
        live.textContent = text;
      }, 60);
    },
    fail(text) {
      notice.textContent = t("The atlas cannot be shown: {0}.", text);
      notice.classList.add("bad");
    },
    destroy() {
      clearTimeout(said);
      root.replaceChildren(...noscript);
    },
  };
}

/** The head one before or after, through layers too; the mean of heads stays the mean. */
export function headStep({ info, entry, head }, by) {
  if (info.held) return heldStep({ info, entry, head }, by);
  if (head === "mean") return layerStep({ info, entry, head }, by);
  const next = head + by;
  if (next >= 0 && next < info.entries[entry].heads.length) return { head: next };
  const other = (entry + by + info.entries.length) % info.entries.length;
  return { entry: other, head: by > 0 ? 0 : info.entries[other].heads.length - 1 };
}

/** The same head, one layer before or after. */
export function layerStep({ info, entry, head }, by) {
  if (info.held) return heldStep({ info, entry, head }, by);
  const other = (entry + by + info.entries.length) % info.entries.length;
  return { entry: other, head: head === "mean" ? head : Math.min(head, info.entries[other].heads.length - 1) };
}

// Through the heads that a page without a server holds.
function heldStep({ info, entry, head }, by) {
  const at = info.held.findIndex((each) => each.entry === entry && each.head === head);
  return info.held[(at + by + info.held.length) % info.held.length];
}

function nextTheme({ theme }) {
  return { auto: "light", light: "dark", dark: "auto" }[theme];
}

// Wide pages fold a pane; narrow ones open it as a drawer over the map.
function paneStep({ panel, aside }, name, narrow) {
  if (narrow) return { panel: panel === name ? "" : name };
  const open = { heads: aside === "both" || aside === "heads", text: aside === "both" || aside === "text" };
  open[name] = !open[name];
  return { aside: open.heads && open.text ? "both" : open.heads ? "heads" : open.text ? "text" : "none" };
}
