//! What the engine's time passes with, and what its steps compute: figures that only grow.
//!
//! Owns: the kinds of time, and how a step's time is divided over its rows. Must never: read a clock, or grow. A step costs a few additions
//! here, and one for each of its sequences.
//!
//! Every microsecond belongs to one [`Activity`], so their sum is the time that has passed. A step's is from the end of what was before it
//! to its commit: what the scheduler does between two steps is part of the later one.
//!
//! A step's time is divided over the sequences that it computes, in proportion to their rows. A row counts `each`, and `deep` for every
//! position that it sees: what the engine has measured them to take (`scheduler/costs`). What falls to rows that nobody wants any more, and
//! all of a step that failed, is nobody's ([`Work::unattributed_us`]).

use std::ops::{Add, Sub};

use crate::plan::StepPlan;
use crate::request::Micros;

/// What time passes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// A step of prompts alone (or of what is computed again).
    Prefill,
    /// A step of sequences that compute one token each, and drafts.
    Decode,
    /// A step of both.
    Mixed,
    /// Somebody is there and nothing can be computed: see [`crate::WaitingFor`].
    Waiting,
    /// Nobody is there.
    Idle,
}

impl Activity {
    pub const ALL: [Self; 5] = [Self::Prefill, Self::Decode, Self::Mixed, Self::Waiting, Self::Idle];
    /// Those that are steps.
    pub const STEPS: usize = 3;

    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Mixed => "mixed",
            Self::Waiting => "waiting",
            Self::Idle => "idle",
        }
    }
}

/// What steps of one kind computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    pub steps: u64,
    pub sequences: u64,
    /// Tokens of prompts, and of sequences that compute one token each, with drafts.
    pub prompt_rows: u64,
    pub decode_rows: u64,
    /// Positions whose KV a step reads at least once: of each sequence up to its last row.
    pub kv_positions: u64,
    /// Pairs of a row and a position that it sees.
    pub attention: u64,
    /// Rows of which logits are wanted.
    pub logit_rows: u64,
}

impl StepWork {
    /// Of one step.
    pub fn of(plan: &StepPlan) -> Self {
        let mut work = Self { steps: 1, ..Self::default() };
        for entry in &plan.sequences {
            work.count(entry.first_position, entry.tokens.len() as u32, entry.decodes());
            work.logit_rows += entry.samples.len() as u64;
        }
        work
    }

    pub fn rows(&self) -> u64 {
        self.prompt_rows + self.decode_rows
    }

    pub fn add(&mut self, other: &Self) {
        *self = self.zip(other, u64::add);
    }

    /// What was computed since `before`.
    pub fn since(&self, before: &Self) -> Self {
        self.zip(before, u64::sub)
    }

    fn zip(&self, other: &Self, of: fn(u64, u64) -> u64) -> Self {
        Self {
            steps: of(self.steps, other.steps),
            sequences: of(self.sequences, other.sequences),
            prompt_rows: of(self.prompt_rows, other.prompt_rows),
            decode_rows: of(self.decode_rows, other.decode_rows),
            kv_positions: of(self.kv_positions, other.kv_positions),
            attention: of(self.attention, other.attention),
            logit_rows: of(self.logit_rows, other.logit_rows),
        }
    }

    /// Of one step.
    pub(crate) fn activity(&self) -> Activity {
        match (self.prompt_rows, self.decode_rows) {
            (_, 0) => Activity::Prefill,
            (0, _) => Activity::Decode,
            _ => Activity::Mixed,
        }
    }

    /// A sequence of one step, whose rows begin at `first`.
    pub(crate) fn count(&mut self, first: u32, rows: u32, decodes: bool) {
        self.sequences += 1;
        *if decodes { &mut self.decode_rows } else { &mut self.prompt_rows } += u64::from(rows);
        self.kv_positions += u64::from(first + rows);
        self.attention += seen(first, rows);
    }
}

/// Pairs of one of `rows` rows from `first` on and a position that it sees.
pub(crate) fn seen(first: u32, rows: u32) -> u64 {
    let (first, rows) = (u64::from(first), u64::from(rows));
    rows * first + rows * (rows + 1) / 2
}

/// See the module documentation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Microseconds, in the order of [`Activity::ALL`].
    us: [u64; Activity::ALL.len()],
    /// Up to when they are counted, and what goes on since then. `None`: a step, which is counted when it is committed.
    at: Micros,
    since: Option<Activity>,
    /// In the order of [`Activity::ALL`].
    pub steps: [StepWork; Activity::STEPS],
    /// Of the steps' time, what falls to no sequence.
    pub unattributed_us: f64,
}

