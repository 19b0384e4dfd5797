//! A conversation that is too long loses its oldest turns, where its request says so.
//!
//! Invariants: instructions stay; what goes are whole turns, each from a message of the user up to the next, so that no call loses its
//! result; the last turn stays, and is refused where even it does not fit. Cost: one rendering and tokenization where all fits, else one more
//! for each halving of the turns.

use folio_kv::TenantId;
use serde_json::Value;

use crate::generation::input::InputProcessor;
use crate::generation::prompt::{RenderedPrompt, prompt};
use crate::generation::tokenizing::encode_prompt;
use folio_api::ApiError;
use folio_api::conversation::Conversation;

/// The prompt of as much of the conversation as fits beside the answer. `param` names its field.
pub fn truncated(
    inputs: &InputProcessor,
    tenant: TenantId,
    conversation: &mut Conversation,
    (max_tokens, include_reasoning): (Option<u32>, bool),
    param: &str,
) -> Result<(RenderedPrompt, Vec<u32>), ApiError> {
    let room = inputs.served.model.context_length.saturating_sub(max_tokens.unwrap_or(1).max(1)) as usize;
    let tried = |cut: usize| {
        let mut shorter = conversation.clone();
        shorter.messages = without(&conversation.messages, cut);
        let rendered = prompt(inputs, &mut shorter, include_reasoning)?;
        // Longer than the context is no error yet.
        let tokens = encode_prompt(inputs, Some(tenant), &rendered.prompt, false, true, param)?;
        Ok((tokens.len() <= room, (shorter, rendered, tokens)))
    };
    let (fits, mut best) = tried(0)?;
    if !fits {
        // Turns that can go: all but the last.
        let most = turns(&conversation.messages).count().saturating_sub(1);
        let (mut low, mut high) = (1, most);
        while low <= high {
            let middle = low.midpoint(high);
            let (fits, found) = tried(middle)?;
            match fits {
                true => (best, high) = (found, middle - 1),
                false => {
                    low = middle + 1;
                    if middle == most {
                        // The least there can be; what it lacks is said by whoever checks it against the context.
                        best = found;
                    }
                }
            }
        }
    }
    let (shorter, rendered, tokens) = best;
    *conversation = shorter;
    Ok((rendered, tokens))
}

/// Where turns begin.
fn turns(messages: &[Value]) -> impl Iterator<Item = usize> {
    let user = |index: &usize| messages[*index]["role"] == "user";
    let after = |index: &usize| *index == 0 || messages[*index - 1]["role"] != "user";
    (0..messages.len()).filter(user).filter(after)
}

/// Without the first `count` turns; what stands before any of them stays.
fn without(messages: &[Value], count: usize) -> Vec<Value> {
    let mut starts = turns(messages);
    let Some(first) = starts.next().filter(|_| count > 0) else { return messages.to_vec() };
    let next = starts.nth(count - 1).unwrap_or(messages.len());
    let early = messages[..first].iter().filter(|message| message["role"] == "system");
    early.chain(&messages[next..]).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whole_turns_go_and_instructions_stay() {
        let messages: Vec<Value> =
            ["system", "user", "assistant", "tool", "assistant", "user", "user", "assistant", "user"]
                .iter()
                .enumerate()
                .map(|(index, role)| json!({"role": role, "content": index}))
                .collect();
        let left = |count| -> Vec<i64> {
            without(&messages, count).iter().filter_map(|message| message["content"].as_i64()).collect()
        };
        assert_eq!(turns(&messages).collect::<Vec<_>>(), [1, 5, 8]);
        assert_eq!(left(0).len(), 9);
        assert_eq!(left(1), [0, 5, 6, 7, 8]);
        assert_eq!(left(2), [0, 8]);
    }
}
