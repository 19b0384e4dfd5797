//! Where pairs of tokens are in a text.
//!
//! Owns: for each place of a text, the one before it with the same two last tokens (hash chains, as deflate has them), in blocks of
//! [`BLOCK_TOKENS`]. Must never: own a text, or know whose it is.
//!
//! What a suffix tree of bounded depth tells of the newest places, without its nodes: a place is found by its pair, and the longer
//! match by comparing. A block is a function of its tokens and the one before them, wherever they stand; so one that is full is shared by
//! all texts that have these tokens, and a text that goes on from another has only what is new to index ([`IndexCache`]).
//!
//! Cost: O(1) to add a token, some 6 bytes for each; to find a pair one probe for each block, from the newest, until enough is found.

use std::sync::{Arc, LazyLock};

use ahash::RandomState;

/// Stands between texts of one index; no vocabulary has it.
pub const SEPARATOR: u32 = u32::MAX;

/// Tokens of a block that is full: places are two bytes, and what of a text is not kept is indexed within the caches nearest to a core.
pub const BLOCK_TOKENS: usize = 2048;

/// Bytes that a token takes at most, as long as its block is not full: its link, and its part of a table that is a quarter full.
pub const TOKEN_BYTES: usize = 12;

/// Hashes of pairs are keyed: a stranger chooses the pairs, and could have them all collide.
static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);

fn hash((before, token): (u32, u32)) -> usize {
    KEYS.hash_one(u64::from(before) << 32 | u64::from(token)) as usize
}

/// Keeps full blocks between calls, for one tenant: by the time that this saves anybody could tell what was indexed before.
pub trait IndexCache {
    /// The block of these tokens: what was kept for the same ones, or else what `make` makes of them, which is kept. `tokens`: those of the
    /// block, behind the one before it where it is not a text's first.
    fn block(&self, tokens: &[u32], make: &dyn Fn() -> Arc<IndexBlock>) -> Arc<IndexBlock>;
}

/// Keeps nothing.
pub struct NoIndexCache;

impl IndexCache for NoIndexCache {
    fn block(&self, _: &[u32], make: &dyn Fn() -> Arc<IndexBlock>) -> Arc<IndexBlock> {
        make()
    }
}

/// The index of up to [`BLOCK_TOKENS`] tokens. Places are counted from one; 0: none.
#[derive(Clone, Debug, Default)]
pub struct IndexBlock {
    /// The last place of each pair: a table with open addresses, at most half full.
    heads: Vec<u16>,
    /// Of each place, the last before it in the block with the same pair.
    links: Vec<u16>,
}

impl IndexBlock {
    fn with_capacity(tokens: usize) -> Self {
        let heads = if tokens == 0 { 0 } else { (2 * tokens).next_power_of_two() };
        Self { heads: vec![0; heads], links: Vec::with_capacity(tokens) }
    }

    /// Of `tokens[base..base + count]`.
    fn of(tokens: &[u32], base: usize, count: usize) -> Self {
        let mut block = Self::with_capacity(count);
        (0..count).for_each(|_| block.push(tokens, base));
        block
    }