impl Work {
    /// Before anything came.
    pub(crate) fn idle() -> Self {
        Self { since: Some(Activity::Idle), ..Self::default() }
    }

    pub fn us(&self, activity: Activity) -> u64 {
        self.us[activity as usize]
    }

    /// All that is counted.
    pub fn total_us(&self) -> u64 {
        self.us.iter().sum()
    }

    /// The same at a later time, nothing having changed since.
    pub fn at(mut self, now: Micros) -> Self {
        self.pass(now);
        self
    }

    /// Time goes on without a step, until one is begun.
    pub(crate) fn pass(&mut self, now: Micros) {
        if let Some(activity) = self.since {
            self.spend(activity, now);
        }
    }

    /// What goes on from here.
    pub(crate) fn begin(&mut self, since: Option<Activity>) {
        self.since = since;
    }

    /// A step ended that computed `step`. Microseconds that it took.
    pub(crate) fn stepped(&mut self, step: &StepWork, now: Micros) -> u64 {
        let activity = step.activity();
        self.steps[activity as usize].add(step);
        self.spend(activity, now)
    }

    fn spend(&mut self, activity: Activity, now: Micros) -> u64 {
        let us = now.0.saturating_sub(self.at.0);
        self.us[activity as usize] += us;
        self.at = self.at.max(now);
        us
    }
}

/// How one step's time is divided.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Division {
    /// Microseconds for a row, and for each position that it sees.
    each: f64,
    deep: f64,
}

impl Division {
    /// Of a step that took `us`. `weights`: of a row, and of a position that it sees; in any unit.
    pub fn new(step: &StepWork, us: u64, weights: (f64, f64)) -> Self {
        let (each, deep) = if weights.0 + weights.1 > 0.0 { weights } else { (1.0, 0.0) };
        let unit =
            us as f64 / (each * step.rows() as f64 + deep * step.attention as f64).max(f64::MIN_POSITIVE);
        Self { each: each * unit, deep: deep * unit }
    }

    /// Microseconds that fall to these rows of it.
    pub fn of(&self, first: u32, rows: u32) -> f64 {
        self.each * f64::from(rows) + self.deep * seen(first, rows) as f64
    }

    /// Of that, what falls to so many positions that all of these rows see.
    pub fn over(&self, positions: u32, rows: u32) -> f64 {
        self.deep * f64::from(rows) * f64::from(positions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steps_time_is_divided_without_a_rest() {
        let mut step = StepWork { steps: 1, ..StepWork::default() };
        let parts = [(0, 64, false), (4000, 1, true), (128, 32, false), (9, 3, true)];
        parts.iter().for_each(|(first, rows, decodes)| step.count(*first, *rows, *decodes));
        assert_eq!((step.prompt_rows, step.decode_rows, step.kv_positions), (96, 4, 64 + 4001 + 160 + 12));
        for weights in [(0.0, 0.0), (100.0, 0.1), (0.0, 2.0)] {
            let division = Division::new(&step, 12_345, weights);
            let sum: f64 = parts.iter().map(|(first, rows, _)| division.of(*first, *rows)).sum();
            assert!((sum - 12_345.0).abs() < 1e-6, "{weights:?}: {sum}");
        }
        let flat = Division::new(&step, 1000, (0.0, 0.0));
        assert_eq!(flat.of(4000, 1), flat.of(0, 1), "nothing is known of depth");
        let deep = Division::new(&step, 1000, (100.0, 0.1));
        assert!((deep.of(4000, 1) / deep.of(0, 1) - 500.1 / 100.1).abs() < 1e-9);
        assert!((deep.of(4000, 3) - deep.over(4000, 3) - deep.of(0, 3)).abs() < 1e-9);
        assert_eq!(flat.over(4000, 3), 0.0);
    }

    #[test]
    fn every_microsecond_belongs_to_one_kind() {
        let mut work = Work::idle();
        work.pass(Micros(500));
        work.begin(None);
        let decode = StepWork { steps: 1, decode_rows: 4, ..StepWork::default() };
        work.pass(Micros(600));
        assert_eq!(work.stepped(&decode, Micros(700)), 200);
        let both = StepWork { prompt_rows: 9, ..decode };
        assert_eq!(work.stepped(&both, Micros(1000)), 300);
        work.begin(Some(Activity::Waiting));
        assert_eq!(work.total_us(), 1000);
        let later = work.at(Micros(1500));
        assert_eq!(Activity::ALL.map(|activity| later.us(activity)), [0, 200, 300, 500, 500]);
        assert_eq!(later.steps[Activity::Mixed as usize].rows(), 13);
    }
}
