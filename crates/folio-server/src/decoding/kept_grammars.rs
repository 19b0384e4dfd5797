//! Compiled grammars that are kept for their tenants: an agent sends the same tools and schemas with every turn.

use folio_text::Syntax;
use sha2::{Digest as _, Sha256};

use crate::tenancy::kept::Digest;

/// What all of them may take.
pub const BYTES_MAX: usize = 64 << 20;

/// By what a grammar is found again, and about what it takes.
pub fn source(syntax: &Syntax) -> (Digest, usize) {
    let (kind, text) = match syntax {
        Syntax::Json { schema, whitespace } => (0, format!("{whitespace:?}\n{schema}")),
        Syntax::Regex(text) => (1, text.clone()),
        Syntax::Choice(list) => (2, serde_json::Value::from(list.clone()).to_string()),
        Syntax::Grammar(text) => (3, text.clone()),
    };
    let digest = Sha256::new_with_prefix([kind]).chain_update(&text).finalize();
    // Its rules, its lexer, and what the lexer learns.
    (digest.into(), (32 << 10) + 16 * text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_notation_is_another_grammar() {
        let text = |syntax: fn(String) -> Syntax| source(&syntax("a".into())).0;
        assert_ne!(text(Syntax::Regex), text(Syntax::Grammar));
        assert_ne!(source(&Syntax::Regex("a".into())).0, source(&Syntax::Regex("b".into())).0);
        assert!(source(&Syntax::Regex("a".repeat(100_000))).1 > 1_000_000);
    }
}
