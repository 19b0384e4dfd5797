//! This machine's measured limits, kept in a file: what `folio doctor --write-profile` measured and `folio serve` tells steps' speed by.
//!
//! Owns: the file's place and what is read of it. The file is what `folio doctor --json` prints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use folio_server::why::{Demand, Rates, Roofline, StepCosts, StepShape};
use serde::Deserialize;
use serde_json::Value;

use crate::bench::limits::Costs;
use crate::models::user_folder;
use crate::runtime::Runtime;

/// Below the user's folder.
const FILE: &str = "folio/machine.json";

/// What is read of the file.
#[derive(Debug, Deserialize)]
struct Profile {
    by_threads: Vec<Processors>,
    gpu: Option<Gpu>,
}

#[derive(Debug, Deserialize)]
struct Processors {
    threads: usize,
    read_bytes_per_s: f64,
    f32_flop_per_s: f64,
    int8_op_per_s: f64,
}

#[derive(Debug, Deserialize)]
struct Gpu {
    read_bytes_per_s: f64,
    matrix_flop_per_s: f64,
}

/// `~/.config/folio/machine.json`, or below `XDG_CONFIG_HOME`.
pub fn user_file() -> Option<PathBuf> {
    Some(user_folder()?.join(FILE))
}

/// Writes what `folio doctor` measured. Where.
pub fn write(report: &Value, path: Option<&Path>) -> Result<PathBuf> {
    let path = path.map(Path::to_owned).or_else(user_file);
    let path = path.context("there is no home for the profile: name a file, --write-profile=FILE")?;
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let text = format!("{report:#}\n");
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// What the model's steps need and what this machine can do, or why that is not known. A file that is named must be one.
pub fn roofline(path: Option<&Path>, runtime: &Runtime) -> Result<std::result::Result<Roofline, String>> {
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
    let profile: Profile = serde_json::from_str(&text)
        .with_context(|| format!("{} is no profile of `folio doctor --write-profile`", file.display()))?;
    let costs = Costs::of(&runtime.model, runtime.report.weight_bytes);
    let gpu = runtime.report.backend.starts_with("cuda");
    let rates = profile.rates(gpu, runtime.report.threads, costs.quantized());
    Ok(rates.map(|rates| Roofline { costs: Arc::new(costs), rates }))
}

impl Profile {
    /// Of what computes the model.
    fn rates(&self, gpu: bool, threads: usize, quantized: bool) -> std::result::Result<Rates, String> {
        if gpu {
            let gpu = self.gpu.as_ref().ok_or("the profile of this machine was measured without its GPU")?;
            return Ok(Rates {
                read_bytes_per_s: gpu.read_bytes_per_s,
                weight_op_per_s: gpu.matrix_flop_per_s,
                attention_op_per_s: gpu.matrix_flop_per_s,
            });
        }
        let found = self.by_threads.iter().find(|measured| measured.threads == threads).ok_or_else(|| {
            let measured: Vec<_> =
                self.by_threads.iter().map(|measured| measured.threads.to_string()).collect();
            format!(
                "the profile of this machine has {} threads, and {threads} compute here",
                measured.join(", ")
            )
        })?;
        Ok(Rates {
            read_bytes_per_s: found.read_bytes_per_s,
            weight_op_per_s: if quantized { found.int8_op_per_s } else { found.f32_flop_per_s },
            attention_op_per_s: found.f32_flop_per_s,
        })
    }
}

impl StepCosts for Costs {
    fn demand(&self, step: &StepShape) -> Demand {
        let StepShape { rows, logit_rows, kv_positions, attention } = *step;
        self.step(rows, logit_rows, kv_positions, attention)
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
            (rates.read_bytes_per_s, rates.weight_op_per_s, rates.attention_op_per_s),
            (4e9, 6e9, 5e9)
        );
        assert_eq!(profile.rates(false, 1, false).expect("measured").weight_op_per_s, 2e9);
        let other = profile.rates(false, 3, false).expect_err("not measured");
        assert!(other.contains("1, 2") && other.contains('3'), "{other}");
        assert!(profile.rates(true, 0, false).is_err());
    }
}
