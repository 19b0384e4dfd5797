//! A batch as the device reads it: one run of words, sent in one copy.
//!
//! Owns: the layout that [`word`] names. Must never: reach a device, or depend on anything but the batch and
//! the block tables that it changed.
//!
//! Counts and offsets are in the header, so that a kernel that was captured in a graph serves every batch its grid is large enough for.
//! Offsets are in words from the start.

use folio_model::backend::Batch;
use folio_model::tables::BlockTables;

use crate::attention::CHUNK;
use crate::driver::DevicePtr;
use crate::planes::word;
use crate::tables::DeviceTables;

/// Words of a step, and what its launches need to know to size their grids. Reused between steps.
#[derive(Debug, Default)]
pub struct StepWords {
    words: Vec<u32>,
    bounds: Bounds,
    edits: u32,
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
    /// Tokens of a tile.
    pub tile_tokens: u32,
    /// Every span is a token, with drafts behind it or not, whose logits are wanted, and nothing else is: what graphs are made for.
    pub decode: bool,
}

/// Block tables of which a step says what changed.
pub struct KeptTables<'a> {
    pub host: &'a BlockTables,
    pub device: &'a DeviceTables,
    /// The device has nothing of them.
    pub all: bool,
    /// Tokens of a block of each group.
    pub block_tokens: &'a [u32],
}

/// Rows of a span, at most, that are a token and drafts.
const DECODE_ROWS: u32 = 32;

impl KeptTables<'_> {
    /// Records of the edits of a batch, and their entries.
    fn put_edits(&self, words: &mut Vec<u32>, batch: &Batch) -> usize {
        let blocks = (words.len() + word::EDIT * batch.edits.len()) as u32;
        for edit in &batch.edits {
            let [low, high] = halves(self.device.entry(edit.slot, edit.group, edit.start));
            words.extend([low, high, blocks + edit.blocks_start, edit.blocks_len]);
        }
        words.extend_from_slice(&batch.blocks);
        batch.edits.len()
    }

    /// The same of every table.
    fn put_all(&self, words: &mut Vec<u32>) -> usize {
        let groups = self.block_tokens.len() as u32;
        let places = (0..self.host.slots()).flat_map(|slot| (0..groups).map(move |group| (slot, group)));
        let tables = places.map(|(slot, group)| (slot, group, self.host.table(slot, group as usize)));
        let edits = tables.clone().count();
        let mut from = (words.len() + word::EDIT * edits) as u32;
        for (slot, group, table) in tables.clone() {
            let [low, high] = halves(self.device.entry(slot, group, 0));
            words.extend([low, high, from, table.len() as u32]);
            from += table.len() as u32;
        }
        tables.for_each(|(_, _, table)| words.extend_from_slice(table));
        edits
    }
}

fn halves(at: DevicePtr) -> [u32; 2] {
    [at.0 as u32, (at.0 >> 32) as u32]
}

impl StepWords {
    /// Puts a batch that was checked into words, with what it changed of `tables`; or with all that they hold. `narrow`: tokens of a
    /// tile that one warp computes.
    pub fn fill(&mut self, batch: &Batch, tables: &KeptTables<'_>, narrow: u32) {
        let (rows, spans) = (batch.tokens.len(), batch.spans.len());
        let decode = batch.logit_rows.len() == rows
            && batch.hidden_rows.is_empty()
            && batch.spans.iter().all(|span| span.rows <= DECODE_ROWS);
        let tile_tokens = match decode {
            _ if rows == spans => 1,
            true => narrow,
            false => word::TILE_TOKENS,
        };
        let words = &mut self.words;
        words.clear();
        words.resize(word::HEADER, 0);
        let mut header = [0u32; word::HEADER];
        let mut put = |at: u32, value: usize| header[at as usize] = value as u32;
        put(word::ROWS, rows);
        put(word::SPANS, spans);
        put(word::LOGIT_ROWS, batch.logit_rows.len());
        put(word::HIDDEN_ROWS, batch.hidden_rows.len());
        put(word::GROUPS, tables.block_tokens.len());

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
        put(word::AT_FEATURES, words.len());
        words.extend(batch.features.iter().map(|value| value.to_bits()));
        put(word::AT_SLOTS, words.len());
        for (group, &block_tokens) in tables.block_tokens.iter().enumerate() {
            for span in &batch.spans {
                let table = tables.host.table(span.slot, group);
                words.extend((span.first_position..span.first_position + span.rows).map(|position| {
                    let block = table[(position / block_tokens) as usize];
                    block.wrapping_mul(block_tokens).wrapping_add(position % block_tokens)
                }));
            }
        }
        put(word::AT_TILES, words.len());
        let before = words.len();
        for (index, span) in batch.spans.iter().enumerate() {
            let mut first = 0;
            while first < span.rows {
                let tokens = tile_tokens.min(span.rows - first);
                words.extend([index as u32, first, tokens, 0]);
                first += tokens;
            }
        }
        let tiles = (words.len() - before) / word::TILE;
        put(word::TILES, tiles);
        put(word::AT_SPANS, words.len());
        for span in &batch.spans {
            let [low, high] = halves(tables.device.slot(span.slot));
            words.extend([span.first_row, span.rows, span.first_position, low, high, 0, 0, 0]);
        }
        put(word::AT_EDITS, words.len());
        let edits = if tables.all { tables.put_all(words) } else { tables.put_edits(words, batch) };
        put(word::EDITS, edits);
        self.edits = edits as u32;
        words[..word::HEADER].copy_from_slice(&header);

        let ends = batch.spans.iter().map(|span| span.first_position + span.rows);
        self.bounds = Bounds {
            rows: rows as u32,
            logit_rows: batch.logit_rows.len() as u32,
            hidden_rows: batch.hidden_rows.len() as u32,
            tiles: tiles as u32,
            chunks: ends.max().unwrap_or(0).div_ceil(CHUNK),
            tile_tokens,
            decode,
        };
    }

    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Changes of block tables, which are made before anything else.
    pub fn edits(&self) -> u32 {
        self.edits
    }

