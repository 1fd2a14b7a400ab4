// One line under the map: what a pixel stands for, what is being computed, what went wrong.

import { make } from "./elements.js";
import { whole } from "./numbers.js";
import { sideOf } from "./state.js";
import { variantText } from "./weighting.js";
import { t } from "./words.js";

const POLL = 1300; // ms between two looks at how far a pass is

/** Mount the status line. */
export function mountStatus(element, { store, transport, map }) {
  let timer = 0;
  const scale = make("span", { class: "status-scale" });
  const progress = make("span", { class: "status-progress", role: "status" });
  const trouble = make("span", { class: "status-trouble", role: "status" });
  element.append(scale, progress, trouble);

  const show = (state) => {
    scale.textContent = [blockText(map.level(), state), variantText(state), compareText(map.refused())].filter(Boolean).join(" · ");
    progress.textContent = progressText(state.progress);
    progress.hidden = !progress.textContent;
  };
  const endings = [
    store.on(["zoom", "pool", "variant", "compare", "second", "entry", "head", "progress"], show),
    transport.trouble((text) => {
      trouble.textContent = text ?? "";
      trouble.hidden = !text;
    }),
  ];
  trouble.hidden = true;

  async function poll() {
    if (map.unfinished() && document.visibilityState === "visible") {
      try {
        const { json } = await transport.get("status");
        if (timer === null) return;
        store.set({ progress: jobOf(json.jobs, store.state) });
      } catch {
        // The queue says when the server is gone; the next look comes anyway.
      }
    } else if (!map.unfinished()) store.set({ progress: null });
    if (timer !== null) timer = setTimeout(poll, POLL);
  }
  poll();
  show(store.state);
  return {
    destroy() {
      clearTimeout(timer);
      timer = null;
      endings.forEach((end) => end());
      element.replaceChildren();
    },
  };
}

// The pass over what is looked at, else the first that runs.
function jobOf(jobs, { entry, head, variant }) {
  const mine = jobs.find((job) => job.entry === entry && job.head === head && job.variant === variant) ?? jobs[0];
  if (!mine || !(mine.total > 0)) return null;
  return { entry: mine.entry, head: mine.head, fraction: mine.done / mine.total, secondsLeft: Math.ceil(mine.seconds_left ?? 0) };
}

/** What one pixel stands for, in words. */
export function blockText(level, state) {
  if (!level) return t("every cell is drawn");
  const { pool } = state;
  const side = whole(sideOf(state.info, state, level));
  return pool === "max" ? t("a pixel shows the largest weight of {0} × {1} cells", side, side) : t("a pixel shows the mean of {0} × {1} cells", side, side);
}

function compareText(refused) {
  return refused ?? "";
}

/** Words for how far a pass over the matrix is. */
export function progressText(progress) {
  if (!progress || progress.fraction >= 1) return "";
  const left = progress.secondsLeft;
  const time = left > 90 ? t(", about {0} min left", Math.round(left / 60)) : left > 0 ? t(", about {0} s left", Math.ceil(left)) : "";
  return t("computing the overview: {0} %{1}", Math.floor(100 * progress.fraction), time);
}
