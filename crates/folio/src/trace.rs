//! `folio trace record`: asks a server for what it records.

use anyhow::{Context, Result, bail};

use crate::cli::TraceRecordArgs;
use crate::{remote, units};

/// Of what a server sends.
const BYTES_MAX: u64 = 128 << 20;

pub fn record(args: &TraceRecordArgs) -> Result<()> {
    eprintln!("recording for {} s ...", args.seconds);
    let (key, seconds) = (args.api_key.as_deref(), args.seconds.to_string());
    let query = args.model.iter().map(|model| ("model", &**model)).chain([("seconds", &*seconds)]);
    let query: Vec<_> = query.collect();
    let text = remote::text(&args.url, key, "trace", &query, BYTES_MAX)?;
    // What is no trace is not kept as one.
    let trace = folio_sim::recorded::RecordedTrace::read(text.as_bytes())
        .with_context(|| format!("what {} answered", args.url))?;
    std::fs::write(&args.out, &text).with_context(|| format!("cannot write {}", args.out.display()))?;
    let about = &trace.about;
    eprintln!(
        "{} requests and {} samples of steps in {} ({}); {} did not end, {} were left out",
        units::count(trace.requests.len() as u64),
        units::count(trace.steps.len() as u64),
        args.out.display(),
        units::bytes(text.len() as u64),
        about.unfinished,
        about.left_out
    );
    if trace.requests.is_empty() && about.left_out > 0 {
        bail!("no request was recorded: there were too many at once");
    }
    Ok(())
}
