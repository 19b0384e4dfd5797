//! Where row buffers lie: which of the two planes each buffer of a program needs, and their memory.
//!
//! Owns: the decision and the sizes. Must never: launch. A plane that nobody reads is not allocated.

use folio_model::program::{Activation, AttentionSpec, Buf, ExpertsSpec, MatrixId, Op, Program};

use crate::driver::{DevicePtr, Driver, DriverError};
use crate::planes::Planes;

/// Planes are padded to this many values.
const PAD: usize = 32;

/// Which planes of a buffer somebody reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    pub f32: bool,
    pub bf16: bool,
}

/// One entry per buffer of `program`. `floats`: whether a matrix is multiplied by activations as they are, in f32; all others read
/// bf16.
pub fn needs(program: &Program, floats: impl Fn(MatrixId) -> bool) -> Vec<Needs> {
    let mut needs = vec![Needs::default(); program.buffers.len()];
    let mut read = |buf: Buf, as_floats: bool| {
        let need = &mut needs[buf.0 as usize];
        *(if as_floats { &mut need.f32 } else { &mut need.bf16 }) = true;
    };
    for op in &program.body {
        match *op {
            Op::Embed { out, .. } => read(out, true),
            Op::RmsNorm { x, .. } | Op::Scale { x, .. } | Op::Copy { x, .. } => read(x, true),
            // What reads it decides.
            Op::Input { .. } | Op::Merge { .. } => {}
            Op::AddRmsNorm { x, out, .. } | Op::Place { x, out, .. } => {
                read(x, true);
                read(out, true);
            }
            // A product writes f32.
            Op::Linear { x, weight, out, .. } => {
                read(x, floats(weight));
                read(out, true);
            }
            Op::GatedLinear { x, weight, .. } => read(x, floats(weight)),
            Op::WriteKv { qkv, .. } | Op::Attention { qkv, .. } => read(qkv, true),
            // Refused.
            Op::Convolve { .. }
            | Op::DeltaRule { .. }
            | Op::GatedRmsNorm { .. }
            | Op::SigmoidGate { .. }
            | Op::Multiply { .. }
            | Op::StateSpace { .. }
            | Op::SiluGate { .. }
            | Op::TopGate { .. }
            | Op::Add { .. }
            | Op::Gate { .. }
            | Op::Center { .. }
            | Op::NormPart { .. }
            | Op::XIelu { .. }
            | Op::HeadLinear { .. }
            | Op::WriteLatent { .. }
            | Op::LatentAttention { .. } => {}
            Op::Experts { x, logits, spec, out, .. } => {
                read(x, floats(program.experts[spec].gate_up));
                read(logits, true);
                read(out, true);
            }
        }
    }
    read(program.head.x, true);
    program.features.iter().for_each(|features| read(*features, true));
    needs
}

const UNGATED: &str = "squared ReLU activations without a gate";

