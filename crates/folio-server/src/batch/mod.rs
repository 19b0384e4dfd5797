//! Files of requests, kept and run when there is time; their routes and running are `endpoints/batches`.
//!
//! Owns: what is kept, and how much runs at once. A line is prepared and run by the code of its own route, for the tenant
//! that made the batch, behind every interactive request in the engine's queue ([`CLASS`], [`PRIORITY`]), and only so many of all batches'
//! lines at once: what decodes beside an answer slows it, so their number bounds what interactive clients can notice. Must never:
//! let a tenant see what is another's, or lose a line: whatever ends, every line has one result, or the batch goes on.
//!
//! | file | noun |
//! |---|---|
//! | `lines` | the lines of input and output files |
//! | `multipart` | the form in which a file is uploaded |
//! | `records` | what is kept of a file and of a batch |
//! | `results` | what a batch that runs has written |
//! | `store` | files and batches, in memory or in a folder |

pub(crate) mod config;
pub(crate) mod lines;
pub(crate) mod multipart;
pub(crate) mod records;
pub(crate) mod results;
pub(crate) mod store;

use std::sync::Arc;

use tokio::sync::Notify;

use crate::error::ServerError;
use crate::threads::fair_queue::FairQueue;
use config::BatchConfig;
use store::Store;

/// Added to the class of a batch's tenant for its lines: behind every tenant's interactive requests.
pub const CLASS: i32 = 1 << 20;
/// Of a batch's lines in the engine, where lower runs first. What a line says itself is added, within [`PRIORITY_SPAN`].
pub const PRIORITY: i32 = 1 << 20;
pub const PRIORITY_SPAN: i32 = 1 << 10;
/// OpenAI's only window.
pub const WINDOW_S: u64 = 24 * 3600;
/// Files of batches are kept so long where nobody says otherwise.
pub const KEPT_S: u64 = 30 * 24 * 3600;

/// Everything about batches that requests share.
pub(crate) struct Batches {
    pub store: Store,
    /// One for each line that may run.
    pub turns: FairQueue<Arc<str>>,
    /// The server drains: no line is begun any more.
    pub stopping: Notify,
}

impl Batches {
    pub fn open(config: &BatchConfig) -> Result<Self, ServerError> {
        Ok(Self {
            store: Store::open(config)?,
            // Lines wait in their batches, of which there are so many.
            turns: FairQueue::new(config.limits.in_flight, usize::MAX),
            stopping: Notify::new(),
        })
    }

    /// After `draining` was set.
    pub fn stop(&self) {
        self.stopping.notify_waiters();
    }
}
