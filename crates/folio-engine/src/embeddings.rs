//! Embeddings that a request gives in place of those of some of its prompt's tokens: what an image became, with nothing here that makes
//! them [vLLM: multimodal embeddings, merged over placeholder ranges].
//!
//! Owns: what a request may give, what identifies it, and which rows of a step it is for. Must never: copy a value, or know what it was
//! made of.
//!
//! The embeddings stay with their request to its end, so rows that are computed again (after a preemption, behind a hit that ends among
//! them) get the same.

use std::ops::Range;
use std::sync::Arc;

use folio_kv::ContentRange;
use folio_model::backend::{Axes, Batch, RowEmbeddings, RowPositions};
use folio_model::program::EmbeddingInput;

use crate::plan::SequencePlan;
use crate::request::Request;

/// Placeholder tokens of a prompt and what stands in their places.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingRange {
    /// Position of the first in the prompt, and how many there are.
    pub start: u32,
    pub len: u32,
    /// Hash of what the embeddings were made of and how [vLLM: `mm_hash`]. It stands for them in the identity of blocks: equal hashes are
    /// equal embeddings.
    pub content: [u8; 32],
    /// `[len, width]` as [`EmbeddingInput::width`] has it: what layers begin with, and what scales a table of embeddings does not scale.
    pub embeddings: Arc<[f32]>,
    /// Where the tokens stand for a model with M-RoPE; `None`: one behind the other, as text does.
    pub positions: Option<AxisPositions>,
}

impl EmbeddingRange {
    /// The position behind its last token.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    /// How far text behind it stands from its position in the prompt; `before`: text before it.
    fn shift_behind(&self, before: i32) -> i32 {
        let next = self.positions.as_ref().map(|positions| positions.next as i32 - self.end() as i32);
        next.unwrap_or(before)
    }
}

/// Positions of tokens on three axes, counted from the beginning of the prompt: time, height and width. Text behind them goes on with the
/// one behind the largest, on all three.
#[derive(Clone, Debug, PartialEq)]
pub struct AxisPositions {
    each: Arc<[[u32; 3]]>,
    next: u32,
}

impl AxisPositions {
    /// One of each token. O(tokens).
    pub fn new(each: Arc<[[u32; 3]]>) -> Self {
        let next = each.iter().flatten().max().map_or(0, |largest| largest.saturating_add(1));
        Self { each, next }
    }
}

/// What identifies them, beside the tokens. O(positions): not on the engine's thread.
pub(crate) fn identity(ranges: &[EmbeddingRange]) -> Arc<[ContentRange]> {
    let of = |range: &EmbeddingRange| {
        let positions = range.positions.as_ref().map(|positions| &*positions.each);
        ContentRange::new(range.start, range.len, range.content, positions)
    };
    ranges.iter().map(of).collect()
}

/// Whether these are of the prompt that was hashed.
pub(crate) fn are_hashed(ranges: &[EmbeddingRange], hashed: &[ContentRange]) -> bool {
    let same = |(range, hashed): (&EmbeddingRange, &ContentRange)| {
        (range.start, range.len) == (hashed.start, hashed.len)
    };
    ranges.len() == hashed.len() && ranges.iter().zip(hashed).all(same)
}

/// Tokens that take as much memory.
pub(crate) fn in_tokens(ranges: &[EmbeddingRange]) -> u64 {
    let of = |range: &EmbeddingRange| {
        let positions = range.positions.as_ref().map_or(0, |positions| 3 * positions.each.len());
        (range.embeddings.len() + positions) as u64
    };
    ranges.iter().map(of).sum()
}

/// How far text behind all of them stands from its position in the sequence.
pub(crate) fn shift_behind(ranges: &[EmbeddingRange]) -> i32 {
    ranges.iter().fold(0, |shift, range| range.shift_behind(shift))
}

