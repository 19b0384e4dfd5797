//! Flags of `folio trace`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use folio_server::Secret;

use super::plan::WorldArgs;

#[derive(Debug, Subcommand)]
pub enum TraceAction {
    /// Record the traffic of a running server, without its texts, for Perfetto and `folio trace replay`
    #[command(after_help = "Example:\n  \
        folio trace record --url http://127.0.0.1:8000 --seconds 60 --out trace.json\n\n\
        Open the file on https://ui.perfetto.dev: a track for each request, one for the engine's steps, and counters. It has times, lengths, and\n\
        which blocks of prompts are equal, as numbers; no text, no token, no name of a tenant. Where there are keys it needs one with the scopes `usage` and `admin`.")]
    Record(TraceRecordArgs),
    /// Run a recording again in the simulator, as it was or on another machine, and compare
    #[command(after_help = "Examples:\n  \
        folio trace replay trace.json                                    with the steps that were recorded\n  \
        folio trace replay trace.json --blocks 4000 --policy lru\n  \
        folio trace replay trace.json --model ./config.json --machine h100\n\n\
        The scheduler and the cache are those of `folio serve`. Steps take what was recorded, or what --model on --machine takes, as in\n\
        `folio plan`. What is not given is as it was recorded.")]
    Replay(Box<TraceReplayArgs>),
}

#[derive(Args, Debug)]
pub struct TraceRecordArgs {
    /// The server, with or without /v1
    #[arg(long, value_name = "URL")]
    pub url: String,
    /// Key to send
    #[arg(long, env = "OPENAI_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub api_key: Option<Secret>,
    /// Of a server of several models: whose traffic
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// How long to record
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// File to write
    #[arg(long, value_name = "FILE", default_value = "folio-trace.json")]
    pub out: PathBuf,
}

#[derive(Args, Debug)]
pub struct TraceReplayArgs {
    /// What `folio trace record` wrote
    pub file: PathBuf,
    /// A model as for `folio plan`, whose steps on --machine take the place of those that were recorded
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Blocks of the KV cache [default: as recorded; with --model what fits]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1 << 30))]
    pub blocks: Option<u32>,
    #[command(flatten)]
    pub world: WorldArgs,
    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}