    /// What it takes.
    pub fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&self.heads[..]) + size_of_val(&self.links[..])
    }

    /// The pair that ends at a place of `tokens`.
    fn pair(tokens: &[u32], at: usize) -> Option<(u32, u32)> {
        let pair = (tokens[at.checked_sub(1)?], tokens[at]);
        (pair.0 != SEPARATOR && pair.1 != SEPARATOR).then_some(pair)
    }

    /// Where the table has a pair or would have it.
    fn slot(&self, pair: (u32, u32), hash: usize, tokens: &[u32], base: usize) -> usize {
        let mask = self.heads.len() - 1;
        let mut slot = hash & mask;
        while let place @ 1.. = self.heads[slot]
            && Self::pair(tokens, base + place as usize - 1) != Some(pair)
        {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// Adds the token of `tokens` that is next in the block that begins at `base`.
    fn push(&mut self, tokens: &[u32], base: usize) {
        let place = self.links.len();
        let Some(pair) = Self::pair(tokens, base + place) else { return self.links.push(0) };
        if 2 * (place + 1) > self.heads.len() {
            self.grow(tokens, base);
        }
        let slot = self.slot(pair, hash(pair), tokens, base);
        self.links.push(std::mem::replace(&mut self.heads[slot], place as u16 + 1));
    }

    fn grow(&mut self, tokens: &[u32], base: usize) {
        let larger = vec![0; (2 * self.heads.len()).max(16)];
        for place in std::mem::replace(&mut self.heads, larger).into_iter().filter(|place| *place > 0) {
            if let Some(pair) = Self::pair(tokens, base + place as usize - 1) {
                let slot = self.slot(pair, hash(pair), tokens, base);
                self.heads[slot] = place;
            }
        }
    }

    /// Places where a pair ends, newest first, as places of `tokens`.
    fn places<'a>(
        &'a self,
        pair: (u32, u32),
        hash: usize,
        tokens: &[u32],
        base: usize,
    ) -> impl Iterator<Item = usize> + use<'a> {
        let newest = if self.heads.is_empty() { 0 } else { self.heads[self.slot(pair, hash, tokens, base)] };
        let some = |place: u16| Some(place).filter(|place| *place > 0);
        let back = move |place: &u16| some(self.links[*place as usize - 1]);
        std::iter::successors(some(newest), back).map(move |place| base + place as usize - 1)
    }
}

/// The index of a text, which is given with each call and is always the same one, or a longer one.
#[derive(Clone, Debug, Default)]
pub struct PairIndex {
    full: Vec<Arc<IndexBlock>>,
    /// What is behind them.
    last: IndexBlock,
}

impl PairIndex {
    /// Of a text that is whole. O(tokens that `cache` has no block of), and O(tokens) for what it does to find them.
    pub fn of(tokens: &[u32], cache: &dyn IndexCache) -> Self {
        let blocks = tokens.len() / BLOCK_TOKENS;
        let block = |at: usize| {
            let base = at * BLOCK_TOKENS;
            let make = || Arc::new(IndexBlock::of(tokens, base, BLOCK_TOKENS));
            cache.block(&tokens[base.saturating_sub(1)..base + BLOCK_TOKENS], &make)
        };
        Self {
            full: (0..blocks).map(block).collect(),
            last: IndexBlock::of(tokens, blocks * BLOCK_TOKENS, tokens.len() % BLOCK_TOKENS),
        }
    }

    /// Of an empty text, with memory set aside for `tokens`.
    pub fn with_capacity(tokens: usize) -> Self {
        Self { full: Vec::new(), last: IndexBlock::with_capacity(tokens.min(BLOCK_TOKENS)) }
    }

    /// Indexes the last of `tokens`.
    pub fn push(&mut self, tokens: &[u32]) {
        if self.last.links.len() == BLOCK_TOKENS {
            // A text of this length has more to come.
            let next = IndexBlock::with_capacity(BLOCK_TOKENS);
            self.full.push(Arc::new(std::mem::replace(&mut self.last, next)));
        }
        self.last.push(tokens, self.full.len() * BLOCK_TOKENS);
    }

    /// The newest first, each with the place of its first token.
    fn blocks(&self) -> impl Iterator<Item = (usize, &IndexBlock)> {
        let full = self.full.iter().enumerate().rev().map(|(at, block)| (at, &**block));
        let last = std::iter::once((self.full.len(), &self.last));
        last.chain(full).map(|(at, block)| (at * BLOCK_TOKENS, block))
    }

    /// Places of the last two tokens of `context` in `tokens` that something follows, newest first: the place of what follows.
    pub fn places<'a>(&'a self, tokens: &'a [u32], context: &[u32]) -> impl Iterator<Item = usize> + use<'a> {
        let pair = context.len().checked_sub(1).and_then(|last| IndexBlock::pair(context, last));
        let in_blocks = move |pair: (u32, u32)| {
            let hash = hash(pair);
            self.blocks().flat_map(move |(base, block)| block.places(pair, hash, tokens, base))
        };
        let places = pair.into_iter().flat_map(in_blocks).map(|place| place + 1);
        places.filter(move |next| *next < tokens.len())
    }

    /// What it takes.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.blocks().map(|(_, block)| block.bytes()).sum()
    }
}
