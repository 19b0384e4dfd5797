//! `folio bench kv`: what each format of the KV cache costs in quality, and gains in bytes and speed.
//!
//! Owns: the report. One model is loaded once; its cache is laid out in each format in turn. f16 is what the others are compared
//! with; the differences of f32 and bf16 from it are what rounding alone does to the same figures. Must never: judge.

mod quality;
mod speed;

use anyhow::{Result, ensure};
use folio_model::backend::KvFormat;
use serde::Serialize;

use super::table;
use crate::cli::BenchKvArgs;

pub use speed::Shape;

pub fn run(args: &BenchKvArgs) -> Result<()> {
    let input = args.text.is_some() || args.tokens.is_some() || args.questions.is_some();
    ensure!(
        input || args.depth.is_some(),
        "nothing to measure: give --text, --tokens or --questions for quality, --depth for speed"
    );
    let quality = if input { Some(quality::measure(args)?) } else { None };
    let speed = match args.depth {
        Some(depth) => speed::measure(args, depth as usize)?,
        None => Vec::new(),
    };
    let report = Report { version: env!("CARGO_PKG_VERSION"), quality, speed };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    quality: Option<quality::Quality>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    speed: Vec<speed::Speeds>,
}

impl Report {
    fn table(&self) -> String {
        let mut out = String::new();
        if let Some(quality) = &self.quality {
            out += &quality.table();
        }
        for speeds in &self.speed {
            out += &speeds.table();
        }
        out
    }
}

/// A format in JSON and in tables.
fn name(format: KvFormat) -> String {
    format.name().to_owned()
}

fn render(header: &[&str], rows: &[Vec<String>]) -> String {
    table::render(header, rows) + "\n"
}
