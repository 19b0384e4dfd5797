//! Pages of documentation that are made from the program itself, so that they cannot be wrong. CI compares them with `docs/`.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command, CommandFactory};
use folio_model::quant::BlockFormat;

use crate::cli::{Cli, DocsPage};

pub fn page(page: DocsPage) -> String {
    match page {
        DocsPage::Api => api(),
        DocsPage::Cli => cli(),
        DocsPage::Models => models(),
        DocsPage::Metrics => metrics(),
    }
}

const NOTICE: &str = "<!-- Made by `folio docs`; do not edit. -->\n\n";

/// Prose, with the tables of routes and fields behind it.
fn api() -> String {
    let prose = include_str!("api.in.md");
    let hints = folio_server::hints::reference();
    let fields = folio_server::openapi::reference();
    format!("{NOTICE}{prose}\n## Hints\n\n{HINTS}{hints}\n## Routes and fields\n\n{FIELDS}{fields}")
}

const HINTS: &str = "Every field is honoured, refused, or a hint of this table: its value is checked, and nothing depends on it. Where a chat template has a \
                     place for what a hint asks, it is turned. An operator lets further fields pass with `--accept-hint PATH`, or all that nobody knows with \
                     `--unknown-fields warn`; those are named in the header `x-folio-ignored-fields` and counted (`folio:ignored_fields_total`). Never passed over: \
                     what is refused below with a reason, what is nearly spelled like a known field, and fields within `tools`, `tool_choice`, `response_format`, \
                     `structured_outputs`, `options` and their like.\n\n";
const FIELDS: &str = "The same as `GET /openapi.json` says for programs. `null` counts as left out. What is in neither table of a request is a 400, too.\n\n";

fn models() -> String {
    let names = include_str!("models.in.md");
    let mut out = format!("{NOTICE}# Models\n\n{names}\n## What is served\n\n");
    out += "Folio serves Hugging Face checkpoints (config.json, safetensors in bf16, f16 or f32, tokenizer.json, tekken.json, tokenizer.model or Kimi's tiktoken.model) and GGUF files \
            (versions 2 and 3, also split; tokenizer and chat template from their metadata) of these families:\n\n";
    out += &folio_model::supported_table();
    out += "\nGGUF: architectures ";
    out += &folio_model::checkpoint::gguf::architecture_names();
    out += "; tensors of F32, F16, BF16, ";
    out += &BlockFormat::of_ggml().map(|format| format!("{format:?}")).collect::<Vec<_>>().join(", ");
    out += "; tokenizers of kind gpt2 (a named pre-tokenizer), gemma4 and llama. Anything else is refused by name. In memory the formats of 1 to 3 bits take 4.3 to \
            5.1 bits a weight, and on a GPU NVFP4 and those that begin with IQ1, IQ2, IQ3 and TQ take 10. A number beside an NVFP4 matrix (`*.scale`) \
            becomes part of its scales, which then take 6 bits a weight. Of qwen2vl, qwen3vl and qwen3vlmoe (Qwen2-VL, Qwen2.5-VL, Qwen3-VL) it is the text part: \
            towers are in files of their own (mmproj), which are not read.\n";
    out += "\nFolders whose only tokenizer is Mistral's tekken.json have no chat template, and `--chat-template` gives one: \
            `convert_tokenizer_to_chat_template(\"tekken.json\")` of `mistral_common.integrations.chat_templates.chat_templates` writes it. As \
            chat_template.jinja beside the tokenizer it is found by itself. Completions need none.\n";
    out += "\nA tokenizer.model is read where there is no other file: sentencepiece's BPE, as Llama 2, Mistral and Gemma have it, and its unigram models, with the \
            added tokens of tokenizer_config.json or added_tokens.json. Texts are normalized as the file says (`precompiled_charsmap`, as `nmt_nfkc`, `nfkc` and \
            `nmt_nfkc_cf` have one, `remove_extra_whitespaces`, `add_dummy_prefix`, `escape_whitespaces`), what is between added tokens as a text of its own. A \
            charsmap has at most 4 MiB, and its rules are for at most 64 bytes and write at most 16 times as many; this holds for that of a tokenizer.json, too. \
            Models of the types WORD and CHAR and `treat_whitespace_as_suffix` are refused by name; transformers makes a tokenizer.json of them.\n";
    out += "\nA tiktoken.model is read where it is all there is and `auto_map` in tokenizer_config.json names Moonshot's class for it \
            (`tokenization_kimi.TikTokenTokenizer` or `tokenization_moonshot.TikTokenTokenizer`: Kimi K2, Moonlight): the list does not say how texts are cut into \
            words, and the class does. Other lists of tiktoken are refused by name.\n";
    out += "\nPositions on three axes (M-RoPE: time, height and width; `mrope_section` and `mrope_interleaved` in `rope_parameters` or `rope_scaling`, as \
            Qwen2-VL, Qwen3-VL and Qwen3.5 have them; `rope.dimension_sections` in a GGUF file) are read with the rest of a checkpoint's rotation, and a list that does not fit its heads is refused by name. \
            A text has one position for all three, so they change nothing for it. Images are not served, and no tower is loaded.\n";
    out += "\nQuantized safetensors checkpoints, as `quantization_config` in config.json describes them. Columns are \
            multiples of 32, and so are groups, but for NVFP4's of 16. NVFP4 takes 6 bits a weight in memory, since a scale and that of its \
            matrix become one f32, and 10 on a GPU. Scales of activations and of an FP8 KV cache are read past: activations are rounded more finely than \
            they ask for. Anything else is refused by name.\n\n";
    out += folio_model::checkpoint::quantized::TABLE;
    out
}

