//! What to change, with the evidence and what it would gain.
//!
//! Owns: which figures are a cause, and the model that the gain is computed from. Must never: say anything where there is no cause, or tell a
//! token of anybody's prompt.
//!
//! | file | of |
//! |---|---|
//! | `memory` | more memory for KV, KV as int8, memory beside the cache |
//! | `block_size` | smaller blocks |
//! | `preemption` | what is computed again |
//! | `prefixes` | a prefix worth pinning, a client that breaks its own |
//! | `concurrency` | more requests at once |
//! | `speculation` | drafts from text |
//! | `evidence`, `gain`, `change_cost` | the figures that these are computed from; what is gained, and what it costs |
//!
//! What caches gain is tokens that need not be computed, in the time that the prompts' tokens of the window took by
//! themselves, less what loading them takes at the machine's measured rate. What a larger cache hits is what a cache of the last blocks of that
//! size would have hit, less what one of the present size would (`shadow`): the difference is told, since Folio's own order of eviction is not
//! that of the last use. What steps gain is their time, by what they and their rows were measured to take.

mod block_size;
mod change_cost;
mod concurrency;
mod evidence;
mod gain;
mod memory;
mod preemption;
mod prefixes;
mod speculation;
#[cfg(test)]
mod testing;

use folio_kv::TenantId;
use serde_json::{Value, json};

use super::prompts::PromptFindings;
use change_cost::ChangeCost;
pub use evidence::{Evidence, StepEvidence, TierRoom};
use gain::Gain;

/// Blocks that must have been asked for before anything is said of the cache.
const BLOCKS: f64 = 64.0;

/// One change.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Advice {
    pub kind: &'static str,
    pub what: String,
    pub because: String,
    pub gain: Gain,
    pub cost: ChangeCost,
    pub evidence: Value,
}

impl Advice {
    /// It is for a client to follow, and says nothing of others.
    pub fn is_a_clients(&self) -> bool {
        [prefixes::BROKEN, prefixes::PIN].contains(&self.kind)
    }

    /// Without what it gains, which is of everybody's figures.
    pub fn told(&self) -> Value {
        let costs = self.cost.json();
        json!({"kind": self.kind, "do": self.what, "because": self.because, "costs": costs, "evidence": self.evidence})
    }

    /// With what it gains of the window.
    pub fn json(&self, evidence: &Evidence) -> Value {
        let mut told = self.told();
        told["gain"] = self.gain.json(evidence);
        told
    }
}

/// All of it, what gains most first. `name`: of a tenant, whose prompts may be spoken of.
pub(super) fn advise(
    found: &PromptFindings,
    evidence: &Evidence,
    name: impl Fn(TenantId) -> Option<String>,
) -> Vec<Advice> {
    let mut all: Vec<Advice> = memory::all(found, evidence);
    all.extend(block_size::smaller(found, evidence));
    all.extend(preemption::preempted(evidence));
    all.extend(prefixes::broken(found, evidence, &name));
    all.extend(prefixes::repeated(found, evidence, &name));
    all.extend(concurrency::more_at_once(evidence));
    all.extend(speculation::look_back(&found.lookups, evidence));
    all.retain(|advice| advice.gain.is_enough(evidence));
    all.sort_by(|one, other| other.gain.seconds(evidence).total_cmp(&one.gain.seconds(evidence)));
    all
}

#[cfg(test)]
mod tests {
    use super::testing::{all, documents, replay, text};

    #[test]
    fn where_there_is_no_cause_nothing_is_said() {
        let different: Vec<_> = (0..200).map(|seed| text(seed, 150)).collect();
        let (found, evidence) = replay(300, &different);
        assert!(evidence.evictions > 0);
        assert_eq!(all(&found, &evidence), [], "nothing is ever asked for again");
        let (found, evidence) = replay(3000, &documents(40, 200));
        assert_eq!((evidence.evictions, all(&found, &evidence)), (0, vec![]), "all of it fits");
        let turns: Vec<_> = (1..20).map(|turn| text(3, 20 * turn)).collect();
        let (found, evidence) = replay(300, &turns);
        assert_eq!(all(&found, &evidence), [], "a conversation that goes on");
    }
}
