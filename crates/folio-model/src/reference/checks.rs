//! What the reference backend demands of programs and batches. A batch comes from code that may be wrong, and an oracle
//! that reads past a block table would judge with garbage.

use super::{ReferenceBackend, Result};
use crate::backend::{BackendError, Batch, GroupKind, HOLE, KvLayout, Span, TensorView};
use crate::program::{
    AttentionSpec, Buf, DeltaSpec, ExpertsSpec, LatentSpec, MatrixId, Op, Program, StatePlace,
    StateSpaceSpec, VectorId,
};

pub fn no_cache() -> BackendError {
    BackendError::Batch("no KV cache was allocated".to_owned())
}

/// Groups that this backend can hold, a number of blocks for each, and a place for every layer.
pub fn layout(layout: &KvLayout, blocks: &[usize], program: &Program) -> Result<()> {
    let fits = |spec: &AttentionSpec| {
        layout.groups.get(spec.group as usize).is_some_and(|group| {
            group.kind.holds(spec.window)
                && (spec.layer as usize) < group.layers()
                && (group.kv_heads, group.head_dim) == (spec.kv_heads, spec.head_dim)
        })
    };
    if let Some(spec) = program.attention.iter().find(|spec| !fits(spec)) {
        return Err(BackendError::Device(format!("{spec:?} does not fit its cache group")));
    }
    let latent = |spec: &LatentSpec| {
        layout.groups.get(spec.group as usize).is_some_and(|group| {
            group.kind == GroupKind::Latent { rank: spec.rank as u32 }
                && (group.kv_heads, group.head_dim) == (1, spec.key_dim())
                && (spec.layer as usize) < group.layers()
        })
    };
    if let Some(spec) = program.latent.iter().find(|spec| !latent(spec)) {
        return Err(BackendError::Device(format!("{spec:?} does not fit its cache group")));
    }
    let kept = |(place, values): (StatePlace, usize)| {
        layout.groups.get(place.group as usize).is_some_and(|group| {
            (place.layer as usize) < group.layers()
                && group.state_values().is_some_and(|all| place.offset + values <= all)
        })
    };
    if let Some(state) = program.states().find(|state| !kept(*state)) {
        return Err(BackendError::Device(format!("{state:?} does not fit its cache group")));
    }
    let refusals = layout
        .groups
        .iter()
        .flat_map(|group| group.formats.iter().filter_map(|format| format.refusal(group.head_dim)));
    if let Some(reason) = { refusals }.next() {
        return Err(BackendError::Device(reason));
    }
    match blocks.len() == layout.groups.len() {
        true => Ok(()),
        false => Err(BackendError::Device(format!(
            "{} cache groups and numbers of blocks for {}",
            layout.groups.len(),
            blocks.len()
        ))),
    }
}

pub fn matrix_shape(name: &str, parts: &[TensorView<'_>]) -> Result<(usize, usize)> {
    let shape = |view: &TensorView<'_>, reason: &str| BackendError::Shape {
        name: name.to_owned(),
        shape: view.shape.to_vec(),
        reason: reason.to_owned(),
    };
    let mut size: Option<(usize, usize)> = None;
    for part in parts {
        let [part_rows, part_cols] = *part.shape else {
            return Err(shape(part, "a matrix has two dimensions"));
        };
        if !part.order_fits() || part.order != parts[0].order {
            return Err(shape(
                part,
                "the order of its columns is no permutation, or another than that of the first part",
            ));
        }
        if part.encoding.bytes(part_cols).and_then(|row| row.checked_mul(part_rows)) != Some(part.bytes.len())
        {
            return Err(shape(part, "its bytes do not match"));
        }
        size = match size {
            None => Some((part_rows, part_cols)),
            Some((rows, cols)) if cols == part_cols => Some((rows + part_rows, cols)),
            Some(_) => return Err(shape(part, "stacked parts differ in columns")),
        };
    }
    size.ok_or(BackendError::Shape {
        name: name.to_owned(),
        shape: Vec::new(),
        reason: "no parts".to_owned(),
    })
}

