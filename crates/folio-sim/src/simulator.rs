//! Drives the real scheduler and cache through a [`Scenario`] in virtual time, and checks everything after every step.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use folio_engine::Drafters;
use folio_engine::plan::HOLE;
use folio_engine::request::{Event, Request, RequestId};
use folio_engine::{
    AdapterId, AdapterReport, CacheCommand, CancelRequest, FinishReason, Micros, Scheduler, WaitingFor, turn,
};
use folio_kv::{
    BlockHashes, EvictionPolicy, GroupConfig, KvCache, Layout, LruLeafFirst, TenantId, TierId, default_policy,
};

use crate::keeping;
use crate::mirror::Mirror;
use crate::oracle::expect;
use crate::report::RunReport;
use crate::rng::Rng;
use crate::scenario::{Behaviour, Client, DECLARED, Scenario};
use crate::stream::ClientStream;
use crate::transfers::Around;
use crate::world::{World, shared_blocks_of};

/// What only reports end.
const OUTSIDE: [WaitingFor; 3] = [WaitingFor::TierLoad, WaitingFor::RemotePrefill, WaitingFor::Adapter];

/// Turns without a step, longer than anybody waits for anything, after which nobody can go on without the slots of a load that never reports.
const LOST_TURNS: u32 = 1000;

/// Runs the world of `seed` to its end. The error says what went wrong and how to see it again; where something panics, that is printed.
pub fn run_seed(seed: u64) -> Result<RunReport, String> {
    let named = NamedRun(seed);
    let ended = Simulator::new(Scenario::from_seed(seed)).run();
    ended.map_err(|what| format!("seed {seed}: {what}\n{}", named.reproduce()))
}

/// A run whose seed is told where it panics.
struct NamedRun(u64);

impl NamedRun {
    fn reproduce(&self) -> String {
        let seed = self.0;
        format!("reproduce: FOLIO_SIM_SEED={seed} cargo test -p folio-sim one_seed -- --nocapture")
    }
}

impl Drop for NamedRun {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.reproduce());
        }
    }
}

/// An empty cache, and who records its events.
fn new_cache(scenario: &Scenario) -> (KvCache, Mirror) {
    let policy: Box<dyn EvictionPolicy> = match scenario.seed % 2 {
        0 => Box::new(LruLeafFirst::new()),
        _ => default_policy(0.01),
    };
    let mut cache = KvCache::with_groups(scenario.cache, &scenario.groups, policy);
    cache.set_quotas(&scenario.quotas).expect("scenarios have quotas that can be");
    cache.set_pin_limits(scenario.pins);
    let mirror = Mirror::new(&mut cache, scenario.events_most);
    (cache, mirror)
}

/// One that was asked for nothing yet.
fn new_scheduler(world: &World, cache: &mut KvCache) -> Scheduler {
    let scenario = &world.scenario;
    let scheduler = Scheduler::new(scenario.config.clone()).expect("scenarios have valid limits");
    let (keeps, has_tier) = (scenario.swaps, scenario.has_tier || scenario.swaps);
    let scheduler = scheduler
        .with_overlap(world.executor.depth(), world.executor.lag())
        .with_drafter(world.executor.drafter());
    let mut scheduler = if has_tier { scheduler.with_tiers([1, 2]) } else { scheduler }
        .swapping_to(keeps.then_some(TierId(0)));
    if !scenario.pages_adapters() {
        for id in (1..=3).filter_map(NonZeroU32::new).map(AdapterId) {
            let report = AdapterReport { id, weights: Ok(Arc::default()) };
            scheduler.adapter_read(cache, report, world.now);
        }
    }
    scheduler
}

/// See the module documentation.
pub struct Simulator {
    scheduler: Scheduler,
    cache: KvCache,
    mirror: Mirror,
    world: World,
    keeping: Rng,
    preempting: Rng,
    drafters: Drafters,
    drafting: Rng,
    waiting: Rng,
    storing: Rng,
    reading: Rng,
    crashing: Rng,
    /// Behind a crash: when the first tier knows what it has.
    indexed: Option<Micros>,
    /// Tokens of those whose answers ended before it.
    delivered_before: u64,
    /// When who is told that what it waits for is there.
    reports: Vec<(Micros, RequestId, WaitingFor)>,
    arriving: VecDeque<Client>,
    streams: Vec<ClientStream>,
    cancellations: Vec<CancelRequest>,
    /// Turns without a step: for no reason, and because of what is waited for outside.
    idle_turns: u32,
    outside_turns: u32,
    report: RunReport,
}

