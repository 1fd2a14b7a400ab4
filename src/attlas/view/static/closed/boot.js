// The page at the address of a viewer that was closed: how to open it again at the same place.

import { formatComeback, recallFolder } from "../data/comeback.js";
import { language, t } from "../words/words.js";

/** Write the page, in the language of the browser. */
export function startPage() {
  document.documentElement.lang = language;
  document.title = `${t("This viewer is closed.")} · attlas`;
  const folder = recallFolder(window.location.pathname);
  const line = formatComeback(folder, window.location.hash.slice(1));
  const find = (/** @type {string} */ selector) => /** @type {HTMLElement} */ (document.querySelector(selector));
  find("h1").textContent = t("This viewer is closed.");
  find("p").textContent = folder ? t("This line opens it again at the same place:") : t("This line opens it again at the same place, with the folder of your recording:");
  find("code").textContent = line;
  const button = /** @type {HTMLButtonElement} */ (find("button"));
  button.textContent = t("Copy");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(line).catch(() => window.getSelection()?.selectAllChildren(find("code")));
  });
}
