// Starts the page of a corpus on the answers of the server.

import { mountCorpus } from "./page.js";
import { createHttpTransport } from "../data/transport.js";

mountCorpus(document.querySelector(".attlas"), createHttpTransport("./"));