impl Simulator {
    pub fn new(scenario: Scenario) -> Self {
        let seed = scenario.seed;
        let (mut cache, mirror) = new_cache(&scenario);
        let world = World::new(scenario, &cache);
        let scheduler = new_scheduler(&world, &mut cache);
        Self {
            scheduler,
            keeping: Rng::new(seed ^ 0x9e7b),
            preempting: Rng::new(seed ^ 0x93ee),
            drafters: Drafters::default(),
            drafting: Rng::new(seed ^ 0xd4af),
            waiting: Rng::new(seed ^ 0x3a17),
            storing: Rng::new(seed ^ 0x5707),
            reading: Rng::new(seed ^ 0x4ea2),
            crashing: Rng::new(seed ^ 0xc4a6),
            indexed: None,
            delivered_before: 0,
            reports: Vec::new(),
            arriving: world.scenario.clients.iter().cloned().collect(),
            streams: Vec::new(),
            cancellations: Vec::new(),
            world,
            cache,
            mirror,
            idle_turns: 0,
            outside_turns: 0,
            report: RunReport::default(),
        }
    }

    /// Prints every plan.
    pub fn traced(mut self) -> Self {
        self.world.trace = true;
        self
    }

    /// To the end of the last request.
    pub fn run(mut self) -> Result<RunReport, String> {
        let limit = self.step_limit();
        while self.scheduler.has_work() || !self.arriving.is_empty() || self.world.transfers.under_way() {
            let counters = self.scheduler.counters();
            if counters.steps > limit + counters.late_rows {
                return Err(format!("not finished after {limit} steps: starvation or livelock"));
            }
            if self.world.scenario.crashes_at == Some(self.report.steps) {
                self.crash();
            }
            self.step()?;
        }
        self.check_end()?;
        self.check_found()?;
        self.report.requests = self.streams.len() as u64;
        self.report.behind_failures = self.world.behind_failures;
        self.report.right_drafts = self.world.right_drafts;
        self.report.collect(&self.scheduler, &self.cache.stats());
        self.report.drafter = self.world.drafter.as_ref().map(|drafter| drafter.counts).unwrap_or_default();
        let scenario = &self.world.scenario;
        let any = |groups: &[GroupConfig], has: fn(&GroupConfig) -> bool| u64::from(groups.iter().any(has));
        self.report.with_states = any(scenario.model_groups(), |group| group.layout == Layout::State);
        self.report.with_optional = any(&scenario.groups, |group| group.optional);
        Ok(self.report)
    }

    /// Every token could be computed alone, in a step of its own, as often as its sequence may be preempted.
    fn step_limit(&self) -> u64 {
        let tokens = self.world.scenario.clients.iter().map(|client| {
            let request = &client.request;
            (request.prompt.len() as u64 + u64::from(request.sampling.max_tokens)) * u64::from(request.n)
        });
        tokens.sum::<u64>() * u64::from(self.world.scenario.config.max_preemptions + 2) + 100
    }

