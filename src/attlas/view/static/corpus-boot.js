// Starts the page of a corpus on the answers of the server.

import { mountCorpus } from "./corpus.js";
import { httpTransport } from "./transport.js";

mountCorpus(document.querySelector(".attlas"), httpTransport("./"));
