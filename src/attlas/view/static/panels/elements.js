// Small pieces that every panel is made of.

import { LANGUAGES, language, t } from "../words/words.js";

/**
 * An element with its attributes and children. Names of properties (value, checked, hidden, ...) are set as properties,
 * everything else as attributes; nothing is ever parsed as HTML, so that no token can be markup.
 *
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Attributes} attributes
 * @param {...Child} children
 */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = String(value);
    else if (name in element && !name.startsWith("aria-")) Object.assign(element, { [name]: value });
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/**
 * A row of buttons of which exactly one is pressed.
 *
 * @template {string | number} T
 * @param {string} label
 * @param {Option<T>[]} options
 * @param {(value: T) => void} onPick
 */
export function createSegmented(label, options, onPick) {
  const element = make("div", { class: "segmented", role: "group", "aria-label": label });
  const buttons = options.map(({ value, text, title }) => {
    const button = make("button", { type: "button", title }, text);
    button.addEventListener("click", () => onPick(value));
    element.append(button);
    return { value, button };
  });
  return {
    element,
    /**
     * Press one button; others may be disabled, with the reason as their title.
     *
     * @param {T} chosen
     * @param {Record<string, string | boolean>} disabled
     */
    set(chosen, disabled = {}) {
      for (const { value, button } of buttons) {
        const reason = disabled[String(value)];
        button.setAttribute("aria-pressed", String(value === chosen));
        button.disabled = Boolean(reason);
        if (typeof reason === "string") button.title = reason;
        else button.title = options.find((option) => option.value === value)?.title ?? "";
      }
    },
  };
}

/**
 * A labelled <select>.
 *
 * @template {string} T
 * @param {string} label
 * @param {Option<T>[]} options
 * @param {(value: T) => void} onPick
 * @param {{ hidden?: boolean }} [shown]
 */
export function createPicker(label, options, onPick, { hidden = true } = {}) {
  const select = make("select", { "aria-label": hidden ? label : undefined });
  const fill = (/** @type {Option<T>[]} */ next) => select.replaceChildren(...next.map(({ value, text }) => make("option", { value }, text)));
  fill(options);
  select.addEventListener("change", () => onPick(/** @type {T} */ (select.value)));
  const element = hidden ? select : make("label", { class: "picker" }, make("span", {}, label), select);
  return {
    element,
    select,
    fill,
    set(/** @type {T} */ value) {
      select.value = value;
    },
  };
}

/**
 * A function that runs `milliseconds` after its last call.
 *
 * @param {() => void} action
 * @param {number} milliseconds
 */
export function debounce(action, milliseconds) {
  let timer = 0;
  const schedule = () => {
    clearTimeout(timer);
    timer = setTimeout(action, milliseconds);
  };
  schedule.cancel = () => clearTimeout(timer);
  return schedule;
}

/**
 * A modal box: the browser's own <dialog> keeps the focus inside, closes on Escape and gives the focus back.
 *
 * @param {HTMLElement} parent
 * @param {string} title
 * @param {MakeId} uid
 * @param {() => void} onClose
 */
export function createDialog(parent, title, uid, onClose) {
  const heading = make("h2", { id: uid("dialog") }, title);
  const closeButton = make("button", { type: "button", class: "dialog-close", "aria-label": t("Close") }, "×");
  const body = make("div", { class: "dialog-body" });
  const element = make(
    "dialog",
    { class: "dialog", "aria-labelledby": heading.id },
    make("div", { class: "dialog-head" }, heading, closeButton),
    body,
  );
  closeButton.addEventListener("click", () => element.close());
  element.addEventListener("pointerdown", (event) => {
    if (event.target === element) element.close(); // the backdrop is the dialog's own
  });
  // Keys pressed in a dialog must not move the map.
  element.addEventListener("keydown", (event) => event.stopPropagation());
  element.addEventListener("close", onClose);
  parent.append(element);
  return {
    element,
    body,
    open() {
      if (element.open) return;
      element.showModal();
      /** @type {HTMLElement} */ (body.querySelector("button:enabled") ?? body).focus(); // not the close button, which comes first
    },
    close() {
      if (element.open) element.close();
    },
    destroy() {
      element.remove();
    },
  };
}

/**
 * The letters and digits of a text, as a part of a file name.
 *
 * @param {string} text
 * @param {number} longest
 */
export function formatFileName(text, longest) {
  return text.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, longest);
}

// A canvas as the bytes of a PNG.
/** @param {HTMLCanvasElement} canvas */
export async function encodePng(canvas) {
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  if (!blob) throw new Error(t("The browser could not make the picture"));
  return blob;
}

/**
 * Save a file through the browser.
 *
 * @param {string} name
 * @param {Blob} blob
 */
export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/**
 * A button that shows the page in the other language; the address says which.
 *
 * @param {Pick<Store<{ language: Language | null, panel: string }>, "set">} store
 */
export function createLanguageButton(store) {
  const other = language === "en" ? "zh" : "en";
  const button = make("button", { type: "button", class: "text-button", lang: other }, LANGUAGES[other]);
  button.addEventListener("click", () => {
    store.set({ language: other, panel: "" });
    setTimeout(() => window.location.reload(), 400); // after the address has changed
  });
  return button;
}

/**
 * A link to the project behind a text, where its address is known.
 *
 * @param {{ project?: string | null }} info
 * @returns {(Node | string)[]}
 */
export function createProjectLink({ project }) {
  return project ? [" ", make("a", { href: project, rel: "noreferrer" }, t("Made with attlas: {0}", project.replace("https://", "")))] : [];
}

/**
 * Make a row of buttons one stop of the keyboard: arrows, Home and End go from one to the next. What buttons open below
 * them has stops of its own. Returns the function that ends this.
 *
 * @param {HTMLElement} element
 * @param {string} label
 */
export function createToolbar(element, label) {
  element.setAttribute("role", "toolbar");
  element.setAttribute("aria-label", label);
  const listButtons = () => [...element.querySelectorAll("button")].filter((button) => !button.closest("[role=group], dialog"));
  const listVisible = () => listButtons().filter((button) => !button.disabled && button.checkVisibility());
  const setStop = (/** @type {HTMLButtonElement | undefined} */ stop) => listButtons().forEach((button) => (button.tabIndex = button === stop ? 0 : -1));
  // A window that becomes narrower hides buttons, and with them the stop.
  const keepStop = () => {
    const visible = listVisible();
    setStop(visible.find((button) => button.tabIndex === 0) ?? visible[0]);
  };
  const handleFocus = (/** @type {FocusEvent} */ { target }) => {
    if (listButtons().includes(/** @type {HTMLButtonElement} */ (target))) setStop(/** @type {HTMLButtonElement} */ (target));
  };
  const handleKey = (/** @type {KeyboardEvent} */ event) => {
    const visible = listVisible();
    const index = visible.indexOf(/** @type {HTMLButtonElement} */ (event.target));
    const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: visible.length - 1 }[event.key];
    if (index < 0 || next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    visible[(next + visible.length) % visible.length].focus();
  };
  element.addEventListener("focusin", handleFocus);
  element.addEventListener("keydown", handleKey);
  const resizeObserver = new ResizeObserver(keepStop);
  resizeObserver.observe(element);
  keepStop();
  return () => {
    resizeObserver.disconnect();
    element.removeEventListener("focusin", handleFocus);
    element.removeEventListener("keydown", handleKey);
  };
}
