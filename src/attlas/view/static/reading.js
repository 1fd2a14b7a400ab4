// A text of the user's own: typed here, read by the model, and continued token by token.

import { make } from "./elements.js";
import { whole } from "./numbers.js";
import { t } from "./words.js";

const POLL = 200; // ms between two looks at how far the model is
const MANY = 10; // tokens that the second button writes

let draft = null; // what was typed and not read yet; it outlives the page of one text

/** Mount the box above the text, where there is a model. `reopen` builds the page anew once another text is there. */
export function mountReading(element, { store, transport, announce, uid, reopen }) {
  const { info } = store.state;
  const { reading } = info;
  element.hidden = !reading || !reopen;
  if (element.hidden) return { destroy() {} };
  let timer = 0;
  let over = false;
  const box = make("textarea", { rows: 3, maxLength: reading.characters, spellcheck: false, value: draft ?? reading.text, placeholder: t("Type a text: {0} reads it.", reading.model), "aria-label": t("Your text"), "data-keep": "text" });
  const button = (text, title, run, keep) => {
    const made = make("button", { type: "button", class: "toggle", title, "data-keep": keep }, text);
    made.addEventListener("click", run);
    return made;
  };
  const read = button(t("Read"), t("Let {0} read this text  Ctrl+Enter", reading.model), () => send(0), "read");
  const next = button(t("+ 1 token"), t("Add the likeliest next token"), () => send(1), "next");
  const many = button(t("+ {0} tokens", MANY), t("Add the likeliest next token, {0} times", MANY), () => send(MANY), "many");
  const stop = button(t("Stop"), t("Stop the model"), () => post({ stop: true }), "stop");
  const says = make("p", { class: "reading-says", id: uid("reading"), role: "status" });
  const bar = make("progress", { max: 1, hidden: true, "aria-label": t("Progress of the model") });
  box.setAttribute("aria-describedby", says.id);
  element.replaceChildren(box, make("div", { class: "reading-buttons" }, read, next, many, stop, bar), says);

  box.addEventListener("input", () => {
    draft = box.value;
    says.textContent = "";
  });
  box.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(0);
  });
  const tell = (text) => {
    says.textContent = text;
    if (text) announce(text);
  };
  const busy = (on) => {
    // Not disabled, so that the focus stays where it is.
    for (const each of [read, next, many]) each.setAttribute("aria-disabled", String(on));
    stop.hidden = bar.hidden = !on;
  };
  async function post(content) {
    try {
      await transport.send("read", content);
      return true;
    } catch (error) {
      tell(`${error.message}.`);
      return false;
    }
  }
  async function send(more) {
    if (!stop.hidden) return undefined;
    const isNew = box.value !== reading.text && box.value.trim() !== "";
    if (!isNew && !more) return tell(box.value.trim() ? t("This text is read already.") : t("Type a text first."));
    tell("");
    if (!(await post({ text: isNew ? box.value : null, more }))) return undefined;
    draft = null;
    return watch();
  }
  async function watch() {
    clearTimeout(timer);
    let status;
    try {
      status = (await transport.get("reading")).json;
    } catch (error) {
      return tell(`${error.message}.`);
    }
    if (over) return undefined;
    if (status.key !== info.key) {
      over = true;
      return reopen(store.state);
    }
    const { doing, done, total, error } = status;
    busy(Boolean(doing));
    if (total) bar.value = done / total;
    else bar.removeAttribute("value");
    if (doing) {
      says.textContent = { loading: t("loading {0} …", reading.model), reading: t("reading …"), writing: t("writing token {0} of {1} …", whole(done + 1), whole(total)) }[doing];
      timer = setTimeout(watch, POLL);
    } else tell(error ? `${error}.` : t("{0} tokens read.", whole(status.tokens)));
    return undefined;
  }
  busy(false);
  if (reading.text) watch(); // a text of several steps may still be written
  return {
    destroy() {
      over = true;
      clearTimeout(timer);
      element.replaceChildren();
    },
  };
}
