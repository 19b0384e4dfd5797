//! What of a request is cached: the longest beginning of its chain that can be attached.
//!
//! Owns: the walk over a chain, and what a hit needs in each group. Must never: change anything.
//!
//! # A hit
//!
//! `n` blocks of group 0 can be attached if every group that is needed has all blocks that the next query reads: whole ones
//! under the nodes they end with, and where `n` lies within a larger block, the beginning of that under the `n`-th node, which is
//! copied. One pass over the chain finds the longest such `n`: per group the length of the unbroken run is enough. A state is often
//! where a conversation ended and nowhere near: a block written in part that has it is looked for behind all that the other groups have.
//!
//! What tiers have is loaded behind that (`lease`): nothing here knows of it.

use crate::cache::KvCache;
use crate::counts::{GroupCounts, MAX_GROUPS};
use crate::hash::BlockHashes;
use crate::nodes::{Kind, Parent, RUN};
use crate::types::{BlockHash, BlockId, Layout};

/// Children looked at when searching for a shared beginning, newest first.
pub(crate) const CHILDREN_SCANNED: usize = 16;

/// What a lookup found: the longest beginning of a chain that can be attached. It is still there while the cache is at the same version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
    /// Leading full blocks that are on the device.
    pub full_blocks: u32,
    /// Positions of the following block that can be copied.
    pub tail_tokens: u32,
    /// Of the blocks that would be attached, those no table and no pin holds: attaching them lowers
    /// [`KvCache::available`] by as much.
    pub idle_blocks: GroupCounts,
    /// Whether it begins with what an operator declared.
    pub is_declared: bool,
    /// Positions of the full blocks, and the node that they end with.
    pub(crate) end: u32,
    pub(crate) last: Option<u32>,
    /// Full blocks that group 0 has, at least `full_blocks`.
    pub(crate) chain: u32,
    /// The node to copy what follows from; and whether it is of no use without: only that has a state.
    pub(crate) tail: Option<u32>,
    pub(crate) needs_tail: bool,
    /// Tokens that were looked up, and the version of the cache.
    pub(crate) tokens: u32,
    pub(crate) version: u64,
}

impl Lookup {
    /// Positions that need not be computed.
    pub fn positions(&self) -> u32 {
        self.end + self.tail_tokens
    }
}

impl KvCache {
    /// What `attach` would find for all of `tokens`. Changes nothing, not even recency.
    pub fn lookup(&self, hashes: &BlockHashes, tokens: &[u32]) -> Lookup {
        let mut prefix = self.longest_prefix(hashes, tokens);
        if prefix.tail.is_none() {
            prefix = self.with_tail(hashes, prefix, tokens);
        }
        let node = |index: u32| self.nodes.find(hashes.chain(prefix.is_declared).get(index as usize)?);
        let [idle_blocks, _] = self.takes(&prefix, node);
        Lookup { idle_blocks, tokens: tokens.len() as u32, version: self.version, ..prefix }
    }

    /// Finds the longest usable beginning of `tokens`.
    fn find_prefix(&self, hashes: &BlockHashes, declared: bool, tokens: &[u32]) -> Lookup {
        let mut best = Lookup { is_declared: declared, ..Lookup::default() };
        // As far as all have it but for states.
        let mut stateless = best;
        let size = self.config.block_tokens;
        let (mut runs, mut at) = ([0; MAX_GROUPS], best);
        let mut chain = hashes.chain(declared).iter().take(tokens.len() / size as usize);
        let (mut run, mut found) = ([0; RUN], RUN);
        while found == RUN {
            found = self.nodes.find_run(&mut chain, &mut run);
            for &node in &run[..found] {
                (at.full_blocks, at.end, at.last) = (at.full_blocks + 1, at.end + size, Some(node));
                at.idle_blocks[0] += u32::from(self.slot(0, self.block_of(node)).refs == 0);
                best.chain = at.full_blocks;
                let (covered, but_states) = self.covered(&mut runs, node, at.end);
                if covered {
                    best = Lookup { chain: best.chain, ..at };
                }
                if but_states {
                    stateless = at;
                }
            }
        }
        if stateless.end > best.end {
            let with_tail = self.with_tail(hashes, stateless, tokens);
            let with_tail = Lookup { chain: best.chain, needs_tail: true, ..with_tail };
            return if with_tail.tail.is_some() { with_tail } else { best };
        }
        best
    }

    /// The longest beginning: with what is shared where that is there as a whole, since nobody but its owner computes it,
    /// unless the tenant has more of its own.
    fn longest_prefix(&self, hashes: &BlockHashes, tokens: &[u32]) -> Lookup {
        let shared = hashes.root().declared_blocks();
        let find = |declared| self.find_prefix(hashes, declared, tokens);
        if shared == 0 {
            return find(false);
        }
        let (with, own) = (find(true), find(false));
        if with.full_blocks < shared || own.end > with.end { own } else { with }
    }

