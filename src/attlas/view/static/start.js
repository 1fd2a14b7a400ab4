// Where a page begins: at the place of its link, else at the head that the statistics find most telling.

import { getHeadName } from "./data/numbers.js";
import { findCounterpart } from "./data/state.js";
import { canDivide } from "./data/comparable.js";
import { t } from "./words/words.js";

const HEADS_WAIT = 300; // ms that a page waits at most for the statistics; a long recording takes minutes
// Fields that are changed by a user who has begun to look around.
/** @type {(keyof State)[]} */
const MOVED_FIELDS = ["entry", "head", "batch", "second", "compare", "variant", "pool", "view", "pin", "tour", "story", "panel"];

/**
 * The table of all heads if it comes soon, else null.
 *
 * @param {Requests} requests
 * @param {number} text
 * @returns {Promise<HeadTable | null>}
 */
export async function fetchHeadsSoon(requests, text) {
  const controller = new AbortController();
  const timer = setTimeout(() => controller.abort(), HEADS_WAIT);
  try {
    return (await requests.get("heads", { text }, { signal: controller.signal })).json;
  } catch {
    return null; // the panel of the heads asks again
  } finally {
    clearTimeout(timer);
  }
}

/**
 * The most telling head where it is known, else the first readable entry; no text pane where there is no text.
 *
 * @param {Info} info
 * @param {HeadTable | null} heads
 * @returns {{ entry: number, head: number } & Partial<View>}
 */
export function chooseStart(info, heads) {
  const readable = info.entries.findIndex((entry) => entry.readable);
  const { pin = null, ...place } = heads?.telling ?? {};
  const first = { entry: Math.max(0, readable), head: 0, ...place, ...(pin && info.texts.length ? { pin } : {}) };
  const other = findCounterpart(info, first.entry);
  const second = other === null ? {} : { second: { entry: other, head: first.head }, compare: !readSame(info, first.entry, other) ? "side" : canDivide(info, first.entry, other) ? "ratio" : "difference" };
  return /** @type {{ entry: number, head: number } & Partial<View>} */ ({ ...first, ...second, ...chooseAside(info) });
}

/**
 * The side panes of a page where not both have something to show: no text, or a single head.
 *
 * @param {Info} info
 * @returns {Partial<View>}
 */
export function chooseAside(info) {
  const hasText = Boolean(info.texts.length || info.reading || info.grids?.length);
  const hasHeads = info.entries.reduce((sum, { heads }) => sum + heads.length, 0) > 1;
  return hasText && hasHeads ? {} : { aside: hasHeads ? "heads" : hasText ? "text" : "none" };
}

/**
 * Whether two entries are about the same tokens: their cells are then the same pairs. Where no text is known, they may be.
 *
 * @param {Info} info
 * @param {number} first
 * @param {number} second
 */
function readSame({ entries }, first, second) {
  return JSON.stringify(entries[first].texts) === JSON.stringify(entries[second].texts);
}

/**
 * The pooling that suits the first head; the default where the server does not answer.
 *
 * @param {Transport} requests
 * @param {Info} info
 * @param {HeadPlace & { batch: number }} place
 */
export async function choosePooling(requests, info, { entry, head, batch }) {
  if (info.only || info.entries[entry]?.readable === false) return {};
  const answer = await requests.get("pooling", { entry, head, batch }).catch(() => null);
  return answer ? { pool: answer.json.pool } : {};
}

/**
 * Go to the most telling head once the statistics of all heads are known, unless the user has moved meanwhile.
 * Returns the function that ends this.
 *
 * @param {HTMLElement} root
 * @param {PageContext} context
 */
export function followTellingHead(root, { store, map, transport, announce }) {
  const gestures = ["pointerdown", "wheel", "keydown"];
  const start = store.state;
  /** @type {(() => void)[]} */
  const cleanups = [];
  const end = () => cleanups.splice(0).forEach((cleanup) => cleanup());
  /** @param {State} state */
  async function go({ heads }) {
    if (!heads || heads.progress < 1) return;
    const { entry, head, second, pin } = chooseStart(start.info, heads);
    if (!map.fitted() || (entry === start.entry && head === start.head)) return end();
    const pooling = await choosePooling(transport, start.info, { entry, head, batch: start.batch });
    if (!cleanups.length) return undefined; // the user has moved while the server was asked
    end();
    store.set({ entry, head, ...(pin ? { pin } : {}), ...(second ? { second } : {}), ...pooling });
    return announce(t("The most telling head: {0}", getHeadName(start.info, entry, head)));
  }
  for (const gesture of gestures) {
    root.addEventListener(gesture, end, { capture: true, passive: true });
    cleanups.push(() => root.removeEventListener(gesture, end, { capture: true }));
  }
  cleanups.push(store.on(["heads"], go), store.on(MOVED_FIELDS, end));
  return end;
}
