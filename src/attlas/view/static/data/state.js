// The state of a page. Fields that belong to a link are written to the URL hash.

import { isRollout } from "./numbers.js";

/** log2 of the CSS pixels that a cell may have; the least is less where the whole matrix needs it. */
export const ZOOM_MIN = -9;
export const ZOOM_MAX = 6;

/** The palettes of weights, the first one by default. */
export const PALETTES = ["depth", "viridis", "magma", "cividis", "grey"];

/** What a page shows before anything is chosen. `row`, `column` and `zoom` are null until the map has been fitted. */
/** @type {Readonly<Omit<State, "info"> & { info: null }>} */
export const DEFAULTS = Object.freeze({
  text: null, // null | the number of the text, where a model reads texts that are typed: 0 is the first recording
  entry: 0, // index in info.entries
  head: 0, // index in entry.heads, or "mean"
  batch: 0,
  pool: "max", // "mean" | "max": how cells of a block become one colour
  variant: "plain", // "plain" | "nosink": first key excluded, rows renormalised | "value" | "output": see weighting.js
  second: null, // null | {entry, head}: the head that is compared with
  compare: "none", // "none" | "side" | "triangle" | "ratio" | "difference" | "colours"
  more: "", // compare "colours": further heads by entry and head, "3.1,2.4"
  view: "map", // "map" | "lines": the matrix, or tokens in two columns with a line for each weight
  row: null, // cell at the centre of the map (float)
  column: null,
  zoom: null, // log2 of CSS pixels per cell
  colour: "log", // "log" | "linear"
  low: null, // log2 weights (log) or weights (linear); null: chosen from the matrix
  high: null,
  ratio: 6, // compare "ratio": the colour bar reaches from -ratio to +ratio, in log2
  difference: 0.1, // compare "difference": the colour bar reaches from -difference to +difference
  palette: "depth", // one of PALETTES
  language: null, // null | "en" | "zh": null is that of the browser; words.js reads it from the address
  theme: "auto", // "auto" | "light" | "dark"
  pin: null, // null | {i, j}
  span: null, // null | {start, stop}: positions of the keys whose weights are shown; null: the pinned key
  heat: "pair", // "statistic" | "pair" | "agree": what the map of layers and heads shows of a pinned cell
  by: "query", // "query" | "key": whose row or column the text pane shows
  ink: "linear", // "linear" | "log": how the text is coloured by weights
  sort: "",
  filter: "",
  panel: "", // what is open on top: "" | "heads" | "text" | "search" | "help" | "head" | "why" | "outline" | "export" | "compare"
  tour: null, // null | the index of the bookmark that a tour shows
  story: null, // null | the step of the tour that the recording itself has
  aside: "both", // "both" | "heads" | "text" | "none": which side panes are open on wide screens; "grid": heads alone
  outline: "on", // "on" | "off": brackets about functions, sentences and documents along the axes
  minimap: "on", // "on" | "off": the whole matrix in a corner of the map, while it is zoomed in
  off: "", // what a text is read again without: heads by entry and head, "2.4,3.1", and tokens, "2.4;12-15"
  // Not in the URL:
  hover: null, // null | {i, j}: under the pointer, under the keyboard crosshair, or under a hovered token
  reading: null, // null | the weight of that cell, or of the block that its pixel stands for
  pointed: null, // null | {i, j}: the cell last hovered in the map or the text, while nothing is pinned
  grain: Object.freeze({ side: 1, framed: false }), // what a pixel of the map shows, as `describeGrain` says
  info: null,
  progress: null, // null | {entry, head, fraction, secondsLeft}
  heads: null,
  step: 0, // steps of a tour requested by a key
  flight: "", // "" | "play" | "record": a flight over the map
  statistic: null, // the name of the statistic that the heads are sorted by
  pairs: null, // null | {"entry:head": {pair, agree}}: what each head says of the pinned cell
  dark: false, // the theme that is shown
});

