// Starts the page of a corpus on the answers of the server.

import { mountCorpus } from "./page.js";
import { createHttpTransport } from "../data/transport.js";
import { fetchTranslations } from "../words/words.js";

await fetchTranslations("./words/");
mountCorpus(/** @type {HTMLElement} */ (document.querySelector(".attlas")), createHttpTransport("./"));
