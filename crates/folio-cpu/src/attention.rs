//! Which part of attention is computed by whom.
//!
//! Owns: cutting a step into work items, partial results, the order of merging. Must never: let that cut touch a bit.
//!
//! Layers with different windows attend to different chunks, and those with heads of other sizes have other tiles, so there is a plan for each
//! window and size.
//!
//! An item is a tile of query tokens of one sequence, times the query heads that share one KV head (so K and V are read
//! once for all of them), over a range of chunks. Positions are cut into absolute chunks of [`CHUNK`]; a chunk's result for a
//! row is a triple (maximum, sum, accumulator) that depends on that row and the chunk alone. Triples are merged in
//! ascending order of chunks, whether one worker computed them one after the other or many did and a second pass merges.
//! When there are too few items for the workers, they are cut by chunks.

use crate::attend::{Attend, CHUNK, Partial, Tile, Window};
use crate::simd::LANES;
use folio_model::backend::{Batch, Span};
use folio_model::program::{AttentionSpec, LatentSpec};

/// Rows (query tokens times query heads per KV head) that a tile may have, unless one token alone has more.
const TILE_ROWS: usize = 64;
/// Most memory for partial results of items cut by chunks, in f32 values. Without room items stay whole.
const PARTIAL_VALUES: usize = 16 << 20;
/// Items per worker below which long ones are cut.
const ITEMS_PER_WORKER: usize = 4;

/// Chunks `chunks` of one tile.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) tile: Tile,
    pub(crate) chunks: std::ops::Range<usize>,
    /// Where the partial of the tile's first chunk lies, and which chunk that is, if its chunks are spread over several items.
    pub(crate) partials: Option<(usize, usize)>,
}

/// The items of one step: the same for every layer with this window and heads of this shape.
#[derive(Debug)]
pub(crate) struct AttentionPlan {
    pub(crate) window: Window,
    pub(crate) shape: Shape,
    pub(crate) items: Vec<Item>,
    /// Tiles whose partials must be merged: all chunks, and the first partial.
    pub(crate) merges: Vec<Item>,
    /// f32 values used in the partial buffer.
    used: usize,
}

/// What the model and the machine fix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Values of a query and a key, and of those what a value is: less where keys are latents.
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) workers: usize,
    pub(crate) max_position: usize,
}

impl Shape {
    pub(crate) fn of(spec: &AttentionSpec, workers: usize, max_position: usize) -> Self {
        let &AttentionSpec { heads, kv_heads, head_dim, .. } = spec;
        Self { heads, kv_heads, key_dim: head_dim, value_dim: head_dim, workers, max_position }
    }

    /// All heads read one latent.
    pub(crate) fn of_latents(spec: &LatentSpec, workers: usize, max_position: usize) -> Self {
        let (key_dim, value_dim) = (spec.key_dim(), spec.rank);
        Self { heads: spec.heads, kv_heads: 1, key_dim, value_dim, workers, max_position }
    }

    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn tile_tokens(&self) -> usize {
        (TILE_ROWS / self.group()).max(1)
    }

    /// f32 values of one accumulator row.
    pub(crate) fn stride(&self) -> usize {
        self.value_dim.next_multiple_of(LANES)
    }

    /// Most rows of a tile.
    pub(crate) fn tile_rows(&self) -> usize {
        self.tile_tokens() * self.group()
    }

    /// f32 values of a worker's scratch: packed queries and two partials.
    pub(crate) fn scratch_values(&self) -> usize {
        let rows = self.tile_rows();
        self.query_values(rows) + 2 * self.partial_values(rows)
    }

    /// f32 values of the packed queries of `rows` rows, each padded to whole vectors.
    fn query_values(&self, rows: usize) -> usize {
        rows * self.key_dim.next_multiple_of(LANES)
    }

    /// f32 values of the triples of `rows` rows.
    pub(crate) fn partial_values(&self, rows: usize) -> usize {
        2 * rows.next_multiple_of(LANES) + rows * self.stride()
    }

    /// f32 values that the shared partial buffer needs at most.
    pub(crate) fn partial_limit(&self) -> usize {
        let tiles = ITEMS_PER_WORKER * self.workers;
        let chunks = self.max_position.div_ceil(CHUNK);
        tiles.saturating_mul(chunks).saturating_mul(self.partial_values(self.tile_rows())).min(PARTIAL_VALUES)
    }
}

impl AttentionPlan {
    /// With room for any batch of `max_rows` rows, so that planning allocates nothing.
    pub(crate) fn new(window: Window, shape: Shape, max_rows: usize) -> Self {
        let cut = ITEMS_PER_WORKER * shape.workers;
        let items = Vec::with_capacity(max_rows * shape.kv_heads + cut * (cut + 1));
        Self { window, shape, items, merges: Vec::with_capacity(cut), used: 0 }
    }

