//! How a checkpoint that was made for embeddings makes one vector of a prompt: the files of sentence-transformers, or a key of
//! a GGUF file.
//!
//! Owns: what these files say. Must never: guess; what is not computed here is a sentence that says so, and a checkpoint that
//! says nothing means the last token.

use serde_json::Value;

use super::Checkpoint;
use super::json::parse_object;

const MODULES: &str = "modules.json";
const POOLING: &str = "1_Pooling/config.json";
/// Files beside the weights that [`Checkpoint::pooling`] reads.
pub const POOLING_FILES: &[&str] = &[MODULES, POOLING];

/// What becomes of the hidden states of a prompt's rows, each after the final norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// That of the last token.
    Last,
    /// Their mean.
    Mean,
}

impl Pooling {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::Mean => "mean",
        }
    }
}

impl Checkpoint {
    /// How its vectors are made. The error says, as a sentence about the checkpoint, what of that is not supported.
    pub fn pooling(&self) -> Result<Pooling, String> {
        if let Some(metadata) = self.gguf() {
            let architecture = metadata.text("general.architecture").map_err(|error| error.to_string())?;
            let key = format!("{}.pooling_type", architecture.unwrap_or_default());
            let kind = metadata.integer(&key).map_err(|error| error.to_string())?;
            return match kind {
                // Unspecified, or none: rows are wanted as they are.
                None | Some(0 | 3) => Ok(Pooling::Last),
                Some(1) => Ok(Pooling::Mean),
                Some(other) => Err(format!("{key} is {other}; only 1 (mean) and 3 (last) are supported")),
            };
        }
        let read = |file| self.read(file).map_err(|error| error.to_string());
        if let Some(modules) = read(MODULES)? {
            only_known_modules(&modules)?;
        }
        match read(POOLING)? {
            None => Ok(Pooling::Last),
            Some(bytes) => of_config(&bytes),
        }
    }
}

/// A decoder, pooling, and normalizing are all that is computed.
fn only_known_modules(bytes: &[u8]) -> Result<(), String> {
    let modules: Value = serde_json::from_slice(bytes).map_err(|error| format!("{MODULES}: {error}"))?;
    let modules = modules.as_array().ok_or_else(|| format!("{MODULES} is no list of modules"))?;
    for module in modules {
        let kind = module["type"].as_str().ok_or_else(|| format!("{MODULES} has a module without a type"))?;
        if !["Transformer", "Pooling", "Normalize"].contains(&kind.rsplit('.').next().unwrap_or_default()) {
            return Err(format!("{MODULES} has a module of type {kind}, which is not computed"));
        }
    }
    Ok(())
}

fn of_config(bytes: &[u8]) -> Result<Pooling, String> {
    let config = parse_object(POOLING, bytes).map_err(|error| error.to_string())?;
    let on = |name: &str| config.get(name).and_then(Value::as_bool).unwrap_or(false);
    let named = config.get("pooling_mode").and_then(Value::as_str);
    let mut modes: Vec<&str> =
        config.keys().filter(|key| on(key)).filter_map(|key| key.strip_prefix("pooling_mode_")).collect();
    modes.extend(named);
    if config.get("include_prompt").and_then(Value::as_bool) == Some(false) {
        return Err(format!("{POOLING} leaves the instruction out of the vector, which is not supported"));
    }
    match modes.as_slice() {
        [] | ["lasttoken"] => Ok(Pooling::Last),
        ["mean_tokens" | "mean"] => Ok(Pooling::Mean),
        other => Err(format!(
            "{POOLING} pools by {}; only lasttoken and mean_tokens are supported",
            other.join(" and ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_ways_that_decoders_are_pooled_are_read_and_others_refused() {
        let read = |text: &str| of_config(text.as_bytes());
        assert_eq!(
            read(r#"{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}"#),
            Ok(Pooling::Last)
        );
        assert_eq!(
            read(r#"{"pooling_mode_mean_tokens": true, "word_embedding_dimension": 4}"#),
            Ok(Pooling::Mean)
        );
        assert_eq!(read(r#"{"pooling_mode": "mean"}"#), Ok(Pooling::Mean));
        assert_eq!(read("{}"), Ok(Pooling::Last));
        for (text, named) in [
            (r#"{"pooling_mode_cls_token": true}"#, "cls_token"),
            (
                r#"{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}"#,
                "lasttoken and mean_tokens",
            ),
            (r#"{"pooling_mode_mean_tokens": true, "include_prompt": false}"#, "instruction"),
            ("[", POOLING),
        ] {
            let refusal = read(text).expect_err(text);
            assert!(refusal.contains(named), "{refusal}");
        }
    }

    #[test]
    fn a_projection_behind_the_decoder_is_refused_by_name() {
        let modules = |kind: &str| format!(r#"[{{"type": "sentence_transformers.models.{kind}"}}]"#);
        for kind in ["Transformer", "Pooling", "Normalize"] {
            assert_eq!(only_known_modules(modules(kind).as_bytes()), Ok(()));
        }
        assert!(only_known_modules(modules("Dense").as_bytes()).expect_err("refused").contains("Dense"));
        assert!(only_known_modules(b"{}").is_err());
    }
}
