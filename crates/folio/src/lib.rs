//! The command line of Folio, as a library so that its parts can be tested: see `cli` for what there is, `runtime` for how
//! a model becomes a running engine.
#![forbid(unsafe_code)]

pub mod bench;
mod cache;
mod chat;
pub mod cli;
pub mod config;
mod demo;
mod device;
pub mod docs;
mod doctor;
mod interrupt;
mod keys;
mod load_format;
mod memory;
mod models;
mod on_demand;
mod packed_cache;
mod plan;
mod profile;
mod progress;
mod quantize;
mod quantizing;
mod remote;
mod run;
pub mod runtime;
mod serve;
mod session;
mod svg;
mod trace;
mod units;
mod why;

use anyhow::Result;
use clap::CommandFactory;
use cli::{BenchMode, Cli, Command, ConfigAction, TraceAction};

/// Parses the command line and does what it says.
pub fn main() -> Result<()> {
    let command = config::command_line(std::env::args_os())?;
    let filter = tracing_subscriber::EnvFilter::try_from_env("FOLIO_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn,folio=info,folio_server=info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
    match command {
        Command::Serve(args) => serve::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Bench { mode: BenchMode::Engine(args) } => bench::engine::run(&args),
        Command::Bench { mode: BenchMode::Drafts(args) } => bench::drafts::run(&args),
        Command::Bench { mode: BenchMode::Serve(args) } => bench::load::run(&args),
        Command::Bench { mode: BenchMode::Kl(args) } => bench::kl::run(&args),
        Command::Bench { mode: BenchMode::Kv(args) } => bench::kv::run(&args),
        Command::Bench { mode: BenchMode::Plan(args) } => plan::cells(&args),
        Command::Bench { mode: BenchMode::Claims(args) } => bench::claims::run(&args),
        Command::Bench { mode: BenchMode::Cache(args) } => bench::cache::run(&args),
        Command::Config { action: ConfigAction::Check { file } } => config::check(&file),
        Command::Keys { action } => keys::run(action),
        Command::Cache { action } => cache::run(action),
        Command::Pull(args) => models::commands::pull(&args),
        Command::List(args) => models::commands::list(&args),
        Command::Rm(args) => models::commands::rm(&args),
        Command::Show(args) => models::show(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Trace { action: TraceAction::Record(args) } => trace::record(&args),
        Command::Trace { action: TraceAction::Replay(args) } => plan::replay(&args),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "folio", &mut std::io::stdout().lock());
            Ok(())
        }
        Command::Docs { page } => {
            print!("{}", docs::page(page));
            Ok(())
        }
    }
}
