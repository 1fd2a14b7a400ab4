// Starts a page: asks what there is to see, builds the layout, mounts map and panels, and lets them talk through one store.

import { mountBookmarks } from "./bookmarks.js";
import { mountColourbar } from "./colourbar.js";
import { mountCompare } from "./compare.js";
import { mountExport } from "./export.js";
import { mountHeads } from "./heads.js";
import { mountHelp } from "./help.js";
import { createKeys } from "./keys.js";
import { mountLines } from "./lines.js";
import { createMap } from "./map.js";
import { headName } from "./numbers.js";
import { createRequests } from "./requests.js";
import { mountReading } from "./reading.js";
import { mountSearch } from "./search.js";
import { createShell } from "./shell.js";
import { DEFAULTS, bindHash, counterpart, createStore, holds, readHash, same } from "./state.js";
import { mountSays } from "./says.js";
import { mountStatus } from "./status.js";
import { mountText } from "./text.js";
import { createTokens } from "./tokens.js";
import { isWeighted } from "./weighting.js";
import { language } from "./words.js";
import { rangeOf } from "./colour.js";

// Fields of a link that say what is looked at.
const PLACED = ["tour", "entry", "head", "batch", "second", "row", "column", "zoom", "pin"];

let mounted = 0;

/**
 * Start a page in `root` (an element of class "attlas") on the answers of `transport`.
 *
 * `options.hash`: keep the state in the URL; `options.initial`: fields of the state to start with; `options.numbers`:
 * what the help says of the numbers, where they are not computed for each request; `options.reopen`: builds the page
 * anew once another text was read. Returns `{destroy, ready}`; `ready` is settled with the context of the panels when the page stands.
 */
export function mount(root, transport, options = {}) {
  const endings = [];
  let destroyed = false;
  const page = `attlas-${++mounted}`;
  let ids = 0;
  const uid = (name) => `${page}-${name}-${++ids}`;

  const requests = createRequests(transport);
  endings.push(() => requests.destroy());
  const shell = createShell(root, uid);
  endings.push(() => shell.destroy());

  async function start() {
    // What is known of the heads at once says where to begin; a link says it itself.
    const link = () => ({ ...options.initial, ...(options.hash ? readHash(window.location.hash) : {}) });
    const isPlace = (found) => Object.keys(found).some((field) => PLACED.includes(field));
    const [{ json: info }, heads] = await Promise.all([requests.get("info"), isPlace(link()) ? null : requests.get("heads").catch(() => null)]);
    if (destroyed) return null;
    const found = { ...link() }; // it may have changed meanwhile
    const mark = info.bookmarks?.[found.tour];
    if (mark) Object.assign(found, readHash(mark.at), { tour: found.tour });
    const begin = { ...DEFAULTS, ...startOf(info, isPlace(found) ? null : heads?.json), ...found };
    const store = createStore({ ...begin, ...(isPlace(found) || found.pool ? {} : await poolingOf(requests, info, begin)), info });
    if (destroyed) return null;
    endings.push(keepValid(store));
    endings.push(followTheme(root, store));
    const tokens = createTokens(requests, info.text_length);
    const map = createMap(shell.map, { store, transport: requests, tokens, announce: shell.announce, uid, tools: shell.tools });
    endings.push(() => map.destroy());
    const context = { store, transport: requests, map, tokens, announce: shell.announce, uid, root, numbers: options.numbers, tools: shell.tools, reopen: options.reopen };
    if (options.hash) {
      endings.push(bindHash(store));
      document.documentElement.lang = language;
    } else root.lang = language;
    endings.push(shell.connect(context));
    const panels = [
      [mountHeads, shell.heads],
      [mountText, shell.text],
      [mountReading, shell.reading],
      [mountSearch, shell.search],
      [mountColourbar, shell.colourbar],
      [mountExport, shell.export],
      [mountHelp, shell.help],
      [mountCompare, shell.compare],
      [mountStatus, shell.status],
      [mountSays, shell.says],
      [mountLines, shell.lines],
    ];
    for (const [mountPanel, element] of panels) {
      const panel = mountPanel(element, context);
      endings.push(() => panel.destroy());
    }
    const bookmarks = mountBookmarks(shell.tour, { ...context, button: shell.bookmarks });
    endings.push(() => bookmarks.destroy());
    endings.push(createKeys(root, context));
    endings.push(followTitle(store, options));
    root.classList.add("attlas-ready");
    return context;
  }

  const ready = start().catch((error) => {
    if (!destroyed) shell.fail(error.message);
    throw error;
  });
  ready.catch(() => {}); // said on the page; who waits for `ready` hears of it too
  return {
    ready,
    destroy() {
      destroyed = true;
      for (const end of endings.reverse()) end();
    },
  };
}

