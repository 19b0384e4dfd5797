//! The prefix tree by sizes: which beginnings hold how many blocks.
//!
//! Owns: what a sweep over the pool saw of nodes, and the tree that is made of it. Must never: keep more than [`BLOCKS_MAX`] nodes, or tell more than
//! twice [`ENDS_MAX`] runs, a hash or a token.
//!
//! A sweep takes seconds and the cache goes on meanwhile, so a node may be seen under a parent that became another. A link counts only if the parent
//! was seen nearer to the beginning: so whatever was seen is a forest. Cost: O(1) a block that is seen; O(blocks) at a sweep's end.

use folio_kv::{BlockView, TenantId, ViewedNode};
use serde_json::{Value, json};

/// Blocks of the largest pool whose tree is told.
pub(super) const BLOCKS_MAX: u32 = 1 << 18;
/// Ends of runs that are told, and so at most twice as many runs: what has less than this share of all blocks is not.
const ENDS_MAX: usize = 256;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct SeenNode {
    parent: u32,
    tenant: TenantId,
    depth: u16,
    seen: bool,
}

const UNSEEN: SeenNode = SeenNode { parent: NONE, tenant: TenantId(0), depth: 0, seen: false };

/// See the module documentation.
#[derive(Default)]
pub(super) struct PrefixSweep {
    nodes: Vec<SeenNode>,
    /// The block that is looked at next.
    next: u32,
}

/// Blocks one behind the other that nothing branches off from, of what is told.
#[derive(Debug, PartialEq)]
pub(super) struct PrefixRun {
    /// The run it continues, by its place among them.
    pub parent: Option<usize>,
    pub tenant: TenantId,
    /// Blocks before it.
    pub depth: u32,
    /// Blocks that it has.
    pub length: u32,
    /// It, and everything behind it.
    pub blocks: u32,
}

/// A whole sweep.
#[derive(Debug, PartialEq)]
pub(super) struct PrefixTree {
    /// Those of the largest beginnings, each after what it continues.
    pub runs: Vec<PrefixRun>,
    /// All nodes, those too that are not told of.
    pub blocks: u32,
}

impl PrefixSweep {
    /// The pool has so many blocks. False: too many.
    pub fn resize(&mut self, blocks: u32) -> bool {
        let wanted = if blocks <= BLOCKS_MAX { blocks as usize } else { 0 };
        if wanted != self.nodes.len() {
            *self = Self { nodes: vec![UNSEEN; wanted], next: 0 };
        }
        wanted > 0
    }

    /// The block that is looked at next.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// What was seen of the blocks from [`Self::next`] on; the tree when that were the last.
    pub fn see(&mut self, blocks: &[BlockView]) -> Option<PrefixTree> {
        for block in blocks {
            let Some(ViewedNode { node, parent, depth }) = block.node else { continue };
            if let Some(seen) = self.nodes.get_mut(node as usize) {
                *seen = SeenNode { parent: parent.unwrap_or(NONE), tenant: block.tenant, depth, seen: true };
            }
        }
        self.next += blocks.len() as u32;
        if (self.next as usize) < self.nodes.len() && !blocks.is_empty() {
            return None;
        }
        let tree = tree(&self.nodes);
        self.nodes.fill(UNSEEN);
        self.next = 0;
        Some(tree)
    }
}

/// Of all that was seen.
fn tree(nodes: &[SeenNode]) -> PrefixTree {
    let mut order: Vec<u32> = (0..nodes.len() as u32).filter(|at| nodes[*at as usize].seen).collect();
    order.sort_unstable_by_key(|at| nodes[*at as usize].depth);
    let parent = |at: u32| {
        let it = &nodes[at as usize];
        let parent = nodes.get(it.parent as usize)?;
        (parent.seen && parent.depth < it.depth).then_some(it.parent)
    };
    // What each holds with all behind it, from the ends on.
    let mut sizes = vec![0u32; nodes.len()];
    for at in order.iter().rev() {
        sizes[*at as usize] += 1;
        if let Some(parent) = parent(*at) {
            sizes[parent as usize] += sizes[*at as usize];
        }
    }
    // The least that is told of: no more beginnings can have as much.
    let least = (order.len() / ENDS_MAX) as u32 + 1;
    let told = |at: &u32| sizes[*at as usize] >= least;
    let mut children = vec![0u32; nodes.len()];
    for parent in order.iter().filter(|at| told(at)).filter_map(|at| parent(*at)) {
        children[parent as usize] += 1;
    }
    // The run that each is part of; whoever is told of has a parent that is.
    let mut run_of = vec![NONE; nodes.len()];
    let mut runs: Vec<PrefixRun> = Vec::new();
    for at in order.iter().filter(|at| told(at)) {
        let SeenNode { tenant, depth, .. } = nodes[*at as usize];
        let before = parent(*at);
        let run = before.map(|before| run_of[before as usize]).filter(|run| *run != NONE);
        let continues = before.is_some_and(|before| children[before as usize] == 1);
        run_of[*at as usize] = match run.filter(|_| continues) {
            Some(run) => {
                runs[run as usize].length += 1;
                run
            }
            None => {
                let (depth, blocks) = (depth.into(), sizes[*at as usize]);
                let parent = run.map(|run| run as usize);
                runs.push(PrefixRun { parent, tenant, depth, length: 1, blocks });
                runs.len() as u32 - 1
            }
        };
    }
    PrefixTree { runs, blocks: order.len() as u32 }
}

