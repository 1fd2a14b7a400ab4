// Transports fetch the answers of a page: over HTTP here, from a notebook or an offline file elsewhere.

import { t } from "../words/words.js";

/** A request that failed: `status` as in HTTP (0: nobody answered), `aborted` when the page itself gave it up. */
export class TransportError extends Error {
  constructor(/** @type {number} */ status, /** @type {string} */ message, /** @type {boolean} */ aborted = false) {
    super(message);
    this.name = "TransportError";
    this.status = status;
    this.aborted = aborted;
  }
}

/** The status of a request to a server that knows no such page: another viewer is at the address now. */
export const GONE = 410;
// Each answer of the viewer says how far it is; what is not found because nobody knows the page does not.
/** @param {Response} response */
const knowsPage = (response) => response.status !== 404 || response.headers.has("Attlas-Progress");

/**
 * Answers over HTTP from `<base>api/<name>?key=value`.
 *
 * @template {{ info: JsonAnswer<{ key: string }> }} Q
 * @param {string} base
 * @returns {Required<Transport<Q>>}
 */
export function createHttpTransport(base = "./") {
  /** @type {string | null} */
  let key = null; // from info: part of each address, so that cached answers change with the content

  /**
   * @param {string} name
   * @param {Params} params
   * @param {AbortSignal | undefined} signal
   */
  async function request(name, params, signal) {
    const query = new URLSearchParams();
    for (const [field, value] of Object.entries(params)) query.set(field, String(value));
    if (key !== null) query.set("v", key);
    try {
      return await fetch(`${base}api/${name}?${query}`, { signal });
    } catch (error) {
      if (error.name === "AbortError") throw new TransportError(499, "given up", true);
      throw new TransportError(0, t("the server does not answer"));
    }
  }

  /** @param {Response} response */
  async function readReason(response) {
    try {
      /** @type {{ error?: string, reason?: [text: string, ...values: TextValue[]] }} */
      const { error, reason } = await response.json();
      return reason ? t(...reason) : (error ?? response.statusText);
    } catch {
      return response.statusText || `status ${response.status}`;
    }
  }

  return {
    /**
     * @template {keyof Q & string} N
     * @param {N} name
     * @param {Params} params
     * @param {GetOptions} options
     */
    async get(name, params = {}, { signal } = {}) {
      const response = await request(name, params, signal);
      if (!response.ok) throw new TransportError(knowsPage(response) ? response.status : GONE, await readReason(response));
      /** @type {AnswerFacts & Partial<JsonAnswer<{ key: string }> & BinaryAnswer>} */
      const answer = {
        progress: Number(response.headers.get("Attlas-Progress") ?? 1),
        sampled: response.headers.get("Attlas-Sampled") === "1",
        final: (response.headers.get("Cache-Control") ?? "").includes("immutable"),
      };
      try {
        if ((response.headers.get("Content-Type") ?? "").includes("json")) answer.json = await response.json();
        else answer.buffer = await response.arrayBuffer();
      } catch (error) {
        const aborted = error.name === "AbortError";
        throw new TransportError(aborted ? 499 : 0, aborted ? "given up" : t("the answer broke off"), aborted);
      }
      if (name === "info" && answer.json) key = answer.json.key;
      return /** @type {Q[N]} */ (answer);
    },
    /** Send something to keep or to do, as JSON. */
    async send(name, content) {
      const body = JSON.stringify(content);
      let response;
      try {
        response = await fetch(`${base}api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
      } catch {
        throw new TransportError(0, t("the server does not answer"));
      }
      if (!response.ok) throw new TransportError(response.status, await readReason(response));
      return { json: await response.json() };
    },
  };
}
