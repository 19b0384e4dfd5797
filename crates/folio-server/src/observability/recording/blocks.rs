//! Which blocks are equal, in numbers that mean nothing outside their recording.
//!
//! Owns: one number for each different block, in the order in which they came. A block's hash is its whole beginning's, so equal numbers are
//! equal texts from the first token on.

use std::collections::HashMap;

use folio_kv::{BlockHash, BlockHashes, TenantId};
use sha2::{Digest as _, Sha256};

/// Different blocks of a recording, 80 bytes each.
const NUMBERS_MAX: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum BlockKey {
    Block(BlockHash),
    /// The beginning of a block behind another.
    Tail([u8; 32]),
}

/// A prompt and its answer.
#[derive(Default)]
pub(super) struct Numbered {
    /// (first, how many) of consecutive numbers: of the prompt's full blocks, and of those behind them, the first of which may begin
    /// with the prompt's end.
    pub prompt: Vec<(u32, u32)>,
    pub output: Vec<(u32, u32)>,
    /// Of what the prompt has behind its last full block, where it has something.
    pub tail: Option<u32>,
}

#[derive(Default)]
pub(super) struct BlockNumbers {
    numbers: HashMap<BlockKey, u32>,
    tenants: HashMap<TenantId, u32>,
}

impl BlockNumbers {
    pub fn tenant(&mut self, tenant: TenantId) -> u32 {
        let next = self.tenants.len() as u32;
        *self.tenants.entry(tenant).or_insert(next)
    }

    /// `answer`: what was computed of it. `None`: there is no room.
    pub fn number(
        &mut self,
        tenant: TenantId,
        mut hashes: BlockHashes,
        prompt: &[u32],
        answer: &[u32],
    ) -> Option<Numbered> {
        let size = hashes.block_tokens() as usize;
        let full = prompt.len() / size;
        hashes.extend(&[prompt, answer].concat());
        if self.numbers.len() + hashes.len() as usize + 1 > NUMBERS_MAX {
            return None;
        }
        let mut numbered = Numbered::default();
        let mut parent = None;
        for (index, hash) in hashes.iter().enumerate() {
            let number = self.of(BlockKey::Block(*hash));
            push(if index < full { &mut numbered.prompt } else { &mut numbered.output }, number);
            if index + 1 == full {
                parent = Some(*hash);
            }
        }
        let tail = &prompt[full * size..];
        if !tail.is_empty() {
            let mut digest = Sha256::new();
            match parent {
                Some(BlockHash(parent)) => digest.update(parent),
                None => digest.update(tenant.0.to_le_bytes()),
            }
            tail.iter().for_each(|token| digest.update(token.to_le_bytes()));
            numbered.tail = Some(self.of(BlockKey::Tail(digest.finalize().into())));
        }
        Some(numbered)
    }

    fn of(&mut self, key: BlockKey) -> u32 {
        let next = self.numbers.len() as u32;
        *self.numbers.entry(key).or_insert(next)
    }
}

fn push(runs: &mut Vec<(u32, u32)>, number: u32) {
    match runs.last_mut() {
        Some((first, count)) if *first + *count == number => *count += 1,
        _ => runs.push((number, 1)),
    }
}

#[cfg(test)]
mod tests {
    use folio_kv::{Identity, Root};

    use super::*;

    fn root(secret: u8) -> Root {
        let (tenant, tenant_secret) = (TenantId(u32::from(secret)), [secret; 32]);
        Root::derive(&Identity {
            tenant,
            tenant_secret: &tenant_secret,
            model_digest: &[1; 32],
            layout_digest: &[2; 32],
            extra: &[],
        })
    }

    fn number(numbers: &mut BlockNumbers, secret: u8, prompt: &[u32], answer: &[u32]) -> Numbered {
        let hashes = BlockHashes::new(&root(secret), prompt, 4);
        numbers.number(TenantId(secret.into()), hashes, prompt, answer).expect("room")
    }

    #[test]
    fn equal_beginnings_have_equal_numbers_within_a_cache_and_no_others() {
        let mut numbers = BlockNumbers::default();
        let prompt: Vec<u32> = (0..10).collect();
        let first = number(&mut numbers, 1, &prompt, &[20, 21, 22]);
        // Two full blocks, the one across the border, and the prompt's end.
        assert_eq!(
            (&first.prompt[..], &first.output[..], first.tail),
            (&[(0, 2)][..], &[(2, 1)][..], Some(3))
        );
        let same = number(&mut numbers, 1, &prompt, &[30]);
        assert_eq!((same.prompt, same.output, same.tail), (vec![(0, 2)], vec![], Some(3)));
        // A second turn, which goes on behind the first's answer.
        let turn: Vec<u32> = prompt.iter().copied().chain([20, 21, 22, 23]).collect();
        assert_eq!(number(&mut numbers, 1, &turn, &[]).prompt, [(0, 3)]);
        assert_ne!(number(&mut numbers, 2, &prompt, &[]).prompt, [(0, 2)], "another cache");
        let mut other = prompt.clone();
        other[0] = 99;
        assert!(number(&mut numbers, 1, &other, &[]).prompt.iter().all(|(first, _)| *first > 3));
        assert_eq!(
            (numbers.tenant(TenantId(7)), numbers.tenant(TenantId(3)), numbers.tenant(TenantId(7))),
            (0, 1, 0)
        );
    }
}