pub fn no_order(name: &str, parts: &[TensorView<'_>]) -> Result<()> {
    match parts.iter().find(|part| part.order.is_some()) {
        None => Ok(()),
        Some(part) => Err(BackendError::Shape {
            name: name.to_owned(),
            shape: part.shape.to_vec(),
            reason: "a vector has no order of columns".to_owned(),
        }),
    }
}

impl ReferenceBackend {
    /// Every operation's weights and buffers must fit together, so that `forward` cannot go wrong half-way.
    pub(super) fn check_program(&self) -> Result<()> {
        for op in &self.program.body {
            let fits = match *op {
                Op::Embed { table, out } => self.cols(table) == self.width(out.0),
                Op::RmsNorm { x, weight, out, .. } => {
                    self.width(x.0) == self.length(weight) && self.width(out.0) == self.length(weight)
                }
                Op::Linear { x, weight, bias, out, .. } => {
                    self.cols(weight) == self.width(x.0)
                        && self.rows(weight) == self.width(out.0)
                        && bias.is_none_or(|bias| self.length(bias) == self.rows(weight))
                }
                Op::Scale { x, .. } => self.width(x.0).is_some(),
                Op::Input { out } | Op::Merge { out } => self.width(out.0).is_some(),
                Op::Place { x, out, first } => {
                    x != out
                        && self.width(x.0).zip(self.width(out.0)).is_some_and(|(x, out)| first + x <= out)
                }
                Op::Copy { x, out } => x != out && self.width(x.0) == self.width(out.0),
                Op::AddRmsNorm { x, weight, out, times, .. } => {
                    x != out
                        && times.is_none_or(|times| self.length(times) == Some(1))
                        && self.width(x.0) == self.length(weight)
                        && self.width(out.0) == self.length(weight)
                }
                Op::GatedLinear { x, weight, bias, activation, out } => {
                    self.cols(weight) == self.width(x.0)
                        && self.rows(weight) == self.width(out.0).map(|width| activation.inputs() * width)
                        && bias.is_none_or(|bias| self.length(bias) == self.rows(weight))
                }
                Op::Experts { x, logits, spec, out, .. } => {
                    let spec = self.program.experts.get(spec);
                    x != out
                        && logits != out
                        && spec.is_some_and(|spec| self.experts_fit(spec, x, logits, out))
                }
                Op::Convolve { x, spec } => self.program.convolutions.get(spec).is_some_and(|spec| {
                    spec.taps > 1
                        && self.width(x.0) == Some(spec.channels)
                        && self.length(spec.weight) == Some(spec.taps * spec.channels)
                        && spec.bias.is_none_or(|bias| self.length(bias) == Some(spec.channels))
                }),
                Op::DeltaRule { qkv, gates, spec, out } => {
                    let spec = self.program.delta.get(spec);
                    qkv != gates
                        && out != qkv
                        && out != gates
                        && spec.is_some_and(|spec| self.delta_fits(spec, qkv, gates, out))
                }
                Op::GatedRmsNorm { x, gate, weight, .. } => {
                    let heads = self.width(x.0).zip(self.length(weight));
                    x != gate
                        && heads.is_some_and(|(width, head)| head > 0 && width.is_multiple_of(head))
                        && self.width(gate.0) == self.width(x.0)
                }
                Op::SigmoidGate { x, gate } => {
                    let widths = self.width(x.0).zip(self.width(gate.0));
                    x != gate && widths.is_some_and(|(x, gate)| gate > 0 && x.is_multiple_of(gate))
                }
                Op::StateSpace { xbc, steps, spec, out } => {
                    let spec = self.program.state_spaces.get(spec);
                    xbc != steps
                        && out != xbc
                        && out != steps
                        && spec.is_some_and(|spec| self.state_space_fits(spec, xbc, steps, out))
                }
                Op::Multiply { x, by: other } | Op::SiluGate { x, gate: other } => {
                    x != other && self.width(x.0) == self.width(other.0)
                }
                Op::TopGate { x, logits, out } => {
                    out != logits
                        && self.width(logits.0).is_some_and(|count| count > 0)
                        && self.width(x.0) == self.width(out.0)
                }
                Op::Add { x, out } => {
                    x != out && self.width(x.0).is_some() && self.width(x.0) == self.width(out.0)
                }
                Op::Gate { x, by, first, .. } => {
                    let widths = self.width(x.0).zip(self.width(by.0));
                    x != by && widths.is_some_and(|(x, by)| first + x <= by)
                }
                Op::Center { x, out } => self.width(x.0) == self.width(out.0),
                Op::NormPart { x, first, weight, parts, .. } => {
                    let sizes = self.width(x.0).zip(self.length(weight));
                    let whole = |part: usize| part > 0 && parts > 0 && part.is_multiple_of(parts);
                    sizes.is_some_and(|(width, part)| whole(part) && first + part <= width)
                }
                Op::XIelu { x, weight } => self.width(x.0).is_some() && self.length(weight) == Some(4),
                Op::HeadLinear { x, weight, heads, out } => {
                    let of = |size: Option<usize>| {
                        size.filter(|size| heads > 0 && size.is_multiple_of(heads)).map(|size| size / heads)
                    };
                    let sizes = of(self.width(x.0)).zip(of(self.width(out.0)));
                    let matrix = of(self.rows(weight)).zip(self.cols(weight));
                    let fits = |((x, out), (rows, cols))| cols <= x && rows <= out;
                    x != out && sizes.zip(matrix).is_some_and(fits)
                }
                Op::WriteLatent { q, latent, spec, queries } => {
                    let spec = self.program.latent.get(spec);
                    q != latent
                        && queries != q
                        && queries != latent
                        && spec.is_some_and(|spec| self.latents_fit(spec, q, latent, queries))
                }
                Op::LatentAttention { queries, spec, out } => {
                    self.program.latent.get(spec).is_some_and(|spec| {
                        queries != out
                            && self.width(queries.0) == Some(spec.heads * spec.key_dim())
                            && self.width(out.0) == Some(spec.heads * spec.rank)
                    })
                }
                Op::WriteKv { qkv, spec } => self.program.attention.get(spec).is_some_and(|spec| {
                    self.width(qkv.0) == Some(spec.row_width())
                        && [spec.q_norm, spec.k_norm, spec.v_norm]
                            .iter()
                            .flatten()
                            .all(|norm| self.length(*norm) == Some(spec.head_dim))
                        && spec.rope.is_none_or(|rope| {
                            let rope = self.program.ropes.get(rope.0 as usize);
                            rope.is_some_and(|rope| 2 * rope.inv_freq.len() <= spec.head_dim)
                        })
                }),
                Op::Attention { qkv, spec, out } => self.program.attention.get(spec).is_some_and(|spec| {
                    self.width(qkv.0) == Some(spec.row_width())
                        && self.width(out.0) == Some(spec.heads * spec.head_dim)
                        && spec.heads.is_multiple_of(spec.kv_heads)
                        && spec.sinks.is_none_or(|sinks| self.length(sinks) == Some(spec.heads))
                        && spec.window != Some(0)
                        && spec.temper.is_none_or(|temper| temper.every > 0)
                }),
            };
            if !fits {
                return Err(BackendError::Batch(format!(
                    "operation {op:?} does not fit its weights or buffers"
                )));
            }
        }
        let head = &self.program.head;
        let fits = self.width(head.x.0) == self.length(head.norm)
            && self.cols(head.matrix) == self.length(head.norm)
            && self.rows(head.matrix) == Some(head.vocab);
        if !fits {
            return Err(BackendError::Batch("the head does not fit its weights".to_owned()));
        }
        match self.program.features.is_none_or(|features| self.width(features.0).is_some()) {
            true => Ok(()),
            false => Err(BackendError::Batch("the features are in no buffer".to_owned())),
        }
    }

    fn experts_fit(&self, spec: &ExpertsSpec, x: Buf, logits: Buf, out: Buf) -> bool {
        let rows = |width: Option<usize>| width.and_then(|width| width.checked_mul(spec.count));
        let fits = |bias: Option<VectorId>, of: MatrixId| {
            bias.is_none_or(|bias| self.length(bias) == self.rows(of) && self.length(bias).is_some())
        };
        (1..=spec.count).contains(&spec.chosen)
            && spec.inner > 0
            && self.width(logits.0) == Some(spec.count)
            && self.cols(spec.gate_up) == self.width(x.0)
            && self.rows(spec.gate_up) == rows(spec.inner.checked_mul(spec.activation.inputs()))
            && self.cols(spec.down) == Some(spec.inner)
            && self.rows(spec.down) == rows(self.width(out.0))
            && fits(spec.gate_up_bias, spec.gate_up)
            && fits(spec.down_bias, spec.down)
            && spec.choice_bias.is_none_or(|bias| self.length(bias) == Some(spec.count))
            && spec.scales.is_none_or(|scales| self.length(scales) == Some(spec.count))
            && spec.groups.is_none_or(|groups| {
                let each = spec.count / groups.count.max(1);
                groups.count * each == spec.count
                    && groups.kept <= groups.count
                    && groups.kept * each >= spec.chosen
                    && each > usize::from(groups.by_two)
            })
    }

    fn latents_fit(&self, spec: &LatentSpec, q: Buf, latent: Buf, queries: Buf) -> bool {
        let rope = self.program.ropes.get(spec.rope.0 as usize);
        self.width(q.0) == Some(spec.heads * spec.query_dim())
            && self.width(latent.0) == Some(spec.key_dim())
            && self.width(queries.0) == Some(spec.heads * spec.key_dim())
            && self.length(spec.norm) == Some(spec.rank)
            && rope.is_some_and(|rope| 2 * rope.inv_freq.len() == spec.rope_dim)
    }

    fn state_space_fits(&self, spec: &StateSpaceSpec, xbc: Buf, steps: Buf, out: Buf) -> bool {
        let vectors = [spec.decay, spec.step_bias, spec.skip];
        spec.groups > 0
            && spec.heads.is_multiple_of(spec.groups)
            && self.width(xbc.0) == Some(spec.width())
            && self.width(steps.0) == Some(spec.heads)
            && self.width(out.0) == Some(spec.heads * spec.head_dim)
            && vectors.iter().all(|vector| self.length(*vector) == Some(spec.heads))
    }

    fn delta_fits(&self, spec: &DeltaSpec, qkv: Buf, gates: Buf, out: Buf) -> bool {
        let heads = spec.value_heads;
        spec.key_heads > 0
            && heads.is_multiple_of(spec.key_heads)
            && self.width(qkv.0) == Some(spec.qkv_width())
            && self.width(gates.0) == Some(2 * heads)
            && self.width(out.0) == Some(heads * spec.value_dim)
            && [spec.decay, spec.step_bias].iter().all(|vector| self.length(*vector) == Some(heads))
    }

    fn width(&self, buffer: u32) -> Option<usize> {
        self.program.buffers.get(buffer as usize).copied()
    }

    fn rows(&self, id: MatrixId) -> Option<usize> {
        self.matrices.get(id.0 as usize).map(|matrix| matrix.rows)
    }

    fn cols(&self, id: MatrixId) -> Option<usize> {
        self.matrices.get(id.0 as usize).map(|matrix| matrix.cols)
    }

    fn length(&self, id: VectorId) -> Option<usize> {
        self.vectors.get(id.0 as usize).map(Vec::len)
    }

    pub(super) fn check_batch(&self, batch: &Batch) -> Result<()> {
        let wrong = |reason: String| Err(BackendError::Batch(reason));
        let rows = batch.tokens.len();
        if rows > self.limits.rows || batch.logit_rows.len() > self.limits.logit_rows {
            return wrong(format!(
                "{rows} rows and {} logit rows exceed the limits of {} and {}",
                batch.logit_rows.len(),
                self.limits.rows,
                self.limits.logit_rows
            ));
        }
        let vocabulary = self.program.vocabulary(|table| self.rows(table).unwrap_or(0));
        if let Some(token) = batch.tokens.iter().find(|token| **token as usize >= vocabulary) {
            return wrong(format!("token {token} is outside of the vocabulary of {vocabulary}"));
        }
        let (given, width) = (batch.features.len(), self.program.input_width());
        if given != rows * width || (!batch.feature_rows.is_empty() && self.program.features.is_none()) {
            return wrong(format!(
                "{given} features for {rows} rows that take {width} each, {} rows of features",
                batch.feature_rows.len()
            ));
        }
        let width = self.program.embedding_input().map_or(0, |input| input.width);
        let embeddings = &batch.embeddings;
        let fits = embeddings.iter().all(|of| {
            let [row, rows, first] = [of.first_row, of.rows, of.first].map(|at| at as usize);
            width > 0 && row + rows <= batch.tokens.len() && (first + rows) * width <= of.values.len()
        });
        if !fits {
            return wrong("embeddings are not those of its rows".to_owned());
        }
        if !batch.adapters.is_empty() && batch.adapters.len() != batch.spans.len() {
            return wrong(format!("{} adapters for {} spans", batch.adapters.len(), batch.spans.len()));
        }
        let wanted =
            [("logit", &batch.logit_rows), ("hidden", &batch.hidden_rows), ("feature", &batch.feature_rows)];
        for (what, wanted) in wanted {
            let ascending = wanted.is_sorted_by(|a, b| a < b);
            if !ascending || wanted.last().is_some_and(|row| *row as usize >= rows) {
                return wrong(format!("{what} rows {wanted:?} are not ascending rows of a batch of {rows}"));
            }
        }
        let mut next_row = 0;
        for span in &batch.spans {
            self.check_span(span, next_row)?;
            next_row += span.rows;
        }
        if next_row as usize != rows {
            return wrong(format!("spans cover {next_row} of {rows} rows"));
        }
        if self.caches.is_empty() {
            return Err(no_cache());
        }
        for copy in &batch.copies {
            let inside = self.caches.get(copy.group as usize).is_some_and(|cache| {
                (copy.from.max(copy.to) as usize) < cache.blocks && copy.tokens as usize <= cache.block_tokens
            });
            if !inside {
                return wrong(format!("copy {copy:?} is outside of the cache"));
            }
        }
        Ok(())
    }

    /// Takes over what changed in block tables.
    pub(super) fn edit_tables(&mut self, batch: &Batch) -> Result<()> {
        for edit in &batch.edits {
            let wrong = |reason: &str| Err(BackendError::Batch(format!("{edit:?}: {reason}")));
            let (Some(new), true) =
                (batch.blocks.get(edit.range()), (edit.group as usize) < self.caches.len())
            else {
                return wrong("it is outside of the batch or of the cache");
            };
            let table = self.tables.entry((edit.slot, edit.group as usize)).or_default();
            let mut edited: Vec<u32> = table.iter().copied().take(edit.start as usize).collect();
            if edited.len() < edit.start as usize {
                return wrong("it leaves a gap in its block table");
            }
            edited.extend(new);
            edited.extend(table.iter().skip(edited.len()).copied().collect::<Vec<_>>());
            if edited.len() < edit.len as usize || (edit.len as usize) < edit.start as usize + new.len() {
                return wrong("it has another number of entries");
            }
            edited.truncate(edit.len as usize);
            *table = edited;
        }
        Ok(())
    }

    fn check_span(&self, span: &Span, next_row: u32) -> Result<()> {
        let wrong = |reason: &str| Err(BackendError::Batch(format!("{span:?}: {reason}")));
        if span.first_row != next_row || span.rows == 0 {
            return wrong("spans must cover the rows in order");
        }
        let end = span.first_position as usize + span.rows as usize;
        if end > self.limits.position {
            return wrong("it reaches past the longest sequence");
        }
        for (group, cache) in self.caches.iter().enumerate() {
            let Some(table) = self.tables.get(&(span.slot, group)) else {
                return wrong("it has no block table");
            };
            let is_state = cache.group.state_values().is_some();
            let needed = match is_state {
                true => span.state_entry(end as u32 - 1, cache.block_tokens as u32) as usize + 1,
                false => end.div_ceil(cache.block_tokens),
            };
            if table.len() < needed {
                return wrong("its block table is too short");
            }
            let read = span.first_position.saturating_sub(1)..end as u32;
            let entries = read.map(|position| span.state_entry(position, cache.block_tokens as u32) as usize);
            if is_state && entries.into_iter().any(|entry| table[entry] == HOLE) {
                return wrong("its states lie in a hole of its block table");
            }
            let hole = |block: u32| group > 0 && block == HOLE;
            if table.iter().any(|block| *block as usize >= cache.blocks && !hole(*block)) {
                return wrong("its block table names a block outside of the cache");
            }
        }
        Ok(())
    }
}
