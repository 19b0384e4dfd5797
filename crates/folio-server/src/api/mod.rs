//! The endpoints that generate, by API: from a request that was read to a job.

pub(crate) mod anthropic;
pub(crate) mod openai;
pub(crate) mod responses;
