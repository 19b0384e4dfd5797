//! `folio doctor`: what this machine can do, and how far a model can get on it.

use anyhow::{Result, bail};
use clap::Parser;
use folio_cpu::CpuBackend;
use folio_cpu::machine::Machine;
use folio_cuda::machine::{Effort, Rates};
use folio_engine::Drafter;
use serde::Serialize;
use serde_json::{Value, json};

use crate::bench::limits::{Costs, Limit};
use crate::bench::table;
use crate::cli::{DoctorArgs, EngineArgs, KvDtype, Speculate};
use crate::device::{Device, GemmBackend};
use crate::load_format::LoadFormat;
use crate::models::{Aliases, Source};
use crate::profile::MeasuredModel;
use crate::runtime::{Agreement, Pair, Runtime, WeightArgs, Weights};
use crate::{memory, plan, profile, units, why};

/// Prompt, and context of the decoded tokens, that a model's limits are given for.
const PROMPT: u32 = 512;
const DEPTH: u32 = 128;
const DEEP: u32 = 8192;

pub fn run(args: &DoctorArgs) -> Result<()> {
    if let Some(url) = &args.url {
        return why::run(url, args.api_key.as_deref(), args.request.as_deref(), args.json);
    }
    let parse = |model: &str| Source::parse(Some(model), &Aliases::default());
    let source = args.model.as_deref().map(parse).transpose()?;
    let drafts = has_drafter(args, source.as_ref())?;
    let counts = thread_counts(args.threads.map_or_else(CpuBackend::detect_threads, |n| n as usize));
    if !args.json {
        eprintln!("measuring for about {} s ...", counts.len());
    }
    let machines = Machine::measure_each(&counts, None)?;
    let gpu = Gpu::measure(args)?;
    // Threads say how far to measure; a GPU computes without them.
    let threads = args.threads.filter(|_| gpu.is_none());
    let model = source.map(|source| Far::measure(&source, args, threads, &machines)).transpose()?;
    if let Some(file) = &args.write_profile {
        // With the memory that is free before a model is loaded.
        let limits = report(&machines, gpu.as_ref(), None);
        let steps = steps(args, threads)?;
        let told = format!("and {} kinds of steps of {}", steps.samples.len(), steps.name);
        let disturbed = steps.disturbed();
        let written = profile::write(limits, Some(steps), file.as_deref())?;
        eprintln!("this machine's limits {told} are in {}", written.display());
        disturbed.iter().for_each(|sentence| eprintln!("{sentence}"));
    }
    let pair = if drafts { pair(args, threads)? } else { None };
    if args.json {
        let mut report = report(&machines, gpu.as_ref(), model.as_ref());
        report["pair"] = json!(pair.as_ref().map(pair_json));
        println!("{report:#}");
    } else {
        print!("{}", text(&machines, gpu.as_ref(), model.as_ref()));
        print!("{}", pair.as_ref().map(pair_text).unwrap_or_default());
    }
    Ok(())
}

/// Drafts of a step, for which its tokens are told.
const DRAFTS: u32 = 3;

/// Whether what drafts for the model is to be looked at, too.
fn has_drafter(args: &DoctorArgs, model: Option<&Source>) -> Result<bool> {
    match (&args.draft_model, args.speculate) {
        (None, None) => Ok(false),
        (Some(_), _) | (None, Some(Speculate::Mtp)) => Ok(true),
        (None, Some(Speculate::Eagle3)) if model == Some(&Source::BuiltIn) => Ok(true),
        (None, Some(_)) => bail!(
            "--speculate: what is told is how a model or a head fits MODEL: give --draft-model, or --speculate mtp"
        ),
    }
}

/// What a model and what drafts for it are to each other; of a head also, what it would be with the layers before and behind those that it reads.
fn pair(args: &DoctorArgs, threads: Option<u32>) -> Result<Option<Pair>> {
    let (draft_model, speculate) = (args.draft_model.clone(), args.speculate);
    let engine = EngineArgs { draft_model, speculate, ..engine(args, threads)? };
    let start = |engine: &EngineArgs| Runtime::start(args.model.as_deref(), engine);
    let mut pair = start(&engine)?.pair;
    if let Some(head) = pair.as_mut().filter(|pair| pair.drafter == Drafter::Eagle3) {
        for head_reads_behind in [-1, 1] {
            // Where there are no such layers nothing is to be said of them.
            let other = start(&EngineArgs { head_reads_behind, ..engine.clone() });
            if let Some(other) = other.ok().and_then(|other| other.pair) {
                head.compare(head_reads_behind, other.found);
            }
        }
    }
    Ok(pair)
}

/// What steps of the model take, or of the built-in one.
fn steps(args: &DoctorArgs, threads: Option<u32>) -> Result<MeasuredModel> {
    let engine = engine(args, threads)?;
    let runtime = Runtime::start(args.model.as_deref(), &engine)?;
    plan::measure(&runtime, &engine.sizes(runtime.report.on_gpu))
}

