//! A folder of `--disk-kv` that somebody did anything to: what is served and told was stored, and the store goes on.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/folio-tiers/tests/common/noise.rs"]
mod noise;

static WRITTEN: LazyLock<noise::Files> = LazyLock::new(noise::written);

fuzz_target!(|orders: &[u8]| {
    let files = WRITTEN.copy();
    files.spoil(&orders[..orders.len().min(600)]);
    files.check();
});
