//! This machine's measured limits, kept in a file: what `folio doctor --write-profile` measured and `folio serve` tells steps' speed by.
//!
//! Owns: the file's place and what is read of it. The file is what `folio doctor --json` prints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use folio_server::why::{Rates, Roofline, StepCosts, StepNeeds, StepShape};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bench::limits::Costs;
use crate::bench::others::NOTABLE;
use crate::models::user_folder;
use crate::plan::StepSample;
use crate::runtime::Runtime;

/// Below the user's folder.
const FILE: &str = "folio/machine.json";

/// What is read of the file.
#[derive(Debug, Deserialize)]
pub struct Profile {
    pub by_threads: Vec<Processors>,
    pub gpu: Option<Gpu>,
    pub free_memory_bytes: Option<u64>,
    /// Models whose steps were measured.
    #[serde(default)]
    pub models: Vec<MeasuredModel>,
}

#[derive(Debug, Deserialize)]
pub struct Processors {
    pub threads: usize,
    pub read_bytes_per_s: f64,
    pub f32_flop_per_s: f64,
    pub int8_op_per_s: f64,
}

impl Processors {
    /// What is copied is read and written.
    pub fn copy_bytes_per_s(&self) -> f64 {
        self.read_bytes_per_s / 2.0
    }
}

#[derive(Debug, Deserialize)]
pub struct Gpu {
    pub name: String,
    pub read_bytes_per_s: f64,
    pub matrix_flop_per_s: f64,
    pub upload_bytes_per_s: f64,
    /// Free while nothing was loaded.
    pub memory_bytes: Option<u64>,
}

/// A model's steps on this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredModel {
    pub name: String,
    pub parameters: u64,
    pub layers: usize,
    pub hidden: usize,
    pub weight_bytes: u64,
    pub kv_bytes_per_token: u64,
    /// 0: a GPU.
    pub threads: usize,
    pub samples: Vec<StepSample>,
    /// Share of the processors' time that other processes had meanwhile, 0 to 1, where that is known.
    #[serde(default)]
    pub others: Option<f64>,
}

/// How far the bytes of two forms of one model may be apart that count as one: how weights are padded differs.
const SAME_WEIGHTS: f64 = 0.03;

impl MeasuredModel {
    /// That others had more of the processors than may be overlooked, as a sentence.
    pub fn disturbed(&self) -> Option<String> {
        let share = self.others.filter(|share| *share > NOTABLE)?;
        let percent = 100.0 * share;
        Some(format!(
            "while these steps were measured, other processes had {percent:.0} % of the processors: on a quiet machine they may take less"
        ))
    }

    /// Whether another is of the same shape in the same form, on as many threads.
    pub fn is_same(&self, other: &Self) -> bool {
        let key = |of: &Self| (of.parameters, of.layers, of.hidden, of.kv_bytes_per_token, of.threads);
        let apart = self.weight_bytes.abs_diff(other.weight_bytes) as f64;
        key(self) == key(other) && apart <= SAME_WEIGHTS * other.weight_bytes as f64
    }
}

/// `~/.config/folio/machine.json`, or below `XDG_CONFIG_HOME`.
pub fn user_file() -> Option<PathBuf> {
    Some(user_folder()?.join(FILE))
}

/// Models that a profile keeps, the last ones measured.
const MODELS_MAX: usize = 64;

