//! What the config.json of a head says, in each of the forms that people have.
//!
//! Owns: the words, their defaults, and what of it the model must agree with. Must never: look at a tensor.
//!
//! | form | known by | its layer | layers it reads |
//! |---|---|---|---|
//! | the authors' (SafeAILab), SGLang's (SpecForge) | `draft_vocab_size` and the fields of a Llama | the fields themselves | `eagle_config.eagle_aux_hidden_state_layer_ids`: their *outputs* |
//! | vLLM's "speculators" | `speculators_model_type` | `transformer_layer_config` | `eagle_aux_hidden_state_layer_ids`: their *inputs* |
//!
//! Where none are said they are the inputs of layers 2, L / 2 and L - 3 of L. A wrong one shows in no error, only in drafts that are
//! never right.

use serde_json::{Map, Value};

use crate::checkpoint::json::{Fields, parse_object};
use crate::checkpoint::{CONFIG, Source};
use crate::config::Config;
use crate::error::{ModelError, Result};

const TAPS_MAX: usize = 64;
const VOCAB_MAX: usize = 1 << 24;
const WIDTH_MAX: usize = 1 << 20;

pub(super) struct Settings {
    /// Path of config.json, for messages.
    file: String,
    /// Its layer, as a decoder.
    pub config: Config,
    /// Tokens that it can say.
    pub draft_vocab: usize,
    /// Layers of the model whose inputs it reads, by their number.
    pub taps: Vec<usize>,
    /// The residual stream begins with the normalized features.
    pub norm_before_residual: bool,
    /// Each layer that it reads has a norm of its own.
    pub fc_norm: bool,
    /// They have one together, side by side.
    pub norm_before_fc: bool,
    /// The next row's features are normalized.
    pub norm_output: bool,
}

/// Whether a config.json describes a head and no model by itself.
pub fn is_head(config_text: &[u8]) -> bool {
    let Ok(map) = parse_object(CONFIG, config_text) else { return false };
    let named = |value: &Value| value.as_str().is_some_and(|name| name.to_lowercase().contains("eagle3"));
    let architectures = map.get("architectures").and_then(Value::as_array);
    map.contains_key("speculators_model_type")
        || map.contains_key("draft_vocab_size")
        || architectures.is_some_and(|names| names.iter().any(named))
}

impl Settings {
    /// The text of its config.json, and what it says for a model of this configuration.
    pub fn read(source: &Source, target: &Config) -> Result<(Vec<u8>, Self)> {
        let text =
            source.read(CONFIG)?.ok_or_else(|| source.not_a_model("it has no config.json"))?.into_owned();
        let settings = Self::parse(&source.display(CONFIG), &text, target)?;
        Ok((text, settings))
    }

    pub fn parse(file: &str, text: &[u8], target: &Config) -> Result<Self> {
        let map = parse_object(file, text)?;
        let fields = Fields::new(file, &map);
        let speculators = fields.text("speculators_model_type")?;
        if let Some(kind) = speculators.filter(|kind| *kind != "eagle3") {
            let what = format!("a drafter of kind `{}` (field `speculators_model_type`)", short(kind));
            return Err(unsupported(file, what));
        }
        let (layer, path) = match speculators {
            None => (fields, ""),
            Some(_) => {
                let path = "transformer_layer_config.";
                let layer = fields.object("transformer_layer_config", path)?;
                let missing =
                    || fields.problem("transformer_layer_config", "is missing: it describes the layer");
                (layer.ok_or_else(missing)?, path)
            }
        };
        if layer.size_opt("num_hidden_layers", 1 << 12)?.is_some_and(|layers| layers != 1) {
            let layers = layer.size("num_hidden_layers", 1 << 12)?;
            return Err(unsupported(
                file,
                format!("a head of {layers} layers (field `{path}num_hidden_layers`)"),
            ));
        }
        let types = layer.list("layer_types")?.unwrap_or_default();
        if let Some(kind) = types.first().and_then(Value::as_str).filter(|kind| *kind != "full_attention") {
            let what = format!("a head whose layer is of type `{}` (field `{path}layer_types`)", short(kind));
            return Err(unsupported(file, what));
        }
        let config = as_decoder(file, layer)?;
        if config.quantization.is_some() {
            return Err(unsupported(file, "a quantized head (field `quantization_config`)".to_owned()));
        }
        let own = fields.object("eagle_config", "eagle_config.")?;
        let flag = |name: &str| match fields.flag(name)? {
            Some(flag) => Ok::<_, ModelError>(Some(flag)),
            None => own.map_or(Ok(None), |own| own.flag(name)),
        };
        if flag("use_aux_hidden_state")? == Some(false) {
            let what = "a head that reads the last layer alone (field `use_aux_hidden_state`)".to_owned();
            return Err(unsupported(file, what));
        }
        let [fc_norm, norm_before_fc] = ["fc_norm", "norm_before_fc"].map(flag);
        let [fc_norm, norm_before_fc] = [fc_norm?.unwrap_or(false), norm_before_fc?.unwrap_or(false)];
        if fc_norm && norm_before_fc {
            let what = "a norm for each layer that the head reads and one for all (fields `fc_norm`, `norm_before_fc`)";
            return Err(unsupported(file, what.to_owned()));
        }
        if let Some(stated) = fields.size_opt("target_hidden_size", WIDTH_MAX)?
            && stated != target.hidden
        {
            let problem =
                format!("is {stated}, the hidden size of the model that it drafts for is {}", target.hidden);
            return Err(fields.problem("target_hidden_size", problem));
        }
        Ok(Self {
            draft_vocab: fields.size_opt("draft_vocab_size", VOCAB_MAX)?.unwrap_or(config.vocab),
            taps: taps(fields, own, target)?,
            // As vLLM has it where a speculator says nothing.
            norm_before_residual: flag("norm_before_residual")?.unwrap_or(speculators.is_some()),
            fc_norm,
            norm_before_fc,
            norm_output: flag("norm_output")?.unwrap_or(false),
            file: file.to_owned(),
            config,
        })
    }

