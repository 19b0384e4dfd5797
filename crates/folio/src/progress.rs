//! Progress bars on standard error: only on a terminal, and only for what takes longer than a moment.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Nothing is shown before this.
const MOMENT: Duration = Duration::from_millis(300);

/// A bar that clears itself when done.
pub struct Bar {
    bar: ProgressBar,
    started: Instant,
}

impl Bar {
    /// Counts bytes.
    pub fn bytes(what: &str) -> Self {
        Self::new(what, "{prefix} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {wide_msg}")
    }

    /// Counts things.
    pub fn items(what: &str, total: u64) -> Self {
        let bar = Self::new(what, "{prefix} [{bar:32}] {pos}/{len} {elapsed} {wide_msg}");
        bar.bar.set_length(total);
        bar
    }

    fn new(what: &str, template: &str) -> Self {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what.to_owned());
        Self { bar, started: Instant::now() }
    }

    pub fn set(&self, done: u64, total: u64, message: &str) {
        self.bar.set_length(total);
        self.bar.set_position(done);
        self.show(message);
    }

    pub fn advance(&self, message: &str) {
        self.bar.inc(1);
        self.show(message);
    }

    fn show(&self, message: &str) {
        if self.bar.is_hidden() && self.started.elapsed() > MOMENT {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_message(message.to_owned());
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
