// The state of the page of a corpus, and how a link writes it.

import { isEqual, createEnumCodec } from "../data/state.js";

/** What the page shows before anything is chosen; `x`, `y`, `size`, `colour` and `measure` name measures. */
/** @type {Readonly<Omit<CorpusState, "info"> & { info: null }>} */
export const CORPUS_DEFAULTS = Object.freeze({
  x: "",
  y: "",
  size: "", // "": all points have one size
  colour: "layer",
  xlog: false,
  ylog: false,
  brush: null, // null | {corpus, x0, x1, y0, y1}, in the numbers of the axes
  find: "", // filters the table: "3" is layer 3, "3.5" its head 5
  sort: "", // name of a column; with "-" in front, the largest first
  open: null, // null: all heads | for each corpus {layer, head} or null
  measure: "", // whose distribution over texts is shown
  interval: 0, // 0: the highest
  theme: "auto",
  language: null, // null | "en" | "zh": null is that of the browser; words.js reads it from the address
  panel: "", // "" | "help"
  // Not in the URL:
  info: null,
  hover: null, // null | {corpus, row}
  dark: false,
});

/** @type {Codec<string>} */
const textCodec = { write: String, read: (text) => text.slice(0, 200) };
/** @type {Codec<boolean>} */
const flagCodec = { write: (value) => (value ? "1" : "0"), read: (text) => text === "1" };
/** @param {CorpusHead | null} head */
const formatHead = (head) => (head ? `${head.layer}.${head.head}` : "");
/** @type {Fields<CorpusView>} */
const FIELDS = {
  x: ["x", textCodec],
  y: ["y", textCodec],
  size: ["s", textCodec],
  colour: ["c", textCodec],
  xlog: ["xl", flagCodec],
  ylog: ["yl", flagCodec],
  brush: ["b", { write: ({ corpus, x0, x1, y0, y1 }) => [corpus, ...[x0, x1, y0, y1].map((value) => Number(value.toPrecision(5)))].join("_"), read: readBrush }],
  find: ["q", textCodec],
  sort: ["sort", textCodec],
  open: ["h", { write: (heads) => heads.map(formatHead).join("~"), read: readHeads }],
  measure: ["m", textCodec],
  interval: ["i", { write: String, read: (text) => (/^\d{1,3}$/.test(text) ? Number(text) : undefined) }],
  theme: ["t", createEnumCodec("auto", "light", "dark")],
  language: ["lang", createEnumCodec("en", "zh")],
  panel: ["panel", { write: String, read: (text) => (text === "help" ? text : undefined) }],
};
const FIELD_LIST = /** @type {[keyof CorpusView, [param: string, codec: Codec<unknown>]][]} */ (Object.entries(FIELDS));
const FIELD_NAMES = FIELD_LIST.map(([field]) => field);

/**
 * @param {string} text
 * @returns {Brush | undefined}
 */
function readBrush(text) {
  const [corpus, x0, x1, y0, y1] = text.split("_").map((part) => (part === "" ? NaN : Number(part)));
  return [corpus, x0, x1, y0, y1].every(Number.isFinite) ? { corpus, x0, x1, y0, y1 } : undefined;
}
/**
 * @param {string} text
 * @returns {(CorpusHead | null)[] | undefined}
 */
function readHeads(text) {
  const heads = text.split("~").map((part) => /^(\d{1,6})\.(\d{1,6})$/.exec(part)).map((match) => match && { layer: Number(match[1]), head: Number(match[2]) });
  return heads.some(Boolean) ? heads : undefined;
}

/**
 * The state as the text after `#`: fields at their defaults are left out.
 *
 * @param {CorpusView} state
 * @param {CorpusView} [defaults]
 */
export function writeCorpusHash(state, defaults = CORPUS_DEFAULTS) {
  const parts = [];
  for (const [field, [short, codec]] of FIELD_LIST) {
    const value = state[field];
    const initial = defaults[field];
    if (value === initial || (value === null && initial === null)) continue;
    parts.push(`${short}=${value === null ? "" : encodeURIComponent(codec.write(value))}`);
  }
  return parts.join("&");
}

/**
 * The fields that a hash holds; what cannot be read is left out.
 *
 * @param {string} text
 * @returns {Partial<CorpusView>}
 */
export function readCorpusHash(text) {
  const params = new URLSearchParams(text.replace(/^#/, ""));
  /** @type {Record<string, unknown>} */
  const fields = {};
  for (const [field, [short, codec]] of FIELD_LIST) {
    const written = params.get(short);
    const value = written === null ? undefined : codec.read(written);
    if (value !== undefined) fields[field] = value;
  }
  return fields;
}

/** @param {Pick<CorpusView, "open">} state */
const formatOpenHeads = (state) => (state.open ?? []).map(formatHead).join("~");

/**
 * Keep the URL and the store in step. Opening another head, or going back to all of them, is a step that Back undoes;
 * every other change replaces the address.
 *
 * @param {Store<CorpusState>} store
 * @param {CorpusView} defaults
 * @param {LinkWindow} [view]
 */
export function bindCorpusHash(store, defaults, view = window) {
  let timer = 0;
  let lastOpen = formatOpenHeads(store.state);
  const write = () => {
    clearTimeout(timer);
    const hash = writeCorpusHash(store.state, defaults);
    const open = formatOpenHeads(store.state);
    if (hash === view.location.hash.slice(1)) return;
    view.history[open === lastOpen ? "replaceState" : "pushState"](null, "", `#${hash}`);
    lastOpen = open;
  };
  const scheduleWrite = () => {
    clearTimeout(timer);
    timer = setTimeout(write, 150);
  };
  const restore = () => {
    clearTimeout(timer);
    const names = FIELD_NAMES.filter((field) => !["theme", "language"].includes(field));
    const linkFields = readCorpusHash(view.location.hash);
    /** @type {Record<string, unknown>} */
    const patch = { ...Object.fromEntries(names.map((field) => [field, defaults[field]])), ...linkFields };
    for (const field of FIELD_NAMES) {
      const [next, now] = [patch[field], store.state[field]];
      if (isEqual(next, now) || JSON.stringify(next) === JSON.stringify(now)) delete patch[field];
    }
    store.set(patch);
    lastOpen = formatOpenHeads(store.state);
  };
  const subscriptions = [store.on(["open"], write), store.on(FIELD_NAMES, scheduleWrite)];
  view.addEventListener("popstate", restore);
  return () => {
    for (const unsubscribe of subscriptions) unsubscribe();
    clearTimeout(timer);
    view.removeEventListener("popstate", restore);
  };
}
