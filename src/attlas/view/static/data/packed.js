// A transport over the data of an offline page, which needs no server and no network.

import { unpack } from "./base64.js";
import { decode, encode, MASKED, PENDING, ZERO } from "../map/colour.js";
import { getHeadMark, isRollout } from "./numbers.js";
import { listTiles } from "./pack.js";
import { TransportError } from "./transport.js";
import { areShares, isWeighted, getNumberName, getUnit, describeVariant } from "./weighting.js";
import { t } from "../words/words.js";

/** @param {string} what */
const createMissingError = (what) => new TransportError(404, t("This file does not hold {0}", what));
const tileSide = 256;

/**
 * Whether some cells of a patch lie in a tile of level 0.
 *
 * @param {Region} region
 * @param {number} y
 * @param {number} x
 */
const isInTile = ({ r0, r1, c0, c1 }, y, x) => r0 < (y + 1) * tileSide && r1 > y * tileSide && c0 < (x + 1) * tileSide && c1 > x * tileSide;

/**
 * A tile of level 0 with the cells of patches; the others count as masked, as the map draws none of them.
 *
 * @param {(Region & { weights: Float32Array })[]} patches
 * @param {number} y
 * @param {number} x
 * @param {number} unit
 * @param {boolean} shares
 */
function createPatchTile(patches, y, x, unit, shares) {
  const codes = new Uint16Array(tileSide * tileSide).fill(MASKED);
  for (const { r0, r1, c0, c1, weights } of patches) {
    for (let r = Math.max(r0, y * tileSide); r < Math.min(r1, (y + 1) * tileSide); r++) {
      for (let c = Math.max(c0, x * tileSide); c < Math.min(c1, (x + 1) * tileSide); c++) {
        const weight = weights[(r - r0) * (c1 - c0) + c - c0];
        if (!Number.isNaN(weight)) codes[(r - y * tileSide) * tileSide + c - x * tileSide] = encode(weight / unit, shares);
      }
    }
  }
  return codes.buffer;
}

/**
 * @param {PackedData} data
 * @returns {Transport}
 */
