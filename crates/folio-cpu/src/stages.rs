//! What a program becomes before it runs.
//!
//! Owns: which operations are joined ([`Stage`]), and where row buffers lie ([`BufferLayout`]). Must never: change what an
//! operation computes, or know how.
//!
//! Workers wait for each other after every stage, and at one token a wait costs as much as a small operation. So a product
//! takes in what comes before it, if nobody else needs that (the norm of its input), and what comes after it and looks at
//! whole heads only (norm, rotation and writing of q, k and v). A layer is five stages then, of nine operations.
//!
//! Buffers whose values are never needed at the same time share memory. Invariant: everything that a stage reads or
//! writes has a place of its own while the stage runs, and so has everything that a later stage reads.
//!
//! Cost: once per program, O(operations x buffers).

use folio_model::program::{Buf, MatrixId, Op, Program, VectorId};

use crate::linear::Then;

/// Operations that workers go through without waiting for each other.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    Op(Op),
    Product(Product),
}

/// `then(W . norm(x) + bias)`, perhaps with the operation `WriteKv` of what comes out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Product {
    pub(crate) x: Buf,
    /// Weight and epsilon.
    pub(crate) norm: Option<(VectorId, f32)>,
    pub(crate) weight: MatrixId,
    pub(crate) bias: Option<VectorId>,
    pub(crate) then: Then,
    pub(crate) out: Buf,
    /// Index of the attention whose q, k and v these are.
    pub(crate) heads: Option<usize>,
}

impl Product {
    fn of(op: &Op) -> Option<Self> {
        let (x, weight, bias, then, out) = match *op {
            Op::Linear { x, weight, bias, out, add } => {
                (x, weight, bias, if add { Then::Add } else { Then::Store }, out)
            }
            Op::GatedLinear { x, weight, bias, activation, out } => {
                (x, weight, bias, Then::Gate(activation), out)
            }
            _ => return None,
        };
        Some(Self { x, norm: None, weight, bias, then, out, heads: None })
    }
}

/// Joins the operations of a program, whose buffers and indices were checked. `can_join_heads` says whether a product can
/// finish the heads of an attention.
pub(crate) fn stages(program: &Program, can_join_heads: impl Fn(usize) -> bool) -> Vec<Stage> {
    let body = &program.body;
    let mut stages = Vec::with_capacity(body.len());
    let mut at = 0;
    while at < body.len() {
        let (stage, taken) = joined(program, at, &can_join_heads);
        stages.push(stage);
        at += taken;
    }
    stages
}

/// The stage that begins with operation `at`, and of how many operations it is.
fn joined(program: &Program, at: usize, can_join_heads: &impl Fn(usize) -> bool) -> (Stage, usize) {
    let body = &program.body;
    let mut end = at + 1;
    let mut product = Product::of(&body[at]);
    if let Op::RmsNorm { x, weight, eps, out } = body[at]
        && let Some(next) = body.get(end).and_then(Product::of)
        && (next.x == out && next.out != out && next.out != x && !needed(program, end + 1, out))
    {
        product = Some(Product { x, norm: Some((weight, eps)), ..next });
        end += 1;
    }
    let Some(mut product) = product else { return (Stage::Op(body[at].clone()), 1) };
    if let Some(&Op::WriteKv { qkv, spec }) = body.get(end)
        && (qkv == product.out && product.then == Then::Store && can_join_heads(spec))
    {
        product.heads = Some(spec);
        end += 1;
    }
    (Stage::Product(product), end - at)
}

/// Whether what `buf` holds before operation `from` is read there or later.
fn needed(program: &Program, from: usize, buf: Buf) -> bool {
    for op in &program.body[from..] {
        if op.reads().contains(&Some(buf)) {
            return true;
        }
        if op.writes() == buf {
            return false;
        }
    }
    program.head.x == buf || program.features == Some(buf)
}

impl Stage {
    /// Buffers whose values it needs; among them the one it writes, if it does not replace all of that.
    fn reads(&self) -> [Option<Buf>; 3] {
        match self {
            Stage::Op(op) => op.reads(),
            Stage::Product(product) => {
                [Some(product.x), (product.then == Then::Add).then_some(product.out), None]
            }
        }
    }

    fn writes(&self) -> Buf {
        match self {
            Stage::Op(op) => op.writes(),
            Stage::Product(product) => product.out,
        }
    }
}

