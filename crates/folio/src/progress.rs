//! Progress bars on standard error; nothing when it is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that clears itself when done.
pub struct Bar(ProgressBar);

impl Bar {
    /// Counts bytes.
    pub fn bytes(what: &str) -> Self {
        Self::new(what, "{prefix} [{bar:32}] {bytes}/{total_bytes} {bytes_per_sec} {wide_msg}")
    }

    /// Counts things.
    pub fn items(what: &str, total: u64) -> Self {
        let bar = Self::new(what, "{prefix} [{bar:32}] {pos}/{len} {elapsed} {wide_msg}");
        bar.0.set_length(total);
        bar
    }

    fn new(what: &str, template: &str) -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    pub fn set(&self, done: u64, total: u64, message: &str) {
        self.0.set_length(total);
        self.0.set_position(done);
        self.0.set_message(message.to_owned());
    }

    pub fn advance(&self, message: &str) {
        self.0.inc(1);
        self.0.set_message(message.to_owned());
    }

    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}
