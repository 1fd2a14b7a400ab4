// A transport over the messages of a notebook widget: no port is opened.

import { TransportError } from "./transport.js";

let pageCount = 0;

export function createMessageTransport(model) {
  const page = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}-${++pageCount}`;
  const pending = new Map(); // id -> {resolve, reject}
  let requestCount = 0;

  const handleMessage = (message, buffers) => {
    if (message?.type !== "answer" || !pending.has(message.id)) return; // of another view, or cancelled
    const { resolve, reject } = pending.get(message.id);
    pending.delete(message.id);
    if (message.status !== 200) {
      reject(new TransportError(message.status, message.error ?? `status ${message.status}`));
      return;
    }
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
        const settleWith = (callback) => (value) => {
          signal?.removeEventListener("abort", cancel);
          callback(value);
        };
        pending.set(id, { resolve: settleWith(resolve), reject: settleWith(reject) });
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
