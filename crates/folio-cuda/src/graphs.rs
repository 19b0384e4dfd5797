//! Which captured graph serves a step.
//!
//! Owns: the buckets and what was captured for them. Must never: launch.
//!
//! A step of decoding alone is run from a graph whose grids cover a bucket of rows and of chunks; kernels read the true counts on the
//! device and what lies beyond returns at once. A bucket's first step is launched kernel by kernel, which loads what was not loaded yet and
//! may not be while a graph is captured; the second captures. So a server that never sees 200 sequences never pays for a graph of 256.

use std::collections::{HashMap, HashSet};

use crate::driver::GraphId;
use crate::step::Bounds;

/// What a graph's grids cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    pub rows: u32,
    pub chunks: u32,
    /// Tokens of a tile of attention.
    pub tile_tokens: u32,
}

impl Bucket {
    /// Least bucket for `bounds`: 1, 2, 4, 8, then multiples of 8 rows to 64, of 16 to 128, of 32 beyond; chunks in powers of two. `None`
    /// where the step is no mere decoding (with drafts or without), or wants more rows than graphs are made for.
    pub fn of(bounds: &Bounds, max_rows: u32) -> Option<Self> {
        if !bounds.decode || bounds.rows == 0 {
            return None;
        }
        let rows = match bounds.rows {
            rows @ 1..=8 => rows.next_power_of_two(),
            rows @ 9..=64 => rows.next_multiple_of(8),
            rows @ 65..=128 => rows.next_multiple_of(16),
            rows => rows.next_multiple_of(32),
        };
        let chunks = bounds.chunks.max(1).next_power_of_two();
        let bucket = Self { rows: rows.min(max_rows), chunks, tile_tokens: bounds.tile_tokens };
        (bounds.rows <= max_rows).then_some(bucket)
    }

    /// The bounds that a graph of this bucket is captured with.
    pub fn bounds(&self) -> Bounds {
        Bounds {
            rows: self.rows,
            logit_rows: self.rows,
            hidden_rows: 0,
            tiles: self.rows,
            chunks: self.chunks,
            tile_tokens: self.tile_tokens,
            decode: true,
        }
    }
}

/// Graphs that exist.
#[derive(Debug, Default)]
pub struct Graphs {
    by_bucket: HashMap<Bucket, GraphId>,
    /// Buckets that had a step.
    seen: HashSet<Bucket>,
}

impl Graphs {
    pub fn get(&self, bucket: &Bucket) -> Option<GraphId> {
        self.by_bucket.get(bucket).copied()
    }

    /// Notes a step of this bucket. Whether it is the first.
    pub fn is_first(&mut self, bucket: Bucket) -> bool {
        self.seen.insert(bucket)
    }

    pub fn insert(&mut self, bucket: Bucket, graph: GraphId) {
        self.by_bucket.insert(bucket, graph);
    }

    /// Forgets all: an address that they were captured with is no longer true.
    pub fn clear(&mut self) {
        self.by_bucket.clear();
    }

    pub fn count(&self) -> usize {
        self.by_bucket.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(rows: u32, chunks: u32) -> Option<(u32, u32)> {
        let bounds = Bounds { rows, chunks, decode: true, ..Bounds::default() };
        Bucket::of(&bounds, 256).map(|bucket| (bucket.rows, bucket.chunks))
    }

    #[test]
    fn every_decode_step_has_a_bucket_that_covers_it_tightly() {
        for rows in 1..=256 {
            for chunks in 0..70 {
                let (covered, depth) = bucket(rows, chunks).expect("a bucket");
                assert!(covered >= rows && depth >= chunks.max(1));
                assert!(covered <= 256 && covered - rows < rows.clamp(8, 32), "{rows} rows in {covered}");
                assert_eq!(bucket(covered, depth), Some((covered, depth)), "a bucket covers itself");
            }
        }
        let rows: std::collections::BTreeSet<_> = (1..=256).filter_map(|rows| bucket(rows, 1)).collect();
        assert_eq!(rows.len(), 4 + 7 + 4 + 4);
    }

    #[test]
    fn other_steps_have_none() {
        assert_eq!(bucket(257, 1), None);
        assert_eq!(bucket(0, 0), None);
        assert_eq!(Bucket::of(&Bounds { rows: 3, chunks: 1, ..Bounds::default() }, 256), None);
        let few = Bounds { rows: 9, chunks: 1, decode: true, ..Bounds::default() };
        assert_eq!(Bucket::of(&few, 10).map(|bucket| bucket.rows), Some(10), "no more than can come");
    }
}
