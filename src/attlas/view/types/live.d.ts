// The page that opens what is dropped on it.

/** A tensor of a safetensors file. */
interface StoredTensor {
  dtype: string;
  shape: number[];
  bytes: ArrayBuffer;
}
/** Where a tensor of a recording stands; `own`: its sizes in the file, 1 where numbers repeat. */
interface TensorPlace {
  file: string;
  tensor: string;
  own: number[];
  shape: number[];
}
interface StoredMatrix {
  q: TensorPlace;
  k: TensorPlace;
  lse: TensorPlace;
  sink: TensorPlace | null;
  /** Without a scale it is one over the root of the width of a query. */
  score: { class: string; scale: number | null };
  mask: { class: string; offset?: number | null } | null;
  partial?: boolean;
  weighted?: boolean;
  /** What weights that are no softmax are. */
  weights?: string;
}
interface StoredEntry {
  layer: number;
  kind: string;
  call: number;
  name: string;
  heads: number[];
  queries: [first: number, stop: number];
  first_key: number;
  shape: [batch: number, heads: number, m: number, n: number];
  matrix: StoredMatrix | null;
}
/** atlas.json. */
interface StoredAtlas {
  format: string;
  version: number;
  sha256: string;
  model: string | null;
  tokens?: string[] | null;
  texts?: string[][] | null;
  spans?: Record<string, [start: number, stop: number]>;
  details?: Record<string, unknown>;
  entries: StoredEntry[];
}
/** Queries, keys and log-sum-exp of a head of one text. */
interface StoredHead {
  q: Float32Array | Float64Array;
  k: Float32Array | Float64Array;
  lse: Float32Array | Float64Array;
  m: number;
  n: number;
  width: number;
  scale: number;
  causal: boolean;
}
/** A folder that was dropped, chosen, or named by an address. */
interface OpenedFolder {
  name: string;
  read(file: string): Promise<ArrayBuffer>;
}
/** What a page can be given: a file of text, or a folder. */
type Opened = { name: string; text: string } | { folder: OpenedFolder };
/** What a page of a corpus holds. */
interface PackedCorpus {
  answers: Record<string, PackedPart>;
}
/** What the live page holds: another page's contents, or the address of what it opens at first. */
type LiveData = Partial<PackedData> & Partial<PackedCorpus> & { opens?: string; project?: string | null };
