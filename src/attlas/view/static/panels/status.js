// The status line: what a pixel shows, the progress of computations, and errors.

import { make } from "./elements.js";
import { formatComeback } from "../data/comeback.js";
import { formatInteger } from "../data/numbers.js";
import { writeView } from "../data/state.js";
import { describeVariant, isSigned } from "../data/weighting.js";
import { t } from "../words/words.js";

// What stays as it was drawn last while nobody answers, so that the page does not mix two heads.
/** @type {(keyof State)[]} */
const FROZEN_FIELDS = ["entry", "head", "batch", "variant", "second", "compare", "more", "pin"];
const FIRST_POLL = 300; // ms after which a computation that has begun is seen,
const POLL_INTERVAL = 1300; // and between two requests for its progress

/**
 * Mount the status line.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountStatus(element, { store, transport, map, root }) {
  let timer = 0;
  let isGone = false; // whether the viewer seems to be closed
  /** @type {Partial<State>} */
  let drawn = {}; // what was drawn to the end last
  let destroyed = false;
  const scale = make("span", { class: "status-scale" });
  const progress = make("span", { class: "status-progress", role: "status" });
  const trouble = make("span", { class: "status-trouble", role: "status" });
  element.append(scale, progress, trouble);
  const line = make("code");
  const banner = make("div", { class: "gone", role: "alert", hidden: true }, make("b", {}, t("The viewer does not answer.")), make("span", {}, t("This line opens it again at the same place:")), line);
  root.querySelector(".slot-map")?.append(banner);
  const keepDrawn = () => {
    if (!isGone && map.settled()) drawn = Object.fromEntries(FROZEN_FIELDS.map((field) => [field, store.state[field]]));
  };
  const freeze = () => {
    if (!isGone) return;
    store.set(drawn);
    line.textContent = formatComeback(store.state.info.folder, writeView(store.state));
  };

  const update = (/** @type {State} */ state) => {
    scale.textContent = [describeBlock(state.grain, state), describeVariant(state), map.refused()].filter(Boolean).join(" · ");
    progress.textContent = describeProgress(state.progress);
    progress.hidden = !progress.textContent;
  };
  const cleanups = [
    store.on(["grain", "pool", "variant", "compare", "second", "more", "entry", "head", "progress"], update),
    store.on("pin", keepDrawn),
    map.onSettled(keepDrawn),
    store.on(FROZEN_FIELDS, freeze),
    transport.trouble((text, gone) => {
      isGone = text !== null && (isGone || gone);
      banner.hidden = !isGone || !root.classList.contains("attlas-page");
      freeze();
      trouble.textContent = text ?? "";
      trouble.hidden = !text;
    }),
  ];
  trouble.hidden = true;

  async function poll() {
    if (map.unfinished() && document.visibilityState === "visible") {
      try {
        const { json } = await transport.get("status");
        if (destroyed) return;
        store.set({ progress: findJob(json.jobs, store.state) });
      } catch {
        // The queue reports a lost server; polling goes on.
      }
    } else if (!map.unfinished()) store.set({ progress: null });
    if (!destroyed) timer = setTimeout(poll, store.state.progress ? POLL_INTERVAL : FIRST_POLL);
  }
  poll();
  update(store.state);
  return {
    destroy() {
      clearTimeout(timer);
      destroyed = true;
      cleanups.forEach((cleanup) => cleanup());
      banner.remove();
      element.replaceChildren();
    },
  };
}

/**
 * The job of the shown head, else the first one.
 *
 * @param {Job[]} jobs
 * @param {Pick<State, "entry" | "head" | "variant">} place
 */
function findJob(jobs, { entry, head, variant }) {
  const current = jobs.find((job) => job.entry === entry && job.head === head && job.variant === variant) ?? jobs[0];
  if (!current || !(current.total > 0)) return null;
  return { entry: current.entry, head: current.head, fraction: current.done / current.total, secondsLeft: Math.ceil(current.seconds_left ?? 0) };
}

/**
 * What one pixel stands for, in words.
 *
 * @param {Grain} grain
 * @param {Pick<State, "pool"> & { info?: Info, entry?: number }} state
 */
export function describeBlock({ side, framed }, { pool, ...place }) {
  if (side === 1) return t("every cell is drawn");
  const cells = formatInteger(side);
  const words = pool === "max" && isSigned(place) ? t("a pixel shows the weight of largest size of {0} × {1} cells", cells, cells) : pool === "max" ? t("a pixel shows the largest weight of {0} × {1} cells", cells, cells) : t("a pixel shows the mean of {0} × {1} cells", cells, cells);
  return framed ? t("{0}, in the frame every cell", words) : words;
}

/**
 * Words for how far a pass over the matrix is.
 *
 * @param {Progress | null} progress
 */
function describeProgress(progress) {
  if (!progress || progress.fraction >= 1) return "";
  const left = progress.secondsLeft;
  const time = left > 90 ? t(", about {0} min left", Math.round(left / 60)) : left > 0 ? t(", about {0} s left", Math.ceil(left)) : "";
  return t("computing the overview: {0} %{1}", Math.floor(100 * progress.fraction), time);
}
