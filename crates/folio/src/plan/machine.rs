//! What a machine can do: this one as `folio doctor --write-profile` measured it, others as their makers state or as one was measured.
//!
//! Owns: the table of published machines (`machines.toml`), and the share of what is stated that steps may reach.

use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_server::why::Rates;
use serde::{Deserialize, Serialize};

use crate::bench::table;
use crate::profile::{MeasuredModel, Profile};
use crate::units;

const TABLE: &str = include_str!("machines.toml");

/// Shares of a machine's limits within which steps are expected to run, where none were measured: of rates that are stated, and of
/// rates that were measured on it.
const OF_STATED: [f64; 2] = [0.5, 0.9];
const OF_MEASURED: [f64; 2] = [0.6, 0.95];
/// The same of accelerators, as Folio's kernels ran on an H100: of its measured limits, 0.20 to 0.34 for prompts and 0.22 to 0.76 for decodes
/// (`docs/performance-gpu.md`), which are 0.65 and 0.93 of what its maker states of operations and bytes.
const OF_STATED_ACCELERATOR: [f64; 2] = [0.2, 0.7];
const OF_MEASURED_ACCELERATOR: [f64; 2] = [0.2, 0.8];

/// Who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Basis {
    /// Its maker, or a part of what that states.
    Stated,
    /// Nobody: it is made of what is stated and of what is taken to be so.
    Assumed,
    Measured,
}

impl Basis {
    fn name(self) -> &'static str {
        match self {
            Self::Stated => "stated",
            Self::Assumed => "assumed",
            Self::Measured => "measured",
        }
    }
}

/// A number and where it is from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    pub value: f64,
    pub basis: Basis,
    pub source: String,
}

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub name: String,
    pub title: String,
    /// Computes with a device's defaults for sizes of steps rather than a processor's.
    pub accelerator: bool,
    /// For weights and KV.
    pub memory_bytes: Figure,
    pub read_bytes_per_s: Figure,
    /// Multiplications with weights in 16 bits, with quantized ones, and of attention. A multiply-add counts as two.
    pub plain_op_per_s: Figure,
    pub quantized_op_per_s: Figure,
    pub attention_op_per_s: Figure,
    /// Between device and host memory.
    pub host_bytes_per_s: Figure,
    /// Models whose steps were measured on it.
    #[serde(skip)]
    pub models: Vec<MeasuredModel>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    machine: Vec<Machine>,
}

impl Machine {
    /// The published ones.
    pub fn published() -> Vec<Self> {
        let table: Table = toml::from_str(TABLE).expect("machines.toml is tested");
        table.machine
    }

    /// One of the published ones by its name, or the profile in a file; without a name this machine's profile. `threads`: of a
    /// profile, instead of all.
    pub fn find(name: Option<&str>, threads: Option<u32>) -> Result<Self> {
        let published = Self::published();
        if let Some(found) = name.and_then(|name| published.iter().find(|machine| machine.name == name)) {
            if threads.is_some() {
                bail!("--threads: {} is known as a whole; threads are of a measured profile", found.name);
            }
            return Ok(found.clone());
        }
        let file = name.map(Path::new);
        if let Some(file) = file.filter(|file| !file.exists()) {
            bail!("{} is neither a file nor a machine that is known: {}", file.display(), names(&published));
        }
        let profile = match Profile::read(file)? {
            Ok(profile) => profile,
            Err(reason) => bail!("{reason}; or name another machine: {}", names(&published)),
        };
        Self::of_profile(&profile, threads)
            .with_context(|| file.map_or("this machine".to_owned(), |file| file.display().to_string()))
    }

