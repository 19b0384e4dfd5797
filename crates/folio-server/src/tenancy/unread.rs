//! What the server holds for requests, in bytes: of one, of its tenant, and of all.
//!
//! Owns: the counts, and the verdict that a request holds too much or its client accepts nothing. Must never: wait; count events.
//!
//! Counted are bodies as they arrive and prompts as token ids ([`HeldBytes`]); and of answers that nobody has accepted yet ([`Unread`]): events that the engine delivered and the server has not looked at, frames of a stream that its client has not
//! accepted, and what is gathered of an answer that is not streamed, at what it takes in memory and will take as JSON. A request is over when it holds
//! more than one may; when it holds more than [`FLOOR`] and its tenant more than all that is free (Choudhury and Hahne, *Dynamic
//! queue length thresholds for shared-memory packet switches*, 1998, so that one tenant takes half of the memory at most and leaves
//! the others a half of the rest); or when its client has accepted nothing for the time of patience while a frame waited. Whoever reads holds less
//! than the floor and is never over because of others. Memory is at most the limit of all, and the floor of every request.
//!
//! Cost: three atomic additions.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use folio_engine::Event;
use folio_engine::request::TokenLogprobs;

use crate::tenancy::gate::Gate;
use folio_api::ApiError;

/// Bytes that every request may hold, whatever the others do.
pub(crate) const FLOOR: usize = 64 << 10;
/// A token of a gathered answer: its id, its text, twice, and the pieces it may begin.
const TOKEN: usize = 96;
/// An entry of log probabilities of a gathered answer: as it is, and as JSON with its text and bytes.
const ENTRY: usize = 144;
/// A value of a vector: as it is, and as JSON.
const VALUE: usize = 4 + 12;

/// What all requests together may hold: bodies, prompts, and answers that were not accepted yet.
pub(crate) struct Budget {
    request: usize,
    all: usize,
    patience: Duration,
    held: AtomicUsize,
}

impl Budget {
    /// Bytes of one request, and of all; how long a client may accept nothing.
    pub fn new(request: usize, all: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self { request, all, patience, held: AtomicUsize::new(0) })
    }

    /// Bytes held now.
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    /// Nothing yet, of a request of this tenant.
    pub fn hold(self: &Arc<Self>, tenant: &Arc<Gate>) -> HeldBytes {
        HeldBytes { budget: self.clone(), tenant: tenant.clone(), bytes: 0 }
    }

    /// Nothing yet, of an answer to this tenant.
    pub fn answer(self: &Arc<Self>, tenant: &Arc<Gate>) -> Arc<Unread> {
        Arc::new(Unread {
            budget: self.clone(),
            tenant: tenant.clone(),
            held: AtomicUsize::new(0),
            began: Instant::now(),
            waiting: AtomicU64::new(0),
            over: AtomicU8::new(0),
        })
    }
}

/// Bytes of a request's body or prompts, until it is dropped.
pub(crate) struct HeldBytes {
    budget: Arc<Budget>,
    tenant: Arc<Gate>,
    bytes: usize,
}

impl HeldBytes {
    /// Counts more, or says that there is no room for it now.
    pub fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let add = |count: &AtomicUsize| count.fetch_add(bytes, Relaxed) + bytes;
        let (tenant, all) = (add(&self.tenant.unread), add(&self.budget.held));
        self.bytes += bytes;
        if self.bytes > FLOOR && tenant > self.budget.all.saturating_sub(all) {
            let message = "Too much of your requests and their answers is held here at once. Send fewer or shorter ones at a time.";
            return Err(ApiError { code: Some("too_much_in_flight"), ..ApiError::busy(message, 1) });
        }
        Ok(())
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.tenant.unread.fetch_sub(self.bytes, Relaxed);
        self.budget.held.fetch_sub(self.bytes, Relaxed);
    }
}

