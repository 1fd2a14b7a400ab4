// Starts the page of a single file.

import { readData } from "./data/base64.js";
import { createProjectLink, make } from "./panels/elements.js";
import { mount } from "./main.js";
import { describeMissing, describeNumbers, createPackedTransport } from "./data/packed.js";

export function startOffline() {
  /** @type {{ root: HTMLElement, data: PackedData }} */
  const { root, data } = readData();
  mountPacked(root, data).ready.catch(() => {}); // the page shows the error
}

/**
 * Start the page on packed data, with a note of what they hold, and what `more` has behind it.
 *
 * @param {HTMLElement} root
 * @param {PackedData} data
 * @param {...Child} more
 */
export function mountPacked(root, data, ...more) {
  const page = mount(root, createPackedTransport(data), { hash: true, initial: data.state, numbers: describeNumbers(data) });
  const note = page.ready.then(() => root.append(make("p", { class: "offline-note" }, describeMissing(data), ...createProjectLink(data.info), ...more)));
  return { ready: note, destroy: page.destroy };
}