export function createPackedTransport(data) {
  const { parts } = data;
  const { batch, variant, pool } = data.state;
  // `held` and `only`: what the page may offer, as the file holds nothing else.
  const info = { ...data.info, held: data.packed, only: { batch, variant, pool } };
  // The weight of a code of a head.
  const readCode = (/** @type {PackedHead} */ { entry }, /** @type {number} */ code) => getUnit({ info, variant, entry }) * decode(code, areShares({ info, entry }));
  /** @type {Map<string, Promise<ArrayBuffer>>} */
  const unpackedParts = new Map();

  // A part by its name, unpacked once.
  /** @param {string} name */
  async function getPart(name) {
    if (!(name in parts)) return (await data.compute?.(name)) ?? null;
    const known = unpackedParts.get(name) ?? unpack(/** @type {PackedPart} */ (parts[name]));
    unpackedParts.set(name, known);
    return known;
  }
  /**
   * The packed head of a request, or an error where the file does not hold it.
   *
   * @param {Params} params
   * @returns {PackedHead}
   */
  function findHead({ entry, head, batch, variant }) {
    const packedHead = data.packed.find((each) => String(each.entry) === String(entry) && String(each.head) === String(head));
    if (!packedHead) throw createMissingError(t("this head"));
    if (String(batch ?? 0) !== String(data.state.batch)) throw createMissingError(t("this batch"));
    if ((variant ?? "plain") !== data.state.variant) throw createMissingError(variant === "nosink" ? t("rows without the first key") : getNumberName({ variant: String(variant) }));
    return { ...packedHead, name: `${packedHead.entry}:${packedHead.head}`, entryInfo: info.entries[packedHead.entry] };
  }
  const toNumber = (/** @type {Params[string]} */ text) => Number(text);

  /** @param {Params} params */
  async function getTile(params) {
    const head = findHead(params);
    const [level, y, x] = [params.level, params.y, params.x].map(toNumber);
    if (params.pool !== data.state.pool && level > 0) throw createMissingError(params.pool === "mean" ? t("means of blocks") : t("maxima of blocks"));
    const codes = await getPart(`tile:${head.name}:${level}:${y}:${x}`);
    if (codes) return codes;
    const patches = level === 0 ? head.patches.filter((patch) => isInTile(patch, y, x)) : [];
    if (patches.length) return createPatchTile(await Promise.all(patches.map(async (patch) => ({ ...patch, weights: await getPatch(head, patch) }))), y, x, getUnit({ info, variant, entry: head.entry }), areShares({ info, entry: head.entry }));
    if (level < head.finest) throw createMissingError(t("this level of detail"));
    const isInside = y >= 0 && x >= 0 && y * tileSide * 2 ** level < head.entryInfo.m && x * tileSide * 2 ** level < head.entryInfo.n;
    if (!isInside || listTiles(head.entryInfo, level).some((each) => each.y === y && each.x === x)) throw createMissingError(t("this tile"));
    return new Uint16Array(tileSide * tileSide).fill(MASKED).buffer; // masked tiles are not stored
  }
  // A part that the file has, as those of a patch or of kept weights that it names.
  const getOwnPart = async (/** @type {string} */ name) => /** @type {ArrayBuffer} */ (await getPart(name));
  // The weights of the cells of a patch, NaN where masked.
  const getPatch = async (/** @type {PackedHead} */ head, /** @type {Region} */ { r0, c0 }) => new Float32Array(await getOwnPart(`patch:${head.name}:${r0}:${c0}`));
  /**
   * The weights of a region within one patch, NaN where masked; null where the region is in none.
   *
   * @param {PackedHead} head
   * @param {number} r0
   * @param {number} r1
   * @param {number} c0
   * @param {number} c1
   */
  async function getPatchWeights(head, r0, r1, c0, c1) {
    const patch = head.patches.find((each) => r0 >= each.r0 && r1 <= each.r1 && c0 >= each.c0 && c1 <= each.c1);
    if (!patch) return null;
    const weights = await getPatch(head, patch);
    const width = patch.c1 - patch.c0;
    const out = new Float32Array((r1 - r0) * (c1 - c0));
    for (let r = r0; r < r1; r++) out.set(weights.subarray((r - patch.r0) * width + c0 - patch.c0, (r - patch.r0) * width + c1 - patch.c0), (r - r0) * (c1 - c0));
    return out;
  }
  /**
   * A row of which the file holds only the largest weights: other allowed weights are NaN, masked ones 0.
   *
   * @param {PackedHead} head
   * @param {number} i
   */
  async function getKeptRow(head, i) {
    const { entryInfo, kept: keptCount } = head;
    const [gapBytes, codes] = await Promise.all([getOwnPart(`gaps:${head.name}`), getOwnPart(`kept:${head.name}`)]);
    const row = new Float32Array(entryInfo.n).fill(NaN);
    if (entryInfo.causal) row.fill(0, Math.max(0, entryInfo.first_query + i - entryInfo.first_key + 1));
    const [gap, code] = [new Int32Array(gapBytes), new Uint16Array(codes)];
    for (let at = i * keptCount; at < (i + 1) * keptCount; at++) if (code[at] > ZERO) row[i - gap[at]] = readCode(head, code[at]);
    return row;
  }
  /**
   * The largest cell of some rows, if no weight that the file lacks can be larger; else no cell.
   *
   * @param {PackedHead} head
   * @param {number} r0
   * @param {number} r1
   * @param {number} c0
   * @param {number} c1
   * @returns {Promise<WeightedCell[]>}
   */
  async function findKeptLargest(head, r0, r1, c0, c1) {
    const { entryInfo, kept: keptCount, name } = head;
    const [gapBytes, codes] = await Promise.all([getOwnPart(`gaps:${name}`), getOwnPart(`kept:${name}`)]);
    const [gap, code] = [new Int32Array(gapBytes), new Uint16Array(codes)];
    /** @type {WeightedCell | null} */
    let best = null;
    let largestMissing = 0;
    const getSize = (/** @type {number} */ place) => Math.abs(readCode(head, code[place]));
    for (let i = r0; i < r1; i++) {
      const allowed = entryInfo.causal ? Math.min(entryInfo.n, entryInfo.first_query + i - entryInfo.first_key + 1) : entryInfo.n;
      if (allowed > keptCount) largestMissing = Math.max(largestMissing, getSize((i + 1) * keptCount - 1));
      for (let at = i * keptCount; at < (i + 1) * keptCount; at++) {
        const j = i - gap[at];
        if (j >= c0 && j < c1 && getSize(at) > Math.abs(best?.[2] ?? 0)) best = [i, j, readCode(head, code[at])];
      }
    }
    return best && Math.abs(best[2]) >= largestMissing ? [best] : [];
  }
  /**
   * The weights of a region: exact where the file holds them, else `rounded`, from the codes of the finest level or
   * of the largest weights of a row.
   *
   * @param {Params} params
   * @param {number} r0
   * @param {number} r1
   * @param {number} c0
   * @param {number} c1
   * @returns {Promise<PackedWeights>}
   */
  async function getWeights(params, r0, r1, c0, c1) {
    const head = findHead(params);
    const { n } = head.entryInfo;
    const out = new Float32Array((r1 - r0) * (c1 - c0));
    const exact = await getPart(`exact:${head.name}`);
    if (exact) {
      const all = new Float32Array(exact);
      for (let r = r0; r < r1; r++) out.set(all.subarray(r * n + c0, r * n + c1), (r - r0) * (c1 - c0));
      return { weights: out, rounded: false };
    }
    const row = r1 - r0 === 1 ? await getPart(`row:${head.name}:${r0}`) : null;
    if (row) return { weights: new Float32Array(row).slice(c0, c1), rounded: false };
    const column = c1 - c0 === 1 ? await getPart(`column:${head.name}:${c0}`) : null;
    if (column) return { weights: new Float32Array(column).slice(r0, r1), rounded: false };
    const inPatch = await getPatchWeights(head, r0, r1, c0, c1);
    if (inPatch) return { weights: inPatch.map((weight) => weight || 0), rounded: false };
    if (head.finest > 0) {
      if (!head.kept) throw createMissingError(t("the weights of single cells of this head; it holds blocks"));
      if (r1 - r0 > 1 && c1 - c0 > 1) throw createMissingError(t("the weights of single cells of this head; it holds blocks, and the largest weights of each row"));
      for (let r = r0; r < r1; r++) out.set((await getKeptRow(head, r)).subarray(c0, c1), (r - r0) * (c1 - c0));
      return { weights: out, rounded: true, partial: true };
    }
    for (let y = Math.floor(r0 / tileSide); y * tileSide < r1; y++) {
      for (let x = Math.floor(c0 / tileSide); x * tileSide < c1; x++) {
        const codes = new Uint16Array(await getTile({ ...params, pool: data.state.pool, level: 0, y, x }));
        for (let r = Math.max(r0, y * tileSide); r < Math.min(r1, (y + 1) * tileSide); r++) {
          for (let c = Math.max(c0, x * tileSide); c < Math.min(c1, (x + 1) * tileSide); c++) {
            const code = codes[(r - y * tileSide) * tileSide + c - x * tileSide];
            out[(r - r0) * (c1 - c0) + c - c0] = code === PENDING ? NaN : readCode(head, code);
          }
        }
      }
    }
    return { weights: out, rounded: true };
  }
  const getBounds = (/** @type {Params} */ { r0, r1, c0, c1 }) => /** @type {[r0: number, r1: number, c0: number, c1: number]} */ ([r0, r1, c0, c1].map(toNumber));

  /**
   * @param {Params} params
   * @returns {Promise<CellDetails>}
   */
  async function getCell(params) {
    const head = findHead(params);
    const [i, j] = [toNumber(params.i), toNumber(params.j)];
    const stored = parts[`cell:${head.name}:${i}:${j}`];
    if (stored) return /** @type {CellDetails} */ (stored);
    const { weights: row, rounded, partial } = await getWeights(params, i, i + 1, 0, head.entryInfo.n);
    const [own] = (await getPatchWeights(head, i, i + 1, j, j + 1)) ?? []; // exact, where the row is not
    if (own !== undefined) row[j] = own || 0;
    const masked = Number.isNaN(own) || head.entryInfo.causal && head.entryInfo.first_key + j > head.entryInfo.first_query + i;
    const [mass, entropies] = await Promise.all(["column_mass", "entropy"].map((name) => getPart(`track:${head.name}:${name}`)));
    const shares = areShares({ info, entry: head.entry });
    const entropy = !shares ? null : partial || isWeighted({ variant }) ? (entropies && new Float32Array(entropies)[i]) : row.reduce((sum, weight) => (weight > 0 ? sum - weight * Math.log(weight) : sum), 0);
    return {
      weight: Number.isNaN(row[j]) ? null : row[j],
      below: Number.isNaN(row[j]) ? row.reduce((least, weight) => (Math.abs(weight) > 0 ? Math.min(least, Math.abs(weight)) : least), Infinity) : undefined,
      logit: null,
      lse: null,
      allowed: !masked,
      rounded: rounded && own === undefined,
      rank: masked || rounded ? null : 1 + row.reduce((count, weight) => count + Number(Math.abs(weight) > Math.abs(row[j])), 0),
      row_entropy: entropy ?? null,
      row_mass: shares || partial ? undefined : row.reduce((sum, weight) => sum + weight, 0),
      column_mass: mass ? new Float32Array(mass)[j] : null,
    };
  }
  /**
   * @param {Params} params
   * @returns {Promise<{ cells: WeightedCell[], rounded: boolean }>}
   */
  async function findLargest(params) {
    const [r0, r1, c0, c1] = getBounds(params);
    const head = findHead(params);
    const isInPatch = head.patches.some((each) => r0 >= each.r0 && r1 <= each.r1 && c0 >= each.c0 && c1 <= each.c1);
    if (head.finest > 0 && head.kept && !isInPatch && !parts[`exact:${head.name}`]) return { cells: await findKeptLargest(head, r0, r1, c0, c1), rounded: true };
    const { weights, rounded } = await getWeights(params, r0, r1, c0, c1);
    const width = c1 - c0;
    const order = [...weights.keys()].filter((at) => Math.abs(weights[at]) > 0).sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]));
    return { cells: order.slice(0, toNumber(params.k)).map((at) => [r0 + Math.floor(at / width), c0 + (at % width), weights[at]]), rounded };
  }
  // Matches may cross tokens, as on the server: found in the joined text, then mapped back to tokens. A character
  // of several tokens is one unit.
  /** @param {Params} params */
  function searchText({ of, text, limit }) {
    const { tokens, joined } = data.texts[String(of)];
    const groups = new Map(joined.map(([start, stop, characters]) => [start, { stop, whole: characters }]));
    /** @type {{ start: number, stop: number, from: number }[]} */
    const units = [];
    let all = "";
    for (let start = 0; start < tokens.length; ) {
      const { stop, whole: characters } = groups.get(start) ?? { stop: start + 1, whole: tokens[start] };
      units.push({ start, stop, from: all.length });
      all += characters.toLowerCase();
      start = stop;
    }
    const findUnit = (/** @type {number} */ place) => {
      let [low, high] = [0, units.length - 1];
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (units[middle].from <= place) low = middle;
        else high = middle - 1;
      }
      return units[low];
    };
    const wanted = String(text).toLowerCase();
    /** @type {[start: number, stop: number][]} */
    const matches = [];
    let total = 0;
    for (let at = wanted ? all.indexOf(wanted) : -1; at >= 0; at = all.indexOf(wanted, at + wanted.length)) {
      total += 1;
      if (matches.length < toNumber(limit)) matches.push([findUnit(at).start, findUnit(at + wanted.length - 1).stop]);
    }
    return { matches, total };
  }
  /** @param {Params} params */
  function getTokens({ of, start, stop }) {
    const [from, to] = [toNumber(start), toNumber(stop)];
    const { tokens, joined } = data.texts[String(of)];
    return { start: from, tokens: tokens.slice(from, to), joined: joined.filter(([a, b]) => b > from && a < to) };
  }
  /**
   * @param {Params} params
   * @param {"row" | "column"} name
   * @returns {Promise<PackedWeights>}
   */
  async function getLine(params, name) {
    const head = findHead(params);
    const place = toNumber(name === "row" ? params.i : params.j);
    const result = name === "row" ? await getWeights(params, place, place + 1, 0, head.entryInfo.n) : await getWeights(params, 0, head.entryInfo.m, place, place + 1);
    if (!result.partial) return result;
    const mass = name === "row" ? null : await getPart(`track:${head.name}:column_mass`);
    // Rows sum to 1, except where a sink takes a share.
    return { ...result, total: name === "row" ? (head.entryInfo.sink || !areShares({ info, entry: head.entry }) ? null : 1) : mass && new Float32Array(mass)[place] };
  }
  // The weight that each head of an entry gives from one query to some keys; null where the file does not hold it.
  /** @param {Params} params */
  async function getPair({ entry, i, j0, j1, with_entry: otherEntry, with_head: otherHead, batch, variant }) {
    const fetchRow = (/** @type {Params[string]} */ entryIndex, /** @type {Params[string]} */ head) => getLine({ entry: entryIndex, head, batch, variant, i }, "row").then(({ weights }) => weights, () => null);
    const sum = (/** @type {Float32Array} */ row) => row.reduce((total, weight) => total + weight, 0);
    const toFinite = (/** @type {number} */ value) => (Number.isFinite(value) ? value : null);
    const other = otherEntry === undefined ? null : await fetchRow(otherEntry, otherHead);
    const rows = await Promise.all(info.entries[toNumber(entry)].heads.map((_, head) => fetchRow(entry, head)));
    return {
      weights: rows.map((row) => row && toFinite(sum(row.subarray(toNumber(j0), toNumber(j1))))),
      agreement: other && [entry, otherEntry].every((each) => areShares({ info, entry: toNumber(each) })) ? rows.map((row) => row && toFinite(sum(row.map((weight, at) => Math.min(weight, other[at]))))) : null,
    };
  }
  /**
   * @param {string} name
   * @param {string} what
   */
  async function getStoredPart(name, what) {
    const result = await getPart(name);
    if (!result) throw createMissingError(what);
    return result;
  }

  /**
   * Why a weight, or a whole map, is where it is; `cell` is empty for the map.
   *
   * @param {"why" | "why_map"} name
   * @param {Params} params
   * @param {...Params[string]} cell
   */
  async function getReason(name, { entry, head, batch }, ...cell) {
    if (String(batch ?? 0) !== String(data.state.batch)) throw createMissingError(t("this batch"));
    const bytes = await getStoredPart([name, entry, head, ...cell].join(":"), t("why this is where it is"));
    return JSON.parse(new TextDecoder().decode(bytes));
  }

  // The file holds thumbnails of more heads than the packed ones.
  /** @param {Params} params */
  function findThumbnail({ entry, head, variant }) {
    if (variant !== data.state.variant) throw createMissingError(t("thumbnails of this kind"));
    return `${entry}:${head}`;
  }

  const createAnswer = (/** @type {PackedWeights} */ { weights, rounded, total }) => ({ buffer: weights.buffer, rounded, total });
  /** @type {{ [N in keyof Questions]?: (params: Params) => Partial<Questions[N]> | Promise<Partial<Questions[N]>> }} */
  const answers = {
    info: () => ({ json: info }),
    heads: () => ({ json: { ...data.heads, progress: 1 } }),
    story: () => ({ json: { steps: data.story ?? [] } }),
    status: () => ({ json: { jobs: [], bytes: 0 } }),
    focus: () => ({ json: {} }),
    tokens: (params) => ({ json: getTokens(params) }),
    outline: ({ entry }) => ({ json: data.outlines?.[data.outline_of?.[toNumber(entry)] ?? 0] ?? { query: [], key: null } }),
    search: (params) => ({ json: searchText(params) }),
    tile: async (params) => ({ buffer: await getTile(params) }),
    thumbnail: async (params) => ({ buffer: await getStoredPart(`thumbnail:${findThumbnail(params)}`, t("this thumbnail")) }),
    track: async (params) => ({ buffer: await getStoredPart(`track:${findHead(params).name}:${params.name}`, t("this track")) }),
    row: async (params) => createAnswer(await getLine(params, "row")),
    column: async (params) => createAnswer(await getLine(params, "column")),
    region: async (params) => createAnswer(await getWeights(params, ...getBounds(params))),
    pair: async (params) => ({ json: await getPair(params) }),
    cell: async (params) => ({ json: await getCell(params) }),
    top: async (params) => ({ json: await findLargest(params) }),
    why: async (params) => ({ json: await getReason("why", params, params.i, params.j) }),
    why_map: async (params) => ({ json: await getReason("why_map", params) }),
    offline: () => {
      if (data.compute) throw new TransportError(409, t("This page computes the weights as they are looked at; attlas report writes a page that holds them"));
      return { json: { data } };
    },
  };
  return {
    /**
     * @template {keyof Questions} N
     * @param {N} name
     * @param {Params} params
     * @param {GetOptions} options
     */
    async get(name, params = {}, { signal } = {}) {
      const answerQuestion = answers[name];
      if (!answerQuestion) throw createMissingError(name);
      const answer = await answerQuestion(params);
      if (signal?.aborted) throw new TransportError(499, "given up", true);
      return /** @type {Questions[N]} */ ({ ...answer, progress: 1, final: true, sampled: false });
    },
  };
}

