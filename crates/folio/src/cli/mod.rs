//! The command line: every command, flag and example. Help is written for someone who meets the program for the first
//! time; `docs/cli.md` is made from here.

mod bench;
mod engine;
mod generate;
mod plan;
mod serve;
mod tools;
mod trace;
mod values;

use clap::{Parser, Subcommand};
use clap_complete::Shell;

pub use bench::*;
pub use engine::*;
pub use generate::*;
pub use plan::*;
pub use serve::*;
pub use tools::*;
pub use trace::*;

#[derive(Debug, Parser)]
#[command(
    name = "folio",
    version,
    about = "Serve open-weight language models on the machine you have",
    long_about = "Folio serves open-weight language models behind the HTTP APIs that OpenAI's, Anthropic's and Ollama's clients already speak.\n\
                  Without a command it serves the small model that is built in, so there is nothing to download first.",
    after_help = "Examples:\n  \
        folio                                         serve the built-in model on http://127.0.0.1:8000\n  \
        folio serve Qwen/Qwen3-0.6B                   download a model from the hub and serve it\n  \
        folio serve org/model-GGUF:Q4_K_M             one of the GGUF files of a repository\n  \
        folio serve ./my-model --port 9000            serve a folder with config.json, *.safetensors, tokenizer.json\n  \
        folio chat                                    talk to the built-in model in the terminal\n  \
        folio run ./my-model \"Once upon a time\"       print one answer\n  \
        folio bench engine ./my-model                 how close to this machine's limits a model runs\n\n\
        A MODEL is a folder, a .gguf file, an alias of ~/.config/folio/aliases.toml or a hub name: org/model[@revision], with :QUANT\n\
        behind it for one of a repository's GGUF files, such as :Q4_K_M. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honoured."
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
    /// Look into the folder of --disk-kv, and clear it up
    Cache {
        #[command(subcommand)]
        action: CacheAction,
    },
    /// Make, list and revoke API keys
    Keys {
        #[command(subcommand)]
        action: KeysAction,
    },
    /// Download a model into the hub's cache
    Pull(PullArgs),
    /// List the models in the hub's cache
    List(ListArgs),
    /// Remove a model from the hub's cache
    Rm(RmArgs),
    /// Show what a model on this machine is
    Show(ShowArgs),
    /// Quantize a model into a folder of packed weights that starts at once
    Quantize(QuantizeArgs),
    /// Show what this machine can do, measured for each number of threads, and how far a model can get on it
    Doctor(DoctorArgs),
    /// Say what a model will do on a machine, before either is there: what fits, how fast, at which rate it tips over, what it costs
    Plan(Box<PlanArgs>),
    /// Record the traffic of a server, and run a recording again
    Trace {
        #[command(subcommand)]
        action: TraceAction,
    },
    /// Print a completion script for a shell
    #[command(after_help = "Examples:\n  \
        folio completions bash > ~/.local/share/bash-completion/completions/folio\n  \
        folio completions zsh > ~/.zfunc/_folio\n  \
        folio completions fish > ~/.config/fish/completions/folio.fish")]
    Completions { shell: Shell },
    /// Print generated documentation pages
    #[command(hide = true)]
    Docs { page: DocsPage },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::ValueEnum;
    use folio_model::backend::KvFormat;

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
            "folio serve --policy static",
            "folio bench claims --policy lru",
            "folio bench claims --policy static --only paging",
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
