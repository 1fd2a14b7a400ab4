// Token texts, fetched in chunks as they come into view and kept.

const CHUNK = 2048;
const MAX_CHUNKS = 128; // chunks: 262,144 tokens, a few tens of MB at most

/** @type {Record<string, string>} */
const SYMBOLS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u3000": "　", "\u200b": "∅", "\u200d": "⁀" };

/**
 * A token's text with its whitespace made visible; other control characters as their pictures.
 *
 * @param {string} text
 */
export function showWhitespace(text) {
  if (text === "") return "∅";
  return text.replace(/[\u0000-\u001f\u007f \u00a0\u200b]/gu, (character) => {
    if (SYMBOLS[character]) return SYMBOLS[character];
    const code = character.charCodeAt(0);
    return code === 0x7f ? "␡" : String.fromCharCode(0x2400 + code);
  });
}

/**
 * The texts of the entries and sequences of `info`.
 *
 * @param {Transport} transport
 * @param {Pick<Info, "texts" | "entries">} info
 * @returns {Texts}
 */
export function createTexts(transport, { texts, entries }) {
  const listeners = new Set();
  const notify = () => listeners.forEach((listener) => listener());
  const known = texts.map((length, of) => createTokens(transport, of, length, notify));
  const unknown = createTokens(transport, null, 0, notify);
  return {
    /**
     * The tokens of the queries and of the keys of a sequence: {query, key}, the same object where it is one text.
     *
     * @param {{ entry: number, batch: number }} options
     */
    of({ entry, batch }) {
      const [query, key] = (entries[entry].texts[batch] ?? []).map((text) => (text === null ? unknown : (known[text] ?? unknown)));
      return { query: query ?? unknown, key: key ?? unknown };
    },
    /**
     * Call `listener()` when texts have arrived; returns the function that ends it.
     *
     * @param {() => void} listener
     */
    on(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

/**
 * Tokens of text `of` at positions 0 to length - 1; none are known where the length is 0.
 *
 * @param {Transport} transport
 * @param {number | null} of
 * @param {number} length
 * @param {() => void} notify
 * @returns {Tokens}
 */
function createTokens(transport, of, length, notify) {
  /** @type {Map<number, Chunk | Promise<Chunk>>} */
  const chunks = new Map(); // index -> {tokens, joined} or a promise of it

  /** @param {number} index */
  async function fetchChunk(index) {
    const start = index * CHUNK;
    const stop = Math.min(length, start + CHUNK);
    const { json } = await transport.get("tokens", { of, start, stop });
    /** @type {Chunk} */
    const chunk = { tokens: json.tokens, joined: new Map() };
    for (const [from, to, whole] of json.joined ?? []) {
      for (let position = from; position < to; position++) chunk.joined.set(position, { start: from, stop: to, text: whole });
    }
    chunks.set(index, chunk);
    if (chunks.size > MAX_CHUNKS) chunks.delete(/** @type {number} */ (chunks.keys().next().value));
    notify();
    return chunk;
  }

  /** @param {number} index */
  function load(index) {
    const existing = chunks.get(index);
    if (existing) return existing;
    const promise = fetchChunk(index).catch((error) => {
      chunks.delete(index); // requested again when next needed
      throw error;
    });
    chunks.set(index, promise);
    return promise;
  }

  const getChunk = (/** @type {number} */ position) => {
    const chunk = chunks.get(Math.floor(position / CHUNK));
    return chunk && "tokens" in chunk ? chunk : null;
  };

  return {
    of,
    length,
    /**
     * The texts of positions start to stop - 1.
     *
     * @param {number} start
     * @param {number} stop
     */
    async range(start, stop) {
      const from = Math.max(0, start);
      const to = Math.min(length, stop);
      if (to <= from) return [];
      const requests = [];
      for (let index = Math.floor(from / CHUNK); index * CHUNK < to; index++) requests.push(load(index));
      const texts = (await Promise.all(requests)).flatMap((chunk) => chunk.tokens);
      const offset = Math.floor(from / CHUNK) * CHUNK;
      return texts.slice(from - offset, to - offset);
    },
    /**
     * Fetch the missing texts of positions start to stop - 1; listeners of the texts are called when they arrive.
     *
     * @param {number} start
     * @param {number} stop
     */
    prefetch(start, stop) {
      for (let index = Math.floor(Math.max(0, start) / CHUNK); index * CHUNK < Math.min(length, stop); index++) {
        const chunk = load(index);
        if (chunk instanceof Promise) chunk.catch(() => {});
      }
    },
    /**
     * The text of one position if it is here, else null.
     *
     * @param {number} position
     */
    peek(position) {
      return getChunk(position)?.tokens[position % CHUNK] ?? null;
    },
    /**
     * The whole character that this token is a part of: {start, stop, text}, or null.
     *
     * @param {number} position
     */
    joined(position) {
      return getChunk(position)?.joined.get(position) ?? null;
    },
  };
}
