//! A recorder of cache events: what a router outside believes to be cached.
//!
//! Owns: a copy of the cache's content, kept up by events alone. Must never: look at the cache, but to compare.

use std::collections::HashMap;

use folio_kv::{BlockHash, CacheEvent, EventBatch, KvCache, TenantId};

use crate::report::RunReport;

/// Whose content it is, what it continues, and its tokens.
type Entry = (TenantId, Option<BlockHash>, Box<[u32]>);

/// See the module documentation.
pub(crate) struct Mirror {
    held: HashMap<BlockHash, Entry>,
    batch: EventBatch,
    /// Some of what resides was not told yet.
    incomplete: bool,
    block_tokens: usize,
}

impl Mirror {
    /// Of a cache that is empty; at most `most` events may wait to be taken.
    pub fn new(cache: &mut KvCache, most: usize) -> Self {
        cache.record_events(most);
        let block_tokens = cache.config().block_tokens;
        let batch = EventBatch::with_capacity(most, block_tokens);
        Self { held: HashMap::new(), batch, incomplete: false, block_tokens: block_tokens as usize }
    }

    /// Takes what happened, and compares.
    pub fn follow(&mut self, cache: &mut KvCache, report: &mut RunReport) -> Result<(), String> {
        cache.take_events(&mut self.batch);
        report.events += self.batch.events.len() as u64;
        if self.batch.begins_anew {
            report.resyncs += 1;
            self.held.clear();
            self.incomplete = true;
        }
        let mut tokens = self.batch.tokens.chunks_exact(self.block_tokens);
        for event in &self.batch.events {
            apply(&mut self.held, *event, &mut tokens, !self.incomplete)?;
            report.cleared += u64::from(matches!(event, CacheEvent::Cleared { .. }));
        }
        self.incomplete = self.batch.incomplete;
        self.batch.clear();
        if self.incomplete || cache.has_events() {
            return Ok(());
        }
        let mut resident = HashMap::new();
        let all = cache.resident();
        let mut tokens = all.tokens.chunks_exact(self.block_tokens);
        for event in all.events {
            apply(&mut resident, event, &mut tokens, false)?;
        }
        differing(&self.held, &resident).map_or(Ok(()), Err)
    }
}

/// `ordered`: nothing is stored before what it continues.
fn apply<'a>(
    held: &mut HashMap<BlockHash, Entry>,
    event: CacheEvent,
    tokens: &mut impl Iterator<Item = &'a [u32]>,
    ordered: bool,
) -> Result<(), String> {
    match event {
        CacheEvent::Stored { tenant, hash, parent } => {
            let reachable = parent.is_none_or(|parent| held.contains_key(&parent));
            if ordered && !reachable {
                return Err(format!("{event:?}: what it continues is not there"));
            }
            let tokens = tokens.next().ok_or_else(|| format!("{event:?}: it has no tokens"))?;
            match held.insert(hash, (tenant, parent, tokens.into())) {
                Some(_) => Err(format!("{event:?}: it was stored before")),
                None => Ok(()),
            }
        }
        CacheEvent::Removed { tenant, hash } => match held.remove(&hash) {
            Some((owner, ..)) if owner == tenant => Ok(()),
            found => Err(format!("{event:?}: there was {found:?}")),
        },
        CacheEvent::Cleared { .. } => Ok(()),
    }
}

fn differing(held: &HashMap<BlockHash, Entry>, resident: &HashMap<BlockHash, Entry>) -> Option<String> {
    let untold = resident.iter().find(|(key, entry)| held.get(key) != Some(entry));
    let gone = held.iter().find(|(key, _)| !resident.contains_key(key));
    let untold = untold.map(|of| format!("{of:?} resides and no event told so"));
    untold.or_else(|| gone.map(|of| format!("{of:?} is gone and no event told so")))
}
