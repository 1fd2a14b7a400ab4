// Starts the page of `attlas view`.

import { mount } from "./main.js";
import { writeHash } from "./state.js";
import { createHttpTransport } from "./transport.js";

const MAX_WAIT = 4000; // ms after which a page is shown even if its map is not drawn

let current = null;
openPage(document.querySelector(".attlas"), {});

function openPage(root, initial) {
  current = { root, page: mount(root, createHttpTransport("./"), { hash: true, initial, reopen }) };
  return current;
}

// Builds the page of another text below this one, and replaces this one once the new map is drawn.
async function reopen(state) {
  const { entry, head, batch } = state;
  const address = writeHash({ ...state, row: null, column: null, zoom: null, pin: null, span: null, low: null, high: null });
  window.history.replaceState(window.history.state, "", `#${address}`);
  const previous = current;
  const root = previous.root.cloneNode(false);
  root.classList.remove("attlas-ready");
  previous.root.after(root);
  const { page } = openPage(root, { entry, head, batch });
  await page.ready.catch(() => {});
  const deadline = performance.now() + MAX_WAIT;
  while (performance.now() < deadline && !root.querySelector(".overlay[aria-busy=false]")) await new Promise((resolve) => setTimeout(resolve, 30));
  const focusedKey = previous.root.contains(document.activeElement) ? document.activeElement.dataset.keep : undefined;
  previous.page.destroy();
  previous.root.remove();
  if (focusedKey) root.querySelector(`[data-keep="${focusedKey}"]`)?.focus();
}
