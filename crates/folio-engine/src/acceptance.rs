//! What became of a sequence's drafts, and when they are looked for again; and of all of a tenant's drafts.
//!
//! Owns: the expectation. Must never: be needed for correctness.
//!
//! Each sequence's expectation follows its own last outcomes, so some are high by chance, and those would be chosen. What such an expectation is
//! worth is learned of a tenant's outcomes ([`Calibration`]): much in text that is said again, where right drafts come in runs, little
//! where they are right at random.

use folio_kv::TenantId;
use rustc_hash::FxHashMap;

/// Of drafts, the share that was what was chosen, as far as that can be expected again.
#[derive(Clone, Copy, Debug)]
struct DraftOutcomes {
    probability: f32,
    count: u8,
}

/// What is expected where nothing is known.
const UNKNOWN: f32 = 0.7;

impl Default for DraftOutcomes {
    fn default() -> Self {
        Self { probability: UNKNOWN, count: 0 }
    }
}

impl DraftOutcomes {
    /// The first few weigh more.
    fn add(&mut self, right: bool) {
        let weight = OUTCOME.max(1.0 / (3.0 + f32::from(self.count)));
        self.count = self.count.saturating_add(1);
        self.probability += weight * (f32::from(u8::from(right)) - self.probability);
    }
}

/// Where drafts come from, as far as it says how often they are right.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DraftSource {
    Text,
    /// Text where the caller predicts the answer.
    Prediction,
    Model,
}

/// Of a sequence's drafts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Acceptance {
    /// By [`DraftSource`].
    outcomes: [DraftOutcomes; 3],
    /// What was expected when the last drafts were decided.
    expected: f32,
    begun: bool,
    /// So many drafts are to be verified, until one is wrong, although they would not pay: nothing is known of them.
    pub on_trial: u32,
    /// Drafts were not worth their rows: none is looked for before this step. Each such pause in a row is twice as long.
    paused_until: u64,
    pauses: u8,
}

/// Drafts of a sequence of which nothing is known that are verified although they would not pay.
pub(crate) const TRIED: u32 = 3;
/// What an outcome weighs at least.
const OUTCOME: f32 = 0.2;
/// Steps of a pause at most, for each row of the step, so that as many are measured whatever the batch; and whatever it is.
const PAUSE: u64 = 32;
const PAUSE_MAX: u64 = 256;

impl Acceptance {
    /// An outcome of the draft in this place of a step's. Returns what was expected of it when the step was planned.
    pub fn add(&mut self, source: DraftSource, place: usize, right: bool) -> f32 {
        let outcomes = &mut self.outcomes[source as usize];
        if place == 0 {
            self.expected = outcomes.probability;
        }
        outcomes.add(right);
        if !right {
            self.on_trial = 0;
        }
        self.expected
    }

    /// That its next draft is right, if the one before it is, by the sequence's own outcomes.
    pub fn probability(&self, source: DraftSource) -> f32 {
        self.outcomes[source as usize].probability
    }

    /// The first drafts are there. Until they are verified what is expected of them is what became of those before, of its tenant's from there.
    pub fn begin(&mut self, source: DraftSource, record: &mut DrafterRecord) {
        self.begun = true;
        self.outcomes[source as usize].probability = record.rate();
        // What one caller predicts, and what of one text a model says, tells little of another's.
        let tried = match source {
            DraftSource::Text => record.reads(!record.is_known()),
            DraftSource::Prediction | DraftSource::Model => true,
        };
        self.on_trial = if tried { TRIED } else { 0 };
    }

    pub fn has_begun(&self) -> bool {
        self.begun
    }

    pub fn is_paused(&self, step: u64) -> bool {
        step < self.paused_until
    }

    /// Drafts are worth it again.
    pub fn resume(&mut self) {
        self.pauses = 0;
    }

