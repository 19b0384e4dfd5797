//! Asking other servers: a chat with any OpenAI-compatible one for `folio chat --url`, and what one of Folio's says of itself.

use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

use crate::cli::SamplingArgs;
use crate::units;

pub struct Remote {
    agent: ureq::Agent,
    /// Ends in `/v1`.
    pub base: String,
    key: Option<String>,
    pub model: String,
}

/// `http://host:port`, with or without `/v1` or a slash at the end.
pub fn base_url(url: &str) -> String {
    let url = url.trim_end_matches('/');
    let url = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    if url.ends_with("/v1") { url } else { format!("{url}/v1") }
}

/// What a server says at `path` below `/v1`.
pub fn get(url: &str, key: Option<&str>, path: &str, query: &[(&str, &str)]) -> Result<Value> {
    ask(&agent(), &format!("{}/{path}", base_url(url)), key, query)
}

/// The text of at most so many bytes that a server says at `path` below `/v1`, however long that takes.
pub fn text(
    url: &str,
    key: Option<&str>,
    path: &str,
    query: &[(&str, &str)],
    bytes_max: u64,
) -> Result<String> {
    let url = format!("{}/{path}", base_url(url));
    let mut response = send(&agent(), &url, key, query)?;
    let status = response.status();
    let body = response.body_mut().with_config().limit(bytes_max).read_to_string();
    let body = body.with_context(|| url.clone())?;
    if !status.is_success() {
        let refused: Value = serde_json::from_str(&body).unwrap_or_default();
        bail!("{url}: {status}: {}", refused["error"]["message"].as_str().unwrap_or(&body));
    }
    Ok(body)
}

fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder()
        .http_status_as_error(false)
        .timeout_connect(Some(Duration::from_secs(10)))
        .build();
    config.into()
}

/// The JSON that is at `url`; what the server refuses is an error in its words.
fn ask(agent: &ureq::Agent, url: &str, key: Option<&str>, query: &[(&str, &str)]) -> Result<Value> {
    let mut response = send(agent, url, key, query)?;
    let body = response.body_mut().read_to_string().with_context(|| url.to_owned())?;
    let body: Value = serde_json::from_str(&body).with_context(|| format!("{url} did not answer JSON"))?;
    if let Some(message) = body["error"]["message"].as_str() {
        bail!("{url}: {message}");
    }
    Ok(body)
}

fn send(
    agent: &ureq::Agent,
    url: &str,
    key: Option<&str>,
    query: &[(&str, &str)],
) -> Result<ureq::http::Response<ureq::Body>> {
    let mut request = agent.get(url);
    for (name, value) in query {
        request = request.query(*name, *value);
    }
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    request.call().with_context(|| format!("no answer from {url}"))
}

impl Remote {
    /// Asks for the served models; `model` overrides the first of them.
    pub fn connect(url: &str, key: Option<&str>, model: Option<&str>) -> Result<Self> {
        let mut remote =
            Self { agent: agent(), base: base_url(url), key: key.map(str::to_owned), model: String::new() };
        remote.model = match model {
            Some(model) => model.to_owned(),
            None => remote.first_model()?,
        };
        Ok(remote)
    }

    fn first_model(&self) -> Result<String> {
        let url = format!("{}/models", self.base);
        let body = ask(&self.agent, &url, self.key.as_deref(), &[])?;
        let name = body["data"][0]["id"].as_str();
        name.map(str::to_owned).ok_or_else(|| anyhow!("{url} lists no model"))
    }

    /// Streams an answer; returns the text and a line of figures.
    pub fn chat(
        &self,
        messages: &[Value],
        sampling: &SamplingArgs,
        interrupt: &AtomicBool,
        show: &mut dyn FnMut(&str),
    ) -> Result<(String, String)> {
        let url = format!("{}/chat/completions", self.base);
        let mut request = self.agent.post(&url).header("content-type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let body = self.body(messages, sampling).to_string();
        let started = Instant::now();
        let mut response = request.send(body).with_context(|| format!("no answer from {url}"))?;
        if !response.status().is_success() {
            let status = response.status();
            let text = response.body_mut().read_to_string().unwrap_or_default();
            let body: Value = serde_json::from_str(&text).unwrap_or_default();
            bail!("{status}: {}", body["error"]["message"].as_str().unwrap_or(&text));
        }
        let mut text = String::new();
        let (mut first, mut tokens, mut usage) = (None, 0u64, None);
        for line in BufReader::new(response.body_mut().as_reader()).lines() {
            if interrupt.load(Ordering::Relaxed) {
                // Dropping the response closes the connection, which cancels the request.
                break;
            }
            let line = line.context("the stream broke off")?;
            let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
            if data == "[DONE]" {
                break;
            }
            let chunk: Value = serde_json::from_str(data).context("the stream is not JSON")?;
            if let Some(message) = chunk["error"]["message"].as_str() {
                bail!("{message}");
            }
            let delta = &chunk["choices"][0]["delta"];
            // Reasoning is shown, but is no part of the answer that the conversation goes on from.
            for (field, answer) in [("reasoning_content", false), ("content", true)] {
                let Some(piece) = delta[field].as_str().filter(|piece| !piece.is_empty()) else { continue };
                first.get_or_insert_with(|| started.elapsed());
                tokens += 1;
                show(piece);
                if answer {
                    text.push_str(piece);
                }
            }
            usage = chunk["usage"]["completion_tokens"].as_u64().or(usage);
        }
        Ok((text, figures(usage.unwrap_or(tokens), first, started.elapsed())))
    }

    fn body(&self, messages: &[Value], sampling: &SamplingArgs) -> Value {
        let mut body = json!({"model": self.model, "messages": messages, "stream": true,
                              "stream_options": {"include_usage": true}});
        let fields = [
            ("temperature", sampling.temperature.map(Value::from)),
            ("top_p", sampling.top_p.map(Value::from)),
            ("top_k", sampling.top_k.map(Value::from)),
            ("min_p", sampling.min_p.map(Value::from)),
            ("repetition_penalty", sampling.repetition_penalty.map(Value::from)),
            ("seed", sampling.seed.map(Value::from)),
            ("max_tokens", sampling.max_tokens.map(Value::from)),
            ("ignore_eos", sampling.ignore_eos.then_some(Value::Bool(true))),
            ("stop", (!sampling.stop.is_empty()).then(|| Value::from(sampling.stop.clone()))),
        ];
        for (name, value) in fields {
            if let Some(value) = value {
                body[name] = value;
            }
        }
        body
    }
}

fn figures(tokens: u64, first: Option<Duration>, total: Duration) -> String {
    let Some(first) = first else { return "no text".into() };
    let rate = tokens.saturating_sub(1) as f64 / total.saturating_sub(first).as_secs_f64().max(1e-9);
    format!("{tokens} tokens · {rate:.1} tokens/s · first after {}", units::duration(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_completed() {
        for url in
            ["127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1/"]
        {
            assert_eq!(base_url(url), "http://127.0.0.1:8000/v1");
        }
        assert_eq!(base_url("https://example.org/api"), "https://example.org/api/v1");
    }
}
