//! From a prepared job to an answer: constraints, the engine's events, text, safety and prefixes.

pub(crate) mod bounds;
pub(crate) mod choice;
pub(crate) mod generate;
pub(crate) mod guides;
pub(crate) mod kept_grammars;
pub(crate) mod prefixes;
pub(crate) mod reading;
pub(crate) mod safety;
pub(crate) mod shared_prefixes;
pub(crate) mod tokenizing;
pub(crate) mod wire;