/// What one request holds. The last who has a hand in it gives back what is left.
pub(crate) struct Unread {
    budget: Arc<Budget>,
    tenant: Arc<Gate>,
    held: AtomicUsize,
    began: Instant,
    /// Since when frames wait and none was accepted, microseconds after `began`, + 1; 0: none waits.
    waiting: AtomicU64,
    over: AtomicU8,
}

const REQUEST: u8 = 1;
const ALL: u8 = 2;
const TIME: u8 = 3;

impl Unread {
    /// Counts bytes that are held from now on. False: the request is over.
    pub fn hold(&self, bytes: usize) -> bool {
        let add = |count: &AtomicUsize| count.fetch_add(bytes, Relaxed) + bytes;
        let (own, tenant, all) = (add(&self.held), add(&self.tenant.unread), add(&self.budget.held));
        if own > self.budget.request {
            self.end(REQUEST);
        } else if own > FLOOR && tenant > self.budget.all.saturating_sub(all) {
            self.end(ALL);
        }
        !self.is_over()
    }

    /// Bytes that were held.
    pub fn release(&self, bytes: usize) {
        for count in [&self.held, &self.tenant.unread, &self.budget.held] {
            count.fetch_sub(bytes, Relaxed);
        }
    }

    /// An event on its way from the engine. False: there is no use in more of them.
    pub fn delivered(&self, event: &Event) -> bool {
        let since = self.waiting.load(Relaxed);
        if since > 0 && self.began.elapsed() > self.budget.patience + Duration::from_micros(since - 1) {
            self.end(TIME);
        }
        self.hold(event_bytes(event))
    }

    /// The client accepted a frame, or the first came; `more`: frames wait.
    pub fn accepted(&self, more: bool) {
        let now = if more { self.began.elapsed().as_micros() as u64 + 1 } else { 0 };
        self.waiting.store(now, Relaxed);
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Relaxed) != 0
    }

    fn end(&self, why: u8) {
        // The first reason counts.
        let _ = self.over.compare_exchange(0, why, Relaxed, Relaxed);
    }

    /// What the client is told, if it still listens.
    pub fn refusal(&self) -> ApiError {
        let Budget { request, patience, .. } = *self.budget;
        let code = Some("too_much_unread");
        match self.over.load(Relaxed) {
            TIME => {
                let message = format!("The client accepted nothing for {} s.", patience.as_secs_f64());
                let status = 408;
                ApiError { code, ..ApiError::new(status, "timeout_error", message) }
            }
            REQUEST => {
                let message = format!(
                    "More than {request} bytes of this answer were waiting to be read, which is all that this server holds for one \
                     request. Read faster, stream, or ask for fewer tokens, choices or log probabilities."
                );
                ApiError { code, ..ApiError::bad_request(message) }
            }
            _ => {
                let message = "Too much of your answers is waiting to be read. Read faster, or send fewer requests at once.";
                ApiError { code, ..ApiError::unavailable(message, 1) }
            }
        }
    }
}

impl Drop for Unread {
    fn drop(&mut self) {
        self.release(self.held.load(Relaxed));
    }
}

/// What an event takes on its way.
pub(crate) fn event_bytes(event: &Event) -> usize {
    let scored = |entry: &TokenLogprobs| size_of_val(entry) + entry.top.capacity() * size_of::<(u32, f32)>();
    size_of::<(usize, Event, Instant)>()
        + match event {
            Event::Prompt { prompt_logprobs, .. } => prompt_logprobs.iter().map(scored).sum(),
            Event::Token { token, .. } => token.logprobs.as_ref().map_or(0, scored),
            Event::Pooled { vector } => size_of_val(vector.as_slice()),
            Event::Finished { error, .. } => error.as_ref().map_or(0, |error| error.len()),
        }
}

/// What a token takes in an answer that is gathered.
pub(crate) fn gathered_bytes(logprobs: Option<&TokenLogprobs>) -> usize {
    TOKEN + logprobs.map_or(0, |logprobs| ENTRY * (1 + logprobs.top.len()))
}

