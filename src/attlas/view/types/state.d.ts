// The state of the page. data/state.js says of each field what it is for.

/** A head of an entry by its index in `entry.heads`, or the mean of all. */
type HeadIndex = number | "mean";
/** A head of a page, its entry by its index in `info.entries`. */
interface HeadPlace {
  entry: number;
  head: HeadIndex;
}
type Pool = "mean" | "max";
type Variant = "plain" | "nosink" | "value" | "output";
type Compare = "none" | "side" | "triangle" | "ratio" | "difference" | "colours";
type Scale = "log" | "linear";
type Side = "query" | "key";
type Switch = "on" | "off";
type Heat = "statistic" | "pair" | "agree";
type Theme = "auto" | "light" | "dark";
type Language = "en" | "zh";
type Aside = "both" | "heads" | "text" | "none" | "grid";

/** A row and a column of a matrix. */
interface Cell {
  i: number;
  j: number;
}
/** Positions of a text, from `start` to `stop` - 1. */
interface Span {
  start: number;
  stop: number;
}
/** Cells along a side of the block of a pixel; whether single cells are drawn within frames. */
interface Grain {
  side: number;
  framed: boolean;
}
/** How far a pass over a matrix is. */
interface Progress extends HeadPlace {
  fraction: number;
  secondsLeft: number;
}
/** First and last + 1 token of a match, and whether it is of the text of the queries or of the keys. */
type Match = [start: number, stop: number, side: Side];
/** What the heads say of the pinned cell, by "entry:head". */
type Pairs = Record<string, { pair: number | null; agree: number | null }>;

/** The fields of the page that belong to a link. */
interface View extends HeadPlace {
  text: number | null;
  batch: number;
  pool: Pool;
  variant: Variant;
  second: HeadPlace | null;
  compare: Compare;
  more: string;
  view: "map" | "lines";
  row: number | null;
  column: number | null;
  zoom: number | null;
  colour: Scale;
  low: number | null;
  high: number | null;
  ratio: number;
  difference: number;
  palette: string;
  language: Language | null;
  theme: Theme;
  pin: Cell | null;
  span: Span | null;
  heat: Heat;
  by: Side;
  ink: Scale;
  sort: string;
  filter: string;
  panel: string;
  tour: number | null;
  story: number | null;
  aside: Aside;
  off: string;
  outline: Switch;
  minimap: Switch;
}
/** The state of a page once it knows what there is to see. */
interface State extends View {
  hover: Cell | null;
  reading: number | null;
  pointed: Cell | null;
  grain: Grain;
  info: Info;
  progress: Progress | null;
  heads: HeadTable | null;
  step: number;
  flight: FlightMode;
  statistic: string | null;
  pairs: Pairs | null;
  dark: boolean;
  searchResult?: { matches: Match[]; index: number } | null;
}
/** The place of the map, once it has been fitted. */
interface Place {
  row: number;
  column: number;
  zoom: number;
}

/** One frozen state of fields S; see `createStore`. */
interface Store<S = State> {
  readonly state: Readonly<S>;
  set(patch: Partial<S>): void;
  on(keys: keyof S | (keyof S)[] | null, listener: (state: Readonly<S>, changed: (keyof S)[]) => unknown): () => void;
}
/** How a field stands in a link. */
interface Codec<T> {
  write(value: T): string;
  read(text: string): T | undefined;
}
/** The fields of a state that belong to a link: the name there, and how the value is written. */
type Fields<V> = { [F in keyof V]: [name: string, codec: Codec<NonNullable<V[F]>>] };

/** What a window gives to the link: a stand-in in tests. */
type LinkWindow = Pick<Window, "location" | "history" | "addEventListener" | "removeEventListener">;
