//! What weights, a program and a batch must satisfy before a kernel sees them, on whatever device.
//!
//! Kernels work on raw pointers and check nothing; everything they assume is established here. Must never: be used by the
//! reference backend, which judges those that use it. Cost: once per program, and O(rows + changed entries) per step.

use crate::backend::{
    Axes, BackendError, Batch, DType, GroupKind, KvGroup, KvLayout, PLACEHOLDER, Span, TensorView,
};
use crate::program::{
    AttentionSpec, Buf, DeltaSpec, EmbeddingInput, ExpertGroups, ExpertsSpec, LatentSpec, MatrixId, Op,
    Program, Rope, StateSpaceSpec, VectorId,
};
use crate::quant::Encoding;
use crate::tables::BlockTables;

/// Tokens per block are a multiple of this.
pub const GROUP: usize = 8;

/// The sizes of what was loaded.
pub trait Loaded {
    /// `(rows, columns)`; `None`: it was not loaded.
    fn matrix(&self, id: MatrixId) -> Option<(usize, usize)>;
    /// Values.
    fn vector(&self, id: VectorId) -> Option<usize>;
}

/// An error about a matrix, a vector or an operation.
pub fn shape_error(name: &str, shape: &[usize], reason: impl Into<String>) -> BackendError {
    BackendError::Shape { name: name.to_owned(), shape: shape.to_vec(), reason: reason.into() }
}

/// Parts of a matrix (`dims == 2`) or vector (`dims == 1`): at least one, consistent, as long as they say.
/// `stack`: whether rows of both encodings fit one matrix.
pub fn parts(
    name: &str,
    parts: &[TensorView<'_>],
    dims: usize,
    stack: impl Fn(Encoding, Encoding) -> bool,
) -> Result<(), BackendError> {
    let Some(first) = parts.first() else { return Err(shape_error(name, &[], "it has no parts")) };
    for part in parts {
        if part.shape.len() != dims {
            return Err(shape_error(name, part.shape, format!("{dims} dimensions are expected")));
        }
        let row = part.shape.last().and_then(|&values| part.encoding.bytes(values));
        let rows = if dims == 2 { part.shape[0] } else { 1 };
        if row.and_then(|row| row.checked_mul(rows)) != Some(part.bytes.len()) {
            return Err(shape_error(name, part.shape, format!("there are {} bytes", part.bytes.len())));
        }
        if part.shape.contains(&0) {
            return Err(shape_error(name, part.shape, "a dimension is zero"));
        }
        if dims == 2 && (!stack(part.encoding, first.encoding) || part.shape[1] != first.shape[1]) {
            return Err(shape_error(name, part.shape, "parts differ in type or columns"));
        }
        if !part.order_fits() {
            return Err(shape_error(name, part.shape, "the order of its columns is no permutation of them"));
        }
        if part.order != first.order {
            return Err(shape_error(name, part.shape, "parts differ in the order of their columns"));
        }
    }
    Ok(())
}

/// The element type of a part that is not quantized.
pub fn plain(name: &str, part: &TensorView<'_>) -> Result<DType, BackendError> {
    part.encoding
        .plain()
        .ok_or_else(|| shape_error(name, part.shape, format!("{} is not served here", part.encoding)))
}

/// Checks a program against the loaded weights.
pub struct ProgramCheck<'a, L> {
    pub program: &'a Program,
    pub loaded: &'a L,
}