/** @type {Codec<number>} */
const integerCodec = { write: String, read: (text) => (/^\d{1,9}$/.test(text) ? Number(text) : undefined) };
/**
 * @param {number} low
 * @param {number} high
 * @param {number} digits
 */
const createDecimalCodec = (low, high, digits) => ({
  write: (/** @type {number} */ value) => String(Number(value.toFixed(digits))),
  read: (/** @type {string} */ text) => {
    const value = text === "" ? NaN : Number(text);
    return Number.isFinite(value) ? Math.min(high, Math.max(low, value)) : undefined;
  },
});
/**
 * @template {string} T
 * @param {...T} values
 * @returns {Codec<T>}
 */
export const createEnumCodec = (...values) => ({ write: String, read: (text) => values.find((value) => value === text) });
/** @type {Codec<HeadIndex>} */
const headCodec = { write: String, read: (text) => (text === "mean" ? text : integerCodec.read(text)) };
/**
 * @template {object} T
 * @param {keyof T & string} first
 * @param {keyof T & string} second
 * @returns {Codec<T>}
 */
const createPairCodec = (first, second) => ({
  write: (value) => Object.values(value).join("."),
  read: (text) => {
    const parts = text.split(".");
    const a = integerCodec.read(parts[0]);
    const b = parts.length === 2 ? (second === "head" ? headCodec : integerCodec).read(parts[1]) : undefined;
    return a === undefined || b === undefined ? undefined : /** @type {T} */ ({ [first]: a, [second]: b });
  },
});
/** @type {Codec<string>} */
const textCodec = {
  write: (value) => (typeof value === "string" ? value : `~${JSON.stringify(value)}`),
  read: (text) => {
    if (!text.startsWith("~")) return text.slice(0, 2000);
    try {
      return JSON.parse(text.slice(1));
    } catch {
      return undefined;
    }
  },
};

// Name in the URL, and how the value is written and read there. Short names keep links short.
/** @type {Fields<View>} */
const FIELDS = {
  text: ["txt", integerCodec],
  entry: ["e", integerCodec],
  head: ["h", headCodec],
  batch: ["b", integerCodec],
  pool: ["p", createEnumCodec("mean", "max")],
  variant: ["v", createEnumCodec("plain", "nosink", "value", "output")],
  second: ["s", createPairCodec("entry", "head")],
  compare: ["m", createEnumCodec("none", "side", "triangle", "ratio", "difference", "colours")],
  more: ["o", textCodec],
  view: ["w", createEnumCodec("map", "lines")],
  row: ["r", createDecimalCodec(-1e9, 1e9, 3)],
  column: ["c", createDecimalCodec(-1e9, 1e9, 3)],
  zoom: ["z", createDecimalCodec(-40, ZOOM_MAX, 3)],
  colour: ["f", createEnumCodec("log", "linear")],
  low: ["lo", createDecimalCodec(-64, 64, 6)],
  high: ["hi", createDecimalCodec(-64, 64, 6)],
  ratio: ["x", createDecimalCodec(0.25, 64, 2)],
  difference: ["d", createDecimalCodec(1e-6, 1, 7)],
  palette: ["pal", createEnumCodec(...PALETTES)],
  language: ["lang", createEnumCodec("en", "zh")],
  theme: ["t", createEnumCodec("auto", "light", "dark")],
  pin: ["pin", createPairCodec("i", "j")],
  span: ["k", createPairCodec("start", "stop")],
  heat: ["hm", createEnumCodec("statistic", "pair", "agree")],
  by: ["by", createEnumCodec("query", "key")],
  ink: ["ink", createEnumCodec("linear", "log")],
  sort: ["sort", textCodec],
  filter: ["q", textCodec],
  panel: ["panel", textCodec],
  tour: ["tour", integerCodec],
  story: ["story", integerCodec],
  off: ["off", textCodec],
  outline: ["ol", createEnumCodec("on", "off")],
  minimap: ["mm", createEnumCodec("on", "off")],
  aside: ["a", createEnumCodec("both", "heads", "text", "none", "grid")],
};
const FIELD_LIST = /** @type {[keyof View, [param: string, codec: Codec<unknown>]][]} */ (Object.entries(FIELDS));
export const FIELD_NAMES = FIELD_LIST.map(([field]) => field);

