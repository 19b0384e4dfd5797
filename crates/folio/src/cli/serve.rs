//! `folio serve`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, ValueEnum};
use folio_server::Secret;

use super::engine::*;
use super::values::{KeepAlive, keep_alive, positive_f64};
use crate::units::parse_bytes;

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
    /// A folder, a .gguf file, or org/model[@revision][:QUANT] [default: the built-in model]
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

    /// Serve an adapter (LoRA) of the model, a PEFT folder or a GGUF file, as a model of this name; repeatable
    #[arg(long, env = "FOLIO_LORA", value_name = "NAME=PATH", value_delimiter = ',')]
    pub lora: Vec<String>,

    /// Operators may load adapters that lie below this folder, and unload any, while serving (/v1/load_lora_adapter at --admin-listen)
    #[arg(long, env = "FOLIO_LORA_DIR", value_name = "FOLDER")]
    pub lora_dir: Option<PathBuf>,

    /// Most different adapters (LoRA) in one step; requests for others wait
    #[arg(long, env = "FOLIO_MAX_LORAS", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_loras: u32,

    /// Largest rank of an adapter
    #[arg(long, env = "FOLIO_MAX_LORA_RANK", value_name = "RANK", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub max_lora_rank: u32,

    /// Most adapters whose weights are in memory; those of others are read again when a request wants them, in the place of those that are not in use
    #[arg(long, env = "FOLIO_MAX_CPU_LORAS", value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_cpu_loras: u32,

    /// Memory for the weights of adapters, likewise; an adapter that takes more is refused
    #[arg(long, env = "FOLIO_LORA_MEMORY", value_name = "SIZE", default_value = "4GiB", value_parser = parse_bytes)]
    pub lora_memory: u64,

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

    /// Memory that the models of that file ([[models]]) may need together: weights and KV cache of those that are loaded. Of a GPU's, where one
    /// computes, and then it has to be given [default: nine tenths of what is free at the start]
    #[arg(long, env = "FOLIO_MODELS_MEMORY", value_name = "SIZE", value_parser = parse_bytes)]
    pub models_memory: Option<u64>,

    /// How long such a model stays loaded after its last request: 5m, 1h30m, 300 (seconds), 0 (not at all), -1 (until others need the memory)
    #[arg(long, env = "FOLIO_KEEP_ALIVE", value_name = "TIME", default_value = "5m", allow_hyphen_values = true, value_parser = keep_alive)]
    pub keep_alive: KeepAlive,

    /// Seconds that loading such a model may take
    #[arg(long, env = "FOLIO_MODEL_START_TIMEOUT", value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..))]
    pub model_start_timeout: u64,

    /// Seconds that a request waits for such a model where others use the memory; 503 after that
    #[arg(long, env = "FOLIO_MODEL_WAIT_TIMEOUT", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    pub model_wait_timeout: u64,

    /// Requests that wait for such models; 503 beyond
    #[arg(long, env = "FOLIO_MODEL_WAIT_REQUESTS", value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub model_wait_requests: u32,

    /// Which model of the file a process of `folio serve` is for, and its socket
    #[arg(long, hide = true, requires = "behind_router")]
    pub only_model: Option<String>,
    #[arg(long, hide = true, requires = "only_model")]
    pub behind_router: Option<PathBuf>,

    /// The models of the file
    #[arg(skip)]
    pub on_demand: crate::config::OnDemand,

    /// Serve on an address that other machines reach although no key is asked for
    #[arg(long, env = "FOLIO_ALLOW_UNAUTHENTICATED")]
    pub allow_unauthenticated: bool,

    /// File of API keys that `folio keys` made; keys made and revoked while this server runs count at once
    #[arg(long, env = "FOLIO_KEYS", value_name = "FILE")]
    pub keys: Option<PathBuf>,

    /// File of the secret that keeps what is cached outside the process apart by tenant, and readable after a restart; made if there is
    /// none. Servers that share KV (--remote-kv, --disk-kv-shared) share it [default: `keyring` in the folder of --disk-kv]
    #[arg(long, env = "FOLIO_KEYRING", value_name = "FILE")]
    pub keyring: Option<PathBuf>,

    /// File of a key that wraps the keyring's secrets: 64 hexadecimal digits or more (openssl rand -hex 32), for its owner alone (0600). Kept
    /// elsewhere than the keyring
    #[arg(long, env = "FOLIO_KEYRING_KEY", value_name = "FILE")]
    pub keyring_key: Option<PathBuf>,

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

    /// Where a span of each request is sent, for OpenTelemetry: OTLP as protobuf over HTTP, such as http://127.0.0.1:4318. A request with a
    /// traceparent is part of its caller's trace
    #[arg(long, env = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", value_name = "URL")]
    pub otlp_traces_endpoint: Option<String>,

    /// What this machine costs an hour, in any currency: /v1/why then tells what a million tokens cost
    #[arg(long, env = "FOLIO_PRICE_PER_HOUR", value_name = "PRICE", value_parser = positive_f64)]
    pub price_per_hour: Option<f64>,

    /// Milliseconds to the first token of a chat within which /v1/why counts a request as served in time
    #[arg(long, env = "FOLIO_TTFT_CHAT", value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..))]
    pub ttft_chat: u64,

    /// The same of /v1/completions
    #[arg(long, env = "FOLIO_TTFT_COMPLETION", value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub ttft_completion: u64,

    /// What this machine can do, as measured by `folio doctor --write-profile` [default: ~/.config/folio/machine.json, if it is there]
    #[arg(long, env = "FOLIO_MACHINE_PROFILE", value_name = "FILE")]
    pub machine_profile: Option<PathBuf>,

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

    /// Seconds that a drain may take: it waits for running requests, which are cancelled then, and for KV to be stored in tiers
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

    /// Publish what the KV cache holds to routers: vLLM's JSON, such as {"enable_kv_cache_events": true, "tenants": "*"}
    /// (docs/kv-events.md). Events carry the tokens of prompts, so whose must be said [default: nothing is published]
    #[arg(long, env = "FOLIO_KV_EVENTS_CONFIG", value_name = "JSON")]
    pub kv_events_config: Option<String>,

    /// Where to publish them, over what that JSON says [default: tcp://127.0.0.1:5557]
    #[arg(long, env = "FOLIO_KV_EVENTS_ENDPOINT", value_name = "tcp://ADDRESS:PORT")]
    pub kv_events_endpoint: Option<String>,

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
