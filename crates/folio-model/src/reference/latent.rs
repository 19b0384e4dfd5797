//! Latent attention in its absorbed form.

use super::{ReferenceBackend, Result, checks, dot, rms_norm, rotate, rows_of};
use crate::backend::Batch;
use crate::program::{LatentSpec, MatrixId};

/// Neighbours that are rotated together come to lie `i` and `i + half`.
fn apart(x: &[f32], spec: &LatentSpec) -> Vec<f32> {
    match spec.neighbours {
        true => x.iter().step_by(2).chain(x.iter().skip(1).step_by(2)).copied().collect(),
        false => x.to_vec(),
    }
}

impl ReferenceBackend {
    pub(super) fn head_linear(&mut self, x: usize, weight: MatrixId, heads: usize, out: usize) {
        let [width, out_width] = [x, out].map(|buf| self.program.buffers[buf]);
        let rows = self.buffers[x].len() / width;
        let mut outputs = std::mem::take(&mut self.buffers[out]);
        outputs.resize(rows * out_width, 0.0);
        let matrix = self.matrix(weight);
        let each = matrix.rows / heads;
        for (x, out) in self.buffers[x].chunks(width).zip(outputs.chunks_mut(out_width)) {
            let x = x.chunks(width / heads);
            for (head, (x, out)) in x.zip(out.chunks_mut(out_width / heads)).enumerate() {
                for (row, out) in out.iter_mut().take(each).enumerate() {
                    *out = dot(matrix.row(head * each + row), &x[..matrix.cols]) as f32;
                }
            }
        }
        self.buffers[out] = outputs;
    }

    pub(super) fn write_latent(
        &mut self,
        [q, latent, queries]: [usize; 3],
        spec: usize,
        batch: &Batch,
    ) -> Result<()> {
        let spec = self.program.latent[spec];
        let rope = self.program.ropes[spec.rope.0 as usize].clone();
        let norm = self.vector(spec.norm).to_vec();
        let (group, heads) = (spec.group as usize, spec.heads);
        let cache = self.caches.get_mut(group).ok_or_else(checks::no_cache)?;
        for span in &batch.spans {
            for (row, position) in rows_of(span) {
                let rotated = |x: &[f32]| {
                    let mut x = apart(x, &spec);
                    rotate(&mut x, &rope, batch.axes(row as u32, position as u32));
                    x
                };
                let own = &self.buffers[latent][row * spec.key_dim()..][..spec.key_dim()];
                let (own, last) = own.split_at(spec.rank);
                let mut kept = rms_norm(own, &norm, spec.norm_eps);
                kept.extend(rotated(last));
                let block = self.tables[&(span.slot, group)][position / cache.block_tokens] as usize;
                cache.write_latent(spec.layer as usize, block, position % cache.block_tokens, &kept);
                for head in row * heads..(row + 1) * heads {
                    let from = (head + 1) * spec.query_dim();
                    let rotated = rotated(&self.buffers[q][from - spec.rope_dim..from]);
                    let to = (head + 1) * spec.key_dim();
                    self.buffers[queries][to - spec.rope_dim..to].copy_from_slice(&rotated);
                }
            }
        }
        Ok(())
    }

    pub(super) fn latent_attention(
        &mut self,
        queries: usize,
        spec: usize,
        out: usize,
        batch: &Batch,
    ) -> Result<()> {
        let spec = self.program.latent[spec];
        let LatentSpec { heads, rank, scale, .. } = spec;
        let group = spec.group as usize;
        let cache = self.caches.get(group).ok_or_else(checks::no_cache)?;
        let mut mixed = Vec::with_capacity(batch.tokens.len() * heads * rank);
        for span in &batch.spans {
            let table = &self.tables[&(span.slot, group)];
            let key = |position: usize| {
                let block = table[position / cache.block_tokens] as usize;
                cache.key((spec.layer as usize, block, position % cache.block_tokens, 0))
            };
            for (row, position) in rows_of(span) {
                let queries = &self.buffers[queries][row * heads * spec.key_dim()..];
                for query in queries.chunks(spec.key_dim()).take(heads) {
                    let scores: Vec<f64> =
                        (0..=position).map(|at| dot(query, key(at)) * f64::from(scale)).collect();
                    let max = scores.iter().fold(f64::NEG_INFINITY, |max, score| max.max(*score));
                    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    let mut values = vec![0.0; rank];
                    for (at, weight) in weights.iter().enumerate() {
                        let latent = key(at).iter().take(rank);
                        values.iter_mut().zip(latent).for_each(|(sum, x)| *sum += weight * f64::from(*x));
                    }
                    mixed.extend(values.into_iter().map(|value| (value / sum) as f32));
                }
            }
        }
        self.buffers[out] = mixed;
        Ok(())
    }
}
