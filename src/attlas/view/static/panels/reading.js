// The user's own text: typed here, read by the model, and continued token by token.

import { make } from "./elements.js";
import { formatBytes, formatInteger } from "../data/numbers.js";
import { t } from "../words/words.js";

const POLL_INTERVAL = 200; // ms between two requests for the progress of the model
const MANY_TOKENS = 10; // tokens that the second button writes
const STANDING_INTERVAL = 50; // ms between two looks whether the page before is gone
const LEAST_GROWTH = 400; // ms for which a page stands at least while tokens are written,
const SHARE_OF_GROWTH = 2; // and how many times as long as the next one took to be built

/** @type {string | null} */
let draft = null; // typed text that was not read yet; kept when the page is built again
let asked = 0; // when the page that is built was asked for, by performance.now(); 0 once it stands

/**
 * Mount the box above the text, where there is a model. `reopen` builds the page again once another text was read.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountReading(element, { store, transport, map, announce, uid, root, reopen }) {
  const { info } = store.state;
  const { reading } = info;
  element.hidden = !reading || !reopen;
  if (!reading || !reopen) return { destroy() {} };
  const [facts, rebuild] = [reading, reopen];
  let timer = 0;
  let standingTimer = 0;
  let destroyed = false;
  let isAsked = false; // whether this page waits for a text of its own
  let isContinued = false; // whether that is the shown text with more tokens
  let isPressed = false; // whether something is being dragged
  let mayGrowFrom = 0; // when a page with more tokens may take the place of this one; 0 until this one stands
  const lastBefore = facts.last;
  const textArea = make("textarea", { rows: 3, maxLength: facts.characters, spellcheck: false, value: draft ?? facts.text, placeholder: t("Type a text: {0} reads it.", facts.model), "aria-label": t("Your text"), "data-keep": "text" });
  const createButton = (/** @type {string} */ text, /** @type {string} */ title, /** @type {() => void} */ onClick, /** @type {string} */ keep) => {
    const element = make("button", { type: "button", class: "toggle", title, "data-keep": keep }, text);
    element.addEventListener("click", onClick);
    return element;
  };
  const readButton = createButton(t("Read"), t("Let {0} read this text  Ctrl+Enter", facts.model), () => requestReading(0), "read");
  const nextButton = createButton(t("+ 1 token"), t("Add the likeliest next token"), () => requestReading(1), "next");
  const manyButton = createButton(t("+ {0} tokens", MANY_TOKENS), t("Add the likeliest next token, {0} times", MANY_TOKENS), () => requestReading(MANY_TOKENS), "many");
  const onButton = createButton(t("Write on"), t("Add the likeliest next token, again and again, until you stop it"), () => requestReading(facts.more), "on");
  const stopButton = createButton(t("Stop"), t("Stop the model"), () => postRead({ stop: true }), "stop");
  const message = make("p", { class: "reading-says", id: uid("reading"), role: "status" });
  const progressBar = make("progress", { max: 1, hidden: true, "aria-label": t("Progress of the model") });
  textArea.setAttribute("aria-describedby", message.id);
  const memory = facts.parts && make("p", { class: "reading-says" }, t("Texts are read with their parts, for Why?: about {0} for 1,000 tokens, at most {1} in all.", formatBytes(1000 * facts.parts.per_token), formatBytes(facts.parts.most)));
  element.replaceChildren(textArea, make("div", { class: "reading-buttons" }, readButton, nextButton, manyButton, onButton, stopButton, progressBar), message, ...(memory ? [memory] : []));

  // Loading takes long: it begins when the user begins.
  textArea.addEventListener("focus", () => postRead({ load: true }), { once: true });
  textArea.addEventListener("input", () => {
    draft = textArea.value;
    message.textContent = "";
  });
  textArea.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) requestReading(0);
  });
  const showMessage = (/** @type {string} */ text) => {
    message.textContent = text;
    if (text) announce(text);
  };
  const setBusy = (/** @type {boolean} */ on) => {
    // Not disabled, so that the focus stays where it is.
    for (const each of [readButton, nextButton, manyButton, onButton]) each.setAttribute("aria-disabled", String(on));
    stopButton.hidden = progressBar.hidden = !on;
  };
  /** @param {{ text: string | null, more: number, of: number } | { load: true } | { stop: true }} content */
  async function postRead(content) {
    try {
      await transport.send?.("read", content);
      return true;
    } catch (error) {
      showMessage(`${error.message}.`);
      return false;
    }
  }
  /** @param {number} more */
  async function requestReading(more) {
    if (!stopButton.hidden) return undefined;
    const isNew = textArea.value !== facts.text && textArea.value.trim() !== "";
    isAsked = true;
    if (!isNew && !more) return showMessage(textArea.value.trim() ? t("This text is read already.") : t("Type a text first."));
    isContinued = !isNew;
    showMessage("");
    if (!(await postRead({ text: isNew ? textArea.value : null, more, of: facts.number }))) return undefined;
    draft = null;
    return pollStatus();
  }
  async function pollStatus() {
    clearTimeout(timer);
    let status;
    try {
      status = (await transport.get("reading", { text: facts.number })).json;
    } catch (error) {
      return showMessage(`${error.message}.`);
    }
    if (destroyed) return undefined;
    const { doing, done, total, error } = status;
    const hasGrown = status.key !== info.key;
    const isOther = isAsked && status.last !== lastBefore;
    if ((hasGrown && mayGrow(Boolean(doing))) || isOther) {
      destroyed = true;
      asked = performance.now();
      const whole = map.fitted() ? { row: null, column: null, zoom: null } : {};
      return rebuild({ ...store.state, ...whole, text: hasGrown ? facts.number : status.last }, hasGrown || isContinued);
    }
    setBusy(Boolean(doing));
    if (total) progressBar.value = done / total;
    else progressBar.removeAttribute("value");
    if (doing || hasGrown) {
      if (doing) message.textContent = { loading: t("loading {0} …", facts.model), measuring: t("measuring the heads of {0}, once …", facts.model), reading: t("reading …"), writing: t("writing token {0} of {1} …", formatInteger(done + 1), formatInteger(total)) }[doing];
      timer = setTimeout(pollStatus, POLL_INTERVAL);
    } else showMessage([error ? `${error}.` : t("{0} tokens read.", formatInteger(status.tokens)), ...(error ? [] : describeParts(status))].join(t(" ")));
    return undefined;
  }
  // Whether the user drags something, types into a field, or has opened a window: a new page would take that away.
  const isAtWork = () => isPressed || Boolean(root.querySelector("dialog[open]")) || Boolean(root.contains(document.activeElement) && document.activeElement?.matches("input:not([data-keep], [type=range], [type=checkbox])"));
  // While tokens are written, the page stands long enough to be used, and nothing is taken from the user's hand.
  const mayGrow = (/** @type {boolean} */ isWriting) => {
    return mayGrowFrom > 0 && !isAtWork() && (!isWriting || performance.now() >= mayGrowFrom);
  };
  // Once the page before is gone, this one stands, and it is known how long it took to be built.
  const noteStanding = () => {
    if (root.previousElementSibling?.matches(".attlas")) {
      standingTimer = setTimeout(noteStanding, STANDING_INTERVAL);
      return;
    }
    const now = performance.now();
    mayGrowFrom = now + Math.max(LEAST_GROWTH, SHARE_OF_GROWTH * (asked ? now - asked : 0));
    asked = 0;
  };
  const press = () => (isPressed = true);
  const release = () => (isPressed = false);
  root.addEventListener("pointerdown", press, true);
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, release, true);
  setBusy(false);
  noteStanding();
  if (facts.text) pollStatus(); // a text of several steps may still be written
  return {
    destroy() {
      destroyed = true;
      clearTimeout(timer);
      clearTimeout(standingTimer);
      root.removeEventListener("pointerdown", press, true);
      for (const end of ["pointerup", "pointercancel"]) window.removeEventListener(end, release, true);
      element.replaceChildren();
    },
  };
}

/**
 * What parts of the text take, or why it has none; nothing where texts are read without.
 *
 * @param {Pick<ReadingStatus, "parts">} status
 */
function describeParts({ parts }) {
  if (parts?.reason) return [t("No Why? on this text: {0}.", t(...parts.reason))];
  return parts?.bytes ? [t("Its parts take {0}.", formatBytes(parts.bytes))] : [];
}
