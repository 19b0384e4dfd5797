//! `folio show`: what a model on this machine is, from its headers alone.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use folio_model::Checkpoint;
use folio_model::config::Mixer;
use folio_model::decoder::kv_layout;
use folio_model::hub::CARD;
use folio_model::kv_format::{KvFormat, KvFormats};
use folio_model::weights::weight_specs;
use folio_server::Parsers;

use super::{Aliases, Source};
use crate::cli::ShowArgs;
use crate::runtime::{kv_dtype, load_template, load_tokenizer};
use crate::units;

/// Positions of a block, which the bytes of a token do not depend on.
const BLOCK: usize = 16;
/// Of a model card, which may be a book, that are read for its head.
const HEAD_LINES: usize = 200;

pub fn run(args: &ShowArgs) -> Result<()> {
    let source = Source::parse(Some(&args.model), &Aliases::default())?;
    let checkpoint = source.open_here()?;
    println!("{}", source.name());
    for (what, text) in facts(&checkpoint)? {
        println!("  {what:<13} {text}");
    }
    Ok(())
}

fn facts(checkpoint: &Checkpoint) -> Result<Vec<(&'static str, String)>> {
    let config = checkpoint.config();
    let mut facts = vec![("files", checkpoint.location())];
    let experts = config
        .experts
        .map_or(String::new(), |experts| format!(", {} of {} experts", experts.chosen, experts.count));
    let kept = match config.mixers.first() {
        Some(Mixer::Latent(latent)) => format!("{} wide, latents of {}", config.head_dim, latent.key_dim()),
        _ => format!("and {} of KV, each {} wide", config.kv_heads, config.head_dim),
    };
    let kept = config.full_heads.map_or(kept.clone(), |full| {
        format!("{kept} ({} and {} where there is no window)", full.kv_heads, full.head_dim)
    });
    let architecture = format!(
        "{}: {} layers of {}, {} heads {kept}{experts}",
        config.family.model_type, config.layers, config.hidden, config.heads
    );
    facts.push(("architecture", architecture));
    let specs = weight_specs(config);
    let parts = || specs.iter().flat_map(|weight| weight.distinct());
    let parameters = parts().map(|part| part.picked_shape().iter().product::<usize>() as u64).sum();
    facts.push(("parameters", units::parameters(parameters)));
    if checkpoint.packed().is_none() {
        let mut bytes_of: BTreeMap<String, u64> = BTreeMap::new();
        for part in parts() {
            let tensor = checkpoint.tensor(part)?;
            *bytes_of.entry(tensor.encoding.to_string()).or_default() += tensor.size_bytes();
        }
        facts.push(("weights", shares(&bytes_of)));
    }
    facts.push(("context", format!("{} tokens", units::count(config.max_position as u64))));
    facts.push(("KV cache", kv(checkpoint)?));
    let tokenizer = load_tokenizer(checkpoint)?;
    facts.push(("vocabulary", format!("{} tokens", units::count(tokenizer.vocab_size() as u64))));
    let template = load_template(checkpoint, &tokenizer, None)?;
    facts.push((
        "chat",
        template.as_ref().map_or("no template: plain completions only".to_owned(), |template| {
            let parsers = Parsers::of_template(template);
            let known = template.tools();
            let tools = match (known.takes_tools, parsers.tools) {
                (true, Some(format)) => format!("tools ({})", format.name),
                (true, None) => "tools are shown, calls are not read".to_owned(),
                (false, _) => "no tools".to_owned(),
            };
            let reasoning = match (parsers.reasoning, known.thinking_switch) {
                (Some(format), Some(switch)) => format!("reasoning ({}, switched by {switch})", format.name),
                (Some(format), None) => format!("reasoning ({})", format.name),
                (None, _) => "no reasoning".to_owned(),
            };
            format!("{tools}, {reasoning}; template: {}", template.origin())
        }),
    ));
    facts.push(("licence", licence(checkpoint)?.unwrap_or_else(|| "not said by its files".to_owned())));
    Ok(facts)
}

