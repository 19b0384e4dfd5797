//! Which of a library's algorithms multiplies a shape, if any may.
//!
//! Owns: the decision, a function of what the trials say. Must never: measure time, so that the same library on the same device decides
//! the same again. An algorithm may be chosen if it takes every number of rows there can be, is exact where every order of summing is,
//! and gives a row the same bits wherever it stands in whatever batch.

use crate::driver::DriverError;
use crate::gemm::Algorithm;

type Result<T> = std::result::Result<T, DriverError>;

/// Rows that others are compared with.
pub const BASE_ROWS: u32 = 64;
/// Rows that algorithms are asked for.
pub const TYPICAL_ROWS: u32 = 256;
/// Where batches begin among the rows that are tried.
const PLACES: [u32; 3] = [0, 7, 41];
/// Rows there are behind the largest batch.
pub const MOST_BEFORE: u32 = 41;
/// Numbers of rows that are tried: one, those around the tiles that kernels have, and large ones.
const BATCHES: [u32; 22] =
    [1, 2, 3, 5, 8, 9, 16, 17, 24, 32, 33, 63, 64, 65, 128, 129, 256, 257, 512, 1024, 2048, 4096];

/// One shape's products by a library, tried on rows that repeat after [`BASE_ROWS`], or after as many as there can be.
pub trait Trial {
    fn candidates(&mut self) -> Result<Vec<Algorithm>>;

    fn takes(&mut self, algorithm: &Algorithm, rows: u32) -> bool;

    /// Whether the product of so many rows of whole numbers is what it is.
    fn exact(&mut self, algorithm: &Algorithm, rows: u32) -> Result<bool>;

    /// Multiplies the first rows, to be compared with.
    fn begin(&mut self, algorithm: &Algorithm, rows: u32) -> Result<()>;

    /// Whether `rows` rows from `first` on have the bits that `begin` gave them.
    fn same(&mut self, algorithm: &Algorithm, first: u32, rows: u32) -> Result<bool>;
}

