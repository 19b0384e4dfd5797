//! Checkpoints, families and the decoder as data.

pub mod backend;
pub mod program;
