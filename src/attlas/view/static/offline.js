// Starts the page of a single file.

import { make } from "./panels/elements.js";
import { mount } from "./main.js";
import { describeMissing, describeNumbers, createPackedTransport } from "./data/packed.js";

export function startOffline() {
  const data = JSON.parse(document.getElementById("attlas-data").textContent);
  const root = document.querySelector(".attlas");
  const { ready } = mount(root, createPackedTransport(data), { hash: true, initial: data.state, numbers: describeNumbers(data) });
  ready.then(() => root.append(make("p", { class: "offline-note" }, describeMissing(data)))).catch(() => {});
}