/// The first candidate that may be chosen for steps of up to `max_rows` rows; or why there is none.
pub fn choose(trial: &mut dyn Trial, max_rows: u32) -> std::result::Result<Algorithm, String> {
    let candidates = trial.candidates().map_err(|error| error.to_string())?;
    let mut reasons = Vec::new();
    for algorithm in &candidates {
        match refusal(trial, algorithm, max_rows) {
            Ok(None) => return Ok(*algorithm),
            Ok(Some(reason)) => reasons.push(reason),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    reasons.dedup();
    match reasons.is_empty() {
        true => Err("no algorithm is offered that sums in one piece".to_owned()),
        false => Err(format!("none of {} algorithms may be used: {}", candidates.len(), reasons.join("; "))),
    }
}

/// Why this algorithm may not be chosen.
fn refusal(trial: &mut dyn Trial, algorithm: &Algorithm, max_rows: u32) -> Result<Option<String>> {
    if let Some(rows) = (1..=max_rows).find(|rows| !trial.takes(algorithm, *rows)) {
        return Ok(Some(format!("it does not take {rows} rows")));
    }
    let base = BASE_ROWS.min(max_rows);
    if !trial.exact(algorithm, base)? {
        return Ok(Some("it is wrong where every order of summing is exact".to_owned()));
    }
    trial.begin(algorithm, base)?;
    for rows in BATCHES.into_iter().filter(|rows| *rows < max_rows).chain([max_rows]) {
        // Large batches have rows at every place of a tile by themselves.
        let places = if rows <= BASE_ROWS { &PLACES[..] } else { &PLACES[1..2] };
        for first in places {
            if !trial.same(algorithm, *first, rows)? {
                return Ok(Some(format!("the bits of a row differ in a batch of {rows}")));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How a made-up algorithm conducts itself.
    #[derive(Clone, Copy, PartialEq)]
    enum Conduct {
        Right,
        /// More rows it does not take.
        TakesAtMost(u32),
        Wrong,
        /// From so many rows on, it sums in another order.
        Changes(u32),
        /// Of rows behind this, another kernel takes care.
        ChangesBehind(u32),
        FailsAt(u32),
    }

    struct Fake {
        conducts: Vec<Conduct>,
        calls: usize,
    }

    impl Fake {
        fn new(conducts: &[Conduct]) -> Self {
            Self { conducts: conducts.to_vec(), calls: 0 }
        }

        fn of(&mut self, algorithm: &Algorithm) -> Conduct {
            self.calls += 1;
            self.conducts[algorithm.0[0] as usize]
        }
    }

    impl Trial for Fake {
        fn candidates(&mut self) -> Result<Vec<Algorithm>> {
            Ok((0..self.conducts.len() as u64).map(|index| Algorithm([index; 8])).collect())
        }

        fn takes(&mut self, algorithm: &Algorithm, rows: u32) -> bool {
            !matches!(self.of(algorithm), Conduct::TakesAtMost(most) if rows > most)
        }

        fn exact(&mut self, algorithm: &Algorithm, _: u32) -> Result<bool> {
            Ok(self.of(algorithm) != Conduct::Wrong)
        }

        fn begin(&mut self, algorithm: &Algorithm, _: u32) -> Result<()> {
            self.of(algorithm);
            Ok(())
        }

        fn same(&mut self, algorithm: &Algorithm, first: u32, rows: u32) -> Result<bool> {
            match self.of(algorithm) {
                Conduct::Changes(from) => Ok(rows < from),
                Conduct::ChangesBehind(place) => Ok(first < place),
                Conduct::FailsAt(at) if rows == at => {
                    Err(DriverError::Call { call: "a product", reason: "it is not supported".to_owned() })
                }
                _ => Ok(true),
            }
        }
    }

    fn chosen(conducts: &[Conduct], max_rows: u32) -> std::result::Result<u64, String> {
        choose(&mut Fake::new(conducts), max_rows).map(|algorithm| algorithm.0[0])
    }

    #[test]
    fn the_first_that_may_be_used_is_chosen_and_the_same_every_time() {
        use Conduct::*;
        assert_eq!(chosen(&[Right, Right], 512), Ok(0));
        let bad = [Wrong, Changes(65), Changes(4096), ChangesBehind(41), TakesAtMost(4095), FailsAt(17)];
        for conduct in bad {
            assert_eq!(chosen(&[conduct, Right], 4096), Ok(1));
        }
        let all = [&bad[..], &[Right]].concat();
        assert_eq!((chosen(&all, 4096), chosen(&all, 4096)), (Ok(6), Ok(6)));
    }

    #[test]
    fn only_numbers_of_rows_that_can_come_count() {
        use Conduct::*;
        assert_eq!(chosen(&[TakesAtMost(100), Right], 100), Ok(0));
        assert_eq!(chosen(&[TakesAtMost(100), Right], 101), Ok(1));
        assert_eq!(chosen(&[Changes(101)], 100), Ok(0));
        // The largest is tried itself, whatever it is.
        assert!(chosen(&[Changes(101)], 101).is_err());
        assert_eq!(chosen(&[Right], 1), Ok(0));
    }

    #[test]
    fn where_none_may_be_used_the_reasons_are_said() {
        use Conduct::*;
        let reason = chosen(&[Wrong, Changes(64), FailsAt(3)], 512).expect_err("none");
        for part in ["none of 3", "exact", "a batch of 64", "it is not supported"] {
            assert!(reason.contains(part), "{reason}");
        }
        assert!(chosen(&[], 512).expect_err("none").contains("no algorithm is offered"));
    }

    #[test]
    fn one_that_takes_not_every_batch_is_not_run() {
        let mut fake = Fake::new(&[Conduct::TakesAtMost(10)]);
        assert!(choose(&mut fake, 64).is_err());
        assert_eq!(fake.calls, 11, "eleven numbers of rows were asked for and nothing was multiplied");
    }
}
