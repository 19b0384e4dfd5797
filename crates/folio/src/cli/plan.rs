//! Flags of `folio plan`, and what they have in common with replaying a trace.

use std::path::PathBuf;

use clap::Args;
use folio_sim::replay::DraftConfig;
use folio_sim::retention::Policy;

use super::engine::KvDtype;
use super::values::{block_size, positive_f64, share};
use crate::bench::workload::Range;
use crate::plan::WeightFormat;
use crate::units::parse_bytes;

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio plan meta-llama/Llama-2-7b-hf --machine h100 --prompt 1000 --output 200\n  \
    folio plan ./config.json --machine h200 --rate 2,5 --price-per-hour 3.5 --plot plan.svg\n  \
    folio plan layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256 --machine l4 --weights q4\n  \
    folio doctor ./my-model --write-profile && folio plan ./my-model --prompt 100..900 --output 200\n  \
    folio plan --machines\n\n\
    Nothing is loaded: of a model its config.json is enough. The same scheduler and cache as in `folio serve` run in the simulator, with\n\
    steps that take what was measured of this model on this machine (`folio doctor MODEL --write-profile`), or else the range that the\n\
    machine's limits allow. `docs/plan.md` says how, and how far off it is.")]
pub struct PlanArgs {
    /// A config.json, a folder, a .gguf file, org/model[@revision] (its config.json alone is downloaded), an alias, `demo`, or a shape:
    /// layers=N,hidden=N,heads=N,intermediate=N,vocab=N[,kv_heads=N][,head_dim=N][,context=N][,window=N][,experts=N,chosen=N]
    #[arg(required_unless_present = "machines")]
    pub model: Option<String>,
    /// List the published machines, with the source of every figure
    #[arg(long, conflicts_with = "model")]
    pub machines: bool,
    #[command(flatten)]
    pub world: WorldArgs,
    /// Tokens of prompts, or a range of them
    #[arg(long, value_name = "N|A..B", default_value = "512", value_parser = Range::parse)]
    pub prompt: Range,
    /// Tokens of outputs, or a range of them
    #[arg(long, value_name = "N|A..B", default_value = "128", value_parser = Range::parse)]
    pub output: Range,
    /// Prompts begin with one of so many common beginnings, which --prompt does not count
    #[arg(long, value_name = "N", requires = "prefix_len", value_parser = clap::value_parser!(u32).range(1..))]
    pub shared_prefixes: Option<u32>,
    /// Tokens of each of them
    #[arg(long, value_name = "TOKENS", requires = "shared_prefixes", value_parser = clap::value_parser!(u32).range(1..))]
    pub prefix_len: Option<u32>,
    /// Recorded traffic instead: of `folio trace record`, Azure's (CSV) or Mooncake's (JSON lines), plain or gzipped
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "output", "shared_prefixes"])]
    pub trace: Option<PathBuf>,
    /// Most requests of the trace
    #[arg(long, value_name = "N", default_value_t = 2000, requires = "trace", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub requests: u32,
    /// Rates to look at beside shares of the knee, requests a second
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = rate)]
    pub rate: Vec<f64>,
    /// What an hour of the machine costs: prices per million tokens are told in the same currency
    #[arg(long, value_name = "PRICE", value_parser = positive_f64)]
    pub price_per_hour: Option<f64>,
    /// Machines to compare with, by their names in --machines
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub compare: Vec<String>,
    /// Seed of lengths and arrivals
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write times over rates as a plot (SVG)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

/// What a model runs on and how.
#[derive(Args, Clone, Debug)]
pub struct WorldArgs {
    /// A published machine (--machines), or the file of `folio doctor --write-profile` [default: this machine's]
    #[arg(long, value_name = "NAME|FILE")]
    pub machine: Option<String>,
    /// So many of them together, as if they told one another nothing
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub devices: u32,
    /// Threads of a profile [default: all; of a profile with a GPU that one]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,
    /// What weights are kept in [default: as config.json says]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub weights: Option<WeightFormat>,
    /// How keys and values are stored; auto: in 16 bits
    #[arg(long, value_enum, default_value_t = KvDtype::Auto)]
    pub kv_cache_dtype: KvDtype,
    /// Memory for the KV cache, such as 4GiB [default: a share of what the weights leave]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub kv_cache_memory: Option<u64>,
    /// That share [default: 0.5; 0.9 on a GPU]
    #[arg(long, value_name = "0..1", value_parser = share)]
    pub kv_cache_share: Option<f64>,
    /// Memory beside it, in which KV of requests that ended or were preempted is kept [default: none]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub host_kv_memory: Option<u64>,
    /// Longest sequence [default: what the model allows]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_model_len: Option<u32>,
    /// Sequences computed at once [default: 64; 256 on a GPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_num_seqs: Option<u32>,
    /// Tokens computed in one step [default: 512; 4096 on a GPU]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_num_batched_tokens: Option<u32>,
    /// Prompt tokens in one step while somebody is streaming [default: 64; 1024 on a GPU]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_prefill_while_decoding: Option<u32>,
    /// Tokens per KV block, a multiple of 8 [default: 16]
    #[arg(long, value_name = "TOKENS", value_parser = block_size)]
    pub block_size: Option<u32>,
    /// Who is evicted
    #[arg(long, value_name = "POLICY", default_value = "folio", value_parser = policy)]
    pub policy: Policy,
    /// Speculation: tokens drafted for a step, and how probable each is to be right, such as 3:0.7; drafts themselves cost nothing
    #[arg(long, value_name = "N:SHARE", value_parser = drafts)]
    pub drafts: Option<DraftConfig>,
}

/// A request in eleven days at least: times of a simulation are bounded.
fn rate(text: &str) -> Result<f64, String> {
    let rate = positive_f64(text)?;
    if rate >= 1e-6 { Ok(rate) } else { Err("must be 0.000001 or more".into()) }
}

fn policy(text: &str) -> Result<Policy, String> {
    let online = || Policy::ALL.into_iter().filter(|policy| policy.online(0.0).is_some());
    let found = online().find(|policy| policy.name().eq_ignore_ascii_case(text));
    found.ok_or_else(|| {
        let names: Vec<String> = online().map(|policy| policy.name().to_ascii_lowercase()).collect();
        format!("there are {}", names.join(", "))
    })
}

fn drafts(text: &str) -> Result<DraftConfig, String> {
    let parsed = text.split_once(':').and_then(|(tokens, right)| {
        let (tokens, right) = (tokens.parse().ok()?, right.parse().ok()?);
        let sound = (1..=16).contains(&tokens) && (0.0..=1.0).contains(&right);
        sound.then_some(DraftConfig { tokens, right })
    });
    parsed.ok_or_else(|| format!("`{text}` is not 1 to 16 tokens and a share of 0 to 1, such as 3:0.7"))
}