/**
 * How exact the numbers of the file are, for the help: [title, text].
 *
 * @param {Pick<PackedData, "packed" | "info" | "compute">} data
 * @returns {[title: string, text: string]}
 */
export function describeNumbers({ packed, info, compute }) {
  const computed = compute ? t("are computed in this page from queries and keys") : t("were computed from queries and keys when the page was written");
  if (packed.every((each) => each.exact) && info.entries.some((each) => each.softmax === false && !isRollout(each))) return [t("Every number is exact"), t("Weights in the text pane, in lists, cells and exported tables are float32; they {0}. None is read from the picture.", computed)];
  if (packed.every((each) => each.exact)) return [t("Every number is exact"), t("Weights in the text pane, in lists, cells and exported tables are float32 values of softmax(score(Q, K)); they {0}. None is read from the picture.", computed)];
  const rows = packed.some((each) => each.kept) ? t("Of the other heads the largest {0} weights of each query are here, and blocks. ", Math.max(...packed.map((each) => each.kept))) : "";
  return [t("Most numbers are rounded"), t("Tracks and the weights of a pinned row are exact float32 values; they {0}. {1}Rounded weights are within {2} %, three digits of them are shown, behind ≈. The recording itself, opened with attlas view, has every weight exactly.", computed, rows, info.entries.every((each) => each.shares !== false) ? "0.034" : "0.07")];
}

