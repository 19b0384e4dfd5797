//! Weights in another type than the checkpoint has them, so that each family meets each weight type.

use folio_cpu::CpuBackend;
use folio_model::backend::{Backend, BackendError, Batch, DType, KvLayout, TensorView};
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::quant::Encoding;
use half::{bf16, f16};

pub struct Recast {
    pub backend: CpuBackend,
    pub dtype: Option<DType>,
}

impl Backend for Recast {
    fn name(&self) -> String {
        self.backend.name()
    }

    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        let Some(dtype) = self.dtype else { return self.backend.load_matrix(name, parts) };
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

    fn allocate_cache(&mut self, layout: KvLayout, blocks: usize) -> Result<(), BackendError> {
        self.backend.allocate_cache(layout, blocks)
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        self.backend.forward(batch)
    }

    fn weight_bytes(&self) -> u64 {
        self.backend.weight_bytes()
    }
}

fn convert(part: &TensorView<'_>, to: DType) -> Vec<u8> {
    let from = part.encoding.plain().expect("the fixtures are plain");
    let values = part.bytes.chunks_exact(from.size()).map(|b| match from {
        DType::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
    });
    match to {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values.flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::BF16 => values.flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
    }
}
