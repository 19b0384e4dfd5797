//! Carries out what [`Processes`] orders: starts processes and stops them, and tells who waits.
//!
//! Owns: the clock that the state machine is told, the folder of sockets, and what was granted ([`Held`]), which is given back when it is
//! dropped. Invariant: the lock is never held across anything that waits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_api::ApiError;
use folio_kv::TenantId;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::error::ServerError;
use crate::http::fresh_id;

use super::config::{ModelProcess, RouterConfig};
use super::process::{self, Launch};
use super::processes::{
    Life, NotGranted, Order, ProcessLimits, ProcessState, ProcessStatus, Processes, WaitId, Wants,
};

/// Seconds after which to come again where it is not known better.
const AGAIN_S: u32 = 10;

/// See the module documentation.
pub(super) struct Engines {
    pub models: Vec<ModelProcess>,
    pub memory_bytes: u64,
    launch: Launch,
    /// In line, of one tenant.
    places_of_one: usize,
    began: Instant,
    inner: Mutex<Inner>,
    /// The next deadline may be another one.
    changed: Notify,
    folder: SocketFolder,
}

struct Inner {
    processes: Processes,
    waiting: HashMap<WaitId, oneshot::Sender<Result<Held, NotGranted>>>,
    /// How many of those are a tenant's: half of the places at most.
    of_tenants: HashMap<TenantId, usize>,
    /// By the number of a process that lives: how it is told to stop.
    living: HashMap<u64, oneshot::Sender<process::StopMode>>,
    /// By model.
    counts: Vec<StartCounts>,
}

/// Of a model, since the router began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StartCounts {
    pub starts: u64,
    /// Processes that ended without being told to.
    pub failures: u64,
    /// Requests that waited for a start or for room and were told to come again.
    pub refused: u64,
}

/// A process that was granted to a request, for as long as this lives.
pub(super) struct Held {
    engines: Arc<Engines>,
    life: Life,
    purpose: Purpose,
}

/// What a process is held for.
#[derive(Clone, Copy)]
enum Purpose {
    /// A request, behind which the model stays for so long, if it says so.
    Answer(Option<Option<Duration>>),
    /// It stays no longer for that.
    Look,
}

impl Held {
    /// How long the model stays behind this request, other than it would.
    pub fn stays(&mut self, keep_alive: Option<Option<Duration>>) {
        self.purpose = Purpose::Answer(keep_alive);
    }

    pub fn model(&self) -> usize {
        self.life.model
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.engines.socket(self.life)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let (life, purpose) = (self.life, self.purpose);
        self.engines.with(|inner, now| match purpose {
            Purpose::Answer(keep_alive) => inner.processes.release(life, keep_alive, now),
            Purpose::Look => inner.processes.looked(life, now),
        });
    }
}

/// Somebody's place in line, until this is dropped.
struct PlaceInLine(Arc<Engines>, WaitId, TenantId);

impl Drop for PlaceInLine {
    fn drop(&mut self) {
        let Self(_, id, tenant) = *self;
        self.0.with(|inner, now| {
            if let Entry::Occupied(mut own) = inner.of_tenants.entry(tenant) {
                *own.get_mut() -= 1;
                if *own.get() == 0 {
                    own.remove();
                }
            }
            if inner.waiting.remove(&id).is_some() {
                inner.processes.leave(id, now);
            }
        });
    }
}

/// A folder of sockets that only this user may enter.
struct SocketFolder(PathBuf);

impl SocketFolder {
    fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("folio-{}", &fresh_id()[..16]));
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for SocketFolder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::debug!(%error, folder = %self.0.display(), "the folder of sockets stays");
        }
    }
}

