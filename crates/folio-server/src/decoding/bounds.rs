//! What a request forbids in its answers beside a form: `allowed_token_ids`, `bad_words`, `thinking_token_budget`.
//!
//! Owns: these three as rules for the sampler, and rules that hold together. Must never: wait; what they allow is known as soon as a
//! token is.

use std::borrow::Cow;
use std::sync::Arc;

use folio_api::ApiError;
use folio_api::bounds::Bounds;
use folio_engine::{DRAFTS_MAX, Guide, Restricted, Rules, RulesRef};
use folio_text::{ReasoningFormat, Tokenizer};
use parking_lot::Mutex;

/// As rules. `reasoning`: how the model marks what it thinks, and whether its answer begins inside.
pub fn rules(
    bounds: &Bounds,
    tokenizer: &Arc<Tokenizer>,
    reasoning: Option<(&'static ReasoningFormat, bool)>,
) -> Result<Vec<Arc<dyn Rules>>, ApiError> {
    let mut rules: Vec<Arc<dyn Rules>> = Vec::new();
    if let Some(ids) = &bounds.allowed {
        let mut words = vec![0u32; tokenizer.vocab_size().div_ceil(32)];
        for id in ids {
            if let Some(word) = words.get_mut(*id as usize / 32) {
                *word |= 1 << (id % 32);
            }
        }
        rules.push(Arc::new(Allowed(words.into())));
    }
    if !bounds.bad_words.is_empty() {
        let mut sequences: Vec<Vec<u32>> = Vec::new();
        for word in &bounds.bad_words {
            // A word inside a text is usually written with the space before it.
            for text in [word.clone(), format!(" {}", word.trim_start())] {
                let ids = tokenizer.encode(&text, false, usize::MAX);
                sequences.push(ids.map_err(|e| ApiError::invalid("bad_words", e.to_string()))?);
            }
        }
        sequences.retain(|ids| !ids.is_empty());
        sequences.sort();
        sequences.dedup();
        rules.push(Arc::new(BadWords(sequences.into())));
    }
    if let Some((budget, param)) = bounds.thinking {
        let Some((format, inside)) = reasoning else {
            let why =
                "it needs a model that marks where its reasoning ends, in a conversation; use max_tokens";
            return Err(ApiError::unsupported(param, why));
        };
        let marks = ReasoningMarks::of(format);
        let close = tokenizer.encode(marks.written, false, usize::MAX);
        let close = close.map_err(|e| ApiError::internal(e.to_string()))?;
        rules.push(Arc::new(ThinkingBudget {
            budget,
            inside,
            marks,
            close: close.into(),
            tokenizer: tokenizer.clone(),
        }));
    }
    Ok(rules)
}

/// Rules that all hold. `None` for none.
pub fn all_of(mut rules: Vec<Arc<dyn Rules>>) -> Option<RulesRef> {
    match rules.len() {
        0 | 1 => rules.pop().map(RulesRef),
        _ => Some(RulesRef(Arc::new(AllOf(rules)))),
    }
}

struct AllOf(Vec<Arc<dyn Rules>>);
struct AllGuides(Vec<Arc<dyn Guide>>);

impl Rules for AllOf {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        Arc::new(AllGuides(self.0.iter().map(|rules| rules.guide(chosen)).collect()))
    }

    /// Of the last: a grammar comes last, and others are never late.
    fn name(&self) -> &str {
        self.0.last().map_or("", |rules| rules.name())
    }
}

impl Guide for AllGuides {
    fn advance(&self, token: u32) {
        self.0.iter().for_each(|guide| guide.advance(token));
    }

    fn expect(&self, drafts: &[u32]) {
        self.0.iter().for_each(|guide| guide.expect(drafts));
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        for guide in &self.0 {
            if guide.restrict(drafts, logits)? == Restricted::Late {
                return Ok(Restricted::Late);
            }
        }
        Ok(Restricted::Applied)
    }

