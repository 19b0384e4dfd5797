//! Compiled grammars that are kept: an agent sends the same tools and schemas with every turn.
//!
//! Owns: which are kept, for whom, and how many. Invariants: a tenant finds its own and no other's, so that nobody can tell by the time
//! whether another asked for the same; never more than [`BYTES_MAX`] in all and [`TENANT_BYTES_MAX`] of one tenant, as [`weight`] estimates
//! them, the least recently used go first. Cost: a digest of the source and a look-up in a tree.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use folio_kv::TenantId;
use folio_text::{Grammar, Syntax};
use sha2::{Digest, Sha256};

use crate::lock;

const BYTES_MAX: usize = 64 << 20;
const TENANT_BYTES_MAX: usize = BYTES_MAX / 4;

type Key = (TenantId, [u8; 32]);

/// See the module documentation.
#[derive(Default)]
pub struct KeptGrammars(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    grammars: HashMap<Key, Kept>,
    /// By last use, of each tenant and of all.
    uses: BTreeMap<(TenantId, u64), Key>,
    all_uses: BTreeMap<u64, Key>,
    held: HashMap<TenantId, usize>,
    bytes: usize,
    clock: u64,
}

struct Kept {
    grammar: Arc<Grammar>,
    used: u64,
    bytes: usize,
}

/// What makes a grammar, by which it is found again.
pub struct Source {
    key: Key,
    bytes: usize,
}

impl Source {
    pub fn of(tenant: TenantId, syntax: &Syntax) -> Self {
        let (kind, text) = match syntax {
            Syntax::Json { schema, whitespace } => (0, format!("{whitespace:?}\n{schema}")),
            Syntax::Regex(text) => (1, text.clone()),
            Syntax::Choice(list) => (2, serde_json::Value::from(list.clone()).to_string()),
            Syntax::Grammar(text) => (3, text.clone()),
        };
        let digest = Sha256::new_with_prefix([kind]).chain_update(&text).finalize();
        Self { key: (tenant, digest.into()), bytes: weight(text.len()) }
    }
}

/// About what a compiled grammar of so long a source takes: its rules, its lexer, and what the lexer learns.
fn weight(source: usize) -> usize {
    (32 << 10) + 16 * source
}

impl KeptGrammars {
    pub fn find(&self, source: &Source) -> Option<Arc<Grammar>> {
        let mut inner = lock(&self.0);
        let kept = inner.take(&source.key)?;
        let grammar = kept.grammar.clone();
        inner.put(source.key, kept);
        Some(grammar)
    }

    pub fn keep(&self, source: &Source, grammar: Arc<Grammar>) {
        let (tenant, bytes) = (source.key.0, source.bytes);
        if bytes > TENANT_BYTES_MAX {
            return;
        }
        let mut inner = lock(&self.0);
        inner.take(&source.key);
        while inner.held.get(&tenant).is_some_and(|held| held + bytes > TENANT_BYTES_MAX) {
            let oldest = inner.uses.range((tenant, 0)..=(tenant, u64::MAX)).next().map(|(_, key)| *key);
            let Some(key) = oldest else { break };
            inner.take(&key);
        }
        while inner.bytes + bytes > BYTES_MAX {
            let Some(key) = inner.all_uses.values().next().copied() else { break };
            inner.take(&key);
        }
        inner.put(source.key, Kept { grammar, used: 0, bytes });
    }
}

impl Inner {
    fn take(&mut self, key: &Key) -> Option<Kept> {
        let kept = self.grammars.remove(key)?;
        self.uses.remove(&(key.0, kept.used));
        self.all_uses.remove(&kept.used);
        self.bytes -= kept.bytes;
        if let Some(held) = self.held.get_mut(&key.0) {
            *held -= kept.bytes;
            if *held == 0 {
                self.held.remove(&key.0);
            }
        }
        Some(kept)
    }

    /// As the last used.
    fn put(&mut self, key: Key, kept: Kept) {
        self.clock += 1;
        let used = self.clock;
        self.uses.insert((key.0, used), key);
        self.all_uses.insert(used, key);
        self.bytes += kept.bytes;
        *self.held.entry(key.0).or_default() += kept.bytes;
        self.grammars.insert(key, Kept { used, ..kept });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use folio_text::Grammars;

    #[test]
    fn tenants_find_their_own_and_the_least_used_go_first() {
        let tokenizer = crate::generation::guides::tests::tokenizer();
        let grammars = Grammars::new(&tokenizer, &[95]).unwrap();
        let grammar = Arc::new(grammars.compile(&Syntax::Regex("a".into())).unwrap());
        let source = |tenant, text: &str| Source::of(TenantId(tenant), &Syntax::Regex(text.into()));
        let kept = KeptGrammars::default();
        assert!(kept.find(&source(1, "a")).is_none());
        kept.keep(&source(1, "a"), grammar.clone());
        assert!(kept.find(&source(1, "a")).is_some() && kept.find(&source(2, "a")).is_none());
        assert!(kept.find(&source(1, "b")).is_none());
        assert!(
            kept.find(&Source::of(TenantId(1), &Syntax::Grammar("a".into()))).is_none(),
            "another notation"
        );
        // As many as one tenant may have, and more; the first is used again and again.
        let most = TENANT_BYTES_MAX / weight(1000);
        let text = |index: usize| format!("{index:0>1000}");
        for index in 0..2 * most {
            kept.keep(&source(1, &text(index)), grammar.clone());
            assert!(kept.find(&source(1, "a")).is_some(), "{index}");
            let inner = lock(&kept.0);
            assert!(inner.bytes <= TENANT_BYTES_MAX && inner.uses.len() == inner.grammars.len());
            assert_eq!(inner.bytes, inner.grammars.values().map(|kept| kept.bytes).sum::<usize>());
        }
        assert!(
            kept.find(&source(1, &text(0))).is_none() && kept.find(&source(1, &text(2 * most - 1))).is_some()
        );
        for tenant in 2..8 {
            for index in 0..most {
                kept.keep(&source(tenant, &text(index)), grammar.clone());
            }
            let inner = lock(&kept.0);
            assert!(inner.bytes <= BYTES_MAX && inner.all_uses.len() == inner.grammars.len());
        }
        assert!(kept.find(&source(1, "a")).is_none(), "the others' were used later");
    }
}
