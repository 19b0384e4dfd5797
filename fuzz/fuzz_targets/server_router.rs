//! A JSON body on any route of a server of several models: whom it is for is read, or the error says what is wrong.
#![no_main]

#[path = "../../crates/folio-server/tests/common/mod.rs"]
mod common;

use common::targets::Target;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static TARGET: Target = Target::new();
}

fuzz_target!(|data: &[u8]| TARGET.with(|target| target.router(data)));
