// One queue for all requests of a page: few at a time, ordered by rank and distance, cancelled when not needed.

import { GONE, TransportError } from "./transport.js";
import { t } from "../words/words.js";

const MAX_REQUESTS = 6; // connections of a browser to one HTTP/1.1 server
const MAX_SLOW_REQUESTS = 2; // pictures of whole heads are slow; they must not delay the view
const MAX_TRIES = 5;

/** Ranks of requests: the lowest is sent first; within a rank, the one nearest the centre of the view. */
/** @type {Record<string, number>} */
export const RANK = { tokens: 1, track: 2, top: 2, tile: 3, pair: 4, thumbnail: 4, heads: 4 };

/**
 * Milliseconds before retry number `count` (from 1), with jitter so that retries do not come at once.
 *
 * @param {number} count
 * @param {number} [random]
 */
export function backoff(count, random = Math.random()) {
  return Math.min(8000, 250 * 2 ** (count - 1)) * (0.75 + 0.5 * random);
}

/**
 * Whether a retry can help: no answer, or an error of the server.
 *
 * @param {import("./transport.js").TransportError} error
 */
function isRetryable(error) {
  return !error.aborted && (error.status === 0 || error.status === 429 || error.status === 499 || error.status >= 500);
}

/**
 * A transport over another one, with a queue.
 *
 * `get(name, params, {signal, distance, rank})` as in any transport. `rank` replaces the rank of the name;
 * `distance()` is the distance of the answer from the centre of the view, read whenever a request can be sent.
 * `trouble(listener)` calls `listener(text)` while requests are retried, and `listener(null)` when all is well.
 *
 * @param {Transport} transport
 * @param {{ limit?: number, wait?: (count: number) => number }} [options]
 * @returns {Requests}
 */
export function createRequests(transport, { limit = MAX_REQUESTS, wait: getDelay = backoff } = {}) {
  /** @type {Set<QueuedRequest>} */
  const waiting = new Set();
  /** @type {Set<QueuedRequest>} */
  const inFlight = new Set();
  /** @type {Set<(text: string | null, isGone: boolean) => void>} */
  const listeners = new Set();
  /** @type {Set<QueuedRequest>} */
  const retrying = new Set(); // waiting for a retry
  let failingCount = 0;
  let unreachable = false; // whether the last request got no answer
  let closed = false;

  const reportTrouble = (/** @type {string | null} */ text, isGone = false) => listeners.forEach((listener) => listener(text, isGone));
  // Nobody answers, or somebody who does not know this page: the viewer was closed.
  const isGone = (/** @type {import("./transport.js").TransportError} */ { status }) => status === 0 || status === GONE;
  const isSlow = (/** @type {QueuedRequest} */ job) => job.rank >= RANK.thumbnail;

  function chooseNext() {
    const slowCount = [...inFlight].filter(isSlow).length;
    /** @type {QueuedRequest | null} */
    let chosen = null;
    for (const job of waiting) {
      if (isSlow(job) && slowCount >= MAX_SLOW_REQUESTS) continue;
      job.currentDistance = job.distance ? job.distance() : 0;
      if (!chosen || job.rank < chosen.rank || (job.rank === chosen.rank && job.currentDistance < chosen.currentDistance)) chosen = job;
    }
    return chosen;
  }

  function startRequests() {
    while (inFlight.size < limit) {
      const job = chooseNext();
      if (!job) return;
      waiting.delete(job);
      inFlight.add(job);
      sendRequest(job);
    }
  }

  /** @param {QueuedRequest} job */
  async function sendRequest(job) {
    try {
      const answer = await transport.get(job.name, job.params, { signal: job.controller.signal });
      if (unreachable || job.tries) handleRecovery(job);
      settleJob(job, () => job.resolve(answer));
    } catch (error) {
      handleFailure(job, error);
    }
  }

  /**
   * @param {QueuedRequest} job
   * @param {import("./transport.js").TransportError} error
   */
  function handleFailure(job, error) {
    inFlight.delete(job);
    if (job.controller.signal.aborted || !isRetryable(error) || job.tries + 1 >= MAX_TRIES || closed) {
      const gaveUp = !closed && !job.controller.signal.aborted && isRetryable(error);
      if (gaveUp) {
        unreachable = true;
        reportTrouble(error.message, isGone(error));
      } else if (!closed && error.status === GONE) {
        unreachable = true;
        reportTrouble(error.message, true);
        settleJob(job, () => job.reject(error));
        return;
      }
      handleRecovery(job, gaveUp);
      settleJob(job, () => job.reject(error));
      return;
    }
    if (!job.tries) failingCount += 1;
    job.tries += 1;
    reportTrouble(t("{0}; trying again", error.message), isGone(error) && job.tries > 1);
    retrying.add(job);
    job.timer = setTimeout(() => {
      retrying.delete(job);
      waiting.add(job);
      startRequests();
    }, getDelay(job.tries));
    startRequests();
  }

  /**
   * A request is no longer retried; reports that all is well when no other is and the server has answered.
   *
   * @param {QueuedRequest} job
   * @param {boolean} [stillFailing]
   */
  function handleRecovery(job, stillFailing = false) {
    if (job.tries) failingCount -= 1;
    if (stillFailing) return;
    const answered = !job.controller.signal.aborted;
    if (answered) unreachable = false;
    if (!failingCount && !unreachable) reportTrouble(null);
  }

  /**
   * @param {QueuedRequest} job
   * @param {() => void} callback
   */
  function settleJob(job, callback) {
    inFlight.delete(job);
    waiting.delete(job);
    retrying.delete(job);
    clearTimeout(job.timer);
    job.signal?.removeEventListener("abort", job.cancel);
    callback();
    startRequests();
  }

  /**
   * @template {keyof Questions} N
   * @param {N} name
   * @param {Params} params
   * @param {QueueOptions} options
   * @returns {Promise<Questions[N]>}
   */
  function get(name, params = {}, { signal, distance, rank = RANK[name] ?? 0 } = {}) {
    return new Promise((resolve, reject) => {
      const cancel = () => {
        const wasSent = inFlight.has(job);
        job.controller.abort();
        if (wasSent) return; // the transport rejects
        if (job.tries) handleRecovery(job);
        settleJob(job, () => reject(new TransportError(499, "given up", true)));
      };
      /** @type {QueuedRequest} */
      const job = { name, params, signal, distance, resolve: /** @type {QueuedRequest["resolve"]} */ (resolve), reject, rank, cancel, tries: 0, timer: 0, currentDistance: 0, controller: new AbortController() };
      if (closed || signal?.aborted) {
        reject(new TransportError(499, "given up", true));
        return;
      }
      signal?.addEventListener("abort", job.cancel);
      waiting.add(job);
      startRequests();
    });
  }

  return {
    get,
    /**
     * Call `listener(text | null, isGone)` when requests begin to fail, and when they no longer do. `isGone`: whether
     * the viewer seems to be closed.
     *
     * @param {(text: string | null, isGone: boolean) => void} listener
     */
    trouble(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    send: transport.send, // null where nothing can be kept
    counts: () => ({ waiting: waiting.size, flying: inFlight.size }),
    destroy() {
      closed = true;
      for (const job of [...waiting, ...retrying, ...inFlight]) job.cancel();
    },
  };
}