/// Why a request may not give what it gives. `takes`: what the model takes on its device.
pub(crate) fn check(
    request: &Request,
    max_model_len: u32,
    takes: Option<EmbeddingInput>,
) -> Result<(), String> {
    let ranges = request.embeddings();
    if ranges.is_empty() {
        return Ok(());
    }
    let Some(EmbeddingInput { width, three_axes }) = takes else {
        return Err("are given, and the model takes none on its device".to_owned());
    };
    let prompt = request.prompt.len() as u64;
    let longest = prompt + u64::from(request.sampling.max_tokens);
    let mut next = 0;
    for (index, range) in ranges.iter().enumerate() {
        let EmbeddingRange { start, len, embeddings, positions, .. } = range;
        let (start, end) = (u64::from(*start), u64::from(*start) + u64::from(*len));
        if *len == 0 {
            return Err(format!("range {index} has no tokens"));
        }
        if start < next {
            return Err(format!("range {index} begins at {start}, and the one before it ends at {next}"));
        }
        if end > prompt {
            return Err(format!("range {index} ends at {end}, the prompt has {prompt} tokens"));
        }
        let (given, needed) = (embeddings.len(), *len as usize * width);
        if given != needed {
            return Err(format!("range {index} has {given} values, {len} tokens of {width} have {needed}"));
        }
        next = end;
        let Some(positions) = positions else { continue };
        if !three_axes {
            return Err(format!("range {index} has positions on three axes, the model has one axis"));
        }
        if positions.each.len() != *len as usize {
            return Err(format!("range {index} has {} positions for {len} tokens", positions.each.len()));
        }
        let last = (longest - end) + u64::from(positions.next);
        if last > u64::from(max_model_len) {
            return Err(format!(
                "range {index} moves the end of the answer to position {last}, the model's context is {max_model_len}"
            ));
        }
    }
    Ok(())
}

impl SequencePlan {
    /// Adds to a batch what `rows` of these are given beside their tokens: embeddings, and positions on three axes. `first_row`: the
    /// first of them in the batch. Allocates nothing where there is nothing.
    pub fn give(&self, rows: Range<usize>, first_row: usize, batch: &mut Batch) {
        let ranges = self.embeddings.as_deref().unwrap_or_default();
        if ranges.is_empty() && self.position_shift == 0 {
            return;
        }
        let [from, to] = [rows.start, rows.end].map(|row| self.first_position + row as u32);
        let row_of = |position: u32| first_row as u32 + (position - from);
        // Positions below this are done, and what follows is text that stands so far from its position in the sequence.
        let (mut at, mut shift) = (from, if ranges.is_empty() { self.position_shift } else { 0 });
        for range in ranges.iter().take_while(|range| range.start < to) {
            let (first, end) = (range.start.max(at), range.end().min(to));
            if first < end {
                move_text(batch, row_of(at), first - at, shift);
                let (first_row, rows, offset) = (row_of(first), end - first, first - range.start);
                let values = range.embeddings.clone();
                batch.embeddings.push(RowEmbeddings { first_row, rows, first: offset, values });
                match &range.positions {
                    Some(positions) => {
                        let axes = Axes::Each { first: offset, values: positions.each.clone() };
                        batch.positions.push(RowPositions { first_row, rows, axes });
                    }
                    None => move_text(batch, first_row, rows, shift),
                }
                at = end;
            }
            shift = range.shift_behind(shift);
        }
        move_text(batch, row_of(at), to - at, shift);
    }
}

fn move_text(batch: &mut Batch, first_row: u32, rows: u32, shift: i32) {
    if rows > 0 && shift != 0 {
        batch.positions.push(RowPositions { first_row, rows, axes: Axes::Shifted(shift) });
    }
}

#[cfg(test)]
mod tests {
    use folio_kv::{Identity, Root, TenantId};

    use super::*;
    use crate::plan::SequenceId;
    use crate::request::{RequestId, SamplingParams};

    fn range(start: u32, len: u32, positions: Option<Vec<[u32; 3]>>) -> EmbeddingRange {
        let embeddings = (0..len).map(|at| (start + at) as f32).collect();
        let positions = positions.map(|each| AxisPositions::new(each.into()));
        EmbeddingRange { start, len, content: [start as u8; 32], embeddings, positions }
    }

    /// An image of 2 x 3 at 4, one without positions at 12, and another of 1 x 2 behind it.
    fn ranges() -> Arc<[EmbeddingRange]> {
        let grid = |first: u32, height: u32, width: u32| {
            let token = move |at: u32| [first, first + at / width, first + at % width];
            Some((0..height * width).map(token).collect())
        };
        [range(4, 6, grid(4, 2, 3)), range(12, 3, None), range(15, 2, grid(12, 1, 2))].into()
    }

