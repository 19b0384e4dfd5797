//! What computing and copying KV cost here, as measured.
//!
//! Owns: the estimates. Must never: read a clock (steps and copies bring their times along) or be needed for correctness.
//!
//! Computing: a step's time is taken as `a * tokens + b * (sum of their positions)`, because attention over what lies before
//! makes a token dearer the deeper it lies. `a` and `b` are the least-squares solution over past steps, old ones fading. What
//! a step's decodes took by themselves is taken off first.
//!
//! Decoding: what a step's rows take by themselves (`row_times`), and what the contexts behind them add (`context_times`).
//!
//! Loading: a latency for each order, and microseconds per byte, of each tier by itself (`load_times`). One that was never loaded from counts as
//! the nearest before it, and without such as free, so that the first load is the measurement.
//!
//! Swapping: microseconds per byte until what preempted sequences gave up was read. Free until it was done once.
//!
//! Survival: of what preempted sequences gave up, the share that the prefix cache still had when they came back.

use std::ops::Range;

use folio_kv::TierId;

use super::context_times::{Context, ContextTimes};
use super::load_times::LoadTimes;
use super::row_times::{DecodeStep, RowTimes};
use crate::stats::LoadCost;
use crate::tier::TIERS_MAX;

/// What a step keeps of the weight of those before.
const STEPS: f64 = 0.98;
/// What a swap, or a return, keeps of those before.
const TRANSFERS: f64 = 0.9;

/// How a step of decodes goes: each kind has times of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum StepKind {
    /// Nothing is under way when it is planned, so that what lies between two steps is in its time.
    #[default]
    Alone,
    /// It is planned while the one before it runs.
    Ahead,
    /// A model drafts for it.
    Drafting,
}

/// What one step computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Computed {
    /// Tokens of prompts (or of what is computed again), and the sum of their positions.
    pub tokens: f64,
    pub positions: f64,
    /// Sequences that computed one token, drafts behind those, and what both see.
    pub decodes: u32,
    pub drafts: u32,
    pub context: Context,
    pub kind: StepKind,
}

/// What is loaded together, and in how many orders.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadSize {
    pub bytes: u64,
    pub orders: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Costs {
    /// Sums over steps with prompts: of products of tokens, positions and time.
    tokens_tokens: f64,
    tokens_positions: f64,
    positions_positions: f64,
    tokens_us: f64,
    positions_us: f64,
    /// Of steps without prompts, by [`StepKind`], and what contexts add in all of them.
    rows: [RowTimes; 3],
    contexts: ContextTimes,
    swapped: Mean,
    /// By tier.
    loaded: [LoadTimes; TIERS_MAX],
    survived: Mean,
}

/// A ratio of two fading sums.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    of: f64,
    per: f64,
}

impl Mean {
    fn add(&mut self, of: f64, per: f64, memory: f64) {
        self.of = self.of * memory + of;
        self.per = self.per * memory + per;
    }

    fn value(self) -> Option<f64> {
        (self.per > 0.0).then(|| self.of / self.per)
    }
}

impl Costs {
    /// A step that computed this took `us`.
    pub fn stepped(&mut self, computed: Computed, us: f64) {
        let Computed { tokens, positions, decodes, drafts, context, kind } = computed;
        let rows = decodes + drafts;
        if tokens == 0.0 {
            if decodes > 0 {
                let (step, times) = (DecodeStep { rows, context, us }, &mut self.rows[kind as usize]);
                if let Some(difference) = times.difference(step) {
                    self.contexts.add(difference);
                }
                times.add(step, self.contexts.each());
            }
            return;
        }
        let beside = if decodes > 0 { self.step_us(rows, context, kind).unwrap_or(0.0) } else { 0.0 };
        let us = (us - beside).max(0.0);
        for (sum, product) in [
            (&mut self.tokens_tokens, tokens * tokens),
            (&mut self.tokens_positions, tokens * positions),
            (&mut self.positions_positions, positions * positions),
            (&mut self.tokens_us, tokens * us),
            (&mut self.positions_us, positions * us),
        ] {
            *sum = *sum * STEPS + product;
        }
    }

    /// What a step of so many rows behind this context and no prompt takes, microseconds; where none of its kind was measured, what one of the
    /// nearest does. `None`: nothing is known yet.
    pub fn step_us(&self, rows: u32, context: Context, kind: StepKind) -> Option<f64> {
        let nearest = match kind {
            StepKind::Alone => StepKind::Ahead,
            StepKind::Ahead | StepKind::Drafting => StepKind::Alone,
        };
        let each = self.contexts.each();
        let us = [kind, nearest].into_iter().find_map(|kind| self.rows[kind as usize].us(rows, each))?;
        Some(us + each.of(context))
    }