/// The engine as a server has it.
fn engine(args: &DoctorArgs, threads: Option<u32>) -> Result<EngineArgs> {
    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        engine: EngineArgs,
    }
    let (quantize, device) = (args.quantize, args.device);
    Ok(EngineArgs { quantize, device, threads, ..Flags::try_parse_from(["folio"])?.engine })
}

fn pair_json(pair: &Pair) -> Value {
    let neighbour = |(behind, found): &(isize, Agreement)| json!({"layers_behind": behind, "places": found.places, "same": found.same});
    json!({
        "drafter": pair.drafter.name(),
        "name": pair.name,
        "places": pair.found.places,
        "same": pair.found.same,
        "drafts": DRAFTS,
        "tokens_per_step": pair.found.tokens_per_step(DRAFTS),
        "neighbours": pair.behind.iter().map(neighbour).collect::<Vec<_>>(),
        "doubt": pair.doubt,
    })
}

fn pair_text(pair: &Pair) -> String {
    let mut out = format!(
        "\n{} ({}) {}: about {:.1} tokens in a step of {DRAFTS} drafts\n",
        pair.name,
        pair.drafter.name(),
        pair.sentence(),
        pair.found.tokens_per_step(DRAFTS),
    );
    if !pair.behind.is_empty() {
        out += &format!("{}\n", pair.neighbours());
    }
    out += &pair.doubt.as_ref().map(|doubt| format!("{doubt}\n")).unwrap_or_default();
    out
}

/// A GPU and what it can do.
struct Gpu {
    name: String,
    rates: Rates,
    /// Free while nothing is loaded.
    memory_bytes: Option<u64>,
}

impl Gpu {
    /// `None`: there is none, or none is asked for.
    fn measure(args: &DoctorArgs) -> Result<Option<Self>> {
        let mut device = Device::open(args.device, args.threads, GemmBackend::Own)?;
        let name = device.described();
        let memory_bytes = device.free_memory().map(|free| free.bytes);
        let Device::Cuda(cuda) = &mut device else { return Ok(None) };
        Ok(Some(Self { name, rates: cuda.rates(Effort::default())?, memory_bytes }))
    }

    fn json(&self) -> Value {
        let rates = &self.rates;
        json!({
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "read_bytes_per_s": rates.read_bytes_per_s,
            "copy_bytes_per_s": rates.copy_bytes_per_s,
            "matrix_flop_per_s": rates.matrix_flop_per_s,
            "upload_bytes_per_s": rates.upload_bytes_per_s,
            "download_bytes_per_s": rates.download_bytes_per_s,
        })
    }

    fn text(&self) -> String {
        let rates = &self.rates;
        format!(
            "\n{}: reads {:.0} GB/s, copies {:.0} GB/s (read and written), {:.0} TFLOP/s of matrix instructions in bf16, \
             {:.1} GB/s from pinned host memory and {:.1} GB/s to it\n",
            self.name,
            rates.read_bytes_per_s / 1e9,
            rates.copy_bytes_per_s / 1e9,
            rates.matrix_flop_per_s / 1e12,
            rates.upload_bytes_per_s / 1e9,
            rates.download_bytes_per_s / 1e9,
        )
    }
}

/// One to eight, then doubling, and all.
fn thread_counts(all: usize) -> Vec<usize> {
    let doubling = std::iter::successors(Some(16), |n| Some(2 * n)).take_while(|n| *n < all);
    let mut counts: Vec<usize> = (1..=all.min(8)).chain(doubling).collect();
    if counts.last() != Some(&all) {
        counts.push(all);
    }
    counts
}

/// How far a model can get.
#[derive(Debug, Serialize)]
struct Far {
    model: String,
    /// What the weights are stored as and, after "to", quantized to while loading.
    format: String,
    weight_bytes: u64,
    kv_bytes_per_token: usize,
    /// Of the weights themselves, with all threads.
    read_bytes_per_s: f64,
    limits: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    /// "prefill" or "decode".
    phase: &'static str,
    batch: u32,
    /// Of the prompt, or of the context.
    tokens: u32,
    #[serde(flatten)]
    limit: Limit,
}

impl Far {
    fn measure(
        source: &Source,
        args: &DoctorArgs,
        threads: Option<u32>,
        machines: &[Machine],
    ) -> Result<Self> {
        let (checkpoint, _held) = source.open()?;
        let load = WeightArgs {
            device: args.device,
            eager: false,
            gemm: GemmBackend::Own,
            format: LoadFormat::Auto,
            threads,
            quantize: args.quantize,
            kv_dtype: KvDtype::Auto,
            kv_skip: Vec::new(),
            max_model_len: None,
            keeps_all: false,
            block_tokens: 16,
            max_rows: 1,
            max_logit_rows: 1,
        };
        let mut weights = Weights::load(&checkpoint, &load)?;
        let all = machines[machines.len() - 1];
        let machine = weights.limits(all)?;
        let weight_bytes = weights.backend.weight_bytes();
        let costs = Costs::of(&weights.model, weight_bytes);
        Ok(Self {
            model: source.name(),
            format: weights.format,
            weight_bytes,
            kv_bytes_per_token: weights.model.kv_layout.bytes_per_token(),
            read_bytes_per_s: machine.read_bytes_per_s,
            limits: rows(&costs, &machine, weights.model.max_model_len),
        })
    }
}

