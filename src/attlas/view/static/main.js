// Starts a page: fetches what there is to see, builds the layout, mounts map and panels on one store.

import { followTheme } from "./map/look.js";
import { mountBookmarks } from "./panels/bookmarks.js";
import { mountColourbar } from "./panels/colourbar.js";
import { mountCompare } from "./panels/compare.js";
import { mountExport } from "./panels/export.js";
import { mountFlight } from "./panels/flight.js";
import { mountHeads } from "./panels/heads.js";
import { mountImage } from "./panels/image.js";
import { mountHelp } from "./panels/help.js";
import { createKeys } from "./panels/keys.js";
import { mountLines } from "./panels/lines.js";
import { createMap } from "./map/map.js";
import { getHeadName } from "./data/numbers.js";
import { createRequests } from "./data/requests.js";
import { mountReading } from "./panels/reading.js";
import { mountSearch } from "./panels/search.js";
import { createShell } from "./panels/shell.js";
import { readMore, writeMore } from "./data/coloured.js";
import { holdsHead } from "./data/held.js";
import { DEFAULTS, bindHash, createStore, listHeads, readHash, isEqual } from "./data/state.js";
import { mountSays } from "./panels/says.js";
import { chooseStart, choosePooling, fetchHeadsSoon, followTellingHead } from "./start.js";
import { mountWhy } from "./panels/why.js";
import { mountStatus } from "./panels/status.js";
import { mountText } from "./panels/text.js";
import { mountTour } from "./panels/tour.js";
import { createOutlines } from "./data/outlines.js";
import { mountOutline } from "./panels/outline.js";
import { createTexts } from "./data/tokens.js";
import { mountTrial } from "./panels/trial.js";
import { rememberFolder } from "./data/comeback.js";
import { hasVariant } from "./data/weighting.js";
import { language } from "./words/words.js";
import { getRange } from "./map/colour.js";

// Fields of a link that say what is looked at.
const PLACE_FIELDS = ["tour", "story", "entry", "head", "batch", "second", "row", "column", "zoom", "pin"];

let pageCount = 0;

/**
 * Start a page in `root` (an element of class "attlas") on the answers of `transport`.
 *
 * `options.hash`: keep the state in the URL; `options.initial`: fields of the state to start with; `options.numbers`:
 * what the help says of the numbers, where they are not computed for each request; `options.reopen`: builds the page
 * again once another text was read. Returns `{destroy, ready}`; `ready` resolves to the context of the panels.
 *
 * @param {HTMLElement} root
 * @param {Transport} transport
 * @param {MountOptions} [options]
 */
export function mount(root, transport, options = {}) {
  /** @type {(() => void)[]} */
  const cleanups = [];
  let destroyed = false;
  const page = `attlas-${++pageCount}`;
  let ids = 0;
  const uid = (/** @type {string} */ name) => `${page}-${name}-${++ids}`;

  const requests = createRequests(transport);
  cleanups.push(() => requests.destroy());
  const shell = createShell(root, uid);
  cleanups.push(() => shell.destroy());

  async function start() {
    // The page begins at the place of the link, else at a head chosen by the statistics.
    const hasPlace = (/** @type {Partial<State>} */ fields) => Object.keys(fields).some((field) => PLACE_FIELDS.includes(field));
    const readLink = () => {
      const fields = options.hash ? readHash(window.location.hash) : {};
      // A link with a place begins no tour; one that was copied has the zoom too, and leaves out a head that is the first.
      const left = { ...(hasPlace(fields) ? { story: null } : {}), ...("zoom" in fields ? { entry: 0, head: 0 } : {}) };
      return { ...options.initial, ...left, ...fields };
    };
    const text = readLink().text ?? 0;
    const [{ json: info }, heads] = await Promise.all([requests.get("info", { text }), hasPlace(readLink()) ? null : fetchHeadsSoon(requests, text)]);
    if (destroyed) return null;
    const fields = { ...readLink() }; // it may have changed meanwhile
    const bookmark = info.bookmarks?.[fields.tour ?? -1];
    if (bookmark) Object.assign(fields, readHash(bookmark.at), { tour: fields.tour });
    fields.text = info.reading?.number ?? null;
    const initial = { ...DEFAULTS, ...chooseStart(info, hasPlace(fields) ? null : heads), ...fields };
    /** @type {Store} */
    const store = createStore({ ...initial, ...(hasPlace(fields) || fields.pool ? {} : await choosePooling(requests, info, initial)), info });
    if (destroyed) return null;
    cleanups.push(keepValid(store));
    cleanups.push(followTheme(root, store));
    const texts = createTexts(requests, info);
    const outlines = createOutlines(requests, info);
    const map = createMap(shell.map, { store, transport: requests, texts, outlines, announce: shell.announce, uid, tools: shell.tools });
    cleanups.push(() => map.destroy());
    const context = { store, transport: requests, map, texts, outlines, announce: shell.announce, uid, root, numbers: options.numbers, tools: shell.tools, reopen: options.reopen };
    if (options.hash) {
      if (info.folder) rememberFolder(window.location.pathname, info.folder);
      cleanups.push(bindHash(store, window, options.reopen));
      document.documentElement.lang = language;
    } else root.lang = language;
    cleanups.push(shell.connect(context));
    /** @type {[mountPanel: (element: HTMLElement, context: PageContext) => Panel, element: HTMLElement][]} */
    const panels = [
      [mountHeads, shell.heads],
      [mountText, shell.text],
      [mountReading, shell.reading],
      [mountTrial, shell.reading], // below what the box of the model has
      [mountImage, shell.image],
      [mountSearch, shell.search],
      [mountColourbar, shell.colourbar],
      [mountExport, shell.export],
      [mountHelp, shell.help],
      [mountCompare, shell.compare],
      [mountStatus, shell.status],
      [mountSays, shell.says],
      [mountWhy, shell.tools],
      [mountFlight, shell.map],
      [mountLines, shell.lines],
      [mountOutline, shell.tools],
      [mountBookmarks, shell.bookmarks],
      [mountTour, shell.tour],
    ];
    for (const [mountPanel, element] of panels) {
      const panel = mountPanel(element, context);
      cleanups.push(() => panel.destroy());
    }
    cleanups.push(createKeys(root, context));
    cleanups.push(followTitle(store, options));
    if (!hasPlace(fields) && !(heads && heads.progress >= 1)) cleanups.push(followTellingHead(root, context));
    root.classList.add("attlas-ready");
    return context;
  }

  const ready = start().catch((error) => {
    if (!destroyed) shell.fail(error.message);
    throw error;
  });
  ready.catch(() => {}); // the page shows the error; whoever awaits `ready` gets it too
  return {
    ready,
    destroy() {
      destroyed = true;
      for (const cleanup of cleanups.reverse()) cleanup();
    },
  };
}

