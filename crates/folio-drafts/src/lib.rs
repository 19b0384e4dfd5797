//! Drafts from text alone: what may be said next, by what was said before.
//!
//! Owns: texts, indexes of their pairs, and the choice of drafts in them. Must never: know requests, tenants or models, wait, or do work that
//! grows with a text but for a probe for each 2,048 tokens of it. Whose text is looked at is the caller's to decide.
//!
//! | file | noun |
//! |---|---|
//! | `index` | where pairs of tokens are in a text |
//! | `text` | text that grows, and its index |
//! | `suffix` | what most probably follows a context there |
//! | `answers` | finished answers of an owner |

mod answers;
mod index;
mod suffix;
#[cfg(test)]
mod tests;
mod text;

pub use answers::Answers;
pub use index::{IndexBlock, IndexCache, NoIndexCache, PairIndex};
pub use suffix::{Alignment, DEPTH, LAST, Search};
pub use text::{GrowingText, View};
