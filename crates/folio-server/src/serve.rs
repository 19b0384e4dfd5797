//! Listening, accepting, and ending well.
//!
//! States: *serving* -> *draining* (first signal: new generations get 503, running ones finish, everything else still
//! answers) -> *closing* (nothing runs any more, or patience ended: idle connections close, the rest gets a moment) ->
//! over. A second signal, or the end of patience, goes to *ending*: the engine is told to stop, which ends every request with an
//! error, and the errors get a moment to leave before the sockets close.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use axum::Router;
use hyper_util::server::graceful::GracefulShutdown;
use prometheus_client::metrics::histogram::Histogram;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;

use crate::app::State;
use crate::config::ServerConfig;
use crate::endpoints::batches;
use crate::engine::App;
use crate::error::ServerError;
use crate::http::tls::{LOOKED_AT_EVERY, Tls};
use crate::listening::{Front, ListeningSocket, bind};
use crate::observability::Observability;
use crate::observability::kv_events;
use crate::observability::usage::SAVED_EVERY;
use crate::observability::why::SAMPLED_EVERY;
use crate::routes;
use crate::threads::{FILES, LOOKUPS, SINGLE};

/// Time for responses to leave after the last request finished.
pub(crate) const CLOSING: Duration = Duration::from_secs(5);
/// Time for running requests to end with an error, and for what they say to leave, once the engine was told to stop.
pub(crate) const ENDING: Duration = Duration::from_secs(2);
/// How often the event loop's lag is measured.
const LAG_EVERY: Duration = Duration::from_millis(100);

/// A configured server that does not listen yet.
pub struct Server {
    state: State,
    tls: Option<Arc<Tls>>,
    metrics_on_admin: bool,
    drain_timeout: Duration,
}

/// The sockets of a server.
pub struct Listeners {
    pub serving: TcpListener,
    /// For operators.
    pub admin: Option<TcpListener>,
}

/// Where it listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub serving: SocketAddr,
    pub admin: Option<SocketAddr>,
    /// Where KV events are published, and repeated.
    pub kv_events: Option<(SocketAddr, Option<SocketAddr>)>,
    /// By HTTPS.
    pub tls: bool,
}

impl Server {
    pub fn new(config: ServerConfig, app: App) -> Result<Self, ServerError> {
        let tls = config.tls.as_ref().map(Tls::open).transpose()?.map(Arc::new);
        let ServerConfig { metrics_on_admin, drain_timeout, .. } = config;
        Ok(Self { state: State::new(&config, app)?, tls, metrics_on_admin, drain_timeout })
    }

    /// The routes of the second listener.
    pub fn admin_router(&self) -> Router {
        routes::admin(&self.state)
    }

    /// Writes what was used to its file, where there is one. A server that listens does so by itself.
    pub fn save_usage(&self) {
        self.state.observability.meters.save();
    }

    /// All routes. Usable without a socket, as a tower service.
    pub fn router(&self) -> Router {
        routes::serving(&self.state, self.metrics_on_admin)
    }

    /// Computes the prefixes that the operator declared, as [`Server::listen`] does by itself. Requests need not wait for it.
    pub async fn compute_shared(&self) {
        self.state.tenancy.shared.compute(&self.state.served).await;
    }

    /// Goes on with batches that an earlier process left in the batch folder, as [`Server::listen`] does by itself.
    pub fn resume_batches(&self) {
        batches::resume(&self.state.runner);
    }

    /// Serves until told to end: the first message drains, the second stops at once. Returns what is left of the time for draining, for
    /// whatever else is to be done before the process ends; nothing, where it did not suffice or was not wanted.
    pub async fn listen(self, listeners: Listeners, signals: mpsc::Receiver<()>) -> Duration {
        let serving = ListeningSocket::Tcp(listeners.serving);
        self.listen_on(serving, listeners.admin.map(ListeningSocket::Tcp), signals).await
    }

