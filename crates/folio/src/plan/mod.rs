//! `folio plan`: what a model will do on a machine with some traffic.
//!
//! Owns: the order (model, machine, what fits, load, what would change). What each is, is in its file: `model` and `shape`, `machine`,
//! `setup`, `curve` (how long a step takes), `traffic`, `load` (the real scheduler in the simulator), `alternatives`; what is printed:
//! `report`, `plot`; `steps` measures what `curve` is made of, `cells` holds plans against the engine. Must never: load a weight, or say a number without where it is from.

mod alternatives;
mod cells;
mod curve;
mod load;
mod machine;
mod model;
mod parallel;
mod plot;
mod replay;
mod report;
mod setup;
mod shape;
mod steps;
mod traffic;

use anyhow::{Context, Result};
use folio_model::kv_format::KvFormat;

pub use cells::run as cells;
pub use curve::StepSample;
pub use model::WeightFormat;
pub use replay::run as replay;
pub use steps::measure;

use crate::cli::{PlanArgs, WorldArgs};
use alternatives::alternatives;
use curve::StepCurve;
use load::Case;
use machine::Machine;
use model::PlannedModel;
use report::Plan;
use setup::{Choice, Setup};
use traffic::Traffic;

/// Tokens of a block, where nothing else is asked for.
const BLOCK: u32 = 16;
/// Shares of the knee that are looked at.
const SHARES: [f64; 5] = [0.25, 0.5, 0.8, 0.95, 1.1];

pub fn run(args: &PlanArgs) -> Result<()> {
    if args.machines {
        print!("{}", machine::table());
        return Ok(());
    }
    let plan = plan(args)?;
    if let Some(file) = &args.plot {
        let title = format!("{} on {}", plan.model.name, plan.setup.choice.machine.title);
        std::fs::write(file, plot::plot(&title, &plan.cases))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    match args.json {
        true => println!("{:#}", plan.json()),
        false => print!("{}", plan.text()),
    }
    Ok(())
}

fn plan(args: &PlanArgs) -> Result<Plan> {
    let model = PlannedModel::open(args.model.as_deref().unwrap_or("demo"))?;
    let traffic = match &args.trace {
        Some(file) => Traffic::open(file, args.requests as usize)?,
        None => Traffic::Made {
            prompt: args.prompt,
            output: args.output,
            prefixes: args.shared_prefixes.zip(args.prefix_len),
            seed: args.seed,
        },
    };
    let machines =
        args.compare.iter().map(|name| Ok(Machine::find(Some(name), None)?.times(args.world.devices)));
    let machines = machines.collect::<Result<Vec<_>>>()?;
    let (.., longest) = traffic.lengths();
    let mut setup = Setup::new(&model, choice(&model, &args.world)?, longest)?;
    if args.world.devices > 1 {
        let note = "several devices are planned as one that is as many times as large and as fast; what they have to tell one another makes them slower";
        setup.notes.push(note.to_owned());
    }
    let (at_once, rates) = (load::at_once(&setup, &traffic), rates(args, &traffic));
    let case = |curve: &StepCurve| Case::of(&setup.world(curve.clone()), &traffic, at_once, &SHARES, &rates);
    let cases = setup.curves.iter().map(case).collect::<Result<Vec<_>>>()?;
    let knees: Vec<f64> = cases.iter().map(|case| case.knee_per_s).collect();
    let alternatives = alternatives(&model, &setup, &traffic, &knees, &machines);
    Ok(Plan { model, setup, traffic, cases, alternatives, price_per_hour: args.price_per_hour })
}

/// Those that were asked for, and the trace's own.
fn rates(args: &PlanArgs, traffic: &Traffic) -> Vec<f64> {
    args.rate.iter().copied().chain(traffic.own_rate()).collect()
}

fn choice(model: &PlannedModel, args: &WorldArgs) -> Result<Choice> {
    let machine = Machine::find(args.machine.as_deref(), args.threads)?.times(args.devices);
    Ok(Choice {
        machine,
        weights: args.weights.unwrap_or(model.stored),
        kv: args.kv_cache_dtype.format().unwrap_or(KvFormat::BF16),
        block_tokens: args.block_size.unwrap_or(BLOCK),
        max_model_len: args.max_model_len,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens: args.max_num_batched_tokens,
        max_prefill_while_decoding: args.max_prefill_while_decoding,
        kv_cache_memory: args.kv_cache_memory,
        kv_cache_share: args.kv_cache_share,
        host_kv: args.host_kv_memory,
        drafts: args.drafts,
        policy: args.policy,
    })
}