/// Where buffers lie in one piece of memory.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct BufferLayout {
    /// First value of each buffer; of those that no stage touches it is 0 and means nothing.
    pub(crate) starts: Vec<usize>,
    /// First value of the logits, which lie over what only the body needs.
    pub(crate) logits: usize,
    /// Values in all.
    pub(crate) values: usize,
}

/// Places buffers of `sizes` values and the logits, each at the lowest place where nothing lies that is needed at the same
/// time; of a few orders the one that takes the least.
pub(crate) fn layout(program: &Program, stages: &[Stage], sizes: &[usize], logits: usize) -> BufferLayout {
    let together = together(program, stages, sizes.len());
    // The logits are one more buffer, the last.
    let sizes = &[sizes, &[logits]].concat()[..];
    let neighbours = |buf: usize| together[buf].iter().filter(|&&b| b).count();
    let mut order: Vec<usize> = (0..sizes.len()).filter(|&buf| together[buf][buf]).collect();
    let mut best: Option<BufferLayout> = None;
    for descending in [true, false] {
        for neighbours_first in [true, false] {
            order.sort_by_key(|&buf| {
                let size = if descending { usize::MAX - sizes[buf] } else { sizes[buf] };
                (if neighbours_first { usize::MAX - neighbours(buf) } else { 0 }, size)
            });
            let layout = placed(&order, sizes, &together);
            if best.as_ref().is_none_or(|best| layout.values < best.values) {
                best = Some(layout);
            }
        }
    }
    let mut best = best.unwrap_or_default();
    best.logits = best.starts.pop().unwrap_or_default();
    best
}

fn placed(order: &[usize], sizes: &[usize], together: &[Vec<bool>]) -> BufferLayout {
    let mut layout = BufferLayout { starts: vec![0; sizes.len()], ..BufferLayout::default() };
    for (done, &buf) in order.iter().enumerate() {
        let others = order[..done].iter().filter(|&&other| together[buf][other]);
        let mut taken: Vec<_> =
            others.map(|&other| layout.starts[other]..layout.starts[other] + sizes[other]).collect();
        taken.sort_unstable_by_key(|range| range.start);
        let mut start = 0;
        for range in taken {
            if start + sizes[buf] > range.start {
                start = start.max(range.end);
            }
        }
        layout.starts[buf] = start;
        layout.values = layout.values.max(start + sizes[buf]);
    }
    layout
}

/// Which buffers are needed at the same time as which; one that is needed at all, as itself. The logits are the last, and
/// needed together with what the head reads and with features, which may be asked for after them.
fn together(program: &Program, stages: &[Stage], buffers: usize) -> Vec<Vec<bool>> {
    let mut together = vec![vec![false; buffers + 1]; buffers + 1];
    let mut live = vec![false; buffers + 1];
    let mut mark = |live: &[bool]| {
        for a in (0..live.len()).filter(|&a| live[a]) {
            for b in (0..live.len()).filter(|&b| live[b]) {
                together[a][b] = true;
            }
        }
    };
    live[program.head.x.0 as usize] = true;
    // Asked for after the logits, as what the head reads may be.
    program.features.iter().for_each(|features| live[features.0 as usize] = true);
    live[buffers] = true;
    mark(&live);
    live[buffers] = false;
    for stage in stages.iter().rev() {
        let written = stage.writes();
        live[written.0 as usize] = true;
        for read in stage.reads().into_iter().flatten() {
            live[read.0 as usize] = true;
        }
        mark(&live);
        if !stage.reads().contains(&Some(written)) {
            live[written.0 as usize] = false;
        }
    }
    together
}

#[cfg(test)]
mod tests {
    use folio_model::program::{Activation, Head};

    use super::*;

    const WIDTHS: [usize; 5] = [4, 4, 6, 4, 9];
    const X: Buf = Buf(0);
    const NORMED: Buf = Buf(1);
    const QKV: Buf = Buf(2);
    const ATTENDED: Buf = Buf(3);
    const INNER: Buf = Buf(4);
    const LOGITS: usize = 7;

    fn norm() -> Op {
        Op::RmsNorm { x: X, weight: VectorId(7), eps: 0.5, out: NORMED }
    }

    fn linear(x: Buf, out: Buf, add: bool) -> Op {
        Op::Linear { x, weight: MatrixId(1), bias: None, out, add }
    }

