//! What prompts begin with: a prefix worth pinning, and a client that breaks its own.

use folio_kv::TenantId;
use serde_json::json;

use super::super::breaks::Break;
use super::super::prompts::PromptFindings;
use super::super::repeated::RepeatedPrefix;
use super::Advice;
use super::change_cost::ChangeCost;
use super::evidence::Evidence;
use super::gain::Gain;

/// Both are a client's to follow.
pub(super) const BROKEN: &str = "broken_prefix";
pub(super) const PIN: &str = "pin_prefix";
/// Prompts that must have broken before anything is said.
const PROMPTS: f64 = 4.0;
/// Prompts that must have begun with a prefix before it is worth pinning, and the share of the cache that it may take.
const REPEATED: f64 = 8.0;
const PINNED: f64 = 0.25;

/// Tokens of prompts that were computed, as far back as is looked.
fn computed(found: &PromptFindings, evidence: &Evidence) -> Option<f64> {
    let blocks = found.index.asked() * (1.0 - found.index.found()?);
    Some(blocks * f64::from(evidence.block_tokens)).filter(|computed| *computed > 0.0)
}

/// Prefixes of tenants that may be spoken of that are evicted and computed again.
pub(super) fn repeated(
    found: &PromptFindings,
    evidence: &Evidence,
    name: impl Fn(TenantId) -> Option<String>,
) -> Vec<Advice> {
    if evidence.evictions == 0 {
        return Vec::new();
    }
    let most = (PINNED * f64::from(evidence.blocks)) as u32;
    let worst = found.repeated.worst(most, REPEATED);
    worst.iter().filter_map(|of| pin(found, evidence, of, &name(of.tenant)?)).collect()
}

fn pin(found: &PromptFindings, evidence: &Evidence, of: &RepeatedPrefix, name: &str) -> Option<Advice> {
    let (tokens, prompts) = (of.blocks * evidence.block_tokens, of.prompts);
    // What else is found now had these blocks, too: of that goes their part.
    let found_now = found.index.asked() * found.index.found()? * f64::from(evidence.block_tokens);
    let displaced = found_now * f64::from(of.blocks) / f64::from(evidence.blocks.max(1));
    let gained = (of.computed_again - displaced).max(0.0);
    Some(Advice {
        kind: PIN,
        what: format!(
            "Pin the first {tokens} tokens that prompts of {name} begin with: \"pin\": true in `cache` of one such request"
        ),
        because: format!(
            "about {prompts:.0} prompts began with them, and they were evicted and computed again: {:.0} tokens of them; they take {:.1} % of the cache",
            of.computed_again,
            100.0 * f64::from(of.blocks) / f64::from(evidence.blocks.max(1))
        ),
        gain: Gain::of_prompts((gained / computed(found, evidence)?).min(1.0)),
        cost: ChangeCost::PartOfCache(f64::from(of.blocks) * evidence.block_bytes as f64),
        evidence: json!({"tenant": name, "tokens": tokens, "prompts": prompts, "computed_again": of.computed_again}),
    })
}

/// Tenants that may be spoken of whose prompts differ in one place and go on alike.
pub(super) fn broken(
    found: &PromptFindings,
    evidence: &Evidence,
    name: impl Fn(TenantId) -> Option<String>,
) -> Vec<Advice> {
    found.breaks.all().filter_map(|of| mend(found, evidence, of, &name(of.tenant)?)).collect()
}

fn mend(found: &PromptFindings, evidence: &Evidence, of: &Break, name: &str) -> Option<Advice> {
    let computed = computed(found, evidence).filter(|_| of.prompts >= PROMPTS)?;
    let behind = of.tokens / of.prompts;
    Some(Advice {
        kind: BROKEN,
        what: format!("Have {name} put what changes in its prompts at token {} behind what does not", of.at),
        because: format!(
            "its prompts differ from those before at token {}, and about {behind:.0} tokens behind that are as before and computed again",
            of.at
        ),
        gain: Gain::of_prompts((of.tokens / computed).min(1.0)),
        cost: ChangeCost::Nothing,
        evidence: json!({"tenant": name, "position": of.at, "tokens_behind": behind}),
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::{BLOCK, MIB, all, kept, replay, replay_pinning, text};
    use super::*;

    #[test]
    fn a_prefix_that_is_no_longer_broken_gains_what_was_promised() {
        let (front, rest) = (text(1, 37), text(2, 160));
        let changing: Vec<Vec<u32>> = (0..60).map(|turn| text(5000 + turn, 3)).collect();
        let broken: Vec<_> = changing.iter().map(|change| [&front[..], change, &rest].concat()).collect();
        let (found, evidence) = replay(4000, &broken);
        let advice = all(&found, &evidence);
        assert_eq!(
            advice.iter().map(|advice| advice.kind).collect::<Vec<_>>(),
            [BROKEN],
            "nothing was evicted"
        );
        assert_eq!(advice[0].evidence["position"], 37);
        assert_eq!(advice[0].told()["costs"], json!({"text": "nothing"}));
        assert!(advice[0].what.contains("acme") && advice[0].what.contains("37"));
        let mended: Vec<_> = changing.iter().map(|change| [&front[..], &rest, change].concat()).collect();
        let (found, after) = replay(4000, &mended);
        kept(advice[0].gain.share(&evidence), &evidence, &after);
        assert_eq!(all(&found, &after), [], "and there is no more to say");
    }

    #[test]
    fn a_pinned_prefix_gains_what_was_promised() {
        // Every twelfth prompt begins with it; what comes between takes the whole cache.
        let front = text(1, 200);
        let ask = |at: u64| match at % 12 {
            0 => [&front[..], &text(2000 + at, 8)].concat(),
            _ => text(5000 + at, 120),
        };
        let prompts: Vec<_> = (0..400).map(ask).collect();
        let (found, evidence) = replay(300, &prompts);
        assert!(all(&found, &evidence).iter().all(|advice| advice.kind != PIN), "Folio keeps it by itself");
        let (found, evidence) = replay_pinning(300, &prompts, &[]);
        let advice = all(&found, &evidence);
        let pin = advice.iter().find(|advice| advice.kind == PIN).expect("it is worth pinning");
        assert!(
            pin.is_a_clients() && pin.what.contains("192 tokens") && pin.what.contains("acme"),
            "{pin:?}"
        );
        assert_eq!(pin.told()["costs"]["cache_bytes"].as_f64(), Some(192.0 / f64::from(BLOCK) * MIB));
        let (found, after) = replay_pinning(300, &prompts, &front[..192]);
        kept(pin.gain.share(&evidence), &evidence, &after);
        assert!(all(&found, &after).iter().all(|advice| advice.kind != PIN), "and there is no more to say");
    }
}
