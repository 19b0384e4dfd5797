//! A batch as the device reads it: one run of words, sent in one copy.
//!
//! Owns: the layout that [`word`] names. Must never: reach a device, or depend on anything but the batch.
//!
//! Counts and offsets are in the header, so that a kernel that was captured in a graph serves every batch its grid is large enough for.
//! Offsets are in words from the start.

use folio_model::backend::Batch;

use crate::attention::CHUNK;
use crate::planes::word;

/// Words of a step, and what its launches need to know to size their grids. Reused between steps.
#[derive(Debug, Default)]
pub struct StepWords {
    words: Vec<u32>,
    bounds: Bounds,
}

/// What grids must cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    pub rows: u32,
    pub logit_rows: u32,
    pub hidden_rows: u32,
    /// Query tiles of attention.
    pub tiles: u32,
    /// Chunks of the longest sequence.
    pub chunks: u32,
    /// Every span is one row.
    pub single: bool,
    /// Every span is one row whose logits are wanted, and nothing else is: what graphs are made for.
    pub decode: bool,
}

impl StepWords {
    /// Puts a batch that was checked into words. `groups` cache groups of blocks of `block_tokens` tokens.
    pub fn fill(&mut self, batch: &Batch, groups: usize, block_tokens: usize) {
        let (rows, spans) = (batch.tokens.len(), batch.spans.len());
        let words = &mut self.words;
        words.clear();
        words.resize(word::HEADER, 0);
        let mut header = [0u32; word::HEADER];
        let mut put = |at: u32, value: usize| header[at as usize] = value as u32;
        put(word::ROWS, rows);
        put(word::SPANS, spans);
        put(word::LOGIT_ROWS, batch.logit_rows.len());
        put(word::HIDDEN_ROWS, batch.hidden_rows.len());
        put(word::GROUPS, groups);

        put(word::AT_TOKENS, words.len());
        words.extend_from_slice(&batch.tokens);
        put(word::AT_POSITIONS, words.len());
        for span in &batch.spans {
            words.extend(span.first_position..span.first_position + span.rows);
        }
        put(word::AT_ROW_SPAN, words.len());
        for (index, span) in batch.spans.iter().enumerate() {
            words.extend((0..span.rows).map(|_| index as u32));
        }
        put(word::AT_LOGIT_ROWS, words.len());
        words.extend_from_slice(&batch.logit_rows);
        put(word::AT_HIDDEN_ROWS, words.len());
        words.extend_from_slice(&batch.hidden_rows);
        put(word::AT_SLOTS, words.len());
        for group in 0..groups {
            for span in &batch.spans {
                let table = &batch.blocks[span.table(group)];
                words.extend((span.first_position..span.first_position + span.rows).map(|position| {
                    let (block, slot) = (position as usize / block_tokens, position as usize % block_tokens);
                    table[block].wrapping_mul(block_tokens as u32).wrapping_add(slot as u32)
                }));
            }
        }
        put(word::AT_TILES, words.len());
        let before = words.len();
        for (index, span) in batch.spans.iter().enumerate() {
            let mut first = 0;
            while first < span.rows {
                let tokens = word::TILE_TOKENS.min(span.rows - first);
                words.extend([index as u32, first, tokens, 0]);
                first += tokens;
            }
        }
        let tiles = (words.len() - before) / word::TILE;
        put(word::TILES, tiles);
        put(word::AT_SPANS, words.len());
        let blocks = words.len() + spans * word::SPAN;
        for span in &batch.spans {
            let at = blocks as u32 + span.blocks_start;
            words.extend([span.first_row, span.rows, span.first_position, at, span.blocks_len, 0, 0, 0]);
        }
        words.extend_from_slice(&batch.blocks);
        words[..word::HEADER].copy_from_slice(&header);

        let ends = batch.spans.iter().map(|span| span.first_position + span.rows);
        self.bounds = Bounds {
            rows: rows as u32,
            logit_rows: batch.logit_rows.len() as u32,
            hidden_rows: batch.hidden_rows.len() as u32,
            tiles: tiles as u32,
            chunks: ends.max().unwrap_or(0).div_ceil(CHUNK),
            single: rows == spans,
            decode: rows == spans && batch.logit_rows.len() == rows && batch.hidden_rows.is_empty(),
        };
    }