    fn decoder(layers: usize) -> Program {
        let gated = Op::GatedLinear {
            x: NORMED,
            weight: MatrixId(2),
            bias: Some(VectorId(3)),
            activation: Activation::Silu,
            out: INNER,
        };
        let mut body = vec![Op::Embed { table: MatrixId(0), out: X }];
        for spec in 0..layers {
            body.extend([
                norm(),
                linear(NORMED, QKV, false),
                Op::WriteKv { qkv: QKV, spec },
                Op::Attention { qkv: QKV, spec, out: ATTENDED },
                linear(ATTENDED, X, true),
                norm(),
                gated.clone(),
                linear(INNER, X, true),
            ]);
        }
        Program {
            buffers: WIDTHS.to_vec(),
            body,
            head: Head { x: X, ..Head::default() },
            ..Program::default()
        }
    }

    #[test]
    fn a_layer_is_five_stages() {
        let program = decoder(2);
        let all = stages(&program, |_| true);
        assert_eq!(all.len(), 1 + 2 * 5);
        let Stage::Product(qkv) = &all[6] else { panic!("{:?}", all[6]) };
        assert_eq!((qkv.x, qkv.norm, qkv.heads), (X, Some((VectorId(7), 0.5)), Some(1)));
        let Stage::Product(gated) = &all[9] else { panic!("{:?}", all[9]) };
        assert_eq!((gated.x, gated.then, gated.bias), (X, Then::Gate(Activation::Silu), Some(VectorId(3))));
        assert_eq!(stages(&program, |spec| spec == 1).len(), 1 + 6 + 5, "heads of the first are not joined");
    }

    #[test]
    fn a_norm_that_somebody_else_needs_stays_an_operation() {
        let mut program = decoder(1);
        program.body.truncate(3);
        program.head.x = NORMED;
        assert_eq!(stages(&program, |_| true)[1], Stage::Op(norm()));
        program.head.x = X;
        assert!(matches!(stages(&program, |_| true)[1], Stage::Product(_)));
        program.body.push(linear(NORMED, INNER, false));
        assert_eq!(stages(&program, |_| true)[1], Stage::Op(norm()));
        // Replaced before it is read again.
        program.body.insert(3, norm());
        assert!(matches!(stages(&program, |_| true)[1], Stage::Product(_)));
        // A product that changes what its norm reads would see its own output.
        program.body = vec![norm(), linear(NORMED, X, true)];
        assert_eq!(stages(&program, |_| true)[0], Stage::Op(norm()));
    }

    /// Who wrote each value of the memory last.
    fn run(program: &Program, stages: &[Stage], layout: &BufferLayout) {
        let place = |buf: Buf| {
            let start = layout.starts[buf.0 as usize];
            start..start + program.buffers[buf.0 as usize]
        };
        let mut memory = vec![None; layout.values];
        for stage in stages {
            for read in stage.reads().into_iter().flatten() {
                assert!(
                    memory[place(read)].iter().all(|held| *held == Some(read)),
                    "{stage:?} reads {read:?}"
                );
            }
            let written = stage.writes();
            for read in stage.reads().into_iter().flatten().filter(|read| *read != written) {
                let (read, written) = (place(read), place(written));
                assert!(
                    read.end <= written.start || written.end <= read.start,
                    "{stage:?} writes what it reads"
                );
            }
            memory[place(written)].fill(Some(written));
        }
        memory[layout.logits..layout.logits + LOGITS].fill(None);
        assert!(memory[place(program.head.x)].iter().all(|held| *held == Some(program.head.x)));
    }

    #[test]
    fn buffers_share_memory_and_none_is_overwritten_while_it_is_needed() {
        for layers in [1, 3] {
            let program = decoder(layers);
            for join in [true, false] {
                let stages = stages(&program, |_| join);
                let layout = layout(&program, &stages, &program.buffers, LOGITS);
                run(&program, &stages, &layout);
                assert_eq!(layout.values, 4 + 6 + 4, "x, and qkv with attended; the rest lies over those");
            }
            let alone: Vec<Stage> = program.body.iter().cloned().map(Stage::Op).collect();
            let layout = layout(&program, &alone, &program.buffers, LOGITS);
            run(&program, &alone, &layout);
            assert_eq!(layout.values, 4 + 4 + 9, "normed and inner are needed together");
        }
        assert_eq!(layout(&Program::default(), &[], &[], 0), BufferLayout::default());
    }
}
