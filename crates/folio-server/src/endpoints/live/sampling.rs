//! The figures of the page, as long as somebody has it open.
//!
//! Owns: the task that samples, what it keeps between two samples, and how much time that may take. Must never: do anything while no page is
//! open, ask the cache for more than two looks of [`VIEW_MAX`] blocks a sample, or tell a token.
//!
//! States: *closed* (no task, nothing kept) -> *open* (one task for all pages) -> *closed* again after the sample that finds nobody.
//! A sample is made once, however many read it: the engine's snapshot, some blocks of the pool, and every [`REPORT_EVERY`]-th time the report of
//! `/v1/why`. Its processor time is counted, and the next one comes after a hundred times that at the earliest ([`pause`]): so all of it
//! takes at most a hundredth of one processor.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use folio_api::ApiError;
use folio_engine::{CacheCommand, CacheResponse};
use folio_kv::{BlockView, TenantId, VIEW_MAX};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::block_map::{BlockMap, MapPiece};
use super::prefix_tree::{BLOCKS_MAX, PrefixSweep};
use super::viewers::{PAGES_MAX, PageFrames, Viewers};
use crate::endpoints::prefixes::command;
use crate::engine::Served;
use crate::load::Load;
use crate::observability::Observability;
use crate::observability::why::{MOMENT, SAMPLED_EVERY, Sample};
use crate::tenancy::Tenancy;
use crate::threads::NOBODY;

/// Samples from one report to the next.
const REPORT_EVERY: u64 = 4;
/// The share of one processor that sampling may take: one part of so many.
const SHARE: u32 = 100;
/// How long the cache may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// About how much work a sample is.
const SAMPLE_BYTES: usize = 32 << 10;

/// See the module documentation.
pub(crate) struct LivePage {
    served: Arc<Served>,
    tenancy: Arc<Tenancy>,
    observability: Arc<Observability>,
    load: Arc<Load>,
    open: Mutex<OpenPages>,
}

#[derive(Default)]
struct OpenPages {
    viewers: Viewers,
    map: BlockMap,
    /// The last that was made.
    report: Option<String>,
    tree: Option<String>,
    /// The task is there.
    running: bool,
}

/// What the task alone keeps.
struct PageSampler {
    before: Sample,
    sweep: PrefixSweep,
    samples: u64,
}

/// What the cache answered.
struct Looks {
    of_map: Vec<BlockView>,
    /// Where it is not the same.
    of_tree: Option<Vec<BlockView>>,
}

impl LivePage {
    pub fn new(
        served: Arc<Served>,
        tenancy: Arc<Tenancy>,
        observability: Arc<Observability>,
        load: Arc<Load>,
    ) -> Self {
        Self { served, tenancy, observability, load, open: Mutex::default() }
    }

    /// One more page. `chat`: it can talk to the model where it comes from.
    pub(super) fn enter(self: &Arc<Self>, chat: bool) -> Result<PageFrames, ApiError> {
        let took = ProcessorTime::now();
        let moments = self.observability.why.moments();
        let mut open = self.open.lock();
        if !open.running {
            open.map.resize(self.served.engine.stats().cache.blocks);
        }
        let hello = self.hello(&open, &moments, chat);
        let frames = open.viewers.enter(hello).ok_or_else(|| {
            let message = format!("{PAGES_MAX} pages are open, which is as many as there may be. Close one.");
            ApiError { code: Some("too_many_pages"), ..ApiError::busy(message, 5) }
        })?;
        self.observability.metrics.page.open.set(open.viewers.count() as i64);
        if !open.running {
            open.running = true;
            tokio::spawn(self.clone().run());
        }
        self.observability.metrics.page.took(took.passed());
        Ok(frames)
    }

    /// What a page is told first: what there is, the last minutes, and all that is known by then.
    fn hello(&self, open: &OpenPages, moments: &[Value], chat: bool) -> Bytes {
        let (model, map) = (&self.served.model, open.map.whole());
        let cache = self.served.engine.stats().cache;
        let hello = json!({
            "model": self.served.name(),
            "version": self.served.version,
            "context_tokens": model.context_length,
            "chat": chat && self.served.template.is_some() && !model.only_embeds,
            "blocks": cache.blocks,
            "block_tokens": cache.block_tokens,
            "bytes_per_block": cache.bytes_per_block,
            "blocks_per_cell": open.map.step(),
            "sampled_every_s": SAMPLED_EVERY.as_secs_f64(),
            "moment": MOMENT,
            "moments": moments,
        });
        let mut out = event("hello", &hello.to_string());
        out.push_str(&event("sample", &json!({"map": self.map(&open.map, &map)}).to_string()));
        for (name, last) in [("why", &open.report), ("tree", &open.tree)] {
            out.extend(last.as_ref().map(|text| event(name, text)));
        }
        out.into()
    }

    fn map(&self, map: &BlockMap, piece: &MapPiece) -> Value {
        let mut told = json!({"from": piece.from, "cells": piece.cells});
        if piece.names {
            told["tenants"] = map.names().collect::<Vec<_>>().into();
        }
        told
    }

    /// What whoever holds a block is called.
    fn name(&self, tenant: TenantId) -> String {
        let known = self.tenancy.tenants.cache_name(tenant);
        known.map_or_else(|| format!("({})", tenant.0), |(_, name)| name.to_string())
    }

