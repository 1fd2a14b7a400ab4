// Starts the page of `attlas view`.

import { getContext } from "./map/canvas.js";
import { mount } from "./main.js";
import { DEFAULTS, readHash, writeHash } from "./data/state.js";
import { createHttpTransport } from "./data/transport.js";
import { chooseAside } from "./start.js";
import { fetchTranslations } from "./words/words.js";

const MAX_WAIT = 4000; // ms after which a page is shown even if its map is not drawn

/** @type {{ root: HTMLElement, page: ReturnType<typeof mount> }} */
let current;
await fetchTranslations("./words/");
openPage(/** @type {HTMLElement} */ (document.querySelector(".attlas")), {});

/**
 * @param {HTMLElement} root
 * @param {Partial<State>} initial
 */
function openPage(root, initial) {
  current = { root, page: mount(root, createHttpTransport("./"), { hash: true, initial, reopen }) };
  return current;
}

/**
 * Builds the page of another text below this one, and replaces this one once the new map is drawn. Of a text that only
 * goes on, the numbers and thumbnails of the heads stay until the new ones are there.
 *
 * @param {State} state
 * @param {boolean} isContinued
 */
async function reopen(state, isContinued) {
  const { entry, head, batch, heads, info } = state;
  // Panes that stand as a page opens them are those that suit the other text.
  const aside = state.aside === (chooseAside(info).aside ?? DEFAULTS.aside) ? DEFAULTS.aside : state.aside;
  const address = writeHash({ ...state, aside, row: null, column: null, zoom: null, pin: null, span: null, low: null, high: null });
  // Another text is a step of the browser's Back; Back itself has changed the address already.
  const isOther = readHash(window.location.hash).text !== state.text;
  if (isOther || isContinued) window.history[isOther ? "pushState" : "replaceState"](null, "", `#${address}`);
  const previous = current;
  const root = /** @type {HTMLElement} */ (previous.root.cloneNode(false));
  root.classList.remove("attlas-ready");
  previous.root.after(root);
  const { page } = openPage(root, { entry, head, batch, ...(isContinued ? { heads } : {}) });
  await page.ready.catch(() => {});
  if (isContinued) keepThumbnails(previous.root, root);
  const deadline = performance.now() + MAX_WAIT;
  while (performance.now() < deadline && !root.querySelector(".overlay[aria-busy=false]")) await new Promise((resolve) => setTimeout(resolve, 30));
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const focusedKey = previous.root.contains(focused) ? focused?.dataset.keep : undefined;
  previous.page.destroy();
  previous.root.remove();
  if (focusedKey) /** @type {HTMLElement | null} */ (root.querySelector(`[data-keep="${focusedKey}"]`))?.focus();
}

/**
 * Shows the thumbnails of one page on another one, where that has none yet.
 *
 * @param {Element} from
 * @param {Element} to
 */
function keepThumbnails(from, to) {
  const listCanvases = (/** @type {Element} */ root, /** @type {string} */ selector) => /** @type {HTMLCanvasElement[]} */ ([...root.querySelectorAll(selector)]);
  const findButton = (/** @type {Element} */ canvas) => /** @type {HTMLElement} */ (canvas.closest("[data-head]"));
  const pictures = new Map(listCanvases(from, "[data-head] canvas").map((canvas) => [findButton(canvas).dataset.head, canvas]));
  for (const canvas of listCanvases(to, ".thumb:not(.drawn) canvas")) {
    const button = findButton(canvas);
    const picture = pictures.get(button.dataset.head);
    if (!picture || picture.width < 2) continue; // it was never drawn
    [canvas.width, canvas.height] = [picture.width, picture.height];
    getContext(canvas).drawImage(picture, 0, 0);
    button.classList.add("drawn");
  }
}
