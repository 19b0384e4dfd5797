//! Text that drafts are found in: tokens, and where their pairs are.
//!
//! Owns: tokens of answers, which grow. Must never: know whose they are. Cost: O(1) to add a token.

use super::index::{self, PairIndex, SEPARATOR};

/// Bytes that a token takes.
pub const TOKEN_BYTES: usize = index::TOKEN_BYTES + size_of::<u32>();

/// A text that grows by a token at a time.
#[derive(Debug, Default)]
pub struct GrowingText {
    tokens: Vec<u32>,
    index: PairIndex,
}

impl GrowingText {
    /// Of `tokens`, with memory set aside for `more`. O(tokens).
    pub fn of(tokens: &[u32], more: usize) -> Self {
        let all = tokens.len() + more;
        let mut text = Self { tokens: Vec::with_capacity(all), index: PairIndex::with_capacity(all) };
        tokens.iter().for_each(|token| text.push(*token));
        text
    }

    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.index.push(&self.tokens);
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn into_tokens(self) -> Vec<u32> {
        self.tokens
    }

    pub fn bytes(&self) -> usize {
        self.tokens.len() * TOKEN_BYTES
    }

    pub fn view(&self) -> View<'_> {
        View { tokens: &self.tokens, index: &self.index }
    }
}

/// A text to be looked at.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub tokens: &'a [u32],
    pub index: &'a PairIndex,
}

impl<'a> View<'a> {
    /// Places of the last two tokens of `context` that something follows, newest first: the place of what follows.
    pub fn places(self, context: &[u32]) -> impl Iterator<Item = usize> + use<'a> {
        self.index.places(self.tokens, context)
    }

    /// How many tokens before `next` are the last of `context`.
    pub fn matched(self, context: &[u32], next: usize) -> usize {
        let before = self.tokens[..next].iter().rev();
        before.zip(context.iter().rev()).take_while(|(a, b)| a == b && **a != SEPARATOR).count()
    }

    /// How many of the last tokens of `context` stand before `next`, each in its place.
    pub fn same(self, context: &[u32], next: usize) -> usize {
        let before = self.tokens[..next].iter().rev();
        before.zip(context.iter().rev()).filter(|(a, b)| a == b).count()
    }
}
