//! PEFT folders: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Owns: their fields and tensor names, and the sentences that refuse what would be computed wrongly. A folder comes from a stranger: every
//! bound is checked before memory is taken, every tensor of the file is used or named in an error.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use half::{bf16, f16};
use regex::Regex;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{Adapter, AdapterTarget, AdapterTargets, LANES, LowRank, LowRankPart};
use crate::backend::DType;
use crate::checkpoint::json::parse_object;
use crate::checkpoint::safetensors::{TensorEntry, read_header};
use crate::error::{ModelError, Result};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// What an adapter may be at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterLimits {
    pub rank: usize,
    /// Of its file, and of its weights in memory.
    pub bytes: u64,
}

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

/// The tensors of one module.
#[derive(Default)]
struct PeftModule<'a> {
    a: Option<&'a TensorEntry>,
    b: Option<&'a TensorEntry>,
    bias: Option<&'a TensorEntry>,
}

impl Adapter {
    /// Reads a PEFT folder for a model. Blocks; takes as much memory as the file and the adapter. The digest is of what is computed: two
    /// folders that compute the same have the same.
    pub fn read(folder: &Path, targets: &AdapterTargets, limits: AdapterLimits) -> Result<Self> {
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
        let reading = AdapterReading { file: &file, bytes: &bytes, targets, limits };
        reading.adapter(&settings)
    }
}

/// `None`: there is no such file.
fn read_file(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let name = || path.display().to_string();
    let failed = |source| ModelError::Io { file: name(), source };
    let about = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        about => about.map_err(failed)?,
    };
    if !about.is_file() {
        let source = std::io::Error::other("it is no regular file");
        return Err(ModelError::Io { file: name(), source });
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    let read = file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(failed)?;
    if read as u64 > limit {
        return Err(ModelError::FileTooLarge { file: name(), bytes: about.len(), limit });
    }
    Ok(Some(bytes))
}

struct AdapterReading<'a> {
    file: &'a str,
    bytes: &'a [u8],
    targets: &'a AdapterTargets,
    limits: AdapterLimits,
}

