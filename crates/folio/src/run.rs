//! `folio run`: one answer on standard output.

use std::io::Write;

use anyhow::Result;
use serde_json::json;

use crate::cli::RunArgs;
use crate::interrupt::Interrupt;
use crate::runtime::Runtime;
use crate::session;

pub fn run(args: &RunArgs) -> Result<()> {
    let prompt = session::read_prompt(&args.prompt)?;
    let runtime = Runtime::start(Some(&args.model), &args.engine)?;
    let ids = if args.raw || runtime.template.is_none() {
        if !args.raw {
            eprintln!(
                "folio: the model has no chat template, so the prompt is continued as plain text (--raw)"
            );
        }
        session::raw_prompt(&runtime, &prompt)?
    } else {
        let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
        let user = std::iter::once(json!({"role": "user", "content": prompt}));
        session::chat_prompt(&runtime, &system.chain(user).collect::<Vec<_>>())?
    };
    let interrupt = Interrupt::install()?;
    let mut out = std::io::stdout().lock();
    let mut failed = Ok(());
    let answer = session::generate(&runtime, ids, &args.sampling, interrupt.flag(), |piece| {
        // A reader that left (a closed pipe) ends the answer.
        if let Err(error) = out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
            interrupt.raise();
            failed = Err(error);
        }
    })?;
    match failed {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
        other => other?,
    }
    writeln!(out)?;
    eprintln!("{}", answer.figures());
    runtime.finish();
    Ok(())
}