impl<L: Loaded> ProgramCheck<'_, L> {
    pub fn all(&self) -> Result<(), BackendError> {
        for (i, op) in self.program.body.iter().enumerate() {
            self.op(op).map_err(|reason| shape_error(&format!("operation {i} ({op:?})"), &[], reason))?;
        }
        self.head().map_err(|reason| shape_error("the output head", &[], reason))?;
        if let Some(features) = self.program.features {
            self.width(features).map_err(|reason| shape_error("the features", &[], reason))?;
        }
        if self.program.body.iter().filter(|op| matches!(op, Op::Input { .. })).count() > 1 {
            return Err(shape_error("the features", &[], "rows are given them in two places"));
        }
        if self.program.body.iter().filter(|op| matches!(op, Op::Merge { .. })).count() > 1 {
            return Err(shape_error("the embeddings", &[], "rows are given them in two places"));
        }
        let wrong = |rope: &&Rope| {
            let (axes, pairs) = (rope.axes.len(), rope.inv_freq.len());
            axes > 0 && (axes != pairs || rope.axes.iter().any(|axis| *axis > 2))
        };
        if let Some(rope) = self.program.ropes.iter().find(wrong) {
            return Err(shape_error(
                "a rotary table",
                &[rope.inv_freq.len()],
                "its axes are not one of three each",
            ));
        }
        self.specs().map_err(|reason| shape_error("attention", &[], reason))
    }

    fn width(&self, buf: Buf) -> Result<usize, String> {
        match self.program.buffers.get(buf.0 as usize) {
            Some(&width) if width > 0 => Ok(width),
            _ => Err(format!("buffer {} does not exist or is empty", buf.0)),
        }
    }

    fn matrix(&self, id: MatrixId) -> Result<(usize, usize), String> {
        self.loaded.matrix(id).ok_or(format!("matrix {} was not loaded", id.0))
    }

    fn vector(&self, id: VectorId, expected: usize) -> Result<(), String> {
        match self.loaded.vector(id) {
            Some(len) if len == expected => Ok(()),
            Some(len) => Err(format!("vector {} has {len} values, not {expected}", id.0)),
            None => Err(format!("vector {} was not loaded", id.0)),
        }
    }

    fn spec(&self, spec: usize) -> Result<&AttentionSpec, String> {
        self.program.attention.get(spec).ok_or(format!("attention {spec} does not exist"))
    }

    fn latent_spec(&self, spec: usize) -> Result<&LatentSpec, String> {
        self.program.latent.get(spec).ok_or(format!("latent attention {spec} does not exist"))
    }

    fn op(&self, op: &Op) -> Result<(), String> {
        match *op {
            Op::Embed { table, out } => same("the table's width", self.matrix(table)?.1, self.width(out)?),
            Op::RmsNorm { x, weight, out, .. } => {
                self.vector(weight, self.width(x)?)?;
                same("the output's width", self.width(out)?, self.width(x)?)
            }
            Op::Linear { x, weight, bias, out, .. } => self.product(x, weight, bias, out, 1),
            Op::GatedLinear { x, weight, bias, activation, out } => {
                self.product(x, weight, bias, out, activation.inputs())
            }
            Op::WriteKv { qkv, spec } => {
                same("the qkv width", self.width(qkv)?, self.spec(spec)?.row_width())
            }
            Op::Attention { qkv, spec, out } => {
                let spec = self.spec(spec)?;
                same("the qkv width", self.width(qkv)?, spec.row_width())?;
                if qkv == out {
                    return Err("input and output are one buffer".to_owned());
                }
                same("the output's width", self.width(out)?, spec.heads * spec.head_dim)
            }
            Op::Experts { x, logits, spec, out, .. } => self.experts(x, logits, spec, out),
            Op::Convolve { x, spec } => {
                let spec = self.program.convolutions.get(spec);
                let spec = spec.ok_or_else(|| "the convolution does not exist".to_owned())?;
                same("the input's width", self.width(x)?, spec.channels)?;
                if spec.taps < 2 {
                    return Err(format!("a convolution of {} positions", spec.taps));
                }
                spec.bias.map_or(Ok(()), |bias| self.vector(bias, spec.channels))?;
                self.vector(spec.weight, spec.taps.saturating_mul(spec.channels))
            }
            Op::DeltaRule { qkv, gates, spec, out } => self.delta(qkv, gates, spec, out),
            Op::GatedRmsNorm { x, gate, weight, .. } => {
                let (width, head) = (self.width(x)?, self.loaded.vector(weight).unwrap_or(0));
                if x == gate || head == 0 || !width.is_multiple_of(head) {
                    return Err(format!("{width} values are no heads of {head}"));
                }
                same("the gate's width", self.width(gate)?, width)
            }
            Op::SigmoidGate { x, gate } => {
                let (width, gates) = (self.width(x)?, self.width(gate)?);
                if x == gate || !width.is_multiple_of(gates) {
                    return Err(format!("{gates} gates for {width} values"));
                }
                Ok(())
            }
            Op::StateSpace { xbc, steps, spec, out } => self.state_space(xbc, steps, spec, out),
            Op::Multiply { x, by: other } | Op::SiluGate { x, gate: other } => {
                if x == other {
                    return Err("both factors are one buffer".to_owned());
                }
                same("the factor's width", self.width(other)?, self.width(x)?)
            }
            Op::TopGate { x, logits, out } => {
                if self.width(logits)? == 0 || out == logits {
                    return Err("logits are missing, or are where the output goes".to_owned());
                }
                same("the output's width", self.width(out)?, self.width(x)?)
            }
            Op::Add { x, out } if x == out => Err("input and output are one buffer".to_owned()),
            Op::Add { x, out } => same("the output's width", self.width(out)?, self.width(x)?),
            Op::Gate { x, by, first, .. } => {
                let (width, values) = (self.width(x)?, self.width(by)?);
                match x != by && first.checked_add(width).is_some_and(|end| end <= values) {
                    true => Ok(()),
                    false => {
                        Err(format!("{width} values from {first} on are not those of a row of {values}"))
                    }
                }
            }
            Op::Center { x, out } => same("the output's width", self.width(out)?, self.width(x)?),
            Op::NormPart { x, first, weight, parts, .. } => {
                let (width, part) = (self.width(x)?, self.loaded.vector(weight).unwrap_or(0));
                let whole = part > 0 && parts > 0 && part.is_multiple_of(parts);
                match whole && first.checked_add(part).is_some_and(|end| end <= width) {
                    true => Ok(()),
                    false => Err(format!(
                        "{parts} parts of {part} values from {first} on are not those of a row of {width}"
                    )),
                }
            }
            Op::XIelu { x, weight } => {
                self.width(x)?;
                self.vector(weight, 4)
            }
            Op::HeadLinear { x, weight, heads, out } => {
                let ((rows, cols), widths) = (self.matrix(weight)?, [self.width(x)?, self.width(out)?]);
                if heads == 0 || [rows, widths[0], widths[1]].iter().any(|size| !size.is_multiple_of(heads)) {
                    return Err(format!("{rows} rows, {widths:?} values are not those of {heads} heads"));
                }
                if widths[0] / heads < cols || widths[1] / heads < rows / heads || x == out {
                    return Err(format!("heads of {widths:?} values do not hold [{rows}, {cols}]"));
                }
                Ok(())
            }
            Op::WriteLatent { q, latent, spec, queries } => {
                let spec = self.latent_spec(spec)?;
                same("the queries' width", self.width(q)?, spec.heads * spec.query_dim())?;
                same("the latent's width", self.width(latent)?, spec.key_dim())?;
                same("the absorbed queries' width", self.width(queries)?, spec.heads * spec.key_dim())?;
                match q == latent || q == queries || latent == queries {
                    true => Err("input and output are one buffer".to_owned()),
                    false => self.vector(spec.norm, spec.rank),
                }
            }
            Op::LatentAttention { queries, spec, out } => {
                let spec = self.latent_spec(spec)?;
                same("the absorbed queries' width", self.width(queries)?, spec.heads * spec.key_dim())?;
                if queries == out {
                    return Err("input and output are one buffer".to_owned());
                }
                same("the output's width", self.width(out)?, spec.heads * spec.rank)
            }
            Op::Scale { x, .. } => self.width(x).map(|_| ()),
            Op::Input { out } | Op::Merge { out } => self.width(out).map(|_| ()),
            Op::Place { x, out, first } => {
                if x == out {
                    return Err("input and output are one buffer".to_owned());
                }
                let (end, width) = (first + self.width(x)?, self.width(out)?);
                match end <= width {
                    true => Ok(()),
                    false => Err(format!("values up to {end} of {width} are written")),
                }
            }
            Op::Copy { x, out } => {
                if x == out {
                    return Err("input and output are one buffer".to_owned());
                }
                same("the output's width", self.width(out)?, self.width(x)?)
            }
            Op::AddRmsNorm { x, weight, out, times, .. } => {
                self.vector(weight, self.width(x)?)?;
                times.map_or(Ok(()), |times| self.vector(times, 1))?;
                if x == out {
                    return Err("input and output are one buffer".to_owned());
                }
                same("the output's width", self.width(out)?, self.width(x)?)
            }
        }
    }

    /// A product whose matrix has `times` rows for each value of the output.
    fn product(
        &self,
        x: Buf,
        weight: MatrixId,
        bias: Option<VectorId>,
        out: Buf,
        times: usize,
    ) -> Result<(), String> {
        let (rows, cols) = self.matrix(weight)?;
        same("the input's width", self.width(x)?, cols)?;
        same("the rows of the matrix", rows, times * self.width(out)?)?;
        if x == out {
            return Err("input and output are one buffer".to_owned());
        }
        bias.map_or(Ok(()), |bias| self.vector(bias, rows))
    }

    fn experts(&self, x: Buf, logits: Buf, spec: usize, out: Buf) -> Result<(), String> {
        let spec = self.program.experts.get(spec).ok_or(format!("mixture {spec} does not exist"))?;
        let &ExpertsSpec { count, chosen, inner, gate_up, gate_up_bias, down, down_bias, .. } = spec;
        if !(1..=count).contains(&chosen) || inner == 0 {
            return Err(format!("{chosen} of {count} experts of width {inner} cannot be chosen"));
        }
        if let Some(groups) = spec.groups {
            let ExpertGroups { count: of, kept, by_two } = groups;
            let fits = (1..=ExpertGroups::MOST).contains(&of)
                && count.is_multiple_of(of)
                && (1..=of).contains(&kept);
            if !fits || kept * (count / of) < chosen || (by_two && count / of < 2) {
                return Err(format!("{chosen} of {count} experts cannot be chosen in {groups:?}"));
            }
        }
        for vector in [spec.choice_bias, spec.scales].into_iter().flatten() {
            self.vector(vector, count)?;
        }
        let product = |x, matrix, bias: Option<VectorId>, each: usize| {
            let (rows, cols) = self.matrix(matrix)?;
            same("the columns of the matrix", cols, x)?;
            same("the rows of the matrix", rows, count.saturating_mul(each))?;
            bias.map_or(Ok(()), |bias| self.vector(bias, rows))
        };
        same("the width of the router's logits", self.width(logits)?, count)?;
        product(self.width(x)?, gate_up, gate_up_bias, inner.saturating_mul(spec.activation.inputs()))?;
        product(inner, down, down_bias, self.width(out)?)?;
        if x == out || logits == out {
            return Err("input and output are one buffer".to_owned());
        }
        Ok(())
    }

    fn delta(&self, qkv: Buf, gates: Buf, spec: usize, out: Buf) -> Result<(), String> {
        let spec = self.program.delta.get(spec).ok_or(format!("delta net {spec} does not exist"))?;
        let &DeltaSpec { key_heads, value_heads, key_dim, value_dim, decay, step_bias, .. } = spec;
        let sizes = [key_heads, value_heads, key_dim, value_dim];
        if sizes.contains(&0) || !value_heads.is_multiple_of(key_heads) {
            return Err(format!("{value_heads} value heads cannot share {key_heads} key heads"));
        }
        same("the qkv width", self.width(qkv)?, spec.qkv_width())?;
        same("the gates' width", self.width(gates)?, 2 * value_heads)?;
        same("the output's width", self.width(out)?, value_heads * value_dim)?;
        if qkv == out || gates == out || qkv == gates {
            return Err("input and output are one buffer".to_owned());
        }
        self.vector(decay, value_heads)?;
        self.vector(step_bias, value_heads)
    }

    fn state_space(&self, xbc: Buf, steps: Buf, spec: usize, out: Buf) -> Result<(), String> {
        let spec = self.program.state_spaces.get(spec).ok_or(format!("state space {spec} does not exist"))?;
        let &StateSpaceSpec { heads, head_dim, groups, state_dim, decay, step_bias, skip, .. } = spec;
        if [heads, head_dim, groups, state_dim].contains(&0) || !heads.is_multiple_of(groups) {
            return Err(format!("{heads} heads cannot share {groups} groups"));
        }
        same("the width of x, B and C", self.width(xbc)?, spec.width())?;
        same("the steps' width", self.width(steps)?, heads)?;
        same("the output's width", self.width(out)?, heads * head_dim)?;
        if xbc == out || steps == out || xbc == steps {
            return Err("input and output are one buffer".to_owned());
        }
        [decay, step_bias, skip].into_iter().try_for_each(|vector| self.vector(vector, heads))
    }

    fn head(&self) -> Result<(), String> {
        let head = &self.program.head;
        let (rows, cols) = self.matrix(head.matrix)?;
        if rows != head.vocab || cols != self.width(head.x)? {
            return Err(format!("the matrix is [{rows}, {cols}], the vocabulary {}", head.vocab));
        }
        self.vector(head.norm, cols)
    }

    fn specs(&self) -> Result<(), String> {
        self.latent_specs()?;
        if !self.program.attention.is_empty() && !self.program.latent.is_empty() {
            return Err("some layers have latents and some have not".to_owned());
        }
        for spec in &self.program.attention {
            if spec.kv_heads == 0
                || spec.head_dim == 0
                || spec.heads == 0
                || !spec.heads.is_multiple_of(spec.kv_heads)
            {
                return Err(format!("{} heads cannot share {} KV heads", spec.heads, spec.kv_heads));
            }
            if !spec.head_dim.is_multiple_of(2) {
                return Err(format!("head_dim {} is odd", spec.head_dim));
            }
            if let Some(rope) = spec.rope {
                let rope = self.program.ropes.get(rope.0 as usize).ok_or("a rotary table is missing")?;
                if 2 * rope.inv_freq.len() > spec.head_dim {
                    return Err(format!("{} rotary pairs exceed head_dim", rope.inv_freq.len()));
                }
            }
            for norm in [spec.q_norm, spec.k_norm, spec.v_norm].into_iter().flatten() {
                self.vector(norm, spec.head_dim)?;
            }
            if let Some(sinks) = spec.sinks {
                self.vector(sinks, spec.heads)?;
            }
            if spec.window == Some(0) || spec.temper.is_some_and(|temper| temper.every == 0) {
                return Err("a window of no tokens".to_owned());
            }
        }
        Ok(())
    }
}

