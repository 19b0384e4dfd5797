//! What a step of decodes takes over its rows, as measured.
//!
//! Owns: the curve. Must never: read a clock, or be needed for correctness.
//!
//! Rows do not cost alike: the first come nearly for nothing with the weights that are read anyway, later ones a tile at a time. So each
//! number of rows has a time of its own; beyond 16 each range of an eighth, since a row more is less there than what steps differ by. Ranges
//! end with a multiple of their size, as tiles do.
//! Between two that were measured, times grow evenly; beyond the last, as from the first to the last. What makes all steps longer moves the
//! whole curve (`level`). What was not measured for long is forgotten, and so found out again. And where
//! steps differ from the curve for some time by far more than they do otherwise, what was measured before counts little from then on: on a machine
//! that others use what a row costs changes with them, and the level would take most of that for its own.
//!
//! What contexts cost is learned elsewhere (`context_times`), by how steps differ from the mean of their entry. Each entry has the contexts
//! that its steps had, and what those cost is taken off where it is read: so it is right for all that was measured, whenever it becomes known.

use super::context_times::{Context, ContextUs, Difference};

/// Rows that have an entry each.
const EACH: usize = 16;
/// Entries of a doubling beyond those.
const OF_DOUBLING: usize = 8;
const ENTRIES: usize = EACH + 10 * OF_DOUBLING;
/// What a step weighs against those before, for all of the curve: a machine that becomes slower does for all rows.
const LEVEL: f32 = 0.1;
/// Steps over which an entry is a mean.
const STEPS: u8 = 100;
/// A step that took longer than so many times what it should was interrupted, and says no more than that.
const INTERRUPTED: f32 = 2.0;
/// Steps of which the last and all are compared by how much they differ from the curve; each counts for half its time at most.
const LAST: f32 = 10.0;
const ALL: f32 = 100.0;
const DIFFERS_MOST: f32 = 0.5;
/// Where the last differ so many times as much as all, and by so much, it is another curve.
const ANOTHER: (f32, f32) = (3.0, 0.2);
/// Steps after which a time is forgotten: that costs nothing where the line through the others says the same, and where it says less, that is
/// found out.
const KEPT: u32 = 1024;
/// Steps until a time is relied on: the first with so many rows may have been interrupted, or waited for memory that the next ones find warm,
/// and the least of a few is nearest to what it is. It counts as one of the steps whose mean it becomes: where steps differ, what was seldom
/// measured would else seem to take less than what always is.
const RELIABLE: u8 = 3;

/// A step of decodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeStep {
    /// At least one.
    pub rows: u32,
    pub context: Context,
    pub us: f64,
}

/// See the module documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowTimes {
    steps: u32,
    /// Microseconds by which the curve is multiplied.
    level: f32,
    entries: [Entry; ENTRIES],
    /// By how much of their time steps differed from the curve lately, and before that; much, until it is known.
    differed_last: f32,
    differed: f32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    mean: Mean,
    /// What its steps took, over the level.
    time: f32,
    /// Steps that measured it, up to [`STEPS`]. 0: it is not known.
    seen: u8,
    /// The step that measured it last.
    measured: u32,
}

/// What steps had and took.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    rows: f32,
    /// Positions that a row sees.
    depth: f32,
    kv_positions: f32,
    us: f32,
}

impl Mean {
    /// Of one step.
    fn of(step: DecodeStep) -> Self {
        let DecodeStep { rows, context, us } = step;
        let depth = (context.attention / f64::from(rows)) as f32;
        // A clock need not be finer.
        let us = us.max(1.0) as f32;
        Self { rows: rows as f32, depth, kv_positions: context.kv_positions as f32, us }
    }

    /// What the contexts of a step have more, with the rows that it has.
    fn until(&self, step: &Self) -> Context {
        Context {
            attention: f64::from(step.rows * (step.depth - self.depth)),
            kv_positions: f64::from(step.kv_positions - self.kv_positions),
        }
    }

