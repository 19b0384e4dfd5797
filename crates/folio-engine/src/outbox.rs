//! Events out: one sink per living request.
//!
//! Owns: the sinks, and which choices have got their `Finished`. Must never: block. A sink that is gone or panics turns
//! into a cancellation; what is still produced for it is dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::mailbox::{CancelRequest, Incoming, Submission};
use crate::request::{Event, EventSink, FinishReason, Micros, RequestId, Timing};

struct Reader {
    sink: Box<dyn EventSink>,
    finished: Vec<bool>,
}

#[derive(Default)]
pub(crate) struct Outbox {
    readers: FxHashMap<RequestId, Reader>,
}

impl Outbox {
    /// Takes the sinks of new requests. A request whose id is still in use is refused here: its events could not be
    /// told apart.
    pub fn open(&mut self, incoming: &mut Incoming) {
        for submission in incoming.submissions.drain(..) {
            let Submission { request, hashes, sink } = submission;
            let mut reader = Reader { sink, finished: vec![false; request.n as usize] };
            if self.readers.contains_key(&request.id) {
                let error = format!("request id {} is in use", request.id.0);
                reader.fail_all(&error.into(), Micros(0));
                continue;
            }
            self.readers.insert(request.id, reader);
            incoming.requests.push((request, hashes));
        }
    }

    /// Drains `events`; asks to cancel the requests nobody reads any more.
    pub fn deliver(&mut self, events: &mut Vec<(RequestId, Event)>, cancellations: &mut Vec<CancelRequest>) {
        for (id, event) in events.drain(..) {
            let Some(reader) = self.readers.get_mut(&id) else { continue };
            let finished = match &event {
                Event::Finished { choice, .. } => Some(*choice as usize),
                _ => None,
            };
            let listens = catch_unwind(AssertUnwindSafe(|| reader.sink.deliver(event))).unwrap_or(false);
            if let Some(finished) = finished.and_then(|choice| reader.finished.get_mut(choice)) {
                *finished = true;
            }
            let done = reader.finished.iter().all(|finished| *finished);
            if !listens && !done {
                cancellations.push(CancelRequest { request: id, choice: None });
            }
            if !listens || done {
                self.readers.remove(&id);
            }
        }
    }

    /// Tells everybody that it is over, without the scheduler's help.
    pub fn fail_all(&mut self, error: &Arc<str>, now: Micros) {
        for (_, mut reader) in self.readers.drain() {
            reader.fail_all(error, now);
        }
    }
}

impl Reader {
    fn fail_all(&mut self, error: &Arc<str>, now: Micros) {
        for (choice, finished) in self.finished.iter_mut().enumerate() {
            if !std::mem::replace(finished, true) {
                let event = Event::Finished {
                    choice: choice as u32,
                    reason: FinishReason::Error,
                    stop_token: None,
                    error: Some(error.clone()),
                    timing: Box::new(Timing { finished: now, ..Timing::default() }),
                };
                // Gone or not, there is nothing left to do for it.
                let _ = catch_unwind(AssertUnwindSafe(|| self.sink.deliver(event)));
            }
        }
    }
}