    pub fn bounds(&self) -> Bounds {
        self.bounds
    }
}

#[cfg(test)]
mod tests {
    use folio_model::backend::{HOLE, Span};
    use folio_model::check::PoolSize;

    use super::*;

    fn span(first_row: u32, rows: u32, first_position: u32, slot: u32) -> Span {
        Span { first_row, rows, first_position, slot, tentative_from: u32::MAX }
    }

    /// Two groups, of blocks of 8 and of 16 tokens, and a device whose tables begin at an address of more than 32 bits.
    struct Kept {
        host: BlockTables,
        device: DeviceTables,
    }

    const SMALL: PoolSize = PoolSize { blocks: 100, block_tokens: 8, is_state: false };
    const NARROW: u32 = 4;
    const POOLS: [PoolSize; 2] = [SMALL, PoolSize { block_tokens: 16, ..SMALL }];

    impl Kept {
        fn of(batch: &Batch) -> Self {
            let mut host = BlockTables::new(&POOLS, 400);
            host.apply(batch, &POOLS).unwrap();
            let device = DeviceTables::at(DevicePtr(0x7_0000_0100), host.longest());
            Self { host, device }
        }

        fn fill(&self, batch: &Batch, all: bool) -> StepWords {
            let mut step = StepWords::default();
            step.fill(
                batch,
                &KeptTables { host: &self.host, device: &self.device, all, block_tokens: &[8, 16] },
                NARROW,
            );
            step
        }
    }

    /// Records of edits: address, entries.
    fn edits(words: &[u32]) -> Vec<(u64, Vec<u32>)> {
        let records =
            &words[at(words, word::AT_EDITS)..][..words[word::EDITS as usize] as usize * word::EDIT];
        let entries = |from: u32, count: u32| words[from as usize..][..count as usize].to_vec();
        let record =
            |edit: &[u32]| (u64::from(edit[1]) << 32 | u64::from(edit[0]), entries(edit[2], edit[3]));
        records.chunks(word::EDIT).map(record).collect()
    }

    /// A prompt's part of 20 rows from position 4, and a row at position 300 whose second group has holes.
    fn batch() -> Batch {
        let mut batch = Batch {
            tokens: (100..121).collect(),
            spans: vec![span(0, 20, 4, 0), span(20, 1, 300, 2)],
            logit_rows: vec![19, 20],
            hidden_rows: vec![3],
            features: (0..42).map(|value| value as f32 / 4.0).collect(),
            ..Batch::default()
        };
        batch.edit_table(0, 0, 0, [5, 6, 7]);
        batch.edit_table(0, 1, 0, [15, 16]);
        batch.edit_table(2, 0, 0, 0..38);
        batch.edit_table(2, 1, 0, [HOLE; 18].into_iter().chain([99]));
        batch
    }

    fn at(words: &[u32], what: u32) -> usize {
        words[what as usize] as usize
    }

    #[test]
    fn every_row_finds_its_token_its_position_and_its_slots() {
        let batch = batch();
        let kept = Kept::of(&batch);
        let step = kept.fill(&batch, false);
        let words = step.words();
        let rows = words[word::ROWS as usize] as usize;
        assert_eq!((rows, words[word::SPANS as usize]), (21, 2));
        for row in 0..rows {
            let span = words[at(words, word::AT_ROW_SPAN) + row] as usize;
            let record = &words[at(words, word::AT_SPANS) + span * word::SPAN..][..word::SPAN];
            let position = words[at(words, word::AT_POSITIONS) + row];
            assert_eq!(words[at(words, word::AT_TOKENS) + row], batch.tokens[row]);
            assert_eq!(position, record[2] + row as u32 - record[0]);
            let slot = batch.spans[span].slot;
            assert_eq!(u64::from(record[4]) << 32 | u64::from(record[3]), kept.device.slot(slot).0);
            for (group, tokens) in [(0, 8), (1, 16)] {
                let block = kept.host.table(slot, group)[(position / tokens) as usize];
                let place = words[at(words, word::AT_SLOTS) + group * rows + row];
                assert_eq!(place, block * tokens + position % tokens, "row {row}, group {group}");
            }
        }
        assert_eq!(words[at(words, word::AT_LOGIT_ROWS)..][..2], [19, 20]);
        assert_eq!(words[at(words, word::AT_HIDDEN_ROWS)], 3);
        let features = words[at(words, word::AT_FEATURES)..][..42].iter().map(|word| f32::from_bits(*word));
        assert!(features.eq(batch.features.iter().copied()));
    }

