// Starts the page of `attlas view`.

import { mount } from "./main.js";
import { writeHash } from "./state.js";
import { httpTransport } from "./transport.js";

const MAX_WAIT = 4000; // ms until a page whose map is not drawn is shown all the same

let current = null;
open(document.querySelector(".attlas"), {});

function open(root, initial) {
  current = { root, page: mount(root, httpTransport("./"), { hash: true, initial, reopen }) };
  return current;
}

// Another text was read: its page is built below the window, and takes the place of this one once its map is drawn.
async function reopen(state) {
  const { entry, head, batch } = state;
  const address = writeHash({ ...state, row: null, column: null, zoom: null, pin: null, span: null, low: null, high: null });
  window.history.replaceState(window.history.state, "", `#${address}`);
  const previous = current;
  const root = previous.root.cloneNode(false);
  root.classList.remove("attlas-ready");
  previous.root.after(root);
  const { page } = open(root, { entry, head, batch });
  await page.ready.catch(() => {});
  const deadline = performance.now() + MAX_WAIT;
  while (performance.now() < deadline && !root.querySelector(".overlay[aria-busy=false]")) await new Promise((resolve) => setTimeout(resolve, 30));
  const focusedKey = previous.root.contains(document.activeElement) ? document.activeElement.dataset.keep : undefined;
  previous.page.destroy();
  previous.root.remove();
  if (focusedKey) root.querySelector(`[data-keep="${focusedKey}"]`)?.focus();
}
