//! Weights in another type than the checkpoint has them, so that each family meets each weight type.

use crate::backend::{Backend, BackendError, Batch, DType, KvLayout, TensorView};
use crate::program::{MatrixId, Program, VectorId};
use crate::quant::{BlockFormat, Encoding};
use crate::testing::blocks;
use half::{bf16, f16};

/// A backend whose weights are cast on their way in.
pub struct Recast<B> {
    pub backend: B,
    /// Matrices that became blocks.
    pub recast: usize,
    pub cast: Cast,
}

/// What becomes of the matrices of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub enum Cast {
    /// They stay as they are.
    Keep,
    Plain(DType),
    /// Blocks of one of Folio's own formats where the columns are whole blocks; if `ordered`, stored in an order of columns of
    /// their own (act-order of GPTQ).
    Blocks {
        format: BlockFormat,
        ordered: bool,
    },
}

impl<B: Backend> Backend for Recast<B> {
    fn name(&self) -> String {
        self.backend.name()
    }

    fn numerics(&self) -> String {
        self.backend.numerics()
    }

    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        let dtype = match self.cast {
            Cast::Blocks { format, ordered } if parts[0].shape[1].is_multiple_of(format.values()) => {
                return self.load_blocks(name, parts, format, ordered);
            }
            Cast::Plain(dtype) => dtype,
            _ => return self.backend.load_matrix(name, parts),
        };
        let bytes: Vec<Vec<u8>> = parts.iter().map(|part| convert(part, dtype)).collect();
        let parts: Vec<_> = parts
            .iter()
            .zip(&bytes)
            .map(|(part, bytes)| TensorView {
                encoding: Encoding::Plain(dtype),
                shape: part.shape,
                bytes,
                order: part.order,
            })
            .collect();
        self.backend.load_matrix(name, &parts)
    }

    fn load_vector(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        self.backend.load_vector(name, parts)
    }

    fn load_program(
        &mut self,
        program: Program,
        rows: usize,
        logits: usize,
        position: usize,
    ) -> Result<(), BackendError> {
        self.backend.load_program(program, rows, logits, position)
    }

    fn allocate_cache(&mut self, layout: &KvLayout, blocks: &[usize]) -> Result<(), BackendError> {
        self.backend.allocate_cache(layout, blocks)
    }

    fn hidden(&self, row: u32) -> &[f32] {
        self.backend.hidden(row)
    }

    fn features(&self, row: u32) -> &[f32] {
        self.backend.features(row)
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        self.backend.forward(batch)
    }

    fn weight_bytes(&self) -> u64 {
        self.backend.weight_bytes()
    }
}

impl<B: Backend> Recast<B> {
    fn load_blocks(
        &mut self,
        name: &str,
        parts: &[TensorView<'_>],
        format: BlockFormat,
        ordered: bool,
    ) -> Result<MatrixId, BackendError> {
        self.recast += 1;
        let order = ordered.then(|| blocks::order(parts[0].shape[1]));
        let bytes: Vec<Vec<u8>> = parts
            .iter()
            .map(|part| {
                let values: Vec<f32> = values(part).collect();
                blocks::encode(
                    format,
                    &order.as_ref().map_or(values.clone(), |o| blocks::stored_in(o, &values)),
                )
            })
            .collect();
        let parts: Vec<_> = parts
            .iter()
            .zip(&bytes)
            .map(|(part, bytes)| TensorView {
                encoding: Encoding::Block(format),
                shape: part.shape,
                bytes,
                order: order.as_deref(),
            })
            .collect();
        self.backend.load_matrix(name, &parts)
    }
}

fn values<'a>(part: &TensorView<'a>) -> impl Iterator<Item = f32> + use<'a> {
    let from = part.encoding.plain().expect("the fixtures are plain");
    part.bytes.chunks_exact(from.size()).map(move |b| match from {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    })
}

fn convert(part: &TensorView<'_>, to: DType) -> Vec<u8> {
    let values = values(part);
    match to {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::BF16 => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}
