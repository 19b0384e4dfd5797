//! What another format, tier, batch or machine changes: the knee and what fits, each beside what was asked about.

use anyhow::Result;
use folio_model::kv_format::KvFormat;
use serde::Serialize;

use super::curve::StepCurve;
use super::load::{at_once, knee};
use super::machine::Machine;
use super::model::{PlannedModel, WeightFormat};
use super::parallel::each;
use super::setup::{Choice, Setup};
use super::traffic::Traffic;

/// One change.
#[derive(Clone, Debug, Serialize)]
pub struct Alternative {
    pub change: String,
    /// Requests a second at its knee, slow end first, and as a share of the knee it is compared with; `None`: see `why`.
    pub knee_per_s: Option<Vec<f64>>,
    pub times: Option<f64>,
    pub kv_tokens: Option<u64>,
    /// Why it cannot be.
    pub why: Option<String>,
}

/// Each change by itself. `machines`: others to compare with. `knees`: of the base, slow end first.
pub fn alternatives(
    model: &PlannedModel,
    base: &Setup,
    traffic: &Traffic,
    knees: &[f64],
    machines: &[Machine],
) -> Vec<Alternative> {
    let middle = |knees: &[f64]| knees.iter().product::<f64>().powf(1.0 / knees.len().max(1) as f64);
    let changes = changes(base, traffic, machines);
    each(&changes, |(change, choice)| {
        let found = of(model, base, traffic, choice.clone());
        let why = found.as_ref().err().map(|error| format!("{error:#}"));
        let found = found.ok();
        Alternative {
            change: change.clone(),
            times: found.as_ref().map(|(_, found)| middle(found) / middle(knees)),
            kv_tokens: found.as_ref().map(|(setup, _)| setup.tokens()),
            knee_per_s: found.map(|(_, found)| found),
            why,
        }
    })
}

fn of(model: &PlannedModel, base: &Setup, traffic: &Traffic, choice: Choice) -> Result<(Setup, Vec<f64>)> {
    let (.., longest) = traffic.lengths();
    // Also several of it.
    let same_machine = choice.machine.name == base.choice.machine.name;
    let mut setup = Setup::new(model, choice, longest)?;
    if same_machine {
        setup = setup.scaled_from(base, model);
    }
    let of_curve = |curve: &StepCurve| knee(&setup.world(curve.clone()), traffic, at_once(&setup, traffic));
    let knees = setup.curves.iter().map(of_curve).collect::<Result<_>>()?;
    Ok((setup, knees))
}

fn changes(base: &Setup, traffic: &Traffic, machines: &[Machine]) -> Vec<(String, Choice)> {
    let choice = &base.choice;
    let mut changes = Vec::new();
    let mut add = |change: String, choice: Choice| changes.push((change, choice));
    for kv in [KvFormat::Int8, KvFormat::Int4] {
        if kv.code_bytes(64) < choice.kv.code_bytes(64) {
            add(format!("KV in {kv}"), Choice { kv, ..choice.clone() });
        }
    }
    let smaller: &[WeightFormat] = match choice.weights {
        WeightFormat::F32 | WeightFormat::Bf16 => &[WeightFormat::Q8, WeightFormat::Q4],
        WeightFormat::Fp8 | WeightFormat::Q8 => &[WeightFormat::Q4],
        WeightFormat::Q4 => &[],
    };
    for weights in smaller {
        add(format!("weights in {}", weights.name()), Choice { weights: *weights, ..choice.clone() });
    }
    let seqs = choice.sizes().max_num_seqs;
    for other in [seqs / 2, 2 * seqs].into_iter().filter(|other| *other > 0) {
        add(format!("--max-num-seqs {other}"), Choice { max_num_seqs: Some(other), ..choice.clone() });
    }
    if traffic.shares() && choice.host_kv.is_none() {
        let bytes = base.pool.bytes.saturating_mul(4);
        let tier = Choice { host_kv: Some(bytes), ..choice.clone() };
        add(format!("--host-kv-memory {}", crate::units::bytes(bytes)), tier);
    }
    add(
        "twice the devices".to_owned(),
        Choice { machine: choice.machine.clone().times(2), ..choice.clone() },
    );
    for machine in machines {
        add(machine.title.clone(), Choice { machine: machine.clone(), ..choice.clone() });
    }
    changes
}