    /// What the model must agree with; `own`: whether the head has tables of its own, of embeddings and for its output.
    pub fn fits(&self, own_embedding: bool, own_output: bool, target: &Config) -> Result<()> {
        let wrong = |field: &str, problem: String| {
            Err(ModelError::Field { file: self.file.clone(), field: field.to_owned(), problem })
        };
        let (vocab, hidden, draft_vocab) = (self.config.vocab, self.config.hidden, self.draft_vocab);
        if vocab != target.vocab {
            let problem = format!("is {vocab}, the model that it drafts for has {} tokens", target.vocab);
            return wrong("vocab_size", problem);
        }
        if draft_vocab > vocab {
            return wrong("draft_vocab_size", format!("is {draft_vocab}, but vocab_size is {vocab}"));
        }
        if !own_embedding && hidden != target.hidden {
            let problem = format!(
                "is {hidden} and there are no embeddings in the head: those of the model have {} values",
                target.hidden
            );
            return wrong("hidden_size", problem);
        }
        if !own_output && (draft_vocab, hidden) != (target.vocab, target.hidden) {
            let problem = format!(
                "is {draft_vocab} and there is no output matrix in the head: that of the model is of {} tokens and {} values, the \
                 head's hidden size is {hidden}",
                target.vocab, target.hidden
            );
            return wrong("draft_vocab_size", problem);
        }
        Ok(())
    }
}

/// Layers whose inputs the head reads.
fn taps(fields: Fields<'_>, own: Option<Fields<'_>>, target: &Config) -> Result<Vec<usize>> {
    const IDS: &str = "eagle_aux_hidden_state_layer_ids";
    let layers = target.layers;
    // Inputs where the field stands by itself, outputs in the object: the input of the next.
    let stated = match (fields.list(IDS)?, own) {
        (Some(list), _) => Some((fields, list, 0, "the inputs of layers")),
        (None, Some(own)) => own.list(IDS)?.map(|list| (own, list, 1, "the outputs of layers")),
        (None, None) => None,
    };
    let Some((fields, list, shift, meaning)) = stated else {
        return match layers {
            0..4 => Err(fields.problem(
                IDS,
                format!("is missing, and the model has {layers} layers: it is assumed for at least 4"),
            )),
            _ => Ok(vec![2, layers / 2, layers - 3]),
        };
    };
    if list.is_empty() || list.len() > TAPS_MAX {
        return Err(fields.problem(IDS, format!("names {} layers, expected 1 to {TAPS_MAX}", list.len())));
    }
    let tap = |value: &Value| {
        let id = value.as_u64().and_then(|id| usize::try_from(id).ok());
        let tap = id.and_then(|id| id.checked_add(shift)).filter(|tap| *tap <= layers);
        tap.ok_or_else(|| {
            let problem =
                format!("names layer {value}: these are {meaning}, of which the model has {layers}");
            fields.problem(IDS, problem)
        })
    };
    list.iter().map(tap).collect()
}

/// The head's layer: a Llama's, whatever it is called, with tables that are looked for elsewhere.
fn as_decoder(file: &str, layer: Fields<'_>) -> Result<Config> {
    let other = [
        "architectures",
        "auto_map",
        "model_type",
        "tie_word_embeddings",
        "num_hidden_layers",
        "layer_types",
    ];
    let kept = layer.entries().filter(|(name, _)| !other.contains(name));
    let mut map: Map<String, Value> = kept.map(|(name, value)| (name.to_owned(), value.clone())).collect();
    map.insert("model_type".to_owned(), "llama".into());
    map.insert("num_hidden_layers".to_owned(), 1.into());
    Config::from_fields(Fields::new(file, &map))
}

fn unsupported(file: &str, what: String) -> ModelError {
    let supported = "supported: EAGLE-3 heads of one layer that attends to all positions".to_owned();
    ModelError::Unsupported { file: file.to_owned(), what, supported }
}

fn short(text: &str) -> String {
    text.chars().take(60).collect()
}
