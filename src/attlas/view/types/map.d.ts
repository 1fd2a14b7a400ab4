// The map: its panes, what is drawn in them, and what is fetched for them.

type Context = CanvasRenderingContext2D;

/** A rectangle in CSS pixels. */
interface Box {
  x: number;
  y: number;
  w: number;
  h: number;
}
interface Point {
  x: number;
  y: number;
}
/** What lies beside the map, in CSS pixels; see geometry.js. */
interface Gutter {
  track: number;
  band: number;
  left: number;
  top: number;
  edge: number;
  closedLeft: number;
  closedTop: number;
}
/** A pane of the stage: its box with gutters, its field without, and the centre of the map. */
interface Pane extends Box {
  gutter: Gutter;
  field: Box;
  cx: number;
  cy: number;
}
/** A pane with its conversions between cells and pixels; see `placePane`. */
interface PlacedPane extends Pane {
  X(j: number): number;
  Y(i: number): number;
  px(j: number): number;
  py(i: number): number;
  row(y: number): number;
  column(x: number): number;
  region: Region;
  left: number;
  top: number;
  right: number;
  bottom: number;
}
/** What one pane shows. */
interface ScenePane extends PlacedPane {
  source: Source;
  entry: Entry;
  firstKey: number;
  firstQuery: number;
  readable: boolean;
  names: { upper?: string; lower?: string };
  /** Names of the heads that have a colour. */
  legend: string[];
  layers: [...Layer[], Layer];
  patches: PatchLayer[];
}
/** All that a frame draws. */
interface Scene {
  info: Info;
  panes: [ScenePane, ...ScenePane[]];
  scale: number;
  dpr: number;
  level: number;
  compare: Compare;
  refusal: string | null;
  width: number;
  height: number;
}
/** The head, or the mean of heads, whose tiles are drawn; see `createSource`. */
interface Source extends HeadPlace {
  batch: number;
  variant: Variant;
  pool: Pool;
  key: string;
}
/** One head drawn into a pane; see `createLayer`. */
interface Layer {
  pane: PlacedPane;
  source: Source;
  entry: Entry;
  other: Source | null;
  /** All sources that have a colour of their own, where several are shown in one map. */
  mixed: Source[];
  level: number;
  transposed: boolean;
  toX(column: number): number;
  toY(row: number): number;
  region: Region;
  patch?: Region;
}
interface PatchLayer extends Layer {
  patch: Region;
}
/** What a cell of a pane shows; see `getTarget`. */
interface Target extends Cell {
  source: Source;
  entry: Entry;
  other: Source | null;
  mixed: Source[];
  name: string;
  toPaneCell(r: number, c: number): Cell;
  level: number;
  side: number;
  block: Region;
  allowed: boolean;
  firstQuery: number;
  firstKey: number;
  query: number;
  key: number;
  /** Whether its row may see no key; known once its track is. */
  empty?: boolean;
}
interface Hit extends Cell {
  pane: ScenePane;
}
/** A track under the pointer, and the rows or columns of its pixel. */
interface TrackHit {
  pane: ScenePane;
  side: "top" | "left";
  from: number;
  to: number;
}

/** A request for a tile or for the sampled picture that stands in for it. */
interface TileRequest {
  key: string;
  name: "tile" | "thumbnail";
  params: Params;
  distance: number;
}
/** A tile in the cache. */
interface Tile {
  codes: Uint16Array;
  progress: number;
  pending: boolean;
  wait: number;
  next: number;
  surface: HTMLCanvasElement | null;
  version: number;
  ratio: { second: Tile; version: number; surface: HTMLCanvasElement } | null;
  mixture: { parts: Tile[]; version: number; surface: HTMLCanvasElement } | null;
  bytes: number;
  frame: number;
}
/** Tables that turn codes into colours; see look.js. */
interface Palette {
  version: number;
  /** The table of the codes of an entry. */
  lut(entry: number): Uint32Array;
  ratio: Uint32Array | null;
  /** Where two heads are subtracted: the table of their entries. */
  difference: ((first: number, second: number) => DifferenceTable) | null;
  /** Where several heads have a colour each: the table of their entries. */
  mixture: ((...entries: number[]) => MixtureTable) | null;
}
/** How strong the codes of each head are, from 0 to 1, and their weights; colours in Oklab. See hues.js. */
interface MixtureTable {
  tables: { strengths: Float32Array; weights: Float32Array }[];
  paper: number[];
  ends: number[][];
}
interface DifferenceTable {
  weights: Float64Array;
  others: Float64Array;
  factor: number;
  words: Uint32Array;
  limit: number;
}
/** Whether there is time left to paint in this frame. */
interface Budget {
  left(): boolean;
}
type Tiles = ReturnType<typeof import("../static/map/tiles.js").createTiles>;
type Tracks = ReturnType<typeof import("../static/map/tracks.js").createTracks>;
type Cells = ReturnType<typeof import("../static/map/cells.js").createCells>;
type Camera = ReturnType<typeof import("../static/map/camera.js").createCamera>;
type Tip = ReturnType<typeof import("../static/map/crosshair.js").createTip>;
type AttentionMap = ReturnType<typeof import("../static/map/map.js").createMap>;
/** Colours and fonts of the theme, from the style sheet. */
type Look = ReturnType<typeof import("../static/map/look.js").readLook>;

