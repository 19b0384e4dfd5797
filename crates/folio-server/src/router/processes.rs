//! Which models run, whose turn it is to start, and who gives way: a pure state machine.
//!
//! Owns: a model's state (stopped -> starting -> ready -> stopping -> stopped), the requests that wait for one, the memory that is promised to
//! processes, idle deadlines, and how long a model that failed is left alone. Must never: read a clock, start anything, know HTTP. Events go in
//! with the time since the router began; what is to be done comes out as [`Order`]s.
//!
//! Invariants: what processes need together is never more than the budget, from a process's start until it has ended; a model has at most one
//! process; a process with a request is told to stop only if it never got ready in time; every wait is granted, refused or left.
//!
//! Requests wait in one line. Whoever's model is ready goes on at once. The first in line whose model is stopped and has no room holds up all
//! later starts, so that nothing starves: idle processes give way, the least recently used first; where those are not enough, and it has
//! waited for [`PATIENCE`], busy ones take nothing new from behind it in line until they are idle, and give way, too. Cost of an event:
//! O(waits + models²), both small and bounded.

use std::collections::VecDeque;
use std::time::Duration;

/// How long the first in line waits before busy processes are closed for it. Shorter, and two models that do not fit together would be loaded
/// in turn, request by request.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time for which a model that failed is left alone.
const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// What ran for so long before it failed is started again at once.
const PROVEN: Duration = Duration::from_secs(60);

/// A request in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct WaitId(u64);

/// One process of a model. No number is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    pub model: usize,
    pub number: u64,
}

/// What a model is to the state machine.
#[derive(Clone, Debug)]
pub(super) struct Wants {
    /// Bytes, from its start to its end.
    pub need: u64,
    /// After its last request. `None`: for as long as nobody else wants the memory.
    pub keep_alive: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessLimits {
    /// Bytes for all processes.
    pub memory: u64,
    /// Requests in line.
    pub waiting: usize,
    /// For how long a request waits for room.
    pub patience: Duration,
    /// How long a start may take.
    pub start: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessState {
    Stopped,
    /// There is a process, which does not listen yet.
    Starting,
    Ready,
    /// Told to end. Its memory is taken until it does.
    Stopping,
}

/// Why a request gets no process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NotGranted {
    /// So many wait already.
    Full { waiting: usize },
    /// No room came free in time.
    NoRoom { waited: Duration },
    /// The process ended, or did not get ready in time. `again`: when it may be tried again.
    Failed { reason: String, again: Duration },
    /// Nothing is started any more.
    Closed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Start(Life),
    Stop(Life),
    Grant(WaitId, Life),
    Refuse(WaitId, NotGranted),
}

#[derive(Debug)]
struct Entry {
    wants: Wants,
    state: ProcessState,
    number: u64,
    /// Of its state.
    since: Duration,
    /// Requests that it was granted to.
    busy: usize,
    /// Its last request, or when it got ready.
    used: Duration,
    expires: Option<Duration>,
    /// Others want its memory: it takes nothing new.
    closing: bool,
    /// In a row.
    failures: u32,
    /// Not to be started before.
    again: Duration,
    /// Why it failed.
    reason: String,
}

#[derive(Debug)]
struct InLine {
    id: WaitId,
    model: usize,
    since: Duration,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Processes {
    bounds: ProcessLimits,
    entries: Vec<Entry>,
    line: VecDeque<InLine>,
    next: u64,
    orders: Vec<Order>,
    closed: bool,
}

/// What is told of a model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProcessStatus {
    pub state: ProcessState,
    pub number: u64,
    pub busy: usize,
    /// When it is unloaded, if nobody asks for it. `None`: not by time.
    pub expires: Option<Duration>,
    pub failures: u32,
}

impl Processes {
    pub fn new(bounds: ProcessLimits, models: impl IntoIterator<Item = Wants>) -> Self {
        let entry = |wants| Entry {
            wants,
            state: ProcessState::Stopped,
            number: 0,
            since: Duration::ZERO,
            busy: 0,
            used: Duration::ZERO,
            expires: None,
            closing: false,
            failures: 0,
            again: Duration::ZERO,
            reason: String::new(),
        };
        let entries = models.into_iter().map(entry).collect();
        Self { bounds, entries, line: VecDeque::new(), next: 1, orders: Vec::new(), closed: false }
    }

    /// What is to be done since it was last asked.
    pub fn orders(&mut self) -> Vec<Order> {
        std::mem::take(&mut self.orders)
    }

    pub fn told(&self, model: usize) -> ProcessStatus {
        let entry = &self.entries[model];
        ProcessStatus {
            state: entry.state,
            number: entry.number,
            busy: entry.busy,
            expires: entry.expires,
            failures: entry.failures,
        }
    }