    fn approach(&mut self, step: &Self, weight: f32) {
        for (mean, value) in [
            (&mut self.rows, step.rows),
            (&mut self.depth, step.depth),
            (&mut self.kv_positions, step.kv_positions),
            (&mut self.us, step.us),
        ] {
            *mean += weight * (value - *mean);
        }
    }
}

impl Entry {
    /// What a step that it is to be measured by counts.
    fn weight(&self) -> f32 {
        1.0 / f32::from((self.seen + 1).min(STEPS) - RELIABLE + 1)
    }

    /// What a step takes by what was measured.
    fn expected_us(&self, step: &Mean, level: f32, each: ContextUs) -> f32 {
        (level * self.time + each.of(self.mean.until(step)) as f32).max(1.0)
    }

    /// What its rows take by themselves.
    fn rows_us(&self, level: f32, each: ContextUs) -> f32 {
        let Mean { rows, depth, kv_positions, .. } = self.mean;
        let context = Context { attention: f64::from(rows * depth), kv_positions: kv_positions.into() };
        (level * self.time - each.of(context) as f32).max(0.0)
    }
}

impl Default for RowTimes {
    fn default() -> Self {
        let entries = [Entry::default(); ENTRIES];
        Self { steps: 0, level: 0.0, entries, differed_last: 0.0, differed: ANOTHER.1 }
    }
}

impl RowTimes {
    /// By how much a step differs from others with as many rows. `None`: they are not known.
    pub fn difference(&self, step: DecodeStep) -> Option<Difference> {
        let (at, step) = (entry(step.rows), Mean::of(step));
        let entry = &self.entries[at];
        if entry.seen < RELIABLE {
            return None;
        }
        let us = |rows| self.through(at, false, rows, ContextUs::default()).unwrap_or(0.0);
        // In an entry of several numbers of rows they take unlike, too.
        let rows_us = if step.rows == entry.mean.rows { 0.0 } else { us(step.rows) - us(entry.mean.rows) };
        let by = 1.0 / f64::from(step.us.max(entry.mean.us));
        Some(Difference {
            context: entry.mean.until(&step).times(by),
            us: by * f64::from(step.us - entry.mean.us - rows_us),
            weight: f64::from(1.0 - entry.weight()),
        })
    }

    /// A step. `each`: what contexts cost.
    pub fn add(&mut self, step: DecodeStep, each: ContextUs) {
        let (at, mut step) = (entry(step.rows), Mean::of(step));
        if self.level == 0.0 {
            self.level = step.us;
        }
        self.steps = self.steps.wrapping_add(1);
        if self.is_another(at, &step, each) {
            self.differed_last = self.differed;
            self.entries.iter_mut().for_each(|entry| entry.seen = entry.seen.min(RELIABLE));
        }
        let entry = &mut self.entries[at];
        entry.measured = self.steps;
        if entry.seen < RELIABLE {
            let time = step.us / self.level;
            if entry.seen == 0 || time < entry.time {
                (entry.mean, entry.time) = (step, time);
            }
            entry.seen += 1;
        } else {
            let weight = entry.weight();
            entry.seen = (entry.seen + 1).min(STEPS);
            let ratio = step.us / entry.expected_us(&step, self.level, each);
            self.level *= 1.0 + LEVEL * (ratio.min(INTERRUPTED) - 1.0);
            step.us = step.us.min(INTERRUPTED * entry.expected_us(&step, self.level, each));
            entry.time += weight * (step.us / self.level - entry.time);
            entry.mean.approach(&step, weight);
        }
        // One entry is looked at each time.
        let old = &mut self.entries[self.steps as usize % ENTRIES];
        if self.steps.wrapping_sub(old.measured) > KEPT {
            *old = Entry::default();
        }
    }

    /// Whether steps, with this one of an entry, have differed so much that they are not of this curve.
    fn is_another(&mut self, at: usize, step: &Mean, each: ContextUs) -> bool {
        let entry = &self.entries[at];
        if entry.seen < RELIABLE {
            return false;
        }
        let ratio = step.us / entry.expected_us(step, self.level, each);
        let differs = (ratio.max(1.0 / ratio) - 1.0).min(DIFFERS_MOST);
        self.differed_last += (differs - self.differed_last) / LAST;
        self.differed += (differs - self.differed) / ALL;
        self.differed_last > (ANOTHER.0 * self.differed).max(ANOTHER.1)
    }