    /// A grammar comes last, and says most.
    fn draft(&self, drafts: &mut Vec<u32>) -> usize {
        let forced = self.0.iter().rev().map(|guide| guide.draft(drafts)).max();
        forced.unwrap_or(0).min(drafts.len())
    }

    fn is_ready(&self, drafts: &[u32]) -> bool {
        self.0.iter().all(|guide| guide.is_ready(drafts))
    }
}

/// One bit per token.
#[derive(Clone)]
struct Allowed(Arc<[u32]>);

impl Allowed {
    fn allows(&self, token: usize) -> bool {
        self.0.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }
}

impl Rules for Allowed {
    fn guide(&self, _: &[u32]) -> Arc<dyn Guide> {
        Arc::new(self.clone())
    }

    fn name(&self) -> &str {
        "allowed_token_ids"
    }
}

impl Guide for Allowed {
    fn advance(&self, _: u32) {}

    fn restrict(&self, _: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        for (id, logit) in logits.iter_mut().enumerate() {
            if !self.allows(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(Restricted::Applied)
    }

    fn draft(&self, drafts: &mut Vec<u32>) -> usize {
        let forbidden = drafts.iter().position(|draft| !self.allows(*draft as usize));
        drafts.truncate(forbidden.unwrap_or(usize::MAX));
        0
    }
}

/// Token sequences that must not be completed.
struct BadWords(Arc<[Vec<u32>]>);

struct Avoiding {
    words: Arc<[Vec<u32>]>,
    /// The answer's end, as long as the longest word without its last token.
    last: Mutex<Vec<u32>>,
}

impl Rules for BadWords {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        let guide = Avoiding { words: self.0.clone(), last: Mutex::default() };
        chosen.iter().for_each(|token| guide.advance(*token));
        Arc::new(guide)
    }

    fn name(&self) -> &str {
        "bad_words"
    }
}

impl Guide for Avoiding {
    fn advance(&self, token: u32) {
        let longest = self.words.iter().map(Vec::len).max().unwrap_or(0);
        let mut last = self.last.lock();
        last.push(token);
        let over = (last.len() + 1).saturating_sub(longest);
        last.drain(..over);
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        let last = self.last.lock();
        let last: Cow<'_, [u32]> = match drafts {
            [] => Cow::Borrowed(&last),
            _ => Cow::Owned([&last, drafts].concat()),
        };
        for word in self.words.iter() {
            if let Some((end, beginning)) = word.split_last()
                && last.ends_with(beginning)
                && let Some(logit) = logits.get_mut(*end as usize)
            {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(Restricted::Applied)
    }

    fn draft(&self, drafts: &mut Vec<u32>) -> usize {
        if drafts.is_empty() {
            return 0;
        }
        let last = self.last.lock();
        let said = [&last, &drafts[..]].concat();
        let is_forbidden =
            |at: &usize| self.words.iter().any(|word| said[..=last.len() + at].ends_with(word));
        let forbidden = (0..drafts.len()).find(is_forbidden);
        drafts.truncate(forbidden.unwrap_or(usize::MAX));
        0
    }
}

/// Where reasoning begins and ends.
#[derive(Clone, Copy)]
pub struct ReasoningMarks {
    pub open: &'static str,
    pub close: &'static str,
    /// What is written for the model once its budget is spent.
    written: &'static str,
}

impl ReasoningMarks {
    pub fn of(format: &ReasoningFormat) -> Self {
        match format.harmony {
            // Which channel comes next stays the model's choice: a call, or the answer.
            true => Self {
                open: "<|channel|>analysis<|message|>",
                close: "<|end|>",
                written: "<|end|><|start|>assistant",
            },
            false => Self { open: format.open, close: format.close, written: format.close },
        }
    }
}

/// So many tokens of reasoning, then its end.
struct ThinkingBudget {
    budget: u32,
    /// The answer begins inside reasoning.
    inside: bool,
    marks: ReasoningMarks,
    /// The tokens that end reasoning.
    close: Arc<[u32]>,
    tokenizer: Arc<Tokenizer>,
}

#[derive(Clone)]
enum ThinkingState {
    /// What was said may still become the opening mark.
    Opening(Vec<u8>),
    Inside {
        left: u32,
        said: Vec<u8>,
    },
    /// So many tokens of the closing mark are written.
    Closing(usize),
    Over,
}

struct Budgeted {
    close: Arc<[u32]>,
    marks: ReasoningMarks,
    tokenizer: Arc<Tokenizer>,
    budget: u32,
    state: Mutex<ThinkingState>,
}

impl Rules for ThinkingBudget {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        let state = match self.inside {
            true => inside(self.budget, Vec::new()),
            false => ThinkingState::Opening(Vec::new()),
        };
        let guide = Budgeted {
            close: self.close.clone(),
            marks: self.marks,
            tokenizer: self.tokenizer.clone(),
            budget: self.budget,
            state: Mutex::new(state),
        };
        chosen.iter().for_each(|token| guide.advance(*token));
        Arc::new(guide)
    }