/**
 * The state as the text after `#`: fields at their defaults are left out.
 *
 * @param {View} state
 */
export function writeHash(state) {
  const parts = [];
  for (const [field, [param, codec]] of FIELD_LIST) {
    const value = state[field];
    if (value === null || value === undefined || isEqual(value, DEFAULTS[field])) continue;
    parts.push(`${param}=${encodeURIComponent(codec.write(value))}`);
  }
  return parts.join("&");
}

/**
 * What is looked at, as the hash of a link or a bookmark: without open dialogs, tours, and the settings of the page.
 *
 * @param {View} state
 */
export function writeView(state) {
  return writeHash({ ...state, text: state.text || null, panel: "", tour: null, story: null, theme: "auto", language: null, aside: "both" });
}

/**
 * The fields that a hash holds; what cannot be read is left out.
 *
 * @param {string} text
 * @returns {Partial<View>}
 */
export function readHash(text) {
  /** @type {Record<string, unknown>} */
  const fields = {};
  const params = new URLSearchParams(text.replace(/^#/, ""));
  for (const [field, [param, codec]] of FIELD_LIST) {
    const text = params.get(param);
    if (text === null) continue;
    const value = codec.read(text);
    if (value !== undefined) fields[field] = value;
  }
  return fields;
}

/**
 * The fields that a hash sets. Settings of the page are not reset, nor the position unless the hash has one.
 *
 * @param {string} hash
 * @returns {Partial<View>}
 */
export function readView(hash) {
  const unchanged = ["text", "row", "column", "zoom", "theme", "aside", "language", "outline", "minimap"];
  const fields = FIELD_NAMES.filter((field) => !unchanged.includes(field));
  return { ...Object.fromEntries(fields.map((field) => [field, DEFAULTS[field]])), ...readHash(hash) };
}

/**
 * The fields that a link sets in an open page: those of its bookmark where it names one. A link that is typed, with a place
 * and no head, leaves the head alone; one that was copied has the zoom too, and leaves out a head that is the first.
 *
 * @param {string} hash
 * @param {Pick<State, "info" | "entry" | "head">} state
 * @returns {Partial<View>}
 */
export function readLink(hash, { info, entry, head }) {
  const fields = readHash(hash);
  const bookmark = info?.bookmarks?.[fields.tour ?? -1];
  if (bookmark) return { ...readView(bookmark.at), ...fields };
  const namesHead = ["entry", "head", "zoom"].some((field) => field in fields);
  return { ...readView(hash), ...(namesHead ? {} : { entry, head }) };
}

/**
 * The heads of an entry, and the mean of all; rollouts have none.
 *
 * @param {Pick<Entry, "heads"> & { kind?: string }} entry
 */
export const listHeads = (entry) => /** @type {HeadIndex[]} */ (isRollout(entry) ? [...entry.heads.keys()] : [...entry.heads.keys(), "mean"]);

/**
 * The place of the map, which is known from the moment that the map has been fitted.
 *
 * @param {Readonly<State>} state
 */
export const getPlace = (state) => /** @type {Place} */ (state);

/**
 * Whether a comparison shows the differences of two heads, in diverging colours.
 *
 * @param {Compare} compare
 * @returns {compare is "ratio" | "difference"}
 */
export function isContrast(compare) {
  return compare === "ratio" || compare === "difference";
}

/**
 * The fields with which the first head and the second one change places; none where there is no second one.
 *
 * @param {Pick<State, "entry" | "head" | "second">} state
 * @returns {Partial<View>}
 */
export const swapHeads = ({ entry, head, second }) => (second ? { ...second, second: { entry, head } } : {});

/**
 * The entry of the other recording that has the same place in its model; null where there is none.
 *
 * @param {Info} info
 * @param {number} entry
 */
export function findCounterpart(info, entry) {
  const shownEntry = info.entries[entry];
  /** @type {(keyof Entry)[]} */
  const compared = ["layer", "kind", "call", "m", "n"];
  const index = info.entries.findIndex((other) => (other.recording ?? "") !== (shownEntry.recording ?? "") && compared.every((field) => other[field] === shownEntry[field]));
  return index < 0 ? null : index;
}

/**
 * Whether two values of the state are equal; its objects are small and flat, or replaced as a whole.
 *
 * @param {unknown} a
 * @param {unknown} b
 */
export function isEqual(a, b) {
  if (Object.is(a, b)) return true;
  if (typeof a !== "object" || typeof b !== "object" || !a || !b || Array.isArray(a)) return false;
  const [first, second] = /** @type {Record<string, unknown>[]} */ ([a, b]);
  const keys = Object.keys(first);
  return keys.length <= 4 && keys.length === Object.keys(second).length && keys.every((key) => Object.is(first[key], second[key]));
}

/**
 * A store of one frozen state; listeners of changed fields are called after the whole patch is applied.
 *
 * @template {object} S
 * @param {NoInfer<Partial<S>>} [initial]
 * @param {object} [defaults]
 * @returns {Store<S>}
 */
export function createStore(initial = {}, defaults = DEFAULTS) {
  let state = Object.freeze(/** @type {S} */ ({ ...defaults, ...initial }));
  /** @type {Set<{ keys: (keyof S)[] | null, listener: (state: Readonly<S>, changed: (keyof S)[]) => unknown }>} */
  const listeners = new Set();
  return {
    get state() {
      return state;
    },
    /** Change fields; a field set to an equal value calls no listener. */
    set(patch) {
      const changed = /** @type {(keyof S)[]} */ (Object.keys(patch)).filter((key) => !isEqual(state[key], patch[key]));
      if (!changed.length) return;
      state = Object.freeze({ ...state, ...Object.fromEntries(changed.map((key) => [key, patch[key]])) });
      for (const { keys, listener } of [...listeners]) {
        if (!keys || keys.some((key) => changed.includes(key))) listener(state, changed);
      }
    },
    /** Call `listener(state, changed)` when one of `keys` (null: any) has changed; returns the function that ends it. */
    on(keys, listener) {
      const entry = { keys: Array.isArray(keys) || keys === null ? keys : [keys], listener };
      listeners.add(entry);
      return () => listeners.delete(entry);
    },
  };
}

/**
 * Keep the URL hash and the store in step; `replaceState`, so that Back leaves the page, or goes to the text before.
 * `reopen` builds the page again on another text.
 *
 * @param {Store} store
 * @param {LinkWindow} [view]
 * @param {Reopen} [reopen]
 */
export function bindHash(store, view = window, reopen) {
  let timer = 0;
  const write = () => {
    const hash = writeHash(store.state);
    if (hash !== view.location.hash.slice(1)) view.history.replaceState(null, "", `#${hash}`);
  };
  const scheduleWrite = () => {
    clearTimeout(timer);
    timer = setTimeout(write, 150);
  };
  const restore = () => {
    const fields = readLink(view.location.hash, store.state);
    if (reopen && (fields.text ?? store.state.text) !== store.state.text) {
      detach();
      reopen({ ...store.state, ...fields }, false);
    } else store.set(fields);
  };
  const unsubscribe = store.on(FIELD_NAMES, scheduleWrite);
  const detach = () => {
    unsubscribe();
    clearTimeout(timer);
    view.removeEventListener("hashchange", restore);
  };
  view.addEventListener("hashchange", restore);
  scheduleWrite();
  return detach;
}
