//! Checkpoints, families and the decoder as data.
//!
//! Owns: reading models people have (a Hugging Face folder, a name on the hub, bytes inside the program), the table of
//! families, and the [`program::Program`] a [`backend::Backend`] runs. Must never: know about requests, tokens' text or
//! KV blocks' identity. `unsafe` appears only where files are mapped (`checkpoint/storage.rs`).
#![deny(unsafe_code)]

pub mod adapter;
pub mod backend;
pub mod check;
pub mod checkpoint;
pub mod config;
pub mod decoder;
pub mod draft_head;
pub mod dummy;
pub mod eagle;
mod error;
pub mod family;
pub mod hub;
pub mod kv_format;
mod loader;
pub mod mtp;
mod packed;
pub mod program;
pub mod quant;
pub mod reference;
pub mod rope;
pub mod sampling;
pub mod tables;
#[doc(hidden)]
pub mod testing;
pub mod weights;

pub use checkpoint::{Checkpoint, GenerationConfig, POOLING_FILES, Pooling};
pub use config::Config;
pub use error::{ModelError, Result};
pub use family::{supported_families, supported_table};
pub use loader::{LoadOptions, LoadedModel, Model, PackedAbout, Progress};
