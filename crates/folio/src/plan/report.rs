//! What a plan says: tables for people, JSON for programs.
//!
//! Owns: words and units. A figure of which only a range is known is told as both ends, the slow one first.

use std::fmt::Write as _;

use folio_model::kv_format::KvFormat;
use serde_json::{Value, json};

use super::alternatives::Alternative;
use super::load::{Case, LoadPoint, at_once};
use super::model::{PlannedModel, WeightFormat, terms};
use super::setup::Setup;
use super::traffic::Traffic;
use crate::bench::table;
use crate::units;

/// Share of the knee at which cost is told: beyond it requests wait for one another.
const COST_AT: f64 = 0.8;

pub struct Plan {
    pub model: PlannedModel,
    pub setup: Setup,
    pub traffic: Traffic,
    pub cases: Vec<Case>,
    pub alternatives: Vec<Alternative>,
    pub price_per_hour: Option<f64>,
}

/// Bytes of a token, and tokens in the same memory; or why a format cannot be.
type FormatFit = Result<(u64, u64), String>;

/// What a million tokens cost at [`COST_AT`] of the knee: of outputs alone, and of prompts and outputs.
struct Price {
    per_million_output: f64,
    per_million_tokens: f64,
}

impl Plan {
    fn price(&self, case: &Case) -> Option<Price> {
        let (prompt, output, _) = self.traffic.lengths();
        let requests_per_hour = COST_AT * case.knee_per_s * 3600.0;
        let each = self.price_per_hour? / requests_per_hour;
        Some(Price {
            per_million_output: each / output * 1e6,
            per_million_tokens: each / (prompt + output) * 1e6,
        })
    }

    pub fn json(&self) -> Value {
        let Self { model, setup, traffic, .. } = self;
        let choice = &setup.choice;
        let (prompt, output, longest) = traffic.lengths();
        let formats = self.formats().into_iter().map(|(format, layout)| match layout {
            Ok((bytes, _)) => json!({"format": format.name(), "bytes_per_token": bytes, "by_formula": model.formula(format)}),
            Err(reason) => json!({"format": format.name(), "why_not": reason}),
        });
        let weights =
            WEIGHTS.map(|format| json!({"format": format.name(), "bytes": model.weight_bytes(format)}));
        let cases = self.cases.iter().map(|case| {
            let mut value = json!(case);
            let price = self.price(case);
            value["per_million_output"] = json!(price.as_ref().map(|price| price.per_million_output));
            value["per_million_tokens"] = json!(price.as_ref().map(|price| price.per_million_tokens));
            value
        });
        json!({
            "object": "plan",
            "version": env!("CARGO_PKG_VERSION"),
            "model": {
                "name": model.name,
                "family": model.config.family.model_type,
                "parameters": model.parameters,
                "layers": model.config.layers,
                "context": model.config.max_position,
            },
            "machine": choice.machine,
            "traffic": {"what": traffic.described(), "prompt_tokens": prompt, "output_tokens": output, "longest": longest},
            "weights": {"format": choice.weights.name(), "bytes": setup.weight_bytes, "formats": weights},
            "kv": {
                "format": choice.kv.name(),
                "bytes_per_token": setup.layout.bytes_per_token(),
                "by_formula": model.formula(choice.kv),
                "groups": terms(&setup.layout),
                "formats": formats.collect::<Vec<_>>(),
                "bytes": setup.pool.bytes,
                "tokens": setup.tokens(),
                "why": setup.pool.why,
            },
            "fits": {
                "bytes_of_the_traffic": setup.sequence_bytes((prompt + output).ceil() as u32),
                "bytes_at_full_length": setup.sequence_bytes(setup.max_model_len),
                "sequences_of_the_traffic": setup.fitting((prompt + output).ceil() as u32),
                "sequences_at_once": at_once(setup, traffic),
                "sequences_at_full_length": setup.fitting(setup.max_model_len),
                "max_model_len": setup.max_model_len,
            },
            "steps": {"measured": setup.curve_worst.is_some(), "worst_error_of_fit": setup.curve_worst},
            "cases": cases.collect::<Vec<_>>(),
            "alternatives": self.alternatives,
            "notes": setup.notes,
        })
    }

    pub fn text(&self) -> String {
        let mut out = String::new();
        self.head(&mut out);
        self.formats_table(&mut out);
        self.rates(&mut out);
        out += &load_table(&self.cases);
        self.cost(&mut out);
        self.changes(&mut out);
        out
    }

