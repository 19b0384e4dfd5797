//! The cache's share of a decode step, isolated so that a caller with a clock can time it.
//!
//! Owns: a cache full of running sequences. Must never: measure time itself (the clock is an input of whoever prints
//! figures; see `examples/step_cost.rs`).

use crate::cache::KvCache;
use crate::hash::BlockHashes;
use crate::policy::LruLeafFirst;
use crate::table::BlockTable;
use crate::types::{BlockCopy, CacheConfig, Identity, OutOfBlocks, Root, TenantId};

/// Sequences that all decode: each step is `grow` by one position and `commit`, as a scheduler calls them.
pub struct DecodeWorkload {
    cache: KvCache,
    sequences: Vec<(BlockTable, Vec<u32>)>,
    copies: Vec<BlockCopy>,
    next_token: u32,
}

impl DecodeWorkload {
    /// `sequences` with a computed prompt of `prompt_tokens` each, sharing nothing. Fails if the pool cannot hold them.
    pub fn new(config: CacheConfig, sequences: u32, prompt_tokens: u32) -> Result<Self, OutOfBlocks> {
        let root = Root::derive(&Identity {
            tenant: TenantId(0),
            tenant_secret: &[0; 32],
            model_digest: &[0; 32],
            layout_digest: &[0; 32],
            extra: &[],
        });
        let cache = KvCache::new(config, Box::new(LruLeafFirst::new()));
        let mut workload = Self { cache, sequences: Vec::new(), copies: Vec::new(), next_token: 0 };
        for _ in 0..sequences {
            let first = workload.next_token;
            workload.next_token = first.wrapping_add(prompt_tokens);
            let tokens: Vec<u32> = (0..prompt_tokens).map(|i| first.wrapping_add(i)).collect();
            let hashes = BlockHashes::new(&root, &tokens, config.block_tokens);
            let (mut table, _) = workload.cache.attach(hashes, &tokens, prompt_tokens);
            workload.cache.grow(&mut table, prompt_tokens, &mut workload.copies)?;
            workload
                .cache
                .commit(&mut table, &tokens, prompt_tokens)
                .expect("what was grown can be committed");
            workload.sequences.push((table, tokens));
        }
        Ok(workload)
    }

    /// One decode step of every sequence; the error is the first sequence's that found no room.
    pub fn step(&mut self) -> Result<(), OutOfBlocks> {
        self.copies.clear();
        for (table, tokens) in &mut self.sequences {
            tokens.push(self.next_token);
            self.next_token = self.next_token.wrapping_add(1);
            self.cache.grow(table, tokens.len() as u32, &mut self.copies)?;
        }
        for (table, tokens) in &mut self.sequences {
            let committed = self.cache.commit(table, tokens, tokens.len() as u32);
            committed.expect("what was grown can be committed");
        }
        Ok(())
    }

    /// Looks up, attaches and releases the whole context of one sequence: what admitting it again would cost.
    pub fn reattach(&mut self, sequence: usize) -> u32 {
        let (table, tokens) = &self.sequences[sequence];
        let (again, _) = self.cache.attach(table.hashes().clone(), tokens, tokens.len() as u32 - 1);
        let found = again.computed();
        self.cache.abandon(again, tokens);
        found
    }

    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Tables of all sequences, for [`KvCache::check`].
    pub fn tables(&self) -> Vec<&BlockTable> {
        self.sequences.iter().map(|(table, _)| table).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupCounts;

    #[test]
    fn steps_advance_every_sequence_and_end_when_the_pool_does() {
        let config = CacheConfig { blocks: 9, block_tokens: 4, bytes_per_block: 1 };
        let mut workload = DecodeWorkload::new(config, 3, 6).unwrap();
        for step in 1..=6 {
            workload.step().unwrap();
            assert!(workload.tables().iter().all(|t| t.computed() == 6 + step));
            workload.cache().check(&workload.tables()).unwrap();
        }
        assert_eq!(
            workload.step(),
            Err(OutOfBlocks { needed: GroupCounts::full(1), available: GroupCounts::default() })
        );
        assert_eq!(
            workload.reattach(1),
            8,
            "the last token is left to compute, and there is no room for a tail"
        );
        assert!(DecodeWorkload::new(config, 5, 6).is_err());
    }
}
