//! Those who read and write KV beside the steps: tiers and peers, modelled.
//!
//! Owns: leases and what was read under them; tickets, what is written under them, and the tables that are loaded. Must never: touch a
//! block without one of both, or be waited for by a step.
//!
//! A *reader* copies block by block while steps run. What it copied without a lease to the end it throws away; with one, all of it must
//! be what it asked for.
//!
//! A *load* takes blocks behind what is cached of some prompt, for up to three transfers; others take blocks of a sequence's own table,
//! which the scheduler gives them. They end in any order, some with damaged bytes. A transfer leaves anything in its slots before it leaves the content there, so whoever else reads or writes them is found out
//! by other bytes. Some loads are given up early: their transfers go on and report late, and until then nobody is given their slots. One of a tier's
//! may never report, as long as anybody is left who gets on without its slots.
//!
//! Where the engine dies all of that goes with it. Its tiers still have what they said that they had stored, but for what they gave up since.

use std::collections::HashSet;

use folio_engine::plan::StepPlan;
use folio_engine::request::RequestId;
use folio_engine::{LoadOrder, Micros, Scheduler, StoreOrder, TransferOrder, WaitingFor};
use folio_kv::{
    BlockHash, BlockHashes, BlockId, BlockTable, Content, GroupConfig, HOLE, KvCache, Lease, Root, TenantId,
    Ticket,
};

use crate::memory::{GroupMemory, Memory, block_cells};
use crate::oracle::contents;
use crate::report::RunReport;
use crate::rng::{Rng, mix};
use crate::scenario::Scenario;
use crate::stream::ClientStream;

const READERS_MOST: usize = 4;
/// But for those of the last load.
const TRANSFERS_MOST: usize = 4;
/// Of a world, so that nobody waits for ever because of them.
const LOADS_MOST: u64 = 60;
/// Longest that a lease holds, and that anything beside the steps takes.
const LONGEST_US: u64 = 300_000;

/// When a transfer is done that never reports.
const NEVER: Micros = Micros(u64::MAX);

/// A block and what it must hold, or will.
struct Block {
    group: usize,
    block: BlockId,
    content: Vec<u64>,
}

impl Block {
    fn holds(&self, groups: &[GroupMemory]) -> bool {
        groups[self.group].block(self.block.0) == self.content
    }
}

struct LeaseReader {
    lease: Lease,
    until: Micros,
    done: Micros,
    /// Still to be copied.
    blocks: Vec<Block>,
    /// Something that was copied is not what was asked for.
    torn: bool,
    /// What a tier is to keep of it.
    stores: Vec<Content>,
}

impl LeaseReader {
    fn copy(&mut self, groups: &[GroupMemory], blocks: usize) {
        let rest = self.blocks.len().saturating_sub(blocks);
        self.torn |= self.blocks.drain(rest..).any(|block| !block.holds(groups));
    }
}

/// A prefix that is being loaded.
struct Load {
    id: u64,
    tenant: TenantId,
    tokens: Vec<u32>,
    /// Until it is given up.
    table: Option<BlockTable>,
    gives_up: Micros,
    waiter: Option<(RequestId, WaitingFor)>,
}

struct Transfer {
    ticket: Ticket,
    /// The load it is part of; `None`: it is a sequence's.
    load: Option<u64>,
    tenant: TenantId,
    blocks: Vec<Block>,
    /// Whether its slots hold something else than before, and how many of them the content.
    begun: bool,
    written: usize,
    /// The last step that was planned before it, which must have ended before it writes.
    after: u64,
    /// Whoever carries it has others before it until then.
    begins: Micros,
    done: Micros,
    verified: bool,
    /// Nobody wants it any more, and it will not begin.
    cancelled: bool,
}

impl Transfer {
    fn write(&mut self, groups: &mut [GroupMemory], blocks: usize) {
        if !std::mem::replace(&mut self.begun, true) {
            for Block { group, block, .. } in &self.blocks {
                groups[*group].block_mut(block.0).fill(mix(self.ticket.0) | 1);
            }
        }
        for Block { group, block, content } in self.blocks.iter().skip(self.written).take(blocks) {
            groups[*group].block_mut(block.0).copy_from_slice(content);
        }
        self.written = self.written.saturating_add(blocks).min(self.blocks.len());
    }
}

