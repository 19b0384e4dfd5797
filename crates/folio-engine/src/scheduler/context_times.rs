//! What contexts add to the time of a step of decodes, as measured.
//!
//! Owns: microseconds for each pair of a row and a position that it sees, and for each position whose KV is read, once for each sequence. Must
//! never: read a clock, or be needed for correctness.
//!
//! Both are the least-squares solution over how steps with as many rows differ, old ones fading: in contexts and in time, each by its share of
//! the time (`row_times` has what steps are held against). So what rows take by themselves is not in it. A step that was interrupted is all
//! the lighter for it: it differs by no more than its whole time.
//!
//! What could be chance counts as nothing, and steps take what others with as many rows do: so it is at first, and wherever contexts differ by
//! less than steps do anyway. Where the two cannot be told apart it is all in what is read, so that a row more is as dear behind
//! any context.

use crate::work::seen;

/// What a step keeps of the weight of those before.
const STEPS: f64 = 0.999;
/// What is known before: so many steps, whose squared differences are this in all.
const BEFORE: (f64, f64) = (10.0, 1.0);
/// Nothing is made of what explains less than so many times what steps differ by anyway (four standard errors), and as much less of the rest.
const CHANCE: f64 = 16.0;
/// Of attention, the part that must not follow from what is read, squared.
const APART: f64 = 1e-6;

/// What the rows of a step's decodes see.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Context {
    /// Pairs of a row and a position that it sees.
    pub attention: f64,
    /// Positions whose KV is read: of each sequence up to its last row.
    pub kv_positions: f64,
}

impl Context {
    /// A sequence more, with so many rows from this position on.
    pub fn add(&mut self, first: u32, rows: u32) {
        self.attention += seen(first, rows) as f64;
        self.kv_positions += f64::from(first) + f64::from(rows);
    }

    /// Of so many times as many sequences like these.
    pub fn times(self, times: f64) -> Self {
        Self { attention: times * self.attention, kv_positions: times * self.kv_positions }
    }

    /// The same sequences, with rows that see so many positions more in all.
    pub fn with_rows(self, attention: f64) -> Self {
        Self { attention: self.attention + attention, ..self }
    }
}

/// What contexts cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ContextUs {
    /// Microseconds for each pair of a row and a position that it sees, and for each position whose KV is read.
    pub attention: f64,
    pub kv_position: f64,
}

impl ContextUs {
    /// Microseconds.
    pub fn of(self, context: Context) -> f64 {
        self.attention * context.attention + self.kv_position * context.kv_positions
    }
}

/// By how much a step differs from the mean of others with as many rows: each figure over the microseconds that it took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Difference {
    pub context: Context,
    pub us: f64,
    /// What it counts: less where that mean is of few.
    pub weight: f64,
}

/// See the module documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ContextTimes {
    /// Sums over steps: how many there were, and of products of differences in attention, in positions read and in time.
    steps: f64,
    attention_attention: f64,
    attention_kv: f64,
    kv_kv: f64,
    attention_us: f64,
    kv_us: f64,
    us_us: f64,
    each: ContextUs,
}

impl ContextTimes {
    pub fn add(&mut self, difference: Difference) {
        let Difference { context: Context { attention, kv_positions }, us, weight } = difference;
        for (sum, product) in [
            (&mut self.steps, 1.0),
            (&mut self.attention_attention, attention * attention),
            (&mut self.attention_kv, attention * kv_positions),
            (&mut self.kv_kv, kv_positions * kv_positions),
            (&mut self.attention_us, attention * us),
            (&mut self.kv_us, kv_positions * us),
            (&mut self.us_us, us * us),
        ] {
            *sum = *sum * STEPS + weight * product;
        }
        self.each = self.solution();
    }

    /// What contexts cost, as far as it is known; neither is negative.
    pub fn each(&self) -> ContextUs {
        self.each
    }

    fn solution(&self) -> ContextUs {
        // Of a sum, what follows from what is read.
        let by_kv = |sum: f64| if self.kv_kv > 0.0 { sum / self.kv_kv } else { 0.0 };
        let (all, with_kv) = (self.attention_attention, self.attention_kv);
        let own = all - with_kv * by_kv(with_kv);
        let apart = own > APART * all;
        let estimate = if apart { (self.attention_us - with_kv * by_kv(self.kv_us)) / own } else { 0.0 };
        let rest = self.us_us - self.kv_us * by_kv(self.kv_us) - estimate * estimate * own;
        // No more than if reading cost nothing.
        let most = if apart { (self.attention_us / all).max(0.0) } else { 0.0 };
        let attention = self.as_sure(estimate, own, rest).min(most);
        let kv_position = self.as_sure(by_kv(self.kv_us - attention * with_kv), self.kv_kv, rest);
        ContextUs { attention, kv_position }
    }

    /// Of an estimate as much as is not chance. `information`: the sum of squares that it is of; `rest`: of what is not explained.
    fn as_sure(&self, estimate: f64, information: f64, rest: f64) -> f64 {
        let chance = CHANCE * (rest.max(0.0) + BEFORE.1) / (self.steps + BEFORE.0);
        let explained = estimate * estimate * information;
        if estimate > 0.0 && explained > chance { estimate * (1.0 - chance / explained) } else { 0.0 }
    }
}
