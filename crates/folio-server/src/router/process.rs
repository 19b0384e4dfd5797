//! One model's process, from its start to its end.
//!
//! Owns: its standard streams. It reads its configuration from its standard input, and that it is to end from the input's end, which comes
//! with the router's own however that ends; it says on its standard output that it listens; what it says on its standard error is passed
//! on with its model's name, and its last words are why it failed. In a process group of its own, so that Ctrl-C in a terminal is the router's.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::serve::{CLOSING, ENDING, admin_socket};

use super::config::ModelProcess;

/// Of a line that is passed on.
const LINE_BYTES: usize = 4096;
/// Beyond the time to finish, until it is killed.
const GRACE: Duration = Duration::from_secs(5);
/// How long last words are waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How an error of the program begins.
const ERROR: &str = "folio: ";

/// How processes are started.
#[derive(Clone)]
pub(super) struct Launch {
    pub program: PathBuf,
    pub configuration: Arc<str>,
    /// To finish what runs.
    pub drain: Duration,
}

pub(super) enum StopMode {
    InGoodOrder,
    AtOnce,
}

/// Starts a process and follows it to its end, which is told by its reason. `ready`: it listens.
pub(super) async fn run(
    launch: &Launch,
    model: &ModelProcess,
    socket: &Path,
    stop: oneshot::Receiver<StopMode>,
    ready: impl Fn(),
) -> String {
    let name = &*model.names[0];
    tracing::info!(model = %name, "loading");
    let reason = match start(launch, model, socket) {
        Ok(child) => follow(launch, name, child, stop, ready).await,
        Err(error) => format!("{} cannot be run: {error}", launch.program.display()),
    };
    for path in [&*admin_socket(socket), socket] {
        let _ = std::fs::remove_file(path);
    }
    tracing::info!(model = %name, "unloaded: {reason}");
    reason
}

fn start(launch: &Launch, model: &ModelProcess, socket: &Path) -> std::io::Result<Child> {
    Command::new(&launch.program)
        .args(&model.arguments)
        .arg("--behind-router")
        .arg(socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
}

/// Returns why it ended.
async fn follow(
    launch: &Launch,
    name: &str,
    mut child: Child,
    mut stop: oneshot::Receiver<StopMode>,
    ready: impl Fn(),
) -> String {
    let (mut input, mut output) = (child.stdin.take(), child.stdout.take());
    let words = child.stderr.take().map(|errors| tokio::spawn(pass_on(errors, name.to_owned())));
    if let Some(input) = &mut input
        && let Err(error) = configure(input, &launch.configuration).await
    {
        tracing::debug!(model = %name, %error, "it did not read its configuration");
    }
    let (mut is_ready, mut told, mut kill_at) = (false, false, None);
    let status = loop {
        let says = async {
            match &mut output {
                Some(output) => output.read_u8().await,
                None => std::future::pending().await,
            }
        };
        let patience = async {
            match kill_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            status = child.wait() => break status,
            said = says => {
                output = None;
                if said.is_ok() {
                    is_ready = true;
                    ready();
                }
            }
            how = &mut stop, if !told => {
                told = true;
                // It reads the end of its input.
                input = None;
                let finishing = if is_ready { launch.drain + CLOSING + ENDING } else { Duration::ZERO };
                match how {
                    Ok(StopMode::InGoodOrder) => kill_at = Some(Instant::now() + finishing + GRACE),
                    Ok(StopMode::AtOnce) | Err(_) => kill_at = Some(Instant::now()),
                }
            }
            () = patience => {
                kill_at = None;
                let _ = child.start_kill();
            }
        }
    };
    drop(input);
    let words = match words {
        Some(words) => tokio::time::timeout(LAST_WORDS, words).await.ok().and_then(Result::ok),
        None => None,
    };
    reason(status, words.unwrap_or_default())
}

/// The configuration's length on a line, and the configuration.
async fn configure(input: &mut ChildStdin, configuration: &str) -> std::io::Result<()> {
    input.write_all(format!("{}\n", configuration.len()).as_bytes()).await?;
    input.write_all(configuration.as_bytes()).await?;
    input.flush().await
}

fn reason(status: std::io::Result<ExitStatus>, words: String) -> String {
    let status = match status {
        Ok(status) => status.to_string(),
        Err(error) => error.to_string(),
    };
    match words.strip_prefix(ERROR) {
        Some(error) => error.trim_end_matches('.').to_owned(),
        None => format!("its process ended ({status})"),
    }
}

/// Passes on what a process says, line by line; returns the last line.
async fn pass_on(mut errors: impl AsyncRead + Unpin, name: String) -> String {
    let (mut line, mut last) = (Vec::new(), String::new());
    let mut piece = [0; LINE_BYTES];
    let mut tell = |line: &mut Vec<u8>| {
        if !line.is_empty() {
            last = String::from_utf8_lossy(line).into_owned();
            eprintln!("[{name}] {last}");
            line.clear();
        }
    };
    while let Ok(read @ 1..) = errors.read(&mut piece).await {
        for byte in &piece[..read] {
            match byte {
                b'\n' => tell(&mut line),
                byte => {
                    if line.len() == LINE_BYTES {
                        tell(&mut line);
                    }
                    line.push(*byte);
                }
            }
        }
    }
    tell(&mut line);
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn last_words_are_the_last_line_and_lines_are_bounded() {
        let said = format!("a\n\nfolio: no such file.\n{}", "x".repeat(2 * LINE_BYTES + 1));
        assert_eq!(pass_on(said.as_bytes(), "m".into()).await, "x");
        assert_eq!(pass_on(&b"a\nfolio: no such file.\n"[..], "m".into()).await, "folio: no such file.");
    }

    #[test]
    fn an_error_is_a_reason_and_so_is_a_silent_end() {
        use std::os::unix::process::ExitStatusExt;
        let status = || Ok(ExitStatus::from_raw(9));
        assert_eq!(reason(status(), "folio: no such file.".into()), "no such file");
        let silent = reason(status(), "  memory    1 GiB".into());
        assert!(silent.contains("signal: 9"), "{silent}");
    }
}
