// One sampled text of a head: a token's keys in one colour and its queries in the other, as shades and lines.

import { make } from "./elements.js";
import { createFlow } from "./flow.js";
import { saveButtons, svg, svgRoot } from "./figure.js";
import { readLook } from "./look.js";
import { percent, whole } from "./numbers.js";
import { visible } from "./tokens.js";
import { t } from "./words.js";

const lines = 24; // drawn to the strongest of each side; shades show all
const listed = 4;

/** The kept weights of a text, by query and by key: `of(place)` gives {keys, queries} as [place, weight], largest first; places count from the first token that is shown. */
export function weightsOf({ counts, keys: positions, weights, first }) {
  const keys = positions.map((position) => position - first);
  const byKey = new Map();
  const starts = new Int32Array(counts.length + 1);
  for (let query = 0; query < counts.length; query++) {
    starts[query + 1] = starts[query] + counts[query];
    for (let at = starts[query]; at < starts[query + 1]; at++) {
      if (!byKey.has(keys[at])) byKey.set(keys[at], []);
      byKey.get(keys[at]).push([query, weights[at]]);
    }
  }
  const down = (pairs) => pairs.sort((a, b) => b[1] - a[1]);
  return {
    of(position) {
      const [from, to] = [starts[position], starts[position + 1]];
      return { keys: down(Array.from({ length: to - from }, (_, k) => [keys[from + k], weights[from + k]])), queries: down([...(byKey.get(position) ?? [])]) };
    },
  };
}

