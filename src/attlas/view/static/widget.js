// Starts the page in the output of a notebook cell (the protocol of anywidget).

import { make } from "./panels/elements.js";
import { mount } from "./main.js";
import { createMessageTransport } from "./data/messages.js";

/** @param {{ model: WidgetModel, el: HTMLElement }} options */
export function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "attlas attlas-widget";
  root.style.height = `${model.get("height")}px`;
  // Shortcuts of the notebook (a, b, dd, ...) must not act on cells while the page has the focus.
  root.dataset.lmSuppressShortcuts = "true";
  root.classList.add("jp-mod-accept-text");
  root.addEventListener("keydown", (event) => event.stopPropagation());
  // Until the page is there, a picture below it stands for it; in an exported notebook, where no kernel answers, for ever.
  const stillClass = model.get("still_class");
  const hideStill = make("style", {}, `.${stillClass} { display: none; }`);
  root.classList.toggle("attlas-waiting", Boolean(stillClass));
  el.append(root);
  const transport = createMessageTransport(model);
  const page = mount(root, transport, { hash: false, initial: model.get("initial") });
  page.ready.then(() => {
    root.classList.remove("attlas-waiting");
    if (stillClass) document.head.append(hideStill);
  }, () => {}); // the page says what failed
  const resize = () => {
    root.style.height = `${model.get("height")}px`;
  };
  model.on("change:height", resize);
  return () => {
    model.off("change:height", resize);
    page.destroy();
    hideStill.remove();
    transport.destroy();
    root.remove();
  };
}
