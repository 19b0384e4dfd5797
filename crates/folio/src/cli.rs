//! The command line: every command, flag and example. Help is written for someone who meets the program for the first
//! time; `docs/cli.md` is made from here.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use folio_model::backend::KvFormat;
use folio_model::kv_format::KvSkip;
use folio_server::Secret;
use folio_server::keys::Scope;

use crate::bench::kv::Shape;
use crate::device::{DeviceChoice, GemmBackend};
use crate::load_format::LoadFormat;
use crate::units::parse_bytes;

#[derive(Debug, Parser)]
#[command(
    name = "folio",
    version,
    about = "Serve open-weight language models on the machine you have",
    long_about = "Folio serves open-weight language models behind the HTTP APIs that OpenAI's and Anthropic's clients already speak.\n\
                  Without a command it serves the small model that is built in, so there is nothing to download first.",
    after_help = "Examples:\n  \
        folio                                         serve the built-in model on http://127.0.0.1:8000\n  \
        folio serve Qwen/Qwen3-0.6B                   download a model from the hub and serve it\n  \
        folio serve ./my-model --port 9000            serve a folder with config.json, *.safetensors, tokenizer.json\n  \
        folio chat                                    talk to the built-in model in the terminal\n  \
        folio run ./my-model \"Once upon a time\"       print one answer\n  \
        folio bench engine ./my-model                 how close to this machine's limits a model runs\n\n\
        A MODEL is a folder, a .gguf file or a hub name: org/model or org/model@revision.\n\
        HF_HOME, HF_ENDPOINT and HF_TOKEN are honoured."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model over HTTP
    Serve(Box<ServeArgs>),
    /// Talk to a model in the terminal
    Chat(Box<ChatArgs>),
    /// Print one answer to a prompt
    Run(Box<RunArgs>),
    /// Measure the engine, or any OpenAI-compatible server
    Bench {
        #[command(subcommand)]
        mode: BenchMode,
    },
    /// Look at configuration files of `folio serve`
    Config {
        #[command(subcommand)]
        action: ConfigAction,
    },
    /// Make, list and revoke API keys
    Keys {
        #[command(subcommand)]
        action: KeysAction,
    },
    /// Download a model into the hub's cache
    Pull(PullArgs),
    /// Quantize a model into a folder of packed weights that starts at once
    Quantize(QuantizeArgs),
    /// Show what this machine can do, measured for each number of threads, and how far a model can get on it
    Doctor(DoctorArgs),
    /// Print generated documentation pages
    #[command(hide = true)]
    Docs { page: DocsPage },
}