    async fn listen_on(
        self,
        serving: ListeningSocket,
        admin: Option<ListeningSocket>,
        mut signals: mpsc::Receiver<()>,
    ) -> Duration {
        let graceful = GracefulShutdown::new();
        let state = self.state.clone();
        tokio::spawn(async move { state.tenancy.shared.compute(&state.served).await });
        tokio::spawn(save_usage(self.state.clone()));
        if let Some(tls) = &self.tls {
            tokio::spawn(look_at_files(Arc::downgrade(tls)));
        }
        let lag = tokio::spawn(measure_lag(self.state.observability.metrics.lag.clone()));
        let samples = tokio::spawn(sample(self.state.observability.clone()));
        self.resume_batches();
        let (router, operators) = (self.router(), self.admin_router());
        let front = Front {
            load: self.state.load.clone(),
            open: self.state.observability.metrics.connections.clone(),
            tls: self.tls.clone(),
        };
        let accept =
            front.accept_all((&serving, &router), admin.as_ref().map(|admin| (admin, &operators)), &graceful);
        let ended = async {
            signals.recv().await;
            let told = Instant::now();
            (self.drain(&mut signals).await, told)
        };
        let (stopped, told) = tokio::select! {
            () = accept => (Ended::Stopped, Instant::now()),
            ended = ended => ended,
        };
        let state = &self.state;
        if stopped == Ended::Stopped {
            state.served.engine.stop();
            let _ = tokio::time::timeout(ENDING, state.load.in_flight.idle()).await;
        }
        tokio::select! {
            () = graceful.shutdown() => {}
            () = tokio::time::sleep(if stopped == Ended::Drained { CLOSING } else { ENDING }) => {}
            _ = signals.recv() => {}
        }
        lag.abort();
        samples.abort();
        state.served.engine.stop();
        if let Some(traces) = state.observability.traces.clone() {
            let _ = tokio::task::spawn_blocking(move || traces.close()).await;
        }
        self.save_usage();
        match stopped {
            Ended::Drained => self.drain_timeout.saturating_sub(told.elapsed()),
            Ended::Stopped => Duration::ZERO,
        }
    }

    /// Waits until nothing runs, or for the next signal, or as long as patience lasts.
    async fn drain(&self, signals: &mut mpsc::Receiver<()>) -> Ended {
        let state = &self.state;
        state.load.drain();
        state.batches.stop();
        state.served.engine.drain();
        tracing::info!(running = state.load.in_flight.count(), "draining; a second signal stops at once");
        tokio::select! {
            () = state.load.in_flight.idle() => Ended::Drained,
            () = tokio::time::sleep(self.drain_timeout) => Ended::Stopped,
            _ = signals.recv() => Ended::Stopped,
        }
    }
}

/// How late the event loop comes to what it wants to do.
pub(crate) async fn measure_lag(lag: Histogram) {
    loop {
        let wanted = tokio::time::Instant::now() + LAG_EVERY;
        tokio::time::sleep_until(wanted).await;
        lag.observe(tokio::time::Instant::now().saturating_duration_since(wanted).as_secs_f64());
    }
}

/// Has the last minutes at hand, for whoever asks why.
async fn sample(observability: Arc<Observability>) {
    let mut every = tokio::time::interval(SAMPLED_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        observability.why.sample();
    }
}

/// Has certificate and key read again when their files change, as long as the server is there.
pub(crate) async fn look_at_files(tls: Weak<Tls>) {
    loop {
        tokio::time::sleep(LOOKED_AT_EVERY).await;
        let Some(tls) = tls.upgrade() else { return };
        let _ = tokio::task::spawn_blocking(move || tls.look()).await;
    }
}

/// Seconds after which tenants without a valid key leave.
const LEAVE_EVERY: u64 = 60;

