//! A mixture of experts as gpt-oss and Llama 4 store it in safetensors: all experts of a layer in one tensor.
//!
//! | stored under `mlp.experts.` | shape | becomes |
//! |---|---|---|
//! | `gate_up_proj` | `[experts, hidden, 2 * inner]`, a gate and what it gates in turn; in Llama 4 all gates first | `gate_proj.weight`, `up_proj.weight` |
//! | `gate_up_proj_bias` | `[experts, 2 * inner]`, likewise | `gate_proj.bias`, `up_proj.bias` |
//! | `down_proj` | `[experts, inner, hidden]` | `down_proj.weight` |
//! | `down_proj_bias` | `[experts, hidden]` | `down_proj.bias` |
//! | `gate_up_proj_blocks`, `_scales` | U8 `[experts, 2 * inner, hidden / 32, 16]`, `[..., hidden / 32]`: MXFP4, not transposed | as `gate_up_proj` |
//! | `down_proj_blocks`, `_scales` | U8 `[experts, hidden, inner / 32, 16]`, likewise | as `down_proj` |
//! | `gate_up_proj`, `gate_up_proj_scale` | e4m3 in the shape of `gate_up_proj`, and a scale for each row: Llama 4 in FP8 | as `gate_up_proj` |
//! | `down_proj`, `down_proj_scale` | likewise | as `down_proj` |
//!
//! Owns: those names and shapes, and how rows are picked out of them. To everybody else there are matrices of all experts, expert
//! after expert. Must never: change a value. Cost: headers only; reading a matrix is one pass over its tensor.

use super::gguf::RowOrder;
use super::quantized::{Matrix, Pieces, Quantization, mxfp4_rows};
use super::shards::{Entry, Form, Index, Shard};
use crate::config::{Config, Experts};
use crate::error::{ModelError, Result};
use crate::family::ExpertTensors;
use crate::quant::Encoding;

/// Rows of one of `step` kinds, which lie in turn: every `step`-th row, from `first` on; or one kind after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every {
    pub first: usize,
    pub step: usize,
    pub in_turn: bool,
}

impl Every {
    pub const ALL: Every = Every { first: 0, step: 1, in_turn: true };

    /// Where row `row` of `rows` of its kind is.
    fn at(self, row: usize, rows: usize) -> usize {
        if self.in_turn { row * self.step + self.first } else { self.first * rows + row }
    }
}

/// Plain weights of all experts. Of a vector: some of its values. Of a matrix: stored transposed, expert by expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stacked {
    pub every: Every,
    pub experts: usize,
}

impl Stacked {
    /// `shape` is what comes out; values of `size` bytes.
    pub fn read(self, stored: &[u8], shape: &[usize], size: usize) -> Vec<u8> {
        let Every { first, step, .. } = self.every;
        let &[rows, cols] = shape else {
            return stored.chunks_exact(size).skip(first).step_by(step).flatten().copied().collect();
        };
        let rows = rows / self.experts;
        match size {
            2 => self.transposed(stored.as_chunks::<2>().0, rows, cols),
            _ => self.transposed(stored.as_chunks::<4>().0, rows, cols),
        }
    }

    /// `[expert][column][row * step]` to `[expert][row][column]`.
    fn transposed<const N: usize>(self, stored: &[[u8; N]], rows: usize, cols: usize) -> Vec<u8> {
        /// Columns whose lines stay in a cache while rows pass.
        const TOGETHER: usize = 64;
        let step = self.every.step;
        let mut values = vec![[0; N]; self.experts * rows * cols];
        let experts = values.chunks_exact_mut(rows * cols).zip(stored.chunks_exact(cols * rows * step));
        for (to, from) in experts {
            for start in (0..cols).step_by(TOGETHER) {
                for row in 0..rows {
                    for col in start..cols.min(start + TOGETHER) {
                        to[row * cols + col] = from[col * rows * step + self.every.at(row, rows)];
                    }
                }
            }
        }
        values.into_flattened()
    }
}