/// Everything that decides how a model is loaded and its engine built; shared by serve, chat, run and bench.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Longest sequence, prompt and answer together [default: what the model allows]
    #[arg(long, env = "FOLIO_MAX_MODEL_LEN", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_model_len: Option<u32>,

    /// Memory for the KV cache, such as 4GiB [default: a share of free memory, explained at start]
    #[arg(long, env = "FOLIO_KV_CACHE_MEMORY", value_name = "SIZE", value_parser = parse_bytes)]
    pub kv_cache_memory: Option<u64>,

    /// Share of the memory that is free after loading the weights, used when --kv-cache-memory is not given [default: 0.5; 0.9 on a
    /// GPU]
    #[arg(long, env = "FOLIO_KV_CACHE_SHARE", value_name = "0..1", value_parser = share)]
    pub kv_cache_share: Option<f64>,

    /// Host memory beside the KV cache for copies of what preempted requests held, made where copying costs less than
    /// computing again; 0: none [default: a sixteenth of the KV cache]
    #[arg(long, env = "FOLIO_SWAP_SPACE", value_name = "SIZE", value_parser = parse_bytes)]
    pub swap_space: Option<u64>,

    /// Share of the KV cache that may be pinned, by all tenants together; less where the longest request needs the rest
    #[arg(long, env = "FOLIO_MAX_PINNED_SHARE", value_name = "0..1", default_value_t = 0.25, value_parser = pinned_share)]
    pub max_pinned_share: f64,

    /// Share of the KV cache that one tenant may pin [default: --max-pinned-share]
    #[arg(long, env = "FOLIO_MAX_PINNED_SHARE_PER_TENANT", value_name = "0..1", value_parser = pinned_share)]
    pub max_pinned_share_per_tenant: Option<f64>,

    /// How keys and values are stored; auto: in the type of the weights
    #[arg(long, env = "FOLIO_KV_CACHE_DTYPE", value_enum, default_value_t = KvDtype::Auto)]
    pub kv_cache_dtype: KvDtype,

    /// Layers that stay in the type of the weights: numbers from 0, `sliding_window` or `full_attention`, separated by commas
    #[arg(long, env = "FOLIO_KV_CACHE_DTYPE_SKIP_LAYERS", value_name = "LAYERS", value_delimiter = ',')]
    pub kv_cache_dtype_skip_layers: Vec<KvSkip>,

    /// Quantize the weights of an F32, F16 or BF16 checkpoint while loading it: q8 to 8.5 bits, q4 to 4.5 bits a weight
    #[arg(long, env = "FOLIO_QUANTIZE", value_enum, value_name = "TYPE")]
    pub quantize: Option<Quantize>,

    /// Tokens per KV block, a multiple of 8
    #[arg(long, env = "FOLIO_BLOCK_SIZE", value_name = "TOKENS", default_value_t = 16, value_parser = block_size)]
    pub block_size: u32,

    /// Sequences computed at once [default: 64; 256 on a GPU]
    #[arg(long, env = "FOLIO_MAX_NUM_SEQS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_num_seqs: Option<u32>,

    /// Tokens computed in one step; decodes come first, prompts fill the rest [default: 512; 4096 on a GPU]
    #[arg(long, env = "FOLIO_MAX_NUM_BATCHED_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_num_batched_tokens: Option<u32>,

    /// Prompt tokens in one step while somebody is streaming: bounds the gap between two streamed tokens [default: 64; 1024 on
    /// a GPU]
    #[arg(long, env = "FOLIO_MAX_PREFILL_WHILE_DECODING", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_prefill_while_decoding: Option<u32>,

    /// What computes: `cpu`, `cuda` or `cuda:N` (an NVIDIA GPU by its number), or `auto`: the first GPU that can be used, else
    /// the processors
    #[arg(long, env = "FOLIO_DEVICE", value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,

    /// `auto` reads the checkpoint's weights; `dummy` or `dummy:TYPE` makes random ones of the shapes in config.json, bf16 or of that
    /// type, for measurements
    #[arg(long, env = "FOLIO_LOAD_FORMAT", value_name = "FORMAT", default_value_t = LoadFormat::Auto)]
    pub load_format: LoadFormat,

    /// Launch every step on a GPU kernel by kernel instead of replaying CUDA graphs
    #[arg(long, env = "FOLIO_ENFORCE_EAGER")]
    pub enforce_eager: bool,

    /// Who multiplies matrices on a GPU: `own` kernels, or `cublaslt`, NVIDIA's library, for bf16 and FP8 weights. With it, FP8 weights are
    /// multiplied by activations rounded to FP8
    #[arg(long, env = "FOLIO_GEMM_BACKEND", value_enum, value_name = "BACKEND", default_value_t = GemmBackend::Own)]
    pub gemm_backend: GemmBackend,

    /// Threads [default: as many as the machine and its container allow]
    #[arg(long, env = "FOLIO_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,

    /// Requests that may wait for their turn; more are answered 429
    #[arg(long, env = "FOLIO_MAX_QUEUED_REQUESTS", value_name = "N", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub max_queued_requests: u32,

    /// Prompt tokens that may wait for their turn; more are answered 429
    #[arg(long, env = "FOLIO_MAX_QUEUED_TOKENS", value_name = "TOKENS", default_value_t = 4 << 20,
          value_parser = clap::value_parser!(u64).range(1..))]
    pub max_queued_tokens: u64,

    /// Admit a request only when it fits even if everybody generates to the limit: nobody is ever preempted, not even for
    /// better priority; smaller batches
    #[arg(long, env = "FOLIO_GUARANTEE_COMPLETION")]
    pub guarantee_completion: bool,

    /// A Jinja chat template to use instead of the model's own
    #[arg(long, env = "FOLIO_CHAT_TEMPLATE", value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    #[command(flatten)]
    pub packed: PackedCacheArgs,
}

