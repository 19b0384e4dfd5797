//! `folio bench cache`: what retention policies find again of recorded traffic, side by side.
//!
//! Owns: reading the trace, the table, the JSON and the plot. The race itself is `folio_sim::retention`.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_sim::retention::{BlockTrace, Policy, hits};
use serde_json::json;

use super::table;
use crate::cli::BenchCacheArgs;

/// Hits of every policy at one capacity, in the order of [`Policy::ALL`].
struct Row {
    blocks: u32,
    hits: [u64; Policy::ALL.len()],
}

impl Row {
    fn of(&self, policy: Policy) -> f64 {
        self.hits[Policy::ALL.iter().position(|p| *p == policy).unwrap_or_default()] as f64
    }

    /// Share of the gap between LRU and the optimum that a policy closes; `None` where there is no gap.
    fn closed(&self, policy: Policy) -> Option<f64> {
        let (lru, best) = (self.of(Policy::Lru), self.of(Policy::Min));
        (best > lru).then(|| (self.of(policy) - lru) / (best - lru))
    }
}

pub fn run(args: &BenchCacheArgs) -> Result<()> {
    let trace = read(&args.trace)?;
    let total = trace.blocks();
    if total == 0 {
        bail!("{} has no request of a full block", args.trace.display());
    }
    let rows: Vec<Row> = args
        .blocks
        .iter()
        .map(|blocks| Row {
            blocks: blocks.0,
            hits: Policy::ALL.map(|policy| hits(&trace, blocks.0, policy)),
        })
        .collect();
    if args.json {
        println!("{:#}", as_json(&trace, &rows));
    } else {
        println!("{} requests, {total} full blocks; blocks found, %", trace.requests.len());
        print!("{}", as_table(&rows, total as f64));
    }
    if let Some(path) = &args.plot {
        std::fs::write(path, plot(&rows, total as f64))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Unpacks what is gzipped, whatever it is called.
fn read(path: &Path) -> Result<BlockTrace> {
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut file = BufReader::new(file);
    let packed = file.fill_buf().context("cannot read the trace")?.starts_with(&[0x1f, 0x8b]);
    let text: Box<dyn Read> =
        if packed { Box::new(flate2::read::GzDecoder::new(file)) } else { Box::new(file) };
    BlockTrace::mooncake(BufReader::new(text)).with_context(|| path.display().to_string())
}

fn as_table(rows: &[Row], total: f64) -> String {
    let mut header = vec!["blocks"];
    header.extend(Policy::ALL.map(Policy::name));
    header.push("Folio's share of the gap from LRU to MIN");
    let cells = rows.iter().map(|row| {
        let mut cells = vec![crate::units::count(row.blocks.into())];
        cells.extend(row.hits.map(|hits| format!("{:.2}", 100.0 * hits as f64 / total)));
        cells.push(
            row.closed(Policy::Folio).map_or("-".to_owned(), |share| format!("{:.1} %", 100.0 * share)),
        );
        cells
    });
    table::render(&header, &cells.collect::<Vec<_>>())
}

fn as_json(trace: &BlockTrace, rows: &[Row]) -> serde_json::Value {
    let capacities = rows.iter().map(|row| {
        let hits: serde_json::Map<_, _> = Policy::ALL
            .iter()
            .zip(row.hits)
            .map(|(policy, hits)| (policy.name().to_owned(), hits.into()))
            .collect();
        json!({"blocks": row.blocks, "hit_blocks": hits, "gap_closed": row.closed(Policy::Folio)})
    });
    json!({"requests": trace.requests.len(), "blocks": trace.blocks(), "capacities": capacities.collect::<Vec<_>>()})
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
/// Left, right, top, bottom.
const MARGIN: (f64, f64, f64, f64) = (56.0, 110.0, 20.0, 48.0);
const COLOURS: [&str; Policy::ALL.len()] = ["#c0392b", "#2c3e50", "#7f8c8d", "#8e44ad", "#2980b9", "#27ae60"];

/// Hit rate over capacity (logarithmic), as SVG.
fn plot(rows: &[Row], total: f64) -> String {
    let mut rows: Vec<&Row> = rows.iter().collect();
    rows.sort_by_key(|row| row.blocks);
    let log = |blocks: u32| f64::from(blocks.max(1)).ln();
    let (first, last) = (log(rows[0].blocks), log(rows[rows.len() - 1].blocks));
    let top = rows.iter().map(|row| row.of(Policy::Min)).fold(1.0, f64::max) / total * 1.08;
    let (left, right, above, below) = MARGIN;
    let x = |blocks: u32| {
        let share = if last > first { (log(blocks) - first) / (last - first) } else { 0.5 };
        left + share * (WIDTH - left - right)
    };
    let y = |hits: f64| HEIGHT - below - hits / total / top * (HEIGHT - above - below);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    for step in 0..=4 {
        let hits = top / 1.08 * total * f64::from(step) / 4.0;
        let (at, label) = (y(hits), 100.0 * hits / total);
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>",
            WIDTH - right
        );
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label:.0} %</text>",
            left - 6.0,
            at + 4.0
        );
    }
    for row in &rows {
        let label = crate::units::count(row.blocks.into());
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            x(row.blocks),
            HEIGHT - below + 18.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">blocks of the cache</text>",
        (left + WIDTH - right) / 2.0,
        HEIGHT - 8.0
    );
    // Names at the right, in the order of their curves' ends and never over one another.
    let mut names: Vec<(f64, usize)> =
        Policy::ALL.iter().enumerate().map(|(i, policy)| (y(rows[rows.len() - 1].of(*policy)), i)).collect();
    names.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut free = f64::MIN;
    for (at, i) in names {
        let points: Vec<String> =
            rows.iter().map(|row| format!("{:.1},{:.1}", x(row.blocks), y(row.of(Policy::ALL[i])))).collect();
        let at = at.max(free);
        free = at + 14.0;
        let (colour, name) = (COLOURS[i], Policy::ALL[i].name());
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{name}</text>",
            WIDTH - right + 8.0,
            at + 4.0
        );
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> [Row; 2] {
        [Row { blocks: 1000, hits: [60, 40, 30, 35, 50, 80] }, Row { blocks: 5000, hits: [90; 6] }]
    }

    #[test]
    fn the_table_says_how_much_of_the_gap_is_closed() {
        let text = as_table(&rows(), 100.0);
        assert!(text.contains("60.00") && text.contains("50.0 %"), "{text}");
        assert!(text.lines().last().is_some_and(|line| line.ends_with('-')), "no gap, no share: {text}");
    }

    #[test]
    fn the_plot_has_a_curve_and_a_name_for_each_policy() {
        let svg = plot(&rows(), 100.0);
        assert_eq!(svg.matches("<polyline").count(), Policy::ALL.len());
        assert!(Policy::ALL.iter().all(|policy| svg.contains(&format!(">{}<", policy.name()))));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
