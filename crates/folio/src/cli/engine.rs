//! Flags that decide how a model is loaded and its engine built.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use folio_engine::{AdmissionPolicy, Drafter};
use folio_model::backend::KvFormat;
use folio_model::kv_format::KvSkip;
use folio_server::Secret;

use super::values::*;
use crate::device::{DeviceChoice, GemmBackend};
use crate::load_format::LoadFormat;
use crate::models::Aliases;
use crate::units::parse_bytes;

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

    /// Memory of this machine, beside the KV cache, in which KV of requests that ended or were preempted is kept; for a GPU, since on the
    /// processors the same memory does more as KV cache [default: none]
    #[arg(long, env = "FOLIO_HOST_KV_MEMORY", value_name = "SIZE", value_parser = parse_bytes)]
    pub host_kv_memory: Option<u64>,

    /// Requests at the head of the queue whose KV is loaded from host memory, disk or server while they wait; 0: loads begin when their turn comes
    #[arg(long, env = "FOLIO_KV_PREFETCH_REQUESTS", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub kv_prefetch_requests: u32,

    /// What `--host-kv-memory` took the place of: refused by name
    #[arg(long, env = "FOLIO_SWAP_SPACE", hide = true, value_parser = refuse_swap_space)]
    pub swap_space: Option<u64>,

    /// Share of the KV cache that may be pinned, by all tenants together; less where the longest request needs the rest
    #[arg(long, env = "FOLIO_MAX_PINNED_SHARE", value_name = "0..1", default_value_t = 0.25, value_parser = pinned_share)]
    pub max_pinned_share: f64,

    /// Share of the KV cache that one tenant may pin [default: half of --max-pinned-share]
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

    /// Most different adapters in one step, of who serves any
    #[arg(skip)]
    pub max_adapters: u32,

    /// Most of those in memory, and their bytes
    #[arg(skip = u32::MAX)]
    pub max_resident_adapters: u32,
    #[arg(skip = u64::MAX)]
    pub max_adapter_bytes: u64,

    /// Admit a request only when it fits even if everybody generates to the limit: nobody is ever preempted, not even for
    /// better priority; smaller batches
    #[arg(long, env = "FOLIO_GUARANTEE_COMPLETION")]
    pub guarantee_completion: bool,

    /// Static batching in benchmarks: nothing is served so
    #[arg(skip)]
    pub admission: AdmissionPolicy,

    /// Speculative decoding: where drafts come from. Tokens are the same with and without; a request may say otherwise
    /// (speculative.type, speculative.n_max, prediction)
    /// [default: model or eagle3, whatever --draft-model is, else suffix]
    #[arg(long, env = "FOLIO_SPECULATE", value_name = "DRAFTER")]
    pub speculate: Option<Speculate>,

    /// What proposes drafts: a model with the same vocabulary, or an EAGLE-3 head that was trained for this one. A folder, a .gguf file,
    /// a hub name or an alias
    #[arg(long, env = "FOLIO_DRAFT_MODEL", value_name = "MODEL")]
    pub draft_model: Option<String>,

    /// How many layers behind those that it names an EAGLE-3 head reads: doctor tries its neighbours
    #[arg(skip)]
    pub head_reads_behind: isize,

    /// A Jinja chat template to use instead of the model's own
    #[arg(long, env = "FOLIO_CHAT_TEMPLATE", value_name = "FILE")]
    pub chat_template: Option<PathBuf>,

    /// Of the configuration file
    #[arg(skip)]
    pub aliases: Aliases,

    #[command(flatten)]
    pub packed: PackedCacheArgs,

    #[command(flatten)]
    pub disk_kv: DiskKvArgs,

    #[command(flatten)]
    pub remote_kv: RemoteKvArgs,
}

fn refuse_swap_space(_: &str) -> Result<u64, String> {
    Err("there is no swap space any more: what preempted requests had is kept by --host-kv-memory".to_owned())
}