/// "1.20 GiB: 62 % Q4_K, 38 % Q6_K".
fn shares(bytes_of: &BTreeMap<String, u64>) -> String {
    let total: u64 = bytes_of.values().sum();
    let mut shares: Vec<(u64, &String)> = bytes_of.iter().map(|(name, bytes)| (*bytes, name)).collect();
    shares.sort_unstable_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let share = |(bytes, name): (u64, &String)| match bytes * 100 / total.max(1) {
        0 => format!("under 1 % {name}"),
        percent => format!("{percent} % {name}"),
    };
    let shares: Vec<String> = shares.into_iter().map(share).collect();
    format!("{}: {}", units::bytes(total), shares.join(", "))
}

/// Bytes of a token in the format that serving would choose, and in the smallest.
fn kv(checkpoint: &Checkpoint) -> Result<String> {
    let config = checkpoint.config();
    let per_token = |format: KvFormat| {
        let formats = KvFormats { most: format, skipped: format, skip: Vec::new() };
        let layout = kv_layout(config, &formats, BLOCK, config.max_position);
        layout.map(|layout| layout.bytes_per_token() as u64).map_err(|problem| anyhow!(problem))
    };
    // Packed weights say it in their own file.
    let own = match checkpoint.packed() {
        Some(_) => KvFormat::F16,
        None => kv_dtype(checkpoint)?.into(),
    };
    let mut text = format!("{} per token ({own})", units::bytes(per_token(own)?));
    for format in [KvFormat::Int8, KvFormat::Int4] {
        if let Ok(bytes) = per_token(format) {
            text += &format!(", {} ({format})", units::bytes(bytes));
        }
    }
    let states = config
        .mixers
        .iter()
        .filter(|mixer| matches!(mixer, Mixer::Delta(_) | Mixer::Conv(_) | Mixer::Mamba(_)))
        .count();
    if states > 0 {
        text += &format!("; {states} layers keep a state instead");
    }
    if config.sharing_layers > 0 {
        text += &format!("; {} layers read what others keep", config.sharing_layers);
    }
    let windows = config.windows.iter().flatten().count();
    if windows > 0 {
        text += &format!("; {windows} layers keep no more than their window");
    }
    Ok(text)
}

/// As a GGUF file's metadata, or the head of the model card says.
fn licence(checkpoint: &Checkpoint) -> Result<Option<String>> {
    if let Some(metadata) = checkpoint.gguf() {
        return Ok(metadata.text("general.license")?.map(one_line));
    }
    let card = checkpoint.read(CARD)?;
    Ok(card.and_then(|card| licence_of_card(&String::from_utf8_lossy(&card))))
}

/// `license: ...` between the two lines of `---` at the beginning.
fn licence_of_card(card: &str) -> Option<String> {
    let mut lines = card.lines().map(str::trim_end).take(HEAD_LINES);
    if lines.next() != Some("---") {
        return None;
    }
    let head: Vec<&str> = lines.take_while(|line| *line != "---").collect();
    let value = |key: &str| {
        let said = head
            .iter()
            .find_map(|line| line.strip_prefix(key))
            .map(|said| said.trim().trim_matches(['"', '\'']));
        said.filter(|said| !said.is_empty()).map(one_line)
    };
    match (value("license:"), value("license_name:")) {
        (Some(kind), Some(name)) if kind == "other" => Some(name),
        (kind, _) => kind,
    }
}

/// A stranger's text, for a terminal.
fn one_line(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(100).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_licence_is_in_the_head_of_the_card() {
        let of = |card: &str| licence_of_card(card);
        assert_eq!(of("---\nlanguage: en\nlicense: apache-2.0\n---\n# M").as_deref(), Some("apache-2.0"));
        let other = "---\nlicense: other\nlicense_name: \"llama3\"\n---\n";
        assert_eq!(of(other).as_deref(), Some("llama3"));
        assert_eq!(of("---\nlicense: a\u{1b}[31m\n---\n").as_deref(), Some("a[31m"));
        for none in ["", "# M\nlicense: mit", "---\n---\nlicense: mit", "---\nlicense:\n---"] {
            assert_eq!(of(none), None, "{none}");
        }
    }

    #[test]
    fn shares_are_told_from_the_largest() {
        let bytes_of = [("F32".to_owned(), 1), ("Q4_K".to_owned(), 600), ("Q6_K".to_owned(), 399)].into();
        assert_eq!(shares(&bytes_of), "1000 B: 60 % Q4_K, 39 % Q6_K, under 1 % F32");
    }
}