/// Experts that a family stores as one tensor are linear layers of their own in checkpoints whose linear layers were quantized.
pub fn find_apart(config: &mut Config, index: &Index) {
    let Some(layer) = (0..config.layers).find(|layer| config.experts_of(*layer).is_some()) else { return };
    let first = format!("model.layers.{layer}.mlp.experts.0.");
    let apart = index.range(first.clone()..).next().is_some_and(|(name, _)| name.starts_with(&first));
    if let (true, Some(mixture)) = (apart, config.family.mixture.as_mut()) {
        mixture.stored = ExpertTensors::Each;
    }
}

/// Puts the matrices and vectors of all experts in the place of the tensors they are stored in.
pub fn apply(config: &Config, location: &str, shards: &mut [Shard], index: &mut Index) -> Result<()> {
    let Some((Experts { count, .. }, mixture)) = config.experts.zip(config.family.mixture) else {
        return Ok(());
    };
    let in_turn = match mixture.stored {
        ExpertTensors::Stacked => true,
        ExpertTensors::TurnedHalves => false,
        ExpertTensors::Each | ExpertTensors::Halves => return Ok(()),
    };
    let (hidden, inner) = (config.hidden, config.intermediate);
    let every = |first| Every { first, step: 2, in_turn };
    let gate_up = [("gate_proj", every(0)), ("up_proj", every(1))];
    let down = [("down_proj", Every::ALL)];
    for layer in (0..config.layers).filter(|layer| config.experts_of(*layer).is_some()) {
        let prefix = format!("model.layers.{layer}.mlp.experts.");
        let mut files = Files { config, location, shards, index, prefix, count };
        files.matrix("gate_up_proj", &gate_up, [inner, hidden])?;
        files.matrix("down_proj", &down, [hidden, inner])?;
        if config.mlp_bias {
            files.vector("gate_up_proj_bias", &gate_up, inner)?;
            files.vector("down_proj_bias", &down, hidden)?;
        }
    }
    Ok(())
}

struct Files<'a> {
    config: &'a Config,
    location: &'a str,
    shards: &'a mut [Shard],
    index: &'a mut Index,
    prefix: String,
    count: usize,
}