/// What of a world those beside the steps may see and change.
pub(crate) struct Around<'a> {
    pub scheduler: &'a mut Scheduler,
    pub cache: &'a mut KvCache,
    pub streams: &'a [ClientStream],
    pub scenario: &'a Scenario,
    /// See `World`.
    pub wrote: &'a mut [Vec<Option<TenantId>>],
    pub report: &'a mut RunReport,
    pub now: Micros,
}

/// See the module documentation.
pub(crate) struct Transfers {
    memory: Memory,
    rng: Rng,
    /// Which load never reports, and whether it began.
    losing: Rng,
    lost: bool,
    groups: Vec<GroupConfig>,
    readers: Vec<LeaseReader>,
    loads: Vec<Load>,
    transfers: Vec<Transfer>,
    next: u64,
    /// The last steps that were begun, and that ended.
    begun: u64,
    ended: u64,
    now: Micros,
    /// Blocks of group 0 that tiers were given to keep, and said that they had stored.
    kept: HashSet<BlockHash>,
    /// The engine is not the one that had it stored.
    restarted: bool,
}

impl Transfers {
    pub fn new(memory: Memory, scenario: &Scenario) -> Self {
        Self {
            memory,
            rng: Rng::new(scenario.seed ^ 0x71c3),
            losing: Rng::new(scenario.seed ^ 0x105e),
            lost: false,
            groups: scenario.groups.clone(),
            readers: Vec::new(),
            loads: Vec::new(),
            transfers: Vec::new(),
            next: 0,
            begun: 0,
            ended: 0,
            now: Micros(0),
            kept: HashSet::new(),
            restarted: false,
        }
    }

    /// Those of an engine that died were `before`. What was under way went with it; tiers still have what they had stored, but for what
    /// they gave up for other content, and of what they were just reading they may have a beginning that they did not tell of.
    pub fn restart(&mut self, before: Self, crashing: &mut Rng, report: &mut RunReport) {
        (self.rng, self.losing, self.lost, self.next) = (before.rng, before.losing, before.lost, before.next);
        (self.now, self.kept, self.restarted) = (before.now, before.kept, true);
        for reader in before.readers.iter().filter(|reader| !reader.torn && before.now < reader.until) {
            let begun = crashing.range(0, reader.stores.len() as u64) as usize;
            self.kept.extend(hashes_of(&reader.stores[..begun]));
        }
        let had = self.kept.len();
        // Not by the order of the set, which is another in each run.
        let salt = crashing.word();
        let word = |hash: &BlockHash| u64::from_le_bytes(hash.0[..8].try_into().expect("eight bytes"));
        self.kept.retain(|hash| !mix(word(hash) ^ salt).is_multiple_of(8));
        report.reclaimed_blocks += (had - self.kept.len()) as u64;
    }

    /// Whether a tier said that it had stored a block of group 0, and did not give it up.
    pub fn has_kept(&self, hash: &BlockHash) -> bool {
        self.kept.contains(hash)
    }

    /// Something is held or owed.
    pub fn under_way(&self) -> bool {
        !(self.readers.is_empty() && self.loads.is_empty() && self.transfers.is_empty())
    }

    /// What would never report does so now. How many there are.
    pub fn end_lost(&mut self, now: Micros) -> u64 {
        let mut ended = 0;
        for transfer in self.transfers.iter_mut().filter(|transfer| transfer.done == NEVER) {
            transfer.done = now;
            ended += 1;
        }
        ended
    }

    pub fn tables(&self) -> impl Iterator<Item = &BlockTable> {
        self.loads.iter().filter_map(|load| load.table.as_ref())
    }

    pub fn tables_of_tenants(&self) -> impl Iterator<Item = (TenantId, &BlockTable)> {
        self.loads.iter().filter_map(|load| Some((load.tenant, load.table.as_ref()?)))
    }

    /// A step was begun, with nothing in its plan that a transfer writes.
    pub fn step_begun(&mut self, plan: &StepPlan) -> Result<(), String> {
        self.begun = plan.step;
        let sizes: Vec<u32> = self.memory.groups().iter().map(|group| group.config.block_tokens).collect();
        for Block { group, block, .. } in self.transfers.iter().flat_map(|transfer| &transfer.blocks) {
            let (size, group) = (sizes[*group], *group as u32);
            let tables = plan.sequences.iter().map(|sequence| {
                // What lies behind its rows is neither read nor written.
                let end = (sequence.first_position + sequence.tokens.len() as u32).div_ceil(size);
                let written = (end + sequence.tentative) as usize;
                sequence.block_tables[group as usize].iter().take(written)
            });
            let copies = plan.copies.iter().filter(|copy| copy.group == group);
            if tables.flatten().any(|entry| *entry == block.0)
                || copies.flat_map(|copy| [copy.from, copy.to]).any(|of| of == *block)
            {
                return Err(format!("group {group}, {block:?}: a transfer writes it, and so does {plan:?}"));
            }
        }
        self.go_on();
        Ok(())
    }

