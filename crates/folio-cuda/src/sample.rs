//! Sampling on the device: what is chosen, as plain data for each row, and what comes back.
//!
//! Owns: the layout of both, and the launch. Must never: know a request or a step. For the same logits the choice is that of
//! `folio-engine`'s sampler, bit for bit; where the row itself is wanted, some token is judged whose result nobody reads.

use folio_model::sampling::{Choice, Logprobs, Outcome, SampleRow};

use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
use crate::planes::{Meta, Planes};

/// Most alternatives of a row.
pub const TOP_MAX: u32 = 256;
/// Vocabularies are smaller.
pub const VOCABULARY_MAX: usize = 1 << 21;

const HEADER: usize = 8;
const RECORD: usize = 24;
const RESULT: usize = 5;

/// What rows need together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Alternatives of a row, at most.
    pub top: u32,
    /// The scratch of [`Sampling`].
    pub scratch: bool,
}

/// Replaces `words` by the records of these rows and their lists, which is what [`Sampling::words`] points to, and `asked` by what reads
/// their results.
pub fn encode(
    rows: &mut dyn ExactSizeIterator<Item = SampleRow<'_>>,
    words: &mut Vec<u32>,
    asked: &mut Vec<Asked>,
) -> Needs {
    let mut needs = Needs::default();
    asked.clear();
    words.clear();
    words.resize(HEADER + RECORD * rows.len(), 0);
    words[0] = rows.len() as u32;
    for (i, row) in rows.enumerate() {
        needs.top = needs.top.max(row.logprobs.unwrap_or(0));
        asked.push(Asked::of(&row));
        let mut record = [0; RECORD];
        record[18] = row.logprobs.map_or(0, |top| 1 + top.min(TOP_MAX));
        match &row.choice {
            Choice::Known(_) | Choice::Logits => {
                let token = if let Choice::Known(token) = row.choice { token } else { 0 };
                record[..2].copy_from_slice(&[1, token]);
                record[18] = record[18].max(1);
            }
            Choice::Draw(draw) => {
                record[2..5].copy_from_slice(&[draw.seed as u32, (draw.seed >> 32) as u32, draw.position]);
                record[5..9].copy_from_slice(&[
                    draw.temperature.to_bits(),
                    draw.top_k,
                    draw.top_p.to_bits(),
                    draw.min_p.to_bits(),
                ]);
                let penalties = [draw.repetition_penalty, draw.frequency_penalty, draw.presence_penalty];
                record[9..12].copy_from_slice(&penalties.map(f32::to_bits));
                record[12..14].copy_from_slice(&[words.len() as u32, draw.seen.len() as u32]);
                words.extend(draw.seen.iter().flat_map(|(token, generated)| [*token, *generated]));
                record[14..16].copy_from_slice(&[words.len() as u32, draw.bias.len() as u32]);
                words.extend(draw.bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]));
                let start = words.len();
                draw.forbidden.iter().for_each(|list| words.extend(*list));
                record[16..18].copy_from_slice(&[start as u32, (words.len() - start) as u32]);
                record[19] = draw.changes_logits().into();
                needs.scratch |= draw.changes_logits();
            }
        }
        words[HEADER + RECORD * i..][..RECORD].copy_from_slice(&record);
    }
    needs
}

/// Words of the result of one row with up to `top` alternatives.
pub const fn result_words(top: u32) -> usize {
    RESULT + 2 * top as usize
}

/// A launch of [`sample`].
#[derive(Clone, Copy, Debug)]
pub struct Sampling<'a> {
    /// What [`encode`] made.
    pub words: DevicePtr,
    /// Most rows that it may have.
    pub rows: u32,
    /// Their logits, f32, in the same order; they stay as they are. The width is the vocabulary, below 2^21.
    pub logits: &'a Planes,
    /// An f32 plane of the same shape, where [`Needs::scratch`]; of no meaning before or after.
    pub scratch: Option<&'a Planes>,
    /// Most alternatives of a row; no row asks for more.
    pub top: u32,
    /// `[rows, result_words(top)]` words, for [`decode`].
    pub out: DevicePtr,
}

/// Chooses a token for every row.
pub fn sample(driver: &mut dyn Driver, sampling: &Sampling<'_>) -> Result<(), DriverError> {
    let (logits, scratch) = (sampling.logits, sampling.scratch.copied().unwrap_or_default());
    let args = [
        Arg::Ptr(sampling.words),
        Arg::Ptr(logits.f32.unwrap_or_default()),
        Arg::U32(logits.f32_stride),
        Arg::U32(logits.width),
        Arg::Ptr(scratch.f32.unwrap_or_default()),
        Arg::U32(scratch.f32_stride),
        Arg::Ptr(sampling.out),
        Arg::U32(result_words(sampling.top) as u32),
    ];
    // Of no meaning to the result: nothing is summed but whole numbers.
    let threads = if logits.width < 8192 { 128 } else { 1024 };
    driver.launch(&Launch {
        kernel: "sample_rows",
        grid: [sampling.rows, 1, 1],
        threads,
        shared: 0,
        args: &args,
    })
}

/// Puts tokens in the place of those words of a step that name rows of the step before ([`PLACEHOLDER`]), whose results lie at `results` as
/// [`sample`] wrote them with `top`. Tokens are below `vocabulary`.
///
/// [`PLACEHOLDER`]: folio_model::backend::PLACEHOLDER
pub fn follow(
    driver: &mut dyn Driver,
    meta: Meta,
    rows: u32,
    results: DevicePtr,
    top: u32,
    vocabulary: u32,
) -> Result<(), DriverError> {
    let args =
        [Arg::Ptr(meta.0), Arg::Ptr(results), Arg::U32(result_words(top) as u32), Arg::U32(vocabulary)];
    let grid = [rows.div_ceil(128), 1, 1];
    driver.launch(&Launch { kernel: "follow", grid, threads: 128, shared: 0, args: &args })
}

/// What of a [`SampleRow`] is needed to read its result.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    known: bool,
    logprobs: bool,
    /// The row itself.
    pub logits: bool,
}

impl Asked {
    fn of(row: &SampleRow<'_>) -> Self {
        Self {
            known: matches!(row.choice, Choice::Known(_)),
            logprobs: row.logprobs.is_some(),
            logits: row.choice == Choice::Logits,
        }
    }
}

/// Reads the result of one row, `result_words` words.
pub fn decode(row: Asked, words: &[u32]) -> Outcome {
    if row.logits {
        return Outcome::Logits;
    }
    match words[0] {
        1 => return Outcome::Failed("a logit is not a number"),
        2 => return Outcome::Failed("no logit is finite, or one is infinite"),
        3 => return Outcome::Failed("every token is forbidden"),
        4 => return Outcome::Failed("the token is not in the vocabulary"),
        _ => {}
    }
    let logprobs = || {
        let top = words[RESULT..].chunks_exact(2).take(words[4] as usize);
        let top = top.map(|pair| (pair[0], f32::from_bits(pair[1]))).collect();
        Logprobs { logprob: f32::from_bits(words[2]), rank: words[3], top }
    };
    match row.known {
        true => Outcome::Score(logprobs()),
        false => Outcome::Token { id: words[1], logprobs: row.logprobs.then(logprobs) },
    }
}
