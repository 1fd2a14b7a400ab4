// The page of a corpus: its state, and what it is answered.

interface CorpusHead {
  layer: number;
  head: number;
}
/** A number of each head. */
interface Measure extends Column {
  whole?: boolean;
  /** Whether its distribution over the texts is known. */
  spread?: boolean;
}
/** One number of each head; `kind` has names. */
interface CorpusRows {
  layer: number[];
  head: number[];
  kind?: string[];
  [measure: string]: (number | null)[] | string[] | undefined;
}
interface CorpusInfo {
  title: string;
  model: string;
  texts: number;
  tokens: number;
  intervals: number;
  /** Why no full map can be opened: a text and its values. */
  open: [text: string, ...values: TextValue[]] | null;
  counts: { layers: number; length: number; complete: boolean; failed: number };
  facts: { type: string; dtype: string; source: string; made: string; shown: string | null };
  kinds: [name: string, does: string][];
  measures: Measure[];
  rows: CorpusRows;
}
/** A corpus whose texts are in the language of the page. */
interface Corpus extends Omit<CorpusInfo, "open"> {
  open: string | null;
  summary: string;
  about: [title: string, text: string][];
}
interface OfflineFacts {
  texts: number;
  window: number;
  project: string | null;
}
/** What the server sends, and the same in the language of the page. */
interface CorporaInfo<C = CorpusInfo> {
  key: string;
  corpora: C[];
  initial: Partial<CorpusState>;
  offline?: OfflineFacts;
}
/** A distribution over texts: its box has the marks at 5, 25, 50, 75 and 95 %, its counts are of even bins. */
interface Distribution {
  texts: number;
  min: number;
  max: number;
  mean: number;
  box: [number, number, number, number, number];
  counts: number[];
}
type Bins = Pick<Distribution, "min" | "max" | "counts">;
/** What is known of a sampled text before its tokens are. */
interface SampleFacts {
  interval: number;
  text: number;
  name: string;
  start: number;
  length: number;
  largest: number;
  query: number;
  key: number;
  /** Of an offline page: how many of its tokens are here. */
  cut?: number;
}
/** The tokens of a text and its kept weights, query by query. */
interface SampleText {
  first: number;
  tokens: string[];
  others: Record<number, string>;
  counts: number[];
  keys: number[];
  weights: number[];
}
type TokenSide = "query" | "key" | "key_mass";
interface HeadAnswer {
  distributions: Record<string, Distribution>;
  distance: { edges: number[]; values: number[] };
  tokens: Partial<Record<TokenSide, [token: string, share: number][]>>;
  intervals: [low: number, high: number][] | null;
  samples: SampleFacts[];
}
interface CorpusQuestions {
  info: JsonAnswer<CorporaInfo>;
  head: JsonAnswer<HeadAnswer>;
  sample: JsonAnswer<SampleText>;
  open: JsonAnswer<{ path: string; model: string }>;
}

/** A rectangle in the numbers of the axes. */
interface Brush {
  corpus: number;
  x0: number;
  x1: number;
  y0: number;
  y1: number;
}
interface CorpusPlace {
  corpus: number;
  row: number;
}
/** The fields that belong to a link. */
interface CorpusView {
  x: string;
  y: string;
  size: string;
  colour: string;
  xlog: boolean;
  ylog: boolean;
  brush: Brush | null;
  find: string;
  sort: string;
  open: (CorpusHead | null)[] | null;
  measure: string;
  interval: number;
  theme: Theme;
  language: Language | null;
  panel: string;
}
interface CorpusState extends CorpusView {
  info: CorporaInfo<Corpus>;
  hover: CorpusPlace | null;
  dark: boolean;
}
/** What the parts of the page are given. */
interface CorpusContext {
  store: Store<CorpusState>;
  transport: Transport<CorpusQuestions>;
  root: HTMLElement;
  uid: MakeId;
  announce: Announce;
}
/** What the column of a head is given besides. */
interface HeadContext extends CorpusContext {
  openHead(corpus: number, head: CorpusHead): void;
  openMap(corpus: number, row: number, sample: SampleFacts): Promise<void>;
  answered(corpus: number, answer: HeadAnswer): void;
}
interface AxisScale {
  at(value: number): number;
  value(pixel: number): number;
  ticks(maxTicks: number): number[];
}
/** The colours of the heads of a corpus: of kinds, or of a measure over a domain. */
type Tints =
  | { fills: string[]; kinds: { name: string; fill: string }[] }
  | { fills: string[]; kinds?: undefined; domain: [low: number, high: number]; palette: (share: number) => string };
/** A head in the scatter. */
interface ScatterPoint extends Point {
  row: number;
  radius: number;
  fill: string;
}
interface Rectangle extends Point {
  width: number;
  height: number;
}
/** The last drawing of a scatter. */
interface ScatterScene {
  figure: SVGSVGElement;
  points: ScatterPoint[];
  xScale: AxisScale;
  yScale: AxisScale;
  overlay: SVGGElement;
  brushed: SVGGElement;
  circles: SVGCircleElement[];
  width: number;
  height: number;
  look: Look;
  margin: { left: number; right: number; top: number; bottom: number };
}
interface TableColumn {
  name: string;
  key: string;
  label: string;
  title: string;
  value(place: CorpusPlace): number | string | null;
}
/** Draw a figure of a size; null where its numbers are not known. */
type DrawFigure = (width: number, height: number, look: Look) => SVGSVGElement | null;
/** A token by its place in the window, and the weight. */
type WeightPair = [place: number, weight: number];
