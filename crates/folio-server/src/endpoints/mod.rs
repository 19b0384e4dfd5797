//! What can be asked of the server, by route: from a request to its answer.

pub(crate) mod anthropic;
pub(crate) mod batches;
pub(crate) mod live;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod pages;
pub(crate) mod prefixes;
pub(crate) mod responses;
pub(crate) mod routing;
pub(crate) mod tokenize;
pub(crate) mod trace;
pub(crate) mod usage;
pub(crate) mod why;