    /// Everybody copies a little before the step ends.
    pub fn step_ends(&mut self, step: u64) {
        self.go_on();
        self.ended = step;
    }

    fn go_on(&mut self) {
        let mut groups = self.memory.groups();
        self.readers.iter_mut().for_each(|reader| reader.copy(&groups, 1));
        let (ended, now) = (self.ended, self.now);
        let goes_on = |transfer: &&mut Transfer| {
            transfer.after <= ended && transfer.begins <= now && !transfer.cancelled
        };
        for transfer in self.transfers.iter_mut().filter(goes_on) {
            transfer.write(&mut groups, 1);
        }
    }

    /// Between steps: what is done ends, what is given up is released, and something new begins.
    pub fn act(&mut self, around: &mut Around<'_>) -> Result<(), String> {
        self.now = around.now;
        self.go_on();
        self.end_readers(around)?;
        self.end_transfers(around)?;
        self.release(around);
        let living = around.streams.iter().any(|stream| stream.finished.contains(&None));
        let begins = |one_in: u64, rng: &mut Rng| living && one_in > 0 && rng.one_in(one_in);
        if begins(around.scenario.leases_one_in, &mut self.rng) && self.readers.len() < READERS_MOST {
            self.lease(around);
        }
        // Loads give way to who was refused blocks.
        let room = self.next < LOADS_MOST && !around.scheduler.contended();
        if begins(around.scenario.loads_one_in, &mut self.rng)
            && room
            && self.transfers.len() < TRANSFERS_MOST
        {
            match self.rng.one_in(2) {
                true => self.load(around),
                false => self.load_for_sequence(around),
            }
        }
        let late = self.transfers.iter().any(|transfer| self.is_late(transfer, around.scheduler));
        around.report.wanted_late_slots += u64::from(late && around.scheduler.contended());
        self.check(around.scheduler)
    }

    /// Its table is gone, or ends before it.
    fn is_late(&self, transfer: &Transfer, scheduler: &Scheduler) -> bool {
        let tables = scheduler.tables().map(|(_, _, table)| table).chain(self.tables());
        { tables }.all(|table| !table.has_ticket(transfer.ticket))
    }

    /// What a transfer writes is in no other table and no other transfer.
    fn check(&self, scheduler: &Scheduler) -> Result<(), String> {
        let mut all = Vec::new();
        for transfer in &self.transfers {
            all.extend(transfer.blocks.iter().map(|block| (transfer.ticket, block)));
        }
        for (at, (ticket, Block { group, block, .. })) in all.iter().enumerate() {
            let again = all[..at].iter().any(|(_, other)| (other.group, other.block) == (*group, *block));
            let held = scheduler
                .tables()
                .any(|(_, _, table)| table.group(*group).contains(block) && !table.has_ticket(*ticket));
            if again || held {
                return Err(format!("group {group}, {block:?}: a transfer writes it, and it was let again"));
            }
        }
        Ok(())
    }

