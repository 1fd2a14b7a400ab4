// Starts the page of a corpus in a single file, on the answers that the file holds.

import { unpack } from "../data/base64.js";
import { mountCorpus } from "./page.js";
import { TransportError } from "../data/transport.js";

export function startOffline() {
  const data = JSON.parse(document.getElementById("attlas-data").textContent);
  const answers = new Map();
  async function readAnswer(key) {
    if (!data.answers[key]) throw new TransportError(404, "this file does not hold it");
    return JSON.parse(new TextDecoder().decode(await unpack(data.answers[key])));
  }
  mountCorpus(document.querySelector(".attlas"), {
    async get(name, params = {}) {
      const key = [name, ...Object.values(params)].join(":");
      if (!answers.has(key)) answers.set(key, readAnswer(key));
      return { json: await answers.get(key), progress: 1, final: true };
    },
  });
}