    /// Samples until nobody is there, or the server has nothing more to tell.
    async fn run(self: Arc<Self>) {
        let why = &self.observability.why;
        let mut sampling = PageSampler { before: why.now(), sweep: PrefixSweep::default(), samples: 0 };
        loop {
            let began = Instant::now();
            let looks = self.look(&sampling).await;
            let page = self.clone();
            let sample = self.load.off_thread(NOBODY, SAMPLE_BYTES, move || {
                let took = ProcessorTime::now();
                let frame = page.sample(&mut sampling, looks);
                Ok((sampling, page.send(frame), took.passed()))
            });
            // Where the threads are too busy for it nothing is told, and what was kept begins anew.
            let (again, more, took) = match sample.await {
                Ok(sampled) => sampled,
                Err(_) => {
                    let anew = PageSampler { before: why.now(), sweep: PrefixSweep::default(), samples: 0 };
                    (anew, self.open.lock().viewers.any(), Duration::ZERO)
                }
            };
            sampling = again;
            let page = &self.observability.metrics.page;
            page.took(took);
            let ended = self.load.is_draining() && self.load.in_flight.count() == 0;
            if !more || ended {
                let mut open = self.open.lock();
                // Somebody may have come meanwhile.
                if ended || !open.viewers.any() {
                    *open = OpenPages::default();
                    page.open.set(0);
                    return;
                }
            }
            tokio::time::sleep(pause(took).saturating_sub(began.elapsed())).await;
        }
    }

    /// The next blocks of the map and, where those are not the same, of the tree.
    async fn look(&self, sampling: &PageSampler) -> Option<Looks> {
        let (first, step) = {
            let open = self.open.lock();
            (open.map.next() * open.map.step(), open.map.step())
        };
        let of_map = self.view(first, step).await?;
        let of_tree = match step {
            1 => None,
            _ => Some(self.view(sampling.sweep.next(), 1).await?),
        };
        Some(Looks { of_map, of_tree })
    }

    async fn view(&self, first: u32, step: u32) -> Option<Vec<BlockView>> {
        let view = CacheCommand::View { first, step, count: VIEW_MAX };
        match tokio::time::timeout(PATIENCE, command(&self.served, view)).await {
            Ok(Ok(CacheResponse::Blocks(blocks))) => Some(blocks),
            _ => None,
        }
    }

    /// What is told now.
    fn sample(&self, sampling: &mut PageSampler, looks: Option<Looks>) -> Bytes {
        let Observability { why, metrics, .. } = &*self.observability;
        metrics.page.samples.inc();
        let mut told = json!({});
        told["moment"] = why.moment(&mut sampling.before).into();
        told["draining"] = self.load.is_draining().into();
        let tree = looks.and_then(|Looks { of_map, of_tree }| {
            let mut open = self.open.lock();
            let blocks = self.served.engine.stats().cache.blocks;
            let piece = open.map.see(&of_map, |tenant| self.name(tenant));
            told["map"] = self.map(&open.map, &piece);
            drop(open);
            match sampling.sweep.resize(blocks) {
                true => {
                    sampling.sweep.see(&of_tree.unwrap_or(of_map)).map(|tree| tree.json(|id| self.name(id)))
                }
                false => Some(json!({"blocks": blocks, "blocks_max": BLOCKS_MAX})),
            }
        });
        let mut out = event("sample", &told.to_string());
        let report = sampling.samples.is_multiple_of(REPORT_EVERY);
        let report = report.then(|| why.machine(&self.tenancy.tenants.caches()).to_string());
        sampling.samples += 1;
        let mut open = self.open.lock();
        let OpenPages { report: last, tree: last_tree, .. } = &mut *open;
        for (name, new, last) in
            [("why", report, last), ("tree", tree.map(|tree| tree.to_string()), last_tree)]
        {
            if let Some(text) = new {
                out.push_str(&event(name, &text));
                *last = Some(text);
            }
        }
        out.into()
    }

    /// Whether somebody reads it.
    fn send(&self, frame: Bytes) -> bool {
        let mut open = self.open.lock();
        open.viewers.send(&frame);
        self.observability.metrics.page.open.set(open.viewers.count() as i64);
        open.viewers.any()
    }
}

fn event(name: &str, json: &str) -> String {
    format!("event: {name}\ndata: {json}\n\n")
}

/// From the beginning of a sample that took so much of a processor to that of the next.
fn pause(took: Duration) -> Duration {
    SAMPLED_EVERY.max(took * SHARE)
}

/// What this thread has had of a processor.
struct ProcessorTime(Duration);

impl ProcessorTime {
    fn now() -> Self {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Self(Duration::new(time.tv_sec as u64, time.tv_nsec as u32))
    }

    fn passed(&self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_takes_a_hundredth_of_a_processor_at_most() {
        for (took_us, pause_us) in [(0, 250_000), (2_500, 250_000), (2_600, 260_000), (50_000, 5_000_000)] {
            assert_eq!(pause(Duration::from_micros(took_us)), Duration::from_micros(pause_us));
        }
    }

    #[test]
    fn processor_time_is_of_the_thread_and_not_of_the_clock() {
        let took = ProcessorTime::now();
        std::thread::sleep(Duration::from_millis(300));
        assert!(took.passed() < Duration::from_millis(150));
    }
}
