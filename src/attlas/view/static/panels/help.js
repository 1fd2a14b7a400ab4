// The keys, and what the numbers are.

import { createDialog, createLanguageButton, make } from "./elements.js";
import { isRollout } from "../data/numbers.js";
import { t } from "../words/words.js";

/** @returns {[title: string, rows: [key: string, does: string][]][]} */
const listKeys = () => [
  [t("Moving"), [
    ["← ↑ → ↓", t("move the map; with Shift by a screen")],
    ["+ −", t("nearer, farther")],
    ["0", t("the whole matrix")],
    ["d", t("to the diagonal")],
    ["m", t("show or hide the minimap while zoomed in")],
    ["o", t("the outline of the text")],
    [t("drag, wheel, pinch"), t("move, zoom about the pointer")],
  ]],
  [t("Heads"), [
    ["[ ]", t("previous, next head")],
    ["{ }", t("previous, next layer")],
    [t("Ctrl + click"), t("a colour of its own in the map for up to four heads; Ctrl + Enter does the same")],
    [t("Shift + click"), t("a second head, linked to the first; Shift + Enter does the same")],
  ]],
  [t("Reading"), [
    [t("Enter, click"), t("pin the cell under the crosshair: the text shows its row")],
    ["w", t("why the pinned weight is where it is")],
    ["/", t("search: text, 50000-60000, or 60321,102")],
    ["Escape", t("let go of the pin, close what is open")],
    ["n p", t("next, previous step of a tour")],
    ["f", t("fly from the whole matrix to two words, or along the bookmarks")],
    ["?", t("this page")],
  ]],
];

/** @param {Info} info */
const hasSoftmaxAlone = (info) => info.entries.every((entry) => entry.softmax !== false || isRollout(entry));
/**
 * @param {Info} info
 * @returns {[title: string, text: string]}
 */
const describeExact = (info) => [
  t("Every number is exact"),
  !hasSoftmaxAlone(info) ? t("Weights in the text pane, in lists, cells and exported tables are float32, computed for this request from what the layer was given. None is read from the picture.") : t("Weights in the text pane, in lists, cells and exported tables are float32 values of softmax(score(Q, K)), computed for this request from queries, keys and one number a row. None is read from the picture."),
];
/**
 * @param {Info} info
 * @returns {[title: string, text: string][]}
 */
const listFacts = (info) => [
  [
    t("How to read the map"),
    t("A row is a token, the query; a column is a token that it attends to, a key. Dark is much, in the dark theme bright is much; the colour bar says it for each palette. The weights of a row add up to 1."),
  ],
  [
    t("The picture holds codes"),
    t("A pixel is a 16-bit code of log₂ of a weight, from 2⁻⁶⁴ to 1, at most 0.034 % off. That is finer than a screen shows, and no small weight is lost."),
  ],
  ...(info.entries.every(({ shares }) => shares !== false) ? [] : [/** @type {[title: string, text: string]} */ ([
    t("Weights of both signs"),
    t("Weights of linear attention and differences of matrices may be negative, and the weights of a row need not add up to 1. Blue is above 0, red below. Their codes hold a sign and log₂ of the size, at most 0.068 % off. The largest weights are those of largest size."),
  ])]),
  ...(!info.entries.some(isRollout) ? [] : [/** @type {[title: string, text: string]} */ ([
    t("Rollout"),
    t("Behind the layers stand the products of the first one, two, … layers: of each, half the mean of its heads and half the token itself, which the residual connection carries on. A row says how much of each token the layers together bring to a query, and adds up to 1. Values and the layers between attention are not in it."),
  ])]),
  [
    t("A pixel of many cells"),
    t("Zoomed out, one pixel stands for a block. “mean” is the mean over the block’s allowed pairs, pooled exactly from sums and counts; “max” is the largest weight in it."),
  ],
  [
    t("Masked, zero, not yet known"),
    t("Hatched: no pair is allowed there. The lowest colour: allowed, and below the range. Flat grey: not computed yet; the status line says how far the pass over the matrix is."),
  ],
  [
    t("Without the first key"),
    t("Many heads rest on the first token. Excluding it drops that column and divides each row by what is left, so that rows sum to 1 again. Every number shown is then of the changed matrix, and the page says so."),
  ],
  [
    t("Sampled thumbnails"),
    t("A thumbnail with a dotted corner shows one exact query for each of its rows, until the whole head has been read."),
  ],
];

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountHelp(element, { store, uid, root, numbers }) {
  const openButton = make("button", { type: "button", class: "icon", title: t("Keys, and where the numbers come from  ?"), "aria-label": t("Help") }, "?");
  openButton.addEventListener("click", () => store.set({ panel: "help" }));
  element.append(openButton);
  const dialog = createDialog(root, t("Keys and numbers"), uid, () => {
    if (store.state.panel === "help") store.set({ panel: "" });
  });
  const columns = listKeys().map(([title, rows]) =>
    make(
      "section",
      {},
      make("h3", {}, title),
      make("dl", { class: "keys" }, ...rows.map(([key, does]) => make("div", {}, make("dt", {}, ...createKeyCaps(key)), make("dd", {}, does)))),
    ),
  );
  const facts = listFacts(store.state.info);
  const factsSection = make(
    "section",
    { class: "facts" },
    make("h3", {}, t("Where the numbers come from")),
    make("dl", {}, ...[facts[0], numbers ?? describeExact(store.state.info), ...facts.slice(1)].map(([title, text]) => make("div", {}, make("dt", {}, title), make("dd", {}, text)))),
  );
  if (root.classList.contains("attlas-page")) dialog.element.querySelector(".dialog-close")?.before(createLanguageButton(store));
  dialog.body.append(make("div", { class: "help-keys" }, ...columns), factsSection);
  dialog.element.classList.add("help");
  dialog.body.tabIndex = 0; // so that keys can scroll it
  const unsubscribe = store.on(["panel"], () => (store.state.panel === "help" ? dialog.open() : dialog.close()));
  if (store.state.panel === "help") dialog.open();
  return {
    destroy() {
      unsubscribe();
      dialog.destroy();
      element.replaceChildren();
    },
  };
}

// "[ ]" as two <kbd> elements; words stay text.
/** @param {string} text */
function createKeyCaps(text) {
  return text.split(/( \+ |, | )/).map((part) => {
    if (/^( \+ |, | )$/.test(part)) return part;
    return /^(drag|wheel|pinch|click|拖动|滚轮|双指|点击)$/.test(part) ? part : make("kbd", {}, part);
  });
}
