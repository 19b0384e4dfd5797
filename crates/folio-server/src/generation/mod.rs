//! From a request that was read to its answer: prompts, screening, submitting, following.

pub(crate) mod driver;
pub(crate) mod job;
pub(crate) mod prompt;
pub(crate) mod retention;
pub(crate) mod run;
pub(crate) mod sampling;
pub(crate) mod screening;
pub(crate) mod tokenizing;