/// What depends on how fast the device is, where it was not asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_prefill_while_decoding: u32,
    pub kv_cache_share: f64,
}

impl EngineArgs {
    /// A GPU takes tens of times as many tokens in the time of a step, and nobody else lives in its memory.
    pub fn sizes(&self, gpu: bool) -> Sizes {
        let (seqs, tokens, prefill, share) = if gpu { (256, 4096, 1024, 0.9) } else { (64, 512, 64, 0.5) };
        Sizes {
            max_num_seqs: self.max_num_seqs.unwrap_or(seqs),
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(tokens),
            max_prefill_while_decoding: self.max_prefill_while_decoding.unwrap_or(prefill),
            kv_cache_share: self.kv_cache_share.unwrap_or(share),
        }
    }
}

/// Packed weights kept on disk.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct PackedCacheArgs {
    /// Folder of packed weights, which make a second start a matter of mapping them; `off` keeps none [default:
    /// folio/packed in XDG_CACHE_HOME or ~/.cache]
    #[arg(long, env = "FOLIO_PACKED_CACHE", value_name = "DIR")]
    pub packed_cache: Option<PathBuf>,

    /// Disk space for packed weights; those not used for longest are removed
    #[arg(long, env = "FOLIO_PACKED_CACHE_SIZE", value_name = "SIZE", default_value = "64GiB", value_parser = parse_bytes)]
    pub packed_cache_size: u64,

    /// Weights that take less than this are packed at every start
    #[arg(long, env = "FOLIO_PACKED_CACHE_MIN", value_name = "SIZE", default_value = "64MiB", value_parser = parse_bytes)]
    pub packed_cache_min: u64,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio serve                                            the built-in model\n  \
    folio serve Qwen/Qwen3-0.6B --max-model-len 8192\n  \
    folio serve ./my-model --host 0.0.0.0 --api-key-file keys.txt --kv-cache-memory 4GiB\n  \
    folio serve ./my-model --tool-call-parser hermes --reasoning-parser deepseek_r1\n\n\
    For most models the parsers are found by themselves and named at start; `folio serve --help` lists them.\n\
    Each API key is a tenant of its own: what one caches, no other can find.\n\
    SIGTERM finishes what is running and exits; a second one exits at once.")]
pub struct ServeArgs {
    /// A folder, a .gguf file, or org/model[@revision] [default: the built-in model]
    pub model: Option<String>,

    /// Address to listen on
    #[arg(long, env = "FOLIO_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// Port to listen on; 0 chooses a free one
    #[arg(long, env = "FOLIO_PORT", default_value_t = 8000)]
    pub port: u16,

    /// Name clients use for the model; give several for aliases, also patterns such as claude-*. Answers have the first that is no
    /// pattern [default: the folder's or hub name]
    #[arg(long, env = "FOLIO_SERVED_MODEL_NAME", value_name = "NAME", value_delimiter = ',')]
    pub served_model_name: Vec<String>,

    /// Key that clients must send (Authorization: Bearer ...); repeatable, each key is a tenant
    #[arg(long, env = "FOLIO_API_KEY", value_name = "KEY", value_delimiter = ',', hide_env_values = true)]
    pub api_key: Vec<Secret>,

    /// File with one key a line; # begins a comment
    #[arg(long, env = "FOLIO_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// TOML file with flags of `folio serve` as keys, and tables of tenants (docs/configuration.md); flags and environment
    /// variables win over it
    #[arg(long, env = "FOLIO_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// What that file has beyond flags
    #[arg(skip)]
    pub tables: crate::config::Tables,

    /// Serve on an address that other machines reach although no key is asked for
    #[arg(long, env = "FOLIO_ALLOW_UNAUTHENTICATED")]
    pub allow_unauthenticated: bool,

    /// File of API keys that `folio keys` made; keys made and revoked while this server runs count at once
    #[arg(long, env = "FOLIO_KEYS", value_name = "FILE")]
    pub keys: Option<PathBuf>,

    /// JSON file of tenants: names, keys, weights, groups that share a cache, prefixes that all share (docs/tenants.md)
    #[arg(long, env = "FOLIO_TENANTS", value_name = "FILE")]
    pub tenants: Option<PathBuf>,