    /// What one of so many drafts adds to such a step of so many rows: microseconds for its row, and for each position that it sees.
    pub fn draft_us(&self, rows: u32, drafts: u32, kind: StepKind) -> (f64, f64) {
        let us = |rows| self.step_us(rows, Context::default(), kind).unwrap_or(0.0);
        let row_us = (us(rows + drafts) - us(rows)).max(0.0) / f64::from(drafts.max(1));
        (row_us, self.contexts.each().attention)
    }

    /// Whether it is to be relied on what steps of this kind take.
    pub fn knows(&self, kind: StepKind) -> bool {
        self.rows[kind as usize].is_reliable()
    }

    /// Whether steps without drafts and of so many rows, or fewer, were measured.
    pub fn knows_few(&self, rows: u32) -> bool {
        [StepKind::Alone, StepKind::Ahead].iter().any(|kind| self.rows[*kind as usize].knows_few(rows))
    }

    /// Rows that a step may have for the sake of drafts: twice as many as any before, so that what they cost is found out step by step.
    pub fn rows_max(&self, kind: StepKind) -> u32 {
        let most = |kind: StepKind| self.rows[kind as usize].most_seen();
        let [of_kind, alone, ahead] = [kind, StepKind::Alone, StepKind::Ahead].map(most);
        of_kind.max(alone).max(ahead).max(1).saturating_mul(2)
    }

    /// It took so long until this was read of what a preempted sequence gave up.
    pub fn swapped(&mut self, bytes: u64, us: f64) {
        self.swapped.add(us, bytes as f64, TRANSFERS);
    }

    /// A tier carried out an order of so many bytes in `us`.
    pub fn loaded(&mut self, tier: TierId, bytes: u64, us: f64) {
        if bytes > 0 {
            self.loaded[usize::from(tier.0)].add(bytes as f64, us);
        }
    }

    /// Of each tier, as measured.
    pub fn load_costs(&self) -> [Option<LoadCost>; TIERS_MAX] {
        self.loaded.map(|times| times.cost())
    }

    /// Microseconds that are spared where a tier brings this instead of these positions being computed; negative where it is slower: what
    /// computing them takes, less `orders * latency + bytes / bandwidth`. One that was never loaded from is taken to be as fast as the nearest
    /// before it, and without such to cost nothing.
    pub fn spared_by_load(&self, tier: TierId, load: LoadSize, positions: Range<u32>) -> f64 {
        self.computing(positions) - self.load_us(tier, load)
    }

    /// Orders are carried out one after the other.
    fn load_us(&self, tier: TierId, LoadSize { bytes, orders }: LoadSize) -> f64 {
        let known = self.loaded[..=usize::from(tier.0)].iter().rfind(|times| times.is_known());
        let orders = f64::from(orders.max(1));
        known.map_or(0.0, |times| orders * times.us(bytes as f64 / orders))
    }

    /// Of `held` positions that were given up, `found` were still cached.
    pub fn survived(&mut self, found: u32, held: u32) {
        self.survived.add(found.into(), held.into(), TRANSFERS);
    }

    /// Whether to have these positions stored, and loaded if they are lost, is cheaper than to compute them then, as far as anybody can tell
    /// at a preemption.
    pub fn swapping_pays(&self, tier: TierId, load: LoadSize, positions: Range<u32>) -> bool {
        let lost = 1.0 - self.survived.value().unwrap_or(0.0).min(1.0);
        let swapping = load.bytes as f64 * self.swapped.value().unwrap_or(0.0);
        swapping + lost * self.load_us(tier, load) < lost * self.computing(positions)
    }

    /// Microseconds to compute these positions of a prompt.
    pub fn computing(&self, positions: Range<u32>) -> f64 {
        let (from, to) = (f64::from(positions.start), f64::from(positions.end));
        let (a, b) = self.line();
        (to - from) * a + (to - from) * (from + to) / 2.0 * b
    }

