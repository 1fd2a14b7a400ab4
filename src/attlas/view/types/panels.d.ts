// What panels are given, and what they are made of.

/** What stands in the place of {0}, {1}, ... in a text. */
type TextValue = string | number | null | undefined;
/** Texts in another language by their English ones. */
type Translations = Record<string, string>;

/** Tell screen readers a line. */
type Announce = (text: string) => void;
/** Make a name that no other element of the document has. */
type MakeId = (name: string) => string;
/** Build the page again on the text of a state: another one, or one that has grown. */
type Reopen = (state: Readonly<State>, isContinued: boolean) => unknown;

/** What every panel is given. */
interface PageContext {
  store: Store;
  transport: Requests;
  map: AttentionMap;
  texts: Texts;
  outlines: Outlines;
  announce: Announce;
  uid: MakeId;
  root: HTMLElement;
  /** How exact the numbers are, for the help: a title and a text. */
  numbers?: [title: string, text: string];
  tools: HTMLElement;
  reopen?: Reopen;
}
interface MountOptions {
  hash?: boolean;
  initial?: Partial<State>;
  numbers?: [title: string, text: string];
  reopen?: Reopen;
}
interface Panel {
  destroy(): void;
}

/** What an element may hold; null and undefined are left out. */
type Child = Node | string | null | undefined;
/** Attributes and properties of an element; null and undefined are left out. */
type Attributes = Record<string, string | number | boolean | null | undefined>;
interface Option<T> {
  value: T;
  text: string;
  title?: string;
}
type DialogParts = ReturnType<typeof import("../static/panels/elements.js").createDialog>;

/** How a token of the text is painted. */
interface TokenStyle {
  classes: string[];
  background: string;
}
/** The tokens that a flow needs. */
type FlowTokens = Pick<Tokens, "length" | "prefetch" | "peek" | "joined">;
type Flow = ReturnType<typeof import("../static/panels/flow.js").createFlow>;

/** The range of a colour bar in the numbers of its scale. */
interface BarRange {
  min: number;
  max: number;
}
interface Tick {
  at: number;
  text: string;
}
/** Colours and fonts of a picture that is saved. */
type PictureStyle = Record<"card" | "ink" | "soft" | "line" | "land" | "accent" | "sans", string>;
/** The tokens at positions of a text. */
type TextOf = Record<Side, (position: number) => string>;
/** A head of a table that is saved. */
interface TableHead {
  name: string;
  weights: Float32Array;
  rounded: boolean;
}
/** A row of a text: its weights, whether they are rounded, and their sum where it is known. */
interface Line {
  weights: Float32Array;
  rounded: boolean;
  total: number | null;
}
/** The line that is shown: the state it was asked for in, and its cell. */
interface ShownLine extends Line {
  state: State;
  cell: Cell;
}
/** The sort and the filter of the heads, as a link writes them. */
interface HeadSort {
  order: string;
  column: Column | null;
}
interface HeadFilter {
  kind: string;
  within: [low: number, high: number] | null;
}
/** A head in the grid of thumbnails. */
interface HeadCell extends HeadPlace {
  key: string;
  button: HTMLButtonElement;
  canvas: HTMLCanvasElement | null;
  value: HTMLElement;
  kind: HTMLElement;
  sampled: boolean;
  row: HeadRow | null;
}
/** A figure as SVG, with what is written over it when it is saved. */
interface FigureContent {
  figure: SVGSVGElement;
  look: Look;
  title: string;
  caption: string;
  file?: string;
}
/** A way to export; `says` and `button` are there once it is mounted. */
interface ExportKind {
  name: string;
  title: string;
  run(signal: AbortSignal): Promise<string>;
  words(): string;
  says: HTMLElement;
  button: HTMLButtonElement;
}
/** Some tokens of a flow, in one element. */
interface Piece {
  element: HTMLElement;
  filled: boolean;
  from: number | undefined;
  near?: boolean;
  wanted?: { position: number; block: "center" | "nearest" } | null;
}
/** A head as it is sorted and filtered. */
interface ShownHead {
  cell: HeadCell;
  values: Record<string, number | null>;
  kinds: string[];
}
/** A token of the two columns with lines. */
interface LineToken {
  side: Side;
  index: number;
}
/** The window whose weights are shown as lines, for each head; the positions are those of its first row and column. */
interface ShownLines extends Region {
  heads: HeadPlace[];
  weights: Float32Array[];
  tokens: SideTokens;
  firstQuery: number;
  firstKey: number;
}
/** What was typed into the search. */
type PlaceQuery = { kind: "range"; start: number; stop: number } | { kind: "cell"; query: number; key: number };
type SearchQuery = { kind: "nothing" } | { kind: "text"; text: string } | PlaceQuery;
/** Where a query leads: a cell, or rows and columns. */
type SearchPlace = (Cell & { error?: undefined }) | { error?: undefined; rows: [number, number] | null; columns: [number, number] | null };
/** The picture of a head. */
interface Thumbnail {
  codes: Uint16Array;
  size: number;
  sampled: boolean;
  final: boolean;
  tries: number;
}
interface ThumbnailItem extends HeadPlace {
  visible: boolean;
  failed: boolean;
}
/** Write a text of a vector picture at a place. */
type WriteText = (x: number, y: number, text: string, more?: string) => string;