// A link may name what this atlas does not have, and a range may belong to the other kind of scale.
/** @param {Store} store */
function keepValid(store) {
  const check = () => {
    const patch = repairState(store.state);
    if (Object.keys(patch).length) store.set(patch);
  };
  check();
  /** @type {(keyof State)[]} */
  const fields = ["entry", "head", "batch", "pool", "variant", "second", "compare", "more", "pin", "span", "colour", "low", "high"];
  return store.on(fields, check);
}

/**
 * The changes that make a state refer only to what exists.
 *
 * @param {State} state
 */
export function repairState(state) {
  const { entries } = state.info;
  /** @type {Partial<State>} */
  const patch = {};
  const index = state.entry < entries.length ? state.entry : 0;
  const entry = entries[index];
  if (index !== state.entry) patch.entry = index;
  if (!listHeads(entry).includes(state.head)) patch.head = entry.heads.length - 1;
  const { info } = state;
  if (!hasVariant(entry, state.variant)) patch.variant = "plain";
  if (!holdsHead(info, index, patch.head ?? state.head)) Object.assign(patch, info.held?.[0]);
  Object.assign(patch, info.only);
  if (state.batch >= (entry.batch ?? 1)) patch.batch = 0;
  const { second } = state;
  const hasSecond = second && second.entry < entries.length && listHeads(entries[second.entry]).includes(second.head);
  if (second && !(hasSecond && holdsHead(info, second.entry, second.head))) patch.second = null;
  const more = readMore(state.more).filter((each) => each.entry < entries.length && listHeads(entries[each.entry]).includes(each.head) && holdsHead(info, each.entry, each.head));
  patch.more = writeMore(more);
  if (state.pin && !(state.pin.i < entry.m && state.pin.j < entry.n)) patch.pin = null;
  const { span } = state;
  const isSpanValid = state.pin && patch.pin !== null && span && span.start < span.stop && span.start >= entry.first_key && span.stop <= entry.first_key + entry.n;
  if (span && !isSpanValid) patch.span = null;
  const { low, high } = getRange({ ...state, ...patch });
  if (low !== state.low || high !== state.high) Object.assign(patch, { low, high });
  return Object.fromEntries(Object.entries(patch).filter(([field, value]) => !isEqual(state[/** @type {keyof State} */ (field)], value)));
}

/**
 * Keep the title of the document up to date; not in a notebook.
 *
 * @param {Store} store
 * @param {MountOptions} options
 */
function followTitle(store, options) {
  if (!options.hash) return () => {};
  const show = (/** @type {Pick<State, "info" | "entry" | "head">} */ { info, entry, head }) => {
    document.title = `${getHeadName(info, entry, head)} · ${info.title} · attlas`;
  };
  show(store.state);
  return store.on(["entry", "head"], show);
}
