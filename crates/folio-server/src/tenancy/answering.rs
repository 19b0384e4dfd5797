//! Requests of tenants that are being answered, each on a connection: of all together, and the share of each tenant.
//!
//! Invariant: one tenant has as many as are free at most, so it takes half of the connections and leaves the others a half of the rest
//! (as with bytes, `unread`). A connection that answers is never closed to make room, so without this whoever asks slowly enough for long
//! enough has all of them. Cost: two atomic additions.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use folio_api::ApiError;

use crate::tenancy::gate::Gate;

/// See the module documentation.
pub(crate) struct Answering {
    /// Connections of the listener.
    most: usize,
    all: AtomicUsize,
}

/// One request, until its answer was accepted.
pub(crate) struct Answered {
    all: Arc<Answering>,
    tenant: Arc<Gate>,
}

impl Answering {
    pub fn new(connections: usize) -> Arc<Self> {
        Arc::new(Self { most: connections, all: AtomicUsize::new(0) })
    }

    /// Begins to answer, or says that the tenant has its share.
    pub fn begin(self: &Arc<Self>, tenant: &Arc<Gate>) -> Result<Answered, ApiError> {
        let add = |count: &AtomicUsize| count.fetch_add(1, Relaxed) + 1;
        let (own, all) = (add(&tenant.answering), add(&self.all));
        let answered = Answered { all: self.clone(), tenant: tenant.clone() };
        // The first is always let in.
        if own > 1 && own > self.most.saturating_sub(all) {
            let message = format!(
                "{} of your requests are being answered, {all} of all tenants, and there are {} connections.",
                own - 1,
                self.most
            );
            return Err(ApiError { code: Some("too_many_connections"), ..ApiError::busy(message, 1) });
        }
        Ok(answered)
    }
}

impl Drop for Answered {
    fn drop(&mut self) {
        self.tenant.answering.fetch_sub(1, Relaxed);
        self.all.all.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn one_tenant_has_half_of_the_connections_and_others_half_of_the_rest() {
        let all = Answering::new(16);
        let tenant = || Arc::new(Gate::new(Default::default(), Instant::now()));
        let (greedy, other, late) = (tenant(), tenant(), tenant());
        let of = |tenant: &Arc<Gate>| (0..).map_while(|_| all.begin(tenant).ok()).collect::<Vec<_>>();
        let (first, second) = (of(&greedy), of(&other));
        assert_eq!((first.len(), second.len()), (8, 4));
        assert_eq!(all.begin(&greedy).err().map(|error| error.status), Some(429));
        assert!(all.begin(&late).is_ok());
        drop((first, second));
        assert_eq!((all.all.load(Relaxed), greedy.answering.load(Relaxed)), (0, 0));
    }
}