    /// Whether every group has what the next query of a sequence reads that attaches `end` positions, with the last of which `node`
    /// ends; and whether all have it that keep no states. `runs`: per group, whole blocks without a gap up to the node before; brought
    /// up to date.
    fn covered(&self, runs: &mut [u32; MAX_GROUPS], node: u32, end: u32) -> (bool, bool) {
        let (mut covered, mut but_states) = (true, true);
        for (group, run) in self.others().zip(&mut runs[1..]) {
            let config = self.groups[group].config;
            let (whole, part) = (end / config.block_tokens, end % config.block_tokens);
            let there = self.place(group, node).is_some();
            if part == 0 {
                *run = if there { *run + 1 } else { 0 };
            }
            let reads = whole.saturating_sub(config.first_block(end));
            let has = config.optional || (reads <= *run && (part == 0 || there));
            covered &= has;
            but_states &= has || config.layout == Layout::State;
        }
        (covered, but_states)
    }

    /// Blocks of a group from 1 on that the query behind a prefix reads.
    pub(crate) fn reads(&self, group: usize, prefix: &Lookup) -> std::ops::Range<u32> {
        let of = &self.groups[group];
        let first = of.config.first_block(prefix.end).min(prefix.end / of.config.block_tokens);
        first..of.blocks_of(prefix.end)
    }

    /// Where one of them is; `node`: that of a block of group 0. `None`: it is optional, or the beginning of a larger block, which is copied.
    pub(crate) fn find_read(
        &self,
        prefix: &Lookup,
        group: usize,
        index: u32,
        node: impl Fn(u32) -> Option<u32>,
    ) -> Option<BlockId> {
        let end = (index + 1) * self.groups[group].config.block_tokens;
        let last = (end <= prefix.end).then(|| end / self.config.block_tokens - 1)?;
        self.place(group, node(last)?)
    }

    /// Blocks that attaching a prefix takes: cached ones, and those to copy the beginning of a larger block to.
    pub(crate) fn takes(&self, prefix: &Lookup, node: impl Fn(u32) -> Option<u32>) -> [GroupCounts; 2] {
        let [mut idle, mut copied] = [prefix.idle_blocks[0], 0].map(GroupCounts::full);
        for group in self.others().filter(|group| !self.groups[*group].config.optional) {
            for index in self.reads(group, prefix) {
                match self.find_read(prefix, group, index, &node) {
                    Some(block) => idle[group] += u32::from(self.slot(group, block).refs == 0),
                    None => copied[group] += 1,
                }
            }
        }
        [idle, copied]
    }

    /// What the block after the prefix continues.
    fn continued(&self, hashes: &BlockHashes, prefix: &Lookup) -> Parent {
        let root = if prefix.is_declared { *hashes.root() } else { hashes.root().own() };
        match (root.base(prefix.full_blocks), prefix.last) {
            (None, Some(last)) => Parent::Node(last),
            (base, _) => Parent::Root(base.unwrap_or(root.hash)),
        }
    }

    /// The same, with what follows it of `tokens` to be copied.
    fn with_tail(&self, hashes: &BlockHashes, prefix: Lookup, tokens: &[u32]) -> Lookup {
        // Of placeholders tokens say too little.
        let end = hashes.first_placeholder(prefix.end, tokens.len() as u32);
        let rest = &tokens[prefix.end as usize..end.map_or(tokens.len(), |end| end as usize)];
        let (tail, length) = self.tail_source(self.continued(hashes, &prefix), rest, prefix.end).unzip();
        Lookup { tail, tail_tokens: length.unwrap_or(0), ..prefix }
    }

    /// The node to copy the longest beginning of `rest` from, which is positive, and its length: among the newest children of
    /// `parent` that every group has (ties: the newest).
    pub(crate) fn tail_source(&self, parent: Parent, rest: &[u32], start: u32) -> Option<(u32, u32)> {
        let (mut best, mut length) = (None, 0);
        if rest.is_empty() {
            return None;
        }
        let children = self.nodes.children(parent).take(CHILDREN_SCANNED);
        for child in children.filter(|child| self.nodes.node(*child).kind != Kind::WithPlaceholders) {
            let tokens = self.tokens_of(self.block_of(child));
            let shared = tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            if shared > length && self.divides(child, start + shared as u32, start + tokens.len() as u32) {
                (best, length) = (Some(child), shared);
            }
        }
        best.map(|child| (child, length as u32))
    }

    /// Whether every group has the block in which the node ends, at position `end`, and it can be copied up to position `to`.
    fn divides(&self, node: u32, to: u32, end: u32) -> bool {
        self.others().all(|group| {
            let (config, from) = (self.groups[group].config, to.saturating_sub(1));
            let start = from - from % config.block_tokens;
            config.optional
                || self.place(group, node).is_some_and(|_| config.is_divisible(to - start, end - start))
        })
    }

    /// What is attached is what a walk finds now; of tails, others may be among the newest since.
    #[cfg(debug_assertions)]
    pub(crate) fn check_found(&self, hashes: &BlockHashes, tokens: &[u32], found: &Lookup) {
        let (anew, of) = (self.longest_prefix(hashes, tokens), |prefix: &Lookup| {
            (prefix.end, prefix.last, prefix.chain, prefix.is_declared)
        });
        assert!(
            found.needs_tail || anew.needs_tail || of(found) == of(&anew),
            "what was found has changed unseen: {found:?}, {anew:?}"
        );
    }

    /// Leading blocks of a chain that are on the device.
    pub(crate) fn cached_run<'a>(&self, hashes: impl Iterator<Item = &'a BlockHash>) -> Vec<BlockId> {
        hashes.map_while(|hash| self.find_block(hash)).collect()
    }
}