    /// JSON file of what is not let in or out: rules for prompts and answers, and a service that is asked (docs/safety.md)
    #[arg(long, env = "FOLIO_SAFETY", value_name = "FILE")]
    pub safety: Option<PathBuf>,

    /// Field of requests that is passed over although no reader knows it, such as messages[].mood; repeatable. docs/api.md lists those
    /// that always are
    #[arg(long, env = "FOLIO_ACCEPT_HINT", value_name = "PATH", value_delimiter = ',')]
    pub accept_hint: Vec<String>,

    /// What becomes of other unknown fields: refuse with a 400, or warn: pass over, count, and name them in the answer's header
    /// x-folio-ignored-fields. What is refused with a reason, or nearly spelled like a known field, never passes
    #[arg(long, env = "FOLIO_UNKNOWN_FIELDS", value_enum, default_value_t = UnknownFields::Refuse)]
    pub unknown_fields: UnknownFields,

    /// Adds series per tenant, with tenants' names, to /metrics as operators see it: on the admin listener, or with an admin key
    #[arg(long, env = "FOLIO_TENANT_METRICS")]
    pub tenant_metrics: bool,

    /// File in which records of usage (by tenant, key, model and minute) outlive this process [default: kept in memory]
    #[arg(long, env = "FOLIO_USAGE", value_name = "FILE")]
    pub usage: Option<PathBuf>,

    /// File for one JSON line per request and generation: who, what, when, how it ended; never any text
    #[arg(long, env = "FOLIO_AUDIT_LOG", value_name = "FILE")]
    pub audit_log: Option<PathBuf>,

    /// Second listener, for operators: /reset_prefix_cache, /v1/usage/records of all tenants, /metrics
    #[arg(long, env = "FOLIO_ADMIN_LISTEN", value_name = "ADDRESS:PORT")]
    pub admin_listen: Option<SocketAddr>,

    /// Key that the second listener asks for, beside keys with the scope `admin`; repeatable
    #[arg(long, env = "FOLIO_ADMIN_KEY", value_name = "KEY", value_delimiter = ',', hide_env_values = true)]
    pub admin_key: Vec<Secret>,

    /// Have /metrics on the second listener only
    #[arg(long, env = "FOLIO_METRICS_ON_ADMIN")]
    pub metrics_on_admin: bool,

    /// Certificate chain (PEM) to serve HTTPS with, on both listeners; read again when it changes
    #[arg(long, env = "FOLIO_TLS_CERT", value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// Private key (PEM) of --tls-cert
    #[arg(long, env = "FOLIO_TLS_KEY", value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// Fail requests that take longer than this (504) [default: never]
    #[arg(long, env = "FOLIO_REQUEST_TIMEOUT", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub request_timeout: Option<u64>,

    /// Seconds a drain waits for running requests before it cancels them
    #[arg(long, env = "FOLIO_DRAIN_TIMEOUT", value_name = "SECONDS", default_value_t = 120)]
    pub drain_timeout: u64,

    /// Largest request body
    #[arg(long, env = "FOLIO_MAX_BODY", value_name = "SIZE", default_value = "8MiB", value_parser = parse_bytes)]
    pub max_body: u64,

    /// Cut off a client that accepts nothing of what waits for it for this long
    #[arg(long, env = "FOLIO_WRITE_TIMEOUT", value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..))]
    pub write_timeout: u64,

    /// Most bytes of one answer that are held for a client that has not accepted them
    #[arg(long, env = "FOLIO_MAX_UNREAD", value_name = "SIZE", default_value = "256MiB", value_parser = parse_bytes)]
    pub max_unread: u64,

    /// Most bytes held for all requests: bodies, prompts, and answers that were not accepted; one tenant may have half of them
    #[arg(long, env = "FOLIO_MAX_IN_FLIGHT", value_name = "SIZE", default_value = "1GiB", value_parser = parse_bytes)]
    pub max_in_flight: u64,

    /// Threads of the event loop: connections, TLS, streams
    #[arg(long, env = "FOLIO_HTTP_THREADS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub http_threads: u16,

    /// Requests that are parsed, rendered and tokenized at once, off the event loop
    #[arg(long, env = "FOLIO_TEXT_THREADS", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub text_threads: u16,

