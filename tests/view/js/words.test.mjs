// Translations: none is needed while modules load, so that they may come later, and each text is then in its language.

import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import test from "node:test";
import { fileURLToPath } from "node:url";

const STATIC = new URL("../../../src/attlas/view/static/", import.meta.url);
globalThis.location = { hash: "#lang=zh&e=1" };
const words = await import(`${STATIC}words/words.js`);

test("no module asks for a text while it loads", async () => {
  const files = readdirSync(fileURLToPath(STATIC), { recursive: true }).filter((name) => name.endsWith(".js"));
  assert.ok(files.length > 60);
  for (const file of files) await import(`${STATIC}${file.replaceAll("\\", "/")}`);
  assert.throws(() => words.t("Heads"), /before the translations were there: Heads/);
});

test("a text is in the language of the address, or stays English", () => {
  assert.equal(words.language, "zh");
  words.setTranslations({ zh: { Heads: "头", "{0} of {1}": "{1} 中的 {0}" } });
  assert.equal(words.t("Heads"), "头");
  assert.equal(words.t("{0} of {1}", 3, 4), "4 中的 3");
  assert.equal(words.t("toString"), "toString");
  words.setTranslations({});
  assert.equal(words.t("Heads"), "Heads");
});
