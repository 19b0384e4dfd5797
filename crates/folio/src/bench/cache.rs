//! `folio bench cache`: what retention policies find again of recorded traffic, side by side, and what formats of KV do for
//! the same memory.
//!
//! Owns: reading the trace, the tables and the JSON. The race itself is `folio_sim::retention`, the plot `cache_plot`.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_model::backend::KvFormat;
use folio_sim::retention::{BlockTrace, Policy, hits};
use serde_json::json;

use super::{cache_plot, table};
use crate::cli::BenchCacheArgs;

/// Hits of every policy at one capacity, in the order of [`Policy::ALL`].
pub(super) struct Row {
    pub blocks: u32,
    hits: [u64; Policy::ALL.len()],
    /// The same memory with KV in other formats.
    pub formats: Vec<Stored>,
}

/// What fits into a capacity given in f16 blocks, and what Folio then finds.
pub(super) struct Stored {
    pub format: KvFormat,
    blocks: u32,
    pub hits: u64,
}

impl Row {
    fn race(trace: &BlockTrace, blocks: u32, formats: &[KvFormat], head_dim: usize) -> Self {
        let found = Policy::ALL.map(|policy| hits(trace, blocks, policy));
        let formats = formats.iter().map(|format| {
            let fits = in_the_memory_of(blocks, *format, head_dim);
            Stored { format: *format, blocks: fits, hits: hits(trace, fits, Policy::Folio) }
        });
        Self { blocks, formats: formats.collect(), hits: found }
    }

    pub fn of(&self, policy: Policy) -> f64 {
        self.hits[Policy::ALL.iter().position(|p| *p == policy).unwrap_or_default()] as f64
    }

    /// Share of the gap between LRU and the optimum that a policy closes; `None` where there is no gap.
    fn closed(&self, policy: Policy) -> Option<f64> {
        let (lru, best) = (self.of(Policy::Lru), self.of(Policy::Min));
        (best > lru).then(|| (self.of(policy) - lru) / (best - lru))
    }
}

/// Blocks of a format that take the bytes of `blocks` f16 blocks.
fn in_the_memory_of(blocks: u32, format: KvFormat, head_dim: usize) -> u32 {
    let bytes = blocks as usize * KvFormat::F16.bytes_per_head(head_dim);
    // Block ids end at 32 bits.
    (bytes / format.bytes_per_head(head_dim)).min(1 << 31) as u32
}

/// The formats that are asked for, if heads of that size can be stored so.
fn formats(args: &BenchCacheArgs) -> Result<Vec<KvFormat>> {
    let format = |dtype: &crate::cli::KvDtype| {
        let format = dtype.format().context("--kv-formats: auto depends on a model; name a format")?;
        match format.refusal(args.head_dim as usize) {
            Some(reason) => bail!("{reason}: choose another --head-dim or other --kv-formats"),
            None => Ok(format),
        }
    };
    args.kv_formats.iter().map(format).collect()
}

pub fn run(args: &BenchCacheArgs) -> Result<()> {
    let formats = formats(args)?;
    let trace = read(&args.trace)?;
    let total = trace.blocks();
    if total == 0 {
        bail!("{} has no request of a full block", args.trace.display());
    }
    let rows: Vec<Row> = args
        .blocks
        .iter()
        .map(|blocks| Row::race(&trace, blocks.0, &formats, args.head_dim as usize))
        .collect();
    if args.json {
        println!("{:#}", as_json(&trace, &rows, args));
    } else {
        println!("{} requests, {total} full blocks; blocks found, %", trace.requests.len());
        print!("{}", as_table(&rows, total as f64));
        if !args.kv_formats.is_empty() {
            println!(
                "\nthe memory of as many f16 blocks with KV in other formats, heads of {}",
                args.head_dim
            );
            print!("{}", formats_table(&rows, total as f64));
        }
    }
    if let Some(path) = &args.plot {
        std::fs::write(path, cache_plot::plot(&rows, total as f64))
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

fn formats_table(rows: &[Row], total: f64) -> String {
    let mut header = vec!["f16 blocks".to_owned()];
    let formats = rows.first().map(|row| &row.formats[..]).unwrap_or_default();
    header.extend(formats.iter().flat_map(|stored| [stored.format.name().to_owned(), "found, %".to_owned()]));
    let cells = rows.iter().map(|row| {
        let formats = row.formats.iter().flat_map(|stored| {
            let found = format!("{:.2}", 100.0 * stored.hits as f64 / total);
            [crate::units::count(stored.blocks.into()), found]
        });
        std::iter::once(crate::units::count(row.blocks.into())).chain(formats).collect::<Vec<_>>()
    });
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    table::render(&header, &cells.collect::<Vec<_>>())
}

fn as_json(trace: &BlockTrace, rows: &[Row], args: &BenchCacheArgs) -> serde_json::Value {
    let capacities = rows.iter().map(|row| {
        let hits: serde_json::Map<_, _> = Policy::ALL
            .iter()
            .zip(row.hits)
            .map(|(policy, hits)| (policy.name().to_owned(), hits.into()))
            .collect();
        let formats: serde_json::Map<_, _> = row
            .formats
            .iter()
            .map(|stored| {
                let figures = json!({"blocks": stored.blocks, "hit_blocks": stored.hits});
                (stored.format.name().to_owned(), figures)
            })
            .collect();
        json!({"blocks": row.blocks, "hit_blocks": hits, "gap_closed": row.closed(Policy::Folio), "formats": formats})
    });
    json!({
        "trace": args.trace.file_name().map(|name| name.to_string_lossy()),
        "requests": trace.requests.len(),
        "blocks": trace.blocks(),
        "head_dim": args.head_dim,
        "capacities": capacities.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn rows() -> [Row; 2] {
        let formats = vec![Stored { format: KvFormat::Int4, blocks: 3878, hits: 75 }];
        [
            Row { blocks: 1000, hits: [60, 40, 30, 35, 50, 80], formats },
            Row {
                blocks: 5000,
                hits: [90; 6],
                formats: vec![Stored { format: KvFormat::Int4, blocks: 19_393, hits: 95 }],
            },
        ]
    }

    #[test]
    fn the_table_says_how_much_of_the_gap_is_closed() {
        let text = as_table(&rows(), 100.0);
        assert!(text.contains("60.00") && text.contains("50.0 %"), "{text}");
        assert!(text.lines().last().is_some_and(|line| line.ends_with('-')), "no gap, no share: {text}");
    }

    #[test]
    fn formats_are_compared_in_the_same_bytes() {
        assert_eq!(in_the_memory_of(1000, KvFormat::F16, 128), 1000);
        assert_eq!(in_the_memory_of(1000, KvFormat::Int8, 128), 1969, "256 bytes a head, against 130");
        assert_eq!(in_the_memory_of(1000, KvFormat::Int4, 128), 3878, "66");
        let text = formats_table(&rows()[..1], 100.0);
        assert!(text.contains("int4") && text.contains("3,878") && text.contains("75.00"), "{text}");
    }
}
