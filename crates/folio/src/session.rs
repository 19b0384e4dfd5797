//! Generation in this process: what chat and run do with a [`Runtime`].
//!
//! Owns: one request at a time, its text and its figures. The engine treats it like any other client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use folio_engine::{Event, FinishReason, Request, SamplingParams};
use folio_kv::{Identity, Root, TenantId};
use folio_model::GenerationConfig;
use folio_text::{DetokenizeOptions, Detokenizer, StopMatcher, TextError};
use serde_json::Value;

use crate::cli::SamplingArgs;
use crate::runtime::{self, Runtime};

/// Longest prompt text taken from the command line or a conversation.
const PROMPT_BYTES_MAX: usize = 64 << 20;
/// How often an interrupt is looked for while nothing arrives.
const POLL: Duration = Duration::from_millis(50);

/// Figures of one answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub text: String,
    pub prompt_tokens: usize,
    pub cached_tokens: u32,
    pub tokens: u32,
    /// From sending to the first token.
    pub first_token: Option<Duration>,
    /// From the first token to the last.
    pub decode: Duration,
    pub reason: FinishReason,
}

impl Answer {
    fn new(prompt_tokens: usize) -> Self {
        Self {
            text: String::new(),
            prompt_tokens,
            cached_tokens: 0,
            tokens: 0,
            first_token: None,
            decode: Duration::ZERO,
            reason: FinishReason::Stop,
        }
    }

    fn count_token(&mut self, after: Duration) {
        self.tokens += 1;
        match self.first_token {
            None => self.first_token = Some(after),
            Some(first) => self.decode = after.saturating_sub(first),
        }
    }

    /// Tokens per second after the first.
    pub fn decode_rate(&self) -> Option<f64> {
        let seconds = self.decode.as_secs_f64();
        (self.tokens > 1 && seconds > 0.0).then(|| f64::from(self.tokens - 1) / seconds)
    }

    /// One line for people.
    pub fn figures(&self) -> String {
        let mut parts = vec![format!("{} tokens", self.tokens)];
        if let Some(rate) = self.decode_rate() {
            parts.push(format!("{rate:.1} tokens/s"));
        }
        if let Some(first) = self.first_token {
            parts.push(format!("first after {}", crate::units::duration(first)));
        }
        parts.push(format!("prompt {} ({} cached)", self.prompt_tokens, self.cached_tokens));
        match self.reason {
            FinishReason::Length => parts.push("cut off by the length limit".into()),
            FinishReason::Cancelled => parts.push("interrupted".into()),
            _ => {}
        }
        parts.join(" · ")
    }
}

/// Prompt ids of plain text to continue.
pub fn raw_prompt(runtime: &Runtime, text: &str) -> Result<Vec<u32>> {
    Ok(runtime.tokenizer.encode(text, true, PROMPT_BYTES_MAX)?)
}

/// Prompt ids of a conversation in OpenAI's messages.
pub fn chat_prompt(runtime: &Runtime, messages: &[Value]) -> Result<Vec<u32>> {
    let template = runtime.template.as_ref().ok_or(TextError::NoTemplate)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs() as i64);
    runtime::chat_prompt(template, &runtime.tokenizer, messages, now, PROMPT_BYTES_MAX)
}

/// Generates, calling `show` with each piece of text. `interrupt` ends the answer early.
pub fn generate(
    runtime: &Runtime,
    prompt: Vec<u32>,
    args: &SamplingArgs,
    interrupt: &AtomicBool,
    mut show: impl FnMut(&str),
) -> Result<Answer> {
    let (sender, events) = mpsc::channel();
    let mut answer = Answer::new(prompt.len());
    let request = request(runtime, prompt, args)?;
    let started = Instant::now();
    let cancel = runtime.engine.submit(request, Box::new(move |event| sender.send(event).is_ok()))?;
    let mut text = TextStream::new(args);
    loop {
        if interrupt.load(Ordering::Relaxed) {
            cancel.cancel();
        }
        let event = match events.recv_timeout(POLL) {
            Ok(event) => event,
            Err(mpsc::RecvTimeoutError::Timeout) => continue,
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the engine stopped"),
        };
        let mut keep = |piece: &str| {
            answer.text.push_str(piece);
            show(piece);
        };
        match event {
            Event::Prompt { cached_tokens, .. } => answer.cached_tokens = cached_tokens,
            // Tokens computed while the cancellation was on its way are not part of the answer.
            Event::Token { .. } if text.ended => {}
            Event::Pooled { .. } => {}
            Event::Token { token, .. } => {
                if text.push(runtime, token.id, &mut keep) {
                    cancel.cancel();
                }
                answer.count_token(started.elapsed());
            }
            Event::Finished { reason: FinishReason::Error, error, .. } => {
                bail!("{}", error.as_deref().unwrap_or("the engine failed without a message"))
            }
            Event::Finished { reason, .. } => {
                text.finish(runtime, &mut keep);
                answer.reason = if text.ended { FinishReason::Stop } else { reason };
                return Ok(answer);
            }
        }
    }
}

