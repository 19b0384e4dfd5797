//! A form with a file: refused, or kept as it came.
#![no_main]

#[path = "../../crates/folio-server/tests/common/mod.rs"]
mod common;

use common::targets::Target;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static TARGET: Target = Target::new();
}

fuzz_target!(|data: &[u8]| TARGET.with(|target| target.multipart(data)));
