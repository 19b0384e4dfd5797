//! PEFT folders: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Owns: their fields and tensor names, and the sentences that refuse what would be computed wrongly.

use std::path::Path;

use regex::Regex;
use serde_json::Value;

use super::read::{AdapterReading, AdapterTensor, ROLES, Role, read_file};
use super::{Adapter, AdapterLimits, AdapterTargets};
use crate::checkpoint::gguf::RowOrder;
use crate::checkpoint::json::parse_object;
use crate::checkpoint::safetensors::read_header;
use crate::error::{ModelError, Result};
use crate::quant::Encoding;

pub(super) const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Fields that change nothing here, whatever they say: which modules are adapted is read from the tensors.
const INFORMATIVE: [&str; 14] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "peft_version",
    "revision",
    "target_modules",
    "task_type",
];
/// Fields of others, with the value that leaves LoRA as it is.
const IGNORED_DEFAULTS: [(&str, &str); 2] = [("megatron_core", "megatron.core"), ("qalora_group_size", "16")];

struct PeftSettings {
    file: String,
    rank: f64,
    alpha: f64,
    by_root: bool,
    /// In the file's order; the first that matches a module's name holds.
    alphas: Vec<(Regex, f64)>,
    ranks: Vec<(Regex, f64)>,
}

impl PeftSettings {
    fn parse(file: &str, bytes: &[u8]) -> Result<Self> {
        let map = parse_object(file, bytes)?;
        let field = |name: &str, problem: String| ModelError::Field {
            file: file.to_owned(),
            field: name.to_owned(),
            problem,
        };
        let number = |name: &str, value: &Value| {
            let number = value.as_f64().filter(|value| value.is_finite() && *value > 0.0);
            number.ok_or_else(|| field(name, format!("is {value}, expected a number above 0")))
        };
        let value = |name: &str| map.get(name).filter(|value| !value.is_null());
        match value("peft_type") {
            Some(Value::String(kind)) if kind == "LORA" => {}
            kind => {
                let kind = kind.map_or("missing".to_owned(), |kind| format!("{kind}"));
                return Err(field("peft_type", format!("is {kind}, expected \"LORA\"")));
            }
        }
        let patterns = |name: &str| -> Result<Vec<(Regex, f64)>> {
            let Some(patterns) = value(name) else { return Ok(Vec::new()) };
            let Value::Object(patterns) = patterns else {
                return Err(field(name, format!("is {patterns}, expected an object")));
            };
            let pattern = |(key, of): (&String, &Value)| {
                let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{key})$"));
                let regex = regex.map_err(|error| field(name, format!("has `{key}`: {error}")))?;
                Ok((regex, number(name, of)?))
            };
            patterns.iter().map(pattern).collect()
        };
        for (name, value) in &map {
            Self::known(name, value).map_err(|problem| field(name, problem))?;
        }
        Ok(Self {
            file: file.to_owned(),
            rank: value("r").map_or(Ok(8.0), |value| number("r", value))?,
            alpha: value("lora_alpha").map_or(Ok(8.0), |value| number("lora_alpha", value))?,
            by_root: value("use_rslora") == Some(&Value::Bool(true)),
            alphas: patterns("alpha_pattern")?,
            ranks: patterns("rank_pattern")?,
        })
    }

    /// Whether a field may say what it says.
    fn known(name: &str, value: &Value) -> std::result::Result<(), String> {
        let is_set = match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(values) => !values.is_empty(),
            Value::Object(values) => !values.is_empty(),
            _ => true,
        };
        match name {
            "peft_type" | "r" | "lora_alpha" | "rank_pattern" | "alpha_pattern" | "lora_bias" => Ok(()),
            "use_rslora" if !matches!(value, Value::Bool(_) | Value::Null) => {
                Err(format!("is {value}, expected true or false"))
            }
            "use_rslora" => Ok(()),
            "bias" if is_set && value != "none" => Err(format!(
                "is {value}: biases of the model that were trained, too, are not served; expected \"none\""
            )),
            "init_lora_weights" => match value.as_str() {
                Some(kind)
                    if ["pissa", "olora", "corda", "loftq"].iter().any(|other| kind.starts_with(other)) =>
                {
                    Err(format!(
                        "is {value}: such training changes the model itself; save it converted to plain LoRA"
                    ))
                }
                _ => Ok(()),
            },
            "use_dora" if is_set => Err("is true: DoRA is not served".to_owned()),
            "modules_to_save" if is_set => {
                Err(format!("is {value}: modules that replace the model's are not served"))
            }
            _ if !is_set || INFORMATIVE.contains(&name) => Ok(()),
            "bias" => Ok(()),
            _ if IGNORED_DEFAULTS.iter().any(|(other, is)| {
                *other == name && value.as_str().map_or_else(|| value.to_string(), str::to_owned) == *is
            }) =>
            {
                Ok(())
            }
            _ => Err(format!("is {value}: what it changes is not served")),
        }
    }

    /// What B's products are multiplied by. `rank`: by the tensors' shapes.
    fn scale(&self, module: &str, rank: usize) -> Result<f64> {
        let of = |patterns: &[(Regex, f64)]| {
            patterns.iter().find(|(pattern, _)| pattern.is_match(module)).map(|(_, value)| *value)
        };
        let said = of(&self.ranks).unwrap_or(self.rank);
        if said != rank as f64 {
            return Err(ModelError::Field {
                file: self.file.clone(),
                field: "r".to_owned(),
                problem: format!(
                    "(or rank_pattern) is {said} for `{module}`, whose tensors have rank {rank}"
                ),
            });
        }
        let alpha = of(&self.alphas).unwrap_or(self.alpha);
        Ok(alpha / if self.by_root { (rank as f64).sqrt() } else { rank as f64 })
    }
}