    /// The most rows that were measured so many times.
    fn most_rows(&self, times: u8) -> u32 {
        self.entries.iter().rposition(|entry| entry.seen >= times).map_or(0, first_rows)
    }

    /// The most rows that any step had.
    pub fn most_seen(&self) -> u32 {
        self.most_rows(1)
    }

    /// Whether any time is to be relied on.
    pub fn is_reliable(&self) -> bool {
        self.most_rows(RELIABLE) > 0
    }

    /// Rows of an entry, and what they take by themselves, as far as it is known: reliably, or it is far beyond what is (`far`), or more rows
    /// are, and take no less.
    fn point(&self, at: usize, far: bool, each: ContextUs) -> Option<(f32, f32)> {
        let entry = &self.entries[at];
        let us = |entry: &Entry| entry.rows_us(self.level, each);
        match entry.seen {
            0 => return None,
            RELIABLE.. => return Some((entry.mean.rows, us(entry))),
            _ => (),
        }
        let more = self.entries[at..].iter().find(|entry| entry.seen >= RELIABLE);
        let most = more.map(us).or(far.then_some(f32::INFINITY))?;
        Some((entry.mean.rows, us(entry).min(most)))
    }

    /// Whether so many rows are far beyond what is to be relied on.
    fn is_far(&self, rows: u32) -> bool {
        rows > self.most_rows(RELIABLE).saturating_mul(2)
    }

    /// Whether steps of so many rows, or fewer, were measured: else what it says of them is what more rows take.
    pub fn knows_few(&self, rows: u32) -> bool {
        let far = self.is_far(rows);
        (0..=entry(rows)).any(|at| self.point(at, far, ContextUs::default()).is_some())
    }

    /// What so many rows take by themselves, microseconds; far beyond what is to be relied on, by whatever was measured. `None`: no step was.
    /// `each`: what contexts cost.
    pub fn us(&self, rows: u32, each: ContextUs) -> Option<f64> {
        self.through(entry(rows), self.is_far(rows), rows as f32, each).map(f64::from)
    }

    /// The line through what is known beside so many rows, which are of this entry.
    fn through(&self, at: usize, far: bool, rows: f32, each: ContextUs) -> Option<f32> {
        let point = |at: usize| self.point(at, far, each);
        let below = (0..=at).rev().filter_map(point).find(|point| point.0 <= rows);
        let above = (at..ENTRIES).filter_map(point).find(|point| point.0 >= rows);
        let through = |a: (f32, f32), b: (f32, f32)| {
            let each = if a.0 < b.0 { (b.1 - a.1) / (b.0 - a.0) } else { 0.0 };
            a.1 + each.max(0.0) * (rows - a.0)
        };
        Some(match (below, above) {
            (Some(below), Some(above)) => through(below, above),
            (Some(below), None) => through((0..=at).find_map(point)?, below),
            (None, above) => above?.1,
        })
    }
}

fn entry(rows: u32) -> usize {
    let rows = rows.saturating_sub(1) as usize;
    if rows < EACH {
        return rows;
    }
    let doublings = (rows / EACH).ilog2() as usize;
    let within = rows / ((EACH / OF_DOUBLING) << doublings) - OF_DOUBLING;
    (EACH + doublings * OF_DOUBLING + within).min(ENTRIES - 1)
}

