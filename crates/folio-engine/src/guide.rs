//! What a choice may say next, where something restricts it (a schema, a regular expression, a grammar).
//!
//! Owns: the seam to whoever knows the rules. Must never: know what the rules are, or compute them: a [`Guide`] does that on
//! threads of its own beside the forward pass, from the moment a token is known until the next is drawn.
//!
//! A guide belongs to one choice, from its first token to its last; a preempted sequence keeps it. The choices of one request
//! share the guide of the empty answer until each has its first token. What a guide allows is a function of the rules, of the tokens
//! confirmed and of the drafts behind them, so promise 1 holds with them: neither neighbours nor time change it.
//!
//! A mask binds where a token is drawn. If it is not there then, that row is late: it alone is computed again once the guide is ready
//! ([`crate::WaitingFor::Grammar`]), to the same bits, and everybody else goes on.

use std::fmt;
use std::sync::Arc;

/// Rules for answers, ready to be followed. Shared by all choices of a request.
pub trait Rules: Send + Sync {
    /// A guide for an answer that begins with `chosen`. Must not block.
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide>;

    /// The field of the request that asked for them, for error messages.
    fn name(&self) -> &str;
}

/// Follows one answer. Nothing of it may block.
pub trait Guide: Send + Sync {
    /// `token` was chosen and is confirmed. What follows from it is computed elsewhere.
    fn advance(&self, token: u32);

    /// What is allowed behind each of these drafts, which may come next, will be asked for.
    fn expect(&self, _drafts: &[u32]) {}

    /// Sets the logits of what must not come behind the confirmed tokens and `drafts` to minus infinity, `[vocab]`, if that is known.
    /// Where a draft may not come itself, what is allowed behind it is of no account. An error ends this choice alone; its text is
    /// for the client.
    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String>;

    /// Makes of `drafts`, which may come behind the confirmed tokens, those that are worth a row, as far as the rules are known now: cut
    /// before the first that may not come; and where the rules leave nothing else, that comes first. Returns how many at the beginning the
    /// rules leave alone.
    fn draft(&self, _drafts: &mut Vec<u32>) -> usize {
        0
    }

    /// Whether what is allowed behind the confirmed tokens and `drafts` is known, or never will be.
    fn is_ready(&self, _drafts: &[u32]) -> bool {
        true
    }
}

/// What came of asking for a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restricted {
    Applied,
    /// It is still being computed; the logits are of no use any more.
    Late,
}

/// Rules as a parameter of sampling: equal if they are the same object.
#[derive(Clone)]
pub struct RulesRef(pub Arc<dyn Rules>);

/// A guide as part of a plan: equal if it is the same object.
#[derive(Clone)]
pub struct GuideRef(pub Arc<dyn Guide>);

impl PartialEq for RulesRef {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl PartialEq for GuideRef {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for RulesRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Rules")
    }
}

impl fmt::Debug for GuideRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guide")
    }
}
