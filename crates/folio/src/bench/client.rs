//! A small streaming client for OpenAI's endpoints: hyper on tokio, connections kept and reused, times taken as bytes arrive.
//!
//! Owns: one request's timeline. Must never: parse more of a chunk than it measures. Plain http only: a load generator
//! that measures TLS measures the wrong thing.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::cli::Endpoint;

/// Where requests go.
pub struct Client {
    /// `host:port`.
    authority: String,
    /// Path up to and with `/v1`.
    prefix: String,
    key: Option<HeaderValue>,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

/// What to send.
#[derive(Clone, Debug)]
pub struct Ask {
    pub endpoint: Endpoint,
    pub model: String,
    /// A text, or token ids.
    pub prompt: Value,
    pub max_tokens: u32,
    pub ignore_eos: bool,
}

/// What came back.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    /// From sending to the first text.
    pub first: Duration,
    /// From sending to the end.
    pub total: Duration,
    /// Between two chunks with text.
    pub gaps: Vec<Duration>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
}

impl Timeline {
    /// Mean time per token after the first.
    pub fn per_token(&self) -> Option<Duration> {
        let tokens = u32::try_from(self.output_tokens.checked_sub(1)?).ok().filter(|tokens| *tokens > 0)?;
        Some(self.total.saturating_sub(self.first) / tokens)
    }
}

/// Why a request does not count: the kind is what reports are grouped by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// `HTTP 429`, `timeout`, `connection`, `stream`.
    pub kind: String,
    pub detail: String,
}

