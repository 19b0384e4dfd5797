//! How long a step takes: measured, or as the machine's limits allow.
//!
//! Owns: the curve over rows, context and sequences. Must never: measure. Two forms:
//!
//! - *Measured* ([`Measured`]): a model's own steps on this machine, as `folio doctor MODEL --write-profile` took them, one kind at a time. Time
//!   is a line between the numbers of rows that were measured, which never falls, plus a slope for each pair of a row and a position that it
//!   sees, one for each position that is read, and one for each sequence: all of it least squares of relative errors with nothing below zero
//!   ([`fit`]).
//! - *Limits* ([`Limits`]): the larger of bytes over bandwidth and operations over rate, each at a share of what the machine can do. What a
//!   step costs besides (launches, barriers, sampling) is in the share.
//!
//! What was not measured is told as a range: two curves.

use folio_engine::StepWork;
use folio_server::why::{Rates, StepShape};
use folio_sim::StepTime;
use serde::{Deserialize, Serialize};

use crate::bench::limits::Costs;

/// Of steps of one kind: their mean, and how long one took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepSample {
    pub rows: f64,
    pub sequences: f64,
    pub logit_rows: f64,
    pub kv_positions: f64,
    pub attention: f64,
    pub us: f64,
}

impl StepSample {
    /// Of at least one step that took `us` in all.
    pub fn mean(work: &StepWork, us: f64) -> Self {
        let StepShape { rows, sequences, logit_rows, kv_positions, attention } = StepShape::mean(work);
        Self { rows, sequences, logit_rows, kv_positions, attention, us: us / work.steps as f64 }
    }

    fn shape(&self) -> StepShape {
        let Self { rows, sequences, logit_rows, kv_positions, attention, .. } = *self;
        StepShape { rows, sequences, logit_rows, kv_positions, attention }
    }
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// (rows, microseconds), ascending by rows.
    rows: Vec<(f64, f64)>,
    /// Microseconds for a pair of a row and a position, for a position that is read, and for a sequence.
    attention_us: f64,
    position_us: f64,
    sequence_us: f64,
    /// Largest relative error at what was measured.
    pub worst: f64,
}

/// Samples that say as much about a curve as it needs.
const SAMPLES_MIN: usize = 4;
/// Rounds of [`fit`], which ends before where nothing changes any more.
const ROUNDS: usize = 20_000;

impl Measured {
    /// `None`: there are too few samples, or they are not times.
    pub fn of(samples: &[StepSample]) -> Option<Self> {
        let sound = |sample: &&StepSample| {
            let numbers = [sample.rows, sample.sequences, sample.attention, sample.kv_positions, sample.us];
            numbers.iter().all(|number| number.is_finite() && *number > 0.0)
        };
        let samples: Vec<&StepSample> = samples.iter().filter(sound).collect();
        if samples.len() < SAMPLES_MIN {
            return None;
        }
        let knots = knots(samples.iter().map(|sample| sample.rows));
        // Of each sample: the first knot's time, how much of what each knot adds to the one before it is in it, and the slopes.
        let row = |sample: &&StepSample| {
            let mut row = vec![0.0; knots.len()];
            for (knot, part) in between(&knots, sample.rows).into_iter().flatten() {
                row[..=knot].iter_mut().for_each(|of| *of += part);
            }
            row.extend([sample.attention, sample.kv_positions, sample.sequences]);
            row
        };
        let (rows, times): (Vec<_>, Vec<_>) = samples.iter().map(|sample| (row(sample), sample.us)).unzip();
        let found = fit(&rows, &times);
        let (added, slopes) = found.split_at(knots.len());
        let sums = added.iter().scan(0.0, |sum, added| {
            *sum += added;
            Some(*sum)
        });
        let mut curve = Self {
            rows: knots.iter().copied().zip(sums).collect(),
            attention_us: slopes[0],
            position_us: slopes[1],
            sequence_us: slopes[2],
            worst: 0.0,
        };
        let error = |sample: &&StepSample| (curve.at(&sample.shape()) / sample.us - 1.0).abs();
        curve.worst = samples.iter().map(error).fold(0.0, f64::max);
        Some(curve)
    }