    fn name(&self) -> &str {
        "thinking_token_budget"
    }
}

fn inside(left: u32, said: Vec<u8>) -> ThinkingState {
    match left {
        0 => ThinkingState::Closing(0),
        left => ThinkingState::Inside { left, said },
    }
}

impl Budgeted {
    /// Where `token` leads.
    fn next(&self, state: ThinkingState, token: u32) -> ThinkingState {
        let bytes = self.tokenizer.token_bytes(token);
        match state {
            ThinkingState::Opening(mut said) => {
                said.extend_from_slice(bytes);
                let (start, open) = (said.trim_ascii_start(), self.marks.open.as_bytes());
                match start.len().min(open.len()) {
                    common if start[..common] != open[..common] => ThinkingState::Over,
                    common if common == open.len() => inside(self.budget, Vec::new()),
                    _ => ThinkingState::Opening(said),
                }
            }
            ThinkingState::Inside { left, mut said } => {
                said.extend_from_slice(bytes);
                let close = self.marks.close.as_bytes();
                if said.windows(close.len()).any(|window| window == close) {
                    ThinkingState::Over
                } else {
                    said.drain(..(said.len() + 1).saturating_sub(close.len()));
                    inside(left - 1, said)
                }
            }
            ThinkingState::Closing(written) if written + 1 < self.close.len() => {
                ThinkingState::Closing(written + 1)
            }
            ThinkingState::Closing(_) | ThinkingState::Over => ThinkingState::Over,
        }
    }
}

impl Guide for Budgeted {
    fn advance(&self, token: u32) {
        let mut state = self.state.lock();
        *state = self.next(std::mem::replace(&mut *state, ThinkingState::Over), token);
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        let state = self.state.lock();
        let written = match (drafts, &*state) {
            ([], ThinkingState::Closing(written)) => Some(*written),
            ([], _) => None,
            (drafts, state) => {
                match drafts.iter().fold(state.clone(), |state, token| self.next(state, *token)) {
                    ThinkingState::Closing(written) => Some(written),
                    _ => None,
                }
            }
        };
        if let Some(written) = written
            && let Some(next) = self.close.get(written)
        {
            let keep = logits.get(*next as usize).copied().filter(|logit| logit.is_finite());
            logits.fill(f32::NEG_INFINITY);
            if let (Some(logit), Some(keep)) = (logits.get_mut(*next as usize), keep) {
                *logit = keep;
            }
        }
        Ok(Restricted::Applied)
    }