    /// How the model writes tool calls; auto: as its chat template says
    #[arg(long, env = "FOLIO_TOOL_CALL_PARSER", value_name = "NAME", default_value = "auto", value_parser = tool_call_parser())]
    pub tool_call_parser: String,

    /// How the model marks its reasoning; auto: as its chat template says
    #[arg(long, env = "FOLIO_REASONING_PARSER", value_name = "NAME", default_value = "auto", value_parser = reasoning_parser())]
    pub reasoning_parser: String,

    /// How /v1/embeddings makes a vector of a prompt's rows [default: as the checkpoint's pooling file says, else last]
    #[arg(long, env = "FOLIO_POOLING", value_enum)]
    pub pooling: Option<Pooling>,

    /// Folder for uploaded files and batches, which go on after a restart [default: in memory, gone with the process]
    #[arg(long, env = "FOLIO_BATCH_DIR", value_name = "DIR")]
    pub batch_dir: Option<PathBuf>,

    /// Bytes of all such files; one tenant may have half of them [default: 16GiB in a folder, 256MiB in memory]
    #[arg(long, env = "FOLIO_BATCH_STORAGE", value_name = "SIZE", value_parser = parse_bytes)]
    pub batch_storage: Option<u64>,

    /// Largest uploaded file
    #[arg(long, env = "FOLIO_MAX_BATCH_FILE", value_name = "SIZE", default_value = "100MiB", value_parser = parse_bytes)]
    pub max_batch_file: u64,

    /// Lines of batches that run at once: each makes everybody's next token a little later
    #[arg(long, env = "FOLIO_BATCH_CONCURRENCY", value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub batch_concurrency: u32,

    #[command(flatten)]
    pub engine: EngineArgs,
}

/// What becomes of fields that nobody knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum UnknownFields {
    #[default]
    Refuse,
    Warn,
}

fn tool_call_parser() -> PossibleValuesParser {
    let formats = folio_text::TOOL_FORMATS.iter();
    parsers(formats.map(|format| (format.name, format.aliases, format.about)))
}

fn reasoning_parser() -> PossibleValuesParser {
    let formats = folio_text::REASONING_FORMATS.iter();
    parsers(formats.map(|format| (format.name, format.aliases, format.about)))
}

fn parsers(
    formats: impl Iterator<Item = (&'static str, &'static [&'static str], &'static str)>,
) -> PossibleValuesParser {
    let fixed = [("auto", &[][..], "as the chat template says"), ("none", &[][..], "all text is content")];
    let values = fixed.into_iter().chain(formats);
    values
        .map(|(name, aliases, about)| PossibleValue::new(name).aliases(aliases.iter().copied()).help(about))
        .collect::<Vec<_>>()
        .into()
}

/// How tokens are chosen; what is absent comes from the model's generation_config.json.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// 0 always takes the most likely token
    #[arg(long, value_parser = non_negative)]
    pub temperature: Option<f32>,
    /// Choose among the most likely tokens that make up this share
    #[arg(long, value_parser = probability)]
    pub top_p: Option<f32>,
    /// Choose among this many most likely tokens; 0 is all
    #[arg(long)]
    pub top_k: Option<u32>,
    /// Leave out tokens less likely than this times the most likely one
    #[arg(long, value_parser = probability)]
    pub min_p: Option<f32>,
    /// Over 1: tokens seen before become less likely
    #[arg(long, value_parser = positive)]
    pub repetition_penalty: Option<f32>,
    /// The same seed, prompt and model give the same answer [default: random]
    #[arg(long)]
    pub seed: Option<u64>,
    /// Longest answer [default: what the context leaves]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: Option<u32>,
    /// End the answer at this text; repeatable
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on after the model's end-of-text token, up to the longest answer
    #[arg(long)]
    pub ignore_eos: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio run ./my-model \"Write a haiku about caches\"      the prompt as a chat message\n  \
    folio run ./my-model --raw \"Once upon a time\"          the prompt as plain text to continue\n  \
    echo \"2+2=\" | folio run ./my-model --raw --max-tokens 4 -\n\n\
    Only the answer goes to standard output.")]