/// Why a program cannot be run: there are no kernels for some operation, or one reads bf16 of a buffer that is not written so.
pub fn refusal(program: &Program, needs: &[Needs]) -> Option<String> {
    let no_kernel = |op: &Op| match op {
        Op::GatedRmsNorm { .. } | Op::SigmoidGate { .. } | Op::Multiply { .. } => {
            Some("gated attention and shared experts")
        }
        Op::Center { .. } => Some("layer norms"),
        Op::TopGate { .. } => Some("experts whose weight multiplies what they read"),
        Op::Add { .. } | Op::Gate { .. } => Some("layers that are given values of each token"),
        Op::AddRmsNorm { times: Some(_), .. } => Some("layers that multiply what they end with"),
        Op::NormPart { .. } => Some("norms of all of q and of all of k"),
        Op::XIelu { .. } => Some("xIELU activations"),
        Op::GatedLinear { activation: Activation::ReluSquared, .. } => Some(UNGATED),
        _ => None,
    };
    let routed = |spec: &&ExpertsSpec| {
        spec.routing.is_sigmoid()
            || spec.choice_bias.is_some()
            || spec.groups.is_some()
            || spec.scale != 1.0
            || spec.scales.is_some()
    };
    let heads = |spec: &AttentionSpec| (spec.heads, spec.kv_heads, spec.head_dim);
    let differ = program.attention.windows(2).any(|pair| heads(&pair[0]) != heads(&pair[1]));
    let unknown = if program.states().next().is_some() {
        Some("layers that keep a state (gated delta nets, short convolutions, Mamba-2)")
    } else if !program.latent.is_empty() || program.body.iter().any(|op| matches!(op, Op::HeadLinear { .. }))
    {
        Some("latent attention")
    } else if differ {
        Some("layers with heads of different sizes")
    } else if program.experts.iter().find(routed).is_some() {
        Some("experts that are chosen by sigmoids, with a bias or in groups, or that are scaled")
    } else if program.experts.iter().any(|spec| spec.activation.inputs() == 1) {
        Some(UNGATED)
    } else {
        let attends = |what: fn(&AttentionSpec) -> bool| program.attention.iter().any(what);
        let chunked = attends(|spec| spec.chunked || spec.temper.is_some());
        let last = attends(|spec| spec.norm_last);
        let other = chunked.then_some("attention in chunks of positions, or tempered by them");
        let other = other.or(last.then_some("norms of q and k behind the rotation"));
        let shared = attends(|spec| !spec.own_kv);
        let other = other.or(shared.then_some("layers that read the K and V of others"));
        let values = attends(|spec| spec.v_norm.is_some());
        let other = other.or(values.then_some("norms of values"));
        program.body.iter().find_map(no_kernel).or(other)
    };
    if let Some(what) = unknown {
        return Some(format!(
            "{what} are computed on the CPU only: the CUDA backend has no kernels for them"
        ));
    }
    let only_floats = |op: &&Op| {
        matches!(
            op,
            Op::Embed { .. }
                | Op::Linear { .. }
                | Op::Scale { .. }
                | Op::AddRmsNorm { .. }
                | Op::Place { .. }
                | Op::Experts { .. }
        )
    };
    let mut writers = program.body.iter().filter(only_floats);
    let wrong = writers.find(|op| needs[op.writes().0 as usize].bf16)?;
    Some(format!("what {wrong:?} writes is read by a product directly, which the CUDA backend does not do"))
}

/// Allocates the planes that `needs` asks for, of `rows` rows.
pub fn allocate(
    driver: &mut dyn Driver,
    width: usize,
    rows: usize,
    needs: Needs,
) -> Result<Planes, DriverError> {
    let stride = width.next_multiple_of(PAD);
    let mut plane = |needed: bool, bytes: usize| -> Result<Option<DevicePtr>, DriverError> {
        if !needed {
            return Ok(None);
        }
        let bytes = (rows.max(1) * stride * bytes) as u64;
        let at = driver.allocate(bytes)?;
        driver.zero(at, bytes)?;
        Ok(Some(at))
    };
    Ok(Planes {
        width: width as u32,
        f32: plane(needs.f32, 4)?,
        f32_stride: stride as u32,
        bf16: plane(needs.bf16, 2)?,
        bf16_stride: stride as u32,
    })
}

#[cfg(test)]
mod tests {
    use folio_model::program::{Head, VectorId};

    use super::*;

    fn program(body: Vec<Op>) -> Program {
        Program {
            buffers: vec![8; 4],
            body,
            head: Head { x: Buf(0), ..Head::default() },
            ..Program::default()
        }
    }

    #[test]
    fn a_plane_that_nobody_reads_does_not_exist() {
        let (a, b, c) = (Buf(0), Buf(1), Buf(2));
        let (norm, plain, floats) = (VectorId(0), MatrixId(0), MatrixId(1));
        let program = program(vec![
            Op::Embed { table: plain, out: a },
            Op::RmsNorm { x: a, weight: norm, eps: 1e-5, out: b },
            Op::GatedLinear { x: b, weight: plain, bias: None, activation: Activation::Silu, out: c },
            Op::Linear { x: c, weight: floats, bias: None, out: a, add: true },
        ]);
        let needs = needs(&program, |id| id == floats);
        let (f32, bf16) = (Needs { f32: true, bf16: false }, Needs { f32: false, bf16: true });
        assert_eq!(needs, [f32, bf16, f32, Needs::default()]);
        assert_eq!(refusal(&program, &needs), None);
    }

    #[test]
    fn a_product_of_a_product_is_refused_by_name() {
        let plain = MatrixId(0);
        let product = |x, out| Op::Linear { x, weight: plain, bias: None, out, add: false };
        let program = program(vec![product(Buf(1), Buf(2)), product(Buf(2), Buf(0))]);
        let reason = refusal(&program, &needs(&program, |_| false)).expect("refused");
        assert!(reason.contains("Buf(2)"), "{reason}");
    }
}
