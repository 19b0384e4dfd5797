//! What one tenant may have at once and in a minute.
//!
//! Owns: counting, per tenant, requests and tokens of the last minute, requests that run, and prompts that wait. Must never:
//! refuse what only another tenant's traffic causes (that is the engine's queue), or keep a reservation past its request.
//!
//! A request that brings a body passes twice. It *enters* before a byte of the body is read ([`Gate::enter`]): what is refused there
//! costs nothing. From then on it runs, until its answer was accepted or its client left, and counts among the minute's requests
//! whatever becomes of it, but for being told to come again. Once its prompts are known it *reserves* tokens ([`AdmittedRequest::reserve`]).
//!
//! Tokens are reserved before a request runs (its prompt, and what it may generate: `max_tokens` where it says, else
//! [`TOKENS_EXPECTED`]) and settled after it with what it used, so a minute's tokens are neither exceeded by many requests
//! at once nor lost to requests that ended early. A request larger than a whole minute's tokens waits for a full minute and
//! leaves a debt. Both budgets refill steadily (a token bucket of one minute's size), so no boundary of a minute is worth waiting for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use folio_api::ApiError;
use parking_lot::{Mutex, MutexGuard};

use crate::tenancy::bucket::{Bucket, Refusals};
use crate::trace_context::TraceContext;

/// Tokens reserved for a choice that says no limit.
pub(crate) const TOKENS_EXPECTED: u32 = 256;

/// What an operator allows a tenant. `None`: not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TenantLimits {
    pub requests_per_minute: Option<u32>,
    /// Prompt and generated tokens, cached ones too.
    pub tokens_per_minute: Option<u64>,
    /// Requests between their arrival and the last byte of their answer: of those that bring a body, and of those that bring none.
    pub max_concurrent_requests: Option<u32>,
    /// Prompts that wait for their first token.
    pub max_queued_requests: Option<u32>,
    /// Prompt and answer of one sequence.
    pub max_context: Option<u32>,
}

#[derive(Debug)]
struct LimitCounts {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    refusals: Refusals,
    running: u32,
    /// Those that bring no body.
    looking: u32,
    waiting: u32,
}

/// One tenant's.
#[derive(Debug)]
pub(crate) struct Gate {
    limits: TenantLimits,
    counts: Mutex<LimitCounts>,
    /// Bytes that its requests hold (`unread`).
    pub unread: AtomicUsize,
    /// Its requests that are being answered (`answering`).
    pub answering: AtomicUsize,
}

/// What a request brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    Prompts,
    /// Work that no prompt is.
    Body,
    /// It only looks at something, or drops it: it has places of its own, so that whoever's prompts take all places can still ask what became
    /// of them, and is not among the minute's.
    Nothing,
}

/// What a request is going to need.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub prompts: u32,
    pub prompt_tokens: u64,
    /// Of all choices together, at most or as may be expected.
    pub output_tokens: u64,
}

/// A request that was let in. It runs while anybody holds this.
#[derive(Debug)]
pub(crate) struct AdmittedRequest {
    gate: Arc<Gate>,
    brings: Payload,
    /// It does not count among the minute's requests.
    given_back: AtomicBool,
    /// Whose trace it is part of.
    pub trace: OnceLock<Box<TraceContext>>,
}

/// What is reserved for a request. Dropping it without [`Permit::settle`] gives everything back that was not used.
#[derive(Debug)]
pub(crate) struct Permit {
    entry: Arc<AdmittedRequest>,
    /// Of the tokens' budget.
    reserved: f64,
    waiting: u32,
    settled: bool,
}

impl Gate {
    pub fn new(limits: TenantLimits, now: Instant) -> Self {
        let counts = LimitCounts {
            requests: limits.requests_per_minute.map(|limit| Bucket::new(limit.into(), now)),
            tokens: limits.tokens_per_minute.map(|limit| Bucket::new(limit as f64, now)),
            refusals: Refusals::new(now),
            running: 0,
            looking: 0,
            waiting: 0,
        };
        Self {
            limits,
            counts: Mutex::new(counts),
            unread: AtomicUsize::new(0),
            answering: AtomicUsize::new(0),
        }
    }

    pub fn limits(&self) -> &TenantLimits {
        &self.limits
    }