    fn lease(&mut self, around: &mut Around<'_>) {
        let tables = around.scheduler.tables();
        let ready = tables.filter(|(_, _, table)| table.published_blocks() > 0);
        let ready: Vec<_> = ready.collect();
        if ready.is_empty() {
            return;
        }
        let (request, _, table) = ready[self.rng.range(0, ready.len() as u64 - 1) as usize];
        let stream = around.streams.iter().find(|stream| stream.client.request.id == request);
        let blocks = self.rng.range(1, table.published_blocks().into()) as u32;
        let Some(tokens) = stream.and_then(|stream| tokens_of(stream, table, blocks)) else { return };
        let contents = contents(&tokens, &self.groups);
        let mut later = || Micros(around.now.0 + self.rng.skewed(1, LONGEST_US));
        let (until, done) = (later(), later());
        let first = self.rng.range(0, blocks.into()) as u32;
        let to = blocks * table.block_tokens(0);
        let hashes = table.hashes().clone();
        let hash_of = move |table: &BlockTable, group, index| {
            let last = (index + 1) * table.block_tokens(group) / table.block_tokens(0) - 1;
            hashes.get(last).copied()
        };
        let (lease, held) = around.cache.lease(table.hashes(), (first, to), until.0);
        let leased = held.iter().map(|of| {
            let (group, config) = (of.group as usize, around.cache.group_config(of.group as usize));
            let indices = 0..to / config.block_tokens;
            let index = indices.into_iter().find(|index| hash_of(table, group, *index) == Some(of.hash));
            let index = index.expect("the hash of one of the table's blocks");
            Block { group, block: of.block, content: content_of(config, &contents[group], index) }
        });
        let leased = leased.collect();
        around.report.leases += 1;
        self.readers.push(LeaseReader {
            lease,
            until,
            done,
            blocks: leased,
            torn: false,
            stores: Vec::new(),
        });
    }

    fn end_readers(&mut self, around: &mut Around<'_>) -> Result<(), String> {
        let now = around.now;
        let done: Vec<LeaseReader> = self.readers.extract_if(.., |reader| reader.done <= now).collect();
        for mut reader in done {
            reader.copy(&self.memory.groups(), usize::MAX);
            let kept = self.keep(&reader, now, around.report);
            match around.scheduler.end_store(around.cache, reader.lease, kept, now) {
                true if reader.torn => {
                    return Err(format!("{:?} held, and other content was read", reader.lease));
                }
                false if now < reader.until => {
                    return Err(format!("{:?} was lost before {:?}", reader.lease, reader.until));
                }
                held => {
                    around.report.lost_leases += u64::from(!held);
                    around.report.torn_reads += u64::from(reader.torn);
                }
            }
        }
        Ok(())
    }

    /// Begins to load more of what some client asks for or was told.
    fn load(&mut self, around: &mut Around<'_>) {
        let streams = around.streams;
        let stream = &streams[self.rng.range(0, streams.len() as u64 - 1) as usize];
        let request = &stream.client.request;
        let mut tokens = request.prompt.to_vec();
        tokens.extend(stream.tokens[0].iter().map(|(token, _)| *token));
        let cache = &mut *around.cache;
        // It begins and ends where blocks of all groups do.
        let sizes = || (0..cache.groups()).map(|group| cache.group_config(group).block_tokens);
        let whole =
            sizes().fold(1, |all, size| (all..).step_by(all as usize).find(|n| n % size == 0).unwrap_or(all));
        let hashes = BlockHashes::new(&request.root.own(), &tokens, cache.config().block_tokens);
        let cached = cache.lookup(&hashes, &tokens).full_blocks * cache.config().block_tokens;
        let mut copies = Vec::new();
        let most = cached / whole * whole;
        let mut table = cache.attach(hashes, &tokens, most, &mut copies);
        if !copies.is_empty() {
            let hashes = cache.release(table, &tokens);
            table = cache.empty_table(hashes);
        }
        let tenant = request.root.tenant;
        self.next += 1;
        let contents = contents(&tokens, &self.groups);
        for _ in 0..self.rng.range(1, 3) {
            let left = (tokens.len() as u32 - table.capacity().min(tokens.len() as u32)) / whole;
            if left == 0 {
                break;
            }
            let blocks = self.rng.skewed(1, left.into()) as u32 * whole / table.block_tokens(0);
            let Some((ticket, _)) = cache.begin_load(&mut table, blocks) else { break };
            self.begin((ticket, Some(self.next)), &table, blocks, &contents, cache, around.now);
            around.report.transfers += 1;
        }
        if !table.has_transfers() {
            cache.release(table, &tokens);
            return;
        }
        let id = request.id;
        let waiter = self
            .rng
            .one_in(2)
            .then(|| (id, *self.rng.pick(&[WaitingFor::TierLoad, WaitingFor::RemotePrefill])));
        if let Some((id, reason)) = waiter {
            around.scheduler.suspend(id, reason, around.now);
        }
        let gives_up = Micros(around.now.0 + self.rng.skewed(1, LONGEST_US));
        self.loads.push(Load { id: self.next, tenant, tokens, table: Some(table), gives_up, waiter });
    }