/// See [`Adapter::read`].
pub(super) fn read(folder: &Path, targets: &AdapterTargets, limits: AdapterLimits) -> Result<Adapter> {
    let config = folder.join(CONFIG);
    let missing = |file: &Path| {
        let missing = match folder.join("adapter_model.bin").exists() {
            true => {
                "it has adapter_model.bin, a pickle, which is not read: save it as safetensors".to_owned()
            }
            false => format!("{} is missing", file.file_name().unwrap_or_default().display()),
        };
        ModelError::AdapterFolder { folder: folder.display().to_string(), problem: missing }
    };
    let settings = read_file(&config, CONFIG_BYTES_MAX)?.ok_or_else(|| missing(&config))?;
    let settings = PeftSettings::parse(&config.display().to_string(), &settings)?;
    let weights = folder.join(WEIGHTS);
    let bytes = read_file(&weights, limits.bytes)?.ok_or_else(|| missing(&weights))?;
    let file = weights.display().to_string();
    let entries =
        read_header(&bytes).map_err(|problem| ModelError::Damaged { file: file.clone(), problem })?;
    let mut reading = AdapterReading::new(&file, targets, limits, false);
    for (name, entry) in &entries {
        let (module, role) = module_of(&reading, name)?;
        let tensor = AdapterTensor {
            shape: entry.shape.clone(),
            encoding: entry.dtype.clone().map(Encoding::Plain),
            bytes: &bytes[entry.range.clone()],
            order: RowOrder::AsStored,
        };
        let stored = ROLES.map(|role| format!("base_model.model.{module}{}", suffix(role)));
        reading.put(module, role, stored, tensor).map_err(|problem| reading.problem(name, problem))?;
    }
    reading.adapter(|module, rank| settings.scale(module, rank))
}

fn suffix(role: Role) -> &'static str {
    match role {
        Role::A => ".lora_A.weight",
        Role::B => ".lora_B.weight",
        Role::Bias => ".lora_B.bias",
    }
}

/// The module of the model that a tensor belongs to.
fn module_of(reading: &AdapterReading<'_>, name: &str) -> Result<(String, Role)> {
    let path = name.strip_prefix("base_model.model.").unwrap_or(name);
    let path = path.replace(".default.", ".");
    if path.contains("lora_magnitude_vector") {
        return Err(reading.problem(name, "is of DoRA, which is not served"));
    }
    if path.contains("lora_embedding_") {
        return Err(reading.problem(name, "adapts the table of embeddings, which is not served"));
    }
    let found = ROLES.into_iter().find_map(|role| Some((path.strip_suffix(suffix(role))?, role)));
    let Some((module, role)) = found else {
        let problem = "is no part of a LoRA adapter: expected `...lora_A.weight` and `...lora_B.weight`";
        return Err(reading.problem(name, problem));
    };
    // Of models with other parts beside the text's.
    let module = module.replacen("model.language_model.", "model.", 1);
    Ok((module.replacen("language_model.model.", "model.", 1), role))
}
