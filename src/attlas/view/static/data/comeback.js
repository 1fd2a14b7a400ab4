// How to come back to what a page shows, once its viewer is closed.

const PREFIX = "attlas ";
const MOST_PAGES = 40; // addresses of pages that are remembered

/** @param {string} word */
const quote = (word) => (/^[\w./:@%+,-]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`);

/**
 * The command that opens a recording at a place. `hash`: what stands behind the # of the page.
 *
 * @param {string | null} folder
 * @param {string} hash
 */
export function formatComeback(folder, hash) {
  return `attlas view ${quote(folder ?? "run.atlas")}${hash ? ` --at '${hash.replace(/'/g, "%27")}'` : ""}`;
}

/**
 * Remember in this browser of which recording the page of an address is; the address is secret, and of no use later.
 *
 * @param {string} path
 * @param {string} folder
 */
export function rememberFolder(path, folder) {
  try {
    const { localStorage: kept } = window;
    const known = Object.keys(kept).filter((key) => key.startsWith(PREFIX));
    if (known.length >= MOST_PAGES) known.forEach((key) => kept.removeItem(key));
    kept.setItem(`${PREFIX}${path}`, folder);
  } catch {
    // A browser that keeps nothing: the page that says how to come back names no folder.
  }
}

/**
 * The folder of the page of an address; null where it is not known.
 *
 * @param {string} path
 */
export function recallFolder(path) {
  try {
    return window.localStorage.getItem(`${PREFIX}${path}`);
  } catch {
    return null;
  }
}