impl Engines {
    /// `drain`: how long a process that is told to stop may take to finish.
    pub fn new(config: &RouterConfig, drain: Duration) -> Result<Arc<Self>, ServerError> {
        let bounds = ProcessLimits {
            memory: config.memory_bytes,
            waiting: config.waiting,
            patience: config.wait_timeout,
            start: config.start_timeout,
        };
        for ModelProcess { names, need_bytes, .. } in &config.models {
            if *need_bytes > config.memory_bytes {
                return Err(ServerError::Config(format!(
                    "the model '{}' needs {need_bytes} bytes, more than the {} of all models (--models-memory)",
                    names[0], config.memory_bytes
                )));
            }
        }
        let wants = |model: &ModelProcess| Wants { need: model.need_bytes, keep_alive: model.keep_alive };
        let folder = SocketFolder::new()
            .map_err(|error| ServerError::Config(format!("no folder for sockets can be made: {error}")))?;
        Ok(Arc::new(Self {
            inner: Mutex::new(Inner {
                processes: Processes::new(bounds, config.models.iter().map(wants)),
                waiting: HashMap::new(),
                of_tenants: HashMap::new(),
                living: HashMap::new(),
                counts: vec![StartCounts::default(); config.models.len()],
            }),
            models: config.models.clone(),
            memory_bytes: config.memory_bytes,
            launch: Launch {
                program: config.program.clone(),
                configuration: config.configuration.clone(),
                drain,
            },
            places_of_one: config.waiting.div_ceil(2),
            began: Instant::now(),
            changed: Notify::new(),
            folder,
        }))
    }

    /// Waits for a process of the model, which is started if there is none. Whoever stops waiting leaves the line.
    pub async fn enter(self: &Arc<Self>, model: usize, tenant: TenantId) -> Result<Held, ApiError> {
        let (sender, granted) = oneshot::channel();
        let asked = self.with(|inner, now| {
            let own = inner.of_tenants.get(&tenant).copied().unwrap_or(0);
            if own >= self.places_of_one {
                return Err(NotGranted::Full { waiting: own });
            }
            let id = inner.processes.ask(model, now)?;
            inner.waiting.insert(id, sender);
            *inner.of_tenants.entry(tenant).or_default() += 1;
            Ok(id)
        });
        let granted = match asked {
            Ok(id) => {
                let _in_line = PlaceInLine(self.clone(), id, tenant);
                granted.await.unwrap_or(Err(NotGranted::Closed))
            }
            Err(not) => Err(not),
        };
        granted.map_err(|not| {
            self.inner.lock().counts[model].refused += 1;
            self.refusal(model, not)
        })
    }

    /// Takes hold of the model's process if one is ready, for a look.
    pub fn look(self: &Arc<Self>, model: usize) -> Option<Held> {
        let life = self.inner.lock().processes.look(model)?;
        Some(Held { engines: self.clone(), life, purpose: Purpose::Look })
    }

    /// The same of all.
    pub fn look_at_all(self: &Arc<Self>) -> Vec<Held> {
        (0..self.models.len()).filter_map(|model| self.look(model)).collect()
    }

    /// The model goes as soon as nobody uses it.
    pub fn unload(self: &Arc<Self>, model: usize) {
        self.with(|inner, now| inner.processes.expire(model, now));
    }

    pub fn told(&self, model: usize) -> (ProcessStatus, StartCounts) {
        let inner = self.inner.lock();
        (inner.processes.told(model), inner.counts[model])
    }

    /// Requests in line, and bytes that are promised to processes.
    pub fn totals(&self) -> (usize, u64) {
        let inner = self.inner.lock();
        (inner.processes.waiting(), inner.processes.taken())
    }

    /// By the clock of the state machine.
    pub fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Starts nothing any more, and refuses who waits.
    pub fn close(self: &Arc<Self>) {
        self.with(|inner, _| inner.processes.close());
    }

    /// Ends every process at once.
    pub fn kill(&self) {
        self.inner.lock().living.drain().for_each(|(_, stop)| drop(stop.send(process::StopMode::AtOnce)));
    }

    /// Ends every process in good order, and waits until there is none.
    pub async fn end(self: &Arc<Self>) {
        self.with(|inner, now| inner.processes.stop_all(now));
        loop {
            // Registered before looking, so that no change is missed.
            let changed = self.changed.notified();
            if self.totals().1 == 0 {
                return;
            }
            changed.await;
        }
    }