    /// Cuts the batch into items, longest sequences first.
    pub(crate) fn plan(&mut self, batch: &Batch) {
        let shape = self.shape;
        self.items.clear();
        self.merges.clear();
        self.used = 0;
        let tokens = shape.tile_tokens();
        let whole: usize =
            batch.spans.iter().map(|s| (s.rows as usize).div_ceil(tokens) * shape.kv_heads).sum();
        let wanted = ITEMS_PER_WORKER * shape.workers;
        let pieces = if shape.workers > 1 && whole < wanted && !whole.is_multiple_of(shape.workers) {
            wanted.div_ceil(whole)
        } else {
            1
        };
        for span in &batch.spans {
            self.plan_span(span, &shape, pieces);
        }
        self.items.sort_unstable_by_key(|item| {
            (std::cmp::Reverse(item.chunks.len()), item.tile.first_row, item.tile.kv_head, item.chunks.start)
        });
    }

    fn plan_span(&mut self, span: &Span, shape: &Shape, pieces: usize) {
        let mut first = 0;
        while first < span.rows as usize {
            let tokens = shape.tile_tokens().min(span.rows as usize - first);
            for kv_head in 0..shape.kv_heads {
                let tile = Tile {
                    first_row: span.first_row as usize + first,
                    tokens,
                    first_position: span.first_position as usize + first,
                    slot: span.slot,
                    kv_head,
                };
                self.plan_tile(tile, shape, pieces);
            }
            first += tokens;
        }
    }

    fn plan_tile(&mut self, tile: Tile, shape: &Shape, pieces: usize) {
        let first = self.window.first(tile.first_position) / CHUNK;
        let end = (tile.first_position + tile.tokens).div_ceil(CHUNK);
        let chunks = end - first;
        let pieces = pieces.min(chunks);
        let values = chunks * shape.partial_values(tile.tokens * shape.group());
        if pieces == 1 || self.used + values > shape.partial_limit() {
            self.items.push(Item { tile, chunks: first..end, partials: None });
            return;
        }
        let partials = Some((self.used, first));
        self.used += values;
        for piece in 0..pieces {
            let range = first + chunks * piece / pieces..first + chunks * (piece + 1) / pieces;
            self.items.push(Item { tile: tile.clone(), chunks: range, partials });
        }
        self.merges.push(Item { tile, chunks: first..end, partials });
    }
}

impl Attend<'_> {
    /// Computes one item with a worker's own scratch of [`Shape::scratch_values`].
    ///
    /// # Safety
    /// The contract of [`Attend`]; nobody else computes this item or touches `scratch`.
    pub(crate) unsafe fn item(&self, item: &Item, scratch: *mut f32) {
        let rows = item.tile.tokens * self.shape.group();
        let queries = self.shape.query_values(self.shape.tile_rows());
        let whole = self.partial(scratch.wrapping_add(queries), rows);
        let values = self.shape.partial_values(self.shape.tile_rows());
        let chunk_result = self.partial(scratch.wrapping_add(queries + values), rows);
        // SAFETY: the contract of this function; the scratch holds the queries and two partials; partials of an item are
        // inside the shared buffer by `plan_tile`, and this item owns those of its chunks.
        unsafe {
            self.pack_queries(&item.tile, scratch);
            for chunk in item.chunks.clone() {
                match item.partials {
                    Some(first) => {
                        self.chunk(&item.tile, scratch, chunk, self.shared_partial(first, chunk, rows))
                    }
                    None if chunk == item.chunks.start => self.chunk(&item.tile, scratch, chunk, whole),
                    None => {
                        self.chunk(&item.tile, scratch, chunk, chunk_result);
                        self.merge(&item.tile, chunk, whole, chunk_result);
                    }
                }
            }
            if item.partials.is_none() {
                self.write(&item.tile, whole);
            }
        }
    }

    /// Merges the partials of a tile whose chunks were spread over items, in ascending order.
    ///
    /// # Safety
    /// All items of the tile are done, with a barrier since; nobody else merges this tile.
    pub(crate) unsafe fn merge_tile(&self, item: &Item) {
        let Some(first) = item.partials else { return };
        let rows = item.tile.tokens * self.shape.group();
        let whole = self.shared_partial(first, item.chunks.start, rows);
        // SAFETY: the contract of this function.
        unsafe {
            for chunk in item.chunks.clone().skip(1) {
                self.merge(&item.tile, chunk, whole, self.shared_partial(first, chunk, rows));
            }
            self.write(&item.tile, whole);
        }
    }

    fn shared_partial(&self, (at, first): (usize, usize), chunk: usize, rows: usize) -> Partial {
        let at = at + (chunk - first) * self.shape.partial_values(rows);
        self.partial(self.partials.wrapping_add(at), rows)
    }

    fn partial(&self, start: *mut f32, rows: usize) -> Partial {
        let padded = rows.next_multiple_of(LANES);
        Partial { max: start, sum: start.wrapping_add(padded), acc: start.wrapping_add(2 * padded) }
    }
}