/** A card for a text: {interval, text, length, largest, query, key}; `fetchText()` gives its tokens and weights. */
export function createSample({ root, uid, announce }, sample, { title, fetchText, openMap, whyNot }) {
  const frame = make("div", { class: "sample-frame" }, make("p", { class: "sample-wait" }, "…"));
  const looks = make("p", { class: "sample-line looks" });
  const looked = make("p", { class: "sample-line looked" });
  const map = make("button", { type: "button", class: "toggle sample-map", disabled: Boolean(whyNot), title: whyNot ?? t("Record this text and open every weight of this head on it") }, t("Open the full map"));
  const why = whyNot ? make("span", { class: "unseen", id: uid("why") }, whyNot) : null;
  if (why) map.setAttribute("aria-describedby", why.id);
  const begins = sample.name.replace(/^.*[\\/](?=.)/, "");
  const facts = [t("{0} tokens", whole(sample.length)), sample.start ? t(" from {0} on", whole(sample.start)) : "", sample.cut ? t(", {0} of them here", whole(sample.cut)) : "", t("; peak {0}", percent(sample.largest))].join("");
  const element = make(
    "article",
    { class: "sample" },
    make("div", { class: "sample-head" }, make("div", { class: "sample-words" }, make("b", { title: sample.name }, begins), make("span", {}, facts)), saveButtons(t("text"), picture, announce), map, why),
    frame,
    looks,
    looked,
  );
  let text = null;
  let weights = null;
  let flow = null;
  let overlay = null;
  let pinned = sample.query;
  let hovered = null;
  let shown = { keys: new Map(), queries: new Map() };
  let started = false;
  let ended = false;

  map.addEventListener("click", async () => {
    map.disabled = true;
    map.textContent = t("Recording the text …");
    try {
      await openMap();
    } catch (error) {
      announce(`${error.message}.`);
      looks.textContent = t("The map cannot be opened: {0}.", error.message);
      looks.classList.add("bad");
    }
    map.disabled = false;
    map.textContent = t("Open the full map");
  });

  async function start() {
    if (started) return;
    started = true;
    try {
      text = await fetchText();
    } catch (error) {
      frame.firstChild.textContent = t("The text cannot be shown: {0}.", error.message);
      started = false;
      return;
    }
    if (ended) return;
    weights = weightsOf(text);
    pinned = Math.min(text.tokens.length - 1, Math.max(0, sample.query - text.first));
    const tokens = { prefetch() {}, peek: (position) => text.tokens[position] ?? null, joined: () => null };
    flow = createFlow({ tokens, label: t("{0}: point at a token", begins), uid, paint, onHover: point, onPick: pick, first: text.first });
    overlay = svg("svg", { class: "sample-lines", "aria-hidden": "true" });
    flow.element.append(overlay);
    frame.replaceChildren(flow.element);
    const box = flow.element.querySelector(".flow");
    box.addEventListener("scroll", draw, { passive: true });
    box.addEventListener("keydown", () => announce(`${looks.textContent} ${looked.textContent}`));
    resized.observe(box);
    flow.start(text.tokens.length, text.tokens.length);
    show();
    flow.reveal(pinned);
  }
  const pick = (position) => {
    pinned = position;
    hovered = null;
    show();
  };
  const point = (position) => {
    hovered = position;
    show();
  };
  const own = () => hovered ?? pinned;

  function paint(position) {
    const [key, query] = [shown.keys.get(position) ?? 0, shown.queries.get(position) ?? 0];
    const classes = [...(position === own() ? ["own"] : []), ...(key ? ["is-key"] : []), ...(query ? ["is-query"] : [])];
    // The weights as opacity; the root of what would be too faint to see.
    const shade = (name, weight) => `color-mix(in srgb, var(--${name}) ${Math.round(8 + 36 * Math.sqrt(weight))}%, transparent)`;
    const background = key && query ? `linear-gradient(${shade("sea", key)} 50%, ${shade("accent", query)} 50%)` : key ? shade("sea", key) : query ? shade("accent", query) : "";
    return { classes, background };
  }
  function show() {
    if (!flow) return;
    const found = weights.of(own());
    shown = { keys: new Map(found.keys), queries: new Map(found.queries) };
    flow.repaint();
    say(looks, t("looks at"), found.keys);
    say(looked, t("is looked at by"), found.queries);
    draw();
  }
  function say(line, verb, pairs) {
    const { first } = text;
    const chip = (position) => make("code", { class: "token" }, visible(text.tokens[position] ?? text.others[position + first]));
    line.classList.remove("bad");
    line.replaceChildren(make("i", { class: "swatch", "aria-hidden": "true" }), chip(own()), ` ${whole(own() + first)} ${verb} `);
    if (!pairs.length) line.append(t("nothing that was kept"));
    pairs.slice(0, listed).forEach(([position, weight], at) => line.append(at ? ", " : "", chip(position), ` ${whole(position + first)} ${percent(weight)}`));
    if (pairs.length > listed) line.append(t(" and {0} more", whole(pairs.length - listed)));
  }
  // Lines from the token to what it looks at and to what looks at it, as far as they are in the window of the text.
  function draw() {
    if (!flow || !overlay.isConnected) return;
    const box = flow.element.getBoundingClientRect();
    const middle = (position) => {
      const part = flow.element.querySelector(`.t[data-position="${position}"]`)?.getClientRects()[0];
      return part && { x: part.left - box.left + part.width / 2, y: part.top - box.top + part.height / 2, top: part.top - box.top };
    };
    const from = middle(own());
    const look = readLook(root);
    const paths = [];
    for (const [pairs, colour] of [[shown.queries, look.accent], [shown.keys, look.sea]]) {
      for (const [position, weight] of [...pairs].slice(0, lines)) {
        const to = from && position !== own() ? middle(position) : null;
        if (!to) continue;
        // An arc over the line of text where both are on one, else a curve between the lines.
        const lift = Math.abs(from.y - to.y) < 4 ? 10 + Math.min(16, Math.abs(from.x - to.x) / 12) : 0;
        const d = lift ? `M${from.x} ${from.top}Q${(from.x + to.x) / 2} ${from.top - lift} ${to.x} ${to.top}` : `M${from.x} ${from.y}Q${to.x} ${(from.y + to.y) / 2} ${to.x} ${to.y}`;
        paths.push(svg("path", { d, fill: "none", stroke: colour, "stroke-width": 0.8 + 3 * weight, "stroke-opacity": 0.35 + 0.5 * weight, "stroke-linecap": "round" }));
      }
    }
    overlay.replaceChildren(...paths);
  }
  // What is in the window of the text, as a figure of its own.
  function picture() {
    if (!flow) return null;
    const look = readLook(root);
    const box = flow.element.getBoundingClientRect();
    const figure = svgRoot(Math.ceil(box.width), Math.ceil(box.height), look, title);
    for (const span of flow.element.querySelectorAll(".t")) {
      const position = Number(span.dataset.position);
      const [key, query] = [shown.keys.get(position) ?? 0, shown.queries.get(position) ?? 0];
      const part = span.getClientRects()[0];
      if (!part || part.bottom > box.bottom || part.top < box.top) continue;
      const place = { x: part.left - box.left, y: part.top - box.top, width: part.width, height: part.height };
      for (const [weight, colour] of [[key, look.sea], [query, look.accent]]) if (weight) figure.append(svg("rect", { ...place, rx: 2, fill: colour, "fill-opacity": 0.08 + 0.36 * Math.sqrt(weight) }));
      if (position === own()) figure.append(svg("rect", { ...place, rx: 3, fill: "none", stroke: look.accent, "stroke-width": 2 }));
      figure.append(svg("text", { x: place.x, y: place.y + 0.72 * place.height, "font-family": look.mono, "font-size": 12.5, fill: look.ink, "xml:space": "preserve" }, visible(text.tokens[position]).replace(/^·+/, (blanks) => " ".repeat(blanks.length))));
    }
    figure.append(...[...overlay.children].map((path) => path.cloneNode(true)));
    return { figure, look, title: `${title}, ${begins}`, caption: `${looks.textContent}; ${looked.textContent}` };
  }
  const resized = new ResizeObserver(draw);
  const near = new IntersectionObserver((changes) => changes.some(({ isIntersecting }) => isIntersecting) && start(), { rootMargin: "200px" });
  near.observe(element);
  return {
    element,
    repaint: show,
    destroy() {
      ended = true;
      near.disconnect();
      resized.disconnect();
      flow?.destroy();
      element.remove();
    },
  };
}
