//! `folio bench`.

use folio_server::Secret;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::engine::*;
use super::values::*;
use crate::bench::kv::Shape;

#[derive(Debug, Subcommand)]
pub enum BenchMode {
    /// The engine alone, in this process: prefill and decode rates as fractions of the machine's measured limits
    Engine(Box<BenchEngineArgs>),
    /// A draft model or a head: how many of its drafts are right, and what they cost, with as many in every step
    Drafts(Box<BenchDraftsArgs>),
    /// Load on any OpenAI-compatible server: TTFT, TPOT, inter-token latency, throughput, goodput
    Serve(Box<BenchServeArgs>),
    /// KL divergence of a quantized model's predictions from those of the model it was made from
    Kl(Box<BenchKlArgs>),
    /// Formats of the KV cache: what each costs in quality, and gains in bytes and speed
    Kv(Box<BenchKvArgs>),
    /// Retention policies on a recorded trace: how many KV blocks each finds again, beside the offline optimum
    Cache(Box<BenchCacheArgs>),
    /// What `folio plan` says of loads that nothing was fitted to, beside what the engine does under them
    Plan(Box<BenchPlanArgs>),
    /// What the field says of KV caches, batching, paging, tiers and speculation, each claim re-created on this machine
    Claims(Box<BenchClaimsArgs>),
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio bench kv --text stories.txt --questions facts.jsonl    quality of every format, on the built-in model\n  \
    folio bench kv ./my-model --text wiki.txt --format int8,int4\n  \
    folio bench kv --depth 8192                                  speed of attention alone, no model\n\n\
    Every format is compared with f16 on the same text; what f32 and bf16 differ from it by is the noise of rounding alone.\n\
    Questions are lines of JSON with messages, answer and distance, as tools/demo_model/generate.py --jsonl writes them.")]
pub struct BenchKvArgs {
    /// A folder, a .gguf file, org/model[@revision][:QUANT], or `demo` [default: the built-in model]
    pub model: Option<String>,
    /// UTF-8 text to predict
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    pub text: Option<PathBuf>,
    /// Token ids to predict instead, as a JSON array or separated by spaces; no token is added to them
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// Questions to answer: one JSON object a line
    #[arg(long, value_name = "FILE")]
    pub questions: Option<PathBuf>,
    /// Tokens of a window of the text
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    pub context: u32,
    /// Windows to read [default: the whole text]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub windows: Option<u32>,
    /// Formats to compare with f16
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = KvDtype::STORED)]
    pub format: Vec<KvDtype>,
    /// Measure attention over a cache of this many tokens
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub depth: Option<u32>,
    /// Heads to measure attention with: query heads, KV heads and dimensions of a head
    #[arg(long, value_name = "HxKVxDIM", value_delimiter = ',', default_value = "32x8x64,16x8x128,32x8x128")]
    pub shape: Vec<Shape>,
    /// Quantize the weights while loading them
    #[arg(long, value_enum, value_name = "TYPE")]
    pub quantize: Option<Quantize>,
    /// Threads [default: as many as the machine and its container allow]
    #[arg(long, env = "FOLIO_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,
    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(
    after_help = "Examples:\n  \
    folio bench kl ./my-model my-model.Q4_K_M.gguf --text wiki.txt\n  \
    folio bench kl ./my-model --quantize q4 --text wiki.txt --windows 32\n\n\
    As llama.cpp's llama-perplexity --kl-divergence: the text is cut into windows of --context tokens, each read with an\n\
    empty cache, and the second half of each is scored. Both models are in memory at once.",
    group = clap::ArgGroup::new("input").required(true)
)]
pub struct BenchKlArgs {
    /// The model in 16 or 32 bits: a folder, a .gguf file, org/model[@revision][:QUANT], or `demo`
    pub base: String,
    /// The quantized one [default: BASE, with --quantize]
    pub model: Option<String>,
    /// A text to read, tokenized by BASE's tokenizer
    #[arg(long, value_name = "FILE", group = "input")]
    pub text: Option<PathBuf>,
    /// Token ids to read instead, as a JSON array or separated by spaces; no token is added to them
    #[arg(long, value_name = "FILE", group = "input")]
    pub tokens: Option<PathBuf>,
    /// Tokens of a window
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    pub context: u32,
    /// Windows to read [default: the whole text]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub windows: Option<u32>,
    /// Quantize MODEL while loading it; BASE is left as it is
    #[arg(long, value_enum, value_name = "TYPE")]
    pub quantize: Option<Quantize>,
    /// How both models' keys and values are stored; auto: in the type of each one's weights
    #[arg(long, value_enum, default_value_t = KvDtype::Auto)]
    pub kv_cache_dtype: KvDtype,
    /// Threads [default: as many as the machine and its container allow]
    #[arg(long, env = "FOLIO_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Example:\n  \
    folio bench cache --trace conversation_trace.jsonl --blocks 1k,5k,10k --plot hits.svg\n\n\
    Requests run one after another; only full blocks count, and one token of a prompt is always left to compute. MIN is\n\
    Belady's optimum, which knows the future.")]
pub struct BenchCacheArgs {
    /// Mooncake's format: one JSON object a line with input_length and hash_ids, plain or gzipped
    #[arg(long, value_name = "FILE")]
    pub trace: PathBuf,
    /// Capacities, such as 1k,5k,10k
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "1k,5k,10k,50k", value_parser = Blocks::parse)]
    pub blocks: Vec<Blocks>,
    /// Formats of KV to compare in the memory of as many f16 blocks
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FORMAT", default_values_t = [KvDtype::F16, KvDtype::Int8, KvDtype::Int4])]
    pub kv_formats: Vec<KvDtype>,
    /// Dimensions of a head, for the formats with a scale per head
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(8..=1024))]
    pub head_dim: u32,
    /// Write the hit rates as a plot (SVG)
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// A number of blocks: 500, 5k, 2M.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks(pub u32);

