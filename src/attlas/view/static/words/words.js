// Translations. English texts are in the code; each other language is a JSON file with a translation of every text.

/** @type {Record<Language, string>} */
export const LANGUAGES = { en: "English", zh: "中文" };

/**
 * The language of the page: what its address says (`lang=zh`), else that of the browser.
 *
 * @type {Language}
 */
export const language = (() => {
  const chosen = new URLSearchParams(globalThis.location?.hash.slice(1)).get("lang") ?? "";
  return chosen === "en" || chosen === "zh" ? chosen : /^zh\b/.test(globalThis.navigator?.language) ? "zh" : "en";
})();

/** @type {Translations | null} */
let texts = null; // each English text in the language of the page; null until the page has them

/**
 * Take the translations of the page: {language: {English text: its translation}}. Texts that have none stay English.
 *
 * @param {Partial<Record<Language, Translations>>} translations
 */
export function setTranslations(translations) {
  texts = translations[language] ?? {};
}

/**
 * A text in the language of the page; {0}, {1}, ... are the values behind it.
 *
 * @param {string} text
 * @param {...TextValue} values
 * @returns {string}
 */
export function t(text, ...values) {
  if (texts === null) throw new Error(`asked for before the translations were there: ${text}`);
  const translated = Object.hasOwn(texts, text) ? texts[text] : text;
  return values.length ? translated.replace(/\{(\d)\}/g, (_, at) => String(values[Number(at)])) : translated;
}