    /// Bytes that are promised to processes.
    pub fn taken(&self) -> u64 {
        self.entries
            .iter()
            .filter(|entry| entry.state != ProcessState::Stopped)
            .map(|entry| entry.wants.need)
            .sum()
    }

    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    /// A request wants the model. It is granted or refused by an order.
    pub fn ask(&mut self, model: usize, now: Duration) -> Result<WaitId, NotGranted> {
        let entry = &self.entries[model];
        if self.closed {
            return Err(NotGranted::Closed);
        }
        if entry.state == ProcessState::Stopped && now < entry.again {
            return Err(NotGranted::Failed { reason: entry.reason.clone(), again: entry.again - now });
        }
        if self.line.len() >= self.bounds.waiting {
            return Err(NotGranted::Full { waiting: self.line.len() });
        }
        let id = WaitId(self.next());
        self.line.push_back(InLine { id, model, since: now });
        self.settle(now);
        Ok(id)
    }

    /// Takes hold of a process that is ready, if there is one, for a look ([`Processes::looked`]): nothing is started for it, and what is
    /// only looked at stays no longer for it.
    pub fn look(&mut self, model: usize) -> Option<Life> {
        let entry = &mut self.entries[model];
        (entry.state == ProcessState::Ready).then(|| {
            entry.busy += 1;
            Life { model, number: entry.number }
        })
    }

    /// Whoever waited has gone.
    pub fn leave(&mut self, id: WaitId, now: Duration) {
        self.line.retain(|wait| wait.id != id);
        self.settle(now);
    }

    /// What was granted has ended. `keep_alive`: other than the model's own, from now on until its next request.
    pub fn release(&mut self, life: Life, keep_alive: Option<Option<Duration>>, now: Duration) {
        let Some(entry) = self.living(life) else { return };
        entry.busy -= 1;
        entry.used = now;
        let keep_alive = keep_alive.unwrap_or(entry.wants.keep_alive);
        entry.expires = keep_alive.map(|time| now.saturating_add(time));
        self.settle(now);
    }

    /// A look has ended.
    pub fn looked(&mut self, life: Life, now: Duration) {
        let Some(entry) = self.living(life) else { return };
        entry.busy -= 1;
        self.settle(now);
    }

    /// It is idle from now on as far as time is concerned.
    pub fn expire(&mut self, model: usize, now: Duration) {
        self.entries[model].expires = Some(now);
        self.settle(now);
    }

    /// A process listens.
    pub fn ready(&mut self, life: Life, now: Duration) {
        let Some(entry) = self.living(life).filter(|entry| entry.state == ProcessState::Starting) else {
            return;
        };
        (entry.state, entry.since, entry.used) = (ProcessState::Ready, now, now);
        entry.expires = entry.wants.keep_alive.map(|time| now.saturating_add(time));
        self.settle(now);
    }

    /// A process is gone. `reason`: what it said last, where it was not told to go.
    pub fn ended(&mut self, life: Life, reason: &str, now: Duration) {
        let Some(entry) = self.living(life) else { return };
        match entry.state {
            ProcessState::Stopping => {}
            ProcessState::Ready => {
                // The first time after it has proven itself it is started again at once.
                if now.saturating_sub(entry.since) >= PROVEN {
                    entry.failures = 0;
                }
                entry.failures += 1;
                entry.again = now + backoff(entry.failures - 1);
                entry.reason = reason.to_owned();
            }
            ProcessState::Starting | ProcessState::Stopped => self.failed(life.model, reason, now),
        }
        let entry = &mut self.entries[life.model];
        (entry.state, entry.since, entry.busy, entry.closing) = (ProcessState::Stopped, now, 0, false);
        entry.expires = None;
        self.settle(now);
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) {
        self.settle(now);
    }

    /// When [`Processes::tick`] is due. What is past has had its effect, or waits for another event.
    pub fn due(&self, now: Duration) -> Option<Duration> {
        let waits =
            self.line.iter().flat_map(|wait| [wait.since + self.bounds.patience, wait.since + PATIENCE]);
        let models = self.entries.iter().filter_map(|entry| match entry.state {
            ProcessState::Starting => Some(entry.since + self.bounds.start),
            ProcessState::Ready if entry.busy == 0 => entry.expires,
            _ => None,
        });
        waits.chain(models).filter(|at| *at > now).min()
    }

    /// Takes no more requests, and refuses those in line.
    pub fn close(&mut self) {
        self.closed = true;
        let refused = self.line.drain(..).map(|wait| Order::Refuse(wait.id, NotGranted::Closed));
        self.orders.extend(refused);
    }

    /// Tells every process to stop.
    pub fn stop_all(&mut self, now: Duration) {
        self.close();
        for model in 0..self.entries.len() {
            if matches!(self.entries[model].state, ProcessState::Starting | ProcessState::Ready) {
                self.stop(model, now);
            }
        }
    }

    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The model of a process that is the last one it had, and not gone.
    fn living(&mut self, life: Life) -> Option<&mut Entry> {
        let entry = &mut self.entries[life.model];
        (entry.number == life.number && entry.state != ProcessState::Stopped).then_some(entry)
    }