impl Blocks {
    fn parse(text: &str) -> Result<Self, String> {
        let (digits, unit) = match (text.strip_suffix(['k', 'K']), text.strip_suffix('M')) {
            (Some(digits), _) => (digits, 1000),
            (_, Some(digits)) => (digits, 1_000_000),
            _ => (text, 1),
        };
        let blocks = digits.parse().ok().and_then(|n: u32| n.checked_mul(unit));
        blocks
            .filter(|n| *n > 0)
            .map(Blocks)
            .ok_or_else(|| "expected a number of blocks, such as 500, 5k or 2M".to_owned())
    }
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio bench engine ./my-model\n  \
    folio bench engine ./my-model --prefill 512,2048 --batch 1,8,32 --depth 0,8192 --json\n\n\
    Prompts are random tokens. Rates are medians over the repetitions, after a warm-up. A decode step of one sequence\n\
    reads every weight once, so its limit is the bandwidth at which the weights can be read; a prompt multiplies every\n\
    weight with every token, so its limit is the multiply rate. Both limits are measured first.")]
pub struct BenchEngineArgs {
    /// A folder, a .gguf file, or org/model[@revision][:QUANT] [default: the built-in model]
    pub model: Option<String>,
    /// Prompt lengths to prefill
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", default_value = "128,512")]
    pub prefill: Vec<u32>,
    /// Numbers of sequences decoding at once
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "1,8,32")]
    pub batch: Vec<u32>,
    /// Context lengths at which decoding is measured
    #[arg(long, value_delimiter = ',', value_name = "TOKENS", default_value = "0")]
    pub depth: Vec<u32>,
    /// Tokens each sequence decodes; several sequences together want at least 4
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..))]
    pub decode: u32,
    /// Times each figure is measured
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// With --speculate, and nothing else then: folders with the texts `prompt` and `answer`, and `prediction` if it has one. The answer is said
    /// whatever the weights are, with drafts and without; words are tokens
    #[arg(long, value_name = "DIR", num_args = 1..)]
    pub texts: Vec<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio bench plan ./my-model\n  \
    folio bench plan --seconds 5 --repeat 1                     a short look\n\n\
    Four kinds of traffic, each at 50 and 80 % of the knee that the plan names, and all at once for the knee itself: eight cells.\n\
    Steps are measured before and behind each kind of traffic, one kind at a time, and planned is with those. Cells take turns, and medians\n\
    over the turns are compared.")]
pub struct BenchPlanArgs {
    /// A folder, a .gguf file, or org/model[@revision][:QUANT] [default: the built-in model]
    pub model: Option<String>,
    /// How long each cell's requests keep coming
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Turns of all cells
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeat: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio bench claims\n  \
    folio bench claims ./my-model --only prefix-cache,offload --repeat 5 --json\n  \
    folio bench claims --policy continuous,static,contiguous\n\n\
    Each claim is measured with what is claimed and without it, in turn, by the same scheduler and cache. Prompts are random\n\
    tokens. `docs/claims.md` has what came of it, and what was said by whom.")]
pub struct BenchClaimsArgs {
    /// A folder, a .gguf file, or org/model[@revision][:QUANT] [default: the built-in model]
    pub model: Option<String>,
    /// Claims to re-create [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub only: Vec<String>,
    /// Instead of claims: requests with answers of unequal lengths under each of these policies
    #[arg(long, value_enum, value_delimiter = ',', value_name = "POLICY", conflicts_with = "only")]
    pub policy: Vec<BatchPolicy>,
    /// Pairs of each
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

/// How requests share an engine, in benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BatchPolicy {
    Continuous,
    Static,
    Contiguous,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio bench drafts --draft-model ./eagle3-head --dialogues dialogues.jsonl\n  \
    folio bench drafts ./my-model --draft-model ./my-draft --dialogues dialogues.jsonl --drafts 5 --temperature 0,1 --json\n\n\
    Each dialogue is answered with drafts and without, alone and from nothing. Drafts are verified in every step, whether\n\
    or not that pays. Dialogues are lines of JSON with messages, as tools/demo_model/generate.py --jsonl writes them.")]
pub struct BenchDraftsArgs {
    /// A folder, a .gguf file, or org/model[@revision][:QUANT] [default: the built-in model]
    pub model: Option<String>,
    /// Dialogues to answer: one JSON object a line
    #[arg(long, value_name = "FILE")]
    pub dialogues: PathBuf,
    /// Drafts in a step
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub drafts: u32,
    /// Temperatures to answer at
    #[arg(long, value_delimiter = ',', value_name = "T", default_value = "0,0.7,1")]
    pub temperature: Vec<f32>,
    /// Most tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 96, value_parser = clap::value_parser!(u32).range(2..))]
    pub tokens: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  \
    folio bench serve --url http://127.0.0.1:8000 --requests 200 --concurrency 16\n  \
    folio bench serve --url http://127.0.0.1:8000 --rate 4 --input-len 200..800 --output-len 64 --slo-ttft-ms 500 --slo-tpot-ms 50\n  \
    folio bench serve --url http://127.0.0.1:8000 --shared-prefixes 8 --prefix-len 1000 --input-len 100 --token-ids 1000..40000\n  \
    folio bench serve --url http://127.0.0.1:8000 --azure-trace AzureLLMInferenceTrace_conv.csv --trace-speed 0.1 --requests 100\n\n\
    TTFT: from sending a request to its first token. TPOT: mean time per token after the first. ITL: between two chunks\n\
    of a stream. Goodput: requests that met every given limit, per second.")]
pub struct BenchServeArgs {
    /// Server, with or without /v1
    #[arg(long, value_name = "URL")]
    pub url: String,
    /// Model name to ask for [default: the first of /v1/models]
    #[arg(long)]
    pub model: Option<String>,
    /// Key to send
    #[arg(long, env = "OPENAI_API_KEY", hide_env_values = true)]
    pub api_key: Option<Secret>,
    /// Endpoint to use
    #[arg(long, value_enum, default_value_t = Endpoint::Completions)]
    pub endpoint: Endpoint,

