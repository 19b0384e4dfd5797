//! Weights of adapters, read beside the steps.
//!
//! Owns: the words between the scheduler and whoever reads ([`AdapterOrder`], [`AdapterReport`]), and the engine's thread for that. Must
//! never: decide what is read or what goes (`scheduler/adapters`).

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};

pub use folio_model::adapter::Adapter;

use crate::mailbox::Mailbox;

/// Names the weights of an adapter (LoRA), for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub std::num::NonZeroU32);

/// Where the weights of an adapter are read.
pub trait AdapterSource: Send + Sync {
    /// Of all that decides what it computes ([`Adapter::digest`]).
    fn digest(&self) -> &[u8; 32];

    /// Of its weights in memory.
    fn bytes(&self) -> u64;

    /// Reads the weights, which have this digest and take so many bytes. An error is told to the requests that want them. Blocks.
    fn read(&self) -> Result<Arc<Adapter>, String>;
}

/// Of weights that are in memory anyway.
impl AdapterSource for Arc<Adapter> {
    fn digest(&self) -> &[u8; 32] {
        Adapter::digest(self)
    }

    fn bytes(&self) -> u64 {
        Adapter::bytes(self) as u64
    }

    fn read(&self) -> Result<Arc<Adapter>, String> {
        Ok(self.clone())
    }
}

/// The adapter of a request, whether its weights are in memory or not.
#[derive(Clone)]
pub struct RequestAdapter {
    pub id: AdapterId,
    pub source: Arc<dyn AdapterSource>,
}

impl fmt::Debug for RequestAdapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("RequestAdapter").field(&self.id).finish()
    }
}

/// Of weights that change nothing, for what only counts adapters.
impl From<AdapterId> for RequestAdapter {
    fn from(id: AdapterId) -> Self {
        Self { id, source: Arc::new(Arc::<Adapter>::default()) }
    }
}

/// An adapter whose weights are in memory.
#[derive(Clone, Debug)]
pub struct ResidentAdapter {
    pub id: AdapterId,
    pub weights: Arc<Adapter>,
}

/// A name stands for the same weights for ever.
impl PartialEq for ResidentAdapter {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

/// What the scheduler wants done about weights, outside the steps.
#[derive(Clone, Debug)]
pub enum AdapterOrder {
    /// To be read: it ends with a report.
    Read(RequestAdapter),
    /// To be freed, as nobody uses them any more: not on the engine's thread, for they are large.
    Free(Arc<Adapter>),
}

/// What became of an [`AdapterOrder::Read`].
#[derive(Clone, Debug)]
pub struct AdapterReport {
    pub id: AdapterId,
    /// `Err`: why its requests end.
    pub weights: Result<Arc<Adapter>, String>,
}

impl AdapterOrder {
    /// Does what is wanted. Blocks.
    pub fn carry_out(self) -> Option<AdapterReport> {
        let Self::Read(RequestAdapter { id, source }) = self else { return None };
        let read = catch_unwind(AssertUnwindSafe(|| source.read()));
        let weights = read.unwrap_or_else(|_| Err("reading the weights of its adapter panicked".into()));
        Some(AdapterReport { id, weights })
    }
}

/// Carries orders out in their order, on a thread that ends with this.
pub(crate) struct AdapterLoader(mpsc::Sender<AdapterOrder>);

impl AdapterLoader {
    pub fn start(mailbox: Arc<Mailbox>) -> std::io::Result<Self> {
        let (orders, taken) = mpsc::channel::<AdapterOrder>();
        let carry_out = move || {
            taken
                .into_iter()
                .filter_map(AdapterOrder::carry_out)
                .for_each(|report| mailbox.report_adapter(report));
        };
        std::thread::Builder::new().name("folio-adapters".into()).spawn(carry_out)?;
        Ok(Self(orders))
    }

    /// Bounded by the adapters that are in memory or being read.
    pub fn order(&self, order: AdapterOrder) {
        // The thread takes orders as long as there is somebody to send them.
        let _ = self.0.send(order);
    }
}