    /// A start came to nothing: whoever waits for it is told why.
    fn failed(&mut self, model: usize, reason: &str, now: Duration) {
        let entry = &mut self.entries[model];
        entry.failures += 1;
        let delay = backoff(entry.failures);
        entry.again = now + delay;
        entry.reason = reason.to_owned();
        let why = NotGranted::Failed { reason: reason.to_owned(), again: delay };
        let (gone, stay) = self.line.drain(..).partition(|wait| wait.model == model);
        self.line = stay;
        let gone: VecDeque<InLine> = gone;
        self.orders.extend(gone.into_iter().map(|wait| Order::Refuse(wait.id, why.clone())));
    }

    fn stop(&mut self, model: usize, now: Duration) {
        let entry = &mut self.entries[model];
        (entry.state, entry.since, entry.expires) = (ProcessState::Stopping, now, None);
        self.orders.push(Order::Stop(Life { model, number: entry.number }));
    }

    fn settle(&mut self, now: Duration) {
        self.end_starts(now);
        self.end_waits(now);
        self.serve(now);
        for model in 0..self.entries.len() {
            let entry = &self.entries[model];
            let over = entry.closing || entry.expires.is_some_and(|at| at <= now);
            if entry.state == ProcessState::Ready && entry.busy == 0 && over {
                // What ends as it should has no failures to make up for.
                self.entries[model].failures = 0;
                self.stop(model, now);
            }
        }
    }

    /// Starts that take too long.
    fn end_starts(&mut self, now: Duration) {
        for model in 0..self.entries.len() {
            let entry = &self.entries[model];
            if entry.state == ProcessState::Starting && now >= entry.since + self.bounds.start {
                let reason = format!("it was not ready within {} s", self.bounds.start.as_secs());
                self.failed(model, &reason, now);
                self.stop(model, now);
            }
        }
    }

    /// Waits that take too long. Who waits for a start is told by that.
    fn end_waits(&mut self, now: Duration) {
        let Self { line, orders, entries, bounds, .. } = self;
        line.retain(|wait| {
            let over =
                now >= wait.since + bounds.patience && entries[wait.model].state != ProcessState::Starting;
            let ready = entries[wait.model].state == ProcessState::Ready && !entries[wait.model].closing;
            if over && !ready {
                let why = NotGranted::NoRoom { waited: now - wait.since };
                orders.push(Order::Refuse(wait.id, why));
            }
            !over || ready
        });
    }

    /// Goes along the line: grants what is ready, starts what fits, and makes room for the first that does not.
    fn serve(&mut self, now: Duration) {
        self.entries.iter_mut().for_each(|entry| entry.closing = false);
        let mut held_up = false;
        for wait in std::mem::take(&mut self.line) {
            let model = wait.model;
            match self.entries[model].state {
                ProcessState::Ready if !self.entries[model].closing => {
                    let entry = &mut self.entries[model];
                    entry.busy += 1;
                    let life = Life { model, number: entry.number };
                    self.orders.push(Order::Grant(wait.id, life));
                    continue;
                }
                // It was ready, failed again, and somebody waited for it behind others.
                ProcessState::Stopped if now < self.entries[model].again => {
                    let Entry { reason, again, .. } = &self.entries[model];
                    let why = NotGranted::Failed { reason: reason.clone(), again: *again - now };
                    self.orders.push(Order::Refuse(wait.id, why));
                    continue;
                }
                ProcessState::Stopped if !held_up => {
                    let short =
                        (self.taken() + self.entries[model].wants.need).saturating_sub(self.bounds.memory);
                    match short {
                        0 => self.start(model, now),
                        short => {
                            held_up = true;
                            self.make_room(short, now.saturating_sub(wait.since) >= PATIENCE);
                        }
                    }
                }
                _ => {}
            }
            self.line.push_back(wait);
        }
    }

    fn start(&mut self, model: usize, now: Duration) {
        let number = self.next();
        let entry = &mut self.entries[model];
        (entry.state, entry.number, entry.since, entry.busy) = (ProcessState::Starting, number, now, 0);
        self.orders.push(Order::Start(Life { model, number }));
    }

    /// Closes processes that hold `short` bytes, less what is coming free: idle ones, and busy ones if that is to be.
    fn make_room(&mut self, short: u64, busy_too: bool) {
        let entries = &mut self.entries;
        let stopping = entries.iter().filter(|entry| entry.state == ProcessState::Stopping);
        let mut short = short.saturating_sub(stopping.map(|entry| entry.wants.need).sum());
        let mut ready: Vec<&mut Entry> =
            entries.iter_mut().filter(|entry| entry.state == ProcessState::Ready).collect();
        ready.retain(|entry| busy_too || entry.busy == 0);
        let idle: u64 = ready.iter().map(|entry| entry.wants.need).sum();
        if !busy_too && idle < short {
            // It would not be enough, and the next request may be for one of them.
            return;
        }
        ready.sort_by_key(|entry| (entry.busy > 0, entry.used));
        for entry in ready {
            if short == 0 {
                break;
            }
            short = short.saturating_sub(entry.wants.need);
            entry.closing = true;
        }
    }
}

/// After so many failures in a row.
fn backoff(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        n => Duration::from_secs(1 << (n - 1).min(6)).min(BACKOFF_MAX),
    }
}

#[cfg(test)]
mod tests;
