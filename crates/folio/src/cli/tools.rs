//! The small commands: keys, configuration, downloads, quantizing, the doctor.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use folio_server::Secret;
use folio_server::keys::Scope;

use super::engine::*;
use crate::device::DeviceChoice;

#[derive(Args, Debug)]
#[command(after_help = "Example:\n  \
    folio quantize ./my-model --to q4 --output ./my-model-q4\n  \
    folio serve ./my-model-q4\n\n\
    The folder holds configuration, tokenizer and templates as they were, and the weights as model.folio, in the order in\n\
    which this version's kernels read them. Keep the original: a later version of Folio may ask to make it again.")]
pub struct QuantizeArgs {
    /// A folder with *.safetensors in F32, F16 or BF16, org/model[@revision], an alias, or `demo`
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
    /// Make what --disk-kv keeps of a tenant unreadable for good; servers that run go on with it until they end
    Forget {
        /// The keyring
        #[arg(long, env = "FOLIO_KEYRING", value_name = "FILE")]
        keyring: PathBuf,
        /// The key that wraps its secrets
        #[arg(long, env = "FOLIO_KEYRING_KEY", value_name = "FILE")]
        keyring_key: Option<PathBuf>,
        /// The tenant's name
        tenant: String,
    },
    /// Wrap a keyring's secrets by another key, or by none; servers with the keyring need a restart with that key
    Wrap {
        /// The keyring
        #[arg(long, env = "FOLIO_KEYRING", value_name = "FILE")]
        keyring: PathBuf,
        /// The key that wraps them now; none, if not given
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
        /// The key that is to wrap them; none, if not given
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
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
#[command(after_help = "Examples:\n  \
    folio pull Qwen/Qwen3-0.6B                  the configuration, tokenizer and safetensors of a repository\n  \
    folio pull Qwen/Qwen3-0.6B-GGUF:Q8_0        one of its GGUF files, with all parts it was split into\n\n\
    Without a quantization Q4_K_M is taken, else what is nearest to it. Prints where it lies.")]
pub struct PullArgs {
    /// org/model[@revision][:QUANT], or an alias
    pub model: String,
}

#[derive(Args, Debug)]
pub struct ListArgs {
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio rm org/model-GGUF:Q8_0        that file; what other files and revisions share stays\n  \
    folio rm org/model@v1               that revision\n  \
    folio rm org/model                  all that is here of it\n\n\
    What a running Folio serves is refused.")]
pub struct RmArgs {
    /// org/model[@revision][:QUANT], as `folio list` shows it, or an alias
    pub model: String,
}

#[derive(Args, Debug)]
pub struct ShowArgs {
    /// A folder, a .gguf file, org/model[@revision][:QUANT], an alias, or `demo`
    pub model: String,
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    folio doctor                             read bandwidth, f32 and byte multiply rates, for each number of threads\n  \
    folio doctor model.Q4_0.gguf             and how far this model can get: its bytes and multiplications per token\n  \
    folio doctor ./my-model --quantize q4\n  \
    folio doctor ./my-model --write-profile  keep the limits and what this model's steps take, for `folio plan` and for a server\n  \
    folio doctor --url http://host:8000      why that server is as fast as it is, and what it costs")]
pub struct DoctorArgs {
    /// A model to load, whose limits are then told: a folder, a .gguf file, org/model[@revision][:QUANT], or `demo`
    pub model: Option<String>,
    /// Quantize MODEL while loading it
    #[arg(long, value_enum, value_name = "TYPE", requires = "model")]
    pub quantize: Option<Quantize>,
    /// What would draft for MODEL, another model or an EAGLE-3 head: how often both say the same is then told
    #[arg(long, value_name = "MODEL", requires = "model")]
    pub draft_model: Option<String>,
    /// With `mtp` the same of the MTP head in MODEL's own checkpoint, with `eagle3` of the built-in model's own head
    #[arg(long, value_name = "DRAFTER", requires = "model")]
    pub speculate: Option<Speculate>,
    /// Most threads [default: as many as the machine and its container allow]
    #[arg(long, env = "FOLIO_THREADS", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub threads: Option<u32>,
    /// What loads MODEL, and is measured beside the processors: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU, if one can be used
    #[arg(long, env = "FOLIO_DEVICE", value_name = "DEVICE", default_value_t = DeviceChoice::Auto)]
    pub device: DeviceChoice,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Also keep what was measured, for `folio serve` to tell speeds by, and what steps of MODEL (else of the built-in model) take, for
    /// `folio plan`; models that were measured before stay [default file: ~/.config/folio/machine.json]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true)]
    pub write_profile: Option<Option<PathBuf>>,
    /// Measure nothing: ask the Folio at this address why it is as fast as it is (`GET /v1/why`)
    #[arg(long, value_name = "URL", conflicts_with_all = ["model", "write_profile"])]
    pub url: Option<String>,
    /// Key for --url; with one of the scope `admin` everybody's figures are told
    #[arg(long, env = "OPENAI_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub api_key: Option<Secret>,
    /// Ask about one request, by the x-request-id of its answer
    #[arg(long, value_name = "ID", requires = "url")]
    pub request: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DocsPage {
    Api,
    Cli,
    Models,
    Metrics,
}

#[derive(Debug, Subcommand)]
pub enum CacheAction {
    /// List its segments: blocks, bytes, age, the layout that they were written for
    Ls {
        #[command(flatten)]
        folder: CacheFolder,
    },
    /// Sum up what it holds
    Stats {
        #[command(flatten)]
        folder: CacheFolder,
    },
    /// Read every block and say which are damaged; needs no key
    Verify {
        #[command(flatten)]
        folder: CacheFolder,
    },
    /// Delete what was written longest ago, until the rest fits
    Gc {
        #[command(flatten)]
        folder: CacheFolder,
        /// What may be left
        #[arg(long, value_name = "SIZE", value_parser = crate::units::parse_bytes)]
        size: u64,
    },
    /// Copy its blocks, as they lie, into one new file for another machine, which needs the same keyring and model
    Export {
        #[command(flatten)]
        folder: CacheFolder,
        /// Of the layout whose digest begins with these hexadecimal digits (see ls); of the one that was written last, if not given
        #[arg(long, value_name = "HEX")]
        layout: Option<String>,
        /// Only what is this tenant's: a name as in the file of keys or of tenants
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
        /// With --tenant: the keyring; the one in the folder, if not given
        #[arg(long, value_name = "FILE", requires = "tenant")]
        keyring: Option<PathBuf>,
        /// With --tenant: the key that wraps the keyring's secrets
        #[arg(long, env = "FOLIO_KEYRING_KEY", value_name = "FILE")]
        keyring_key: Option<PathBuf>,
        /// The file; it must not be there yet
        file: PathBuf,
    },
    /// Store what an exported file has and the folder lacks; what was of no use for longest goes for it
    Import {
        #[command(flatten)]
        folder: CacheFolder,
        /// What the folder may take in all
        #[arg(long = "disk-kv-size", env = "FOLIO_DISK_KV_SIZE", value_name = "SIZE", default_value = "32GiB", value_parser = crate::units::parse_bytes)]
        size: u64,
        file: PathBuf,
    },
}

#[derive(Args, Debug)]
pub struct CacheFolder {
    /// Folder of --disk-kv, which no server may be using
    #[arg(long = "disk-kv", env = "FOLIO_DISK_KV", value_name = "DIR")]
    pub dir: PathBuf,
}