    fn step(&mut self) -> Result<(), String> {
        self.report.steps += 1;
        self.world.steps = self.report.steps;
        let arrived = self.arrive();
        let now = self.world.now;
        let cancellations = std::mem::take(&mut self.cancellations);
        let block_tokens = self.cache.config().block_tokens;
        let arrived = arrived.into_iter().map(|request| {
            let (request, hashes) = request.hashed(block_tokens);
            // Two tiers, each with parts of its own.
            let (first, second) = (self.stored(&request), self.stored(&request));
            let first = self.recovered(&hashes, &request).unwrap_or(first);
            (request, hashes.with_stored(vec![first, second]))
        });
        let arrived: Vec<_> = arrived.collect();
        arrived.iter().for_each(|(request, _)| self.drafters.open(request));
        self.scheduler.admit(arrived, cancellations, now);
        self.cache.advance(now.0);
        let scenario = &self.world.scenario;
        keeping::command(&mut self.keeping, &mut self.scheduler, &mut self.cache, &scenario.clients)?;
        self.report.pins += keeping::check(&self.cache, scenario.pins)?;
        if scenario.preempts_one_in > 0 && self.preempting.one_in(scenario.preempts_one_in) {
            self.scheduler.preempt_all(&mut self.cache);
            if self.preempting.one_in(2) {
                // What was given up does not survive.
                self.scheduler.command(&mut self.cache, CacheCommand::Clear { tenant: None });
            }
        }
        self.drafters.propose(&mut self.scheduler);
        self.draft();
        self.read_adapters();
        self.wait();
        self.transfer()?;
        let events = std::mem::take(turn(&mut self.scheduler, &mut self.cache, &mut self.world));
        self.drafters.follow(&events);
        std::mem::replace(&mut self.world.wrong, Ok(()))?;
        for order in std::mem::take(&mut self.world.orders) {
            let World { transfers, now, .. } = &mut self.world;
            transfers.order(order, &self.streams, (&self.cache, &mut self.report), *now)?;
        }
        let (tokens, decodes) = self.scheduler.last_step();
        let config = &self.world.scenario.config;
        if decodes > 0 && tokens - decodes > config.max_prefill_tokens_while_decoding {
            return Err(format!("{} prompt tokens beside {decodes} decodes", tokens - decodes));
        }
        let finished = self.world.finished.take();
        // Time passes while somebody waits for it.
        self.world.pass(if finished.is_none() { 1000 } else { 0 });
        let got_on = finished.is_some() || !events.is_empty();
        // What is waited for outside ends some time.
        let reads = !self.world.reads.is_empty();
        let outside = self.scheduler.suspended() > 0 || self.world.transfers.under_way() || reads;
        self.idle_turns = if got_on || outside { 0 } else { self.idle_turns + 1 };
        self.outside_turns = if got_on || !outside { 0 } else { self.outside_turns + 1 };
        if self.idle_turns > 2 || self.outside_turns > 5000 {
            let (scheduler, cache) = (&self.scheduler, self.cache.stats());
            return Err(format!("nothing is computed although something waits\n{scheduler:?}{cache:?}"));
        }
        let (planned, failed) = finished.unwrap_or(((self.report.steps, now), false));
        for (id, event) in events {
            self.deliver(id, event, failed, planned)?;
        }
        self.clients_act();
        self.scheduler.check_beside(&self.cache, self.world.transfers.tables())?;
        self.mirror.follow(&mut self.cache, &mut self.report)?;
        self.check_tenants()
    }

    /// What a tier has of a prompt: up to three ranges of its blocks.
    fn stored(&mut self, request: &Request) -> Vec<Range<u32>> {
        let size = self.cache.config().block_tokens;
        let most = (request.prompt.len() as u32 - 1) / size;
        if !self.world.scenario.has_tier || most == 0 {
            return Vec::new();
        }
        let mut ends: Vec<u32> = (0..6).map(|_| self.storing.range(0, most.into()) as u32).collect();
        ends.sort_unstable();
        // Loads end where blocks of all groups do.
        let ranges = ends.chunks_exact(2).map(|pair| pair[0]..self.cache.border(pair[1] * size) / size);
        let mut ranges: Vec<Range<u32>> = ranges.filter(|range| !range.is_empty()).collect();
        ranges.dedup_by(|next, range| next.start <= range.end);
        ranges
    }

