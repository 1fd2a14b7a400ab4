// The line of a tour over the map, through the bookmarks or through the steps that the recording itself has.

import { make } from "./elements.js";
import { createStop, fetchSteps } from "./story.js";
import { readView } from "../data/state.js";
import { t } from "../words/words.js";

/**
 * Go to a bookmark; with `touring` the line of the tour shows it.
 *
 * @param {Store} store
 * @param {number} index
 * @param {boolean} touring
 */
export function goToBookmark(store, index, touring = true) {
  const bookmark = store.state.info.bookmarks?.[index];
  if (bookmark) store.set({ ...readView(bookmark.at), panel: "", tour: touring ? index : null, story: null });
}

/**
 * Mount the line, and before the button of the bookmarks the one that starts the tour of the recording.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountTour(element, { store, transport, announce, root }) {
  /** @type {StoryStep[]} */
  let steps = []; // of the tour of the recording
  let isAsked = false;
  let destroyed = false;
  const startButton = make("button", { type: "button", class: "toggle", hidden: true, title: t("Start the tour: heads that do something plain, each where it shows"), "aria-label": t("Start the tour") }, t("Tour"));
  startButton.addEventListener("click", () => goToStep(0));
  root.querySelector(".slot-bookmarks")?.before(startButton);

  const count = make("span", { class: "tour-count" });
  const name = make("b");
  const sentence = make("span");
  const createStepButton = (/** @type {string} */ text, /** @type {string} */ label, /** @type {number} */ by) => {
    const button = make("button", { type: "button", class: "icon", title: label, "aria-label": label }, text);
    button.addEventListener("click", () => goBy(by));
    return button;
  };
  const [back, next] = [createStepButton("‹", t("Previous step  p"), -1), createStepButton("›", t("Next step  n"), 1)];
  const endButton = make("button", { type: "button", class: "icon", title: t("End the tour  Esc"), "aria-label": t("End the tour") }, "×");
  endButton.addEventListener("click", () => store.set({ tour: null, story: null }));
  element.append(count, make("p", { class: "tour-says" }, name, " ", sentence), back, next, endButton);

  /** @param {number} index */
  function goToStep(index) {
    if (!steps[index]) return;
    store.set({ ...readView(createStop(steps[index], store.state).at), panel: "", tour: null, story: index });
  }
  /** @param {number} by */
  function goBy(by) {
    const { tour, story } = store.state;
    if (tour !== null) goToBookmark(store, tour + by);
    else if (story !== null) goToStep(story + by);
  }
  // The stop that is shown, and how many there are; null outside of a tour.
  const getStop = (/** @type {State} */ state) => {
    const { tour, story, info } = state;
    const [index, total] = tour !== null ? [tour, info.bookmarks?.length ?? 0] : [story ?? -1, steps.length];
    if (index < 0 || index >= total) return null;
    return { index, total, ...(tour !== null ? info.bookmarks[index] : createStop(steps[index], state)) };
  };
  /** @param {State} state */
  function show(state) {
    const stop = getStop(state);
    element.hidden = !stop;
    startButton.hidden = !steps.length;
    if (!stop) return;
    const { index, total } = stop;
    count.textContent = `${index + 1} / ${total}`;
    name.textContent = stop.name;
    sentence.textContent = stop.says ?? "";
    [back.disabled, next.disabled] = [index === 0, index === total - 1];
    announce(t("Step {0} of {1}: {2}. {3}", index + 1, total, stop.name.replace(/[.。]$/, ""), stop.says ?? ""));
  }
  // The kinds of the heads tell what the tour is; a link that names a step and no place goes there then.
  async function askForSteps() {
    const { heads, info } = store.state;
    if (isAsked || !heads || heads.progress < 1) return;
    isAsked = true;
    steps = await fetchSteps(transport, info).catch(() => []); // a page without a tour has all the rest
    if (destroyed) return;
    followLink();
    show(store.state);
  }
  function followLink() {
    const { story, pin } = store.state;
    if (story !== null && !pin) goToStep(story);
  }
  const subscriptions = [
    store.on(["tour", "story", "info"], show),
    store.on(["story"], followLink),
    store.on(["heads"], askForSteps),
    store.on(["step"], ({ step: by }) => {
      if (by) goBy(by);
      if (by) store.set({ step: 0 });
    }),
  ];
  show(store.state);
  askForSteps();
  return {
    destroy() {
      destroyed = true;
      for (const unsubscribe of subscriptions) unsubscribe();
      startButton.remove();
      element.replaceChildren();
    },
  };
}