/// The fewest rows of an entry.
fn first_rows(entry: usize) -> u32 {
    let Some(beyond) = entry.checked_sub(EACH) else { return entry as u32 + 1 };
    let (doublings, within) = (beyond / OF_DOUBLING, beyond % OF_DOUBLING);
    (((OF_DOUBLING + within) * (EACH / OF_DOUBLING)) << doublings) as u32 + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of steps whose contexts cost nothing.
    impl RowTimes {
        fn measured(&mut self, rows: u32, us: f64) {
            self.add(DecodeStep { rows, context: Context::default(), us }, ContextUs::default());
        }

        fn alone(&self, rows: u32) -> Option<f64> {
            self.us(rows, ContextUs::default())
        }
    }

    #[test]
    fn every_number_of_rows_is_in_the_entry_that_begins_before_it() {
        for rows in 1..16_000 {
            let at = entry(rows);
            assert!(first_rows(at) <= rows, "{rows}");
            assert!(at + 1 == ENTRIES || rows < first_rows(at + 1), "{rows}");
        }
        for rows in [8, 16, 24, 32, 64, 128, 256, 512, 1024] {
            assert_eq!(entry(rows) + 1, entry(rows + 1), "a tile of {rows} ends an entry");
        }
        assert_eq!(entry(u32::MAX), ENTRIES - 1);
    }

    #[test]
    fn between_and_beyond_what_was_measured_it_is_a_line() {
        let mut times = RowTimes::default();
        assert_eq!(times.alone(3), None);
        times.measured(4, 100.0);
        assert_eq!(
            (times.alone(1), times.alone(9)),
            (Some(100.0), Some(100.0)),
            "rows cost nothing until they are measured"
        );
        times.measured(8, 140.0);
        let near = |rows, wanted: f64| {
            let us = times.alone(rows).unwrap();
            assert!((us - wanted).abs() < 0.01 * wanted, "{rows}: {us}, {wanted} was wanted");
        };
        near(6, 120.0);
        near(12, 180.0);
        near(128, 1340.0);
    }

    #[test]
    fn it_keeps_steps_and_tiles_apart() {
        let mut times = RowTimes::default();
        let took = |rows: u32| 1000.0 + 500.0 * f64::from(rows.div_ceil(4));
        (0..500).for_each(|step| times.measured(1 + step % 12, took(1 + step % 12)));
        for rows in 1..=12 {
            assert!((times.alone(rows).unwrap() - took(rows)).abs() < 1.0, "{rows}");
        }
    }

    #[test]
    fn no_row_is_free_because_others_were_not_measured_by_themselves() {
        let mut times = RowTimes::default();
        let took = |rows: u32| 1000.0 + 30.0 * f64::from(rows);
        for _ in 0..300 {
            [1, 8, 64].into_iter().for_each(|rows| times.measured(rows, took(rows)));
        }
        for rows in [64, 65, 70, 80, 128] {
            let (each, us) =
                (times.alone(rows + 1).unwrap() - times.alone(rows).unwrap(), times.alone(rows).unwrap());
            assert!((each - 30.0).abs() < 3.0, "{rows}: {each}");
            assert!((us - took(rows)).abs() < 0.05 * took(rows), "{rows}: {us}");
        }
    }

    /// 64 plain rows, and some with a draft more: the first row of the next tile is what the draft costs.
    #[test]
    fn what_a_row_more_takes_is_known_where_entries_meet() {
        let mut times = RowTimes::default();
        let took = |rows: u32| 1000.0 + 300.0 * f64::from(rows.div_ceil(8));
        for step in 0..1000 {
            let rows = if step % 4 == 0 { 65 } else { 64 };
            times.measured(rows, took(rows));
        }
        for rows in [64, 65] {
            assert!((times.alone(rows).unwrap() - took(rows)).abs() < 1.0, "{rows}: {:?}", times.alone(rows));
        }
    }

    #[test]
    fn what_was_measured_once_counts_where_more_rows_are_known() {
        let mut times = RowTimes::default();
        for rows in [1, 40, 300] {
            times.measured(rows, 1000.0 + 10.0 * f64::from(rows));
        }
        times.measured(20, 1e6);
        (0..2).for_each(|_| times.measured(300, 4000.0));
        let near = |rows, wanted: f64| {
            let us = times.alone(rows).unwrap();
            assert!((us - wanted).abs() < 0.01 * wanted, "{rows}: {us}, {wanted} was wanted");
        };
        near(1, 1010.0);
        near(40, 1400.0);
        near(170, 2700.0);
        // It was interrupted: all that is known of it is that it takes no longer than more rows.
        near(20, 4000.0);
    }

    #[test]
    fn longer_contexts_move_all_of_it() {
        let mut times = RowTimes::default();
        (0..100).for_each(|step| times.measured(1 + step % 4, 100.0 * f64::from(1 + step % 4)));
        (0..200).for_each(|_| times.measured(1, 300.0));
        let (one, four) = (times.alone(1).unwrap(), times.alone(4).unwrap());
        assert!((one - 300.0).abs() < 3.0 && four > 800.0, "{one} {four}");
    }

    #[test]
    fn a_first_step_with_so_many_rows_that_was_cold_is_not_believed() {
        let mut times = RowTimes::default();
        (0..10).for_each(|_| times.measured(1, 100.0));
        times.measured(2, 5000.0);
        assert_eq!(
            (times.alone(2), times.most_rows(RELIABLE), times.most_seen()),
            (Some(100.0), 1, 2),
            "once is nothing"
        );
        assert!(times.alone(4).unwrap() > 5000.0, "but for what is far beyond");
        times.measured(2, 160.0);
        times.measured(2, 170.0);
        let two = times.alone(2).unwrap();
        assert!((two - 160.0).abs() < 1.0 && times.most_rows(RELIABLE) == 2, "{two}");
    }

    #[test]
    fn first_steps_that_were_all_slow_are_soon_outweighed() {
        let mut times = RowTimes::default();
        (0..10).for_each(|_| times.measured(1, 100.0));
        (0..3).for_each(|_| times.measured(8, 300.0));
        for _ in 0..20 {
            times.measured(1, 100.0);
            times.measured(8, 150.0);
        }
        let (one, eight) = (times.alone(1).unwrap(), times.alone(8).unwrap());
        assert!((90.0..110.0).contains(&one) && (145.0..175.0).contains(&eight), "{one} {eight}");
    }

    /// Steps alternate as answers with and without drafts do, and those with drafts are as they seem to be best: many rows or few.
    #[test]
    fn a_curve_that_is_another_is_found_out_and_one_with_noise_is_not_taken_for_it() {
        let mut state = 7u64;
        let mut random = |most: u64| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            ((state >> 33) % (2 * most + 1)) as f64 / 100.0 + 1.0 - most as f64 / 100.0
        };
        for noise in [0, 10, 30] {
            let mut times = RowTimes::default();
            let mut rounds = |count: u32, took: &dyn Fn(u32) -> f64| {
                for step in 0..count * 120 {
                    let rows = if step / 60 % 2 == 0 { 2 } else { 34 - step % 3 };
                    times.measured(rows, took(rows) * random(noise));
                }
                times
            };
            let cheap = |rows: u32| 1000.0 + 5.0 * f64::from(rows);
            let dear = |rows: u32| 500.0 + 100.0 * f64::from(rows);
            let seen = rounds(40, &cheap).entries.iter().map(|entry| u32::from(entry.seen)).sum::<u32>();
            assert!(seen > 200, "noise of {noise}: it was taken for another");
            if noise == 30 {
                continue;
            }
            let times = rounds(3, &dear);
            let (few, many) = (times.alone(2).unwrap(), times.alone(33).unwrap());
            let ratio = many / few / (dear(33) / dear(2));
            assert!((0.8..1.25).contains(&ratio), "noise of {noise}: {few} {many}");
        }
    }

    #[test]
    fn one_step_that_was_interrupted_says_little_and_what_is_old_is_forgotten() {
        let mut times = RowTimes::default();
        times.measured(2, 100.0);
        times.measured(2, 1e6);
        assert!(times.alone(2).unwrap() < 125.0);
        times.measured(5, 1e6);
        (0..KEPT + ENTRIES as u32).for_each(|_| times.measured(2, 100.0));
        assert!((times.alone(5).unwrap() - 100.0).abs() < 1.0, "{:?}", times.alone(5));
    }
}