fn request(runtime: &Runtime, prompt: Vec<u32>, args: &SamplingArgs) -> Result<Request> {
    if prompt.is_empty() {
        bail!("the prompt is empty");
    }
    if runtime.model.only_embeds {
        bail!(
            "the model was published for embeddings and has no output matrix: serve it and use /v1/embeddings"
        );
    }
    let limit = runtime.max_model_len();
    let room = u32::try_from(prompt.len()).ok().and_then(|tokens| limit.checked_sub(tokens)).unwrap_or(0);
    if room == 0 {
        bail!("the prompt has {} tokens, which leaves no room in the context of {limit}", prompt.len());
    }
    let id = runtime.engine.next_request_id();
    let sampling = sampling(args, &runtime.model.generation, room);
    let speculation = runtime.speculation(&prompt);
    let request = Request::new(id, TenantId(0), local_root(runtime, &[]), prompt.into(), sampling);
    Ok(Request { speculation, ..request })
}

/// Tokens to text that may be shown.
struct TextStream {
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// A stop string was found.
    ended: bool,
}

impl TextStream {
    fn new(args: &SamplingArgs) -> Self {
        let options = DetokenizeOptions { skip_special_tokens: true, continues: true };
        Self {
            detokenizer: Detokenizer::new(options),
            stop: StopMatcher::new(args.stop.iter().cloned(), false),
            ended: false,
        }
    }

    /// True when a stop string ended the text.
    fn push(&mut self, runtime: &Runtime, id: u32, show: &mut impl FnMut(&str)) -> bool {
        let (mut piece, mut safe) = (String::new(), String::new());
        self.detokenizer.push(&runtime.tokenizer, id, &mut piece);
        self.ended = self.stop.push(&piece, &mut safe).is_some();
        if !safe.is_empty() {
            show(&safe);
        }
        self.ended
    }

    fn finish(&mut self, runtime: &Runtime, show: &mut impl FnMut(&str)) {
        if self.ended {
            return;
        }
        let (mut piece, mut safe) = (String::new(), String::new());
        self.detokenizer.finish(&runtime.tokenizer, &mut piece);
        if self.stop.push(&piece, &mut safe).is_none() {
            self.stop.finish(&mut safe);
        }
        if !safe.is_empty() {
            show(&safe);
        }
    }
}

/// The only tenant there is without a server. `extra`: whatever content is to be told apart by beside tokens.
pub fn local_root(runtime: &Runtime, extra: &[u8]) -> Root {
    Root::derive(&Identity {
        tenant: TenantId(0),
        tenant_secret: &[0; 32],
        model_digest: &runtime.model.digest,
        layout_digest: &runtime.layout_digest,
        extra,
    })
}

/// What the command line says, else what the model's authors recommend, else plain sampling.
fn sampling(args: &SamplingArgs, defaults: &GenerationConfig, room: u32) -> SamplingParams {
    let authors = if defaults.do_sample == Some(false) { 0.0 } else { 1.0 };
    SamplingParams {
        temperature: args.temperature.or(defaults.temperature.filter(|_| authors > 0.0)).unwrap_or(authors),
        top_k: args.top_k.or(defaults.top_k).unwrap_or(0),
        top_p: args.top_p.or(defaults.top_p).unwrap_or(1.0),
        min_p: args.min_p.or(defaults.min_p).unwrap_or(0.0),
        repetition_penalty: args.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
        seed: args.seed.unwrap_or_else(random_seed),
        max_tokens: args.max_tokens.or(defaults.max_new_tokens).unwrap_or(room).min(room),
        eos_token_ids: if args.ignore_eos { Arc::from([]) } else { defaults.eos_token_ids.clone().into() },
        ..SamplingParams::greedy(0)
    }
}

fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

/// Reads a prompt argument; `-` is standard input.
pub fn read_prompt(argument: &str) -> Result<String> {
    if argument != "-" {
        return Ok(argument.to_owned());
    }
    let mut text = String::new();
    std::io::Read::read_to_string(&mut std::io::stdin(), &mut text).context("cannot read standard input")?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_wins_over_the_authors() {
        let authors = GenerationConfig {
            temperature: Some(0.6),
            top_p: Some(0.9),
            max_new_tokens: Some(100),
            eos_token_ids: vec![2],
            ..GenerationConfig::default()
        };
        let args = SamplingArgs { top_p: Some(0.5), seed: Some(3), ..SamplingArgs::default() };
        let params = sampling(&args, &authors, 50);
        assert_eq!((params.temperature, params.top_p, params.seed), (0.6, 0.5, 3));
        assert_eq!((params.max_tokens, &*params.eos_token_ids), (50, &[2][..]));
    }

    #[test]
    fn authors_who_do_not_sample_mean_greedy() {
        let authors = GenerationConfig {
            do_sample: Some(false),
            temperature: Some(0.6),
            ..GenerationConfig::default()
        };
        assert_eq!(sampling(&SamplingArgs::default(), &authors, 50).temperature, 0.0);
        assert_eq!(sampling(&SamplingArgs::default(), &GenerationConfig::default(), 50).temperature, 1.0);
        let asked = SamplingArgs { temperature: Some(0.8), ..SamplingArgs::default() };
        assert_eq!(sampling(&asked, &authors, 50).temperature, 0.8);
    }
}