impl PrefixTree {
    /// Runs as `[parent or -1, tenant, depth, length, blocks]`; `name`: of a tenant, by its place in a list.
    pub fn json(&self, name: impl Fn(TenantId) -> String) -> Value {
        let mut names: Vec<(TenantId, String)> = Vec::new();
        let runs: Vec<Value> = self
            .runs
            .iter()
            .map(|run| {
                let known = names.iter().position(|(tenant, _)| *tenant == run.tenant);
                let tenant = known.unwrap_or_else(|| {
                    names.push((run.tenant, name(run.tenant)));
                    names.len() - 1
                });
                let parent = run.parent.map_or(-1, |parent| parent as i64);
                json!([parent, tenant, run.depth, run.length, run.blocks])
            })
            .collect();
        let names: Vec<&str> = names.iter().map(|(_, name)| name.as_str()).collect();
        json!({"blocks": self.blocks, "tenants": names, "runs": runs})
    }
}

#[cfg(test)]
mod tests {
    use folio_kv::BlockState;

    use super::*;

    fn block(node: u32, parent: Option<u32>, depth: u16, tenant: u32) -> BlockView {
        let node = Some(ViewedNode { node, parent, depth });
        BlockView { state: BlockState::Active, tenant: TenantId(tenant), node }
    }

    fn run(parent: Option<usize>, tenant: u32, depth: u32, length: u32, blocks: u32) -> PrefixRun {
        PrefixRun { parent, tenant: TenantId(tenant), depth, length, blocks }
    }

    #[test]
    fn what_nothing_branches_off_from_is_one_run() {
        let mut sweep = PrefixSweep::default();
        assert!(sweep.resize(9));
        // 4 - 2 - 7 branches into 1 and 0 - 3; another tenant's is alone; one block is free.
        let free = BlockView { state: BlockState::Free, tenant: TenantId(0), node: None };
        let first = [block(7, Some(2), 2, 1), block(4, None, 0, 1), free, block(3, Some(0), 4, 1)];
        assert_eq!(sweep.see(&first), None);
        assert_eq!(sweep.next(), 4);
        let rest = [
            block(2, Some(4), 1, 1),
            block(1, Some(7), 3, 1),
            block(0, Some(7), 3, 1),
            block(5, None, 0, 2),
            free,
        ];
        let tree = sweep.see(&rest).expect("that was all");
        let PrefixTree { mut runs, blocks } = tree;
        runs.sort_by_key(|run| (run.tenant, run.depth, run.length));
        assert_eq!(blocks, 7);
        assert_eq!((&runs[0], &runs[3]), (&run(None, 1, 0, 3, 6), &run(None, 2, 0, 1, 1)));
        assert_eq!((runs[1].length, runs[1].blocks, runs[2].length, runs[2].blocks), (1, 1, 2, 2));
        assert_eq!((sweep.next(), sweep.see(&[])), (0, Some(PrefixTree { runs: vec![], blocks: 0 })));
    }

    #[test]
    fn a_link_that_was_another_by_the_time_it_was_seen_makes_no_circle() {
        let mut sweep = PrefixSweep::default();
        sweep.resize(3);
        let seen = [block(0, Some(1), 1, 1), block(1, Some(0), 1, 1), block(2, Some(2), 9, 1)];
        let tree = sweep.see(&seen).expect("that was all");
        assert_eq!(tree.runs.len(), 3);
        assert!(tree.runs.iter().all(|run| run.parent.is_none() && run.blocks == 1));
        // Numbers that cannot be.
        let seen = [block(u32::MAX, Some(7), 1, 1), block(1, Some(u32::MAX - 1), 1, 1), block(1, None, 0, 1)];
        assert_eq!(sweep.see(&seen).expect("that was all").blocks, 1);
    }

    #[test]
    fn the_largest_are_told_and_no_more_than_may_be() {
        let mut sweep = PrefixSweep::default();
        let blocks = 100_000;
        assert!(sweep.resize(blocks));
        // A long beginning that everybody has, and behind it chains of 2 blocks each.
        let all: Vec<_> = (0..blocks)
            .map(|at| match at {
                0 => block(0, None, 0, 1),
                1..1000 => block(at, Some(at - 1), at as u16, 1),
                _ if at % 2 == 0 => block(at, Some(999), 1000, 1),
                _ => block(at, Some(at - 1), 1001, 1),
            })
            .collect();
        let tree = all.chunks(1000).find_map(|piece| sweep.see(piece)).expect("that was all");
        assert_eq!(tree, PrefixTree { runs: vec![run(None, 1, 0, 1000, blocks)], blocks });
        // Chains that are all alike, of just what is told.
        let all: Vec<_> = (0..blocks)
            .map(|at| block(at, at.checked_sub(1).filter(|_| at % 400 > 0), (at % 400) as u16, 1))
            .collect();
        let tree = all.chunks(999).find_map(|piece| sweep.see(piece)).expect("that was all");
        assert_eq!((tree.runs.len(), tree.runs[7].length), (250, 10));
        assert!(!sweep.resize(BLOCKS_MAX + 1) && sweep.nodes.is_empty(), "nothing is kept of a larger pool");
    }
}