    pub fn words(&self) -> &[u32] {
        &self.words
    }

    pub fn bounds(&self) -> Bounds {
        self.bounds
    }
}

#[cfg(test)]
mod tests {
    use folio_model::backend::{HOLE, Span};

    use super::*;

    fn span(first_row: u32, rows: u32, first_position: u32, blocks_start: u32, blocks_len: u32) -> Span {
        Span { first_row, rows, first_position, blocks_start, blocks_len }
    }

    /// Two groups of blocks of 8: a prompt's part of 20 rows from position 4, and a row at position 300 whose second group has a hole.
    fn batch() -> Batch {
        let mut blocks = vec![5, 6, 7, 15, 16, 17];
        blocks.extend(0..38);
        blocks.extend([HOLE; 37].into_iter().chain([99]));
        Batch {
            tokens: (100..121).collect(),
            spans: vec![span(0, 20, 4, 0, 3), span(20, 1, 300, 6, 38)],
            blocks,
            logit_rows: vec![19, 20],
            hidden_rows: vec![3],
            ..Batch::default()
        }
    }

    fn at(words: &[u32], what: u32) -> usize {
        words[what as usize] as usize
    }

    #[test]
    fn every_row_finds_its_token_its_position_and_its_slots() {
        let (mut step, batch) = (StepWords::default(), batch());
        step.fill(&batch, 2, 8);
        let words = step.words();
        let rows = words[word::ROWS as usize] as usize;
        assert_eq!((rows, words[word::SPANS as usize]), (21, 2));
        for row in 0..rows {
            let span = words[at(words, word::AT_ROW_SPAN) + row] as usize;
            let record = &words[at(words, word::AT_SPANS) + span * word::SPAN..][..word::SPAN];
            let position = words[at(words, word::AT_POSITIONS) + row];
            assert_eq!(words[at(words, word::AT_TOKENS) + row], batch.tokens[row]);
            assert_eq!(position, record[2] + row as u32 - record[0]);
            for group in 0..2 {
                let slot = words[at(words, word::AT_SLOTS) + group * rows + row];
                let table = record[3] as usize + group * record[4] as usize;
                let block = words[table + position as usize / 8];
                assert_eq!(block, batch.blocks[batch.spans[span].table(group)][position as usize / 8]);
                assert_eq!(slot, block * 8 + position % 8, "row {row}, group {group}");
            }
        }
        assert_eq!(words[at(words, word::AT_LOGIT_ROWS)..][..2], [19, 20]);
        assert_eq!(words[at(words, word::AT_HIDDEN_ROWS)], 3);
    }

    #[test]
    fn tiles_cover_the_tokens_of_each_span_once() {
        let mut step = StepWords::default();
        step.fill(&batch(), 2, 8);
        let words = step.words();
        let tiles = words[word::TILES as usize] as usize;
        let tiles: Vec<&[u32]> =
            words[at(words, word::AT_TILES)..][..tiles * word::TILE].chunks(word::TILE).collect();
        assert_eq!(tiles, [&[0, 0, 16, 0][..], &[0, 16, 4, 0], &[1, 0, 1, 0]]);
    }

    #[test]
    fn bounds_say_how_far_grids_reach() {
        let mut step = StepWords::default();
        step.fill(&batch(), 2, 8);
        let want = Bounds {
            rows: 21,
            logit_rows: 2,
            hidden_rows: 1,
            tiles: 3,
            chunks: 2,
            single: false,
            decode: false,
        };
        assert_eq!(step.bounds(), want);
        let decode = Batch {
            tokens: vec![1, 2],
            spans: vec![span(0, 1, 255, 0, 32), span(1, 1, 0, 32, 1)],
            blocks: (0..33).collect(),
            logit_rows: vec![0, 1],
            ..Batch::default()
        };
        step.fill(&decode, 1, 8);
        let want = Bounds {
            rows: 2,
            logit_rows: 2,
            hidden_rows: 0,
            tiles: 2,
            chunks: 1,
            single: true,
            decode: true,
        };
        assert_eq!(step.bounds(), want);
        step.fill(&Batch::default(), 1, 8);
        assert_eq!(step.bounds(), Bounds { single: true, decode: true, ..Bounds::default() });
    }
}
