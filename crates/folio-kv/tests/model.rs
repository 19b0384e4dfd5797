//! The cache against a model of memory: whatever is attached, grown, forked, preempted, dropped and evicted, reading
//! through a table gives exactly the sequence's own content at every computed position.
//!
//! A memory cell holds a fingerprint of the tenant and of *all* tokens up to its position, as real KV does; so content
//! reached through a wrong parent, a stale copy or another tenant's block is seen even where the tokens happen to agree.
//! Each cache group has memory of its own; of a window group exactly the last window is read.
//! A step runs as an executor does: copies in list order, then all writes, then all commits.

mod common;

use std::hash::{DefaultHasher, Hash, Hasher};

use common::{ByRoot, Fifo, config, root, windowed};
use folio_kv::{
    BlockCopy, BlockId, BlockTable, EvictionPolicy, GroupConfig, GroupCounts, HOLE, KeepRefused, KvCache,
    Layout, LearnedLifetimes, Lease, LruLeafFirst, OutOfBlocks, PinLimits, PrefixId, PrefixInfo, Retention,
    RetentionRange, TenantId, Ticket,
};
use proptest::collection::vec;
use proptest::prelude::*;

const TENANTS: u32 = 2;
const SEQUENCES: usize = 6;

#[derive(Clone, Debug)]
enum Op {
    Attach {
        tenant: u32,
        tokens: Vec<u32>,
        spare: u32,
    },
    /// Appends a token if all are covered, and makes room for up to `by` more positions, the last `tentative` of which may be taken
    /// back.
    Grow {
        who: usize,
        by: u32,
        token: u32,
        tentative: u32,
    },
    /// Ends when the next step ran, in which rows of it were computed for nothing.
    Overrun {
        who: usize,
    },
    Fork {
        who: usize,
    },
    /// A preemption or an end; the sequence's pending copies may be dropped with it.
    Release {
        who: usize,
        drop_copies: bool,
    },
    Clear {
        tenant: Option<u32>,
    },
    /// Says how the blocks of a sequence are to be kept.
    Retain {
        who: usize,
        range: RetentionRange,
    },
    /// Records what a sequence has computed.
    Keep {
        who: usize,
        tokens: u32,
        retention: Retention,
        pin: bool,
    },
    /// Records what is cached of a text.
    KeepCached {
        tenant: u32,
        tokens: Vec<u32>,
        retention: Retention,
        pin: bool,
    },
    /// Pins, unpins or drops a record, in the name of a tenant that may not be its owner.
    Change {
        which: usize,
        tenant: u32,
        retention: Retention,
        pin: Option<bool>,
    },
    Wait {
        us: u64,
    },
    /// A preemption: it will be back.
    Preempt {
        who: usize,
    },
    Resume {
        which: usize,
    },
    /// Somebody reads the first blocks of a sequence for a while.
    Lease {
        who: usize,
        blocks: u32,
        us: u64,
    },
    EndLease {
        which: usize,
    },
    /// A transfer writes the next blocks of a sequence, which waits for it.
    BeginLoad {
        who: usize,
        blocks: u32,
    },
    EndLoad {
        which: usize,
        verified: bool,
    },
    /// Runs what was planned; a sequence computes all or part of what it was grown for.
    Step {
        part: u32,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tokens = vec(0u32..2, 1..14);
    let retention = || {
        let ttl = prop::option::of(0u64..40);
        (prop::sample::select(vec![0u8, 30, 50, 50, 70, 100]), ttl)
            .prop_map(|(priority, ttl_us)| Retention { priority, ttl_us })
    };
    let range = (0u32..12, 0u32..12, retention()).prop_map(|(start, length, of)| RetentionRange {
        tokens: start..start + length,
        priority: of.priority,
        ttl_us: of.ttl_us,
        pin: false,
    });
    let op = prop_oneof![
        3 => (any::<usize>(), range).prop_map(|(who, range)| Op::Retain { who, range }),
        2 => (any::<usize>(), 0u32..14, retention(), any::<bool>())
            .prop_map(|(who, tokens, retention, pin)| Op::Keep { who, tokens, retention, pin }),
        1 => (0..TENANTS, tokens.clone(), retention(), any::<bool>())
            .prop_map(|(tenant, tokens, retention, pin)| Op::KeepCached { tenant, tokens, retention, pin }),
        2 => (any::<usize>(), 0..TENANTS, retention(), prop::option::of(any::<bool>()))
            .prop_map(|(which, tenant, retention, pin)| Op::Change { which, tenant, retention, pin }),
        2 => (0u64..30).prop_map(|us| Op::Wait { us }),
        2 => any::<usize>().prop_map(|who| Op::Preempt { who }),
        2 => any::<usize>().prop_map(|which| Op::Resume { which }),
        1 => (any::<usize>(), 0u32..5, 0u64..40).prop_map(|(who, blocks, us)| Op::Lease { who, blocks, us }),
        1 => any::<usize>().prop_map(|which| Op::EndLease { which }),
        1 => (any::<usize>(), 1u32..4).prop_map(|(who, blocks)| Op::BeginLoad { who, blocks }),
        2 => (any::<usize>(), prop::bool::weighted(0.7)).prop_map(|(which, verified)| Op::EndLoad { which, verified }),
        6 => (0..TENANTS, tokens, 0u32..3).prop_map(|(tenant, tokens, spare)| Op::Attach { tenant, tokens, spare }),
        8 => (any::<usize>(), 1u32..9, 0u32..2, prop::sample::select(vec![0u32, 0, 1, 2, 5]))
            .prop_map(|(who, by, token, tentative)| Op::Grow { who, by, token, tentative }),
        1 => any::<usize>().prop_map(|who| Op::Overrun { who }),
        2 => any::<usize>().prop_map(|who| Op::Fork { who }),
        4 => (any::<usize>(), any::<bool>()).prop_map(|(who, drop_copies)| Op::Release { who, drop_copies }),
        1 => prop::option::of(0..TENANTS).prop_map(|tenant| Op::Clear { tenant }),
        6 => (0u32..4).prop_map(|part| Op::Step { part }),
    ];
    vec(op, 1..60)
}

fn fingerprint(group: usize, tenant: TenantId, tokens: &[u32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (group, tenant, tokens).hash(&mut hasher);
    hasher.finish()
}

struct Sequence {
    id: u64,
    tokens: Vec<u32>,
    table: BlockTable,
    /// Positions this step has room for; nothing to run if not beyond `computed`.
    target: u32,
    /// Positions from here to `target` are computed and may be taken back.
    tentative_from: u32,
    overruns: bool,
}

/// A reader outside, and what it read when it began.
struct Reader {
    lease: Lease,
    until: u64,
    cells: Vec<(usize, BlockId, Vec<u64>)>,
}

/// A transfer that writes the blocks it was given, whatever became of its table, until it ends.
struct Writer {
    ticket: Ticket,
    sequence: u64,
    blocks: Vec<(usize, BlockId, Vec<u64>)>,
    /// Steps that had run.
    after: u64,
}

impl Sequence {
    fn tenant(&self) -> TenantId {
        self.table.hashes().root().tenant
    }
}

struct World {
    cache: KvCache,
    windows: Vec<GroupConfig>,
    /// `[group][block][slot]`
    memory: Vec<Vec<Vec<u64>>>,
    copies: Vec<BlockCopy>,
    /// Whose, and what they know.
    preempted: Vec<(TenantId, Vec<u32>)>,
    readers: Vec<Reader>,
    writers: Vec<Writer>,
    next: u64,
    steps: u64,
    sequences: Vec<Sequence>,
    limits: PinLimits,
    now: u64,
}

impl World {
    fn new(pool: &Pool, policy: Box<dyn EvictionPolicy>) -> Self {
        let windows: Vec<GroupConfig> = pool.windows.iter().map(|window| window.config(pool)).collect();
        let mut cache = KvCache::with_groups(config(pool.blocks, pool.block_tokens), &windows, policy);
        let limits = PinLimits { pool: pool.blocks / 2, tenant: pool.blocks / 3 };
        cache.set_pin_limits(limits);
        let memory = |group: usize| {
            let size = cache.group_config(group).block_tokens as usize;
            vec![vec![0; size]; cache.pools()[group] as usize]
        };
        Self {
            memory: (0..cache.groups()).map(memory).collect(),
            windows,
            copies: Vec::new(),
            sequences: Vec::new(),
            preempted: Vec::new(),
            readers: Vec::new(),
            writers: Vec::new(),
            next: 0,
            steps: 0,
            limits,
            now: 0,
            cache,
        }
    }

    fn sequence(&mut self, tokens: Vec<u32>, table: BlockTable) {
        self.next += 1;
        self.sequences.push(Sequence {
            id: self.next,
            tokens,
            table,
            target: 0,
            tentative_from: u32::MAX,
            overruns: false,
        });
    }

    /// Of a group: its layout, and its block's tokens.
    fn layout(&self, group: usize) -> (Layout, u32) {
        let config = self.cache.group_config(group);
        (config.layout, config.block_tokens)
    }

    /// What lies in a block of a sequence's table for position `position`: of a state only the last that was written.
    fn cell(&self, group: usize, position: u32) -> (usize, usize) {
        let (layout, size) = self.layout(group);
        let within = if layout == Layout::State { 0 } else { position % size };
        ((position / size) as usize, within as usize)
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Attach { tenant, tokens, spare } => self.attach(tenant, tokens, spare),
            Op::Clear { tenant } => self.cache.clear(tenant.map(TenantId)),
            Op::Step { part } => self.step(part),
            Op::KeepCached { tenant, tokens, retention, pin } => {
                let (before, available) = (self.cache.stats(), self.cache.available()[0]);
                let kept =
                    self.cache.keep_at(&root(tenant), &tokens, retention, pin, available.saturating_sub(1));
                self.kept(TenantId(tenant), before, retention, pin, kept);
            }
            Op::Change { which, tenant, retention, pin } => self.change(which, tenant, retention, pin),
            Op::Wait { us } => {
                self.now += us;
                self.cache.advance(self.now);
            }
            Op::Resume { which } => self.resume(which),
            Op::EndLease { which } => self.end_lease(which),
            Op::EndLoad { which, verified } => self.end_load(which, verified),
            Op::Retain { who, .. }
            | Op::Keep { who, .. }
            | Op::Grow { who, .. }
            | Op::Fork { who }
            | Op::Overrun { who }
            | Op::Release { who, .. }
            | Op::Preempt { who }
            | Op::Lease { who, .. }
            | Op::BeginLoad { who, .. } => {
                if self.sequences.is_empty() {
                    return;
                }
                let who = who % self.sequences.len();
                match op {
                    Op::Grow { by, token, tentative, .. } => self.grow(who, by, token, tentative),
                    Op::Overrun { .. } => self.sequences[who].overruns = true,
                    Op::Fork { .. } => self.fork(who),
                    Op::Preempt { .. } => self.preempt(who),
                    Op::Lease { blocks, us, .. } => self.lease(who, blocks, us),
                    Op::BeginLoad { blocks, .. } => self.begin_load(who, blocks),
                    Op::Retain { range, .. } => {
                        let from = range.tokens.start / 2;
                        self.cache.retain(&self.sequences[who].table, from, &[range]);
                    }
                    Op::Keep { tokens, retention, pin, .. } => {
                        let before = self.cache.stats();
                        let kept = self.cache.keep(&self.sequences[who].table, tokens, retention, pin);
                        self.kept(self.sequences[who].tenant(), before, retention, pin, kept);
                    }
                    Op::Release { drop_copies, .. } => self.give_up(who, drop_copies),
                    _ => unreachable!("matched above"),
                }
            }
        }
    }

    /// A refusal changes nothing, a pin stays within its limits, and what is kept is there.
    fn kept(
        &mut self,
        tenant: TenantId,
        before: folio_kv::CacheStats,
        retention: Retention,
        pin: bool,
        kept: Result<PrefixInfo, KeepRefused>,
    ) {
        match kept {
            Err(_) => assert_eq!(self.cache.stats(), before),
            Ok(info) => {
                assert_eq!((info.pinned, info.retention), (pin, retention));
                // A window group may lack what was behind a window; nothing is pinned where there are windows.
                let whole = info.cached_tokens == info.tokens;
                assert!(whole || (!self.windows.is_empty() && info.cached_tokens < info.tokens && !pin));
                assert_eq!(self.cache.prefix(tenant, info.id), Some(info));
            }
        }
        assert!(self.cache.stats().pinned_blocks <= self.limits.pool);
        assert!(self.cache.tenant_stats(tenant).pinned_blocks <= self.limits.tenant);
    }

    /// Acts on a record of any tenant in the name of `tenant`: only the owner reaches it.
    fn change(&mut self, which: usize, tenant: u32, retention: Retention, pin: Option<bool>) {
        let all = (0..TENANTS).flat_map(|owner| {
            let prefixes = self.cache.prefixes(TenantId(owner));
            prefixes.into_iter().map(move |prefix| (owner, prefix.id))
        });
        let all: Vec<(u32, PrefixId)> = all.collect();
        if all.is_empty() {
            return;
        }
        let (owner, id) = all[which % all.len()];
        let before = self.cache.stats();
        match pin {
            Some(pin) => {
                let changed = self.cache.change_prefix(TenantId(tenant), id, retention, pin, u32::MAX);
                assert_eq!(changed.is_some(), owner == tenant);
                if let Some(changed) = changed {
                    self.kept(TenantId(tenant), before, retention, pin, changed);
                }
            }
            None => {
                let others: u32 = (0..TENANTS)
                    .filter(|other| *other != tenant)
                    .map(|other| self.cache.tenant_stats(TenantId(other)).cached[0])
                    .sum();
                let dropped = self.cache.drop_prefix(TenantId(tenant), id);
                assert_eq!(dropped.is_some(), owner == tenant);
                let left: u32 = (0..TENANTS)
                    .filter(|other| *other != tenant)
                    .map(|other| self.cache.tenant_stats(TenantId(other)).cached[0])
                    .sum();
                assert_eq!(left, others, "another tenant's blocks are out of reach");
            }
        }
    }

    /// What is pinned is cached in full, whatever happened.
    fn pins_hold(&self) {
        for tenant in 0..TENANTS {
            for prefix in self.cache.prefixes(TenantId(tenant)) {
                assert!(!prefix.pinned || prefix.cached_tokens == prefix.tokens);
            }
        }
    }

    fn unpin_everything(&mut self) {
        for tenant in (0..TENANTS).map(TenantId) {
            for prefix in self.cache.prefixes(tenant) {
                let unpinned =
                    self.cache.change_prefix(tenant, prefix.id, Retention::default(), false, u32::MAX);
                assert!(!prefix.pinned || unpinned.is_some_and(|changed| changed.is_ok()));
            }
        }
    }

    fn attach(&mut self, tenant: u32, tokens: Vec<u32>, spare: u32) {
        if self.sequences.len() >= SEQUENCES {
            return;
        }
        let max_tokens = (tokens.len() as u32).saturating_sub(spare);
        let wanted = &tokens[..max_tokens as usize];
        let found = self.cache.lookup_at(&root(tenant), wanted);
        let probe = self.cache.probe_at(&root(tenant), wanted);
        let before = self.cache.stats();
        let full = found.full_blocks * self.cache.config().block_tokens;
        // Blocks that are copied in part: of a tail one in each group, else larger ones that the hit ends within.
        let sizes: Vec<u32> = (0..self.cache.groups()).map(|group| self.layout(group).1).collect();
        let part =
            |upto: u32| GroupCounts::each(sizes.len(), |group| u32::from(!upto.is_multiple_of(sizes[group])));
        let (with_tail, without) = (part(probe), part(full));
        let available = self.cache.available();
        let fits = |part: GroupCounts| (found.idle_blocks + part).fits(available);
        let expected = match () {
            () if fits(with_tail) => probe,
            () if fits(without) => full,
            () => 0,
        };
        let (table, copies) = self.cache.attach_at(&root(tenant), &tokens, max_tokens);
        assert_eq!(table.computed(), expected);
        let taken = if expected > 0 { part(expected) } else { GroupCounts::default() };
        assert!(available.saturating_sub(found.idle_blocks + taken).fits(self.cache.available()));
        let after = self.cache.stats();
        assert_eq!(after.queries.hit_tokens - before.queries.hit_tokens, u64::from(table.computed()));
        assert_eq!(after.queries.tokens - before.queries.tokens, tokens.len() as u64);
        let tail = expected.saturating_sub(full);
        assert_eq!(after.queries.tail_hit_tokens - before.queries.tail_hit_tokens, u64::from(tail));
        for copy in copies {
            let (group, size) = (copy.group as usize, self.layout(copy.group as usize).1);
            assert_eq!((copy.tokens, Some(&copy.to)), (expected % size, table.group(group).last()));
            self.copies.push(copy);
        }
        self.sequence(tokens, table);
    }

    fn preempt(&mut self, who: usize) {
        let tenant = self.sequences[who].tenant();
        self.preempted.push((tenant, self.sequences[who].tokens.clone()));
        self.give_up(who, false);
    }

    fn resume(&mut self, which: usize) {
        if self.preempted.is_empty() {
            return;
        }
        let (tenant, tokens) = self.preempted.swap_remove(which % self.preempted.len());
        self.attach(tenant.0, tokens, 0);
    }

    fn lease(&mut self, who: usize, blocks: u32, us: u64) {
        let table = &self.sequences[who].table;
        let confirmed = table.published_blocks();
        let until = self.now + us + 1;
        let to = blocks.min(confirmed) * table.block_tokens(0);
        let (lease, contents) = self.cache.lease(table.hashes(), (0, to), until);
        // Looked up, or as the table has it.
        let from = blocks / 2;
        let (again, rest) = self.cache.lease_table(table, (from, to), until);
        assert!(rest.iter().eq(contents.iter().filter(|content| content.group > 0 || content.index >= from)));
        let (lineage, hashes) = (self.cache.lineage(&rest), table.hashes());
        for (at, content) in rest.iter().enumerate().filter(|(_, content)| content.group == 0) {
            let parent = content.index.checked_sub(1).and_then(|before| hashes.get(before));
            let size = table.block_tokens(0) as usize;
            let tokens = &self.sequences[who].tokens[content.index as usize * size..][..size];
            assert_eq!(lineage.of(&rest, at), (parent.copied(), tokens));
        }
        assert!(self.cache.end_lease(again));
        // Published blocks of full attention are immutable and written.
        let cells: Vec<_> = contents.iter().filter(|content| content.group == 0).collect();
        assert!(
            cells
                .iter()
                .map(|cell| cell.block)
                .eq(table.blocks()[..(to / table.block_tokens(0)) as usize].iter().copied())
        );
        let copied = |block: BlockId| (0, block, self.memory[0][block.0 as usize].clone());
        let cells = cells.into_iter().map(|content| copied(content.block)).collect();
        self.readers.push(Reader { lease, until, cells });
    }

    fn end_lease(&mut self, which: usize) {
        if self.readers.is_empty() {
            return;
        }
        let reader = self.readers.swap_remove(which % self.readers.len());
        let unchanged =
            reader.cells.iter().all(|(group, block, cells)| self.memory[*group][block.0 as usize] == *cells);
        let held = self.cache.end_lease(reader.lease);
        assert_eq!(held, reader.until > self.now, "a lease holds until its time");
        assert!(!held || unchanged, "what was leased was written");
    }

    fn begin_load(&mut self, who: usize, blocks: u32) {
        let sequence = &mut self.sequences[who];
        let size = self.cache.config().block_tokens;
        let from = sequence.table.blocks().len();
        let end = (from as u32 + blocks) * size;
        if end as usize >= sequence.tokens.len() {
            return;
        }
        let Some((ticket, _)) = self.cache.begin_load(&mut sequence.table, blocks) else { return };
        let (id, tenant, tokens) = (sequence.id, sequence.tenant(), sequence.tokens.clone());
        let mut written = Vec::new();
        for group in 0..self.cache.groups() {
            let (layout, size) = self.layout(group);
            let table = &self.sequences[who].table;
            let indices = (from as u32 * table.block_tokens(0) / size) as usize..(end / size) as usize;
            for (index, block) in table
                .group(group)
                .iter()
                .enumerate()
                .filter(|(index, block)| indices.contains(index) && **block != HOLE)
            {
                let mut cells = vec![0; size as usize];
                for position in index as u32 * size..((index as u32 + 1) * size).min(end) {
                    let within = if layout == Layout::State { 0 } else { position % size };
                    cells[within as usize] = fingerprint(group, tenant, &tokens[..=position as usize]);
                }
                written.push((group, *block, cells));
            }
        }
        self.writers.push(Writer { ticket, sequence: id, blocks: written, after: self.steps });
    }

    /// The transfer writes when it ends: whatever it was given must still be its own then.
    fn end_load(&mut self, which: usize, verified: bool) {
        if self.writers.is_empty() {
            return;
        }
        // Steps that were planned before it may still copy to its blocks: it writes after them.
        let which = which % self.writers.len();
        if self.writers[which].after == self.steps {
            return;
        }
        let Writer { ticket, sequence, blocks, .. } = self.writers.swap_remove(which);
        let at = self.sequences.iter().position(|other| other.id == sequence);
        for (group, block, cells) in blocks {
            let holders = self.sequences.iter().filter(|other| other.table.group(group).contains(&block));
            assert!(
                holders.count() <= 1 && !self.is_let(group, block, at),
                "a block that a transfer writes was let"
            );
            let garbage = || vec![u64::MAX; cells.len()];
            self.memory[group][block.0 as usize] = if verified { cells } else { garbage() };
        }
        match at {
            Some(at) => {
                let one = &mut self.sequences[at];
                let ended = self.cache.end_load(ticket, Some(&mut one.table), &one.tokens, verified);
                ended.expect("what arrived can be committed");
            }
            None => self.cache.end_load(ticket, None, &[], verified).expect("nothing is committed"),
        }
    }

    fn is_let(&self, group: usize, block: BlockId, to: Option<usize>) -> bool {
        let others = self.sequences.iter().enumerate().filter(|(at, _)| Some(*at) != to);
        others.into_iter().any(|(_, other)| other.table.group(group).contains(&block))
    }

    fn grow(&mut self, who: usize, by: u32, token: u32, tentative: u32) {
        let sequence = &mut self.sequences[who];
        if sequence.table.computed() as usize == sequence.tokens.len() {
            sequence.tokens.push(token);
        }
        let target = (sequence.table.computed() + by).min(sequence.tokens.len() as u32);
        let target = target.min(sequence.table.computable());
        let tentative = if sequence.table.has_transfers() { 0 } else { tentative };
        sequence.table.set_tentative(tentative);
        let needed = self.cache.needed(&sequence.table, target);
        let available = self.cache.available();
        let (before, blocks, copies) =
            (self.cache.stats(), sequence.table.blocks().to_vec(), self.copies.len());
        match self.cache.grow(&mut sequence.table, target, &mut self.copies) {
            Ok(()) => {
                assert!(needed.fits(available) && sequence.table.capacity() >= target);
                assert_eq!(self.cache.available(), available.saturating_sub(needed));
                assert!(self.cache.needed(&sequence.table, target).is_zero());
                sequence.target = target;
                sequence.tentative_from = target.saturating_sub(tentative).max(sequence.table.computed());
                sequence.table.plan_tentative(Some(sequence.tentative_from));
            }
            Err(OutOfBlocks) => {
                sequence.target = 0;
                assert!(!needed.fits(available), "refused although there was room");
                assert_eq!((self.cache.stats(), sequence.table.blocks()), (before, &blocks[..]));
                assert_eq!(self.copies.len(), copies);
            }
        }
    }

    fn fork(&mut self, who: usize) {
        if self.sequences.len() >= SEQUENCES {
            return;
        }
        let sequence = &mut self.sequences[who];
        sequence.target = 0;
        let (table, tokens) = (self.cache.fork(&mut sequence.table), sequence.tokens.clone());
        assert_eq!(table.computed(), sequence.table.computed());
        self.sequence(tokens, table);
    }

    /// A pending copy is dropped only if nothing else depends on its target.
    fn give_up(&mut self, who: usize, drop_copies: bool) {
        let Sequence { tokens, table, .. } = self.sequences.swap_remove(who);
        if drop_copies {
            let others = &self.sequences;
            let all = self.copies.clone();
            self.copies.retain(|copy| {
                let held = |table: &BlockTable| table.group(copy.group as usize).contains(&copy.to);
                !held(&table)
                    || others.iter().any(|s| held(&s.table))
                    || all.iter().any(|later| (later.group, later.from) == (copy.group, copy.to))
            });
        }
        self.cache.release(table, &tokens);
    }

    fn step(&mut self, part: u32) {
        self.steps += 1;
        for copy in self.copies.drain(..) {
            let memory = &mut self.memory[copy.group as usize];
            let copied = memory[copy.from.0 as usize][..copy.tokens as usize].to_vec();
            memory[copy.to.0 as usize][..copied.len()].copy_from_slice(&copied);
        }
        for index in 0..self.sequences.len() {
            let sequence = &self.sequences[index];
            let (start, from) = (sequence.table.computed(), sequence.tentative_from);
            let end = if part == 0 { sequence.target } else { sequence.target.min(start + part) };
            // What may be taken back is computed as a whole, and all before it confirmed.
            let (end, computed) =
                if from < sequence.target { (end.max(from), sequence.target) } else { (end, end) };
            for (group, position) in
                (start..computed).flat_map(|p| (0..sequence.table.groups()).map(move |g| (g, p)))
            {
                let (index, within) = match self.layout(group) {
                    (Layout::State, size) if position >= from => {
                        ((from.div_ceil(size) + position - from) as usize, 0)
                    }
                    _ => self.cell(group, position),
                };
                let block = sequence.table.group(group)[index];
                let holds = |s: &&Sequence| s.table.group(group).contains(&block);
                assert_eq!(
                    self.sequences.iter().filter(holds).count(),
                    1,
                    "a block is written by its only holder"
                );
                self.memory[group][block.0 as usize][within] =
                    fingerprint(group, sequence.tenant(), &sequence.tokens[..=position as usize]);
            }
            self.sequences[index].target = end;
        }
        for at in
            (0..self.sequences.len()).rev().filter(|at| self.sequences[*at].overruns).collect::<Vec<_>>()
        {
            let Sequence { tokens, mut table, .. } = self.sequences.swap_remove(at);
            table.set_overwritten();
            self.cache.release(table, &tokens);
        }
        for sequence in &mut self.sequences {
            if sequence.target > sequence.table.computed() {
                self.cache.committed(&mut sequence.table, &sequence.tokens, sequence.target);
                assert!(
                    sequence.table.computed() >= sequence.target,
                    "transfers that ended may be behind it"
                );
            }
            sequence.target = 0;
        }
        self.read_everything();
    }

    /// Everything the next query of each sequence reads: all of group 0, the last window or the state of the others.
    fn read_everything(&self) {
        for sequence in &self.sequences {
            let (table, computed) = (&sequence.table, sequence.table.computed());
            for group in 0..table.groups() {
                let (layout, size) = self.layout(group);
                let reach = match layout {
                    Layout::Paged => u32::MAX,
                    Layout::Window { tokens } => tokens,
                    Layout::State => 2,
                };
                for position in (computed + 1).saturating_sub(reach)..computed {
                    let (index, within) = self.cell(group, position);
                    let block = table.group(group)[index];
                    let cell = self.memory[group][block.0 as usize][within];
                    let expected =
                        fingerprint(group, sequence.tenant(), &sequence.tokens[..=position as usize]);
                    assert_eq!(
                        cell, expected,
                        "group {group}, {position} of {:?}, {block:?}",
                        sequence.tokens
                    );
                }
                // Exactly: whatever no later query reads was released. Of what is loaded, what only rows before its end read was never taken.
                let own = table.computable() / size;
                for (index, block) in table.group(group).iter().enumerate().take(own as usize) {
                    let behind = (index as u32 + 1) * size <= (computed + 1).saturating_sub(reach);
                    assert_eq!(*block == HOLE, behind, "group {group}, block {index}, {computed} computed");
                }
            }
        }
    }

    fn check(&self) {
        let tables: Vec<&BlockTable> = self.sequences.iter().map(|s| &s.table).collect();
        self.cache.check(&tables).expect("invariants");
        self.pins_hold();
    }
}

/// `PROPTEST_CASES` asks for a longer run.
fn cases(usual: u32) -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Pools of a cache: group 0, then the others.
#[derive(Clone, Debug)]
struct Pool {
    blocks: u32,
    block_tokens: u32,
    windows: Vec<Window>,
}

#[derive(Clone, Debug)]
struct Window {
    blocks: u32,
    /// 0: a state.
    tokens: u32,
    /// Its block's tokens, of those of group 0.
    times: u32,
}

impl Window {
    fn config(&self, pool: &Pool) -> GroupConfig {
        let layout = if self.tokens == 0 { Layout::State } else { Layout::Window { tokens: self.tokens } };
        GroupConfig { layout, ..common::sized_window(self.blocks, 1, pool.block_tokens * self.times) }
    }
}

/// One group as often as several; blocks of one size more often than of several.
fn pools() -> impl Strategy<Value = Pool> {
    let times = prop::sample::select(vec![1u32, 1, 1, 2, 3]);
    let window =
        (1u32..12, 0u32..12, times).prop_map(|(blocks, tokens, times)| Window { blocks, tokens, times });
    let windows = prop_oneof![Just(Vec::new()), vec(window, 1..4)];
    (1u32..14, 1u32..6, windows).prop_map(|(blocks, block_tokens, windows)| Pool {
        blocks,
        block_tokens,
        windows,
    })
}

fn run(ops: Vec<Op>, pool: &Pool, policy: Box<dyn EvictionPolicy>) {
    let mut world = World::new(pool, policy);
    for op in ops {
        world.apply(op);
        world.check();
    }
    world.step(0);
    world.check();
    while !world.sequences.is_empty() {
        world.give_up(0, false);
        world.check();
    }
    world.step(0);
    (0..world.readers.len()).for_each(|_| world.end_lease(0));
    (0..world.writers.len()).for_each(|_| world.end_load(0, true));
    world.check();
    let stats = world.cache.stats();
    assert_eq!(stats.active_blocks, stats.pinned_blocks, "what is held now, pins hold");
    assert!(stats.closed_written_slots <= stats.closed_slots);
    assert!(stats.windows().iter().all(|window| window.active_blocks == 0));
    let pinned = GroupCounts::full(world.cache.stats().pinned_blocks);
    assert_eq!(world.cache.available(), world.cache.pools().saturating_sub(pinned));
    world.unpin_everything();
    let stats = world.cache.stats();
    assert_eq!((stats.active_blocks, stats.active_written_slots), (0, 0));
    assert_eq!(world.cache.available(), world.cache.pools());
    world.cache.clear(None);
    world.check();
    let stats = world.cache.stats();
    assert_eq!(stats.free_blocks, pool.blocks);
    assert!(stats.windows().iter().all(|window| window.free_blocks == window.blocks));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(3000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn tables_read_what_their_sequences_wrote(ops in ops(), pool in pools()) {
        run(ops, &pool, Box::new(LruLeafFirst::new()));
    }

    #[test]
    fn learned_lifetimes_change_nothing_but_who_goes(ops in ops(), pool in pools()) {
        run(ops, &pool, Box::new(LearnedLifetimes::new(0.01)));
    }

    #[test]
    fn whatever_the_policy(ops in ops(), pool in pools()) {
        run(ops, &pool, Box::<Fifo>::default());
    }
}

#[derive(Clone, Debug)]
enum Serve {
    Start { tenant: u32, tokens: Vec<u32>, computed: usize },
    Finish { who: usize },
}

fn serves() -> impl Strategy<Value = Vec<Serve>> {
    let start = (0..TENANTS, vec(0u32..2, 1..16), any::<usize>());
    let start = start.prop_map(|(tenant, tokens, computed)| Serve::Start { tenant, tokens, computed });
    vec(prop_oneof![start, any::<usize>().prop_map(|who| Serve::Finish { who })], 1..60)
}

fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(1000), failure_persistence: None, ..ProptestConfig::default() })]

    /// With memory to spare, a hit is the longest beginning shared with anything the tenant has computed: with full
    /// blocks of what still runs, to the token with what has ended. Two token values and blocks of at most four keep
    /// every list of children within the bound of the search, so nothing may be missed.
    #[test]
    fn hits_are_exact_to_the_token(serves in serves(), block_tokens in 1u32..5, windows in vec(1u32..20, 0..3)) {
        let windows: Vec<(u32, u32)> = windows.into_iter().map(|tokens| (2000, tokens)).collect();
        let mut cache = windowed(2000, block_tokens, &windows);
        let mut ended: Vec<(u32, Vec<u32>)> = Vec::new();
        let mut running: Vec<(u32, Vec<u32>, BlockTable)> = Vec::new();
        for serve in serves {
            match serve {
                Serve::Start { tenant, tokens, computed } => {
                    let wanted = &tokens[..tokens.len() - 1];
                    let live = running.iter().map(|(owner, tokens, table)| {
                        let full = table.computed() / block_tokens * block_tokens;
                        (*owner, &tokens[..full as usize])
                    });
                    let known = ended.iter().map(|(owner, tokens)| (*owner, &tokens[..])).chain(live);
                    let best = known.filter(|(owner, _)| *owner == tenant).map(|(_, known)| shared(known, wanted)).max();
                    let (mut table, _) = cache.attach_at(&root(tenant), &tokens, wanted.len() as u32);
                    prop_assert_eq!(table.computed() as usize, best.unwrap_or(0));
                    let rest = tokens.len() - table.computed() as usize;
                    let target = table.computed() + 1 + (computed % rest) as u32;
                    cache.grow(&mut table, target, &mut Vec::new()).expect("memory to spare");
                    cache.committed(&mut table, &tokens, target);
                    running.push((tenant, tokens, table));
                }
                Serve::Finish { who } if !running.is_empty() => {
                    let (tenant, mut tokens, table) = running.swap_remove(who % running.len());
                    let computed = table.computed();
                    cache.release(table, &tokens);
                    tokens.truncate(computed as usize);
                    ended.push((tenant, tokens));
                }
                Serve::Finish { .. } => {}
            }
        }
        prop_assert_eq!(cache.stats().evictions, 0);
        prop_assert_eq!(cache.stats().queries.window_miss_tokens, 0);
        let tables: Vec<&BlockTable> = running.iter().map(|(_, _, table)| table).collect();
        cache.check(&tables).expect("invariants");
    }
}
