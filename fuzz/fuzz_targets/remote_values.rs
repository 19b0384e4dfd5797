//! A server of `--remote-kv` that answers anything: what comes of it was stored, and what is wrong is written over.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/folio-tiers/tests/common/mod.rs"]
mod common;

use common::values::Values;

static WRITTEN: LazyLock<Values> = LazyLock::new(Values::written);

fuzz_target!(|orders: &[u8]| {
    let values = WRITTEN.copy();
    values.spoil(&orders[..orders.len().min(500)]);
    values.check();
});