impl AdapterReading<'_> {
    fn problem(&self, tensor: &str, problem: impl Into<String>) -> ModelError {
        ModelError::Tensor { file: self.file.to_owned(), tensor: tensor.to_owned(), problem: problem.into() }
    }

    fn adapter(&self, settings: &PeftSettings) -> Result<Adapter> {
        let damaged = |problem| ModelError::Damaged { file: self.file.to_owned(), problem };
        let entries = read_header(self.bytes).map_err(damaged)?;
        let mut modules: BTreeMap<String, PeftModule<'_>> = BTreeMap::new();
        for (name, entry) in &entries {
            let (module, which) = self.module_of(name)?;
            let module = modules.entry(module).or_default();
            let place = match which {
                TensorRole::A => &mut module.a,
                TensorRole::B => &mut module.b,
                TensorRole::Bias => &mut module.bias,
            };
            if place.replace(entry).is_some() {
                return Err(self.problem(name, "has a second tensor for the same place"));
            }
        }
        if modules.is_empty() {
            return Err(damaged("it has no tensors".to_owned()));
        }
        let mut digest = Sha256::new();
        digest.update(b"folio adapter 2");
        let mut parts: BTreeMap<_, (usize, usize, Vec<LowRankPart>)> = BTreeMap::new();
        let (mut rank, mut memory) = (0, 0u64);
        let dtype = stored_dtype(entries.values().map(|entry| &entry.dtype));
        for (name, module) in &modules {
            let module = self.module(name, module, settings)?;
            rank = rank.max(module.rank);
            digest.update((name.len() as u64).to_le_bytes());
            digest.update(name.as_bytes());
            digest.update((module.rank as u64).to_le_bytes());
            digest.update(module.scale.to_le_bytes());
            for values in [Some(&module.down), Some(&module.up), module.bias.as_ref()] {
                digest.update((values.map_or(0, Vec::len) as u64).to_le_bytes());
                values.into_iter().flatten().for_each(|value| digest.update(value.to_le_bytes()));
            }
            for target in module.targets {
                let part = module.part(target);
                let lanes = (part.rank + 1).next_multiple_of(LANES) as u64;
                memory += dtype.size() as u64 * lanes * (target.stored[0] + target.stored[1]) as u64;
                if memory > self.limits.bytes {
                    let limit = self.limits.bytes;
                    return Err(ModelError::FileTooLarge {
                        file: self.file.to_owned(),
                        bytes: memory,
                        limit,
                    });
                }
                let of = (target.rows, target.stored[1], Vec::new());
                parts.entry(target.matrix).or_insert(of).2.push(part);
            }
        }
        let products =
            parts.into_iter().map(|(id, (rows, cols, parts))| (id, LowRank::new(rows, cols, dtype, parts)));
        Ok(Adapter::new(digest.finalize().into(), rank, products))
    }

    /// The module of the model that a tensor belongs to.
    fn module_of(&self, name: &str) -> Result<(String, TensorRole)> {
        let path = name.strip_prefix("base_model.model.").unwrap_or(name);
        let path = path.replace(".default.", ".");
        if path.contains("lora_magnitude_vector") {
            return Err(self.problem(name, "is of DoRA, which is not served"));
        }
        if path.contains("lora_embedding_") {
            return Err(self.problem(name, "adapts the table of embeddings, which is not served"));
        }
        let suffixes = [
            (".lora_A.weight", TensorRole::A),
            (".lora_B.weight", TensorRole::B),
            (".lora_B.bias", TensorRole::Bias),
        ];
        let found = suffixes.iter().find_map(|(suffix, which)| Some((path.strip_suffix(suffix)?, *which)));
        let Some((module, which)) = found else {
            let problem = "is no part of a LoRA adapter: expected `...lora_A.weight` and `...lora_B.weight`";
            return Err(self.problem(name, problem));
        };
        // Of models with other parts beside the text's.
        let module = module.replacen("model.language_model.", "model.", 1);
        Ok((module.replacen("language_model.model.", "model.", 1), which))
    }

    fn module<'t>(
        &'t self,
        name: &str,
        module: &PeftModule<'_>,
        settings: &PeftSettings,
    ) -> Result<CheckedModule<'t>> {
        let stored = |suffix: &str| format!("base_model.model.{name}.{suffix}");
        let tensor = |entry: Option<&TensorEntry>, suffix: &str| match entry {
            Some(entry) => self.values(&stored(suffix), entry),
            None => Err(self.problem(&stored(suffix), "is missing")),
        };
        let targets = self.targets.get(&format!("{name}.weight")).unwrap_or_default();
        let Some(AdapterTarget { stored: [rows, cols], .. }) = targets.first() else {
            let problem =
                "adapts a module that the model does not have (is this the adapter of another model?)";
            return Err(self.problem(&stored("lora_A.weight"), problem));
        };
        if !targets.iter().all(|target| target.is_product) {
            let problem = "adapts what is no plain product here (experts, the output table, absorbed projections): not served";
            return Err(self.problem(&stored("lora_A.weight"), problem));
        }
        let (shape_a, down) = tensor(module.a, "lora_A.weight")?;
        let (shape_b, up) = tensor(module.b, "lora_B.weight")?;
        let (&[rank, inner], &[outer, other]) = (&shape_a[..], &shape_b[..]) else {
            return Err(self.problem(
                &stored("lora_A.weight"),
                format!("has shape {shape_a:?}, expected two dimensions, as B"),
            ));
        };
        if inner != *cols || rank == 0 {
            let problem = format!("has shape {shape_a:?}, expected [rank, {cols}]");
            return Err(self.problem(&stored("lora_A.weight"), problem));
        }
        if outer != *rows || other != rank {
            let problem = format!("has shape {shape_b:?}, expected [{rows}, {rank}]");
            return Err(self.problem(&stored("lora_B.weight"), problem));
        }
        if rank > self.limits.rank {
            let problem =
                format!("has rank {rank}, more than the {} that --max-lora-rank allows", self.limits.rank);
            return Err(self.problem(&stored("lora_A.weight"), problem));
        }
        let scale = settings.scale(name, rank)? as f32;
        let bias = match module.bias {
            None => None,
            Some(entry) => {
                let (shape, bias) = self.values(&stored("lora_B.bias"), entry)?;
                if shape != [*rows] {
                    let problem = format!("has shape {shape:?}, expected [{rows}]");
                    return Err(self.problem(&stored("lora_B.bias"), problem));
                }
                Some(bias)
            }
        };
        Ok(CheckedModule { targets, rank, scale, down, up, bias })
    }

    /// The values of a tensor, which are numbers.
    fn values(&self, name: &str, entry: &TensorEntry) -> Result<(Vec<usize>, Vec<f32>)> {
        let bytes = &self.bytes[entry.range.clone()];
        let values: Vec<f32> = match &entry.dtype {
            Ok(DType::F32) => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Ok(DType::F16) => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Ok(DType::BF16) => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            Err(other) => {
                return Err(self.problem(name, format!("has dtype {other}, expected F32, F16 or BF16")));
            }
        };
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(self.problem(name, format!("holds {} at {at}, which is no number", values[at]))),
            None => Ok((entry.shape.clone(), values)),
        }
    }
}

#[derive(Clone, Copy)]
enum TensorRole {
    A,
    B,
    Bias,
}

/// The type that holds every value of a file exactly.
fn stored_dtype<'a, E: 'a>(mut dtypes: impl Iterator<Item = &'a std::result::Result<DType, E>>) -> DType {
    match dtypes.next() {
        Some(Ok(first)) if dtypes.all(|dtype| dtype.as_ref().is_ok_and(|dtype| dtype == first)) => *first,
        _ => DType::F32,
    }
}

/// A module that was read and checked.
struct CheckedModule<'t> {
    targets: &'t [AdapterTarget],
    rank: usize,
    /// What B's products and its bias are multiplied by.
    scale: f32,
    down: Vec<f32>,
    up: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl CheckedModule<'_> {
    fn part(&self, target: &AdapterTarget) -> LowRankPart {
        let pick = |values: &[f32]| {
            let period = target.pick.period * (values.len() / target.stored[0]);
            let each = values.len() / target.stored[0];
            let (first, rows) = (target.pick.first * each, target.pick.rows * each);
            values.chunks_exact(period).flat_map(|of| &of[first..first + rows]).copied().collect::<Vec<f32>>()
        };
        let bias = self.bias.as_deref().map(pick);
        LowRankPart {
            first_row: target.first_row,
            down: self.down.clone(),
            up: pick(&self.up),
            bias,
            rank: self.rank,
            scale: self.scale,
        }
    }
}