    /// Behind a crash: what the first tier has of a prompt, which is what the engine before had stored there. Nothing, until it knows.
    fn recovered(&self, hashes: &BlockHashes, request: &Request) -> Option<Vec<Range<u32>>> {
        let indexed = self.indexed?;
        let size = self.cache.config().block_tokens;
        let most = (request.prompt.len() as u32 - 1) / size;
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for (index, hash) in (0..most).zip(hashes.iter()) {
            match ranges.last_mut() {
                _ if self.world.now < indexed || !self.world.transfers.has_kept(hash) => {}
                Some(last) if last.end == index => last.end += 1,
                _ => ranges.push(index..index + 1),
            }
        }
        // Loads end where blocks of all groups do.
        let ranges = ranges.into_iter().map(|range| range.start..self.cache.border(range.end * size) / size);
        Some(ranges.filter(|range| !range.is_empty()).collect())
    }

    /// The engine's process dies, and another begins in its place. Who was owed an answer, and did not leave, asks again.
    fn crash(&mut self) {
        let now = self.world.now;
        self.report.crashes += 1;
        (self.cache, self.mirror) = new_cache(&self.world.scenario);
        self.world.restart(&self.cache, &mut self.crashing, &mut self.report);
        self.scheduler = new_scheduler(&self.world, &mut self.cache);
        self.drafters = Drafters::default();
        self.reports.clear();
        self.cancellations.clear();
        (self.idle_turns, self.outside_turns) = (0, 0);
        self.indexed = Some(Micros(now.0 + self.crashing.skewed(1, 200_000)));
        let lost = self.streams.extract_if(.., |stream| stream.finished.contains(&None));
        let lost: Vec<ClientStream> = lost.collect();
        self.report.lost_requests += lost.len() as u64;
        let delivered: usize = self.streams.iter().flat_map(|stream| &stream.tokens).map(Vec::len).sum();
        self.delivered_before = delivered as u64;
        for stream in lost.into_iter().filter(|stream| stream.left.is_none()) {
            self.report.repeated_requests += 1;
            let arrives = Micros(now.0 + self.crashing.skewed(1, 50_000));
            let at = self.arriving.partition_point(|client| client.arrives <= arrives);
            self.arriving.insert(at, Client { arrives, ..stream.client });
        }
    }

    /// Those beside the steps go on.
    fn transfer(&mut self) -> Result<(), String> {
        let over = !self.scheduler.has_work() && self.arriving.is_empty();
        if over || self.outside_turns > LOST_TURNS {
            let lost = self.world.transfers.end_lost(self.world.now);
            self.report.unreported_loads += if over { lost } else { 0 };
        }
        let World { transfers, wrote, scenario, now, .. } = &mut self.world;
        transfers.act(&mut Around {
            scheduler: &mut self.scheduler,
            cache: &mut self.cache,
            streams: &self.streams,
            scenario,
            wrote,
            report: &mut self.report,
            now: *now,
        })
    }

    /// Weights of adapters are there by now, or cannot be read.
    fn read_adapters(&mut self) {
        let now = self.world.now;
        for (_, id) in self.world.reads.extract_if(.., |(at, _)| *at <= now) {
            let weights = if self.reading.one_in(16) { Err("gone".to_owned()) } else { Ok(Arc::default()) };
            if weights.is_err() {
                let of = |stream: &&mut ClientStream| stream.client.request.adapter_id() == Some(id);
                self.streams.iter_mut().filter(of).for_each(|stream| stream.unread = true);
            }
            self.scheduler.adapter_read(&mut self.cache, AdapterReport { id, weights }, now);
        }
    }

    /// Some request begins to wait for something outside; what others waited for is there, be it late or after their end.
    fn wait(&mut self) {
        let now = self.world.now;
        for (_, id, reason) in self.reports.extract_if(.., |(at, ..)| *at <= now) {
            let stream = self.streams.iter_mut().find(|stream| stream.client.request.id == id);
            let Some(stream) = stream else { continue };
            self.report.late_reports += u64::from(stream.finished.iter().all(Option::is_some));
            if reason == WaitingFor::Adapter {
                stream.adapter = None;
            }
            self.scheduler.resume(id, reason, now);
        }
        let one_in = self.world.scenario.waits_one_in;
        if one_in == 0 || !self.waiting.one_in(one_in) {
            return;
        }
        let living = self.streams.iter_mut().filter(|stream| stream.finished.contains(&None));
        let mut living: Vec<&mut ClientStream> = living.collect();
        if living.is_empty() {
            return;
        }
        let stream = living.swap_remove(self.waiting.range(0, living.len() as u64 - 1) as usize);
        let (id, reason) = (stream.client.request.id, *self.waiting.pick(&OUTSIDE));
        self.scheduler.suspend(id, reason, now);
        if reason == WaitingFor::Adapter {
            stream.adapter.get_or_insert(now);
        }
        if !self.waiting.one_in(4) {
            self.reports.push((Micros(now.0 + self.waiting.skewed(1, 300_000)), id, reason));
        }
    }