impl<L: Loaded> ProgramCheck<'_, L> {
    fn latent_specs(&self) -> Result<(), String> {
        let Some(first) = self.program.latent.first() else { return Ok(()) };
        for spec in &self.program.latent {
            if (spec.heads, spec.rank, spec.rope_dim) != (first.heads, first.rank, first.rope_dim) {
                return Err("layers differ in the sizes of latents".to_owned());
            }
            let &LatentSpec { heads, rank, rope_dim, .. } = spec;
            if heads == 0 || [rank, rope_dim].iter().any(|size| *size == 0 || !size.is_multiple_of(2)) {
                return Err(format!("latents of {rank} and {rope_dim} values for {heads} heads"));
            }
            let rope = self.program.ropes.get(spec.rope.0 as usize).ok_or("a rotary table is missing")?;
            same("the rotated width", 2 * rope.inv_freq.len(), rope_dim)?;
        }
        Ok(())
    }
}

fn same(what: &str, is: usize, expected: usize) -> Result<(), String> {
    if is == expected { Ok(()) } else { Err(format!("{what} is {is}, not {expected}")) }
}

/// A cache layout: possible at all, and what the program's attention needs.
pub fn layout(layout: &KvLayout, blocks: &[usize], program: &Program) -> Result<(), BackendError> {
    if blocks.len() != layout.groups.len() {
        let shape = [layout.groups.len(), blocks.len()];
        return Err(shape_error("the KV cache", &shape, "groups and numbers of blocks differ in number"));
    }
    for (index, group) in layout.groups.iter().enumerate() {
        let shape = [group.layers(), group.kv_heads, group.head_dim, group.block_tokens];
        let fail =
            |reason: String| Err(shape_error(&format!("group {index} of the KV cache"), &shape, reason));
        match group.kind {
            GroupKind::Full | GroupKind::Window { tokens: 1.. } => {}
            GroupKind::Latent { rank } if index == 0 => {
                if group.kv_heads != 1 || rank as usize > group.head_dim {
                    return fail(format!("a latent of {rank} values is not part of one key"));
                }
                if let Some(format) = group.formats.iter().find(|format| format.is_scaled()) {
                    return fail(format!("latents are kept in f32, f16 or bf16, not in {format}"));
                }
            }
            GroupKind::State { values: 1.. } if index > 0 => {}
            kind => return fail(format!("there is no cache of kind {kind:?}")),
        }
        let heads = if group.state_values().is_some() { 3 } else { 1 };
        if shape[heads..].contains(&0) || (index > 0 && shape[0] == 0) {
            return fail("a dimension is zero".to_owned());
        }
        if let Some(reason) = group.formats.iter().find_map(|format| format.refusal(group.head_dim)) {
            return fail(reason);
        }
        if !group.block_tokens.is_multiple_of(GROUP) {
            return fail("tokens per block must be a multiple of 8".to_owned());
        }
        if !group.block_tokens.is_multiple_of(layout.block_tokens()) {
            return fail("tokens per block must be a multiple of those of the first group".to_owned());
        }
    }
    for spec in &program.attention {
        let shape = [spec.group as usize, spec.layer as usize, spec.kv_heads, spec.head_dim];
        let fail = |reason: &str| Err(shape_error("the KV cache", &shape, reason));
        let Some(group) = layout.groups.get(spec.group as usize) else {
            return fail("the model has more cache groups");
        };
        if (spec.kv_heads, spec.head_dim) != (group.kv_heads, group.head_dim) {
            return fail("the model's KV heads or head_dim differ");
        }
        if spec.layer as usize >= group.layers() {
            return fail("the model has more layers");
        }
        if !group.kind.holds(spec.window) {
            return fail("the group releases what the layer still reads");
        }
    }
    for spec in &program.latent {
        let shape = [spec.group as usize, spec.layer as usize, spec.rank, spec.rope_dim];
        let fits = layout.groups.get(spec.group as usize).is_some_and(|group| {
            group.kind == GroupKind::Latent { rank: spec.rank as u32 }
                && group.head_dim == spec.key_dim()
                && (spec.layer as usize) < group.layers()
        });
        if !fits {
            return Err(shape_error(
                "the KV cache",
                &shape,
                "the model's latents do not fit their cache group",
            ));
        }
    }
    for (place, values) in program.states() {
        let shape = [place.group as usize, place.layer as usize, place.offset, values];
        let fail = |reason: &str| Err(shape_error("the state", &shape, reason));
        let group = layout.groups.get(place.group as usize);
        let Some((group, all)) = group.and_then(|group| Some((group, group.state_values()?))) else {
            return fail("the model keeps states in a cache group that has none");
        };
        if place.layer as usize >= group.layers() || place.offset.saturating_add(values) > all {
            return fail("the model keeps more than the cache group has room for");
        }
    }
    Ok(())
}

