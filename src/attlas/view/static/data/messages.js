// A transport over the messages of a notebook widget: no port is opened.

import { TransportError } from "./transport.js";

let pageCount = 0;

/**
 * @param {WidgetModel} model
 * @returns {Transport & { destroy(): void }}
 */
export function createMessageTransport(model) {
  const page = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}-${++pageCount}`;
  /** @type {Map<string, { resolve(answer: AnswerFacts): void, reject(error: Error): void }>} */
  const pending = new Map(); // id -> {resolve, reject}
  let requestCount = 0;

  const handleMessage = (/** @type {WidgetMessage} */ message, /** @type {(ArrayBuffer | ArrayBufferView)[]} */ buffers) => {
    const request = message?.type === "answer" && pending.get(message.id);
    if (!request) return; // of another view, or cancelled
    const { resolve, reject } = request;
    pending.delete(message.id);
    if (message.status !== 200) {
      reject(new TransportError(message.status, message.error ?? `status ${message.status}`));
      return;
    }
    /** @type {AnswerFacts & { json?: unknown, buffer?: ArrayBuffer }} */
    const answer = { progress: message.progress, final: message.final, sampled: message.sampled };
    const body = buffers[0];
    // Copied, as it may be a view of a larger buffer at an odd offset.
    const bytes = ArrayBuffer.isView(body) ? new Uint8Array(body.buffer, body.byteOffset, body.byteLength) : new Uint8Array(body);
    if (message.kind === "json") answer.json = JSON.parse(new TextDecoder().decode(bytes));
    else answer.buffer = bytes.slice().buffer;
    resolve(answer);
  };
  model.on("msg:custom", handleMessage);
  return {
    get(name, params = {}, { signal } = {}) {
      return new Promise((resolve, reject) => {
        if (signal?.aborted) {
          reject(new TransportError(499, "given up", true));
          return;
        }
        const id = `${page}:${++requestCount}`;
        const cancel = () => {
          if (!pending.delete(id)) return;
          model.send({ type: "cancel", id });
          reject(new TransportError(499, "given up", true));
        };
        /**
         * @template V
         * @param {(value: V) => void} callback
         */
        const settleWith = (callback) => (/** @type {V} */ value) => {
          signal?.removeEventListener("abort", cancel);
          callback(value);
        };
        pending.set(id, { resolve: /** @type {(answer: AnswerFacts) => void} */ (settleWith(resolve)), reject: settleWith(reject) });
        signal?.addEventListener("abort", cancel);
        const texts = Object.fromEntries(Object.entries(params).map(([field, value]) => [field, String(value)]));
        model.send({ type: "get", id, name, params: texts });
      });
    },
    destroy() {
      model.off("msg:custom", handleMessage);
      for (const [id, { reject }] of pending) {
        model.send({ type: "cancel", id });
        reject(new TransportError(499, "given up", true));
      }
      pending.clear();
    },
  };
}
