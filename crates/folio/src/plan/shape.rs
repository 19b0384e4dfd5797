//! A model written as its sizes: `layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256`.
//!
//! Owns: the words, which become the fields of a config.json, so that its rules and bounds are the only ones.

use anyhow::{Result, bail};
use folio_model::Config;
use serde_json::{Map, Value};

/// A word, and the field that it is; beginning with those that must be there.
const WORDS: [(&str, &str); 11] = [
    ("layers", "num_hidden_layers"),
    ("hidden", "hidden_size"),
    ("heads", "num_attention_heads"),
    ("intermediate", "intermediate_size"),
    ("vocab", "vocab_size"),
    ("kv_heads", "num_key_value_heads"),
    ("head_dim", "head_dim"),
    ("context", "max_position_embeddings"),
    ("window", "sliding_window"),
    ("experts", "num_local_experts"),
    ("chosen", "num_experts_per_tok"),
];
const NEEDED: usize = 5;
/// Where none is given.
const CONTEXT: u64 = 32_768;

/// Whether it is written as one: no path and no name has this in it.
pub fn is_shape(text: &str) -> bool {
    text.split(',').any(|part| part.trim().starts_with("layers="))
}

/// Its decoder: a Llama; with a window a Mistral, with experts a Mixtral.
pub fn config(text: &str) -> Result<Config> {
    let mut fields = Map::new();
    for part in text.split(',') {
        let part = part.trim();
        let known = part.split_once('=').and_then(|(word, value)| {
            let (_, field) = WORDS.iter().find(|(known, _)| *known == word)?;
            Some((*field, value.trim().parse::<u64>().ok()?))
        });
        let Some((field, value)) = known else {
            let words: Vec<&str> = WORDS.iter().map(|(word, _)| *word).collect();
            bail!("`{part}` is no part of a shape: write WORD=NUMBER, with WORD of {}", words.join(", "));
        };
        if fields.insert(field.to_owned(), value.into()).is_some() {
            bail!("`{part}` is in the shape twice");
        }
    }
    let missing: Vec<&str> = WORDS[..NEEDED]
        .iter()
        .filter(|(_, field)| !fields.contains_key(*field))
        .map(|(word, _)| *word)
        .collect();
    if !missing.is_empty() {
        bail!("the shape has no {}", missing.join(", "));
    }
    let has = |field: &str| fields.contains_key(field);
    let family = match (has("num_local_experts"), has("sliding_window")) {
        (true, _) => "mixtral",
        (false, true) => "mistral",
        (false, false) => "llama",
    };
    if has("num_local_experts") != has("num_experts_per_tok") {
        bail!("a mixture has both: experts=8,chosen=2");
    }
    fields.insert("model_type".to_owned(), family.into());
    fields.insert("hidden_act".to_owned(), "silu".into());
    fields.insert("rms_norm_eps".to_owned(), Value::from(1e-5));
    fields.entry("max_position_embeddings").or_insert(CONTEXT.into());
    fields.insert("tie_word_embeddings".to_owned(), false.into());
    Ok(Config::parse("the shape", Value::Object(fields).to_string().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA_3_8B: &str = "layers=32,hidden=4096,heads=32,kv_heads=8,intermediate=14336,vocab=128256";

    #[test]
    fn a_shape_is_a_configuration() {
        assert!(is_shape(LLAMA_3_8B) && !is_shape("org/model") && !is_shape("./layers"));
        let config = super::config(LLAMA_3_8B).expect("a shape");
        assert_eq!((config.layers, config.kv_heads, config.head_dim, config.vocab), (32, 8, 128, 128_256));
        let windowed = super::config(&format!("{LLAMA_3_8B},window=4096")).expect("a shape");
        assert_eq!(windowed.windows[0], Some(4096));
        let mixture = super::config(&format!("{LLAMA_3_8B},experts=8,chosen=2")).expect("a shape");
        assert_eq!(mixture.experts.map(|experts| (experts.count, experts.chosen)), Some((8, 2)));
    }

    #[test]
    fn what_is_no_shape_is_said() {
        for (text, why) in [
            ("layers=32", "hidden, heads, intermediate, vocab"),
            ("layers=x,hidden=1", "layers=x"),
            ("layers=1,colour=3", "colour=3"),
            ("layers=1,layers=2", "twice"),
            (&format!("{LLAMA_3_8B},experts=8"), "chosen"),
            ("layers=99999999,hidden=4096,heads=32,intermediate=14336,vocab=128256", "num_hidden_layers"),
        ] {
            let error = format!("{:#}", super::config(text).expect_err(text));
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