    /// Microseconds per token, and per token and position. Where the two cannot be told apart, depth costs nothing.
    pub fn line(&self) -> (f64, f64) {
        let (tt, tp, pp) = (self.tokens_tokens, self.tokens_positions, self.positions_positions);
        if tt == 0.0 {
            return (0.0, 0.0);
        }
        let flat = (self.tokens_us / tt, 0.0);
        let determinant = tt * pp - tp * tp;
        if determinant <= 1e-6 * tt * pp {
            return flat;
        }
        let a = (self.tokens_us * pp - self.positions_us * tp) / determinant;
        let b = (self.positions_us * tt - self.tokens_us * tp) / determinant;
        if b <= 0.0 {
            flat
        } else if a < 0.0 {
            (0.0, self.positions_us / pp)
        } else {
            (a, b)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::context_times::ContextUs;
    use super::*;

    const TIER: TierId = TierId(0);
    const SIZE: LoadSize = LoadSize { bytes: 1 << 20, orders: 1 };

    fn prompt(from: u32, tokens: u32) -> Computed {
        let positions = f64::from(tokens) * (f64::from(from) + f64::from(tokens) / 2.0);
        Computed { tokens: f64::from(tokens), positions, ..Computed::default() }
    }

    /// 100 us a token and 0.1 us for every position before it.
    fn measured() -> Costs {
        let mut costs = Costs::default();
        for step in 0..200 {
            let computed = prompt(step * 37 % 4000, 64 + step % 50);
            costs.stepped(computed, 100.0 * computed.tokens + 0.1 * computed.positions);
        }
        costs
    }

    #[test]
    fn computing_costs_what_it_took_and_grows_with_depth() {
        let costs = measured();
        let near = |positions: Range<u32>, wanted: f64| {
            let us = costs.computing(positions.clone());
            assert!((us - wanted).abs() < 0.01 * wanted, "{positions:?}: {us}, {wanted} was wanted");
        };
        near(0..100, 100.0 * 100.0 + 0.1 * 100.0 * 50.0);
        near(8000..8100, 100.0 * 100.0 + 0.1 * 100.0 * 8050.0);
        assert_eq!(Costs::default().computing(0..100), 0.0, "nothing is known");
    }

    #[test]
    fn one_depth_alone_says_nothing_about_others() {
        let mut costs = Costs::default();
        (0..50).for_each(|_| costs.stepped(prompt(100, 64), 6400.0));
        assert!((costs.computing(0..64) - 6400.0).abs() < 1.0);
        assert!((costs.computing(9000..9064) - 6400.0).abs() < 1.0);
    }

    #[test]
    fn decodes_beside_a_prompt_are_not_on_its_bill() {
        let mut costs = Costs::default();
        for _ in 0..50 {
            costs.stepped(Computed { decodes: 4, ..Computed::default() }, 5000.0);
            costs.stepped(Computed { decodes: 4, ..prompt(0, 64) }, 5000.0 + 6400.0);
        }
        assert!((costs.computing(0..64) - 6400.0).abs() < 1.0, "{}", costs.computing(0..64));
    }

    /// Answers begin one after the other, so that some sequences decode beside the prompts of others.
    #[test]
    fn of_decodes_beside_a_prompt_as_much_is_taken_off_as_so_many_take() {
        let mut costs = Costs::default();
        for decodes in [32, 8, 16, 24].repeat(40) {
            let us = 4000.0 + 1500.0 * f64::from(decodes);
            costs.stepped(Computed { decodes, ..Computed::default() }, us);
            costs.stepped(Computed { decodes, ..prompt(0, 32 - decodes) }, 52_000.0);
        }
        assert!((costs.computing(0..64) - 96_000.0).abs() < 1000.0, "{}", costs.computing(0..64));
    }

    #[test]
    fn each_kind_of_step_has_times_of_its_own() {
        let mut costs = Costs::default();
        let (alone, ahead, drafting) = (StepKind::Alone, StepKind::Ahead, StepKind::Drafting);
        let us = |costs: &Costs, kind| costs.step_us(4, Context::default(), kind);
        assert_eq!(us(&costs, drafting), None);
        let step = |drafts, kind| Computed { decodes: 1, drafts, kind, ..Computed::default() };
        costs.stepped(step(0, alone), 100.0);
        assert_eq!([drafting, ahead, alone].map(|kind| us(&costs, kind)), [Some(100.0); 3]);
        costs.stepped(step(3, drafting), 400.0);
        costs.stepped(step(3, ahead), 90.0);
        costs.stepped(step(3, alone), 160.0);
        let near = |kind, wanted: f64| (us(&costs, kind).unwrap() - wanted).abs() < 1.0;
        assert!(near(drafting, 400.0) && near(ahead, 90.0) && near(alone, 160.0));
    }

    /// Whole numbers below an end.
    fn random() -> impl FnMut(u32) -> u32 {
        let mut state = 7u64;
        move |end: u32| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            ((state >> 33) % u64::from(end)) as u32
        }
    }

    /// Measured in steps of one to four sequences with up to three drafts each, of other contexts every 60 steps. Each takes up to a twentieth
    /// more or less, and one in a hundred three times as long.
    fn decoded(took: impl Fn(u32, Context) -> f64) -> Costs {
        let (mut costs, mut below) = (Costs::default(), random());
        let mut positions: Vec<u32> = Vec::new();
        for step in 0..2000 {
            if step % 60 == 0 {
                let sequences = 1 + below(4);
                positions = (0..sequences).map(|_| 100 + below(10_900)).collect();
            }
            let mut computed = Computed { decodes: positions.len() as u32, ..Computed::default() };
            for first in &mut positions {
                let drafts = below(4);
                computed.drafts += drafts;
                computed.context.add(*first, 1 + drafts);
                *first += 1;
            }
            let noise = f64::from(950 + below(101)) / 1000.0;
            let interrupted = if below(100) == 0 { 3.0 } else { 1.0 };
            let us = took(computed.decodes + computed.drafts, computed.context);
            costs.stepped(computed, us * noise * interrupted);
        }
        costs
    }

    #[test]
    fn what_contexts_add_is_learned_apart_from_what_rows_take() {
        let rows_us = |rows: u32| 50_000.0 + 3000.0 * f64::from(rows);
        for (attention, kv_position) in [(1.5, 0.0), (1.5, 0.8), (0.0, 1.5)] {
            let each = ContextUs { attention, kv_position };
            let costs = decoded(|rows, context| rows_us(rows) + each.of(context));
            let (_, us) = costs.draft_us(4, 4, StepKind::Alone);
            assert!((us - attention).abs() < (0.15 * attention).max(0.1), "{each:?}: {us}");
            for (rows, first) in [(1, 200), (4, 200), (4, 9000), (8, 9000)] {
                let mut context = Context::default();
                context.add(first, rows);
                let us = costs.step_us(rows, context, StepKind::Alone).unwrap();
                let wanted = rows_us(rows) + each.of(context);
                assert!(
                    (us - wanted).abs() < 0.15 * wanted,
                    "{each:?}, {rows} rows behind {first}: {us}, {wanted} was wanted"
                );
            }
        }
    }

    /// Steps that differ for other reasons say nothing of contexts.
    #[test]
    fn contexts_that_differ_little_are_not_told_from_noise() {
        let (mut costs, mut below) = (Costs::default(), random());
        for step in 0..2000 {
            let drafts = below(4);
            let mut computed = Computed { decodes: 1, drafts, ..Computed::default() };
            computed.context.add(1000 + step % 120, 1 + drafts);
            let us = 53_000.0 + 3000.0 * f64::from(drafts);
            costs.stepped(computed, us * f64::from(900 + below(201)) / 1000.0);
            assert_eq!(costs.contexts.each(), ContextUs::default(), "step {step}");
        }
    }

    #[test]
    fn what_is_cheaper_to_keep_is_kept_and_nothing_else() {
        let mut costs = measured();
        let pays = |costs: &Costs| costs.swapping_pays(TIER, SIZE, 0..1000);
        assert!(pays(&costs), "unmeasured it is free: it is how it is measured");
        costs.swapped(1 << 20, 1000.0);
        costs.loaded(TIER, 1 << 20, 1000.0);
        assert!(pays(&costs), "2 ms against 150 ms");
        (0..30).for_each(|_| costs.swapped(1 << 20, 1e6));
        assert!(!pays(&costs), "a second for each");
        assert!(!pays(&Costs::default()), "nothing was ever computed");
    }

    #[test]
    fn every_order_has_the_latency() {
        let mut costs = measured();
        let us = |bytes: u64| 10_000.0 + bytes as f64;
        for bytes in [1_000, 40_000, 1_000, 40_000] {
            costs.loaded(TIER, bytes, us(bytes));
        }
        let spared = |tokens: u32, orders| {
            costs.spared_by_load(TIER, LoadSize { bytes: u64::from(tokens) * 10, orders }, 0..tokens)
        };
        let near =
            |is: f64, wanted: f64| assert!((is - wanted).abs() < 0.01 * wanted.abs(), "{is}, {wanted}");
        near(spared(50, 1), 50.0 * 100.0 + 0.1 * 50.0 * 25.0 - us(500));
        near(spared(1000, 1), 1000.0 * 100.0 + 0.1 * 1000.0 * 500.0 - us(10_000));
        near(spared(1000, 8), spared(1000, 1) - 7.0 * 10_000.0);
    }

    #[test]
    fn what_survives_by_itself_needs_no_keeping() {
        let mut costs = measured();
        let pays = |costs: &Costs| costs.swapping_pays(TIER, SIZE, 0..1000);
        (0..50).for_each(|_| costs.swapped(1 << 20, 10_000.0));
        assert!(pays(&costs));
        (0..50).for_each(|_| costs.survived(99, 100));
        assert!(!pays(&costs), "1 % of 150 ms against 10 ms");
        (0..50).for_each(|_| costs.survived(0, 100));
        assert!(pays(&costs));
    }
}