/// Where drafts come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Speculate {
    /// The request's own tokens and finished answers of its tenant, by suffix decoding
    Suffix,
    /// The request's own tokens, by n-gram lookup
    Ngram,
    /// Another model, that of --draft-model
    Model,
    /// An EAGLE-3 head, that of --draft-model; the built-in model has one of its own
    Eagle3,
    /// The MTP head in the model's own checkpoint
    Mtp,
    /// Nowhere
    Off,
}

impl EngineArgs {
    /// Whether a drafter was asked for by name.
    pub fn names_drafter(&self) -> bool {
        self.draft_model.is_some() || self.speculate.is_some_and(|speculate| speculate != Speculate::Off)
    }

    /// Where drafts come from for a request that says nothing of it; `head`: what drafts is no model by itself but such a head.
    pub fn drafter(&self, head: Option<Drafter>) -> anyhow::Result<Option<Drafter>> {
        let Some(draft) = &self.draft_model else {
            return match self.speculate {
                None | Some(Speculate::Suffix) => Ok(Some(Drafter::Suffix)),
                Some(Speculate::Off) => Ok(None),
                Some(Speculate::Ngram) => Ok(Some(Drafter::Ngram)),
                Some(Speculate::Mtp) => Ok(head),
                Some(Speculate::Eagle3) if head.is_some() => Ok(head),
                Some(Speculate::Model) => {
                    anyhow::bail!("--speculate model needs --draft-model, the model that proposes drafts")
                }
                Some(Speculate::Eagle3) => {
                    anyhow::bail!("--speculate eagle3 needs --draft-model, the head that proposes drafts")
                }
            };
        };
        match (self.speculate, head) {
            (None | Some(Speculate::Model), None) => Ok(Some(Drafter::Model)),
            (None | Some(Speculate::Eagle3), Some(head)) => Ok(Some(head)),
            (Some(Speculate::Model), Some(_)) => anyhow::bail!(
                "--speculate model: {draft} is an EAGLE-3 head; give --speculate eagle3, or leave it out"
            ),
            (Some(Speculate::Eagle3), None) => anyhow::bail!(
                "--speculate eagle3: {draft} is a model by itself; give --speculate model, or leave it out"
            ),
            (Some(Speculate::Mtp), _) => anyhow::bail!(
                "--draft-model has no use with --speculate mtp, which is the head in the model's own checkpoint: leave one out"
            ),
            (Some(other @ (Speculate::Suffix | Speculate::Ngram | Speculate::Off)), _) => anyhow::bail!(
                "--draft-model has no use with --speculate {}: leave one out",
                other.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
            ),
        }
    }
}

/// What depends on how fast the device is, where it was not asked for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sizes {
    pub max_num_seqs: u32,
    pub max_num_batched_tokens: u32,
    pub max_prefill_while_decoding: u32,
    pub kv_cache_share: f64,
}

impl Sizes {
    /// A GPU takes tens of times as many tokens in the time of a step, and nobody else lives in its memory.
    pub fn of(gpu: bool) -> Self {
        let (max_num_seqs, max_num_batched_tokens, max_prefill_while_decoding, kv_cache_share) =
            if gpu { (256, 4096, 1024, 0.9) } else { (64, 512, 64, 0.5) };
        Self { max_num_seqs, max_num_batched_tokens, max_prefill_while_decoding, kv_cache_share }
    }
}

impl EngineArgs {
    /// Where there are no tenants, there are no secrets to seal with what is kept outside the process.
    pub fn refuse_tiers(&self) -> anyhow::Result<()> {
        for (folder, option) in
            [(&self.disk_kv.disk_kv, "--disk-kv"), (&self.disk_kv.disk_kv_shared, "--disk-kv-shared")]
        {
            if folder.is_some() {
                anyhow::bail!("{option}: only `folio serve` has the keys that seal what is kept on a disk");
            }
        }
        if self.remote_kv.remote_kv.is_some() {
            anyhow::bail!("--remote-kv: only `folio serve` has the keys that seal what is kept elsewhere");
        }
        Ok(())
    }

