// A folder that attlas has recorded, as what an offline page holds: its exact weights are computed here when they are asked for.

import { DEFAULTS } from "../data/state.js";
import { TILE } from "../map/geometry.js";
import { createComputedParts } from "./weights.js";
import { readNumbers, readTensors } from "./tensors.js";
import { formatInteger } from "../data/numbers.js";
import { t } from "../words/words.js";

const LATEST = 5; // version of the format of folders
export const MOST_TOKENS = 2048; // of a text: 2,048² weights of a head are 16 MB and take about a second

/**
 * Read the list of a folder; tensors are read when their head is looked at.
 *
 * @param {OpenedFolder} folder
 * @returns {Promise<PackedData>}
 */
export async function readRecording(folder) {
  const manifest = await readManifest(folder);
  const reasons = manifest.entries.map(explainRefusal);
  if (reasons.every((reason) => reason !== null)) {
    const found = manifest.entries.length ? reasons[0] : t("it has no attention");
    throw new Error(t("The recording {0} cannot be computed here: {1}. attlas report {0} -o page.html writes a page that opens here, and attlas view {0} shows all of it", folder.name, found));
  }
  const tokens = listTokens(manifest);
  const entries = manifest.entries.map((record, id) => describeEntry(record, id, tokens !== null, reasons[id] === null));
  const held = entries.flatMap((entry) => (entry.readable ? entry.heads.map((_, head) => ({ entry: entry.id, head, finest: 0, block: null, exact: true, kept: 0, patches: [] })) : []));
  const fetchHead = createHeadReader(folder, manifest);
  await fetchHead(held[0].entry, 0); // a file that is missing or damaged is told before anything is shown
  const names = entries.filter((entry) => !entry.readable).map((entry) => `${entry.layer}: ${reasons[entry.id]}`);
  const title = manifest.details?.source ? String(manifest.details.source) : folder.name;
  return {
    format: 1,
    info: {
      key: manifest.sha256,
      title,
      first_title: title,
      model: manifest.model ?? "",
      text_length: tokens?.length ?? Math.max(...entries.map(({ m }) => m)),
      texts: tokens ? [tokens.length] : [],
      about: names.length ? [["Recorded", names.map((name) => ["{0}", name])]] : [],
      spans: manifest.spans ?? {},
      entries,
      units: {},
      folder: null,
      project: null,
      bookmarks: await readBookmarks(folder),
      keeps: false,
      on_demand_level: 0,
      tracks: ["entropy", "effective_keys", "max_weight", "column_mass", "column_max"],
    },
    state: { ...DEFAULTS, entry: held[0].entry, head: 0, pool: "max" },
    packed: held,
    story: [],
    heads: { progress: 1, columns: [], rows: held.map(({ entry, head }) => ({ entry, head, kinds: [], share: null, measures: null, on_text: null, values: {} })), kinds: {}, on: null, telling: null },
    texts: tokens ? { 0: { tokens, joined: [] } } : {},
    parts: {},
    compute: createComputedParts(fetchHead),
  };
}

/**
 * @param {OpenedFolder} folder
 * @returns {Promise<StoredAtlas>}
 */
async function readManifest(folder) {
  /** @type {StoredAtlas} */
  let manifest;
  try {
    manifest = JSON.parse(new TextDecoder().decode(await folder.read("atlas.json")));
  } catch (error) {
    throw error instanceof SyntaxError ? new Error(t("atlas.json of {0} cannot be read", folder.name)) : error;
  }
  if (manifest.format !== "attlas-atlas" || !Array.isArray(manifest.entries)) throw new Error(t("{0} is no recording that attlas has written", folder.name));
  if (!(manifest.version >= 2 && manifest.version <= LATEST)) throw new Error(t("The recording {0} has version {1} of the format, and this page reads 2 to {2}", folder.name, manifest.version, LATEST));
  return manifest;
}

/**
 * Why the weights of an entry are not computed here; null where they are.
 *
 * @param {StoredEntry} record
 */