fn metrics() -> String {
    let mut out = format!("{NOTICE}# Metrics\n\n");
    out +=
        "`GET /metrics` speaks Prometheus. Every metric has the label `model_name` besides those listed.\n\n";
    out += "| metric | kind | labels | meaning |\n|---|---|---|---|\n";
    metric_rows(&mut out, folio_server::metrics::documented());
    out += "\n## Several models\n\nOf a server of [[models]] (configuration.md), beside those of each model that is loaded.\n\n";
    out += "| metric | kind | labels | meaning |\n|---|---|---|---|\n";
    metric_rows(&mut out, folio_server::router_metrics());
    out += "\n## By tenant\n\nWith `--tenant-metrics`, and only then. A tenant of the tenants file goes by its name, an API key by its number (`key:1`), \
            the only tenant of a server without keys is `anonymous`. Beyond ";
    let _ = write!(out, "{}", folio_server::tenant_metrics::TENANTS_MAX);
    out += " tenants the rest is one sum, `:others`. The page needs no key: whoever reads it reads the names.\n\n";
    out += "| metric | kind | labels | meaning |\n|---|---|---|---|\n";
    metric_rows(&mut out, folio_server::tenant_metrics::documented());
    out
}

fn metric_rows(out: &mut String, metrics: impl Iterator<Item = folio_server::metrics::Documented>) {
    for metric in metrics {
        let _ =
            writeln!(out, "| `{}` | {} | {} | {} |", metric.name, metric.kind, metric.labels, metric.help);
    }
}

fn cli() -> String {
    // A fixed width and a built command, so that the page does not depend on the terminal.
    let mut command = Cli::command().term_width(100);
    command.build();
    let mut out = format!("{NOTICE}# Command line\n\n");
    section(&mut out, &command, "folio");
    out
}

fn section(out: &mut String, command: &Command, path: &str) {
    let _ = writeln!(out, "## `{path}`\n");
    if let Some(about) = command.get_long_about().or(command.get_about()) {
        let _ = writeln!(out, "{about}\n");
    }
    let arguments: Vec<&Arg> = command.get_arguments().filter(|arg| !hidden(arg)).collect();
    if !arguments.is_empty() {
        out.push_str("| argument | meaning | default | environment |\n|---|---|---|---|\n");
        for argument in arguments {
            row(out, argument);
        }
        out.push('\n');
    }
    if let Some(help) = command.get_after_help() {
        let _ = writeln!(out, "```text\n{help}\n```\n");
    }
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help") {
        section(out, sub, &format!("{path} {}", sub.get_name()));
    }
}

fn hidden(argument: &Arg) -> bool {
    argument.is_hide_set() || matches!(argument.get_id().as_str(), "help" | "version")
}

fn row(out: &mut String, argument: &Arg) {
    let value = argument
        .get_value_names()
        .filter(|_| takes_value(argument))
        .and_then(|names| names.first())
        .map_or(String::new(), |name| name.to_string());
    let name = match argument.get_long() {
        Some(long) if value.is_empty() => format!("`--{long}`"),
        Some(long) => format!("`--{long} {value}`"),
        None => format!("`{value}`"),
    };
    let mut meaning = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let choices: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter(|_| takes_value(argument))
        .map(|value| format!("`{}`", value.get_name()))
        .collect();
    if !choices.is_empty() {
        let _ = write!(meaning, " ({})", choices.join(", "));
    }
    let default =
        argument.get_default_values().iter().map(|value| value.to_string_lossy()).collect::<Vec<_>>();
    let default = if takes_value(argument) { default.join(",") } else { String::new() };
    let environment =
        argument.get_env().map(|name| format!("`{}`", name.to_string_lossy())).unwrap_or_default();
    let _ = writeln!(out, "| {} | {} | {default} | {environment} |", escape(&name), escape(&meaning));
}

/// A bar would end a cell of the table.
fn escape(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn takes_value(argument: &Arg) -> bool {
    matches!(argument.get_action(), ArgAction::Set | ArgAction::Append)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_have_what_they_are_for() {
        let cli = page(DocsPage::Cli);
        for text in
            ["## `folio serve`", "--kv-cache-memory SIZE", "FOLIO_PORT", "## `folio bench serve`", "8000"]
        {
            assert!(cli.contains(text), "{text}");
        }
        assert!(!cli.contains("folio docs cli"));
        assert!(page(DocsPage::Models).contains("qwen3"));
        assert!(page(DocsPage::Metrics).contains("vllm:prompt_tokens_total"));
        assert_eq!(cli, page(DocsPage::Cli), "the page is the same every time");
    }
}