    fn of_profile(profile: &Profile, threads: Option<u32>) -> Result<Self> {
        let figure = |value: f64| Figure {
            value,
            basis: Basis::Measured,
            source: "folio doctor --write-profile".to_owned(),
        };
        if let (Some(gpu), None) = (&profile.gpu, threads) {
            let memory = gpu
                .memory_bytes
                .context("the profile does not say how much memory the GPU has: write it again")?;
            return Ok(Self {
                name: "profile".to_owned(),
                title: gpu.name.clone(),
                accelerator: true,
                memory_bytes: figure(memory as f64),
                read_bytes_per_s: figure(gpu.read_bytes_per_s),
                plain_op_per_s: figure(gpu.matrix_flop_per_s),
                quantized_op_per_s: figure(gpu.matrix_flop_per_s),
                attention_op_per_s: figure(gpu.matrix_flop_per_s),
                host_bytes_per_s: figure(gpu.upload_bytes_per_s),
                models: profile.on(0),
            });
        }
        let all = || profile.by_threads.iter().map(|measured| measured.threads).max();
        let threads = threads.map(|n| n as usize).or_else(all).context("the profile has no processors")?;
        let found = profile.processors(threads).map_err(anyhow::Error::msg)?;
        let memory =
            profile.free_memory_bytes.context("the profile does not say how much memory there is")?;
        Ok(Self {
            name: "profile".to_owned(),
            title: format!("{threads} threads"),
            accelerator: false,
            memory_bytes: figure(memory as f64),
            read_bytes_per_s: figure(found.read_bytes_per_s),
            plain_op_per_s: figure(found.f32_flop_per_s),
            quantized_op_per_s: figure(found.int8_op_per_s),
            attention_op_per_s: figure(found.f32_flop_per_s),
            host_bytes_per_s: figure(found.copy_bytes_per_s()),
            models: profile.on(threads),
        })
    }

    /// Where a model runs already, with so much memory for it. Its limits are nobody's question.
    pub fn running(title: &str, accelerator: bool, memory_bytes: u64) -> Self {
        let figure =
            |value: f64| Figure { value, basis: Basis::Measured, source: "the engine that runs".to_owned() };
        Self {
            name: "running".to_owned(),
            title: title.to_owned(),
            accelerator,
            memory_bytes: figure(memory_bytes as f64),
            read_bytes_per_s: figure(0.0),
            plain_op_per_s: figure(0.0),
            quantized_op_per_s: figure(0.0),
            attention_op_per_s: figure(0.0),
            host_bytes_per_s: figure(0.0),
            models: Vec::new(),
        }
    }

    /// As many of them together. What they tell one another costs nothing here.
    pub fn times(mut self, devices: u32) -> Self {
        let n = f64::from(devices);
        if devices > 1 {
            self.title = format!("{devices} x {}", self.title);
            self.models.clear();
        }
        for figure in [
            &mut self.memory_bytes,
            &mut self.read_bytes_per_s,
            &mut self.plain_op_per_s,
            &mut self.quantized_op_per_s,
            &mut self.attention_op_per_s,
            &mut self.host_bytes_per_s,
        ] {
            figure.value *= n;
        }
        self
    }

    /// `quantized`: the weights are.
    pub fn rates(&self, quantized: bool) -> Rates {
        let weights = if quantized { &self.quantized_op_per_s } else { &self.plain_op_per_s };
        Rates {
            read_bytes_per_s: self.read_bytes_per_s.value,
            weight_op_per_s: weights.value,
            attention_op_per_s: self.attention_op_per_s.value,
            copy_bytes_per_s: self.host_bytes_per_s.value,
        }
    }

    /// The least and the most of the rates that steps are expected to reach.
    pub fn shares(&self) -> [f64; 2] {
        match (self.read_bytes_per_s.basis, self.accelerator) {
            (Basis::Measured, false) => OF_MEASURED,
            (Basis::Measured, true) => OF_MEASURED_ACCELERATOR,
            (_, false) => OF_STATED,
            (_, true) => OF_STATED_ACCELERATOR,
        }
    }

    /// The steps of a model that was measured in this form.
    pub fn steps_of(&self, model: &MeasuredModel) -> Option<&MeasuredModel> {
        self.models.iter().find(|other| other.is_same(model))
    }
}

