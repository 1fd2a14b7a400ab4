// What an offline page holds, gathered from a page that runs.

import { pack } from "./base64.js";
import { fetchRegion } from "./csv.js";
import { t } from "./words.js";

export const packLimit = 24 * 2 ** 20; // bytes of tiles before compression, all heads together
export const dataMark = "/*data*/"; // where the packed numbers go in a page
const thumbnails = 256; // of all heads, so that the grid is not empty
const exactCells = 2 ** 20; // matrices up to this size take their exact weights along
const tracks = ["entropy", "effective_keys", "max_weight", "column_mass", "column_max"];
const tokensAtOnce = 16_384;
const tileBytes = 2 * 256 * 256;
const pauses = [250, 500, 1_000, 2_000];

// The tiles of a level that hold an allowed pair: those above the diagonal of a causal map are left out.
export function tilesOf(entry, level) {
  const side = 256 * 2 ** level;
  const found = [];
  for (let y = 0; y * side < entry.m; y++) {
    for (let x = 0; x * side < entry.n; x++) {
      const lastQuery = entry.first_query + Math.min(entry.m, (y + 1) * side) - 1;
      if (!entry.causal || entry.first_key + x * side <= lastQuery) found.push({ level, y, x });
    }
  }
  return found;
}

// The levels that fit, from the coarsest on; the coarsest one is always there.
export function levelsThatFit(entry, limit) {
  const chosen = [];
  let used = 0;
  for (let level = entry.levels - 1; level >= 0; level--) {
    const size = tilesOf(entry, level).length * tileBytes;
    if (chosen.length && used + size > limit) break;
    chosen.push(level);
    used += size;
  }
  return { finest: chosen.at(-1) ?? 0, levels: chosen, bytes: used };
}

// The heads that are looked at: the first, and the second where two are compared.
export function packedHeads({ entry, head, second, compare }) {
  const first = { entry, head };
  return second !== null && compare !== "none" && !(second.entry === entry && second.head === head) ? [first, second] : [first];
}

// Everything for the page, as an object that JSON can hold. `tell(share, words)` says how far it is.
export async function gather(transport, state, { signal, tell }) {
  const { info, batch, variant, pool } = state;
  const heads = packedHeads(state);
  const jobs = [];
  const parts = {};
  const put = async (key, answer, width) => {
    parts[key] = { ...(await pack(answer.buffer ?? answer, width)) };
  };
  const complete = async (name, params) => {
    for (let tries = 0; ; tries++) {
      const answer = await transport.get(name, params, { signal });
      if (answer.final || !(answer.progress < 1)) return answer;
      tell(null, t("waiting for the overview, {0} %", Math.floor(100 * answer.progress)));
      await rest(pauses[Math.min(tries, pauses.length - 1)], signal);
    }
  };
  const packed = [];
  for (const { entry, head } of heads) {
    const given = info.entries[entry];
    const shared = { entry, head, batch, variant };
    const name = `${entry}:${head}`;
    const fit = levelsThatFit(given, packLimit / heads.length);
    const exact = given.m * given.n <= exactCells;
    packed.push({ entry, head, finest: fit.finest, exact });
    for (const level of fit.levels) {
      for (const tile of tilesOf(given, level)) {
        jobs.push(async () => put(`tile:${name}:${level}:${tile.y}:${tile.x}`, await complete("tile", { ...shared, pool, ...tile }), 2));
      }
    }
    for (const track of tracks) jobs.push(async () => put(`track:${name}:${track}`, await complete("track", { ...shared, name: track }), 4));
    if (exact) jobs.push(async () => put(`exact:${name}`, (await fetchRegion(transport, shared, { r0: 0, r1: given.m, c0: 0, c1: given.n }, { signal })).weights.buffer, 4));
    else if (state.pin !== null && entry === state.entry && head === state.head) {
      const { i, j } = state.pin;
      jobs.push(async () => put(`row:${name}:${i}`, await transport.get("row", { ...shared, i }, { signal }), 4));
      jobs.push(async () => put(`column:${name}:${j}`, await transport.get("column", { ...shared, j }, { signal }), 4));
    }
    if (state.pin !== null) {
      const { i, j } = state.pin;
      jobs.push(async () => {
        parts[`cell:${name}:${i}:${j}`] = (await transport.get("cell", { ...shared, i, j }, { signal })).json;
      });
    }
  }
  const all = info.entries.flatMap((given, entry) => (given.readable === false ? [] : [...given.heads.keys()].map((head) => ({ entry, head }))));
  for (const { entry, head } of all.slice(0, thumbnails)) {
    jobs.push(async () => put(`thumbnail:${entry}:${head}`, await transport.get("thumbnail", { entry, head, batch: Math.min(batch, info.entries[entry].batch - 1), variant, pool, size: 64 }, { signal }), 2));
  }
  const tokens = [];
  const joined = [];
  for (let start = 0; start < info.text_length; start += tokensAtOnce) {
    jobs.push(async () => {
      const { json } = await transport.get("tokens", { start, stop: Math.min(info.text_length, start + tokensAtOnce) }, { signal });
      tokens[start / tokensAtOnce] = json.tokens;
      joined[start / tokensAtOnce] = json.joined ?? [];
    });
  }
  let done = 0;
  const work = async () => {
    for (let job = jobs.shift(); job; job = jobs.shift()) {
      await job();
      done += 1;
      tell(done / total, "");
    }
  };
  const total = jobs.length;
  await Promise.all([work(), work(), work()]);
  return {
    format: 1,
    info,
    state: { ...view(state), batch, variant, pool },
    packed,
    heads: state.heads ?? { progress: 1, columns: [], rows: [] },
    tokens: tokens.flat(),
    joined: joined.flat(),
    parts,
  };
}

// What the offline page begins with: the state, less what belongs to a window.
function view(state) {
  const { info, heads, hover, reading, pointed, progress, panel, found, dark, ...kept } = state;
  return kept;
}

function rest(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("given up", "AbortError"));
    });
  });
}

// The file: the page without data, and the data where its mark is. "<" is escaped, so that no token ends the script.
export function fileOf(page, data) {
  const text = JSON.stringify(data).replaceAll("<", "\\u003c").replaceAll("\u2028", "\\u2028").replaceAll("\u2029", "\\u2029");
  const at = page.indexOf(dataMark);
  return page.slice(0, at) + text + page.slice(at + dataMark.length);
}