/** A track as it is known now. */
interface Track {
  values: Float32Array | null;
  progress: number;
  range: TrackRange | null;
  /** Rows that may see no key, as `[start, stop)`. */
  empty: [start: number, stop: number][];
  wait: number;
  next: number;
  failed: number;
  loading: boolean;
  timer?: number;
}
interface TrackRange {
  low: number;
  high: number;
  log: boolean;
  /** Whether some are negative: the ends are those of sizes. */
  signed?: boolean;
}
/** What the tooltip knows of a cell or block. */
interface TipDetails {
  pool: Pool;
  block: BlockValue | null;
  exact: CellDetails | null;
  other: CellDetails | null;
  otherBlock?: BlockValue | null;
  /** What the heads that have a colour give to the cell or block, in order. */
  mixed: { block: BlockValue | null; exact: CellDetails | null }[];
  largest: LargestCell | null;
}
/** What the map shows for a cell. */
interface BlockValue {
  pending?: boolean;
  masked?: boolean;
  weight: number;
}
/** The largest cell of a block, and whether its weight is rounded. */
type LargestCell = [i: number, j: number, weight: number, rounded: boolean];

/** The tokens of one text; see data/tokens.js. */
interface Tokens {
  of: number | null;
  length: number;
  range(start: number, stop: number): Promise<string[]>;
  prefetch(start: number, stop: number): void;
  peek(position: number): string | null;
  joined(position: number): JoinedToken | null;
}
interface JoinedToken extends Span {
  text: string;
}
type SideTokens = Record<Side, Tokens>;
interface Texts {
  of(place: { entry: number; batch: number }): SideTokens;
  on(listener: () => void): () => void;
}
/** What gestures act on. */
interface GestureTarget {
  camera: Camera;
  point(x: number, y: number): void;
  leave(): void;
  click(x: number, y: number): void;
  double(x: number, y: number, out: boolean): void;
  key(name: string, shift: boolean): boolean;
}
/** A picture of the map on a canvas of its own; see `map.picture`. */
interface MapPicture {
  canvas: HTMLCanvasElement;
  width: number;
  height: number;
  grain: Grain;
  box: Box;
  /** The box without cut cells, and the pinned cell within it. */
  whole: Box;
  ring: Box | null;
}

/** An axis of a pane; `across`: that of the keys. */
interface Axis {
  across: boolean;
  side: Side;
  first: number;
  from: number;
  to: number;
  origin: number;
  length: number;
}
/** An axis with its place in the pane. */
interface PlacedAxis extends Axis {
  toPixel(index: number): number;
  low: number;
  high: number;
  scale: number;
  band: number;
  look: Look;
}
/** What colours depend on. */
type PaletteState = Pick<State, "palette" | "dark">;
type RangeState = Pick<State, "colour" | "low" | "high" | "entry" | "variant"> & { info?: Pick<Info, "entries" | "units"> | null };
/** With what tiles are painted. */
interface TilePaint {
  tiles: Tiles;
  palette: Palette;
  budget: Budget;
}
/** Draw a tile, or a part of it, at its place: `span` is the cells along its side. */
type DrawTile = (surface: HTMLCanvasElement, y: number, x: number, span: number, sub?: { x: number; y: number; size: number } | null) => void;
/** Tiles that a frame lacked, and whether some are not final. */
interface Drawn {
  missing: number;
  pending: boolean;
}
interface FrameOptions {
  look: Look;
  palette: Palette;
  budget: Budget;
  state: Readonly<State>;
}
/** The theme of either page. */
interface ThemeStore {
  readonly state: Pick<State, "theme" | "dark">;
  set(patch: Partial<Pick<State, "theme" | "dark">>): void;
  on(keys: "theme", listener: (state: Pick<State, "theme">) => unknown): () => void;
}
/** Tokens of a chunk of a text, and of which character each is a part. */
interface Chunk {
  tokens: string[];
  joined: Map<number, JoinedToken>;
}