/// What a vector takes until it is answered.
pub(crate) fn gathered_vector_bytes(vector: &[f32]) -> usize {
    VALUE * vector.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::gate::TenantLimits;

    fn budget(request: usize, all: usize) -> Arc<Budget> {
        Budget::new(request, all, Duration::from_secs(120))
    }

    fn tenant() -> Arc<Gate> {
        Arc::new(Gate::new(TenantLimits::default(), Instant::now()))
    }

    #[test]
    fn a_request_holds_what_one_may_and_gives_everything_back() {
        let (budget, tenant) = (budget(1000, 1 << 30), tenant());
        let unread = budget.answer(&tenant);
        assert!((0..10).all(|_| unread.hold(100)));
        unread.release(500);
        assert!(unread.hold(500) && !unread.hold(1) && unread.is_over());
        unread.release(900);
        assert!(!unread.hold(1), "over is over");
        assert_eq!(unread.refusal().status, 400);
        drop(unread);
        assert_eq!((budget.held(), tenant.unread.load(Relaxed)), (0, 0));
    }

    #[test]
    fn one_tenants_hoarders_leave_half_to_the_others_and_nobody_who_reads_is_over() {
        let all = 64 * FLOOR;
        let (budget, hoarder, other) = (budget(usize::MAX, all), tenant(), tenant());
        let held: Vec<_> = (0..1000).map(|_| budget.answer(&hoarder)).collect();
        let mut taken = vec![0; held.len()];
        for _ in 0..64 {
            for (unread, taken) in held.iter().zip(&mut taken) {
                if !unread.is_over() && *taken < 8 * FLOOR {
                    unread.hold(FLOOR / 64);
                    *taken += FLOOR / 64;
                }
            }
        }
        // 1,000 requests of at most the floor fill far more than the limit, and none is over for it.
        assert!(held.iter().all(|unread| !unread.is_over()));
        drop(held);
        let held: Vec<_> = (0..8).map(|_| budget.answer(&hoarder)).collect();
        for _ in 0..all / FLOOR {
            held.iter().for_each(|unread| {
                let _ = !unread.is_over() && unread.hold(FLOOR);
            });
        }
        assert!(held.iter().all(|unread| unread.is_over()) && budget.held() <= all / 2 + 8 * FLOOR);
        assert_eq!(held[0].refusal().status, 503);
        let reader = budget.answer(&other);
        assert!((0..all / 8 / FLOOR).all(|_| reader.hold(FLOOR)), "the other has room for much");
    }

    #[test]
    fn patience_is_with_frames_that_wait_and_starts_again_with_every_one_accepted() {
        let budget = Budget::new(usize::MAX, usize::MAX, Duration::from_millis(40));
        let unread = budget.answer(&tenant());
        let event = Event::Pooled { vector: vec![0.0; 4] };
        let pause = || std::thread::sleep(Duration::from_millis(60));
        pause();
        assert!(unread.delivered(&event), "nothing waits");
        unread.accepted(true);
        assert!(unread.delivered(&event));
        unread.accepted(false);
        pause();
        assert!(unread.delivered(&event));
        unread.accepted(true);
        pause();
        assert!(!unread.delivered(&event));
        assert_eq!(unread.refusal().status, 408);
    }

    #[test]
    fn log_probabilities_count() {
        let scored = TokenLogprobs { top: vec![(1, -1.0); 20], ..Default::default() };
        let token = |logprobs| folio_engine::request::Token { id: 1, us: 0.0, logprobs };
        let bare = event_bytes(&Event::Token { choice: 0, token: token(None) });
        let full = event_bytes(&Event::Token { choice: 0, token: token(Some(scored.clone())) });
        assert!(full >= bare + 20 * 8);
        assert!(gathered_bytes(Some(&scored)) > gathered_bytes(None) + 20 * 100);
    }
}
