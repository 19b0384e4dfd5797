//! What drafts of one tenant may take of the others' speed.
//!
//! Owns: how many tokens each tenant of a step says in it. Must never: choose drafts, or look at what they cost.
//!
//! A step with drafts takes longer for everybody in it, and says more for those alone whose drafts they are. So a step of several tenants may
//! be longer than one without drafts by as much as every one of them says more in it, and by a tenth. Within a tenant most tokens count,
//! whoever says them.

use folio_kv::TenantId;
use rustc_hash::FxHashMap;

/// How much longer a tenant that has no drafts may wait for a token because of others' drafts.
const LONGER: f64 = 1.1;

/// The tenants of a step, by their places.
#[derive(Default)]
pub(super) struct TenantRates {
    places: FxHashMap<TenantId, usize>,
    tenants: Vec<Tokens>,
    last: Option<(TenantId, usize)>,
}

/// Of a tenant in a step.
struct Tokens {
    /// Without drafts: one of each sequence.
    plain: f64,
    expected: f64,
}

impl TenantRates {
    pub fn clear(&mut self) {
        self.places.clear();
        self.tenants.clear();
        self.last = None;
    }

    /// A sequence more.
    pub fn add(&mut self, tenant: TenantId) {
        let place = self.place(tenant);
        self.tenants[place].plain += 1.0;
        self.tenants[place].expected += 1.0;
    }

    /// Somebody of this tenant may begin in the step, and has no drafts in it.
    pub fn begins(&mut self, tenant: TenantId) {
        if !self.places.contains_key(&tenant) {
            self.add(tenant);
        }
    }

    /// Of a tenant. Where one is asked for several times in a row it is looked up once.
    pub fn place(&mut self, tenant: TenantId) -> usize {
        if let Some((_, place)) = self.last.filter(|(last, _)| *last == tenant) {
            return place;
        }
        let place = *self.places.entry(tenant).or_insert(self.tenants.len());
        if place == self.tenants.len() {
            self.tenants.push(Tokens { plain: 0.0, expected: 0.0 });
        }
        self.last = Some((tenant, place));
        place
    }

    /// The tenant at this place gets a draft that is right so often.
    pub fn draft(&mut self, place: usize, right: f32) {
        if let Some(tokens) = self.tenants.get_mut(place) {
            tokens.expected += f64::from(right);
        }
    }

    /// So many times as long as without drafts a step may take with those it has by now. O(tenants of the step).
    pub fn longer(&self) -> f64 {
        let gains = self.tenants.iter().map(|tokens| tokens.expected / tokens.plain);
        match self.tenants.len() {
            0 | 1 => f64::INFINITY,
            _ => LONGER * gains.fold(f64::INFINITY, f64::min),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_tenant_is_not_bounded_and_of_several_the_one_that_gains_least_is_the_bound() {
        let mut rates = TenantRates::default();
        rates.add(TenantId(1));
        rates.begins(TenantId(1));
        assert_eq!(rates.longer(), f64::INFINITY);
        rates.add(TenantId(2));
        rates.add(TenantId(2));
        let [mine, other] = [1, 2].map(|tenant| rates.place(TenantId(tenant)));
        rates.draft(mine, 1.0);
        assert_eq!(rates.longer(), LONGER, "the other has none");
        rates.draft(other, 0.25);
        assert_eq!(rates.longer(), 1.125 * LONGER);
        rates.draft(other, 0.75);
        assert_eq!(rates.longer(), 1.5 * LONGER, "three tokens of two sequences");
        rates.begins(TenantId(3));
        assert_eq!(rates.longer(), LONGER);
        rates.clear();
        assert_eq!(rates.longer(), f64::INFINITY);
    }
}