    #[test]
    fn a_step_says_what_changed_in_block_tables_or_all_of_them() {
        let batch = batch();
        let kept = Kept::of(&batch);
        let place = |slot, group, entry| kept.device.entry(slot, group, entry).0;
        // 50 entries of blocks of 8, 25 of blocks of 16.
        assert_eq!(place(2, 1, 3), 0x7_0000_0100 + 4 * (2 * 75 + 50 + 3));
        let mut change = Batch::default();
        change.edit_table(2, 0, 37, [1]);
        change.edit_table(0, 1, 1, [17, 18]);
        let step = kept.fill(&change, false);
        assert_eq!(edits(step.words()), [(place(2, 0, 37), vec![1]), (place(0, 1, 1), vec![17, 18])]);
        assert_eq!(step.edits(), 2);
        let step = kept.fill(&change, true);
        let tables = (0..3).flat_map(|slot| [0, 1].map(|group| (slot, group)));
        let all = tables
            .map(|(slot, group)| (place(slot, group, 0), kept.host.table(slot, group as usize).to_vec()));
        assert_eq!(edits(step.words()), all.collect::<Vec<_>>());
        assert_eq!(kept.fill(&Batch::default(), false).edits(), 0);
    }

    #[test]
    fn tiles_cover_the_tokens_of_each_span_once() {
        let step = Kept::of(&batch()).fill(&batch(), false);
        let words = step.words();
        let tiles = words[word::TILES as usize] as usize;
        let tiles: Vec<&[u32]> =
            words[at(words, word::AT_TILES)..][..tiles * word::TILE].chunks(word::TILE).collect();
        assert_eq!(tiles, [&[0, 0, 16, 0][..], &[0, 16, 4, 0], &[1, 0, 1, 0]]);
    }

    #[test]
    fn bounds_say_how_far_grids_reach() {
        let step = Kept::of(&batch()).fill(&batch(), false);
        let want = Bounds {
            rows: 21,
            logit_rows: 2,
            hidden_rows: 1,
            tiles: 3,
            chunks: 2,
            tile_tokens: word::TILE_TOKENS,
            decode: false,
        };
        assert_eq!(step.bounds(), want);
        let mut decode = Batch {
            tokens: vec![1, 2],
            spans: vec![span(0, 1, 255, 0), span(1, 1, 0, 1)],
            logit_rows: vec![0, 1],
            ..Batch::default()
        };
        for group in [0, 1] {
            decode.edit_table(0, group, 0, 0..19);
            decode.edit_table(1, group, 0, [40]);
        }
        decode.edit_table(0, 0, 19, 0..13);
        let step = Kept::of(&decode).fill(&decode, false);
        let want = Bounds {
            rows: 2,
            logit_rows: 2,
            hidden_rows: 0,
            tiles: 2,
            chunks: 1,
            tile_tokens: 1,
            decode: true,
        };
        assert_eq!(step.bounds(), want);
        let step = Kept::of(&decode).fill(&Batch::default(), false);
        assert_eq!(step.bounds(), Bounds { tile_tokens: 1, decode: true, ..Bounds::default() });
    }

    #[test]
    fn drafts_are_in_tiles_of_one_warp() {
        let mut batch = Batch {
            tokens: (0..7).collect(),
            spans: vec![span(0, 6, 250, 0), span(6, 1, 3, 1)],
            logit_rows: (0..7).collect(),
            ..Batch::default()
        };
        for (slot, group, blocks) in [(0, 0, 32), (0, 1, 16), (1, 0, 1), (1, 1, 1)] {
            batch.edit_table(slot, group, 0, 0..blocks);
        }
        let step = Kept::of(&batch).fill(&batch, false);
        let words = step.words();
        let tiles: Vec<&[u32]> =
            words[at(words, word::AT_TILES)..][..3 * word::TILE].chunks(word::TILE).collect();
        assert_eq!(tiles, [&[0, 0, NARROW, 0][..], &[0, NARROW, 2, 0], &[1, 0, 1, 0]]);
        let want = Bounds {
            rows: 7,
            logit_rows: 7,
            tiles: 3,
            chunks: 1,
            tile_tokens: NARROW,
            decode: true,
            ..Bounds::default()
        };
        assert_eq!(step.bounds(), want);
        // The end of a prompt, of which only the last row's logits are wanted.
        batch.logit_rows = vec![5, 6];
        let bounds = Kept::of(&batch).fill(&batch, false).bounds();
        assert_eq!((bounds.tile_tokens, bounds.decode), (word::TILE_TOKENS, false));
    }
}