    /// Says what some choices may say next, more or less rightly.
    fn draft(&mut self) {
        let percent = self.world.scenario.drafts;
        if percent == 0 {
            return;
        }
        let vocab = u64::from(self.world.scenario.vocab);
        for stream in &self.streams {
            let Some(expected) = &stream.expectation else { continue };
            for (choice, answer) in expected.choices.iter().enumerate() {
                if stream.finished[choice].is_some() || self.drafting.one_in(3) {
                    continue;
                }
                let rest = answer.tokens.iter().skip(stream.tokens[choice].len());
                let count = self.drafting.range(1, 5) as usize;
                let drafts: Vec<u32> = rest
                    .take(count)
                    .map(|(token, _)| match self.drafting.range(1, 100) <= percent {
                        true => *token,
                        false => self.drafting.range(0, vocab - 1) as u32,
                    })
                    .collect();
                self.scheduler.propose(stream.client.request.id, choice as u32, &drafts);
            }
        }
    }

    fn arrive(&mut self) -> Vec<folio_engine::Request> {
        if !self.scheduler.has_work()
            && let Some(next) = self.arriving.front()
        {
            self.world.pass(next.arrives.0.saturating_sub(self.world.now.0));
        }
        let mut requests = Vec::new();
        while let Some(client) = self.arriving.pop_front_if(|client| client.arrives <= self.world.now) {
            requests.push(client.request.clone());
            let n = client.request.n as usize;
            self.report.forks += n as u64 - 1;
            self.streams.push(ClientStream {
                client,
                expectation: None,
                events: 0,
                buffered: 0,
                prompt_seen: false,
                pooled: false,
                tokens: vec![Vec::new(); n],
                finished: vec![None; n],
                left: None,
                ended_choice: None,
                deaf: false,
                struck: false,
                adapter: None,
                unread: false,
            });
        }
        requests
    }

    /// `planned`: the step whose event it is, and when.
    fn deliver(
        &mut self,
        id: RequestId,
        event: Event,
        failed: bool,
        planned: (u64, Micros),
    ) -> Result<(), String> {
        let now = self.world.now;
        let (vocab, max_model_len) =
            (self.world.scenario.vocab as usize, self.world.scenario.config.max_model_len);
        let stream = self.streams.iter_mut().find(|stream| stream.client.request.id == id);
        let stream = stream.ok_or_else(|| format!("an event for {id:?}, which never arrived"))?;
        stream.struck |= failed;
        let adapter_us = self.world.scenario.config.adapter_wait_us_max;
        let overdue = stream.adapter.is_some_and(|since| since.0 + adapter_us < now.0);
        let unloaded = overdue || stream.unread;
        let groups = self.world.scenario.groups.clone();
        let expectation = stream.expectation.take();
        let expectation =
            expectation.unwrap_or_else(|| expect(&stream.client.alone(), vocab, max_model_len, &groups));
        let taken = stream.take(&event, &expectation, now, unloaded);
        if let Event::Finished { reason: FinishReason::Stop, timing, .. } = &event
            && stream.pooled
        {
            self.report.pooled += 1;
            self.report.pooled_preempted += u64::from(timing.preemptions > 0);
        }
        stream.expectation = Some(expectation);
        let late = stream.left.is_some_and(|left| left < planned.0)
            || stream.client.request.deadline.is_some_and(|deadline| deadline <= planned.1);
        if late && !matches!(event, Event::Finished { .. }) {
            return Err(format!("{id:?} was cancelled or overdue before the step and got {event:?}"));
        }
        taken.map_err(|what| format!("{id:?}: {what}, event {event:?}"))?;
        if stream.answers() {
            return Ok(());
        }
        if !stream.deaf {
            stream.deaf = true;
            stream.left.get_or_insert(self.report.steps);
            self.cancellations.push(CancelRequest { request: id, choice: None });
        }
        Ok(())
    }