    /// Begins to load more of what some sequence knows, into its own table.
    fn load_for_sequence(&mut self, around: &mut Around<'_>) {
        let open = |stream: &ClientStream, choice: &usize| stream.finished[*choice].is_none();
        let choices = |at: usize| (0..around.streams[at].finished.len()).map(move |choice| (at, choice));
        let choices: Vec<_> = (0..around.streams.len())
            .flat_map(choices)
            .filter(|(at, choice)| open(&around.streams[*at], choice))
            .collect();
        if choices.is_empty() {
            return;
        }
        let (at, choice) = *self.rng.pick(&choices);
        let stream = &around.streams[at];
        let (id, blocks) = (stream.client.request.id, self.rng.skewed(1, 6) as u32);
        let of = (id, choice as u32);
        let Some(ticket) = around.scheduler.begin_load(around.cache, of, blocks, around.now) else { return };
        let mut tables = around.scheduler.tables();
        let (.., table) = tables.find(|(.., table)| table.has_ticket(ticket)).expect("it was begun for it");
        let mut tokens = stream.client.request.prompt.to_vec();
        tokens.extend(stream.tokens[choice].iter().map(|(token, _)| *token));
        self.next += 1;
        let contents = contents(&tokens, &self.groups);
        self.begin((ticket, None), table, blocks, &contents, around.cache, around.now);
        around.report.sequence_transfers += 1;
        around.report.partial_loads += u64::from(table.computed() < table.computable());
    }

    /// A transfer writes the last blocks of a table.
    fn begin(
        &mut self,
        (ticket, load): (Ticket, Option<u64>),
        table: &BlockTable,
        blocks: u32,
        contents: &[Vec<u64>],
        cache: &KvCache,
        now: Micros,
    ) {
        let verified = !self.rng.one_in(5);
        let mut written = Vec::new();
        for (group, contents) in contents.iter().enumerate() {
            let (config, size) = (cache.group_config(group), table.block_tokens(group));
            let from = table.capacity() - blocks * table.block_tokens(0);
            for index in from / size..table.capacity() / size {
                let block = &table.group(group)[index as usize];
                if *block == HOLE {
                    continue;
                }
                let mut content = content_of(config, contents, index);
                if !verified {
                    content.last_mut().into_iter().for_each(|last| *last ^= 2);
                }
                written.push(Block { group, block: *block, content });
            }
        }
        self.transfers.push(Transfer {
            ticket,
            load,
            tenant: table.hashes().root().tenant,
            blocks: written,
            begun: false,
            written: 0,
            after: self.begun,
            begins: Micros(0),
            done: Micros(now.0 + self.rng.skewed(1, LONGEST_US)),
            verified,
            cancelled: false,
        });
    }

    /// What the scheduler asks of a tier.
    pub fn order(
        &mut self,
        order: TransferOrder,
        streams: &[ClientStream],
        (cache, report): (&KvCache, &mut RunReport),
        now: Micros,
    ) -> Result<(), String> {
        let done = Micros(now.0 + self.rng.skewed(1, LONGEST_US));
        let (root, contents) = match &order {
            TransferOrder::Load(LoadOrder { root, contents, .. })
            | TransferOrder::Store(StoreOrder { root, contents, .. }) => (root, contents),
            TransferOrder::Promote { ticket, .. } => {
                let known = self.transfers.iter().any(|transfer| transfer.ticket == *ticket);
                return known
                    .then_some(())
                    .ok_or_else(|| format!("{ticket:?} has reported, and is promoted"));
            }
            TransferOrder::Cancel { ticket, .. } => {
                // Some tiers do not look, or are at it already.
                let of = self.transfers.iter_mut().find(|transfer| transfer.ticket == *ticket);
                let of = of.filter(|transfer| transfer.done != NEVER && !transfer.begun);
                if let Some(transfer) = of.filter(|_| !self.rng.one_in(4)) {
                    (transfer.cancelled, transfer.done) = (true, now);
                }
                return Ok(());
            }
        };
        let blocks = blocks_of(root, contents, streams, (cache, &self.groups));
        let (tokens, mut blocks) = blocks.ok_or_else(|| format!("{order:?}: nobody's content"))?;
        if let TransferOrder::Store(store) = &order {
            check_lineage(store, &tokens, cache.config().block_tokens)?;
        }
        match order {
            TransferOrder::Load(LoadOrder { ticket, root, prefetch, .. }) => {
                let verified = !self.rng.one_in(5);
                if !verified {
                    let last = blocks.iter_mut().filter_map(|block| block.content.last_mut());
                    last.for_each(|last| *last ^= 2);
                }
                report.tier_loads += 1;
                report.prefetch_loads += u64::from(prefetch);
                let is_kept = |content: &&Content| content.group == 0 && self.kept.contains(&content.hash);
                let kept = contents.iter().filter(is_kept).count() as u64;
                report.kept_blocks_loaded += kept;
                report.recovered_blocks += if self.restarted { kept } else { 0 };
                let (tenant, after) = (root.tenant, 0);
                let (load, begun, written, cancelled) = (None, false, 0, false);
                let begins = Micros(now.0 + self.rng.skewed(1, 20_000));
                let is_lost = !self.lost && self.losing.one_in(8);
                self.lost |= is_lost;
                let done = if is_lost { NEVER } else { done };
                self.transfers.push(Transfer {
                    ticket,
                    load,
                    tenant,
                    blocks,
                    begun,
                    written,
                    after,
                    begins,
                    done,
                    verified,
                    cancelled,
                });
            }
            TransferOrder::Promote { .. } | TransferOrder::Cancel { .. } => unreachable!("returned above"),
            TransferOrder::Store(StoreOrder { lease, until, contents, .. }) => {
                report.tier_stores += 1;
                // Some read for longer than anybody waits for them.
                let done = Micros(done.0 + if self.rng.one_in(8) { 600_000 } else { 0 });
                self.readers.push(LeaseReader { lease, until, done, blocks, torn: false, stores: contents });
            }
        }
        Ok(())
    }