impl Failure {
    fn new(kind: impl Into<String>, detail: impl ToString) -> Self {
        Self { kind: kind.into(), detail: detail.to_string() }
    }
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

impl Choice {
    fn has_text(&self) -> bool {
        let some = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
        some(&self.text)
            || self.delta.as_ref().is_some_and(|d| some(&d.content) || some(&d.reasoning_content))
    }
}

impl Client {
    pub fn new(url: &str, key: Option<&str>) -> Result<Self> {
        let base = crate::remote::base_url(url);
        let Some(rest) = base.strip_prefix("http://") else {
            bail!("{url}: only http:// can be measured; for a server behind TLS use its plain port");
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty() {
            bail!("{url} has no host");
        }
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let authority = if has_port { authority.to_owned() } else { format!("{authority}:80") };
        let key = key.map(|key| HeaderValue::from_str(&format!("Bearer {key}"))).transpose();
        Ok(Self {
            authority,
            prefix: format!("/{path}"),
            key: key.map_err(|_| anyhow!("the key has characters that no header can carry"))?,
            idle: Mutex::new(Vec::new()),
        })
    }

    /// A JSON answer, for what is not measured.
    pub async fn json(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let body = body.map(Value::to_string).unwrap_or_default();
        let place = format!("http://{}{}{path}", self.authority, self.prefix);
        let failed = |failure: Failure| anyhow!("{place}: {}", failure.detail);
        let response = self.send(method, path, body).await.map_err(failed)?.0;
        let status = response.status();
        let bytes = response.into_body().collect().await.with_context(|| place.clone())?.to_bytes();
        let value: Value =
            serde_json::from_slice(&bytes).with_context(|| format!("{place} did not answer JSON"))?;
        if !status.is_success() {
            bail!("{place}: {status}: {}", value["error"]["message"].as_str().unwrap_or("no message"));
        }
        Ok(value)
    }

    /// Sends and reads the whole stream.
    pub async fn stream(&self, ask: &Ask) -> Result<Timeline, Failure> {
        let (path, body) = body(ask);
        let body = body.to_string();
        let started = Instant::now();
        let (response, connection) = self.send(Method::POST, path, body).await?;
        let status = response.status();
        let mut incoming = response.into_body();
        if !status.is_success() {
            let bytes = incoming.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            self.keep(connection);
            let value: Value = serde_json::from_slice(&bytes).unwrap_or_default();
            let detail = value["error"]["message"].as_str().map_or_else(|| status.to_string(), str::to_owned);
            return Err(Failure::new(format!("HTTP {}", status.as_u16()), detail));
        }
        let mut reader = EventStreamReader::new(started);
        while let Some(frame) = incoming.frame().await {
            let frame = frame.map_err(|error| Failure::new("stream", error))?;
            if let Some(data) = frame.data_ref() {
                reader.bytes(data)?;
            }
        }
        let timeline = reader.finish()?;
        self.keep(connection);
        Ok(timeline)
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<(Response<Incoming>, SendRequest<Full<Bytes>>), Failure> {
        let mut connection = self.connection().await?;
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(HOST, &self.authority)
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        let request =
            request.body(Full::new(Bytes::from(body))).map_err(|e| Failure::new("connection", e))?;
        let response = connection.send_request(request).await.map_err(|e| Failure::new("connection", e))?;
        Ok((response, connection))
    }

    /// An idle connection that is still open, else a new one.
    async fn connection(&self) -> Result<SendRequest<Full<Bytes>>, Failure> {
        loop {
            let idle = self.idle.lock().ok().and_then(|mut idle| idle.pop());
            let Some(mut connection) = idle else { break };
            if connection.ready().await.is_ok() {
                return Ok(connection);
            }
        }
        let failed = |error: &dyn std::fmt::Display| Failure::new("connection", error);
        let socket = TcpStream::connect(&self.authority).await.map_err(|e| failed(&e))?;
        socket.set_nodelay(true).map_err(|e| failed(&e))?;
        let (sender, driver) =
            hyper::client::conn::http1::handshake(TokioIo::new(socket)).await.map_err(|e| failed(&e))?;
        // Ends with the connection; its errors surface at the request.
        tokio::spawn(driver);
        Ok(sender)
    }

    fn keep(&self, connection: SendRequest<Full<Bytes>>) {
        if let Ok(mut idle) = self.idle.lock() {
            idle.push(connection);
        }
    }
}

fn body(ask: &Ask) -> (&'static str, Value) {
    let mut body = json!({"model": ask.model, "stream": true, "stream_options": {"include_usage": true},
                          "max_tokens": ask.max_tokens, "temperature": 0});
    if ask.ignore_eos {
        body["ignore_eos"] = true.into();
    }
    match ask.endpoint {
        Endpoint::Completions => {
            body["prompt"] = ask.prompt.clone();
            ("/completions", body)
        }
        Endpoint::Chat => {
            body["messages"] = json!([{"role": "user", "content": ask.prompt}]);
            ("/chat/completions", body)
        }
    }
}

/// Server-sent events to a timeline.
struct EventStreamReader {
    started: Instant,
    buffer: Vec<u8>,
    last: Option<Instant>,
    /// First chunk with a choice, for answers whose tokens have no text.
    any: Option<Instant>,
    chunks: u64,
    timeline: Timeline,
    usage: bool,
    done: bool,
}

impl EventStreamReader {
    fn new(started: Instant) -> Self {
        Self {
            started,
            buffer: Vec::new(),
            last: None,
            any: None,
            chunks: 0,
            timeline: Timeline::default(),
            usage: false,
            done: false,
        }
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let now = Instant::now();
        self.buffer.extend_from_slice(bytes);
        let mut from = 0;
        while let Some(length) = self.buffer[from..].iter().position(|byte| *byte == b'\n') {
            let line = self.buffer[from..from + length].to_vec();
            from += length + 1;
            self.line(&line, now)?;
        }
        self.buffer.drain(..from);
        Ok(())
    }

    fn line(&mut self, line: &[u8], now: Instant) -> Result<(), Failure> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(data).map_err(|e| Failure::new("stream", e))?;
        if let Some(error) = chunk.error {
            let message = error["message"].as_str().unwrap_or("an error without a message");
            return Err(Failure::new("error in stream", message));
        }
        if !chunk.choices.is_empty() {
            self.any.get_or_insert(now);
        }
        if chunk.choices.iter().any(Choice::has_text) {
            self.chunks += 1;
            match self.last {
                None => self.timeline.first = now - self.started,
                Some(last) => self.timeline.gaps.push(now - last),
            }
            self.last = Some(now);
        }
        if let Some(usage) = chunk.usage {
            self.usage = true;
            self.timeline.prompt_tokens = usage.prompt_tokens;
            self.timeline.output_tokens = usage.completion_tokens;
            self.timeline.cached_tokens =
                usage.prompt_tokens_details.and_then(|d| d.cached_tokens).unwrap_or(0);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Timeline, Failure> {
        if !self.done {
            return Err(Failure::new("stream", "it ended without [DONE]"));
        }
        let Some(end) = self.last.or(self.any) else {
            return Err(Failure::new("stream", "it held no token"));
        };
        if self.last.is_none() {
            self.timeline.first = end - self.started;
        }
        if !self.usage {
            // A server without usage in streams: a chunk is taken for a token.
            self.timeline.output_tokens = self.chunks;
        }
        self.timeline.total = end - self.started;
        Ok(self.timeline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str]) -> Result<Timeline, Failure> {
        let mut reader = EventStreamReader::new(Instant::now());
        for piece in pieces {
            reader.bytes(piece.as_bytes())?;
        }
        reader.finish()
    }

    const CHAT: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";

    #[test]
    fn a_stream_cut_anywhere_is_one_timeline() {
        let timeline = read(&[
            CHAT,
            "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\nda",
            "ta: {\"choices\":[{\"delta\":{\"content\":\"b\"}}]}\n\n: keep-alive\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
             \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n",
        ])
        .expect("reads");
        assert_eq!((timeline.prompt_tokens, timeline.cached_tokens, timeline.output_tokens), (7, 4, 3));
        assert_eq!(timeline.gaps.len(), 1);
        assert!(timeline.per_token().is_some());
    }

    #[test]
    fn without_usage_chunks_are_counted() {
        let timeline =
            read(&["data: {\"choices\":[{\"text\":\"a\"}]}\n\n", "data: [DONE]\n"]).expect("reads");
        assert_eq!((timeline.output_tokens, timeline.per_token()), (1, None));
    }

    #[test]
    fn broken_streams_are_failures() {
        assert_eq!(read(&[CHAT]).expect_err("no end").kind, "stream");
        assert_eq!(read(&["data: [DONE]\n"]).expect_err("no token").detail, "it held no token");
        assert_eq!(read(&["data: {\"error\":{\"message\":\"oh\"}}\n"]).expect_err("error").detail, "oh");
        assert_eq!(read(&["data: {nonsense\n"]).expect_err("no json").kind, "stream");
    }

    #[test]
    fn urls_are_checked() {
        let client = Client::new("http://localhost:8000", None).expect("fine");
        assert_eq!((client.authority.as_str(), client.prefix.as_str()), ("localhost:8000", "/v1"));
        assert_eq!(Client::new("http://h/api", None).expect("fine").authority, "h:80");
        assert!(Client::new("https://h", None).is_err());
    }
}