/// Keeps the file of usage up to date, and lets go of tenants that are no more, off the threads that serve.
async fn save_usage(state: State) {
    let mut every = tokio::time::interval(SAVED_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for tick in 1u64.. {
        every.tick().await;
        let state = state.clone();
        let save = move || {
            state.observability.meters.save();
            if tick.is_multiple_of(LEAVE_EVERY) {
                state.forget_tenants();
            }
        };
        let _ = tokio::task::spawn_blocking(save).await;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Drained,
    Stopped,
}

/// Binds, serves, and returns after a SIGTERM or Ctrl-C has drained the server (or a second one stopped it), as [`Server::listen`] does. `ready`
/// is told the addresses once connections are accepted.
pub async fn serve(
    config: ServerConfig,
    app: App,
    ready: impl FnOnce(Addresses),
) -> Result<Duration, ServerError> {
    let (address, admin) = (config.listen, config.admin.as_ref().map(|admin| admin.listen));
    let tls = config.tls.is_some();
    let server = Server::new(config, app)?;
    let signals = signals().map_err(ServerError::Signals)?;
    let serving = bind(address).await?;
    let admin = match admin {
        Some(address) => Some(bind(address).await?),
        None => None,
    };
    let local = |listener: &TcpListener| {
        listener.local_addr().map_err(|source| ServerError::Bind { address: address.to_string(), source })
    };
    let kv_events = server.state.observability.kv_events.as_ref();
    let kv_events =
        kv_events.map(|published| (published.events.endpoint(), published.events.replay_endpoint()));
    let addresses = Addresses {
        serving: local(&serving)?,
        admin: admin.as_ref().map(local).transpose()?,
        kv_events,
        tls,
    };
    ready(addresses);
    Ok(server.listen(Listeners { serving, admin }, signals).await)
}

/// Whatever of a configuration can be found wrong without a model and without writing anything: keys, their file, certificates.
pub fn check(config: &ServerConfig) -> Result<(), ServerError> {
    let tenants = config.key_ring()?;
    config.kv_events.as_ref().map(|source| kv_events::check(&source.config, &tenants)).transpose()?;
    config.tls.as_ref().map(Tls::open).transpose()?;
    Ok(())
}

/// The name of the socket for operators, beside the other one's.
pub(crate) fn admin_socket(serving: &Path) -> PathBuf {
    serving.with_extension("admin")
}

/// [`run`] for a router: on a socket at `path`, whose folder nobody else may enter, until `ends` says so, or a signal does (a supervisor may send
/// one to every process); operators' at [`admin_socket`].
pub fn run_behind(
    config: ServerConfig,
    app: App,
    path: &Path,
    mut ends: mpsc::Receiver<()>,
    ready: impl FnOnce(),
) -> Result<Duration, ServerError> {
    let runtime = runtime(config.http_threads, blocking_threads(&config)).map_err(ServerError::Runtime)?;
    let result = runtime.block_on(async {
        // Whoever connects is the router, and its TLS is its own.
        let server = Server::new(ServerConfig { tls: None, ..config }, app)?;
        let listen = |path: &Path| {
            let listener = UnixListener::bind(path).map(ListeningSocket::Unix);
            listener.map_err(|source| ServerError::Bind { address: path.display().to_string(), source })
        };
        let (serving, admin) = (listen(path)?, listen(&admin_socket(path))?);
        let mut signals = signals().map_err(ServerError::Signals)?;
        let (sender, all) = mpsc::channel(4);
        tokio::spawn(forward(sender.clone(), async move || ends.recv().await.is_some()));
        tokio::spawn(forward(sender, async move || signals.recv().await.is_some()));
        ready();
        Ok(server.listen_on(serving, Some(admin), all).await)
    });
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

/// [`serve`] on a runtime of its own: its threads for all connections, others for text and files.
pub fn run(config: ServerConfig, app: App, ready: impl FnOnce(Addresses)) -> Result<Duration, ServerError> {
    let runtime = runtime(config.http_threads, blocking_threads(&config)).map_err(ServerError::Runtime)?;
    let result = runtime.block_on(serve(config, app, ready));
    // A tokenization in progress is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

/// Tasks that run before sockets, timers and other threads are asked whom they have woken. A task may write a piece of a long answer, and
/// after tokio's own 61 and 31 of them everybody would wait for milliseconds; asking takes less than a microsecond.
const TASKS_AT_ONCE: u32 = 2;

/// A thread for every piece of work that may be done at once beside the event loop: so none waits for one of another kind.
fn blocking_threads(config: &ServerConfig) -> usize {
    config.limits.text_threads.max(1) + FILES + LOOKUPS + SINGLE + config.safety.calls_at_once()
}

pub(crate) fn runtime(threads: usize, blocking: usize) -> std::io::Result<Runtime> {
    let mut runtime = match threads {
        // Nothing is handed between threads.
        0 | 1 => Builder::new_current_thread(),
        threads => {
            let mut runtime = Builder::new_multi_thread();
            runtime.worker_threads(threads);
            runtime
        }
    };
    runtime.max_blocking_threads(blocking);
    runtime.event_interval(TASKS_AT_ONCE).global_queue_interval(TASKS_AT_ONCE);
    runtime.enable_all().thread_name("folio-http").build()
}

/// One message for each SIGTERM or SIGINT.
pub(crate) fn signals() -> std::io::Result<mpsc::Receiver<()>> {
    let (sender, receiver) = mpsc::channel(4);
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
            let mut stream = signal(kind)?;
            let sender = sender.clone();
            tokio::spawn(forward(sender, async move || stream.recv().await.is_some()));
        }
    }
    #[cfg(not(unix))]
    tokio::spawn(forward(sender, async || tokio::signal::ctrl_c().await.is_ok()));
    Ok(receiver)
}

async fn forward(sender: mpsc::Sender<()>, mut next: impl AsyncFnMut() -> bool) {
    while next().await && sender.send(()).await.is_ok() {}
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Poll;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    use super::*;
    use crate::observability::metrics::FrontFigures;

    /// Lets others run, as long answers do.
    async fn rest() {
        let mut rested = false;
        std::future::poll_fn(|cx| {
            if std::mem::replace(&mut rested, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    #[test]
    fn every_thread_of_the_event_loop_has_work_where_there_is_some() {
        for threads in [2, 3, 8] {
            // Nobody goes on before all have come, each on a thread of its own.
            let meeting = Arc::new(std::sync::Barrier::new(threads));
            let come = async {
                let come = (0..threads).map(|_| {
                    let meeting = meeting.clone();
                    tokio::spawn(async move {
                        meeting.wait();
                        std::thread::current().id()
                    })
                });
                let mut came = HashSet::new();
                for one in come.collect::<Vec<_>>() {
                    came.insert(one.await.unwrap());
                }
                came.len()
            };
            assert_eq!(runtime(threads, 1).unwrap().block_on(come), threads);
        }
    }

    #[test]
    fn the_event_loop_is_late_when_what_it_runs_blocks_it() {
        const BLOCKED: Duration = Duration::from_millis(200);
        let figures = FrontFigures::default();
        let told = |name: &str| {
            let page = figures.render().unwrap();
            let line = page.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
            line.unwrap_or_else(|| panic!("no {name} in {page}")).trim().parse::<f64>().unwrap()
        };
        let late = || told("folio:event_loop_lag_seconds_sum");
        runtime(1, 1).unwrap().block_on(async {
            let measured = tokio::spawn(measure_lag(figures.lag.clone()));
            while told("folio:event_loop_lag_seconds_count") == 0.0 {
                rest().await;
            }
            let before = late();
            tokio::spawn(async { std::thread::sleep(LAG_EVERY + BLOCKED) }).await.unwrap();
            // What was to be done while it slept is done now.
            while late() < before + BLOCKED.as_secs_f64() {
                rest().await;
            }
            measured.abort();
        });
    }

    #[test]
    fn who_is_woken_waits_for_few_tasks_that_have_always_more_to_do() {
        const BUSY: usize = 4;
        let polls = Arc::new(AtomicUsize::new(0));
        let now = {
            let polls = polls.clone();
            move || polls.load(Ordering::Relaxed)
        };
        let test = async {
            for _ in 0..BUSY {
                let polls = polls.clone();
                tokio::spawn(async move {
                    loop {
                        polls.fetch_add(1, Ordering::Relaxed);
                        rest().await;
                    }
                });
            }
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let mut socket = listener.accept().await.unwrap().0;
            let (work, finished) = oneshot::channel();
            let clock = now.clone();
            let reads = tokio::spawn(async move {
                socket.read_u8().await.unwrap();
                clock()
            });
            let clock = now.clone();
            let waits = tokio::spawn(async move {
                finished.await.unwrap();
                clock()
            });
            for _ in 0..100 {
                rest().await;
            }
            let woken = now();
            client.write_u8(1).await.unwrap();
            let by_socket = reads.await.unwrap() - woken;
            let woken = now();
            std::thread::spawn(move || work.send(())).join().unwrap().unwrap();
            (by_socket, waits.await.unwrap() - woken)
        };
        let (by_socket, by_thread) = runtime(1, 1).unwrap().block_on(test);
        // Whoever was woken before goes first: all of them, once.
        let most = BUSY + 2 * TASKS_AT_ONCE as usize;
        assert!(by_socket <= most && by_thread <= most, "{by_socket} and {by_thread} of at most {most}");
    }
}
