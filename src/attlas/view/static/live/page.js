// Starts the page that opens other pages and recordings: dropped, chosen, or named by its address.

import { readData } from "../data/base64.js";
import { formatInteger } from "../data/numbers.js";
import { createPackedCorpus } from "../corpus/offline.js";
import { mountCorpus } from "../corpus/page.js";
import { createStore } from "../data/state.js";
import { followTheme } from "../map/look.js";
import { mountPacked } from "../offline.js";
import { createLogo } from "../panels/figure.js";
import { createProjectLink, make } from "../panels/elements.js";
import { language, t } from "../words/words.js";
import { readAddress, readContents, readDropped, readFile, readFiles } from "./open.js";
import { MOST_TOKENS } from "./recording.js";

export function startOffline() {
  /** @type {{ root: HTMLElement, data: LiveData }} */
  const { root, data } = readData();
  document.documentElement.lang = language;
  const live = createLive(root, data);
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    live.showTarget(true);
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) live.showTarget(false);
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    live.showTarget(false);
    const transfer = event.dataTransfer;
    if (transfer) live.open(() => readDropped(transfer));
  });
  const address = new URLSearchParams(window.location.search).get("run") ?? data.opens;
  if (data.packed || data.answers) live.show(/** @type {PackedData | PackedCorpus} */ (data));
  else if (address) live.open(() => readAddress(address, window.location.href));
  else live.welcome();
}

/**
 * @param {HTMLElement} first
 * @param {LiveData} data
 */
function createLive(first, data) {
  let root = first;
  let destroy = () => {};
  let openings = 0; // which one was asked for last
  let shown = 0; // pages

  /** An empty page in place of the last one. */
  function clear(className = "attlas attlas-page") {
    destroy();
    destroy = () => {};
    const fresh = make("div", { class: className });
    root.replaceWith(fresh);
    root = fresh;
    return fresh;
  }

  /**
   * Open what `read` returns; what is shown stays until it can be shown.
   *
   * @param {() => Opened | Promise<Opened>} read
   */
  async function open(read) {
    const own = ++openings;
    const notice = make("p", { class: "live-notice", role: "status" }, t("Opening …"));
    root.append(notice);
    try {
      const contents = await readContents(await read());
      if (own === openings) show(contents);
    } catch (error) {
      if (own === openings) welcome(`${error.message}.`);
    } finally {
      notice.remove();
    }
  }

  /** @param {PackedData | PackedCorpus} contents */
  function show(contents) {
    // A link is about the first page; the places of others are their own.
    if (shown++) window.history.replaceState(null, "", window.location.pathname);
    const again = make("button", { type: "button", class: "text-button" }, t("Open another"));
    again.addEventListener("click", () => welcome());
    if ("answers" in contents && contents.answers) {
      const page = clear("attlas attlas-page corpus-page");
      mountCorpus(page, createPackedCorpus(/** @type {PackedCorpus} */ (contents))).ready.then(() => page.querySelector(".corpus-foot")?.append(again));
      return;
    }
    const page = mountPacked(clear(), /** @type {PackedData} */ (contents), " ", again);
    destroy = page.destroy;
    page.ready.catch((error) => welcome(`${error.message}.`));
  }

  /**
   * Show what can be opened, and how; `problem`: why the last one could not be.
   *
   * @param {string} [problem]
   */
  function welcome(problem = "") {
    document.title = "attlas";
    const [file, folder] = [make("input", { type: "file", accept: ".html,.htm", hidden: true }), make("input", { type: "file", webkitdirectory: true, hidden: true })];
    file.addEventListener("change", () => file.files?.length && open(() => readFile(/** @type {FileList} */ (file.files)[0])));
    folder.addEventListener("change", () => folder.files?.length && open(() => readFiles(/** @type {FileList} */ (folder.files))));
    const createButton = (/** @type {string} */ text, /** @type {HTMLInputElement} */ input) => {
      const button = make("button", { type: "button", class: "toggle" }, text);
      button.addEventListener("click", () => input.click());
      return button;
    };
    const address = make("input", { type: "text", name: "run", inputMode: "url", placeholder: "run.html", required: true, "aria-label": t("Address") });
    const form = make("form", { class: "live-address" }, address, make("button", { type: "submit", class: "toggle" }, t("Open")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      window.location.assign(`?run=${encodeURIComponent(address.value.trim())}`);
    });
    const hasLink = !shown && window.location.hash.length > 1 && !/^#lang=\w*$/.test(window.location.hash);
    const other = make("a", { href: language === "en" ? "#lang=zh" : "#lang=en", lang: language === "en" ? "zh" : "en" }, language === "en" ? "中文" : "English");
    other.addEventListener("click", () => setTimeout(() => window.location.reload()));
    const page = clear("attlas attlas-page live-page");
    destroy = followTheme(page, createStore({ theme: /** @type {const} */ ("auto"), dark: false }, {}));
    page.append(
      make("main", { class: "live" },
        make("div", { class: "brand" }, createLogo(), make("span", { class: "brand-name" }, "attlas"), make("span", { class: "live-language" }, other)),
        make("h1", {}, t("Open a recording of attention")),
        problem ? make("p", { class: "live-problem", role: "alert" }, problem) : null,
        hasLink ? make("p", {}, t("This link is of a place in a recording. Open the recording, and you are there.")) : null,
        make("div", { class: "live-drop" }, make("p", {}, t("Drop a page or the folder of a recording here")), make("div", { class: "live-buttons" }, createButton(t("Choose a page"), file), createButton(t("Choose a folder"), folder), file, folder)),
        make("p", {}, t("or type the address of one, beside this page or on a host that allows it (CORS):")),
        form,
        make("h2", {}, t("What opens here")),
        make("ul", {},
          make("li", {}, t("Pages that work offline: from attlas report, from Export in the viewer, and of a corpus.")),
          make("li", {}, t("Folders of recordings (run.atlas) of up to {0} tokens whose scores are scaled dot products, causal or not: every weight is computed here from the stored queries and keys, of the first text.", formatInteger(MOST_TOKENS))),
        ),
        make("p", { class: "live-foot" }, t("Nothing leaves this page: files are read by your browser alone."), ...createProjectLink(data)),
      ),
    );
  }
  return {
    open,
    show,
    welcome,
    showTarget(/** @type {boolean} */ isOver) {
      root.classList.toggle("live-over", isOver);
    },
  };
}