    fn head(&self, out: &mut String) {
        let Self { model, setup, traffic, .. } = self;
        let (choice, machine) = (&setup.choice, &setup.choice.machine);
        let basis = match setup.curve_worst {
            Some(worst) => format!(
                "steps of this model were measured on it (the curve is within {:.0} % of them)",
                100.0 * worst
            ),
            None => {
                let [slow, fast] = machine.shares().map(|share| 100.0 * share);
                format!(
                    "steps were not measured: {slow:.0} to {fast:.0} % of its limits ({})",
                    machine.read_bytes_per_s.source
                )
            }
        };
        let _ = writeln!(
            out,
            "{} ({}, {} parameters) on {}\n{basis}\n",
            model.name,
            model.config.family.model_type,
            units::parameters(model.parameters),
            machine.title
        );
        line(out, "weights", &format!("{} in {}", units::bytes(setup.weight_bytes), choice.weights.name()));
        let formula = match model.formula(choice.kv) {
            Some(bytes) => format!("2 x layers x KV heads x head_dim x bytes says {}", units::bytes(bytes)),
            None => "2 x layers x KV heads x head_dim x bytes does not hold for it".to_owned(),
        };
        let per_token = units::bytes(setup.layout.bytes_per_token() as u64);
        line(out, "KV", &format!("{per_token} per token in {}; {formula}", choice.kv));
        for term in terms(&setup.layout) {
            line(out, "", &term);
        }
        let pool = &setup.pool;
        line(
            out,
            "KV cache",
            &format!(
                "{} = {} tokens in blocks of {}: {}",
                units::bytes(pool.bytes),
                units::count(setup.tokens()),
                choice.block_tokens,
                pool.why
            ),
        );
        let (prompt, output, _) = traffic.lengths();
        let mean = (prompt + output).ceil() as u32;
        let bytes = |tokens: u32| {
            format!(
                "{} of {} tokens",
                units::bytes(setup.sequence_bytes(tokens)),
                units::count(tokens.into())
            )
        };
        line(
            out,
            "sequences",
            &format!("take {} (the traffic's mean), {}", bytes(mean), bytes(setup.max_model_len)),
        );
        line(
            out,
            "fits",
            &format!(
                "{} sequences of {} tokens, {} of {}; at most {} run at once",
                units::count(setup.fitting(mean).into()),
                units::count(mean.into()),
                units::count(setup.fitting(setup.max_model_len).into()),
                units::count(setup.max_model_len.into()),
                units::count(choice.sizes().max_num_seqs.into()),
            ),
        );
        line(out, "traffic", &traffic.described());
        for note in &setup.notes {
            line(out, "note", note);
        }
    }

    fn formats(&self) -> Vec<(KvFormat, FormatFit)> {
        let Setup { choice, max_model_len, pool, layout, .. } = &self.setup;
        let own = layout.bytes_per_token().max(1) as f64;
        let of = |format: KvFormat| {
            let layout = self.model.layout(format, choice.block_tokens, *max_model_len)?;
            let bytes = layout.bytes_per_token() as u64;
            let tokens = u64::from(pool.blocks) * u64::from(choice.block_tokens);
            Ok((bytes, (tokens as f64 * own / bytes.max(1) as f64) as u64))
        };
        KvFormat::ALL.into_iter().map(|format| (format, of(format))).collect()
    }

    fn formats_table(&self, out: &mut String) {
        let formats = self.formats();
        let row = |(format, found): &(KvFormat, FormatFit)| match found {
            Ok((bytes, tokens)) => {
                vec![format.to_string(), units::bytes(*bytes), units::count(*tokens), String::new()]
            }
            Err(reason) => vec![format.to_string(), "-".to_owned(), "-".to_owned(), reason.clone()],
        };
        let rows: Vec<_> = formats.iter().map(row).collect();
        let _ =
            write!(out, "\n{}", table::render(&["KV", "per token", "tokens in the same memory", ""], &rows));
        let row = |format: WeightFormat| {
            vec![format.name().to_owned(), units::bytes(self.model.weight_bytes(format))]
        };
        let rows: Vec<_> = WEIGHTS.into_iter().map(row).collect();
        let _ = write!(out, "\n{}", table::render(&["weights", ""], &rows));
    }

    fn ends(&self, figure: impl Fn(&Case) -> f64) -> String {
        ends(&self.cases, figure)
    }

