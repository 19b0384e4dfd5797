//! From a request that was read to its answer: prompts, screening, submitting, following.

pub(crate) mod driver;
pub(crate) mod input;
pub(crate) mod job;
pub(crate) mod prompt;
pub(crate) mod retention;
pub(crate) mod run;
pub(crate) mod sampling;
pub(crate) mod screening;
pub(crate) mod tokenizing;
pub(crate) mod truncation;

use std::sync::Arc;

use crate::engine::Served;
use crate::load::Load;
use crate::observability::Observability;
use crate::tenancy::Tenancy;
use input::InputProcessor;

/// What it takes to answer a request: the parts that have a hand in it.
pub(crate) struct Generator {
    pub served: Arc<Served>,
    pub inputs: Arc<InputProcessor>,
    pub tenancy: Arc<Tenancy>,
    pub load: Arc<Load>,
    pub observability: Arc<Observability>,
}