    /// Measured requests
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: u32,
    /// Requests sent before measuring
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub warmup: u32,
    /// Requests in flight at once [default: 8; with --rate or a trace: as many as arrive]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10000))]
    pub concurrency: Option<u32>,
    /// Requests per second with Poisson arrivals, instead of a fixed concurrency
    #[arg(long, value_name = "PER_S", value_parser = positive_f64)]
    pub rate: Option<f64>,
    /// Seed of lengths, texts and arrivals
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Give up on a request after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub timeout: u64,

    /// Prompts, one a line, or a .jsonl with "prompt", or MT-bench's "turns"
    #[arg(long, value_name = "FILE", conflicts_with_all = ["azure_trace", "mooncake_trace", "shared_prefixes"])]
    pub prompts: Option<PathBuf>,
    /// Prompt length in tokens (about), or a range as 100..900
    #[arg(long, value_name = "N|A..B", default_value = "256", value_parser = crate::bench::workload::Range::parse)]
    pub input_len: crate::bench::workload::Range,
    /// Answer length in tokens, or a range
    #[arg(long, value_name = "N|A..B", default_value = "64", value_parser = crate::bench::workload::Range::parse)]
    pub output_len: crate::bench::workload::Range,
    /// Let the model end its answers, instead of generating the full length with ignore_eos
    #[arg(long)]
    pub allow_eos: bool,
    /// Put one of this many common beginnings before every prompt, in turn
    #[arg(long, value_name = "N", requires = "prefix_len")]
    pub shared_prefixes: Option<u32>,
    /// Tokens (about) of each common beginning
    #[arg(long, value_name = "TOKENS", requires = "shared_prefixes")]
    pub prefix_len: Option<u32>,
    /// Send made-up prompts as random token ids of this range, so that their lengths are exact; for completions
    #[arg(long, value_name = "A..B", value_parser = crate::bench::workload::Range::parse, conflicts_with = "prompts")]
    pub token_ids: Option<crate::bench::workload::Range>,
    /// Replay lengths and arrivals of an Azure LLM trace (TIMESTAMP,ContextTokens,GeneratedTokens)
    #[arg(long, value_name = "CSV", conflicts_with_all = ["mooncake_trace", "rate"])]
    pub azure_trace: Option<PathBuf>,
    /// Replay lengths, arrivals and shared blocks of a Mooncake trace
    #[arg(long, value_name = "JSONL", conflicts_with = "rate")]
    pub mooncake_trace: Option<PathBuf>,
    /// Trace time divided by this: 0.1 replays ten times slower
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = positive_f64)]
    pub trace_speed: f64,
    /// Trace requests longer than this in all are left out (and counted)
    #[arg(long, value_name = "TOKENS")]
    pub trace_max_len: Option<u32>,

    /// A good request has its first token within this time
    #[arg(long, value_name = "MS", value_parser = positive_f64)]
    pub slo_ttft_ms: Option<f64>,
    /// A good request has a TPOT of at most this
    #[arg(long, value_name = "MS", value_parser = positive_f64)]
    pub slo_tpot_ms: Option<f64>,
    /// A good request is finished within this time
    #[arg(long, value_name = "MS", value_parser = positive_f64)]
    pub slo_e2e_ms: Option<f64>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Endpoint {
    Completions,
    Chat,
}
