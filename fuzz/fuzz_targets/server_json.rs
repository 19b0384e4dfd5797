//! A JSON body on any route: an answer, or an error that says what is wrong.
#![no_main]

#[path = "../../crates/folio-server/tests/common/mod.rs"]
mod common;

use common::targets::Target;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static TARGET: Target = Target::new();
}

fuzz_target!(|data: &[u8]| TARGET.with(|target| target.json(data)));