pub struct RunArgs {
    /// A folder, a .gguf file, org/model[@revision], or `demo` for the built-in model
    pub model: String,
    /// The prompt; `-` reads standard input
    pub prompt: String,
    /// Continue the prompt as plain text, without the model's chat template
    #[arg(long)]
    pub raw: bool,
    /// System message
    #[arg(long, conflicts_with = "raw")]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Args, Debug)]
#[command(
    after_help = "While talking: /help lists the commands, Ctrl-C interrupts an answer, Ctrl-D leaves."
)]
pub struct ChatArgs {
    /// A folder, a .gguf file, or org/model[@revision] [default: the built-in model]
    pub model: Option<String>,
    /// Talk to a running server instead, such as http://127.0.0.1:8000
    #[arg(long, conflicts_with = "model")]
    pub url: Option<String>,
    /// Key for --url
    #[arg(long, env = "OPENAI_API_KEY", requires = "url", hide_env_values = true)]
    pub api_key: Option<Secret>,
    /// System message
    #[arg(long)]
    pub system: Option<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

#[derive(Debug, Subcommand)]
pub enum BenchMode {
    /// The engine alone, in this process: prefill and decode rates as fractions of the machine's measured limits
    Engine(Box<BenchEngineArgs>),
    /// Load on any OpenAI-compatible server: TTFT, TPOT, inter-token latency, throughput, goodput
    Serve(Box<BenchServeArgs>),
    /// KL divergence of a quantized model's predictions from those of the model it was made from
    Kl(Box<BenchKlArgs>),
    /// Formats of the KV cache: what each costs in quality, and gains in bytes and speed
    Kv(Box<BenchKvArgs>),
    /// Retention policies on a recorded trace: how many KV blocks each finds again, beside the offline optimum
    Cache(Box<BenchCacheArgs>),
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio bench kv --text stories.txt --questions facts.jsonl    quality of every format, on the built-in model\n  \
    folio bench kv ./my-model --text wiki.txt --format int8,int4\n  \
    folio bench kv --depth 8192                                  speed of attention alone, no model\n\n\
    Every format is compared with f16 on the same text; what f32 and bf16 differ from it by is the noise of rounding alone.\n\
    Questions are lines of JSON with messages, answer and distance, as tools/demo_model/generate.py --jsonl writes them.")]
pub struct BenchKvArgs {
    /// A folder, a .gguf file, org/model[@revision], or `demo` [default: the built-in model]
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
    /// The model in 16 or 32 bits: a folder, a .gguf file, org/model[@revision], or `demo`
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
    /// A folder, a .gguf file, or org/model[@revision] [default: the built-in model]
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

#[derive(Args, Debug)]
#[command(after_help = "Example:\n  \
    folio quantize ./my-model --to q4 --output ./my-model-q4\n  \
    folio serve ./my-model-q4\n\n\
    The folder holds configuration, tokenizer and templates as they were, and the weights as model.folio, in the order in\n\
    which this version's kernels read them. Keep the original: a later version of Folio may ask to make it again.")]
pub struct QuantizeArgs {
    /// A folder with *.safetensors in F32, F16 or BF16, org/model[@revision], or `demo`
    pub model: String,
    /// What weights become
    #[arg(long, value_enum, value_name = "TYPE")]
    pub to: Quantize,
    /// Folder to write; made if need be
    #[arg(long, short, value_name = "DIR")]
    pub output: PathBuf,
    /// Write into a folder that is not empty
    #[arg(long)]
    pub force: bool,
    /// Threads [default: as many as the machine and its container allow]
    #[arg(long, env = "FOLIO_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,
}

#[derive(Debug, Subcommand)]
pub enum KeysAction {
    /// Make a key; it is printed once and kept nowhere
    #[command(after_help = "Examples:\n  \
        folio keys create --keys keys.redb --tenant acme --name ci --expires 90d\n  \
        folio keys create --keys keys.redb --tenant ops --scope usage,admin")]
    Create {
        /// File of keys; made if it is not there
        #[arg(long = "keys", env = "FOLIO_KEYS", value_name = "FILE")]
        file: PathBuf,
        /// Whose key it is: one of the tenants file, or a new one by this name
        #[arg(long, value_name = "NAME")]
        tenant: String,
        /// What to call it in lists
        #[arg(long, value_name = "TEXT", default_value = "")]
        name: String,
        /// What it opens: generate, cache, batch, usage, admin
        #[arg(long, value_name = "SCOPE", value_delimiter = ',', value_parser = scope, default_values_t = Scope::DEFAULT)]
        scope: Vec<Scope>,
        /// How long it is good, such as 12h or 90d [default: until it is revoked]
        #[arg(long, value_name = "TIME", value_parser = crate::units::parse_time)]
        expires: Option<Duration>,
    },
    /// Show all keys, without the keys themselves
    List {
        /// File of keys
        #[arg(long = "keys", env = "FOLIO_KEYS", value_name = "FILE")]
        file: PathBuf,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Revoke a key for good; running servers refuse it from now on
    Revoke {
        /// File of keys
        #[arg(long = "keys", env = "FOLIO_KEYS", value_name = "FILE")]
        file: PathBuf,
        /// The key's id, as in the list (or the key)
        id: String,
    },
}

fn scope(text: &str) -> Result<Scope, String> {
    let named = Scope::ALL.into_iter().find(|scope| scope.name() == text);
    named.ok_or_else(|| format!("there are {}", Scope::ALL.map(Scope::name).join(", ")))
}

#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Check a file, and show what it and the environment come to
    Check {
        /// TOML, as for `folio serve --config`
        file: PathBuf,
    },
}

#[derive(Args, Debug)]
pub struct PullArgs {
    /// org/model[@revision]
    pub model: String,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio doctor                             read bandwidth, f32 and byte multiply rates, for each number of threads\n  \
    folio doctor model.Q4_0.gguf             and how far this model can get: its bytes and multiplications per token\n  \
    folio doctor ./my-model --quantize q4")]
pub struct DoctorArgs {
    /// A model to load, whose limits are then told: a folder, a .gguf file, org/model[@revision], or `demo`
    pub model: Option<String>,
    /// Quantize MODEL while loading it
    #[arg(long, value_enum, value_name = "TYPE", requires = "model")]
    pub quantize: Option<Quantize>,
    /// Most threads [default: as many as the machine and its container allow]
    #[arg(long, env = "FOLIO_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,
    /// What loads MODEL, and is measured beside the processors: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU, if one can be used
    #[arg(long, env = "FOLIO_DEVICE", value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DocsPage {
    Api,
    Cli,
    Models,
    Metrics,
}

/// What becomes of the hidden states of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pooling {
    /// That of the last token
    Last,
    /// Their mean
    Mean,
}

impl From<Pooling> for folio_model::Pooling {
    fn from(pooling: Pooling) -> Self {
        match pooling {
            Pooling::Last => Self::Last,
            Pooling::Mean => Self::Mean,
        }
    }
}

/// What weights become while loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Quantize {
    /// Q8_0: 8 bits a weight and a scale per 32
    Q8,
    /// Q4_0: 4 bits a weight and a scale per 32
    Q4,
}

impl Quantize {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Quantize::Q8 => "q8",
            Quantize::Q4 => "q4",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::value_variants().iter().copied().find(|to| to.name() == name)
    }

