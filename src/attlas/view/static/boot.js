// Starts the page of `attlas view`.

import { mount } from "./main.js";
import { httpTransport } from "./transport.js";

mount(document.querySelector(".attlas"), httpTransport("./"), { hash: true });
