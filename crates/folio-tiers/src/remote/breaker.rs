//! Whether a server is asked at all.
//!
//! | state | asked | becomes |
//! |---|---|---|
//! | closed | yes | open, after [`FAILURES`] failures one after the other |
//! | open | no; after a pause the prober asks whether it answers, the pause doubling each time it does not | half open, when it answers |
//! | half open | yes | closed with the first answer, open with the first failure |
//!
//! Who wants something of the server never pays for finding out that it is back.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{Fault, Objects};

/// One after the other.
const FAILURES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
const PING_LIMIT: Duration = Duration::from_secs(1);

pub struct Breaker {
    name: &'static str,
    state: Mutex<BreakerState>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct BreakerState {
    /// Since the last answer.
    failures: u32,
    /// Why it is not asked.
    open: Option<String>,
    pause: Duration,
    closed: bool,
}

impl Breaker {
    /// `gone`: it is open from the start.
    pub fn new(objects: Arc<dyn Objects>, gone: Option<Fault>) -> std::io::Result<Arc<Self>> {
        let open = gone.map(|fault| fault.to_string());
        let state = BreakerState { failures: 0, open, pause: PAUSE, closed: false };
        let (changed, thread, name) = (Condvar::new(), Mutex::new(None), objects.name());
        let breaker = Arc::new(Self { name, state: Mutex::new(state), changed, thread });
        let probing = breaker.clone();
        let probe = std::thread::Builder::new().name(format!("folio-{name}-probe"));
        let thread = probe.spawn(move || probing.probe(&*objects))?;
        *breaker.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(breaker)
    }

    fn lock(&self) -> MutexGuard<'_, BreakerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn allows(&self) -> bool {
        let state = self.lock();
        state.open.is_none() && !state.closed
    }

    /// Why it is open.
    pub fn reason(&self) -> Option<String> {
        self.lock().open.clone()
    }

    pub fn answered(&self) {
        let mut state = self.lock();
        (state.failures, state.pause) = (0, PAUSE);
    }

    pub fn failed(&self, fault: &Fault) {
        let mut state = self.lock();
        state.failures += 1;
        if state.failures >= FAILURES && state.open.is_none() {
            state.open = Some(fault.to_string());
            tracing::warn!("the KV tier {} is not asked any more until it answers: {fault}", self.name);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Nothing is asked any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // It does nothing but ask.
            let _ = thread.join();
        }
    }

    fn probe(&self, objects: &dyn Objects) {
        let mut state = self.lock();
        while !state.closed {
            if state.open.is_none() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let end = Instant::now() + state.pause;
            while let Some(left) = end.checked_duration_since(Instant::now()).filter(|_| !state.closed) {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.closed {
                return;
            }
            drop(state);
            let answer = objects.ping(PING_LIMIT);
            state = self.lock();
            state.pause = (state.pause * 2).min(PAUSE_MAX);
            match answer {
                Ok(()) => {
                    state.open = None;
                    // Half open: one failure opens it again.
                    state.failures = FAILURES - 1;
                    tracing::info!("the KV tier {} answers again", self.name);
                }
                Err(fault) => state.open = Some(fault.to_string()),
            }
        }
    }
}
