//! [`KvEvents`]: the threads that publish, from their start to their end.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use folio_engine::{EventFeed, Owner};
use folio_kv::TenantId;
use tokio::sync::watch;

use crate::config::KvEventsConfig;
use crate::counts::{Counts, KvEventsStats};
use crate::log::Log;
use crate::sequencer::Sequencer;
use crate::sockets::{Published, Socket, listen};
use crate::tree::Tree;
use crate::wire::Wire;

/// Time for the last messages to leave.
const ENDING: Duration = Duration::from_secs(1);

/// The name of a tenant to the cache (a tenant, a group, a declared prefix) whose blocks are told.
pub type CacheNames = Box<dyn Fn(TenantId) -> Option<Arc<str>> + Send>;

/// The caches that are told, and what their blocks are sealed with off the device.
pub type Owners = Box<dyn Fn() -> Vec<Owner> + Send>;

/// What is to be published, and where from.
#[derive(Clone)]
pub struct EventSource {
    pub config: KvEventsConfig,
    pub feed: Arc<EventFeed>,
}

#[derive(Debug, thiserror::Error)]
pub enum KvEventsError {
    #[error("KV events: {field} {address} cannot be listened on: {error}")]
    Listen { field: &'static str, address: SocketAddr, error: std::io::Error },
    #[error("the threads of KV events could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// Publishes until it is dropped.
pub struct KvEvents {
    feed: Arc<EventFeed>,
    log: Arc<Log>,
    counts: Arc<Counts>,
    endpoint: SocketAddr,
    replay_endpoint: Option<SocketAddr>,
    hwm: u64,
    stop: watch::Sender<bool>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl KvEvents {
    pub fn start(source: &EventSource, told: CacheNames, owners: Owners) -> Result<Self, KvEventsError> {
        let EventSource { config, feed } = source;
        let bind = |field, address: SocketAddr| {
            let listener = TcpListener::bind(address)
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
            listener.map_err(|error| KvEventsError::Listen { field, address, error })
        };
        let serving = bind("endpoint", config.endpoint)?;
        let replays = config.replay_endpoint.map(|address| bind("replay_endpoint", address)).transpose()?;
        let endpoint = serving.local_addr()?;
        let replay_endpoint = replays.as_ref().map(TcpListener::local_addr).transpose()?;
        let log = Arc::new(Log::new(config.buffer_steps, config.buffer_bytes));
        let counts = Arc::new(Counts::default());
        let sequencer = Sequencer {
            feed: feed.clone(),
            log: log.clone(),
            counts: counts.clone(),
            wire: Wire {
                format: config.event_format,
                int_block_hashes: config.int_block_hashes,
                block_tokens: feed.block_tokens(),
            },
            told,
            owners,
            salted: config.tenant_extra_keys,
            tree: Tree::default(),
            known: Default::default(),
            is_rebuilding: false,
        };
        let published = Arc::new(Published {
            log: log.clone(),
            counts: counts.clone(),
            topic: config.topic.clone().into_bytes(),
            hwm: config.hwm,
            replay_topic: config.replay_topic,
        });
        let (stop, stopped) = watch::channel(false);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let sockets = [(Some(serving), Socket::Pub), (replays, Socket::Router)];
        let sockets = move || runtime.block_on(serve(sockets, published, stopped));
        let threads = vec![
            Builder::new().name("folio-kv-events".into()).spawn(move || sequencer.run())?,
            Builder::new().name("folio-kv-zmq".into()).spawn(sockets)?,
        ];
        let (feed, threads) = (feed.clone(), Mutex::new(threads));
        Ok(Self { feed, log, counts, endpoint, replay_endpoint, hwm: config.hwm, stop, threads })
    }

    /// Where it publishes.
    pub fn endpoint(&self) -> SocketAddr {
        self.endpoint
    }

    /// Where it repeats what it published.
    pub fn replay_endpoint(&self) -> Option<SocketAddr> {
        self.replay_endpoint
    }

    pub fn stats(&self) -> KvEventsStats {
        self.counts.stats(self.log.range(), self.log.floor(self.hwm))
    }

    /// Has everything told again to everybody: cleared, then what resides, parents first.
    pub fn republish(&self) {
        self.counts.republish.store(true, Relaxed);
        self.feed.wake();
    }

    /// Tells that everything is cleared, and ends.
    pub fn stop(&self) {
        self.feed.close();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // The first ends with the feed; the second is told behind it. A panic was reported where it happened.
            let _ = thread.join();
            self.stop.send_replace(true);
        }
    }
}

impl Drop for KvEvents {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn serve(
    sockets: [(Option<TcpListener>, Socket); 2],
    published: Arc<Published>,
    mut stopped: watch::Receiver<bool>,
) {
    for (listener, socket) in sockets {
        let Some(listener) = listener else { continue };
        match tokio::net::TcpListener::from_std(listener) {
            Ok(listener) => drop(tokio::spawn(listen(listener, socket, published.clone()))),
            Err(error) => tracing::error!(%error, "KV events are not published"),
        }
    }
    // An error: whoever could stop it is gone.
    let _ = stopped.wait_for(|stopped| *stopped).await;
    let head = published.log.range().1;
    let sent = async {
        while published.counts.is_late(head) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let _ = tokio::time::timeout(ENDING, sent).await;
}
