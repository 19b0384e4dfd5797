//! `--quantize` for a backend that does not quantize by itself: matrices become blocks on their way to it.
//!
//! Owns: which matrices, and the same refusals as the CPU backend's. Must never: choose a code; that is `folio_cpu::Quantize`.

use folio_cpu::{Quantize, Quantized};
use folio_model::backend::{Backend, BackendError, Batch, KvLayout, TensorView};
use folio_model::check;
use folio_model::program::{MatrixId, Program, VectorId};
use folio_model::quant::Encoding;

/// A backend whose matrices are quantized while they are loaded.
pub struct Quantizing<'a> {
    pub inner: &'a mut dyn Backend,
    pub to: Quantize,
    /// What it did so far.
    pub quantized: Quantized,
}

/// The blocks of a part, row by row.
fn blocks(to: Quantize, name: &str, part: &TensorView<'_>) -> Result<Vec<u8>, BackendError> {
    let Some(dtype) = part.encoding.plain() else {
        let reason =
            format!("it is {} already: --quantize is for weights in F32, F16 or BF16", part.encoding);
        return Err(check::shape_error(name, part.shape, reason));
    };
    let row_bytes = part.shape[1] * dtype.size();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let rows_each = part.shape[0].div_ceil(threads).max(1);
    let quantize = &|bytes: &[u8]| {
        let mut blocks = Vec::new();
        let mut values = Vec::with_capacity(part.shape[1]);
        for row in bytes.chunks_exact(row_bytes) {
            values.clear();
            values.extend(row.chunks_exact(dtype.size()).map(|value| check::to_f32(dtype, value)));
            blocks.extend(to.row(&values));
        }
        blocks
    };
    Ok(std::thread::scope(|scope| {
        let parts = part.bytes.chunks(rows_each * row_bytes);
        let threads: Vec<_> = parts.map(|bytes| scope.spawn(move || quantize(bytes))).collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.collect::<Vec<_>>().concat()
    }))
}

impl Backend for Quantizing<'_> {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn load_matrix(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<MatrixId, BackendError> {
        check::parts(name, parts, 2, |a, b| a == b)?;
        if !parts[0].shape[1].is_multiple_of(self.to.format().values()) {
            self.quantized.kept_plain += 1;
            return self.inner.load_matrix(name, parts);
        }
        let blocks = parts.iter().map(|part| blocks(self.to, name, part)).collect::<Result<Vec<_>, _>>()?;
        let encoding = Encoding::Block(self.to.format());
        let views = parts.iter().zip(&blocks);
        let views: Vec<_> = views.map(|(part, bytes)| TensorView { encoding, bytes, ..*part }).collect();
        self.quantized.matrices += 1;
        self.inner.load_matrix(name, &views)
    }

    fn load_vector(&mut self, name: &str, parts: &[TensorView<'_>]) -> Result<VectorId, BackendError> {
        self.inner.load_vector(name, parts)
    }

    fn load_program(
        &mut self,
        program: Program,
        max_rows: usize,
        max_logit_rows: usize,
        max_position: usize,
    ) -> Result<(), BackendError> {
        self.inner.load_program(program, max_rows, max_logit_rows, max_position)
    }

    fn allocate_cache(&mut self, layout: &KvLayout, blocks: &[usize]) -> Result<(), BackendError> {
        self.inner.allocate_cache(layout, blocks)
    }

    fn forward(&mut self, batch: &Batch) -> Result<&[f32], BackendError> {
        self.inner.forward(batch)
    }

    fn hidden(&self, row: u32) -> &[f32] {
        self.inner.hidden(row)
    }

    fn weight_bytes(&self) -> u64 {
        self.inner.weight_bytes()
    }
}

#[cfg(test)]
mod tests {
    use folio_cpu::{CpuBackend, CpuOptions};
    use folio_model::Checkpoint;
    use folio_model::reference::ReferenceBackend;
    use folio_model::testing::{Runner, fixture, relative_difference};

    use super::*;

    /// The reference with the quantized weights is as near to the CPU backend that quantized by itself as rounded activations let it
    /// be, and farther from the weights as they were.
    #[test]
    fn weights_become_what_the_cpu_backend_makes_of_them() {
        let checkpoint = Checkpoint::open(fixture("llama3")).expect("opens");
        let prompt: Vec<u32> = (0..24).map(|i| (i * 37 + 5) % 97).collect();
        let rows = [0, 11, 23];
        let mut inner = ReferenceBackend::new();
        let quantizing = Quantizing { inner: &mut inner, to: Quantize::Q4, quantized: Quantized::default() };
        let mut here = Runner::load(&checkpoint, quantizing, None);
        let found = here.forward(&prompt, &rows).to_vec();
        assert!(here.backend.quantized.matrices > 4, "{:?}", here.backend.quantized);
        let mut cpu = CpuBackend::new(CpuOptions { threads: Some(1), isa: None }).expect("a backend");
        cpu.quantize_weights(Quantize::Q4);
        let mut cpu = Runner::load(&checkpoint, cpu, None);
        let near = relative_difference(cpu.forward(&prompt, &rows), &found);
        let mut plain = Runner::load(&checkpoint, ReferenceBackend::new(), None);
        let far = relative_difference(plain.forward(&prompt, &rows), &found);
        assert!(
            near < 0.03 && far > 2.0 * near,
            "{near} from the CPU's, {far} from the weights as they were"
        );
    }

    #[test]
    fn quantized_weights_are_refused_by_name() {
        let mut inner = ReferenceBackend::new();
        let mut quantizing =
            Quantizing { inner: &mut inner, to: Quantize::Q8, quantized: Quantized::default() };
        let format = Quantize::Q4.format();
        let bytes = vec![0; format.bytes()];
        let view =
            TensorView { encoding: Encoding::Block(format), shape: &[1, 32], bytes: &bytes, order: None };
        let error = quantizing.load_matrix("layers.0.qkv", &[view]).expect_err("refused").to_string();
        assert!(error.contains("layers.0.qkv") && error.contains("Q4_0 already"), "{error}");
    }
}
