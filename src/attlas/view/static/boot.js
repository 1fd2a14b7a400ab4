// Starts the page of `attlas view`.

import { getContext } from "./map/canvas.js";
import { keepScrolls, listChanges, moveFocus } from "./growing.js";
import { mount } from "./main.js";
import { DEFAULTS, readHash, writeHash } from "./data/state.js";
import { createHttpTransport } from "./data/transport.js";
import { chooseAside } from "./start.js";

const MAX_WAIT = 4000; // ms after which a page is shown even if its map is not drawn

/** @type {{ root: HTMLElement, page: ReturnType<typeof mount> }} */
let current;

/** Start the page in its element of class "attlas", on the answers of the server. */
export function startPage() {
  openPage(/** @type {HTMLElement} */ (document.querySelector(".attlas")), {});
}

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
 * goes on, the numbers and thumbnails of the heads stay until the new ones are there, and the place, the pin, the focus and
 * what was scrolled stay as the user leaves them meanwhile.
 *
 * @param {State} state
 * @param {boolean} isContinued
 */
async function reopen(state, isContinued) {
  const { entry, head, batch, heads, info, row, column, zoom, pin, span } = state;
  // Panes that stand as a page opens them are those that suit the other text.
  const aside = state.aside === (chooseAside(info).aside ?? DEFAULTS.aside) ? DEFAULTS.aside : state.aside;
  const place = isContinued ? { row, column, zoom, pin, span } : { row: null, column: null, zoom: null, pin: null, span: null };
  const address = writeHash({ ...state, aside, ...place, low: null, high: null });
  // Another text is a step of the browser's Back; Back itself has changed the address already.
  const isOther = readHash(window.location.hash).text !== state.text;
  if (isOther || isContinued) window.history[isOther ? "pushState" : "replaceState"](null, "", `#${address}`);
  const previous = current;
  const shown = await previous.page.ready.catch(() => null);
  const before = shown?.store.state ?? state;
  const root = /** @type {HTMLElement} */ (previous.root.cloneNode(false));
  root.classList.remove("attlas-ready");
  previous.root.after(root);
  const { page } = openPage(root, { entry, head, batch, ...(isContinued ? { heads } : {}) });
  const next = await page.ready.catch(() => null);
  if (isContinued) keepThumbnails(previous.root, root);
  const deadline = performance.now() + MAX_WAIT;
  while (performance.now() < deadline && !root.querySelector(".overlay[aria-busy=false]")) await new Promise((resolve) => setTimeout(resolve, 30));
  if (isContinued && shown && next) {
    next.store.set(listChanges(before, shown));
    keepScrolls(previous.root, root);
  }
  const focus = moveFocus(previous.root, root, isContinued);
  previous.page.destroy();
  previous.root.remove();
  focus();
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
