// Named views, kept with the recording: a list to edit, and a tour through them with a sentence each.

import { createDialog, make } from "./elements.js";
import { viewOf, writeHash } from "./state.js";
import { t } from "./words.js";

/** Mount the button and the list, and in `element` the line of a tour. */
export function mountBookmarks(element, { store, transport, announce, uid, root, button }) {
  let list = store.state.info.bookmarks ?? [];
  const canKeep = Boolean(transport.send);
  const open = make("button", { type: "button", class: "icon", hidden: !canKeep && !list.length, title: t("Bookmarks: named views of this recording, and a tour through them"), "aria-label": t("Bookmarks") }, "☆");
  open.addEventListener("click", () => store.set({ panel: "bookmarks" }));
  button.append(open);
  const dialog = createDialog(root, t("Bookmarks"), uid, () => {
    if (store.state.panel === "bookmarks") store.set({ panel: "" });
  });
  dialog.element.classList.add("bookmarks");
  const rows = make("ol", { class: "bookmark-rows" });
  const says = make("p", { class: "export-line", role: "status" });
  const add = make("button", { type: "button", class: "toggle", hidden: !canKeep }, t("Bookmark this view"));
  const start = make("button", { type: "button", class: "toggle" }, t("Start the tour"));
  start.addEventListener("click", () => go(0));
  add.addEventListener("click", () => {
    const { info, entry, head } = store.state;
    const given = info.entries[entry];
    const name = t("Head {0}", `${given.layer}·${head === "mean" ? t("mean") : given.heads[head]}`);
    keep([...list, { name, at: hereOf(store.state), says: "" }]);
  });
  dialog.body.append(rows, make("div", { class: "bookmark-buttons" }, add, start), says);

  // Keeps a list, or says why not; the list that is shown is the one that is kept.
  async function keep(next) {
    try {
      list = (await transport.send("bookmarks", { bookmarks: next, before: list })).json.bookmarks;
      says.textContent = store.state.info.keeps ? t("Kept with the recording.") : t("Kept until the viewer is closed, and in pages that are exported.");
    } catch (error) {
      says.textContent = `${error.message}.`;
    }
    store.set({ info: { ...store.state.info, bookmarks: list } });
    fill();
  }
  const changed = (at, patch) => list.map((each, other) => (other === at ? { ...each, ...patch } : each));
  function fill() {
    const focused = document.activeElement?.dataset?.keep;
    rows.replaceChildren(...list.map(row));
    start.disabled = !list.length;
    if (!list.length) rows.append(make("li", { class: "bookmark-none" }, t("None yet. A bookmark keeps head, place, zoom, colours and pin under a name; in their order they are a tour.")));
    if (focused) rows.querySelector(`[data-keep="${focused}"]`)?.focus();
  }
  function row({ name, says: sentence }, at) {
    const edit = (field, value, label, placeholder) => {
      const input = make("input", { value, placeholder, readOnly: !canKeep, maxLength: field === "name" ? 200 : 2000, "aria-label": label, "data-keep": `${field}${at}` });
      input.addEventListener("change", () => keep(changed(at, { [field]: input.value })));
      return input;
    };
    const act = (text, label, run, off = false) => {
      const made = make("button", { type: "button", class: "icon", title: label, "aria-label": `${label}: ${name}`, disabled: off, "data-keep": `${label}${at}` }, text);
      made.addEventListener("click", run);
      return made;
    };
    const moved = (by) => {
      const next = [...list];
      next.splice(at + by, 0, ...next.splice(at, 1));
      return next;
    };
    const buttons = [act("→", t("Go there"), () => go(at, false))];
    if (canKeep) {
      buttons.push(act("↑", t("Earlier"), () => keep(moved(-1)), at === 0));
      buttons.push(act("↓", t("Later"), () => keep(moved(1)), at === list.length - 1));
      buttons.push(act("×", t("Remove"), () => keep(list.filter((_, other) => other !== at))));
    }
    const fields = [edit("name", name, t("Name"), ""), edit("says", sentence ?? "", t("Sentence"), t("A sentence that the tour shows here"))];
    return make("li", {}, make("div", { class: "bookmark-fields" }, ...fields), make("div", { class: "bookmark-buttons" }, ...buttons));
  }

  // The line of a tour.
  const count = make("span", { class: "tour-count" });
  const name = make("b");
  const sentence = make("span");
  const step = (text, label, by) => {
    const made = make("button", { type: "button", class: "icon", title: label, "aria-label": label }, text);
    made.addEventListener("click", () => go(store.state.tour + by));
    return made;
  };
  const [back, next] = [step("‹", t("Previous step  p"), -1), step("›", t("Next step  n"), 1)];
  const end = make("button", { type: "button", class: "icon", title: t("End the tour  Esc"), "aria-label": t("End the tour") }, "×");
  end.addEventListener("click", () => store.set({ tour: null }));
  element.append(count, make("p", { class: "tour-says" }, name, " ", sentence), back, next, end);
  function go(at, touring = true) {
    if (!list[at]) return;
    store.set({ ...viewOf(list[at].at), panel: "", tour: touring ? at : null });
  }
  function show({ tour }) {
    const mark = tour === null ? null : list[tour];
    element.hidden = !mark;
    if (!mark) return;
    count.textContent = `${tour + 1} / ${list.length}`;
    name.textContent = mark.name;
    sentence.textContent = mark.says ?? "";
    [back.disabled, next.disabled] = [tour === 0, tour === list.length - 1];
    announce(t("Step {0} of {1}: {2}. {3}", tour + 1, list.length, mark.name, mark.says ?? ""));
  }
  const off = [
    store.on(["panel"], () => {
      if (store.state.panel !== "bookmarks") return dialog.close();
      says.textContent = "";
      fill();
      return dialog.open();
    }),
    store.on(["tour", "info"], show),
    store.on(["step"], ({ tour, step: by }) => {
      if (by && tour !== null) go(tour + by);
      if (by) store.set({ step: 0 });
    }),
  ];
  fill();
  show(store.state);
  if (store.state.panel === "bookmarks") dialog.open();
  return {
    destroy() {
      for (const each of off) each();
      dialog.destroy();
      open.remove();
      element.replaceChildren();
    },
  };
}

// This view as a bookmark keeps it: without what is open, and without how this reader likes the page.
const hereOf = (state) => writeHash({ ...state, panel: "", tour: null, theme: "auto", language: null, aside: "both" });
