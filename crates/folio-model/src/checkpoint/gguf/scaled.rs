//! NVFP4 with a number beside the matrix, `X.scale`, as llama.cpp's converter makes it of what ModelOpt and llm-compressor wrote: one for all
//! scales, or one for those of each expert.
//!
//! llama.cpp multiplies what the matrix computes by it. Here it becomes part of the scales, each product rounded once to f32, as with the
//! checkpoint that the file was made of. `X.input_scale` is of activations that are quantized, and read past.

use super::RowOrder;
use crate::backend::DType;
use crate::checkpoint::shards::{Entry, Form, Index, Shard};
use crate::config::Config;
use crate::error::{ModelError, Result};
use crate::quant::{BlockFormat, Encoding, nvfp4_scale};

/// A larger number would not leave room for the value of a code.
const LIMIT: f32 = (1u128 << 100) as f32;
/// Values that share a scale, and bytes of their codes.
const RUN: usize = 16;

/// What the blocks of a matrix become.
#[derive(Clone, Debug)]
pub struct Scaled {
    /// Of as many rows each.
    numbers: Vec<f32>,
    pub order: RowOrder,
}

impl Scaled {
    /// The NVFP4 blocks of `rows` rows as blocks of Fp4x16, rows as they are stored.
    pub fn blocks(&self, stored: &[u8], rows: usize) -> Vec<u8> {
        let (from, to) = (BlockFormat::NVFP4, BlockFormat::Fp4x16);
        let of_a_number = rows / self.numbers.len();
        let mut blocks =
            Vec::with_capacity(stored.len() / from.bytes() * from.values() / to.values() * to.bytes());
        for (row, bytes) in stored.chunks_exact(stored.len() / rows).enumerate() {
            let number = self.numbers[row / of_a_number];
            for block in bytes.chunks_exact(from.bytes()) {
                let (scales, codes) = block.split_at(4);
                for (scales, codes) in scales.chunks_exact(2).zip(codes.chunks_exact(RUN)) {
                    for scale in scales {
                        blocks.extend((nvfp4_scale(*scale) * number).to_le_bytes());
                    }
                    let (first, second) = codes.split_at(RUN / 2);
                    let code = |run: &[u8], i: usize| run[i % 8] >> (4 * (i / 8)) & 15;
                    blocks.extend((0..RUN).map(|i| code(first, i) | code(second, i) << 4));
                }
            }
        }
        blocks
    }
}

/// Makes the matrices that have a number one tensor with it, which `index` no longer names.
pub fn apply(config: &Config, shards: &mut [Shard], index: &mut Index) -> Result<()> {
    let nvfp4 = |entry: &Entry| entry.encoding == Ok(Encoding::Block(BlockFormat::NVFP4));
    let matrices: Vec<(usize, String)> = shards
        .iter()
        .enumerate()
        .flat_map(|(number, shard)| shard.entries.iter().map(move |(name, entry)| (number, name, entry)))
        .filter(|(.., entry)| nvfp4(entry))
        .map(|(number, name, _)| (number, name.clone()))
        .collect();
    for (number, name) in matrices {
        let Some(module) = name.strip_suffix(".weight") else { continue };
        index.remove(&format!("{module}.input_scale"));
        let Some((at, entry)) = take(&format!("{module}.scale"), shards, index) else { continue };
        let Some(matrix) = shards[number].entries.get(&name) else { continue };
        let rows = matrix.shape[0];
        let numbers = numbers(config, rows, &shards[at], &entry)?;
        let Form::Rows(order) = matrix.form else { continue };
        let scaled = Entry {
            encoding: Ok(Encoding::Block(BlockFormat::Fp4x16)),
            form: Form::Scaled(Scaled { numbers, order }),
            ..matrix.clone()
        };
        shards[number].entries.insert(name, scaled);
    }
    Ok(())
}

/// A tensor and its shard; `index` no longer names it.
fn take(name: &str, shards: &[Shard], index: &mut Index) -> Option<(usize, Entry)> {
    let at = index.remove(name)?;
    Some((at, shards[at].entries.get(name)?.clone()))
}

/// One for a matrix of `rows` rows, or as many as there are experts.
fn numbers(config: &Config, rows: usize, shard: &Shard, entry: &Entry) -> Result<Vec<f32>> {
    let problem = |problem: String| ModelError::Tensor {
        file: shard.file.clone(),
        tensor: entry.stored_name.clone(),
        problem,
    };
    let count = entry.shape.iter().product::<usize>();
    let experts = config.experts.map_or(1, |experts| experts.count);
    if ![1, experts].contains(&count) || !rows.is_multiple_of(count) {
        return Err(problem(format!(
            "has {count} numbers for a matrix of {rows} rows and {experts} experts"
        )));
    }
    let bytes = match entry.encoding {
        Ok(Encoding::Plain(DType::F32)) => shard.storage.bytes().get(entry.range.clone()),
        _ => None,
    };
    let Some(bytes) = bytes else { return Err(problem("is no tensor of F32".to_owned())) };
    let numbers: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    match numbers.iter().find(|number| number.is_nan() || number.abs() >= LIMIT) {
        Some(number) => Err(problem(format!("holds the scale {number}, which no weight can have"))),
        None => Ok(numbers),
    }
}
