//! The tokens of prefixes that tenants keep by name, so that what the device gave up of one can be loaded without its text being sent again.
//!
//! Owns: these tokens. Must never: reach one by anything but its tenant and its id, or outlive that tenant. Bounded: the text used longest
//! ago makes room, and its prefix then asks for its text.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use folio_kv::{PREFIXES_MAX, PrefixId, TenantId};
use parking_lot::Mutex;

/// Tokens remembered for each tenant: 4 MiB.
const TOKENS_MAX: usize = 1 << 20;

struct PrefixText {
    tokens: Arc<[u32]>,
    /// Order of use.
    used: u64,
}

#[derive(Default)]
struct PrefixTable {
    of: HashMap<PrefixId, PrefixText>,
    /// Of all of them.
    tokens: usize,
    uses: u64,
}

impl PrefixTable {
    fn remove(&mut self, id: PrefixId) {
        if let Some(text) = self.of.remove(&id) {
            self.tokens -= text.tokens.len();
        }
    }

    /// `false`: there is nothing that could go.
    fn remove_oldest(&mut self) -> bool {
        let oldest = self.of.iter().min_by_key(|(_, text)| text.used).map(|(id, _)| *id);
        oldest.inspect(|id| self.remove(*id)).is_some()
    }
}

/// See the module documentation.
#[derive(Default)]
pub struct PrefixTexts(Mutex<HashMap<TenantId, PrefixTable>>);

impl PrefixTexts {
    /// O(texts of the tenant) where others must go for it. One that is longer than all may be is not kept.
    pub fn keep(&self, tenant: TenantId, id: PrefixId, tokens: Arc<[u32]>) {
        let mut all = self.0.lock();
        let texts = all.entry(tenant).or_default();
        texts.remove(id);
        if tokens.len() > TOKENS_MAX {
            return;
        }
        let is_over =
            |texts: &PrefixTable| texts.of.len() >= PREFIXES_MAX || texts.tokens + tokens.len() > TOKENS_MAX;
        while is_over(texts) && texts.remove_oldest() {}
        texts.uses += 1;
        texts.tokens += tokens.len();
        texts.of.insert(id, PrefixText { tokens, used: texts.uses });
    }

    pub fn get(&self, tenant: TenantId, id: PrefixId) -> Option<Arc<[u32]>> {
        let mut all = self.0.lock();
        let texts = all.get_mut(&tenant)?;
        texts.uses += 1;
        let text = texts.of.get_mut(&id)?;
        text.used = texts.uses;
        Some(text.tokens.clone())
    }

    pub fn forget_one(&self, tenant: TenantId, id: PrefixId) {
        if let Some(texts) = self.0.lock().get_mut(&tenant) {
            texts.remove(id);
        }
    }

    /// Tenants that are no more.
    pub fn forget(&self, gone: &HashSet<TenantId>) {
        self.0.lock().retain(|tenant, _| !gone.contains(tenant));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> PrefixId {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        PrefixId(id)
    }

    #[test]
    fn texts_are_bounded_and_each_tenant_s_own() {
        let texts = PrefixTexts::default();
        let (one, two) = (TenantId(1), TenantId(2));
        let half: Arc<[u32]> = vec![7; TOKENS_MAX / 2].into();
        (0..2).for_each(|number| texts.keep(one, id(number), half.clone()));
        texts.keep(two, id(0), vec![1].into());
        assert_eq!(texts.get(one, id(0)).map(|text| text.len()), Some(half.len()));
        texts.keep(one, id(2), vec![2; 3].into());
        assert_eq!(texts.get(one, id(1)), None, "used longest ago");
        assert!(texts.get(one, id(0)).is_some() && texts.get(one, id(2)).is_some());
        assert_eq!(texts.get(two, id(2)), None);
        texts.keep(one, id(2), vec![0; TOKENS_MAX + 1].into());
        assert_eq!(texts.get(one, id(2)), None, "too long");
        texts.forget_one(one, id(0));
        assert_eq!((texts.get(one, id(0)), texts.0.lock()[&one].tokens), (None, 0));
        (0..2 * PREFIXES_MAX as u32).for_each(|number| texts.keep(one, id(number), vec![1].into()));
        assert_eq!(texts.0.lock()[&one].of.len(), PREFIXES_MAX);
        texts.forget(&HashSet::from([one]));
        assert_eq!(texts.get(one, id(400)), None);
        assert!(texts.get(two, id(0)).is_some());
    }
}
