// Translations. English texts are in the code; each other language is one file with a translation of every text.

import { zh } from "./zh.js";

export const LANGUAGES = { en: "English", zh: "中文" };

/** The language of the page: what its address says (`lang=zh`), else that of the browser. */
export const language = (() => {
  const chosen = new URLSearchParams(globalThis.location?.hash.slice(1)).get("lang");
  return chosen in LANGUAGES ? chosen : /^zh\b/.test(globalThis.navigator?.language) ? "zh" : "en";
})();

const texts = language === "zh" ? zh : {};

/** A text in the language of the page; {0}, {1}, ... are the values behind it. */
export function t(text, ...values) {
  const translated = Object.hasOwn(texts, text) ? texts[text] : text;
  return values.length ? translated.replace(/\{(\d)\}/g, (_, at) => values[at]) : translated;
}