    fn rates(&self, out: &mut String) {
        let batch = at_once(&self.setup, &self.traffic);
        let rows = [
            ("one sequence decodes", self.ends(|case| case.decode_one_per_s)),
            (&*format!("{batch} sequences decode"), self.ends(|case| case.decode_all_per_s)),
            ("a prompt", self.ends(|case| case.prefill_per_s)),
        ];
        let rows: Vec<_> = rows.iter().map(|(what, rate)| vec![(*what).to_owned(), rate.clone()]).collect();
        let _ = write!(out, "\n{}", table::render(&["", "tokens/s"], &rows));
    }

    fn cost(&self, out: &mut String) {
        if self.price_per_hour.is_none() {
            return;
        }
        let of = |figure: fn(&Price) -> f64| {
            self.ends(|case| self.price(case).map_or(0.0, |price| figure(&price)))
        };
        let _ = writeln!(
            out,
            "\nCost per million tokens at {:.0} % of the knee: {} of output (prompts included in the price), {} of prompt and output together.",
            100.0 * COST_AT,
            of(|price| price.per_million_output),
            of(|price| price.per_million_tokens),
        );
    }

    fn changes(&self, out: &mut String) {
        let row = |of: &Alternative| {
            let knees = of.knee_per_s.iter().flatten().map(|knee| number(*knee)).collect::<Vec<_>>();
            vec![
                of.change.clone(),
                if knees.is_empty() { "-".to_owned() } else { knees.join(" to ") },
                of.times.map_or("-".to_owned(), |times| format!("x{times:.2}")),
                of.kv_tokens.map_or("-".to_owned(), units::count),
                of.why.clone().unwrap_or_default(),
            ]
        };
        let rows: Vec<_> = self.alternatives.iter().map(row).collect();
        let header = ["What would change", "knee, requests/s", "", "KV tokens", ""];
        let _ = write!(out, "\n{}", table::render(&header, &rows));
        if self.setup.curve_worst.is_some() {
            *out += "Other formats were not measured: the measured steps are scaled by what the limits say of both.\n";
        }
    }
}

/// The knee, and what comes of each rate.
pub fn load_table(cases: &[Case]) -> String {
    let mut out = String::new();
    let knee = ends(cases, |case| case.knee_per_s);
    let _ = writeln!(out, "\nThe knee: {knee} requests/s; more than that is never served.");
    let header = [
        "of the knee",
        "requests/s",
        "TTFT s",
        "p99",
        "TPOT ms",
        "p99",
        "end to end s",
        "cached",
        "preempted",
        "KV held",
    ];
    let points = cases.first().map_or(0, |case| case.points.len());
    let row = |index: usize| {
        let points: Vec<&LoadPoint> = cases.iter().filter_map(|case| case.points.get(index)).collect();
        let of = |figure: &dyn Fn(&LoadPoint) -> f64| {
            points.iter().map(|point| number(figure(point))).collect::<Vec<_>>().join(" to ")
        };
        let share = match points[0].share_of_knee {
            Some(share) => format!("{:.0} %", 100.0 * share),
            None if points.iter().all(|point| point.over) => "over".to_owned(),
            None if points.iter().any(|point| point.over) => "over, or not".to_owned(),
            None => "asked".to_owned(),
        };
        let rate = match points[0].share_of_knee {
            Some(_) => of(&|point| point.requests_per_s),
            None => number(points[0].requests_per_s),
        };
        vec![
            share,
            rate,
            of(&|point| point.ttft_s.p50),
            of(&|point| point.ttft_s.p99),
            of(&|point| 1e3 * point.tpot_s.p50),
            of(&|point| 1e3 * point.tpot_s.p99),
            of(&|point| point.e2e_s.p50),
            of(&|point| 100.0 * point.cached) + " %",
            of(&|point| 100.0 * point.preempted) + " %",
            of(&|point| 100.0 * point.occupancy) + " %",
        ]
    };
    let rows: Vec<_> = (0..points).map(row).collect();
    out += &table::render(&header, &rows);
    out += "Medians unless it says p99.\n";
    out
}

/// Both ends of a figure.
fn ends(cases: &[Case], figure: impl Fn(&Case) -> f64) -> String {
    let ends: Vec<String> = cases.iter().map(|case| number(figure(case))).collect();
    ends.join(" to ")
}

const WEIGHTS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Q8, WeightFormat::Q4];

fn line(out: &mut String, what: &str, text: &str) {
    let _ = writeln!(out, "  {what:<9} {text}");
}

/// Three digits that count.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        value if value >= 1000.0 => units::count(value.round() as u64),
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 1.0 => format!("{value:.2}"),
        value if value >= 0.001 => format!("{value:.3}"),
        value => format!("{value:.1e}"),
    }
}
