// Bookmarks: named views stored with the recording, a dialog to edit them, and the start of a tour through them.

import { createDialog, make } from "./elements.js";
import { writeView } from "../data/state.js";
import { goToBookmark } from "./tour.js";
import { t } from "../words/words.js";

/**
 * Mount the button in `element`, and the list.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountBookmarks(element, { store, transport, uid, root }) {
  let list = store.state.info.bookmarks ?? []; // as it is shown
  let saved = list; // as the server stores it
  let pending = Promise.resolve();
  const canSave = Boolean(transport.send);
  const openButton = make("button", { type: "button", class: "icon", hidden: !canSave && !list.length, title: t("Bookmarks: named views of this recording, and a tour through them"), "aria-label": t("Bookmarks") }, "☆");
  openButton.addEventListener("click", () => store.set({ panel: "bookmarks" }));
  element.append(openButton);
  const dialog = createDialog(root, t("Bookmarks"), uid, () => {
    if (store.state.panel === "bookmarks") store.set({ panel: "" });
  });
  dialog.element.classList.add("bookmarks");
  const rows = make("ol", { class: "bookmark-rows" });
  const message = make("p", { class: "export-line", role: "status" });
  const add = make("button", { type: "button", class: "toggle", hidden: !canSave }, t("Bookmark this view"));
  const startButton = make("button", { type: "button", class: "toggle" }, t("Start the tour"));
  startButton.addEventListener("click", () => goToBookmark(store, 0));
  add.addEventListener("click", () => {
    const { info, entry, head } = store.state;
    const layer = info.entries[entry];
    const name = t("Head {0}", `${layer.layer}·${head === "mean" ? t("mean") : layer.heads[head]}`);
    save([...list, { name, at: writeView(store.state), says: "" }]);
  });
  dialog.body.append(rows, make("div", { class: "bookmark-buttons" }, add, startButton), message);

  /**
   * Shows a list and sends it to the server. If that fails, the stored list is shown again. Requests are sent one after
   * another, so that edits made meanwhile are sent by the next one.
   *
   * @param {Bookmark[]} next
   * @param {boolean} [typed]
   */
  function save(next, typed = false) {
    list = next;
    if (!typed) showRows();
    pending = pending.then(sendBookmarks);
  }
  async function sendBookmarks() {
    try {
      const answer = await transport.send?.("bookmarks", { bookmarks: list, before: saved, v: store.state.info.key });
      saved = answer?.json.bookmarks ?? saved;
      message.textContent = store.state.info.keeps ? t("Kept with the recording.") : t("Kept until the viewer is closed, and in pages that are exported.");
    } catch (error) {
      message.textContent = `${error.message}.`;
      list = saved;
      showRows();
    }
    store.set({ info: { ...store.state.info, bookmarks: saved } });
  }
  const withChange = (/** @type {number} */ index, /** @type {Partial<Bookmark>} */ patch) => list.map((each, other) => (other === index ? { ...each, ...patch } : each));
  function showRows() {
    const focused = /** @type {HTMLElement | null} */ (document.activeElement)?.dataset?.keep;
    rows.replaceChildren(...list.map(createRow));
    startButton.disabled = !list.length;
    if (!list.length) rows.append(make("li", { class: "bookmark-none" }, t("None yet. A bookmark keeps head, place, zoom, colours and pin under a name; in their order they are a tour.")));
    if (focused) /** @type {HTMLElement | null} */ (rows.querySelector(`[data-keep="${focused}"]`))?.focus();
  }
  /**
   * @param {Bookmark} bookmark
   * @param {number} index
   */
  function createRow({ name, says: sentence }, index) {
    const createInput = (/** @type {"name" | "says"} */ field, /** @type {string} */ value, /** @type {string} */ label, /** @type {string} */ placeholder) => {
      const input = make("input", { value, placeholder, readOnly: !canSave, maxLength: field === "name" ? 200 : 2000, "aria-label": label, "data-keep": `${field}${index}` });
      input.addEventListener("change", () => save(withChange(index, { [field]: input.value }), true));
      return input;
    };
    const createButton = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ onClick, /** @type {boolean} */ disabled = false) => {
      const button = make("button", { type: "button", class: "icon", title: label, "aria-label": `${label}: ${name}`, disabled: disabled, "data-keep": `${label}${index}` }, text);
      button.addEventListener("click", onClick);
      return button;
    };
    const withMove = (/** @type {number} */ by) => {
      const next = [...list];
      next.splice(index + by, 0, ...next.splice(index, 1));
      return next;
    };
    const buttons = [createButton("→", t("Go there"), () => goToBookmark(store, index, false))];
    if (canSave) {
      buttons.push(createButton("↑", t("Earlier"), () => save(withMove(-1)), index === 0));
      buttons.push(createButton("↓", t("Later"), () => save(withMove(1)), index === list.length - 1));
      buttons.push(createButton("×", t("Remove"), () => save(list.filter((_, other) => other !== index))));
    }
    const fields = [createInput("name", name, t("Name"), ""), createInput("says", sentence ?? "", t("Sentence"), t("A sentence that the tour shows here"))];
    return make("li", {}, make("div", { class: "bookmark-fields" }, ...fields), make("div", { class: "bookmark-buttons" }, ...buttons));
  }

  const subscriptions = [
    store.on(["panel"], () => {
      if (store.state.panel !== "bookmarks") return dialog.close();
      message.textContent = "";
      showRows();
      return dialog.open();
    }),
  ];
  showRows();
  if (store.state.panel === "bookmarks") dialog.open();
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      dialog.destroy();
      openButton.remove();
    },
  };
}
