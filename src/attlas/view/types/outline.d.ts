// The named stretches of a text, as the server sends them and as trees.

type StretchKind = "named" | "document" | "class" | "function" | "section" | "paragraph" | "sentence";
type StretchRow = [start: number, stop: number, kind: StretchKind, name: string];

/** A part of a text with a name, and the parts within it. */
interface Stretch extends Span {
  kind: StretchKind;
  name: string;
  /** Which of its siblings it is, from 1 on. */
  number: number;
  depth: number;
  children: Stretch[];
}
type OutlineSides = Record<Side, Stretch[]>;
/** The outlines of a page; see data/outlines.js. */
interface Outlines {
  of(place: { entry: number; batch: number }): OutlineSides;
  on(listener: () => void): () => void;
}
/** What is drawn of an outline beside a pane. */
type ShownStretches = Record<Side, Stretch[]>;
/** The bracket of a stretch under the pointer. */
interface BracketHit {
  pane: ScenePane;
  side: Side;
  stretch: Stretch;
}
type Minimap = ReturnType<typeof import("../static/map/minimap.js").createMinimap>;