fn names(machines: &[Machine]) -> String {
    machines.iter().map(|machine| machine.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// The published machines, with where each figure is from.
pub fn table() -> String {
    let machines = Machine::published();
    let row = |machine: &Machine| {
        vec![
            machine.name.clone(),
            machine.title.clone(),
            units::bytes(machine.memory_bytes.value as u64),
            format!("{:.0}", machine.read_bytes_per_s.value / 1e9),
            format!("{:.1}", machine.plain_op_per_s.value / 1e12),
            format!("{:.1}", machine.quantized_op_per_s.value / 1e12),
        ]
    };
    let rows: Vec<_> = machines.iter().map(row).collect();
    let mut out =
        table::render(&["machine", "", "memory", "reads GB/s", "16 bits, Top/s", "quantized, Top/s"], &rows);
    out += "\n";
    for machine in &machines {
        for (what, figure) in [
            ("memory", &machine.memory_bytes),
            ("reads", &machine.read_bytes_per_s),
            ("16 bits", &machine.plain_op_per_s),
            ("quantized", &machine.quantized_op_per_s),
            ("attention", &machine.attention_op_per_s),
            ("host", &machine.host_bytes_per_s),
        ] {
            out += &format!("{}, {what}: {}, {}\n", machine.name, figure.basis.name(), figure.source);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_figure_is_a_number_with_a_source() {
        let machines = Machine::published();
        for name in
            ["h100", "h200", "b200", "mi300x", "l4", "a10", "groq", "epyc", "xeon", "apple", "graviton"]
        {
            assert_eq!(machines.iter().filter(|machine| machine.name == name).count(), 1, "{name}");
        }
        for machine in &machines {
            for figure in [
                &machine.memory_bytes,
                &machine.read_bytes_per_s,
                &machine.plain_op_per_s,
                &machine.quantized_op_per_s,
                &machine.attention_op_per_s,
                &machine.host_bytes_per_s,
            ] {
                assert!(figure.value > 0.0 && figure.value.is_finite(), "{}", machine.name);
                assert!(figure.source.len() > 10, "{}: {figure:?}", machine.name);
                let says = |parts: &[&str]| parts.iter().any(|part| figure.source.contains(part));
                let basis = match figure {
                    _ if says(&["docs/performance-gpu.md"]) => Basis::Measured,
                    // Made of something that its maker does not say.
                    _ if says(&["a core and cycle", "a choice of", "half of what", "does not state"]) => {
                        Basis::Assumed
                    }
                    _ => Basis::Stated,
                };
                assert_eq!(figure.basis, basis, "{}: {}", machine.name, figure.source);
            }
        }
        assert!(table().lines().count() > 6 * machines.len());
    }

    #[test]
    fn what_was_measured_is_reached_further_than_what_is_stated_or_assumed() {
        let of = |name| Machine::find(Some(name), None).expect("published");
        assert_eq!(
            [of("h100").shares(), of("h200").shares()],
            [OF_MEASURED_ACCELERATOR, OF_STATED_ACCELERATOR]
        );
        let mut epyc = of("epyc");
        assert_eq!(epyc.shares(), OF_STATED);
        epyc.read_bytes_per_s.basis = Basis::Assumed;
        assert_eq!(epyc.shares(), OF_STATED);
    }

    #[test]
    fn a_machine_that_is_not_known_is_an_error_that_names_those_that_are() {
        let error = Machine::find(Some("h1000"), None).expect_err("no such machine");
        assert!(format!("{error:#}").contains("h100, h200"), "{error:#}");
        assert!(Machine::find(Some("h100"), Some(3)).expect_err("refused").to_string().contains("--threads"));
    }

    #[test]
    fn several_devices_have_as_many_times_everything() {
        let one = Machine::find(Some("h100"), None).expect("published");
        let four = one.clone().times(4);
        assert_eq!(four.memory_bytes.value, 4.0 * one.memory_bytes.value);
        assert_eq!(four.rates(false).weight_op_per_s, 4.0 * one.rates(false).weight_op_per_s);
        assert!(four.title.starts_with("4 x "));
    }
}