    /// In a step of so many rows drafts are not worth it. `true`: the pause is a longest one, and before it one is to be verified all the
    /// same, to find out whether that has changed.
    pub fn pause(&mut self, step: u64, rows: u32) -> bool {
        let (is_due, steps) = (self.is_due(rows), self.steps(rows));
        // All pauses of one length end together, so that drafts are looked at together.
        self.paused_until = (step / steps + 1) * steps;
        self.pauses = self.pauses.saturating_add(1);
        is_due
    }

    /// Whether the next pause in a step of so many rows would be a longest one.
    pub fn is_due(&self, rows: u32) -> bool {
        self.steps(rows) == longest(rows)
    }

    /// Of the next pause.
    fn steps(&self, rows: u32) -> u64 {
        (1 << self.pauses.min(8)).min(longest(rows))
    }
}

/// Steps of a longest pause.
fn longest(rows: u32) -> u64 {
    (PAUSE * u64::from(rows).next_power_of_two()).min(PAUSE_MAX)
}

/// Outcomes over what was expected of them: the line of least squares, old ones fading.
#[derive(Clone, Copy, Debug, Default)]
struct Calibration {
    count: f32,
    expected: f32,
    right: f32,
    expected_expected: f32,
    expected_right: f32,
    /// The last outcome's step, and what its outcomes left of those before.
    step: u64,
    left: f32,
}

/// What an outcome keeps of the weight of those before.
const OUTCOMES: f32 = 0.98;
/// What all outcomes of a step leave at least: sequences that say the same are right and wrong together.
const OF_A_STEP: f32 = 0.8;
/// As if expectations had been right so far, over this sum of squares.
const AS_EXPECTED: f32 = 0.2;

impl Calibration {
    /// An outcome of this step, and what was expected of it.
    fn add(&mut self, step: u64, expected: f32, right: bool) {
        if step != self.step {
            (self.step, self.left) = (step, 1.0);
        }
        let left = if self.left > OF_A_STEP { OUTCOMES } else { 1.0 };
        self.left *= left;
        let right = f32::from(u8::from(right));
        for (sum, value) in [
            (&mut self.count, 1.0),
            (&mut self.expected, expected),
            (&mut self.right, right),
            (&mut self.expected_expected, expected * expected),
            (&mut self.expected_right, expected * right),
        ] {
            *sum = *sum * left + value;
        }
    }

    /// How probable a draft is of which this is expected.
    fn probability(&self, expected: f32) -> f32 {
        let (mean, right) = (self.expected / self.count, self.right / self.count);
        let variance = AS_EXPECTED + self.expected_expected - self.expected * mean;
        let covariance = AS_EXPECTED + self.expected_right - self.expected * right;
        let slope = (covariance / variance).clamp(0.0, 1.0);
        (right + slope * (expected - mean)).clamp(0.0, 1.0)
    }
}

/// What became lately of the drafts from one source, of all sequences of one tenant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DrafterRecord {
    calibration: Calibration,
    /// Sequences in a row that it was not to read.
    passed_over: u32,
}

/// Outcomes after which they are to be relied on.
const KNOWN: f32 = 16.0;
/// Of so many sequences that would not be worth it one is read, to find out whether that has changed.
const PASSED_OVER: u32 = 16;
/// Tenants of which something is known.
const TENANTS: usize = 1024;

impl DrafterRecord {
    /// An outcome, and what was expected of it.
    pub fn add(&mut self, step: u64, expected: f32, right: bool) {
        self.calibration.add(step, expected, right);
    }

    /// How probable a draft is of which a sequence's outcomes let this expect.
    pub fn probability(&self, expected: f32) -> f32 {
        if self.is_known() { self.calibration.probability(expected) } else { expected }
    }

    /// Of its drafts, the share that was right.
    pub fn rate(&self) -> f32 {
        if self.is_known() { self.calibration.right / self.calibration.count } else { UNKNOWN }
    }

