//! `folio chat`: a conversation in the terminal, with the model in this process or on a server.
//!
//! Owns: the conversation and the commands. Ctrl-C interrupts the answer; what was said so far stays in the conversation.

use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};
use rustyline::Config;
use rustyline::error::ReadlineError;
use serde_json::{Value, json};

use crate::cli::ChatArgs;
use crate::interrupt::Interrupt;
use crate::remote::Remote;
use crate::runtime::Runtime;
use crate::session;

const HELP: &str = "  /help           this list\n  \
    /reset          forget the conversation\n  \
    /system TEXT    set the system message and forget the conversation; without TEXT, remove it\n  \
    /exit           leave (or Ctrl-D)\n  \
    Ctrl-C          interrupt the answer\n  \
    End a line with \\ to go on in the next.";

/// Lines of history kept between runs.
const HISTORY_LINES: usize = 1000;

pub fn run(args: &ChatArgs) -> Result<()> {
    let model = match &args.url {
        Some(url) => Talker::Remote(Remote::connect(url, args.api_key.as_deref(), None)?),
        None => {
            let runtime = Runtime::start(args.model.as_deref(), &args.engine)?;
            if runtime.template.is_none() {
                bail!(
                    "{} has no chat template: use `folio run {} --raw`, or give --chat-template",
                    runtime.name,
                    runtime.name
                );
            }
            Talker::Local(Box::new(runtime))
        }
    };
    let interrupt = Interrupt::install()?;
    let mut conversation = Conversation::new(args.system.clone());
    let mut input = Input::new()?;
    eprintln!("Talking to {}. /help lists the commands.", model.name());
    while let Some(line) = input.next()? {
        match Line::parse(&line) {
            Line::Empty => {}
            Line::Exit => break,
            Line::Help => eprintln!("{HELP}"),
            Line::Reset => {
                conversation = Conversation::new(conversation.system);
                eprintln!("(the conversation is forgotten)");
            }
            Line::System(text) => {
                conversation = Conversation::new(text);
                eprintln!(
                    "(the system message is {}; the conversation is forgotten)",
                    match &conversation.system {
                        Some(_) => "set",
                        None => "removed",
                    }
                );
            }
            Line::Unknown(command) => eprintln!("There is no command {command}; /help lists them."),
            Line::Say(text) => {
                interrupt.clear();
                conversation.turns.push(json!({"role": "user", "content": text}));
                match model.answer(&conversation.messages(), args, interrupt.flag()) {
                    Ok((text, figures)) => {
                        conversation.turns.push(json!({"role": "assistant", "content": text}));
                        eprintln!("{}", dim(&figures));
                    }
                    Err(error) => {
                        // The question is not part of the conversation, so that it can be asked again.
                        conversation.turns.pop();
                        eprintln!("folio: {error:#}");
                    }
                }
            }
        }
    }
    Ok(())
}

enum Talker {
    Local(Box<Runtime>),
    Remote(Remote),
}

impl Talker {
    fn name(&self) -> String {
        match self {
            Talker::Local(runtime) => runtime.name.clone(),
            Talker::Remote(remote) => format!("{} at {}", remote.model, remote.base),
        }
    }

    /// Streams to standard output; returns the whole text and a line of figures.
    fn answer(
        &self,
        messages: &[Value],
        args: &ChatArgs,
        interrupt: &AtomicBool,
    ) -> Result<(String, String)> {
        let mut out = std::io::stdout().lock();
        let mut show = |piece: &str| {
            // Nothing better can be done about a closed terminal than to go on.
            let _ = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
        };
        let result = match self {
            Talker::Local(runtime) => {
                let ids = session::chat_prompt(runtime, messages)?;
                let answer = session::generate(runtime, ids, &args.sampling, interrupt, &mut show)?;
                let figures = answer.figures();
                (answer.text, figures)
            }
            Talker::Remote(remote) => remote.chat(messages, &args.sampling, interrupt, &mut show)?,
        };
        show("\n");
        Ok(result)
    }
}

struct Conversation {
    system: Option<String>,
    turns: Vec<Value>,
}

impl Conversation {
    fn new(system: Option<String>) -> Self {
        Self { system, turns: Vec::new() }
    }

    fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.turns.iter().cloned()).collect()
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    Empty,
    Say(String),
    Help,
    Reset,
    System(Option<String>),
    Exit,
    Unknown(String),
}

impl Line {
    fn parse(line: &str) -> Self {
        let line = line.trim();
        if line.is_empty() {
            return Line::Empty;
        }
        let Some(command) = line.strip_prefix('/') else { return Line::Say(line.to_owned()) };
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "help" | "?" => Line::Help,
            "reset" | "clear" => Line::Reset,
            "exit" | "quit" | "bye" => Line::Exit,
            "system" => Line::System((!rest.is_empty()).then(|| rest.to_owned())),
            _ => Line::Unknown(format!("/{name}")),
        }
    }
}

/// Lines from a terminal with editing and history, or from a pipe as they are.
enum Input {
    Terminal(Box<rustyline::Editor<(), rustyline::history::MemHistory>>, Option<PathBuf>),
    Pipe(std::io::StdinLock<'static>),
}

impl Input {
    fn new() -> Result<Self> {
        if !std::io::stdin().is_terminal() {
            return Ok(Input::Pipe(std::io::stdin().lock()));
        }
        let history = rustyline::history::MemHistory::with_config(&Config::default());
        let mut editor = rustyline::Editor::with_history(Config::default(), history).context("terminal")?;
        let file = history_file();
        let text = file.as_ref().and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(HISTORY_LINES)..] {
            editor.add_history_entry(*line).context("history")?;
        }
        Ok(Input::Terminal(Box::new(editor), file))
    }

    /// `None` at the end.
    fn next(&mut self) -> Result<Option<String>> {
        let mut text = String::new();
        loop {
            let prompt = if text.is_empty() { "> " } else { ". " };
            let Some(line) = self.line(prompt)? else {
                return Ok((!text.is_empty()).then_some(text));
            };
            match line.strip_suffix('\\') {
                Some(part) => {
                    text.push_str(part);
                    text.push('\n');
                }
                None => {
                    text.push_str(&line);
                    return Ok(Some(text));
                }
            }
        }
    }

    fn line(&mut self, prompt: &str) -> Result<Option<String>> {
        match self {
            Input::Pipe(pipe) => {
                let mut line = String::new();
                let read = pipe.read_line(&mut line).context("cannot read standard input")?;
                Ok((read > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned()))
            }
            Input::Terminal(editor, file) => match editor.readline(prompt) {
                Ok(line) => {
                    if !line.trim().is_empty() {
                        editor.add_history_entry(&line).context("history")?;
                        if let Some(path) = file {
                            remember(path, &line);
                        }
                    }
                    Ok(Some(line))
                }
                // Ctrl-C on the prompt clears the line.
                Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                Err(ReadlineError::Eof) => Ok(None),
                Err(error) => Err(error).context("terminal"),
            },
        }
    }
}

/// `$XDG_STATE_HOME/folio/history`, else below `~/.local/state`.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    Some(state.or_else(home)?.join("folio/history"))
}

/// History is a convenience: a read-only home is no error.
fn remember(path: &PathBuf, line: &str) {
    let Some(folder) = path.parent() else { return };
    let append = || -> std::io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
        writeln!(file, "{line}")
    };
    let _ = append();
}

/// Grey on a terminal that has colours.
fn dim(text: &str) -> String {
    if std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[2m{text}\x1b[0m")
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_words() {
        assert_eq!(Line::parse("  "), Line::Empty);
        assert_eq!(Line::parse("hello /help"), Line::Say("hello /help".into()));
        assert_eq!(Line::parse("/help"), Line::Help);
        assert_eq!(Line::parse("/system  be brief "), Line::System(Some("be brief".into())));
        assert_eq!(Line::parse("/system"), Line::System(None));
        assert_eq!(Line::parse("/quit"), Line::Exit);
        assert_eq!(Line::parse("/hlep me"), Line::Unknown("/hlep".into()));
    }

    #[test]
    fn the_system_message_comes_first() {
        let mut conversation = Conversation::new(Some("be brief".into()));
        conversation.turns.push(json!({"role": "user", "content": "hi"}));
        let roles: Vec<Value> = conversation.messages().iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user"]);
    }
}
