//! `folio run` and `folio chat`, and how tokens are chosen.

use folio_server::Secret;

use clap::Args;

use super::engine::*;
use super::values::*;

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
    /// A folder, a .gguf file, org/model[@revision][:QUANT], or `demo` for the built-in model
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
    /// A folder, a .gguf file, or org/model[@revision][:QUANT] [default: the built-in model]
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