    /// How much a tier keeps of what it read: all, a beginning, or nothing; and nothing of what it read too late.
    fn keep(&mut self, reader: &LeaseReader, now: Micros, report: &mut RunReport) -> u32 {
        let all = reader.stores.len() as u64;
        if all == 0 {
            return 0;
        }
        let kept = match self.rng.one_in(4) {
            _ if now >= reader.until => 0,
            false => all,
            true => self.rng.range(0, all - 1),
        };
        report.kept_whole += u64::from(kept == all);
        report.kept_in_part += u64::from((1..all).contains(&kept));
        report.not_kept += u64::from(kept == 0);
        self.kept.extend(hashes_of(&reader.stores[..kept as usize]));
        kept as u32
    }

    fn end_transfers(&mut self, around: &mut Around<'_>) -> Result<(), String> {
        for at in (0..self.transfers.len()).rev() {
            let transfer = &self.transfers[at];
            if transfer.done > around.now || transfer.after > self.ended {
                continue;
            }
            let mut transfer = self.transfers.swap_remove(at);
            if transfer.cancelled {
                around.report.cancelled_transfers += 1;
                around.scheduler.end_load(around.cache, transfer.ticket, false, around.now);
                continue;
            }
            for Block { group, block, .. } in &transfer.blocks {
                around.wrote[*group][block.0 as usize] = Some(transfer.tenant);
            }
            let mut groups = self.memory.groups();
            transfer.write(&mut groups, usize::MAX);
            if !transfer.blocks.iter().all(|block| block.holds(&groups)) {
                return Err(format!("{:?}: somebody else wrote what it writes", transfer.ticket));
            }
            drop(groups);
            let late = self.is_late(&transfer, around.scheduler);
            around.report.late_transfers += u64::from(late);
            around.report.damaged_transfers += u64::from(!transfer.verified);
            around.report.loaded_transfers += u64::from(!late && transfer.verified);
            let Some(id) = transfer.load else {
                around.report.sequence_loads += u64::from(!late && transfer.verified);
                around.scheduler.end_load(around.cache, transfer.ticket, transfer.verified, around.now);
                continue;
            };
            let load = self.loads.iter_mut().find(|load| load.id == id);
            let (table, tokens) = match load {
                Some(load) => (load.table.as_mut(), &load.tokens[..]),
                None => (None, &[][..]),
            };
            let ended = around.cache.end_load(transfer.ticket, table, tokens, transfer.verified);
            ended.map_err(|refused| format!("{:?}: {refused}", transfer.ticket))?;
        }
        Ok(())
    }