    /// What was asked for, else the device's.
    pub fn sizes(&self, gpu: bool) -> Sizes {
        let own = Sizes::of(gpu);
        Sizes {
            max_num_seqs: self.max_num_seqs.unwrap_or(own.max_num_seqs),
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(own.max_num_batched_tokens),
            max_prefill_while_decoding: self
                .max_prefill_while_decoding
                .unwrap_or(own.max_prefill_while_decoding),
            kv_cache_share: self.kv_cache_share.unwrap_or(own.kv_cache_share),
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

/// KV kept on disk.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct DiskKvArgs {
    /// Folder in which KV of requests that ended is kept, so that it need not be computed again, also after a restart; one server a
    /// folder [default: none is kept]
    #[arg(long, env = "FOLIO_DISK_KV", value_name = "DIR", group = "disk_kv_dir")]
    pub disk_kv: Option<PathBuf>,

    /// The same in a folder that several servers with one keyring share, also of a shared file system: each writes in a directory of its own
    /// in it, and reads what the others have stored; needs --keyring
    #[arg(long, env = "FOLIO_DISK_KV_SHARED", value_name = "DIR", group = "disk_kv_dir")]
    pub disk_kv_shared: Option<PathBuf>,

    /// Disk space for it, for each server; what is worth the least goes
    #[arg(long, env = "FOLIO_DISK_KV_SIZE", value_name = "SIZE", requires = "disk_kv_dir", default_value = "32GiB", value_parser = parse_bytes)]
    pub disk_kv_size: u64,

    /// Most bytes written to it in 24 hours, for a disk that wears [default: no limit]
    #[arg(long, env = "FOLIO_DISK_KV_WRITES_PER_DAY", value_name = "SIZE", requires = "disk_kv_dir", value_parser = parse_bytes)]
    pub disk_kv_writes_per_day: Option<u64>,

    /// Authenticate what is kept there, and do not encrypt it: for a disk that is encrypted itself
    #[arg(long, env = "FOLIO_DISK_KV_UNENCRYPTED", requires = "disk_kv_dir")]
    pub disk_kv_unencrypted: bool,

    /// Threads that carry blocks to the disk and back
    #[arg(long, env = "FOLIO_DISK_KV_THREADS", value_name = "N", requires = "disk_kv_dir", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub disk_kv_threads: u16,
}

/// KV kept by a server that several engines share.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct RemoteKvArgs {
    /// Server that keeps KV of requests that ended, for all engines with the same keyring: valkey://HOST[:PORT][/DATABASE] (valkeys://
    /// with TLS, ?cluster=true for a cluster), also redis:// and rediss://; or s3://BUCKET[/PREFIX][?endpoint=URL], with
    /// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY [default: none is kept]
    #[arg(long, env = "FOLIO_REMOTE_KV", value_name = "URL", hide_env_values = true)]
    pub remote_kv: Option<Secret>,

    /// Password of that server, better than in the URL
    #[arg(
        long,
        env = "FOLIO_REMOTE_KV_PASSWORD",
        value_name = "PASSWORD",
        requires = "remote_kv",
        hide_env_values = true
    )]
    pub remote_kv_password: Option<Secret>,

    /// PEM file of the certificates that the server's is signed with [default: the public authorities]
    #[arg(long, env = "FOLIO_REMOTE_KV_CA", value_name = "FILE", requires = "remote_kv")]
    pub remote_kv_ca: Option<PathBuf>,

    /// Most requests to s3:// in 24 hours [default: no limit]
    #[arg(long, env = "FOLIO_REMOTE_KV_REQUESTS_PER_DAY", value_name = "N", requires = "remote_kv")]
    pub remote_kv_requests_per_day: Option<u64>,

    /// Most dollars that s3:// may cost in a month, by the prices of S3 Standard: a thirtieth in 24 hours [default: no limit]
    #[arg(long, env = "FOLIO_REMOTE_KV_DOLLARS_PER_MONTH", value_name = "DOLLARS", requires = "remote_kv")]
    pub remote_kv_dollars_per_month: Option<f64>,

    /// Threads that carry blocks to the server and back, a value at a time each
    #[arg(long, env = "FOLIO_REMOTE_KV_THREADS", value_name = "N", requires = "remote_kv", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub remote_kv_threads: u16,
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