impl Files<'_> {
    /// Matrices `[count * rows, cols]` out of one tensor.
    fn matrix(&mut self, stored: &str, parts: &[(&str, Every)], [rows, cols]: [usize; 2]) -> Result<()> {
        let all = parts.len() * rows;
        let blocks = format!("{}{stored}_blocks", self.prefix);
        if let Some(shard) = self.index.get(&blocks) {
            if self.config.quantization != Some(Quantization::Mxfp4) {
                return Err(ModelError::Tensor {
                    file: self.shards[*shard].file.clone(),
                    tensor: blocks,
                    problem: "is in MXFP4, but no quantization_config in config.json says so".to_owned(),
                });
            }
            let scales = format!("{}{stored}_scales", self.prefix);
            for (name, every) in parts {
                let pieces = (self.shards as &[Shard], self.index as &Index, self.location);
                let names = (blocks.as_str(), scales.as_str());
                let matrix = mxfp4_rows(pieces, names, [self.count, all, cols], *every)?;
                self.put_matrix(name, matrix);
            }
            self.index.remove(&blocks);
            self.index.remove(&scales);
            return Ok(());
        }
        if let Some(Quantization::Fp8(fp8)) = &self.config.quantization {
            let name = format!("{}{stored}", self.prefix);
            let (shape, mut made) = ([self.count, all, cols], Vec::new());
            for (part, every) in parts {
                let pieces = Pieces { shards: self.shards, index: self.index, location: self.location };
                made.extend(fp8.plan_turned(&name, shape, *every, &pieces)?.map(|matrix| (*part, matrix)));
            }
            // Each is of the same tensors.
            for piece in made.iter().flat_map(|(_, matrix)| matrix.pieces()) {
                self.index.remove(&piece.name);
            }
            if !made.is_empty() {
                made.into_iter().for_each(|(part, matrix)| self.put_matrix(part, matrix));
                return Ok(());
            }
        }
        self.plain(stored, parts, "weight", &[self.count, cols, all], &[self.count * rows, cols])
    }

    /// Vectors `[count * values]` out of one tensor.
    fn vector(&mut self, stored: &str, parts: &[(&str, Every)], values: usize) -> Result<()> {
        let shape = [self.count, parts.len() * values];
        self.plain(stored, parts, "bias", &shape, &[self.count * values])
    }

    fn plain(
        &mut self,
        stored: &str,
        parts: &[(&str, Every)],
        suffix: &str,
        expected: &[usize],
        shape: &[usize],
    ) -> Result<()> {
        let name = format!("{}{stored}", self.prefix);
        let shard = self.index.remove(&name);
        let found =
            shard.and_then(|shard| Some((shard, self.shards.get(shard)?.entries.get(&name)?.clone())));
        let Some((shard, entry)) = found else {
            return Err(ModelError::MissingTensor { tensor: name, checkpoint: self.location.to_owned() });
        };
        if entry.shape != expected {
            return Err(ModelError::Shape {
                file: self.shards[shard].file.clone(),
                tensor: name,
                found: entry.shape,
                expected: expected.to_vec(),
                settings: super::CONFIG,
            });
        }
        for (part, every) in parts {
            let form = Form::Experts(Stacked { every: *every, experts: self.count });
            self.put(part, suffix, shard, Entry { shape: shape.to_vec(), form, ..entry.clone() });
        }
        Ok(())
    }

    fn put_matrix(&mut self, part: &str, matrix: Matrix) {
        let codes = &matrix.codes.piece;
        let shard = codes.shard;
        let entry = Entry {
            stored_name: codes.name.clone(),
            encoding: Ok(Encoding::Block(matrix.format)),
            shape: matrix.shape.to_vec(),
            range: codes.range.clone(),
            form: Form::Quantized(Box::new(matrix), RowOrder::AsStored),
        };
        self.put(part, "weight", shard, entry);
    }

    fn put(&mut self, part: &str, suffix: &str, shard: usize, entry: Entry) {
        let name = format!("{}{part}.{suffix}", self.prefix);
        self.index.insert(name.clone(), shard);
        self.shards[shard].entries.insert(name, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_picked_and_turned() {
        // Two experts of two columns; rows in turn, so one each.
        let stored: Vec<u8> = (0..8u16).flat_map(u16::to_le_bytes).collect();
        let read = |first, shape: &[usize]| -> Vec<u16> {
            let stacked = Stacked { every: Every { first, step: 2, in_turn: true }, experts: 2 };
            let bytes = stacked.read(&stored, shape, 2);
            bytes.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect()
        };
        assert_eq!(read(0, &[2, 2]), [0, 2, 4, 6]);
        assert_eq!(read(1, &[2, 2]), [1, 3, 5, 7]);
        assert_eq!(read(1, &[4]), [1, 3, 5, 7]);
        let halves = |first| Stacked { every: Every { first, step: 2, in_turn: false }, experts: 1 };
        let bytes = halves(1).read(&stored, &[2, 2], 2);
        let second: Vec<u16> = bytes.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect();
        assert_eq!(second, [2, 6, 3, 7]);
        let whole = Stacked { every: Every::ALL, experts: 1 };
        let wide: Vec<u8> = (0..3 * 70u32).flat_map(u32::to_le_bytes).collect();
        let turned = whole.read(&wide, &[3, 70], 4);
        for (i, value) in turned.as_chunks().0.iter().enumerate() {
            assert_eq!(u32::from_le_bytes(*value) as usize, i % 70 * 3 + i / 70);
        }
    }
}
