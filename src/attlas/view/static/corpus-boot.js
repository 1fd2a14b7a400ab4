// Starts the page of a corpus on the answers of the server.

import { mountCorpus } from "./corpus.js";
import { createHttpTransport } from "./transport.js";

mountCorpus(document.querySelector(".attlas"), createHttpTransport("./"));