/// Writes what `folio doctor` measured, with the steps of `model` and of those that were in the file before. Where.
pub fn write(mut report: Value, model: Option<MeasuredModel>, path: Option<&Path>) -> Result<PathBuf> {
    let path = path.map(Path::to_owned).or_else(user_file);
    let path = path.context("there is no home for the profile: name a file, --write-profile=FILE")?;
    // What cannot be read is written anew.
    let before = if path.exists() { Profile::read(Some(&path)).ok().and_then(Result::ok) } else { None };
    let mut models = before.map(|profile| profile.models).unwrap_or_default();
    if let Some(model) = model {
        models.retain(|other| !other.is_same(&model));
        models.push(model);
    }
    models.drain(..models.len().saturating_sub(MODELS_MAX));
    report["models"] = serde_json::to_value(models)?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let text = format!("{report:#}\n");
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// What the model's steps need and what this machine can do, or why that is not known. A file that is named must be one.
pub fn roofline(path: Option<&Path>, runtime: &Runtime) -> Result<std::result::Result<Roofline, String>> {
    let profile = match Profile::read(path)? {
        Ok(profile) => profile,
        Err(reason) => return Ok(Err(reason)),
    };
    let costs = Costs::of(&runtime.model, runtime.report.weight_bytes);
    let gpu = runtime.report.backend.starts_with("cuda");
    let rates = profile.rates(gpu, runtime.report.threads, costs.quantized());
    Ok(rates.map(|rates| Roofline { costs: Arc::new(costs), rates }))
}

impl Profile {
    /// The file that is named, or the user's, or why there is none.
    pub fn read(path: Option<&Path>) -> Result<std::result::Result<Self, String>> {
        let Some(file) = path.map(Path::to_owned).or_else(user_file) else {
            return Ok(Err(
                "there is no profile of this machine: measure one with `folio doctor --write-profile=FILE`"
                    .to_owned(),
            ));
        };
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if path.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Err(
                    "there is no profile of this machine: measure one with `folio doctor --write-profile`"
                        .to_owned(),
                ));
            }
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
        };
        let profile = serde_json::from_str(&text)
            .with_context(|| format!("{} is no profile of `folio doctor --write-profile`", file.display()))?;
        Ok(Ok(profile))
    }

    /// Models that were measured on so many threads; 0: on the GPU.
    pub fn on(&self, threads: usize) -> Vec<MeasuredModel> {
        self.models.iter().filter(|model| model.threads == threads).cloned().collect()
    }

    /// What was measured with so many threads.
    pub fn processors(&self, threads: usize) -> std::result::Result<&Processors, String> {
        self.by_threads.iter().find(|measured| measured.threads == threads).ok_or_else(|| {
            let measured: Vec<_> =
                self.by_threads.iter().map(|measured| measured.threads.to_string()).collect();
            format!(
                "the profile of this machine has {} threads, and {threads} compute here",
                measured.join(", ")
            )
        })
    }

    /// Of what computes the model.
    fn rates(&self, gpu: bool, threads: usize, quantized: bool) -> std::result::Result<Rates, String> {
        if gpu {
            let gpu = self.gpu.as_ref().ok_or("the profile of this machine was measured without its GPU")?;
            return Ok(Rates {
                read_bytes_per_s: gpu.read_bytes_per_s,
                weight_op_per_s: gpu.matrix_flop_per_s,
                attention_op_per_s: gpu.matrix_flop_per_s,
                copy_bytes_per_s: gpu.upload_bytes_per_s,
            });
        }
        let found = self.processors(threads)?;
        Ok(Rates {
            read_bytes_per_s: found.read_bytes_per_s,
            weight_op_per_s: if quantized { found.int8_op_per_s } else { found.f32_flop_per_s },
            attention_op_per_s: found.f32_flop_per_s,
            copy_bytes_per_s: found.copy_bytes_per_s(),
        })
    }
}

impl StepCosts for Costs {
    fn demand(&self, step: &StepShape) -> StepNeeds {
        self.step(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_threads_that_compute() {
        let text = r#"{"threads": 2, "by_threads": [
            {"threads": 1, "read_bytes_per_s": 1e9, "f32_flop_per_s": 2e9, "int8_op_per_s": 3e9},
            {"threads": 2, "read_bytes_per_s": 4e9, "f32_flop_per_s": 5e9, "int8_op_per_s": 6e9}], "gpu": null}"#;
        let profile: Profile = serde_json::from_str(text).expect("a profile");
        let rates = profile.rates(false, 2, true).expect("measured");
        assert_eq!(
            (rates.read_bytes_per_s, rates.weight_op_per_s, rates.attention_op_per_s, rates.copy_bytes_per_s),
            (4e9, 6e9, 5e9, 2e9)
        );
        assert_eq!(profile.rates(false, 1, false).expect("measured").weight_op_per_s, 2e9);
        let other = profile.rates(false, 3, false).expect_err("not measured");
        assert!(other.contains("1, 2") && other.contains('3'), "{other}");
        assert!(profile.rates(true, 0, false).is_err());
    }

    #[test]
    fn a_profile_keeps_the_models_that_it_had() {
        let folder = tempfile::tempdir().expect("folder");
        let file = folder.path().join("machine.json");
        let report = || serde_json::json!({"by_threads": [], "gpu": null, "free_memory_bytes": 5});
        let model = |name: &str, threads, weight_bytes| MeasuredModel {
            name: name.to_owned(),
            parameters: 10,
            layers: 2,
            hidden: 8,
            weight_bytes,
            kv_bytes_per_token: 64,
            threads,
            samples: Vec::new(),
            others: None,
        };
        write(report(), Some(model("a", 1, 1000)), Some(&file)).expect("written");
        write(report(), Some(model("b", 2, 1000)), Some(&file)).expect("written");
        // The same in the same form takes the place of the one before.
        write(report(), Some(model("c", 1, 1010)), Some(&file)).expect("written");
        write(report(), None, Some(&file)).expect("written");
        let profile = Profile::read(Some(&file)).expect("readable").expect("there");
        let names: Vec<&str> = profile.models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["b", "c"]);
        assert_eq!(profile.on(1).len(), 1);
        std::fs::write(&file, "{").expect("written");
        assert!(Profile::read(Some(&file)).is_err());
    }
}