/// What fits the model's context.
fn rows(costs: &Costs, machine: &Machine, max_model_len: usize) -> Vec<Row> {
    let prefill = |tokens: u32| ("prefill", 1, tokens);
    let decode = |batch, tokens| ("decode", batch, tokens);
    let asked = [prefill(PROMPT), decode(1, DEPTH), decode(8, DEPTH), decode(32, DEPTH), decode(1, DEEP)];
    let fitting = asked.into_iter().filter(|(_, _, tokens)| (*tokens as usize) < max_model_len);
    fitting
        .map(|(phase, batch, tokens)| {
            let limit = match phase {
                "prefill" => costs.prefill(machine, tokens.into()),
                _ => costs.decode(machine, batch.into(), tokens.into()),
            };
            Row { phase, batch, tokens, limit }
        })
        .collect()
}

fn report(machines: &[Machine], gpu: Option<&Gpu>, model: Option<&Far>) -> Value {
    let limits = |machine: &Machine| {
        json!({
            "threads": machine.threads,
            "read_bytes_per_s": machine.read_bytes_per_s,
            "f32_flop_per_s": machine.f32_flop_per_s,
            "int8_op_per_s": machine.int8_op_per_s,
        })
    };
    let all = &machines[machines.len() - 1];
    let mut report = limits(all);
    report["version"] = env!("CARGO_PKG_VERSION").into();
    report["isa"] = all.isa.name().into();
    report["free_memory_bytes"] = memory::free().map(|free| free.bytes).into();
    report["by_threads"] = machines.iter().map(limits).collect();
    report["gpu"] = gpu.map(Gpu::json).into();
    report["model"] = json!(model);
    report
}

fn text(machines: &[Machine], gpu: Option<&Gpu>, model: Option<&Far>) -> String {
    let all = &machines[machines.len() - 1];
    let mut out = format!("instruction set   {}\n", all.isa.name());
    if let Some(free) = memory::free() {
        out += &format!("memory            {} {}\n", units::bytes(free.bytes), free.source);
    }
    let row = |machine: &Machine| {
        vec![
            machine.threads.to_string(),
            format!("{:.1}", machine.read_bytes_per_s / 1e9),
            format!("{:.0}", machine.f32_flop_per_s / 1e9),
            format!("{:.0}", machine.int8_op_per_s / 1e9),
        ]
    };
    let rows: Vec<_> = machines.iter().map(row).collect();
    out += "\nMeasured limits; a multiply-add counts as two, bytes are what quantized weights are multiplied as:\n";
    out += &table::render(&["threads", "read GB/s", "f32 GFLOP/s", "bytes Gop/s"], &rows);
    out += &gpu.map(Gpu::text).unwrap_or_default();
    out += "\n";
    match model {
        Some(model) => out += &model.text(),
        None => out += &guess(all),
    }
    out
}

impl Far {
    fn text(&self) -> String {
        let mut out = format!(
            "{}: {} of weights ({}), which can be read at {:.1} GB/s; {} of KV per token\n\
             How far it can get with all threads:\n",
            self.model,
            units::bytes(self.weight_bytes),
            self.format,
            self.read_bytes_per_s / 1e9,
            units::bytes(self.kv_bytes_per_token as u64),
        );
        let row = |row: &Row| {
            let what = match row.phase {
                "prefill" => format!("prefill of {}", row.tokens),
                _ => format!("decode x{} at {}", row.batch, row.tokens),
            };
            let limit = &row.limit;
            vec![
                what,
                format!("{:.1}", limit.tokens_per_s),
                limit.by.to_owned(),
                units::bytes(limit.bytes_per_token as u64),
                format!("{:.3}", limit.multiply_adds_per_token / 1e9),
            ]
        };
        let rows: Vec<_> = self.limits.iter().map(row).collect();
        let header = ["", "tokens/s at most", "limited by", "bytes per token", "G multiply-adds per token"];
        out += &table::render(&header, &rows);
        out
    }
}

fn guess(machine: &Machine) -> String {
    let mut out =
        "What that means for decoding one sequence (every weight is read once per token; `folio doctor MODEL` measures a model):\n\
         \x20 parameters   bf16   Q8_0   Q4_0   tokens/s at most\n"
            .to_owned();
    for (name, parameters) in [("0.6 B", 0.6e9), ("1.2 B", 1.2e9), ("3 B", 3e9), ("8 B", 8e9)] {
        let rate = |bits: f64| machine.read_bytes_per_s / (parameters * bits / 8.0);
        out += &format!("  {name:>10} {:6.1} {:6.1} {:6.1}\n", rate(16.0), rate(8.5), rate(4.5));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_small_number_of_threads_is_measured_and_always_all() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(8), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(thread_counts(12), [1, 2, 3, 4, 5, 6, 7, 8, 12]);
        assert_eq!(thread_counts(32), [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]);
        assert_eq!(thread_counts(48), [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 48]);
    }
}
