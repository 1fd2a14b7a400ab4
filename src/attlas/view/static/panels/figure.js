// Figures as SVG elements that carry their own colours and fonts, so that what is seen is what is saved.

import { getContext } from "../map/canvas.js";
import { download, make, encodePng, formatFileName } from "./elements.js";
import { t } from "../words/words.js";

const SVG = "http://www.w3.org/2000/svg";

/**
 * An SVG element with its attributes and children; numbers are rounded to hundredths.
 *
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag
 * @param {Attributes} attributes
 * @param {...Child} children
 */
export function createSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    element.setAttribute(name, String(typeof value === "number" ? Number(value.toFixed(2)) : value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The mark of attlas, for the header. */
export function createLogo() {
  return createSvg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, createSvg("path", { class: "mark-land", d: "M1 1v14h14z" }), createSvg("path", { class: "mark-stripe", d: "M1 7l8 8" }));
}

/**
 * The root of a figure: `width` × `height` CSS pixels.
 *
 * @param {number} width
 * @param {number} height
 * @param {Look} look
 * @param {string} label
 * @param {...Child} children
 */
export function createSvgRoot(width, height, look, label, ...children) {
  const attributes = { viewBox: `0 0 ${width} ${height}`, width, height, "font-family": look.sans, "font-size": 11, fill: look.soft, role: "img", "aria-label": label };
  return createSvg("svg", attributes, ...children);
}

/**
 * The figure with its title and a line about it on top, on the colour of the page, as the text of a file.
 *
 * @param {SVGSVGElement} figure
 * @param {{ title: string, caption: string }} words
 * @param {Look} look
 */
function serialiseFigure(figure, { title, caption }, look) {
  const { width, height } = figure.viewBox.baseVal;
  const top = 50;
  const copy = /** @type {SVGSVGElement} */ (figure.cloneNode(true));
  for (const part of copy.querySelectorAll("[data-transient]")) part.remove();
  const inner = createSvg("g", { transform: `translate(16 ${top})` }, ...copy.childNodes);
  const lines = [
    createSvg("text", { x: 16, y: 24, "font-size": 15, "font-weight": 600, fill: look.ink }, title),
    createSvg("text", { x: 16, y: 41, "font-size": 11 }, caption),
  ];
  const root = createSvg("svg", { viewBox: `0 0 ${width + 32} ${height + top + 12}`, width: width + 32, height: height + top + 12, "font-family": look.sans, "font-size": 11, fill: look.soft });
  root.append(createSvg("rect", { width: "100%", height: "100%", fill: look.card }), ...lines, inner);
  return `${new XMLSerializer().serializeToString(root)}\n`;
}

/**
 * @param {string} text
 * @param {number} scale
 */
async function renderPng(text, scale) {
  const url = URL.createObjectURL(new Blob([text], { type: "image/svg+xml;charset=utf-8" }));
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = make("canvas", { width: Math.round(image.width * scale), height: Math.round(image.height * scale) });
    getContext(canvas).drawImage(image, 0, 0, canvas.width, canvas.height);
    return await encodePng(canvas);
  } finally {
    URL.revokeObjectURL(url);
  }
}

/**
 * Two buttons that save a figure. `getContent()` returns `{figure, title, caption, look}`, or null while there is none;
 * `name` is what the buttons say they save.
 *
 * @param {string} name
 * @param {() => FigureContent | null} getContent
 * @param {Announce} announce
 */
export function createSaveButtons(name, getContent, announce) {
  const saveAs = async (/** @type {"svg" | "png"} */ kind) => {
    const content = getContent();
    if (!content) return;
    const text = serialiseFigure(content.figure, content, content.look);
    const file = formatFileName(`${content.title} ${content.file ?? name}`, 80).toLowerCase();
    try {
      download(`${file}.${kind}`, kind === "svg" ? new Blob([text], { type: "image/svg+xml;charset=utf-8" }) : await renderPng(text, 2));
      announce(t("{0} saved as {1}", name, kind.toUpperCase()));
    } catch (error) {
      announce(`${error.message}.`);
    }
  };
  const createButton = (/** @type {"svg" | "png"} */ kind) => {
    const label = t("Save as {0}: {1}", kind.toUpperCase(), name);
    const element = make("button", { type: "button", class: "text-button", title: label, "aria-label": label, "data-save": kind }, kind.toUpperCase());
    element.addEventListener("click", () => saveAs(kind));
    return element;
  };
  return make("span", { class: "figure-save" }, createButton("svg"), createButton("png"));
}
