//! A tenants file, or the rules of what is not let in or out: they are what a server can be started with, or the error says what is wrong.
#![no_main]

#[path = "../../crates/folio-server/tests/common/mod.rs"]
mod common;

use common::targets::declared;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| declared(data));
