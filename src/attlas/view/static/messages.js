// Answers over the messages of a notebook widget: no port is opened, and nothing leaves the notebook's own channel.

import { TransportError } from "./transport.js";

let pages = 0;

export function messageTransport(model) {
  const page = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}-${++pages}`;
  const open = new Map(); // id -> {resolve, reject}
  let count = 0;

  const hear = (message, buffers) => {
    if (message?.type !== "answer" || !open.has(message.id)) return; // another view's, or given up
    const { resolve, reject } = open.get(message.id);
    open.delete(message.id);
    if (message.status !== 200) {
      reject(new TransportError(message.status, message.error ?? `status ${message.status}`));
      return;
    }
    const answer = { progress: message.progress, final: message.final, sampled: message.sampled };
    const body = buffers[0];
    // A view of a larger buffer would drag the whole message along, and may lie at an odd address.
    const bytes = ArrayBuffer.isView(body) ? new Uint8Array(body.buffer, body.byteOffset, body.byteLength) : new Uint8Array(body);
    if (message.kind === "json") answer.json = JSON.parse(new TextDecoder().decode(bytes));
    else answer.buffer = bytes.slice().buffer;
    resolve(answer);
  };
  model.on("msg:custom", hear);
  return {
    get(name, params = {}, { signal } = {}) {
      return new Promise((resolve, reject) => {
        if (signal?.aborted) {
          reject(new TransportError(499, "given up", true));
          return;
        }
        const id = `${page}:${++count}`;
        const giveUp = () => {
          if (!open.delete(id)) return;
          model.send({ type: "cancel", id });
          reject(new TransportError(499, "given up", true));
        };
        const settle = (end) => (value) => {
          signal?.removeEventListener("abort", giveUp);
          end(value);
        };
        open.set(id, { resolve: settle(resolve), reject: settle(reject) });
        signal?.addEventListener("abort", giveUp);
        const texts = Object.fromEntries(Object.entries(params).map(([field, value]) => [field, String(value)]));
        model.send({ type: "get", id, name, params: texts });
      });
    },
    destroy() {
      model.off("msg:custom", hear);
      for (const [id, { reject }] of open) {
        model.send({ type: "cancel", id });
        reject(new TransportError(499, "given up", true));
      }
      open.clear();
    },
  };
}