    /// Tables that are loaded as far as they will be, and those that nobody waits for any more.
    fn release(&mut self, around: &mut Around<'_>) {
        for load in &mut self.loads {
            let over = |table: &mut BlockTable| !table.has_transfers() || load.gives_up <= around.now;
            if let Some(table) = load.table.take_if(over) {
                around.cache.release(table, &load.tokens);
                if let Some((request, reason)) = load.waiter {
                    around.scheduler.resume(request, reason, around.now);
                }
            }
        }
        self.loads.retain(|load| load.table.is_some());
    }
}

/// What full block `index` of a group holds, of what the group holds at every position.
pub(crate) fn content_of(config: &GroupConfig, contents: &[u64], index: u32) -> Vec<u64> {
    let end = ((index + 1) * config.block_tokens) as usize;
    contents[end - block_cells(config)..end].to_vec()
}

/// Of the blocks of group 0.
fn hashes_of(contents: &[Content]) -> impl Iterator<Item = BlockHash> {
    contents.iter().filter(|content| content.group == 0).map(|content| content.hash)
}

/// With each block of group 0 the block before it is kept, and its tokens.
fn check_lineage(order: &StoreOrder, tokens: &[u32], size: u32) -> Result<(), String> {
    let hashes = BlockHashes::new(&order.root, tokens, size);
    for (at, content) in order.contents.iter().enumerate() {
        let expected = match content.group {
            0 => {
                let parent = content.index.checked_sub(1).and_then(|before| hashes.get(before));
                let from = (content.index * size) as usize;
                (parent.copied(), &tokens[from..from + size as usize])
            }
            _ => (None, &[][..]),
        };
        let kept = order.lineage.of(&order.contents, at);
        if kept != expected {
            return Err(format!("{content:?} is kept with {kept:?}, not {expected:?}"));
        }
    }
    Ok(())
}

/// Blocks that an order is about, and what they hold, or will: of what one of the clients asks or is told, which are the tokens.
fn blocks_of(
    root: &Root,
    contents: &[Content],
    streams: &[ClientStream],
    (cache, groups): (&KvCache, &[GroupConfig]),
) -> Option<(Vec<u32>, Vec<Block>)> {
    let size = cache.config().block_tokens;
    let of_stream = |stream: &ClientStream| {
        let answers = stream.expectation.iter().flat_map(|expected| &expected.choices);
        let answers = answers.map(|answer| answer.tokens.iter().map(|(token, _)| *token).collect());
        let prompt = stream.client.request.prompt.clone();
        let all = std::iter::once(Vec::new()).chain(answers);
        all.map(move |answer: Vec<u32>| [&prompt[..], &answer].concat()).collect::<Vec<_>>()
    };
    // Behind what is declared a hash does not tell what that was: only who has it says so.
    let mine = |stream: &&ClientStream| {
        stream.client.request.root == *root || stream.client.request.root.own() == *root
    };
    streams.iter().filter(mine).flat_map(of_stream).find_map(|tokens| {
        let hashes = BlockHashes::new(root, &tokens, size);
        let all = self::contents(&tokens, groups);
        let block = |content: &Content| {
            let last = (0..).zip(hashes.iter()).find(|(_, hash)| **hash == content.hash)?.0;
            let (group, config) = (content.group as usize, cache.group_config(content.group as usize));
            let index = (last + 1u32) * size / config.block_tokens - 1;
            Some(Block { group, block: content.block, content: content_of(config, &all[group], index) })
        };
        let blocks: Option<Vec<Block>> = contents.iter().map(block).collect();
        Some((tokens, blocks?))
    })
}

/// The tokens of a table's first blocks, known by their hash: of the prompt, and of what one of the choices will say.
fn tokens_of(stream: &ClientStream, table: &BlockTable, blocks: u32) -> Option<Vec<u32>> {
    let (root, size) = (table.root(), table.block_tokens(0));
    let answers = stream.expectation.iter().flat_map(|expected| &expected.choices);
    let answers = answers.map(|answer| answer.tokens.iter().map(|(token, _)| *token).collect());
    let prompt = &stream.client.request.prompt;
    std::iter::once(Vec::new()).chain(answers).find_map(|answer: Vec<u32>| {
        let mut tokens = [&prompt[..], &answer].concat();
        tokens.truncate((blocks * size) as usize);
        let hashes = BlockHashes::new(&root, &tokens, size);
        let own = hashes.get(blocks - 1)?;
        (table.hashes().get(blocks - 1) == Some(own)).then_some(tokens)
    })
}