/// Blocks of a cache group, and tokens of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolSize {
    pub blocks: usize,
    pub block_tokens: usize,
    /// A block holds a state, not positions.
    pub is_state: bool,
}

impl PoolSize {
    /// Pools of so many blocks.
    pub fn of(layout: &KvLayout, blocks: &[usize]) -> Vec<Self> {
        let pools = layout.groups.iter().zip(blocks);
        let size = |(group, &blocks): (&KvGroup, &usize)| {
            let is_state = group.state_values().is_some();
            Self { blocks, block_tokens: group.block_tokens, is_state }
        };
        pools.map(size).collect()
    }
}

/// Blocks that a step wrote, to find blocks written twice in one.
#[derive(Clone, Debug, Default)]
pub struct Written {
    /// Per group and block, the step that last wrote it.
    stamps: Vec<Vec<u32>>,
    step: u32,
}

impl Written {
    /// For pools of these sizes.
    pub fn new(blocks: &[usize]) -> Self {
        Self { stamps: blocks.iter().map(|&blocks| vec![0; blocks]).collect(), step: 0 }
    }

    fn next_step(&mut self) {
        if self.step == u32::MAX {
            self.stamps.iter_mut().for_each(|stamps| stamps.fill(0));
            self.step = 0;
        }
        self.step += 1;
    }
}

