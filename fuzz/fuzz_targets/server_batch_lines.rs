//! Lines of a batch, run by every endpoint: it ends, and no line has two results.
#![no_main]

#[path = "../../crates/folio-server/tests/common/mod.rs"]
mod common;

use common::targets::Target;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static TARGET: Target = Target::new();
}

fuzz_target!(|data: &[u8]| TARGET.with(|target| target.batch_lines(data)));
