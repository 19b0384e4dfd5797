//! A recorder of cache events: what a router outside believes to be cached, and where.
//!
//! Owns: a copy of the cache's content, kept up by events alone. Must never: look at the cache, but to compare, and to begin anew when
//! events were lost.

use std::collections::HashMap;

use folio_kv::{BlockHash, CacheEvent, KvCache, Medium, TenantId};

use crate::report::Report;

/// Whose content it is, and what it continues.
type Entry = (TenantId, Option<BlockHash>);

/// See the module documentation.
pub(crate) struct Mirror {
    held: HashMap<(Medium, BlockHash), Entry>,
    events: Vec<CacheEvent>,
}

impl Mirror {
    /// Of a cache that is empty; at most `most` events may wait to be taken.
    pub fn new(cache: &mut KvCache, most: usize) -> Self {
        cache.record_events(most);
        Self { held: HashMap::new(), events: Vec::new() }
    }

    /// Takes what happened, and compares.
    pub fn follow(&mut self, cache: &mut KvCache, report: &mut Report) -> Result<(), String> {
        let lost = cache.take_events(&mut self.events);
        report.events += self.events.len() as u64;
        let mut events = std::mem::take(&mut self.events);
        let mut resident = HashMap::new();
        for event in cache.resident() {
            apply(&mut resident, event)?;
        }
        if lost > 0 {
            report.resyncs += 1;
            events.clear();
            self.held = resident;
        } else {
            for event in events.drain(..) {
                apply(&mut self.held, event)?;
                report.cleared += u64::from(matches!(event, CacheEvent::Cleared { .. }));
            }
            differing(&self.held, &resident).map_or(Ok(()), Err)?;
        }
        self.events = events;
        Ok(())
    }
}

/// On the device nothing is stored before what it continues.
fn apply(held: &mut HashMap<(Medium, BlockHash), Entry>, event: CacheEvent) -> Result<(), String> {
    match event {
        CacheEvent::Stored { tenant, hash, parent, medium } => {
            let reachable = parent.is_none_or(|parent| held.contains_key(&(Medium::Device, parent)));
            if medium == Medium::Device && !reachable {
                return Err(format!("{event:?}: what it continues is not there"));
            }
            match held.insert((medium, hash), (tenant, parent)) {
                Some(_) => Err(format!("{event:?}: it was stored before")),
                None => Ok(()),
            }
        }
        CacheEvent::Removed { tenant, hash, medium } => match held.remove(&(medium, hash)) {
            Some((owner, _)) if owner == tenant => Ok(()),
            found => Err(format!("{event:?}: there was {found:?}")),
        },
        CacheEvent::Cleared { .. } => Ok(()),
    }
}

fn differing(
    held: &HashMap<(Medium, BlockHash), Entry>,
    resident: &HashMap<(Medium, BlockHash), Entry>,
) -> Option<String> {
    let untold = resident.iter().find(|(key, entry)| held.get(key) != Some(entry));
    let gone = held.iter().find(|(key, _)| !resident.contains_key(key));
    let untold = untold.map(|of| format!("{of:?} resides and no event told so"));
    untold.or_else(|| gone.map(|of| format!("{of:?} is gone and no event told so")))
}