    fn counts(&self) -> MutexGuard<'_, LimitCounts> {
        self.counts.lock()
    }

    /// Lets a request in, or says what it would exceed and when to come again.
    pub fn enter(self: &Arc<Self>, brings: Payload, now: Instant) -> Result<Arc<AdmittedRequest>, ApiError> {
        let limits = &self.limits;
        let mut counts = self.counts();
        let LimitCounts { requests, running, looking, waiting, .. } = &mut *counts;
        let running = if brings == Payload::Nothing { looking } else { running };
        if let Some(most) = limits.max_concurrent_requests.filter(|most| *running >= *most) {
            let message = format!("{running} of your requests are running, and {most} may run at once.");
            return Err(limited("requests", message, Duration::from_secs(1)));
        }
        if brings == Payload::Prompts {
            self.check_waiting(*waiting, 1)?;
        }
        if let Some(bucket) = requests.as_mut().filter(|_| brings != Payload::Nothing) {
            bucket.refill(now);
            if bucket.left < 1.0 {
                let message = format!(
                    "Rate limit reached: {} requests per minute.",
                    limits.requests_per_minute.unwrap_or(0)
                );
                return Err(limited("requests", message, bucket.wait(1.0)));
            }
            bucket.left -= 1.0;
        }
        *running += 1;
        // What was not counted is not given back.
        let given_back = AtomicBool::new(brings == Payload::Nothing);
        Ok(Arc::new(AdmittedRequest { gate: self.clone(), brings, given_back, trace: OnceLock::new() }))
    }

    /// How long a request waits that is told to come again.
    pub fn refusal_delay(&self, now: Instant) -> Option<Duration> {
        self.counts().refusals.delay(now)
    }

    /// Whether so many prompts more may wait.
    fn check_waiting(&self, waiting: u32, more: u32) -> Result<(), ApiError> {
        let in_line = waiting.saturating_add(more);
        match self.limits.max_queued_requests.filter(|most| in_line > *most && waiting > 0) {
            None => Ok(()),
            Some(most) => {
                let message = format!(
                    "{waiting} of your prompts are waiting for their first token, and {most} may wait at once."
                );
                Err(limited("requests", message, Duration::from_secs(1)))
            }
        }
    }

    fn reserve(&self, need: Need, now: Instant) -> Result<f64, ApiError> {
        let mut counts = self.counts();
        let LimitCounts { tokens, waiting, .. } = &mut *counts;
        self.check_waiting(*waiting, need.prompts)?;
        let mut reserved = 0.0;
        if let Some(bucket) = tokens {
            bucket.refill(now);
            let wanted = need.prompt_tokens.saturating_add(need.output_tokens);
            reserved = (wanted as f64).min(bucket.per_minute);
            if bucket.left < reserved {
                let message = format!(
                    "Rate limit reached: {} tokens per minute, {} left; this request may need {wanted} ({} in the prompt).",
                    bucket.per_minute,
                    bucket.left.max(0.0) as u64,
                    need.prompt_tokens
                );
                return Err(limited("tokens", message, bucket.wait(reserved)));
            }
            bucket.left -= reserved;
        }
        *waiting += need.prompts;
        Ok(reserved)
    }

    /// OpenAI's headers that tell what is left; nothing of what is not limited.
    pub fn tell(&self, headers: &mut HeaderMap, now: Instant) {
        let mut counts = self.counts();
        let LimitCounts { requests, tokens, .. } = &mut *counts;
        for (what, bucket) in [("requests", requests), ("tokens", tokens)] {
            let Some(bucket) = bucket else { continue };
            bucket.refill(now);
            let reset = bucket.wait(bucket.per_minute);
            for (name, value) in [
                ("limit", bucket.per_minute.to_string()),
                ("remaining", (bucket.left.max(0.0) as u64).to_string()),
                ("reset", format!("{:.3}s", reset.as_secs_f64())),
            ] {
                let name = HeaderName::from_bytes(format!("x-ratelimit-{name}-{what}").as_bytes());
                if let (Ok(name), Ok(value)) = (name, HeaderValue::from_str(&value)) {
                    headers.insert(name, value);
                }
            }
        }
    }
}

impl AdmittedRequest {
    /// Reserves what the request's prompts need, or says what they would exceed and when to come again. All or nothing.
    pub fn reserve(self: &Arc<Self>, need: Need, now: Instant) -> Result<Permit, ApiError> {
        match self.gate.reserve(need, now) {
            Ok(reserved) => {
                Ok(Permit { entry: self.clone(), reserved, waiting: need.prompts, settled: false })
            }
            Err(refused) => {
                self.give_back();
                Err(refused)
            }
        }
    }

