//! One GET, with redirects followed by hand.
//!
//! Owns: who sees the token. The hub redirects large files to a content network; the token goes to the hub alone, so it
//! is dropped as soon as scheme, host or port change. Must never: retry or write a file.

use std::time::Duration;

use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use super::error::HubError;

const REDIRECTS_MAX: u32 = 10;

/// Whether trying again can help.
pub enum Failure {
    Fatal(HubError),
    Transient { reason: String, retry_after: Option<Duration> },
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        Failure::Fatal(error)
    }
}

pub struct Http {
    agent: Agent,
    token: Option<String>,
}

/// A status that is not success, and the hub's own code for it.
pub struct Refusal {
    pub status: u16,
    pub code: String,
}

pub enum Reply {
    /// 200 or 206.
    Body(Response<Body>),
    Refused(Refusal),
}

impl Http {
    pub fn new(token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(Duration::from_secs(15)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .timeout_per_read(Some(Duration::from_secs(60)))
            .user_agent(concat!("folio/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.new_agent(), token }
    }

    /// Asks for `url` from byte `offset` on.
    pub fn get(&self, url: &str, offset: u64) -> Result<Reply, Failure> {
        let mut target: Uri = url.parse().map_err(|_| protocol(url, "not an address"))?;
        let mut token = self.token.as_deref();
        for _ in 0..=REDIRECTS_MAX {
            let mut request = self.agent.get(target.clone());
            if let Some(token) = token {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            if offset > 0 {
                request = request.header("range", format!("bytes={offset}-"));
            }
            let response = request.call().map_err(|error| transport(url, &error))?;
            let status = response.status().as_u16();
            match status {
                200 | 206 => return Ok(Reply::Body(response)),
                301 | 302 | 303 | 307 | 308 => {
                    let next = redirect(&target, header(&response, "location"))
                        .ok_or_else(|| protocol(url, "redirected to nowhere"))?;
                    if origin(&next) != origin(&target) {
                        token = None;
                    }
                    target = next;
                }
                408 | 425 | 429 | 500..=599 => {
                    let retry_after = header(&response, "retry-after").and_then(|text| text.parse().ok());
                    return Err(Failure::Transient {
                        reason: format!("HTTP {status}"),
                        retry_after: retry_after.map(Duration::from_secs),
                    });
                }
                _ => {
                    let code = header(&response, "x-error-code").unwrap_or_default().to_owned();
                    return Ok(Reply::Refused(Refusal { status, code }));
                }
            }
        }
        Err(protocol(url, "redirected too many times"))
    }
}

pub fn header<'a>(response: &'a Response<Body>, name: &str) -> Option<&'a str> {
    response.headers().get(name)?.to_str().ok()
}

fn protocol(url: &str, reason: &str) -> Failure {
    Failure::Fatal(HubError::Protocol { url: url.to_owned(), reason: reason.to_owned() })
}

fn transport(url: &str, error: &ureq::Error) -> Failure {
    match error {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => {
            protocol(url, &error.to_string())
        }
        other => Failure::Transient { reason: other.to_string(), retry_after: None },
    }
}

/// Scheme, host and port.
fn origin(uri: &Uri) -> (Option<&str>, Option<&str>, u16) {
    let default = if uri.scheme_str() == Some("http") { 80 } else { 443 };
    (uri.scheme_str(), uri.host(), uri.port_u16().unwrap_or(default))
}

fn redirect(from: &Uri, location: Option<&str>) -> Option<Uri> {
    let location = location?;
    if let Some(path) = location.strip_prefix('/').filter(|path| !path.starts_with('/')) {
        return format!("{}://{}/{path}", from.scheme_str()?, from.authority()?).parse().ok();
    }
    let target: Uri = location.parse().ok()?;
    matches!(target.scheme_str(), Some("http" | "https")).then_some(target)
}