    /// Has the state machine know that time passes.
    pub async fn keep_time(self: Arc<Self>) {
        loop {
            let changed = self.changed.notified();
            let due = self.inner.lock().processes.due(self.now());
            let until = tokio::time::Instant::from_std(self.began + due.unwrap_or_default());
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(until), if due.is_some() => {
                    self.with(|inner, now| inner.processes.tick(now));
                }
            }
        }
    }

    /// A process, from its start to its end.
    async fn live(self: Arc<Self>, life: Life, stop: oneshot::Receiver<process::StopMode>) {
        let ready = || self.with(|inner, now| inner.processes.ready(life, now));
        let socket = self.socket(life);
        let reason = process::run(&self.launch, &self.models[life.model], &socket, stop, ready).await;
        self.with(|inner, now| {
            inner.living.remove(&life.number);
            if inner.processes.told(life.model).state != ProcessState::Stopping {
                inner.counts[life.model].failures += 1;
            }
            inner.processes.ended(life, &reason, now);
        });
    }

    fn socket(&self, life: Life) -> PathBuf {
        self.folder.0.join(format!("{}.socket", life.number))
    }

    /// Does something with the state machine, and what it orders.
    fn with<T>(self: &Arc<Self>, act: impl FnOnce(&mut Inner, Duration) -> T) -> T {
        let mut unwanted = Vec::new();
        let done = {
            let mut inner = self.inner.lock();
            let done = act(&mut inner, self.now());
            for order in inner.processes.orders() {
                self.carry_out(&mut inner, order, &mut unwanted);
            }
            done
        };
        self.changed.notify_waiters();
        // Given back where the lock is free.
        drop(unwanted);
        done
    }

    fn carry_out(
        self: &Arc<Self>,
        inner: &mut Inner,
        order: Order,
        unwanted: &mut Vec<Result<Held, NotGranted>>,
    ) {
        match order {
            Order::Start(life) => {
                let (stop, stopped) = oneshot::channel();
                inner.living.insert(life.number, stop);
                inner.counts[life.model].starts += 1;
                tokio::spawn(self.clone().live(life, stopped));
            }
            Order::Stop(life) => {
                let stop = inner.living.remove(&life.number);
                stop.into_iter().for_each(|stop| drop(stop.send(process::StopMode::InGoodOrder)));
            }
            Order::Grant(id, life) => {
                let held = Held { engines: self.clone(), life, purpose: Purpose::Answer(None) };
                match inner.waiting.remove(&id) {
                    Some(waiting) => unwanted.extend(waiting.send(Ok(held)).err()),
                    None => unwanted.push(Ok(held)),
                }
            }
            Order::Refuse(id, why) => {
                inner
                    .waiting
                    .remove(&id)
                    .into_iter()
                    .for_each(|waiting| drop(waiting.send(Err(why.clone()))));
            }
        }
    }

    fn refusal(&self, model: usize, not: NotGranted) -> ApiError {
        let ModelProcess { names, need_bytes, .. } = &self.models[model];
        let name = &names[0];
        let (message, again) = match not {
            NotGranted::Full { waiting } => (
                format!(
                    "{waiting} of your requests, or of all, wait for models to be loaded, and no more may."
                ),
                AGAIN_S,
            ),
            NotGranted::NoRoom { waited } => (
                format!(
                    "The model '{name}' needs {need_bytes} bytes of the {} for all models, which others were using for {} s.",
                    self.memory_bytes,
                    waited.as_secs()
                ),
                AGAIN_S,
            ),
            NotGranted::Failed { reason, again } => {
                (format!("The model '{name}' could not be loaded: {reason}."), again.as_secs() as u32 + 1)
            }
            NotGranted::Closed => {
                ("This server is shutting down; send the request to another one.".to_owned(), 5)
            }
        };
        ApiError::unavailable(message, again)
    }
}
