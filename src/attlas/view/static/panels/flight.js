// A flight over the map: played, with its words in a bar below the map, or recorded as a film.

import { getContext } from "../map/canvas.js";
import { fetchStops } from "./stops.js";
import { download, make } from "./elements.js";
import { chooseFilmType, computeFilmSize, drawFilmFrame, startFilm } from "./film.js";
import { planFlight } from "../map/flight.js";
import { formatBytes } from "../data/numbers.js";
import { nameFile, readPictureStyle } from "./picture.js";
import { t } from "../words/words.js";

const PAUSE = 1000; // ms between two frames from which on the page was hidden, and the flight has waited
const STEP = 0.5; // seconds between two places of a flight that are loaded before it is recorded
const SETTLE = 4000; // ms that the map may take for such a place
const RESIZE = 150; // ms in which the map takes the size of its place
const POLL = 50; // ms between two looks at it

/** @typedef {{ title: string, says: string, opacity: number }} FlightWords */

/**
 * Mount the button among the tools of the map, and the bar of a flight below the map in `element`.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountFlight(element, { store, transport, map, texts, announce, root, tools }) {
  const motion = window.matchMedia("(prefers-reduced-motion: reduce)");
  const openButton = make("button", { type: "button", title: t("Fly from the whole matrix to two words, or along the bookmarks  f"), "aria-label": t("Fly") }, "▷");
  openButton.addEventListener("click", () => store.set({ flight: store.state.flight ? "" : "play" }));
  const openBox = make("div", { class: "moves" }, openButton);
  tools.querySelector(".moves")?.before(openBox);

  const playButton = make("button", { type: "button", class: "icon" });
  const endButton = make("button", { type: "button", class: "icon", title: t("End the flight  Esc"), "aria-label": t("End the flight") }, "×");
  const [title, says] = [make("b"), make("span")];
  const slider = make("input", { type: "range", min: 0, step: 0.05, value: 0, "aria-label": t("Seconds of the flight") });
  const bar = make("div", { class: "flight", role: "group", "aria-label": t("Flight"), hidden: true }, playButton, make("p", { class: "flight-says" }, title, " ", says), slider, endButton);
  element.after(bar);

  /** @type {FlightStop[]} */
  let stops = [];
  /** @type {{ plan: FlightPlan, shape: string } | null} */
  let planned = null; // for one size of the map
  /** @type {Partial<View> | null} */
  let shownFields = null;
  let time = 0;
  /** @type {object | null} */
  let run = null; // what tells one run of the flight from the next
  /** @type {AbortController | null} */
  let opened = null;

  function getPlan() {
    const { width, height } = map.drawn();
    const shape = `${width} ${height}`;
    if (planned?.shape !== shape) {
      const getWhole = (/** @type {Partial<View>} */ { entry, compare }) => map.whole(store.state.info.entries[entry ?? store.state.entry], (compare ?? store.state.compare) === "side");
      planned = { shape, plan: planFlight(stops, getWhole, Math.min(width, height)) };
    }
    return planned.plan;
  }

  /**
   * Show a time of the flight; `still`: at a stop, so that nothing moves. Returns its words.
   *
   * @param {number} next
   * @param {boolean} [still]
   * @returns {FlightWords}
   */
  function show(next, still = false) {
    const plan = getPlan();
    time = Math.min(next, plan.seconds);
    const { view, said, opacity, place } = plan.at(time, still);
    store.set({ ...(view.fields === shownFields ? {} : view.fields), ...place });
    shownFields = view.fields;
    if (title.textContent !== said.title) announce(`${said.title}. ${said.says}`);
    [title.textContent, says.textContent] = [said.title, said.says];
    slider.max = String(plan.seconds);
    slider.value = String(time);
    slider.setAttribute("aria-valuetext", t("{0} of {1} seconds", time.toFixed(1), plan.seconds.toFixed(0)));
    return { title: said.title, says: said.says, opacity };
  }

  function showButton() {
    const label = run ? t("Pause the flight") : t("Play the flight");
    playButton.textContent = run ? "❚❚" : "▶";
    playButton.title = label;
    playButton.setAttribute("aria-label", label);
  }
  function pause() {
    run = null;
    showButton();
  }
  /**
   * Go through the rest of the flight in real time; `draw` is called with the words of each frame once the map shows it.
   *
   * @param {boolean} still
   * @param {(words: FlightWords) => void} [draw]
   */
  async function play(still, draw = () => {}) {
    const own = (run = {});
    showButton();
    let words = show(time, still);
    for (let last = performance.now(); time < getPlan().seconds; ) {
      const now = await new Promise(requestAnimationFrame);
      if (run !== own) return;
      draw(words);
      words = show(time + (now - last < PAUSE ? Math.max(0, now - last) / 1000 : 0), still);
      last = now;
    }
    pause();
  }

  // Load what a flight shows, so that none of its frames has a coarse part.
  /** @param {AbortSignal} signal */
  async function rehearse(signal) {
    const { seconds } = getPlan();
    for (let at = 0; at < seconds; at += STEP) {
      const words = show(at);
      says.textContent = t("Loading what the film shows: {0} %", Math.round((100 * at) / seconds));
      await new Promise(requestAnimationFrame);
      for (const since = performance.now(); !map.settled() && performance.now() - since < SETTLE; ) {
        await new Promise((resolve) => setTimeout(resolve, POLL));
        signal.throwIfAborted();
      }
      says.textContent = words.says;
    }
  }

  /** @param {AbortSignal} signal */
  async function record(signal) {
    const kind = chooseFilmType();
    if (!kind) throw new Error(t("This browser cannot record films"));
    await rehearse(signal);
    const name = nameFile(store.state, kind.name.toLowerCase());
    const { layers } = map.drawn();
    const size = computeFilmSize(layers[0]);
    const canvas = make("canvas", { width: size.width, height: size.height });
    const ctx = getContext(canvas);
    const style = readPictureStyle(root);
    const draw = (/** @type {FlightWords} */ words) => drawFilmFrame(ctx, size, layers, words, style, store.state.info.project ?? "");
    draw(show(0));
    const film = startFilm(canvas, kind.type);
    const cancel = () => film.cancel();
    signal.addEventListener("abort", cancel);
    try {
      await play(false, draw);
      signal.throwIfAborted();
      const blob = await film.stop();
      download(name, blob);
      announce(t("Film of {0} saved.", formatBytes(blob.size)));
    } finally {
      signal.removeEventListener("abort", cancel);
      film.cancel();
    }
  }

  /**
   * Record with the whole window for the map; the panes beside it come back.
   *
   * @param {AbortSignal} signal
   */
  async function recordWide(signal) {
    const { aside } = store.state;
    store.set({ aside: "none" });
    try {
      await new Promise((resolve) => setTimeout(resolve, RESIZE));
      await record(signal);
    } finally {
      store.set({ aside });
    }
    store.set({ flight: "" });
  }

  /** @param {FlightMode} mode */
  async function open(mode) {
    opened?.abort();
    pause();
    [planned, shownFields, time] = [null, null, 0];
    bar.hidden = !mode;
    openButton.setAttribute("aria-pressed", String(Boolean(mode)));
    const isRecording = mode === "record";
    element.inert = isRecording; // a hand on the map would be in the film
    root.classList.toggle("attlas-filmed", isRecording);
    playButton.hidden = slider.hidden = isRecording;
    playButton.disabled = slider.disabled = true; // until it is known where it goes
    if (!mode) return;
    const controller = (opened = new AbortController());
    try {
      stops = await fetchStops({ store, transport, texts }, controller.signal);
      await new Promise(requestAnimationFrame); // the bar has taken its room from the map
      if (controller.signal.aborted) return;
      playButton.disabled = slider.disabled = false;
      if (isRecording) await recordWide(controller.signal);
      else await play(motion.matches);
    } catch (error) {
      if (controller.signal.aborted) return;
      announce(error.message);
      store.set({ flight: "" });
    }
  }

  playButton.addEventListener("click", () => {
    if (run) return pause();
    if (time >= getPlan().seconds) time = 0;
    return play(motion.matches);
  });
  slider.addEventListener("input", () => {
    pause();
    show(Number(slider.value));
  });
  endButton.addEventListener("click", () => store.set({ flight: "" }));
  // A hand on the map takes it from here.
  const takeOver = () => {
    if (run && store.state.flight === "play") pause();
  };
  for (const gesture of ["pointerdown", "wheel", "keydown"]) element.addEventListener(gesture, takeOver, { capture: true, passive: true });
  const unsubscribe = store.on(["flight"], ({ flight }) => open(flight));
  showButton();
  return {
    destroy() {
      unsubscribe();
      opened?.abort();
      run = null;
      for (const gesture of ["pointerdown", "wheel", "keydown"]) element.removeEventListener(gesture, takeOver, { capture: true });
      bar.remove();
      openBox.remove();
    },
  };
}
