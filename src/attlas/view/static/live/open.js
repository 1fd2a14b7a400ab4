// What a page can be given: files and folders that are dropped or chosen, and addresses.

import { t } from "../words/words.js";
import { readRecording } from "./recording.js";

const LARGEST = 1 << 29; // bytes of a page
const HELD = '<script type="application/json" id="attlas-data">'; // behind it stands what a page holds, up to the next "<"

/**
 * What was dropped: a file, or a folder with its files.
 *
 * @param {DataTransfer} transfer
 * @returns {Promise<Opened>}
 */
export async function readDropped({ items, files }) {
  const entry = items[0]?.webkitGetAsEntry?.();
  if (entry?.isDirectory) return { folder: openDirectory(/** @type {FileSystemDirectoryEntry} */ (entry)) };
  if (!files.length) throw new Error(t("Drop a file or a folder; this was neither"));
  return files.length === 1 ? readFile(files[0]) : readFiles(files);
}

/**
 * @param {FileSystemDirectoryEntry} directory
 * @returns {OpenedFolder}
 */
const openDirectory = (directory) => ({
  name: directory.name,
  async read(file) {
    const entry = await new Promise((resolve, reject) => directory.getFile(file, {}, resolve, reject)).catch(() => null);
    if (!entry) throw createMissingError(directory.name, file);
    /** @type {File} */
    const found = await new Promise((resolve, reject) => /** @type {FileSystemFileEntry} */ (entry).file(resolve, reject));
    return found.arrayBuffer();
  },
});

/**
 * The files of a folder, chosen or dropped together.
 *
 * @param {ArrayLike<File>} files
 * @returns {Opened}
 */
export function readFiles(files) {
  const own = [...Array.from(files)];
  const name = own[0]?.webkitRelativePath.split("/")[0] || t("these files");
  return {
    folder: {
      name,
      async read(file) {
        const found = own.find((each) => each.name === file);
        if (!found) throw createMissingError(name, file);
        return found.arrayBuffer();
      },
    },
  };
}

/**
 * @param {File} file
 * @returns {Promise<Opened>}
 */
export async function readFile(file) {
  if (file.name === "atlas.json" || file.name.endsWith(".safetensors")) throw new Error(t("{0} is one file of a recording: drop or choose its whole folder", file.name));
  if (file.size > LARGEST) throw new Error(t("{0} is larger than any page of attlas", file.name));
  return { name: file.name, text: await file.text() };
}

/**
 * What an address names: a page, or the folder of a recording where it ends with a slash or .atlas.
 *
 * @param {string} address
 * @param {string} base
 * @returns {Promise<Opened>}
 */
export async function readAddress(address, base) {
  const url = URL.canParse(address, base) ? new URL(address, base) : null;
  if (!url || !["http:", "https:", "file:"].includes(url.protocol)) throw new Error(t("{0} is no address of a page or a recording", address));
  const path = url.pathname.replace(/\/$/, "");
  const name = decodeURIComponent(path.slice(path.lastIndexOf("/") + 1));
  if (!url.pathname.endsWith("/") && !path.endsWith(".atlas")) return { name, text: await (await fetchFile(url, name)).text() };
  url.pathname = `${path}/`;
  return {
    folder: {
      name,
      async read(file) {
        return (await fetchFile(new URL(file, url), `${name}/${file}`)).arrayBuffer();
      },
    },
  };
}

/**
 * @param {URL} url
 * @param {string} name
 */
async function fetchFile(url, name) {
  const response = await fetch(url, { referrerPolicy: "no-referrer", credentials: "omit" }).catch(() => null);
  if (!response) throw new Error(t("{0} cannot be fetched. Another host must allow this page to read it (CORS), and a page opened from a disk may read no file beside it: drop it here", name));
  if (!response.ok) throw new Error(t("{0} is not there: the host answers {1}", name, response.status));
  return response;
}

/**
 * @param {string} folder
 * @param {string} file
 */
function createMissingError(folder, file) {
  if (file === "atlas.json") return new Error(t("{0} holds no atlas.json, as a recording does; a corpus becomes a page that opens here by: attlas report {0} -o heads.html", folder));
  return new Error(t("The recording {0} is not whole: {1} is missing", folder, file));
}

/**
 * The contents of what was opened, for the page of a recording or that of a corpus. Nothing of it is run.
 *
 * @param {Opened} opened
 * @returns {Promise<PackedData | PackedCorpus>}
 */
export async function readContents(opened) {
  if ("folder" in opened) return readRecording(opened.folder);
  const { name, text } = opened;
  const start = text.indexOf(HELD);
  if (start < 0) throw new Error(t("{0} is no page that attlas has exported, and no recording. Pages come from attlas report, from Export → Offline page in the viewer, and from attlas report CORPUS", name));
  let data;
  try {
    data = JSON.parse(text.slice(start + HELD.length, text.indexOf("<", start + HELD.length)));
  } catch {
    throw new Error(t("{0} is cut off or damaged", name));
  }
  if (isObject(data?.answers?.info)) return /** @type {PackedCorpus} */ (data);
  if (data?.format !== undefined && data.format !== 1) throw new Error(t("{0} was written by another version of attlas: open it by itself", name));
  const isPage = Array.isArray(data?.packed) && data.packed.length && Array.isArray(data.info?.entries) && [data.state, data.parts, data.texts, data.heads].every(isObject);
  if (!isPage) throw new Error(t("{0} holds nothing to show", name));
  if (!/^https:\/\//.test(data.info.project ?? "")) data.info.project = null; // it becomes a link
  return /** @type {PackedData} */ (data);
}

/** @param {unknown} value */
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
