// Token texts, fetched in chunks as they come into view and kept.

const CHUNK = 2048;
const KEPT = 128; // chunks: 262,144 tokens, a few tens of MB at most

const SIGNS = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u3000": "　", "\u200b": "∅", "\u200d": "⁀" };

/** A token's text with its whitespace made visible; other control characters as their pictures. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replace(/[\u0000-\u001f\u007f \u00a0\u200b]/gu, (character) => {
    if (SIGNS[character]) return SIGNS[character];
    const code = character.charCodeAt(0);
    return code === 0x7f ? "␡" : String.fromCharCode(0x2400 + code);
  });
}

/** Tokens of the text at positions 0 to length - 1. */
export function createTokens(transport, length) {
  const chunks = new Map(); // index -> {tokens, joined} or a promise of it
  const listeners = new Set();

  async function fetchChunk(index) {
    const start = index * CHUNK;
    const stop = Math.min(length, start + CHUNK);
    const { json } = await transport.get("tokens", { start, stop });
    const chunk = { tokens: json.tokens, joined: new Map() };
    for (const [from, to, whole] of json.joined ?? []) {
      for (let at = from; at < to; at++) chunk.joined.set(at, { start: from, stop: to, text: whole });
    }
    chunks.set(index, chunk);
    if (chunks.size > KEPT) chunks.delete(chunks.keys().next().value);
    for (const tell of listeners) tell(start, stop);
    return chunk;
  }

  function load(index) {
    const known = chunks.get(index);
    if (known) return known;
    const coming = fetchChunk(index).catch((error) => {
      chunks.delete(index); // asked again when it is next wanted
      throw error;
    });
    chunks.set(index, coming);
    return coming;
  }

  const at = (position) => {
    const chunk = chunks.get(Math.floor(position / CHUNK));
    return chunk && chunk.tokens ? chunk : null;
  };

  return {
    length,
    /** The texts of positions start to stop - 1. */
    async range(start, stop) {
      const from = Math.max(0, start);
      const to = Math.min(length, stop);
      if (to <= from) return [];
      const wanted = [];
      for (let index = Math.floor(from / CHUNK); index * CHUNK < to; index++) wanted.push(load(index));
      const texts = (await Promise.all(wanted)).flatMap((chunk) => chunk.tokens);
      const offset = Math.floor(from / CHUNK) * CHUNK;
      return texts.slice(from - offset, to - offset);
    },
    /** Fetch what is not there yet of positions start to stop - 1; `on` tells when it has come. */
    prefetch(start, stop) {
      for (let index = Math.floor(Math.max(0, start) / CHUNK); index * CHUNK < Math.min(length, stop); index++) {
        const chunk = load(index);
        if (chunk instanceof Promise) chunk.catch(() => {});
      }
    },
    /** The text of one position if it is here, else null. */
    peek(position) {
      return at(position)?.tokens[position % CHUNK] ?? null;
    },
    /** The whole character that this token is a part of: {start, stop, text}, or null. */
    joined(position) {
      return at(position)?.joined.get(position) ?? null;
    },
    /** Call `tell(start, stop)` when texts have come; returns the function that ends it. */
    on(tell) {
      listeners.add(tell);
      return () => listeners.delete(tell);
    },
  };
}