    fn at(&self, step: &StepShape) -> f64 {
        let knots: Vec<f64> = self.rows.iter().map(|(knot, _)| *knot).collect();
        let parts = between(&knots, step.rows).into_iter().flatten();
        // Behind the last two knots as between them.
        let of_rows: f64 = parts.map(|(knot, part)| part * self.rows[knot].1).sum();
        of_rows
            + self.attention_us * step.attention
            + self.position_us * step.kv_positions
            + self.sequence_us * step.sequences
    }
}

/// Rows at which there are samples, without those that are as good as the one before. A row more than what is computed together may cost as
/// much as several: 65 are not 64.
fn knots(rows: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut rows: Vec<f64> = rows.collect();
    rows.sort_by(f64::total_cmp);
    rows.dedup_by(|next, before| *next < *before * 1.003);
    rows
}

/// The two knots around `rows`, or next to it, and the part of each. Beyond the last it goes on as between the last two.
fn between(knots: &[f64], rows: f64) -> [Option<(usize, f64)>; 2] {
    let last = knots.len() - 1;
    if last == 0 || rows <= knots[0] {
        return [Some((0, 1.0)), None];
    }
    let above = knots.partition_point(|knot| *knot < rows).clamp(1, last);
    let part = (rows - knots[above - 1]) / (knots[above] - knots[above - 1]);
    [Some((above - 1, 1.0 - part)), Some((above, part))]
}

/// What is not below zero and makes the sum of the squares of `rows * x / times - 1` least: by coordinates, in turn.
fn fit(rows: &[Vec<f64>], times: &[f64]) -> Vec<f64> {
    let count = rows[0].len();
    let scaled: Vec<Vec<f64>> =
        rows.iter().zip(times).map(|(row, time)| row.iter().map(|value| value / time).collect()).collect();
    let squares: Vec<f64> = (0..count).map(|at| scaled.iter().map(|row| row[at] * row[at]).sum()).collect();
    let mut x = vec![0.0; count];
    let mut left = vec![1.0; times.len()];
    for _ in 0..ROUNDS {
        let mut moved = 0.0f64;
        for at in 0..count {
            if squares[at] <= 0.0 {
                continue;
            }
            let slope: f64 = scaled.iter().zip(&left).map(|(row, left)| row[at] * left).sum();
            let next = f64::max(x[at] + slope / squares[at], 0.0);
            let by = next - x[at];
            if by != 0.0 {
                left.iter_mut().zip(&scaled).for_each(|(left, row)| *left -= by * row[at]);
                moved = moved.max((by * squares[at].sqrt()).abs());
                x[at] = next;
            }
        }
        if moved < 1e-10 {
            break;
        }
    }
    x
}

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct Limits {
    pub costs: Costs,
    pub rates: Rates,
    /// Of the rates, 0 to 1, that steps reach.
    pub share: f64,
}

impl Limits {
    /// Microseconds at the whole of the rates.
    fn least_us(&self, shape: &StepShape) -> f64 {
        let (demand, rates) = (self.costs.step(shape), &self.rates);
        let reading = demand.bytes / rates.read_bytes_per_s;
        let multiplying =
            2.0 * demand.weights / rates.weight_op_per_s + 2.0 * demand.attention / rates.attention_op_per_s;
        1e6 * reading.max(multiplying)
    }
}

/// How long steps take.
#[derive(Clone, Debug)]
pub enum StepCurve {
    Measured(Measured),
    Limits(Limits),
    /// Measured in one form, and scaled by what the machine's limits say of another.
    Scaled {
        measured: Measured,
        from: Limits,
        to: Limits,
    },
}