    /// The closing mark is as certain behind drafts that spend the budget.
    fn draft(&self, drafts: &mut Vec<u32>) -> usize {
        let state = self.state.lock();
        if drafts.is_empty() && !matches!(*state, ThinkingState::Closing(_)) {
            return 0;
        }
        let (mut state, mut forced) = (state.clone(), 0);
        for at in 0..DRAFTS_MAX as usize {
            if let ThinkingState::Closing(written) = state
                && let Some(next) = self.close.get(written)
            {
                if drafts.get(at) != Some(next) {
                    drafts.truncate(at);
                    drafts.push(*next);
                }
                forced += usize::from(forced == at);
            }
            let Some(draft) = drafts.get(at) else { break };
            state = self.next(state, *draft);
        }
        forced
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use folio_text::REASONING_FORMATS;

    fn allowed(guide: &dyn Guide, drafts: &[u32]) -> Vec<usize> {
        let mut logits = [0.0; 98];
        assert_eq!(guide.restrict(drafts, &mut logits), Ok(Restricted::Applied));
        (0..logits.len()).filter(|id| logits[*id] == 0.0).collect()
    }

    #[test]
    fn what_may_come_behind_drafts_is_what_comes_when_they_are_chosen() {
        each(|rules, tokens, begin, end| {
            let guide = rules.guide(&tokens[..begin]);
            let behind = allowed(&*guide, &tokens[begin..end]);
            assert_eq!(behind, allowed(&*rules.guide(&tokens[..end]), &[]), "{} {begin} {end}", rules.name());
            assert!(begin == end || allowed(&*guide, &[]) == allowed(&*rules.guide(&tokens[..begin]), &[]));
        });
    }

    /// Drafts that are left may come; the first that is not may not; what is said to be left alone is.
    #[test]
    fn drafts_are_those_that_may_come() {
        let (mut kept, mut cut, mut closed) = (0, 0, 0);
        each(|rules, tokens, begin, end| {
            let guide = rules.guide(&tokens[..begin]);
            let proposed = &tokens[begin..end.min(begin + DRAFTS_MAX as usize)];
            let mut drafts = proposed.to_vec();
            let forced = guide.draft(&mut drafts);
            for (at, draft) in drafts.iter().enumerate() {
                let may = allowed(&*guide, &drafts[..at]);
                let alone = may == [*draft as usize];
                assert!(
                    may.contains(&(*draft as usize)) && (alone || at >= forced),
                    "{} {begin} {end}: {drafts:?}",
                    rules.name()
                );
            }
            let same = proposed.iter().zip(&drafts).take_while(|(proposed, draft)| proposed == draft).count();
            if let Some(other) = proposed.get(same) {
                assert!(
                    !allowed(&*guide, &proposed[..same]).contains(&(*other as usize)),
                    "{} {begin} {end}",
                    rules.name()
                );
            }
            (kept, cut, closed) = (kept + same, cut + proposed.len() - same, closed + forced);
        });
        assert!(kept > 1000 && cut > 1000 && closed > 100, "{kept} kept, {cut} cut, {closed} closed");
    }

    /// Each kind of rules and all together, with a text and each two places in it.
    fn each(mut check: impl FnMut(&dyn Rules, &[u32], usize, usize)) {
        let tokenizer = crate::decoding::guides::tests::tokenizer();
        let thinks =
            REASONING_FORMATS.iter().find(|format| format.open == "[THINK]").expect("a format in signs");
        let text = format!("{}said once and said twice{}said", thinks.open, thinks.close);
        let encode = |text: &str| tokenizer.encode(text, false, usize::MAX).expect("a text");
        let tokens = encode(&text);
        for budget in [0, 3, 20] {
            let bounds = Bounds {
                allowed: Some(encode(&text.replace('w', ""))),
                bad_words: vec!["said".into(), "twice".into()],
                thinking: Some((budget, "a field")),
            };
            let mut kinds = rules(&bounds, &tokenizer, Some((thinks, false))).expect("rules");
            kinds.push(all_of(kinds.clone()).expect("some").0);
            for rules in kinds {
                for end in 0..=tokens.len() {
                    (0..=end).for_each(|begin| check(&*rules, &tokens, begin, end));
                }
            }
        }
    }
}