    /// Positions and embeddings of rows that are computed in chunks of so many, from `from` on.
    fn given(from: u32, to: u32, chunk: u32) -> Vec<([u32; 3], Option<f32>)> {
        let mut all = Vec::new();
        for first in (from..to).step_by(chunk as usize) {
            let rows = chunk.min(to - first);
            let mut plan = SequencePlan::empty(SequenceId(1));
            (plan.first_position, plan.position_shift) = (first, shift_behind(&ranges()));
            plan.embeddings = (first < 20).then(ranges);
            let mut batch = Batch::default();
            // Behind two rows of somebody else.
            plan.give(0..rows as usize, 2, &mut batch);
            for row in 2..2 + rows {
                let mut of = batch.embeddings.iter();
                let of = of.find(|of| (of.first_row..of.first_row + of.rows).contains(&row));
                let value = of.map(|of| of.values[(of.first + row - of.first_row) as usize]);
                all.push((batch.axes(row, first + row - 2), value));
            }
        }
        all
    }

    #[test]
    fn rows_are_given_theirs_whatever_a_step_begins_and_ends_with() {
        let whole = given(0, 24, 24);
        let of = |at: usize| whole[at];
        assert_eq!((of(3), of(4), of(8)), (([3; 3], None), ([4; 3], Some(4.0)), ([4, 5, 5], Some(8.0))));
        // The largest of the image is 6, so text goes on with 7.
        assert_eq!((of(10), of(11), of(12)), (([7; 3], None), ([8; 3], None), ([9; 3], Some(12.0))));
        assert_eq!((of(15), of(16)), (([12; 3], Some(15.0)), ([12, 12, 13], Some(16.0))));
        assert_eq!((of(17), of(20), of(23)), (([14; 3], None), ([17; 3], None), ([20; 3], None)));
        for chunk in 1..=9 {
            assert_eq!(given(0, 24, chunk), whole, "in chunks of {chunk}");
        }
        for from in 0..24 {
            assert_eq!(given(from, 24, 24), whole[from as usize..], "from {from} on");
        }
    }

    #[test]
    fn who_gives_nothing_is_given_nothing() {
        let mut batch = Batch::default();
        SequencePlan::empty(SequenceId(1)).give(0..5, 0, &mut batch);
        assert_eq!(batch, Batch::default());
    }

    /// 20 tokens, and up to 4 more.
    fn request(ranges: Vec<EmbeddingRange>) -> Request {
        let root = Root::derive(&Identity {
            tenant: TenantId(1),
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        let sampling = SamplingParams::greedy(4);
        let text = Request::new(RequestId(1), TenantId(1), root, vec![7; 20].into(), sampling);
        Request { embeddings: Some(ranges.into()), ..text }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_numbers() {
        let takes = |width, three_axes| Some(EmbeddingInput { width, three_axes });
        let refused = |ranges, takes| check(&request(ranges), 30, takes).expect_err("refused");
        let one = || vec![range(4, 6, None)];
        assert_eq!(refused(one(), None), "are given, and the model takes none on its device");
        assert_eq!(refused(one(), takes(2, true)), "range 0 has 6 values, 6 tokens of 2 have 12");
        assert_eq!(refused(vec![range(4, 0, None)], takes(1, true)), "range 0 has no tokens");
        assert_eq!(
            refused(vec![range(4, 6, None), range(9, 2, None)], takes(1, true)),
            "range 1 begins at 9, and the one before it ends at 10"
        );
        assert_eq!(
            refused(vec![range(16, 6, None)], takes(1, true)),
            "range 0 ends at 22, the prompt has 20 tokens"
        );
        let placed = |positions: &[[u32; 3]]| vec![range(4, 2, Some(positions.to_vec()))];
        assert_eq!(
            refused(placed(&[[4; 3], [4, 4, 5]]), takes(1, false)),
            "range 0 has positions on three axes, the model has one axis"
        );
        assert_eq!(refused(placed(&[[4; 3]]), takes(1, true)), "range 0 has 1 positions for 2 tokens");
        assert_eq!(
            refused(placed(&[[4; 3], [4, 4, 15]]), takes(1, true)),
            "range 0 moves the end of the answer to position 34, the model's context is 30"
        );
        assert_eq!(check(&request(placed(&[[4; 3], [4, 4, 11]])), 30, takes(1, true)), Ok(()));
        assert_eq!(check(&request(Vec::new()), 30, None), Ok(()), "nothing is given");
    }

    #[test]
    fn what_is_given_counts_in_the_queue() {
        assert_eq!(request(vec![range(4, 6, None)]).queued_tokens(), 20 + 6);
        let positions = Some(vec![[4; 3]; 6]);
        assert_eq!(request(vec![range(4, 6, positions)]).queued_tokens(), 20 + 6 + 18);
        assert_eq!(request(Vec::new()).queued_tokens(), 20);
    }
}
