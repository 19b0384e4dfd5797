//! How much the server does and holds at once, and whether it takes more.
//!
//! Owns: generations in flight, text work and who is next, bytes that requests hold, and the limits of all of them. Must never: know
//! what a request is about.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use folio_api::ApiError;
use folio_kv::TenantId;
use folio_text::work::giving_way;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::Notify;

use crate::config::Limits;
use crate::http::refused::RefusedPeers;
use crate::tenancy::answering::Answering;
use crate::tenancy::gate::Gate;
use crate::tenancy::unread::Budget;
use crate::threads::{FILES, Pool, WorkLost};

/// Pieces of work on files that wait in line; 429 above this.
const FILES_WAITING: usize = 512;

/// See the module documentation.
pub(crate) struct Load {
    pub limits: Limits,
    /// Parsing, rendering, tokenizing, long answers.
    pub text: Pool,
    /// Whatever is read from or written to files that tenants have here.
    pub files: Pool,
    /// Bytes that are held for requests.
    pub unread: Arc<Budget>,
    pub in_flight: Arc<InFlight>,
    /// Requests that take a connection each.
    pub answering: Arc<Answering>,
    /// Of whoever asks what needs no key: what is held for all of them together.
    pub strangers: Arc<Gate>,
    /// Who is refused again and again.
    pub refused: RefusedPeers,
    /// No new generation is taken.
    draining: AtomicBool,
    panics: Counter,
}

/// Generations between their request's arrival and the engine's last word about them.
#[derive(Default)]
pub(crate) struct InFlight {
    count: AtomicUsize,
    changed: Notify,
}

/// Counts as one while it lives.
pub(crate) struct Counted(Arc<InFlight>);

impl Load {
    /// `panics`: where work is counted that was not done to its end.
    pub fn new(limits: Limits, panics: Counter) -> Self {
        Self {
            text: Pool::new(limits.text_threads, limits.text_waiting).with_large(limits.text_large_bytes),
            files: Pool::new(FILES, FILES_WAITING),
            unread: Budget::new(limits.unread_bytes, limits.in_flight_bytes, limits.write_timeout),
            in_flight: Arc::default(),
            answering: Answering::new(limits.connections),
            strangers: Arc::new(Gate::new(Default::default(), Instant::now())),
            refused: RefusedPeers::new(Instant::now()),
            draining: AtomicBool::new(false),
            panics,
            limits,
        }
    }

    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Refuses what would begin now, while the server drains.
    pub fn check_not_draining(&self) -> Result<(), ApiError> {
        let message = "This server is shutting down; send the request to another one.";
        if self.is_draining() { Err(ApiError::unavailable(message, 5)) } else { Ok(()) }
    }

    /// Runs `work` (parsing, rendering, tokenizing) on a text thread, off the event loop, when it is the tenant's turn. `bytes`:
    /// about how many are worked on.
    pub async fn off_thread<T: Send + 'static>(
        &self,
        tenant: TenantId,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let done = self.text.run(tenant, bytes, || giving_way(work)).await;
        let done = done.map_err(|_| ApiError::busy("Too many requests are being read and tokenized.", 1))?;
        done.unwrap_or_else(|WorkLost| {
            self.panics.inc();
            Err(ApiError::internal("preparing the request failed"))
        })
    }

    /// Runs `work` that reads or writes files on a thread for that, when it is the tenant's turn.
    pub async fn with_files<T: Send + 'static>(
        &self,
        tenant: TenantId,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let done = self.files.run(tenant, bytes, work).await;
        let done = done.map_err(|_| ApiError::busy("Too many requests wait for files.", 1))?;
        done.unwrap_or_else(|WorkLost| {
            self.panics.inc();
            Err(ApiError::internal("working on a file failed"))
        })
    }
}

impl InFlight {
    pub fn enter(self: &Arc<Self>) -> Counted {
        self.count.fetch_add(1, Ordering::AcqRel);
        Counted(self.clone())
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns when nothing is in flight.
    pub async fn idle(&self) {
        loop {
            // Registered before looking, so that no change is missed.
            let changed = self.changed.notified();
            if self.count() == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.changed.notify_waiters();
        }
    }
}