// The most telling head, where it is known, else the first entry whose cells can be read; no pane for a text without one.
function startOf(info, heads) {
  const readable = info.entries.findIndex((entry) => entry.readable);
  const first = { entry: Math.max(0, readable), head: 0, ...heads?.telling };
  const other = counterpart(info, first.entry);
  const second = other === null ? {} : { second: { entry: other, head: first.head }, compare: "ratio" };
  return { ...first, ...second, ...(info.texts || info.reading ? {} : { aside: "heads" }) };
}

// The pooling that shows most of the head that the page opens at; what there is by default where it cannot be told.
async function poolingOf(requests, info, { entry, head, batch }) {
  if (info.only || info.entries[entry]?.readable === false) return {};
  const answer = await requests.get("pooling", { entry, head, batch }).catch(() => null);
  return answer ? { pool: answer.json.pool } : {};
}

// A link may name what this atlas does not have, and a range may belong to the other kind of scale.
function keepValid(store) {
  const check = () => {
    const patch = repaired(store.state);
    if (Object.keys(patch).length) store.set(patch);
  };
  check();
  const fields = ["entry", "head", "batch", "pool", "variant", "second", "compare", "pin", "span", "colour", "low", "high"];
  return store.on(fields, check);
}

/** What must change in a state so that it names only what there is. */
export function repaired(state) {
  const { entries } = state.info;
  const patch = {};
  const headIn = (entry, head) => head === "mean" || head < entry.heads.length;
  const at = state.entry < entries.length ? state.entry : 0;
  const entry = entries[at];
  if (at !== state.entry) patch.entry = at;
  if (!headIn(entry, state.head)) patch.head = entry.heads.length - 1;
  const { info } = state;
  if (isWeighted(state) && !(state.variant in (entry.largest_norms ?? {}))) patch.variant = "plain";
  if (!holds(info, at, patch.head ?? state.head)) Object.assign(patch, info.held[0]);
  Object.assign(patch, info.only);
  if (state.batch >= (entry.batch ?? 1)) patch.batch = 0;
  const { second } = state;
  const hasSecond = second && second.entry < entries.length && headIn(entries[second.entry], second.head);
  if (second && !(hasSecond && holds(info, second.entry, second.head))) patch.second = null;
  if (state.pin && !(state.pin.i < entry.m && state.pin.j < entry.n)) patch.pin = null;
  const { span } = state;
  const asked = state.pin && patch.pin !== null && span && span.start < span.stop && span.start >= entry.first_key && span.stop <= entry.first_key + entry.n;
  if (span && !asked) patch.span = null;
  const { low, high } = rangeOf({ ...state, ...patch });
  if (low !== state.low || high !== state.high) Object.assign(patch, { low, high });
  return Object.fromEntries(Object.entries(patch).filter(([field, value]) => !same(state[field], value)));
}

// The theme that is shown: the chosen one, or what the system asks for.
function followTheme(root, store) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const { theme } = store.state;
    const dark = theme === "auto" ? system.matches : theme === "dark";
    root.dataset.theme = dark ? "dark" : "light";
    store.set({ dark });
  };
  show();
  system.addEventListener("change", show);
  const off = store.on("theme", show);
  return () => {
    off();
    system.removeEventListener("change", show);
  };
}

// The name of the tab says what is looked at; not where the page is a guest in somebody else's document.
function followTitle(store, options) {
  if (!options.hash) return () => {};
  const show = ({ info, entry, head }) => {
    document.title = `${headName(info, entry, head)} · ${info.title} · attlas`;
  };
  show(store.state);
  return store.on(["entry", "head"], show);
}