    /// It was told to come again: as if it had never come.
    pub fn give_back(&self) {
        if self.given_back.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(bucket) = &mut self.gate.counts().requests {
            bucket.back(1.0);
        }
    }
}

impl Drop for AdmittedRequest {
    fn drop(&mut self) {
        let mut counts = self.gate.counts();
        match self.brings {
            Payload::Nothing => counts.looking -= 1,
            Payload::Prompts | Payload::Body => counts.running -= 1,
        }
    }
}

impl Permit {
    /// One of the request's prompts does not wait any more.
    pub fn started(&mut self) {
        if self.waiting > 0 {
            self.waiting -= 1;
            self.entry.gate.counts().waiting -= 1;
        }
    }

    /// The request is over and used this many tokens.
    pub fn settle(mut self, used: u64) {
        self.settled = true;
        if let Some(bucket) = &mut self.entry.gate.counts().tokens {
            bucket.back(self.reserved - used as f64);
        }
    }

    /// The engine did not take it.
    pub fn refused(self) {
        self.entry.give_back();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut counts = self.entry.gate.counts();
        counts.waiting -= self.waiting;
        if let Some(bucket) = counts.tokens.as_mut().filter(|_| !self.settled) {
            bucket.back(self.reserved);
        }
    }
}

fn limited(kind: &'static str, message: String, wait: Duration) -> ApiError {
    let seconds = wait.as_secs_f64().ceil().clamp(1.0, 86_400.0) as u32;
    ApiError {
        code: Some("rate_limit_exceeded"),
        retry_after_s: Some(seconds),
        ..ApiError::new(429, kind, format!("{message} Try again in {seconds} s."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(limits: TenantLimits) -> (Arc<Gate>, Instant) {
        let now = Instant::now();
        (Arc::new(Gate::new(limits, now)), now)
    }

    /// Lets a request in with what it needs.
    fn admit(gate: &Arc<Gate>, need: Need, now: Instant) -> Result<Permit, ApiError> {
        gate.enter(Payload::Prompts, now)?.reserve(need, now)
    }

    fn need(prompt_tokens: u64, output_tokens: u64) -> Need {
        Need { prompts: 1, prompt_tokens, output_tokens }
    }

    fn seconds(now: Instant, seconds: f64) -> Instant {
        now + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn requests_refill_steadily_and_say_when() {
        let (gate, now) = gate(TenantLimits { requests_per_minute: Some(6), ..Default::default() });
        (0..6).for_each(|_| drop(admit(&gate, need(1, 1), now).unwrap()));
        let refused = admit(&gate, need(1, 1), now).unwrap_err();
        assert_eq!((refused.status, refused.kind, refused.retry_after_s), (429, "requests", Some(10)));
        assert!(admit(&gate, need(1, 1), seconds(now, 9.9)).is_err());
        assert!(admit(&gate, need(1, 1), seconds(now, 10.1)).is_ok());
        assert!(admit(&gate, need(1, 1), seconds(now, 10.1)).is_err(), "one at a time");
        let admitted = (0..20).filter(|_| admit(&gate, need(1, 1), seconds(now, 1000.0)).is_ok()).count();
        assert_eq!(admitted, 6, "idle time is saved up for one minute");
    }

    #[test]
    fn who_comes_again_at_once_waits_and_never_longer_than_a_second() {
        let (gate, now) = gate(TenantLimits::default());
        let delays = |times: usize, now| (0..times).map(|_| gate.refusal_delay(now)).collect::<Vec<_>>();
        assert!(delays(6000, now).iter().all(Option::is_none));
        let ms = |delays: Vec<Option<Duration>>| {
            delays.iter().map(|delay| delay.unwrap_or_default().as_millis()).collect::<Vec<_>>()
        };
        assert_eq!(ms(delays(3, now)), [10, 20, 30], "a hundred a second");
        assert_eq!(ms(delays(200, now)).last(), Some(&1000));
        assert_eq!(ms(delays(1, seconds(now, 0.5))), [510]);
        assert_eq!(ms(delays(150, seconds(now, 2.5)))[148..], [0, 10]);
    }

    #[test]
    fn tokens_are_reserved_and_settled_with_what_was_used() {
        let (gate, now) = gate(TenantLimits { tokens_per_minute: Some(1000), ..Default::default() });
        let first = admit(&gate, need(300, 300), now).unwrap();
        let refused = admit(&gate, need(300, 300), now).unwrap_err();
        assert_eq!(
            (refused.kind, refused.retry_after_s),
            ("tokens", Some(12)),
            "200 of 600 at 1000 a minute"
        );
        first.settle(310);
        let second = admit(&gate, need(300, 300), now).expect("690 are left");
        drop(second);
        assert!(admit(&gate, need(300, 390), now).is_ok(), "what was not used is back");
    }

    #[test]
    fn a_request_larger_than_a_minute_waits_for_a_full_one_and_leaves_a_debt() {
        let (gate, now) = gate(TenantLimits { tokens_per_minute: Some(1000), ..Default::default() });
        let large = admit(&gate, need(5000, 0), now).expect("nothing was used yet");
        assert!(admit(&gate, need(1, 0), now).is_err());
        large.settle(5000);
        assert_eq!(
            admit(&gate, need(100, 0), now).unwrap_err().retry_after_s,
            Some(246),
            "4,100 at 1,000 a minute"
        );
        assert!(admit(&gate, need(100, 0), seconds(now, 247.0)).is_ok());
    }

    #[test]
    fn running_and_waiting_are_counted_until_they_end() {
        let limits = TenantLimits {
            max_concurrent_requests: Some(3),
            max_queued_requests: Some(2),
            ..Default::default()
        };
        let (gate, now) = gate(limits);
        let mut one = admit(&gate, need(1, 1), now).unwrap();
        let two = admit(&gate, need(1, 1), now).unwrap();
        assert!(admit(&gate, need(1, 1), now).unwrap_err().message.contains("waiting"));
        one.started();
        one.started();
        let three = admit(&gate, need(1, 1), now).unwrap();
        drop(two);
        let four = admit(&gate, need(1, 1), now).unwrap();
        assert!(admit(&gate, need(1, 1), now).unwrap_err().message.contains("running"));
        drop((one, three, four));
        let several = Need { prompts: 5, ..need(1, 1) };
        assert!(admit(&gate, several, now).is_ok(), "alone it may be as large as it likes");
        let counts = gate.counts();
        assert_eq!((counts.running, counts.waiting), (0, 0));
    }

    #[test]
    fn whoever_only_looks_has_places_of_its_own_and_no_minute() {
        let limits = TenantLimits {
            max_concurrent_requests: Some(2),
            requests_per_minute: Some(3),
            ..Default::default()
        };
        let (gate, now) = gate(limits);
        let running = [gate.enter(Payload::Prompts, now).unwrap(), gate.enter(Payload::Body, now).unwrap()];
        let looks: Vec<_> = (0..).map_while(|_| gate.enter(Payload::Nothing, now).ok()).collect();
        assert_eq!(looks.len(), 2);
        looks[0].give_back();
        drop((looks, running));
        assert!((0..9).all(|_| gate.enter(Payload::Nothing, now).is_ok()));
        assert!(gate.enter(Payload::Body, now).is_ok() && gate.enter(Payload::Body, now).is_err());
        let counts = gate.counts();
        assert_eq!((counts.running, counts.looking), (0, 0));
    }

    #[test]
    fn whoever_is_refused_took_nothing() {
        let limits =
            TenantLimits { requests_per_minute: Some(2), tokens_per_minute: Some(100), ..Default::default() };
        let (gate, now) = gate(limits);
        admit(&gate, need(60, 0), now).unwrap().settle(60);
        (0..5).for_each(|_| assert_eq!(admit(&gate, need(60, 0), now).unwrap_err().kind, "tokens"));
        admit(&gate, need(40, 0), now).unwrap().refused();
        admit(&gate, need(40, 0), now).expect("a request and its tokens are left").settle(40);
        let mut headers = HeaderMap::new();
        gate.tell(&mut headers, now);
        let header = |name: &str| headers[name].to_str().unwrap();
        assert_eq!(header("x-ratelimit-limit-tokens"), "100");
        assert_eq!(header("x-ratelimit-remaining-tokens"), "0");
        assert_eq!(header("x-ratelimit-remaining-requests"), "0");
        assert_eq!(header("x-ratelimit-reset-requests"), "60.000s");
    }

    #[test]
    fn without_limits_nothing_is_refused_and_nothing_told() {
        let (gate, now) = gate(TenantLimits::default());
        let tickets: Vec<_> = (0..1000).map(|_| admit(&gate, need(1 << 40, 1 << 20), now).unwrap()).collect();
        drop(tickets);
        let mut headers = HeaderMap::new();
        gate.tell(&mut headers, now);
        assert!(headers.is_empty());
    }
}
