// One queue for everything that a page asks: few at a time, the most wanted first, nothing that is no longer wanted.

import { TransportError } from "./transport.js";
import { t } from "./words.js";

const LIMIT = 6; // what a browser opens to one HTTP/1.1 server
const SLOW_LIMIT = 2; // pictures of whole heads take long; they must not hold up what is looked at
const TRIES = 5;

// What a reader waits for comes first; within a rank, what is nearest the centre.
/** Ranks of requests: the lowest goes first. */
export const RANK = { tokens: 1, track: 2, top: 2, tile: 3, pair: 4, thumbnail: 4, heads: 4 };

/** Milliseconds before try number `count` (from 1), with a little chance so that many requests do not return at once. */
export function backoff(count, chance = Math.random()) {
  return Math.min(8000, 250 * 2 ** (count - 1)) * (0.75 + 0.5 * chance);
}

/** Whether another try can help: nobody answered, or the server had trouble of its own. */
export function passing(error) {
  return !error.aborted && (error.status === 0 || error.status === 429 || error.status === 499 || error.status >= 500);
}

/**
 * A transport over another one, with a queue.
 *
 * `get(name, params, {signal, distance, rank})` as in any transport; `rank` puts a request among others than its kind. `distance()` says how far from the centre of the view
 * the answer will be shown; it is asked again whenever a place is free. `trouble(tell)` hears a line of text while
 * requests are being tried again, and null when all is well.
 */
export function createRequests(transport, { limit = LIMIT, wait = backoff } = {}) {
  const waiting = new Set();
  const flying = new Set();
  const listeners = new Set();
  const resting = new Set(); // between two tries
  let failing = 0;
  let lost = false; // whether the last thing heard of the server is that it does not answer
  let closed = false;

  const tellTrouble = (text) => listeners.forEach((tell) => tell(text));
  const slow = (job) => job.rank >= RANK.thumbnail;

  function next() {
    const busy = [...flying].filter(slow).length;
    let best = null;
    for (const job of waiting) {
      if (slow(job) && busy >= SLOW_LIMIT) continue;
      job.away = job.distance ? job.distance() : 0;
      if (!best || job.rank < best.rank || (job.rank === best.rank && job.away < best.away)) best = job;
    }
    return best;
  }

  function pump() {
    while (flying.size < limit) {
      const job = next();
      if (!job) return;
      waiting.delete(job);
      flying.add(job);
      fly(job);
    }
  }

  async function fly(job) {
    try {
      const answer = await transport.get(job.name, job.params, { signal: job.stop.signal });
      if (lost || job.tries) recovered(job);
      settle(job, () => job.resolve(answer));
    } catch (error) {
      failed(job, error);
    }
  }

  function failed(job, error) {
    flying.delete(job);
    if (job.stop.signal.aborted || !passing(error) || job.tries + 1 >= TRIES || closed) {
      const gone = !closed && !job.stop.signal.aborted && passing(error);
      if (gone) {
        lost = true;
        tellTrouble(error.message);
      }
      recovered(job, gone);
      settle(job, () => job.reject(error));
      return;
    }
    if (!job.tries) failing += 1;
    job.tries += 1;
    tellTrouble(t("{0}; trying again", error.message));
    resting.add(job);
    job.timer = setTimeout(() => {
      resting.delete(job);
      waiting.add(job);
      pump();
    }, wait(job.tries));
    pump();
  }

  // One request less that is being tried again; all is well when none is left and the server has been heard.
  function recovered(job, still = false) {
    if (job.tries) failing -= 1;
    if (still) return;
    const heard = !job.stop.signal.aborted;
    if (heard) lost = false;
    if (!failing && !lost) tellTrouble(null);
  }

  function settle(job, end) {
    flying.delete(job);
    waiting.delete(job);
    resting.delete(job);
    clearTimeout(job.timer);
    job.signal?.removeEventListener("abort", job.giveUp);
    end();
    pump();
  }

  function get(name, params = {}, { signal, distance, rank = RANK[name] ?? 0 } = {}) {
    return new Promise((resolve, reject) => {
      const job = { name, params, signal, distance, resolve, reject, rank, tries: 0, timer: 0 };
      job.stop = new AbortController();
      job.giveUp = () => {
        const inFlight = flying.has(job);
        job.stop.abort();
        if (inFlight) return; // the transport rejects
        if (job.tries) recovered(job);
        settle(job, () => reject(new TransportError(499, "given up", true)));
      };
      if (closed || signal?.aborted) {
        reject(new TransportError(499, "given up", true));
        return;
      }
      signal?.addEventListener("abort", job.giveUp);
      waiting.add(job);
      pump();
    });
  }

  return {
    get,
    /** Call `tell(text | null)` when requests begin to fail, and when they no longer do. */
    trouble(tell) {
      listeners.add(tell);
      return () => listeners.delete(tell);
    },
    send: transport.send, // null where nothing can be kept
    counts: () => ({ waiting: waiting.size, flying: flying.size }),
    destroy() {
      closed = true;
      for (const job of [...waiting, ...resting, ...flying]) job.giveUp();
    },
  };
}