function explainRefusal({ matrix, shape, queries, first_key: firstKey }) {
  if (!matrix) return t("it holds statistics, and no queries and keys");
  if (matrix.weights) return t("its weights are {0}", matrix.weights);
  if (matrix.score?.class !== "ScaledDot" || typeof (matrix.score.scale ?? 1) !== "number") return t("its score is {0}", matrix.score?.class ?? "?");
  const [, , m, n] = shape;
  const mask = matrix.mask?.class ?? null;
  const isSquare = m === n && queries[0] === firstKey && (matrix.mask?.offset ?? 0) === 0;
  if (mask !== null && !(mask === "Causal" && isSquare)) return t("its mask is {0}", mask === "Causal" ? `Causal(offset=${matrix.mask?.offset})` : mask);
  if (matrix.sink || matrix.partial || matrix.weighted) return t("it has a sink or values beside its softmax");
  if (Math.max(m, n) > MOST_TOKENS) return t("it has {0} × {1} weights a head, and this page computes up to {2} tokens", formatInteger(m), formatInteger(n), formatInteger(MOST_TOKENS));
  return null;
}

/** @param {StoredAtlas} manifest */
function listTokens({ tokens, texts }) {
  const [first] = texts ?? [tokens];
  return Array.isArray(first) && first.every((token) => typeof token === "string") ? first : null;
}

/**
 * @param {StoredEntry} record
 * @param {number} id
 * @param {boolean} hasText
 * @param {boolean} readable
 * @returns {Entry}
 */
function describeEntry({ layer, kind, call, name, heads, queries, first_key: firstKey, shape: [, , m, n], matrix }, id, hasText, readable) {
  const text = hasText && kind !== "cross" ? 0 : null;
  return {
    id, layer, kind, call, name, heads, m, n, first_query: queries[0], first_key: firstKey, texts: [[text, text]], spans: text === null ? [] : ["query", "key"], recording: "", batch: 1,
    levels: Math.max(0, Math.ceil(Math.log2(Math.max(m, n, 1) / TILE))) + 1, causal: matrix?.mask?.class === "Causal", softmax: true, shares: true, signed: false, largest: {}, sink: false, readable, largest_norms: {},
  };
}

/**
 * @param {OpenedFolder} folder
 * @returns {Promise<Bookmark[]>}
 */
async function readBookmarks(folder) {
  try {
    const { bookmarks } = JSON.parse(new TextDecoder().decode(await folder.read("bookmarks.json")));
    return bookmarks.map((/** @type {Bookmark} */ { name, at, says }) => ({ name: String(name), at: String(at), says: String(says ?? "") }));
  } catch {
    return []; // most folders have none
  }
}

/**
 * A function that reads the queries, keys and log-sum-exp of a head of the first text.
 *
 * @param {OpenedFolder} folder
 * @param {StoredAtlas} manifest
 */
function createHeadReader(folder, { entries }) {
  /** @type {Map<string, Promise<Record<string, StoredTensor>>>} */
  const files = new Map();
  /** @type {Map<string, Promise<Float32Array | Float64Array>>} */
  const numbers = new Map();

  /** @param {TensorPlace} place */
  function fetchNumbers({ file, tensor }) {
    const key = `${file}:${tensor}`;
    const opened = files.get(file) ?? folder.read(file).then(readTensors);
    files.set(file, opened);
    const found = numbers.get(key) ?? opened.then((tensors) => readNumbers(tensors[tensor]));
    numbers.set(key, found);
    return found;
  }
  /**
   * The part of a tensor of batch, heads and more axes that is of the first text and one head. Where one axis of the file
   * has size 1 all heads share it, and where it has fewer keys than heads, neighbours do.
   *
   * @param {TensorPlace} place
   * @param {number} head
   * @param {number} heads
   */
  async function fetchPart(place, head, heads) {
    const all = await fetchNumbers(place);
    const size = place.own.slice(2).reduce((product, each) => product * each, 1);
    const at = Math.floor((head * place.own[1]) / heads);
    return all.subarray(at * size, (at + 1) * size);
  }
  /**
   * @param {number} entry
   * @param {number} head
   * @returns {Promise<StoredHead>}
   */
  return async (entry, head) => {
    const { matrix, shape } = entries[entry];
    const [, heads, m, n] = shape;
    const { q, k, lse, score, mask } = /** @type {StoredMatrix} */ (matrix);
    const parts = await Promise.all([q, k, lse].map((place) => fetchPart(place, head, heads)));
    const width = q.shape[q.shape.length - 1];
    return { q: parts[0], k: parts[1], lse: parts[2], m, n, width, scale: score.scale ?? 1 / Math.sqrt(width), causal: mask !== null };
  };
}
