// Starts the page of a single file.

import { readData } from "./data/base64.js";
import { createProjectLink, make } from "./panels/elements.js";
import { mount } from "./main.js";
import { describeMissing, describeNumbers, createPackedTransport } from "./data/packed.js";

export function startOffline() {
  /** @type {{ root: HTMLElement, data: PackedData }} */
  const { root, data } = readData();
  const { ready } = mount(root, createPackedTransport(data), { hash: true, initial: data.state, numbers: describeNumbers(data) });
  ready.then(() => root.append(make("p", { class: "offline-note" }, describeMissing(data), ...createProjectLink(data.info)))).catch(() => {});
}