    pub fn packed(self) -> folio_cpu::Quantize {
        match self {
            Quantize::Q8 => folio_cpu::Quantize::Q8,
            Quantize::Q4 => folio_cpu::Quantize::Q4,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvDtype {
    /// The type of the weights; f16 where those are quantized
    Auto,
    #[value(alias = "float32", alias = "float")]
    F32,
    #[value(alias = "float16", alias = "half")]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    /// 8-bit integers with a scale per token and head
    #[value(alias = "int8_per_token_head")]
    Int8,
    /// 8-bit floats (e4m3) with a scale per token and head
    #[value(alias = "fp8_e4m3", alias = "fp8_per_token_head")]
    Fp8,
    /// 4 bits: rotated (Hadamard), with a scale per token and head
    #[value(alias = "int4_per_token_head")]
    Int4,
}

impl KvDtype {
    /// All that name a format.
    pub const STORED: [KvDtype; 6] =
        [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Int8, KvDtype::Fp8, KvDtype::Int4];

    /// The format that was asked for; `None` leaves it to the weights.
    pub fn format(self) -> Option<KvFormat> {
        Some(match self {
            KvDtype::Auto => return None,
            KvDtype::F32 => KvFormat::F32,
            KvDtype::F16 => KvFormat::F16,
            KvDtype::Bf16 => KvFormat::BF16,
            KvDtype::Int8 => KvFormat::Int8,
            KvDtype::Fp8 => KvFormat::Fp8,
            KvDtype::Int4 => KvFormat::Int4,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Endpoint {
    Completions,
    Chat,
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number"))
}

fn share(text: &str) -> Result<f64, String> {
    let share = number::<f64>(text)?;
    if share > 0.0 && share <= 0.95 { Ok(share) } else { Err("must be over 0 and at most 0.95".into()) }
}

fn pinned_share(text: &str) -> Result<f64, String> {
    let share = number::<f64>(text)?;
    if (0.0..=1.0).contains(&share) {
        Ok(share)
    } else {
        Err("must be from 0 (nothing is pinned) to 1".into())
    }
}

fn block_size(text: &str) -> Result<u32, String> {
    let tokens = number::<u32>(text)?;
    if tokens % 8 == 0 && (8..=1024).contains(&tokens) {
        Ok(tokens)
    } else {
        Err("must be a multiple of 8, from 8 to 1024".into())
    }
}

fn non_negative(text: &str) -> Result<f32, String> {
    let value = number::<f32>(text)?;
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err("must not be negative".into()) }
}

fn positive(text: &str) -> Result<f32, String> {
    let value = number::<f32>(text)?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err("must be over 0".into()) }
}

fn positive_f64(text: &str) -> Result<f64, String> {
    let value = number::<f64>(text)?;
    if value.is_finite() && value > 0.0 { Ok(value) } else { Err("must be over 0".into()) }
}

fn probability(text: &str) -> Result<f32, String> {
    let value = number::<f32>(text)?;
    if (0.0..=1.0).contains(&value) { Ok(value) } else { Err("must be from 0 to 1".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn kv_formats_have_the_names_that_others_give_them() {
        for (name, format) in [
            ("auto", None),
            ("float16", Some(KvFormat::F16)),
            ("bfloat16", Some(KvFormat::BF16)),
            ("fp8_e4m3", Some(KvFormat::Fp8)),
            ("int8_per_token_head", Some(KvFormat::Int8)),
        ] {
            assert_eq!(KvDtype::from_str(name, false).map(KvDtype::format), Ok(format), "{name}");
        }
        // A scale that belongs to a tensor, another 8-bit float, another 4-bit format: not ours.
        for name in ["fp8_e5m2", "nvfp4", "fp8_inc", "int2"] {
            assert!(KvDtype::from_str(name, false).is_err(), "{name}");
        }
        for format in KvFormat::ALL {
            let named = KvDtype::from_str(format.name(), false).map(KvDtype::format);
            assert_eq!(named, Ok(Some(format)), "one name everywhere");
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(|_| ()).map_err(|e| e.to_string());
        assert!(parse("folio").is_ok());
        assert!(
            parse("folio serve m --kv-cache-dtype int8 --kv-cache-dtype-skip-layers 0,sliding_window")
                .is_ok()
        );
        assert!(parse("folio serve m --block-size 32 --kv-cache-memory 1.5GiB").is_ok());
        for line in [
            "folio serve --block-size 12",
            "folio serve --kv-cache-dtype fp8_e5m2",
            "folio serve --kv-cache-dtype-skip-layers 0,last",
            "folio serve --kv-cache-share 1.0",
            "folio serve --kv-cache-memory lots",
            "folio serve --threads 0",
            "folio run m",
            "folio run m p --temperature -1",
            "folio run m p --top-p 1.5",
            "folio bench serve",
            "folio bench serve --url u --rate 0",
            "folio bench serve --url u --shared-prefixes 3",
            "folio bench serve --url u --token-ids 9..3",
            "folio bench kl m n",
            "folio bench kl m n --text t --tokens u",
            "folio bench kl --text t",
            "folio bench kv --text t --tokens u",
            "folio bench kv --shape 32x8",
            "folio bench kv --format e5m2",
            "folio doctor --quantize q8",
            "folio chat m --url u",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
    }
}