impl StepTime for StepCurve {
    fn us(&self, work: &StepWork) -> f64 {
        let shape = StepShape::mean(&StepWork { steps: work.steps.max(1), ..*work });
        match self {
            Self::Measured(curve) => curve.at(&shape),
            Self::Limits(limits) => limits.least_us(&shape) / limits.share,
            Self::Scaled { measured, from, to } => {
                measured.at(&shape) * to.least_us(&shape) / from.least_us(&shape).max(f64::MIN_POSITIVE)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `depth`: positions before each sequence's rows.
    fn sample(rows: f64, sequences: f64, depth: f64, time: impl Fn(&StepShape) -> f64) -> StepSample {
        let each = rows / sequences;
        let attention = rows * (depth + each / 2.0 + 0.5);
        let kv_positions = sequences * (depth + each);
        let shape = StepShape { rows, sequences, logit_rows: sequences, kv_positions, attention };
        StepSample { rows, sequences, logit_rows: sequences, kv_positions, attention, us: time(&shape) }
    }

    /// A weight read that hides 8 rows, then a slope.
    fn true_us(step: &StepShape) -> f64 {
        1000.0
            + 50.0 * (step.rows - 8.0).max(0.0)
            + 0.01 * step.attention
            + 0.02 * step.kv_positions
            + 3.0 * step.sequences
    }

    #[test]
    fn a_curve_is_found_again_from_its_steps() {
        let mut samples = Vec::new();
        for batch in [1.0, 8.0, 32.0] {
            samples.extend([64.0, 1024.0].map(|depth| sample(batch, batch, depth, true_us)));
        }
        samples.extend([8.0, 32.0, 128.0, 512.0].map(|rows| sample(rows, 1.0, 0.0, true_us)));
        // What tells multiplying from reading: a chunk behind much.
        samples.push(sample(128.0, 1.0, 1000.0, true_us));
        let curve = Measured::of(&samples).expect("enough samples");
        assert!(curve.worst < 0.01, "{curve:?}");
        // Held out: other rows, depths and sequences, chunks behind much, and beyond what was measured.
        for (rows, sequences, depth) in [
            (4.0, 4.0, 300.0),
            (20.0, 20.0, 700.0),
            (96.0, 33.0, 200.0),
            (64.0, 1.0, 3000.0),
            (1024.0, 2.0, 100.0),
        ] {
            let held_out = sample(rows, sequences, depth, true_us);
            let us = curve.at(&held_out.shape());
            assert!((us / held_out.us - 1.0).abs() < 0.05, "{rows} rows: {us}, not {}", held_out.us);
        }
    }

    #[test]
    fn noise_never_makes_more_rows_cheaper_and_too_few_samples_no_curve() {
        let noisy =
            |step: &StepShape| true_us(step) * if (step.rows as u32).is_multiple_of(3) { 1.2 } else { 0.9 };
        let samples: Vec<StepSample> =
            (0..9).map(|at| sample(f64::from(1 << at), 1.0, 100.0, noisy)).collect();
        let curve = Measured::of(&samples).expect("enough samples");
        assert!(curve.rows.is_sorted_by(|one, other| one.1 <= other.1), "{curve:?}");
        assert_eq!(Measured::of(&samples[..3]), None);
        let nonsense = StepSample { us: f64::NAN, ..samples[0] };
        assert_eq!(Measured::of(&[nonsense; 9]), None);
    }

    /// One that costs more than its neighbours moves the line by its own part, and not all that are larger.
    #[test]
    fn what_is_slow_by_chance_is_not_the_least_of_what_is_larger() {
        let noisy = |step: &StepShape| true_us(step) * if step.rows == 4.0 { 1.6 } else { 1.0 };
        let samples: Vec<StepSample> =
            (0..9).map(|at| sample(f64::from(1 << at), f64::from(1 << at), 50.0, noisy)).collect();
        let curve = Measured::of(&samples).expect("enough samples");
        let larger = sample(8.0, 8.0, 50.0, true_us);
        let us = curve.at(&larger.shape());
        assert!((us / larger.us - 1.0).abs() < 0.25, "{us}, not {}: {curve:?}", larger.us);
    }
}
