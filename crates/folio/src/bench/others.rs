//! What else ran on this machine while something was measured.
//!
//! Owns: what Linux counts of processors' time beyond this process, with what a hypervisor gave to others. Elsewhere nothing is known.

use std::fs;

/// A share of the processors' time from which on what was measured may be another machine's.
pub const NOTABLE: f64 = 0.05;

/// Time of all processors since the machine started, in the kernel's ticks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessorTime {
    all: u64,
    /// Of it, with something to do or taken away.
    busy: u64,
    /// Of it, this process.
    own: u64,
}

impl ProcessorTime {
    pub fn now() -> Option<Self> {
        Self::read(&fs::read_to_string("/proc/stat").ok()?, &fs::read_to_string("/proc/self/stat").ok()?)
    }

    /// `all`: of `/proc/stat`; `own`: of `/proc/PID/stat`.
    fn read(all: &str, own: &str) -> Option<Self> {
        let first = all.lines().next()?.strip_prefix("cpu ")?;
        // user, nice, system, idle, iowait, irq, softirq, steal; what guests have is in the first two.
        let times: Vec<u64> = first.split_whitespace().map_while(|time| time.parse().ok()).take(8).collect();
        let [.., idle, iowait, _, _, _] = times[..] else { return None };
        let all: u64 = times.iter().sum();
        // The name, which may be any text, is in parentheses; behind them utime and stime are the 12th and 13th.
        let mut fields = own.rsplit_once(')')?.1.split_whitespace().skip(11);
        let mut next = || fields.next()?.parse::<u64>().ok();
        Some(Self { all, busy: all - idle - iowait, own: next()? + next()? })
    }

    /// Which share of all processors' time others had since then; 0 to 1.
    pub fn others_since(self, before: Self) -> f64 {
        let passed = |of: fn(&Self) -> u64| of(&self).saturating_sub(of(&before)) as f64;
        let others = (passed(|time| time.busy) - passed(|time| time.own)).max(0.0);
        others / passed(|time| time.all).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ours_and_not_idle_is_of_others() {
        let stat = |numbers: &str| format!("cpu  {numbers} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n");
        let own =
            |utime, stime| format!("7 (a) b) R 1 1 1 0 -1 4194560 9 0 0 0 {utime} {stime} 0 0 20 0 3\n");
        let before = ProcessorTime::read(&stat("100 0 50 800 10 1 2 3"), &own(40, 5)).expect("read");
        // 1000 ticks later: 500 idle, 100 waiting for a disk, 250 ours, and the rest others'.
        let after = ProcessorTime::read(&stat("400 50 90 1300 110 1 2 13"), &own(260, 35)).expect("read");
        assert_eq!(after.others_since(before), 0.15);
        assert_eq!(before.others_since(after), 0.0, "time never goes back");
        assert_eq!(ProcessorTime::read("cpu  1 2 3\n", &own(1, 1)), None);
        assert_eq!(ProcessorTime::read(&stat("1 1 1 1 1 1 1 1"), "7 (a) R 1"), None);
    }
}
