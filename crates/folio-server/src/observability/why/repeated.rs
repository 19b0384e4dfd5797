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
        for (length, hash) in (1..=blocks).zip(hashes.iter()).filter(|(length, _)| is_told_apart(*length)) {
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

    /// Half of them go, or more: what cost no more than the middle one.
    fn shrink(&mut self) {
        let mut costs: Vec<f64> = self.0.values().map(|of| of.computed_again).collect();
        let middle = costs.len() / 2;
        let (_, middle, _) = costs.select_nth_unstable_by(middle, f64::total_cmp);
        let middle = *middle;
        self.0.retain(|_, of| of.computed_again > middle);
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
fn is_told_apart(blocks: u32) -> bool {
    blocks.is_power_of_two() || (blocks.is_multiple_of(3) && (blocks / 3).is_power_of_two())
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
        let told_apart: Vec<u32> = (1..30).filter(|blocks| is_told_apart(*blocks)).collect();
        assert_eq!(told_apart, [1, 2, 3, 4, 6, 8, 12, 16, 24]);
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
