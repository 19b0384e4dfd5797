//! The program as a stranger meets it: commands, exit codes, messages, a server that is measured and stopped.

mod answers;
mod commands;
mod drafts;
mod measurements;
mod served;

use std::process::{Command, Output, Stdio};

fn folio(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_folio"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("FOLIO_") && name != "FOLIO_ISA") {
        command.env_remove(name);
    }
    command
}

fn output(arguments: &[&str]) -> Output {
    folio(arguments).output().expect("folio runs")
}

/// Standard output of a command that must succeed.
fn stdout(arguments: &[&str]) -> String {
    let output = output(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).expect("text")
}

/// Standard error of a command that must fail with exit code 1.
fn refusal(arguments: &[&str]) -> String {
    let output = output(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    assert!(output.stdout.is_empty(), "{arguments:?} wrote to standard output");
    String::from_utf8(output.stderr).expect("text")
}

const STORY: [&str; 7] = ["run", "demo", "Once upon a time", "--raw", "--max-tokens", "40", "--ignore-eos"];

fn story(more: &[&str]) -> String {
    stdout(&[&STORY[..], more].concat())
}