    fn is_known(&self) -> bool {
        self.calibration.count >= KNOWN
    }

    /// Whether the model reads a sequence that begins, or drafts of it are tried; `worth`: drafts that are right as often as lately would pay.
    pub fn reads(&mut self, worth: bool) -> bool {
        self.passed_over = if worth { 0 } else { (self.passed_over + 1) % PASSED_OVER };
        self.passed_over == 0
    }
}

/// By tenant and [`DraftSource`]: whose drafts are wrong costs nobody else theirs. Where there are too many, all are forgotten.
#[derive(Debug, Default)]
pub(crate) struct DrafterRecords(FxHashMap<TenantId, [DrafterRecord; 3]>);

impl DrafterRecords {
    pub fn of(&mut self, tenant: TenantId, source: DraftSource) -> &mut DrafterRecord {
        if self.0.len() == TENANTS && !self.0.contains_key(&tenant) {
            self.0.clear();
        }
        &mut self.0.entry(tenant).or_default()[source as usize]
    }

    /// See [`DrafterRecord::probability`].
    pub fn probability(&self, tenant: TenantId, source: DraftSource, expected: f32) -> f32 {
        self.0.get(&tenant).map_or(expected, |records| records[source as usize].probability(expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_sequences_that_are_not_worth_it_few_are_read() {
        let mut record = DrafterRecord::default();
        let read: Vec<u32> = (1..=40).filter(|_| record.reads(false)).collect();
        assert_eq!(read, [16, 32]);
        assert!(record.reads(true) && !record.reads(false));
        (0..6).for_each(|step| record.add(step, UNKNOWN, false));
        assert_eq!(record.rate(), UNKNOWN, "too few to rely on");
        (0..60).for_each(|step| record.add(step, UNKNOWN, false));
        assert_eq!(record.rate(), 0.0);
    }

    #[test]
    fn sequences_of_a_step_that_are_all_wrong_do_not_outweigh_the_steps_before() {
        let mut record = DrafterRecord::default();
        (0..20).for_each(|step| (0..32).for_each(|_| record.add(step, 0.8, true)));
        (0..32).for_each(|_| record.add(20, 0.8, false));
        assert!((0.7..0.9).contains(&record.rate()), "{}", record.rate());
    }

    #[test]
    fn a_trial_ends_with_the_first_wrong_draft() {
        let mut acceptance = Acceptance::default();
        acceptance.begin(DraftSource::Prediction, &mut DrafterRecord::default());
        acceptance.add(DraftSource::Prediction, 0, true);
        assert_eq!(acceptance.on_trial, TRIED);
        acceptance.add(DraftSource::Prediction, 0, false);
        assert_eq!(acceptance.on_trial, 0);
    }

    /// Of text; what is predicted is always tried.
    #[test]
    fn what_nothing_is_known_of_is_tried_and_else_one_in_sixteen() {
        let begun = |source: DraftSource, record: &mut DrafterRecord| {
            let mut acceptance = Acceptance::default();
            acceptance.begin(source, record);
            (acceptance.on_trial == TRIED, acceptance.probability(source))
        };
        let (text, predicted) = (DraftSource::Text, DraftSource::Prediction);
        let mut record = DrafterRecord::default();
        assert_eq!(begun(text, &mut record), (true, UNKNOWN));
        (0..20).for_each(|step| record.add(step, UNKNOWN, false));
        let tried: Vec<u32> = (1..=40).filter(|_| begun(text, &mut record).0).collect();
        assert_eq!(tried, [16, 32]);
        assert_eq!(begun(text, &mut record).1, 0.0, "as its tenant's were lately");
        assert_eq!(begun(predicted, &mut record), (true, 0.0));
    }

    #[test]
    fn tenants_are_known_apart_and_no_more_than_so_many() {
        let mut records = DrafterRecords::default();
        let (model, text) = (DraftSource::Model, DraftSource::Text);
        (0..60).for_each(|step| records.of(TenantId(1), model).add(step, 0.7, false));
        assert_eq!(records.of(TenantId(1), model).rate(), 0.0);
        assert!(records.probability(TenantId(1), model, 0.7) < 0.05);
        for (tenant, source) in [(1, text), (2, model)] {
            assert_eq!(records.probability(TenantId(tenant), source, 0.7), 0.7);
            assert_eq!(records.of(TenantId(tenant), source).rate(), UNKNOWN);
        }
        for tenant in 0..3 * TENANTS as u32 {
            records.of(TenantId(tenant), text);
            assert!(records.0.len() <= TENANTS);
        }
    }

    /// Of so many steps in which drafts are never worth it, those in which they are looked for, and those in which one is verified.
    fn paused(rows: u32, steps: u64) -> (Vec<u64>, Vec<u64>) {
        let (mut acceptance, mut looked, mut verified) = (Acceptance::default(), Vec::new(), Vec::new());
        for step in 1..=steps {
            if !acceptance.is_paused(step) {
                looked.push(step);
                if acceptance.pause(step, rows) {
                    verified.push(step);
                }
            }
        }
        (looked, verified)
    }

    #[test]
    fn pauses_grow_and_one_draft_is_verified_before_each_longest() {
        assert_eq!(paused(1, 100), (vec![1, 2, 4, 8, 16, 32, 64, 96], vec![32, 64, 96]));
        let (looked, verified) = paused(64, 1100);
        assert_eq!(looked[7..], [128, 256, 512, 768, 1024], "however many rows there are");
        assert_eq!(verified, [256, 512, 768, 1024]);
    }

    #[test]
    fn what_is_worth_it_again_is_looked_for_at_once() {
        let mut acceptance = Acceptance::default();
        for _ in 0..5 {
            acceptance.pause(1, 1);
        }
        acceptance.resume();
        assert!(!acceptance.pause(100, 1));
        assert!(acceptance.is_paused(100) && !acceptance.is_paused(101));
    }

    #[test]
    fn the_first_outcomes_weigh_more() {
        let mut acceptance = Acceptance::default();
        let (model, text) = (DraftSource::Model, DraftSource::Text);
        acceptance.add(model, 0, false);
        assert!((acceptance.probability(model) - 0.467).abs() < 0.001);
        (0..20).for_each(|place| assert!((acceptance.add(model, place, true) - 0.467).abs() < 0.001));
        let before = acceptance.probability(model);
        assert_eq!(acceptance.add(model, 0, false), before, "what was expected of a new step's first");
        assert!((acceptance.probability(model) - 0.8 * before).abs() < 0.001);
        assert_eq!(acceptance.probability(text), UNKNOWN, "text is another drafter");
    }

    /// Of many sequences whose drafts are right at random, those that were lucky are no better; of those that have runs, they are.
    #[test]
    fn luck_is_told_from_runs() {
        // What is made of 0.9 and of 0.3, where a draft is right as the last one of its sequence was, or else at random: half of them.
        let probabilities = |as_before: u32| {
            let (mut record, mut acceptance, mut state) =
                (DrafterRecord::default(), Acceptance::default(), 1u32);
            let mut below = |end: u32| {
                state = state.wrapping_mul(0x915f_77f5).wrapping_add(1);
                (state >> 8) % end
            };
            let mut right = true;
            for step in 0..4000 {
                right = if below(100) < as_before { right } else { below(2) == 0 };
                let expected = acceptance.add(DraftSource::Text, 0, right);
                record.add(step, expected, right);
            }
            (record.probability(0.9), record.probability(0.3))
        };
        let (high, low) = probabilities(0);
        assert!((0.35..0.65).contains(&low) && (0.35..0.65).contains(&high), "{low} {high}");
        let (high, low) = probabilities(95);
        assert!(low < 0.35 && high > 0.8, "{low} {high}");
    }
}
