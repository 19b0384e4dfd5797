//! What a model says, streamed by every API: whole events, and together the answer that is not streamed.
#![no_main]

#[path = "../../crates/folio-server/tests/common/mod.rs"]
mod common;

use common::targets::Target;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static TARGET: Target = Target::new();
}

fuzz_target!(|data: &[u8]| TARGET.with(|target| target.sse(data)));
