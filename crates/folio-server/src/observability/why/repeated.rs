//! Beginnings that prompts have in common and that are computed again, because they were evicted in between.
//!
//! Owns: how often prompts began with a prefix, and how many tokens of it were computed again; prefixes of 1, 2, 3, 4, 6, 8, 12 and so on
//! blocks are told apart, by the hash of their last block. Must never: tell a token. Bounded: [`PREFIXES`] of them; where there are more, those
//! that cost least lately go.

use std::collections::HashMap;

use folio_kv::{BlockHash, BlockHashes, TenantId};

const PREFIXES: usize = 8192;

/// A prefix of a tenant's prompts, old times counting less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RepeatedPrefix {
    pub tenant: TenantId,
    /// Whole blocks.
    pub blocks: u32,
    /// Prompts that began with it, and tokens of it that were computed though a prompt before had it.
    pub prompts: f64,
    pub computed_again: f64,
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct RepeatedPrefixes(HashMap<BlockHash, RepeatedPrefix>);

impl RepeatedPrefixes {
    /// A prompt was asked for, of which `cached` tokens were found; it has `blocks` whole blocks that could be.
    pub fn ask(&mut self, tenant: TenantId, hashes: &BlockHashes, blocks: u32, cached: u32) {
        let block_tokens = hashes.block_tokens();
        let mut lengths = lengths().take_while(|length| *length <= blocks).peekable();
        for (length, hash) in (1..).zip(hashes.iter(true)) {
            if lengths.next_if_eq(&length).is_none() {
                if lengths.peek().is_none() {
                    break;
                }
                continue;
            }
            let again = f64::from((length * block_tokens).saturating_sub(cached));
            if let Some(known) = self.0.get_mut(hash) {
                known.prompts += 1.0;
                known.computed_again += again;
                continue;
            }
            if self.0.len() >= PREFIXES {
                self.shrink();
            }
            let first = RepeatedPrefix { tenant, blocks: length, prompts: 1.0, computed_again: 0.0 };
            self.0.insert(*hash, first);
        }
    }

    /// Half of them go: what cost least, and of those what was asked for least.
    fn shrink(&mut self) {
        let mut costs: Vec<(f64, f64)> = self.0.values().map(|of| (of.computed_again, of.prompts)).collect();
        let order =
            |one: &(f64, f64), other: &(f64, f64)| one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1));
        let middle = costs.len() / 2;
        let (_, least, _) = costs.select_nth_unstable_by(middle, order);
        let least = *least;
        let mut equal = PREFIXES / 4;
        self.0.retain(|_, of| match order(&(of.computed_again, of.prompts), &least) {
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => {
                equal = equal.saturating_sub(1);
                equal > 0
            }
        });
    }

    /// What was asked until now counts so much less.
    pub fn age(&mut self, factor: f64) {
        self.0.retain(|_, of| {
            (of.prompts, of.computed_again) = (of.prompts * factor, of.computed_again * factor);
            of.prompts > 0.1
        });
    }

    pub fn forget(&mut self, gone: &std::collections::HashSet<TenantId>) {
        self.0.retain(|_, of| !gone.contains(&of.tenant));
    }

    /// Of each tenant the one that cost most, of equal ones the shortest, among those of at most so many blocks that so many prompts began with.
    pub fn worst(&self, blocks_max: u32, prompts: f64) -> Vec<RepeatedPrefix> {
        let mut worst: HashMap<TenantId, RepeatedPrefix> = HashMap::new();
        for of in self.0.values().filter(|of| of.blocks <= blocks_max && of.prompts >= prompts) {
            let known = worst.entry(of.tenant).or_insert(*of);
            let costs_more = of.computed_again.total_cmp(&known.computed_again);
            if costs_more.then(known.blocks.cmp(&of.blocks)).is_gt() {
                *known = *of;
            }
        }
        worst.into_values().collect()
    }
}

/// 1, 2, 3, 4, 6, 8, 12, 16 and so on.
fn lengths() -> impl Iterator<Item = u32> {
    std::iter::once(1).chain((1..31).flat_map(|power| [1 << power, 3 << (power - 1)]))
}

#[cfg(test)]
mod tests {
    use folio_kv::{Identity, Root};

    use super::*;

    const TENANT: TenantId = TenantId(1);

    fn hashes(tokens: &[u32]) -> BlockHashes {
        let root = Root::derive(&Identity {
            tenant: TENANT,
            tenant_secret: &[1; 32],
            model_digest: &[2; 32],
            layout_digest: &[3; 32],
            extra: &[],
        });
        BlockHashes::new(&root, tokens, 4)
    }

    /// `front` tokens that all have, and others behind.
    fn prompt(front: u32, own: u32) -> Vec<u32> {
        (0..front).chain(1000 * (own + 1)..1000 * (own + 1) + 40).collect()
    }

    #[test]
    fn the_longest_that_prompts_have_in_common_costs_most() {
        assert_eq!(lengths().take(9).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 8, 12, 16, 24]);
        let mut repeated = RepeatedPrefixes::default();
        for own in 0..10 {
            // 13 blocks in common; the first four are found.
            repeated.ask(TENANT, &hashes(&prompt(52, own)), 20, 16);
        }
        let worst = RepeatedPrefix { tenant: TENANT, blocks: 12, prompts: 10.0, computed_again: 9.0 * 32.0 };
        assert_eq!(repeated.worst(100, 8.0), [worst]);
        assert_eq!(repeated.worst(100, 11.0), []);
        assert_eq!(repeated.worst(8, 8.0)[0].blocks, 8, "no longer than may be pinned");
        repeated.age(0.5);
        assert_eq!(repeated.worst(100, 5.0)[0].computed_again, 4.5 * 32.0);
        repeated.forget(&[TENANT].into());
        assert_eq!(repeated.worst(100, 0.0), []);
    }

    #[test]
    fn however_many_prompts_there_are_it_holds_no_more_and_keeps_what_costs() {
        let mut repeated = RepeatedPrefixes::default();
        for own in 0..4000 {
            repeated.ask(TENANT, &hashes(&prompt(0, own)), 10, 0);
            if own % 40 == 0 {
                repeated.ask(TENANT, &hashes(&prompt(16, 5000 + own)), 14, 0);
            }
            assert!(repeated.0.len() <= PREFIXES);
        }
        let worst = repeated.worst(100, 8.0);
        assert_eq!(worst.iter().map(|of| (of.blocks, of.prompts)).collect::<Vec<_>>(), [(4, 100.0)]);
    }
}
