// Starts the page of a corpus on the answers of the server.

import { mountCorpus } from "./page.js";
import { createHttpTransport } from "../data/transport.js";

/** Start the page in its element of class "attlas". */
export function startPage() {
  mountCorpus(/** @type {HTMLElement} */ (document.querySelector(".attlas")), createHttpTransport("./"));
}