/// Limits of a batch.
pub struct BatchCheck<'a> {
    pub max_rows: usize,
    pub max_logit_rows: usize,
    pub max_position: usize,
    /// [`Program::vocabulary`].
    pub vocabulary: usize,
    /// [`Program::input_width`].
    pub input_width: usize,
    /// [`Backend::embedding_input`](crate::backend::Backend::embedding_input).
    pub embeddings: Option<EmbeddingInput>,
    /// The program has features to give.
    pub has_features: bool,
    /// [`Backend::serves_adapters`](crate::backend::Backend::serves_adapters).
    pub serves_adapters: bool,
    /// Rows that the step begun before chooses a token for, which this batch may name; 0 on a device that does not sample.
    pub chosen: usize,
    pub pools: &'a [PoolSize],
    /// Takes over what the batch changes.
    pub tables: &'a mut BlockTables,
    pub written: &'a mut Written,
}

impl BatchCheck<'_> {
    pub fn all(&mut self, batch: &Batch) -> Result<(), BackendError> {
        self.written.next_step();
        self.batch(batch).map_err(BackendError::Batch)
    }

    fn batch(&mut self, batch: &Batch) -> Result<(), String> {
        let rows = batch.tokens.len();
        if rows > self.max_rows {
            return Err(format!("{rows} rows exceed the {} it was sized for", self.max_rows));
        }
        let known = |token: u32| match token & PLACEHOLDER {
            0 => (token as usize) < self.vocabulary,
            _ => ((token & !PLACEHOLDER) as usize) < self.chosen,
        };
        if let Some((row, &token)) = batch.tokens.iter().enumerate().find(|&(_, &token)| !known(token)) {
            if token & PLACEHOLDER != 0 {
                let (named, chosen) = (token & !PLACEHOLDER, self.chosen);
                return Err(format!(
                    "the token of row {row} is that of row {named} of the step before, which chooses {chosen}"
                ));
            }
            return Err(format!(
                "token {token} of row {row} is outside the vocabulary of {}",
                self.vocabulary
            ));
        }
        if batch.logit_rows.len() > self.max_logit_rows {
            return Err(format!("{} rows of logits exceed {}", batch.logit_rows.len(), self.max_logit_rows));
        }
        if batch.features.len() != rows * self.input_width {
            let (given, width) = (batch.features.len(), self.input_width);
            return Err(format!("{given} features for {rows} rows, each of which takes {width}"));
        }
        self.embeddings(batch)?;
        if !batch.feature_rows.is_empty() && !self.has_features {
            return Err("features are wanted, and the program has none".to_owned());
        }
        let (adapters, spans) = (batch.adapters.len(), batch.spans.len());
        if adapters > 0 && (adapters != spans || !self.serves_adapters) {
            let can = if self.serves_adapters { "serves" } else { "does not serve" };
            return Err(format!("{adapters} adapters for {spans} spans of a backend that {can} them"));
        }
        let wanted = [
            ("logits", &batch.logit_rows),
            ("hidden states", &batch.hidden_rows),
            ("features", &batch.feature_rows),
        ];
        for (what, wanted) in wanted {
            if !wanted.is_sorted_by(|a, b| a < b) {
                return Err(format!("rows of {what} are not ascending"));
            }
            if wanted.last().is_some_and(|&row| row as usize >= rows) {
                return Err(format!("a row of {what} does not exist"));
            }
        }
        for copy in &batch.copies {
            let pool = self.pools.get(copy.group as usize).copied().unwrap_or_default();
            if copy.from.max(copy.to) as usize >= pool.blocks || copy.from == copy.to {
                return Err(format!("copy of block {} to {} is impossible", copy.from, copy.to));
            }
            if copy.tokens as usize > pool.block_tokens {
                return Err(format!("{} tokens do not fit a block", copy.tokens));
            }
        }
        self.tables.apply(batch, self.pools)?;
        self.spans(batch)
    }

    /// Embeddings and positions on three axes are of rows that there are, in order, and there are as many.
    fn embeddings(&self, batch: &Batch) -> Result<(), String> {
        let (embeddings, positions) = (&batch.embeddings, &batch.positions);
        if embeddings.is_empty() && positions.is_empty() {
            return Ok(());
        }
        let Some(EmbeddingInput { width, three_axes }) = self.embeddings else {
            return Err("rows have embeddings of their own, and this backend takes none".to_owned());
        };
        if !positions.is_empty() && !three_axes {
            return Err("rows have positions on three axes, and the model has one".to_owned());
        }
        let all = batch.tokens.len();
        let in_order = |what: &str, rows: &mut dyn Iterator<Item = (u32, u32)>| {
            let mut next = 0;
            for (first, rows) in rows {
                let (first, rows) = (first as usize, rows as usize);
                if first < next || rows == 0 || first + rows > all {
                    return Err(format!("{what} of {rows} rows from row {first} on, of {all}"));
                }
                next = first + rows;
            }
            Ok(())
        };
        in_order("embeddings", &mut embeddings.iter().map(|of| (of.first_row, of.rows)))?;
        in_order("positions", &mut positions.iter().map(|of| (of.first_row, of.rows)))?;
        for of in embeddings {
            let (needed, given) = ((of.first as usize + of.rows as usize) * width, of.values.len());
            if given < needed {
                return Err(format!("{given} values of embeddings, {needed} are needed"));
            }
        }
        for of in positions {
            let Axes::Each { first, values } = &of.axes else { continue };
            let needed = *first as usize + of.rows as usize;
            if values.len() < needed {
                return Err(format!("{} positions on three axes, {needed} are needed", values.len()));
            }
        }
        Ok(())
    }

    /// The entries of a block table that a span writes are there, are blocks, and nobody else writes them. Of states, so is that which
    /// it goes on from.
    fn span(&mut self, i: usize, span: &Span, group: usize) -> Result<(), String> {
        let (pool, table) = (self.pools[group], self.tables.table(span.slot, group));
        let (tokens, first) = (pool.block_tokens as u32, span.first_position);
        let end = first + span.rows;
        let entry = |position: u32| match pool.is_state {
            true => span.state_entry(position, tokens),
            false => position / tokens,
        };
        let (start, last) = (entry(first), entry(end - 1));
        if table.len() <= last as usize {
            return Err(format!("the block table of span {i} covers less than {end} positions"));
        }
        let hole = |block: u32| block as usize >= pool.blocks;
        if pool.is_state && first > 0 && hole(table[entry(first - 1) as usize]) {
            return Err(format!("span {i} goes on from a hole of the block table of group {group}"));
        }
        let (stamps, step) = (&mut self.written.stamps[group], self.written.step);
        let mut write = |entry: u32| {
            let block = table[entry as usize];
            let Some(stamp) = stamps.get_mut(block as usize) else {
                return Err(format!("span {i} writes to a hole of the block table of group {group}"));
            };
            if *stamp == step {
                return Err(format!("block {block} is written twice in one step"));
            }
            *stamp = step;
            Ok(())
        };
        // Entries of rows that may be taken back do not follow those of the others.
        match pool.is_state && end > span.tentative_from {
            false => (start..=last).try_for_each(write),
            true => {
                let mut before = None;
                (first..end).map(entry).try_for_each(|entry| match before.replace(entry) {
                    Some(same) if same == entry => Ok(()),
                    _ => write(entry),
                })
            }
        }
    }

    fn spans(&mut self, batch: &Batch) -> Result<(), String> {
        let mut next = 0usize;
        for (i, span) in batch.spans.iter().enumerate() {
            if span.first_row as usize != next || span.rows == 0 {
                return Err(format!("span {i} does not start at row {next} or is empty"));
            }
            next += span.rows as usize;
            let end = span.first_position as usize + span.rows as usize;
            if end > self.max_position {
                return Err(format!("span {i} ends at position {end}, the limit is {}", self.max_position));
            }
            for group in 0..self.pools.len() {
                self.span(i, span, group)?;
            }
        }
        if next != batch.tokens.len() {
            return Err(format!("spans cover {next} rows of {}", batch.tokens.len()));
        }
        Ok(())
    }
}

/// Converts one checkpoint value to f32.
pub fn to_f32(dtype: DType, bytes: &[u8]) -> f32 {
    match dtype {
        DType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        DType::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        DType::BF16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
    }
}