    /// Cancellations that are due, and slow readers reading.
    fn clients_act(&mut self) {
        let now = self.world.now;
        for stream in &mut self.streams {
            stream.buffered = stream.buffered.saturating_sub(1);
            let id = stream.client.request.id;
            let cancels = match stream.client.behaviour {
                Behaviour::CancelsAt(at) => at <= now,
                Behaviour::CancelsAfter(events) => stream.events >= events,
                _ => false,
            };
            if cancels && stream.left.is_none() {
                stream.left.get_or_insert(self.report.steps);
                self.cancellations.push(CancelRequest { request: id, choice: None });
            }
            if let Behaviour::EndsChoiceAfter { events, choice } = stream.client.behaviour
                && stream.events >= events
                && stream.ended_choice.is_none()
            {
                stream.ended_choice = Some(choice);
                self.cancellations.push(CancelRequest { request: id, choice: Some(choice) });
            }
        }
    }

    /// No block is held by two tenants.
    fn check_tenants(&mut self) -> Result<(), String> {
        let mut declared_blocks = 0;
        for (group, blocks) in self.world.wrote.iter().map(Vec::len).enumerate() {
            let mut holder: Vec<Option<TenantId>> = vec![None; blocks];
            let loaded = self.world.transfers.tables_of_tenants();
            let loaded = loaded.map(|(tenant, table)| (RequestId(u64::MAX), tenant, table));
            for (request, tenant, table) in self.scheduler.tables().chain(loaded) {
                let shared = shared_blocks_of(table, group);
                declared_blocks += shared as u64;
                for (index, block) in table.group(group).iter().enumerate() {
                    if *block == HOLE {
                        continue;
                    }
                    let tenant = if index < shared { DECLARED } else { tenant };
                    let holder = &mut holder[block.0 as usize];
                    if holder.is_some_and(|other| other != tenant) {
                        return Err(format!(
                            "group {group}: {block:?} belongs to {tenant:?} ({request:?}) and {holder:?}"
                        ));
                    }
                    *holder = Some(tenant);
                }
            }
        }
        self.report.declared_blocks += declared_blocks;
        Ok(())
    }

    /// Whatever is found of a draft model's groups is what it computed of those tokens, be it that nobody went on from it.
    fn check_found(&mut self) -> Result<(), String> {
        let Some(drafter) = &mut self.world.drafter else { return Ok(()) };
        for stream in &self.streams {
            let request = &stream.client.request;
            for said in &stream.tokens {
                let mut tokens = request.prompt.to_vec();
                tokens.extend(said.iter().map(|(token, _)| *token));
                let hashes = BlockHashes::new(&request.root, &tokens, self.cache.config().block_tokens);
                let table = self.cache.attach(hashes, &tokens, tokens.len() as u32, &mut Vec::new());
                let found = drafter.check_found(&table, &tokens, &self.world.scenario);
                self.cache.release(table, &tokens);
                found.map_err(|what| format!("found of {:?}: {what}", request.id))?;
            }
        }
        Ok(())
    }

    fn check_end(&self) -> Result<(), String> {
        for stream in &self.streams {
            if let Some(choice) = stream.finished.iter().position(Option::is_none) {
                return Err(format!("{:?} choice {choice} was never finished", stream.client.request.id));
            }
        }
        let stats = self.cache.stats();
        if stats.active_blocks != stats.pinned_blocks
            || stats.windows().iter().any(|window| window.active_blocks != 0)
        {
            return Err(format!("{} blocks are still held at the end", stats.active_blocks));
        }
        let delivered: usize = self.streams.iter().flat_map(|stream| &stream.tokens).map(Vec::len).sum();
        if delivered as u64 != self.delivered_before + self.scheduler.counters().generation_tokens {
            return Err("delivered tokens and the counter differ".into());
        }
        Ok(())
    }
}
