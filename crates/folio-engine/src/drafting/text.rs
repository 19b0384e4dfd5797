//! Text that drafts are found in.
//!
//! Owns: tokens, and for each place the one before it with the same two last tokens (hash chains, as deflate has them). Must never:
//! know whose text it is.
//!
//! What a suffix tree of bounded depth tells of the newest places, without its nodes: a place is found by its pair, and the longer
//! match by comparing. Cost: O(1) to add a token, some 20 bytes for each.

use std::collections::HashMap;

use ahash::RandomState;

/// Stands between texts of one index; no vocabulary has it.
pub const SEPARATOR: u32 = u32::MAX;

/// Bytes that a token takes: itself, its link, and its entry in a map that is half full.
pub const TOKEN_BYTES: usize = 40;

#[derive(Debug, Default)]
pub struct Text {
    tokens: Vec<u32>,
    /// The last place before with the same pair, plus one; 0: none.
    links: Vec<u32>,
    /// The last place of a pair, plus one. By keyed hashes: a stranger chooses the pairs, and could have them all collide.
    last: HashMap<(u32, u32), u32, RandomState>,
}

impl Text {
    /// Of `tokens`, with memory set aside for `more`. O(tokens).
    pub fn of(tokens: &[u32], more: usize) -> Self {
        let mut text = Self::default();
        text.tokens.reserve(tokens.len() + more);
        text.links.reserve(tokens.len() + more);
        text.last.reserve(tokens.len() + more);
        tokens.iter().for_each(|token| text.push(*token));
        text
    }

    pub fn push(&mut self, token: u32) {
        let place = self.tokens.len() as u32;
        let link = match self.tokens.last() {
            Some(before) if *before != SEPARATOR && token != SEPARATOR => {
                self.last.insert((*before, token), place + 1).unwrap_or(0)
            }
            _ => 0,
        };
        self.tokens.push(token);
        self.links.push(link);
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn bytes(&self) -> usize {
        self.tokens.len() * TOKEN_BYTES
    }

    /// Places of the last two tokens of `context` that something follows, newest first: the index of what follows.
    pub fn places(&self, context: &[u32]) -> impl Iterator<Item = usize> + '_ {
        let newest = match context {
            [.., before, last] => self.last.get(&(*before, *last)).copied(),
            _ => None,
        };
        let back = |place: &u32| Some(self.links[*place as usize - 1]).filter(|link| *link > 0);
        std::iter::successors(newest, back)
            .map(|place| place as usize)
            .filter(|next| *next < self.tokens.len())
    }

    /// How many tokens before `next` are the last of `context`.
    pub fn matched(&self, context: &[u32], next: usize) -> usize {
        let before = self.tokens[..next].iter().rev();
        before.zip(context.iter().rev()).take_while(|(a, b)| a == b && **a != SEPARATOR).count()
    }
}