// What the file holds, for its footer.
/** @param {PackedData} data */
export function describeMissing(data) {
  const { info, packed, state } = data;
  const heads = info.entries.reduce((sum, entry) => sum + (isRollout(entry) ? 0 : entry.heads.length), 0);
  const count = packed.filter(({ entry }) => !isRollout(info.entries[entry])).length;
  const words = [data.compute ? t("{0} of {1} heads are computed here", count, heads) : count === heads ? t("Offline copy of all {0} heads", heads) : t("Offline copy of {0} of {1} heads", count, heads)];
  const finest = Math.min(...packed.map((each) => each.finest));
  const detailed = packed.filter((each) => each.finest === finest && !each.block);
  const names = detailed.length > 4 ? t("{0} of them", detailed.length) : detailed.map(({ entry, head }) => getHeadMark(info, entry, head)).join(t(" and "));
  const rest = packed.length > detailed.length ? t(", overviews of the others") : "";
  const depth = finest ? t("blocks of {0} × {1} cells and more", 2 ** finest, 2 ** finest) : t("every cell");
  if (detailed.length) words.push(rest ? `${names}: ${depth}${rest}` : depth);
  const keptCount = Math.max(0, ...packed.map((each) => each.kept));
  if (packed.every((each) => each.exact)) words.push(t("weights exact in float32"));
  else if (keptCount) words.push(t("the {0} largest weights of each query", keptCount));
  const patches = new Set(packed.flatMap((each) => each.patches.map(({ r0, c0 }) => `${r0}/${c0}`)));
  if (patches.size) words.push(patches.size === 1 ? t("every cell at one place") : t("every cell at {0} places", patches.size));
  words.push([state.pool === "mean" ? t("blocks as means") : t("blocks as maxima"), isWeighted(state) ? describeVariant(state) : state.variant === "nosink" ? t("without the first key") : t("with the first key")].join(", "));
  return `${words.join("; ")}.`;
}
