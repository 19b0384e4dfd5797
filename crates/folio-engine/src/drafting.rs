//! Host drafters: what a choice may say next, from text alone.
//!
//! Owns: which texts drafts of a request are looked for in ([`folio_drafts`] finds them there). Must never: change a token (drafts are verified,
//! and change time only), wait, or look at another tenant's text.
//!
//! They are called directly, between a commit and the next plan: a lookup is a few microseconds, so that a thread beside the engine's would
//! cost more in waking than it spares, and its drafts would be late by a step. What grows with a text is done elsewhere: the prompt and
//! a prediction are indexed where the request is made ([`Speculation::with_cache`]), an answer grows by a
//! token at a time, and finished ones are taken up by a few hundred tokens a step. What is proposed is an input of the plan ([`Scheduler::propose`]).

use std::sync::Arc;

use folio_drafts::{
    Alignment, Answers, DEPTH, GrowingText, IndexCache, LAST, NoIndexCache, PairIndex, Search, View,
};
use folio_kv::TenantId;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::request::{AdapterId, Event, FinishReason, Request, RequestId};
use crate::scheduler::Scheduler;

/// Whose answers, and with which weights.
type AnswersOwner = (TenantId, Option<AdapterId>);

/// Bytes of finished answers: of one tenant with one adapter, and in all.
const ANSWERS_BYTES: (usize, usize) = (8 << 20, 64 << 20);
/// Tokens of finished answers that are taken up behind a step, and for each that was told then: as fast as they can end.
const INDEXED: (usize, usize) = (256, 2);
/// Tokens of an answer that memory is set aside for.
const ANSWER_RESERVE: usize = 2048;
/// Most drafts of a sequence in one step.
pub const DRAFTS_MAX: u32 = 16;

/// Where drafts come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Drafter {
    /// Suffix decoding: the request's own tokens, its prediction, and finished answers of its tenant.
    #[default]
    Suffix,
    /// Prompt lookup: the request's own tokens and its prediction.
    Ngram,
    /// The model that the executor has for it ([`crate::DraftingExecutor`]), where the request's prediction has nothing to say.
    Model,
    /// The same, where that model is an EAGLE-3 head.
    Eagle3,
    /// The same, where it is the MTP head in the model's own checkpoint.
    Mtp,
}

impl Drafter {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Suffix, Self::Ngram, Self::Model, Self::Eagle3, Self::Mtp];

    /// Whether the executor proposes, and not text.
    pub fn is_model(self) -> bool {
        matches!(self, Self::Model | Self::Eagle3 | Self::Mtp)
    }

    /// As flags and metrics have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Suffix => "suffix",
            Self::Ngram => "ngram",
            Self::Model => "model",
            Self::Eagle3 => "eagle3",
            Self::Mtp => "mtp",
        }
    }
}

/// A request's own text or one that its caller expects, and where its pairs are. Clones share both.
#[derive(Clone, Debug)]
struct Known {
    tokens: Arc<[u32]>,
    index: Arc<PairIndex>,
}

impl Known {
    fn view(&self) -> View<'_> {
        View { tokens: &self.tokens, index: &self.index }
    }
}

/// How a request is speculated on.
#[derive(Clone, Debug)]
pub struct Speculation {
    drafter: Drafter,
    most: u32,
    prompt: Known,
    /// Behind the last tokens of the prompt, so that what follows those is found; without them if it is empty.
    prediction: Known,
    /// Where it begins there.
    prediction_from: usize,
}

/// The last tokens of a prompt, which an answer's text begins with.
fn tail(prompt: &[u32]) -> &[u32] {
    &prompt[prompt.len().saturating_sub(DEPTH)..]
}

impl Speculation {
    /// Of a request with this prompt: at most so many drafts in one step, up to [`DRAFTS_MAX`]; the prediction is what the caller expects
    /// to be told, and may be empty. O(tokens): not on an event loop.
    pub fn new(drafter: Drafter, most: u32, prompt: &[u32], prediction: &[u32]) -> Self {
        Self::with_cache(drafter, most, prompt.into(), prediction, &NoIndexCache)
    }

    /// The same, with `cache` for the index of what was indexed before: only what is new is indexed.
    pub fn with_cache(
        drafter: Drafter,
        most: u32,
        prompt: Arc<[u32]>,
        prediction: &[u32],
        cache: &dyn IndexCache,
    ) -> Self {
        let by_host = !drafter.is_model() || !prediction.is_empty();
        let known = |tokens: Arc<[u32]>| {
            let index = PairIndex::of(if by_host { &tokens[..] } else { &[] }, cache);
            Known { index: Arc::new(index), tokens }
        };
        let before = if prediction.is_empty() { &[] } else { tail(&prompt) };
        Self {
            drafter,
            most: most.min(DRAFTS_MAX),
            prediction_from: before.len(),
            prediction: known([before, prediction].concat().into()),
            prompt: known(prompt),
        }
    }

    /// Whether it was made for this prompt.
    pub fn is_of(&self, prompt: &Arc<[u32]>) -> bool {
        Arc::ptr_eq(&self.prompt.tokens, prompt) || self.prompt() == &**prompt
    }

    /// Whether drafts come from text, too.
    fn by_host(&self) -> bool {
        !self.drafter.is_model() || !self.prediction().is_empty()
    }

    /// Most drafts of a step that a model proposes.
    pub fn by_model(&self) -> u32 {
        if self.drafter.is_model() { self.most } else { 0 }
    }

    pub fn drafter(&self) -> Drafter {
        self.drafter
    }

    pub fn most(&self) -> u32 {
        self.most
    }

    pub fn prompt(&self) -> &[u32] {
        &self.prompt.tokens
    }

    pub fn prediction(&self) -> &[u32] {
        &self.prediction.tokens[self.prediction_from..]
    }
}

/// An answer so far, behind the last tokens of the prompt, and where the prediction goes on behind it.
#[derive(Debug)]
struct ChoiceText {
    text: GrowingText,
    prediction: Alignment,
}

/// What of a request drafts are found in.
#[derive(Debug)]
struct Sources {
    owner: AnswersOwner,
    speculation: Speculation,
    /// By choice.
    choices: SmallVec<[Option<ChoiceText>; 1]>,
    /// Choices that have not ended.
    left: u32,
    /// Tokens that an answer may have.
    reserve: usize,
}

impl Sources {
    /// `None`: it is not speculated on.
    fn new(request: &Request) -> Option<Box<Self>> {
        let speculation = request.speculation.as_ref()?;
        let nothing = speculation.most == 0 || !speculation.by_host();
        if request.pooling.is_some() || nothing || request.sampling.max_tokens < 2 {
            return None;
        }
        Some(Box::new(Self {
            owner: (request.tenant, request.adapter_id()),
            speculation: speculation.clone(),
            choices: (0..request.n).map(|_| None).collect(),
            left: request.n,
            reserve: ANSWER_RESERVE.min(request.sampling.max_tokens as usize),
        }))
    }
}

/// The drafters of an engine: what is admitted is opened, what was told is followed, and before each plan it is proposed.
pub struct Drafters {
    requests: FxHashMap<RequestId, Box<Sources>>,
    answers: Answers<AnswersOwner>,
    /// Choices with new tokens.
    grown: Vec<(RequestId, u32)>,
    search: Search,
    drafts: Vec<u32>,
    others: Vec<u32>,
}

impl Default for Drafters {
    fn default() -> Self {
        Self {
            requests: FxHashMap::default(),
            answers: Answers::new(ANSWERS_BYTES.0, ANSWERS_BYTES.1),
            grown: Vec::new(),
            search: Search::default(),
            drafts: Vec::new(),
            others: Vec::new(),
        }
    }
}

impl Drafters {
    /// A request that is admitted.
    pub fn open(&mut self, request: &Request) {
        if let Some(sources) = Sources::new(request) {
            self.requests.insert(request.id, sources);
        }
    }

    /// What the engine told of. O(events).
    pub fn follow(&mut self, events: &[(RequestId, Event)]) {
        if !self.requests.is_empty() {
            for (id, event) in events {
                match event {
                    Event::Token { choice, token } => self.grow(*id, *choice, token.id),
                    Event::Finished { choice, reason, .. } => self.finish(*id, *choice, *reason),
                    _ => {}
                }
            }
        }
        self.answers.index(INDEXED.0 + INDEXED.1 * events.len());
    }

    fn grow(&mut self, id: RequestId, choice: u32, token: u32) {
        let Some(sources) = self.requests.get_mut(&id) else { return };
        if sources.choices[choice as usize].is_none() {
            let text = GrowingText::of(tail(sources.speculation.prompt()), sources.reserve);
            let prediction = Alignment::default();
            sources.choices[choice as usize] = Some(ChoiceText { text, prediction });
        }
        if let Some(choice) = &mut sources.choices[choice as usize] {
            choice.text.push(token);
        }
        if self.grown.last() != Some(&(id, choice)) {
            self.grown.push((id, choice));
        }
    }

    fn finish(&mut self, id: RequestId, choice: u32, reason: FinishReason) {
        let Some(sources) = self.requests.get_mut(&id) else { return };
        let said = sources.choices[choice as usize].take();
        let whole = matches!(reason, FinishReason::Stop | FinishReason::Length);
        if let Some(ChoiceText { text, .. }) = said
            && whole
            && sources.speculation.drafter == Drafter::Suffix
        {
            let before = tail(sources.speculation.prompt()).len();
            self.answers.add(sources.owner, text.into_tokens(), before);
        }
        sources.left -= 1;
        if sources.left == 0 {
            self.requests.remove(&id);
        }
    }

    /// Every choice with new tokens gets its drafts for the next plan.
    pub fn propose(&mut self, scheduler: &mut Scheduler) {
        let mut grown = std::mem::take(&mut self.grown);
        for (id, choice) in grown.drain(..) {
            let drafts = if scheduler.wants_drafts(id, choice) { self.drafts(id, choice) } else { &[] };
            if !drafts.is_empty() {
                scheduler.propose(id, choice, drafts);
            }
        }
        self.grown = grown;
    }

    /// What a choice may say next, as far as text tells; empty: nothing is known.
    pub fn drafts(&mut self, id: RequestId, choice: u32) -> &[u32] {
        self.drafts.clear();
        let Some(sources) = self.requests.get_mut(&id) else { return &[] };
        let Some(Some(said)) = sources.choices.get_mut(choice as usize) else { return &[] };
        let own = &said.text;
        let Speculation { drafter, most, prompt, prediction, .. } = &sources.speculation;
        let (context, most) = (own.tokens(), *most as usize);
        let texts = [own.view(), prediction.view(), prompt.view()];
        let mut longest = 0;
        match drafter {
            Drafter::Model | Drafter::Eagle3 | Drafter::Mtp => {}
            Drafter::Ngram => {
                self.search.ngram(&texts, context, most, &mut self.drafts);
                longest = self.search.longest();
            }
            Drafter::Suffix => {
                let score = self.search.suffix(&texts, context, most, &mut self.drafts);
                longest = self.search.longest();
                if let Some(answers) = self.answers.of(sources.owner)
                    && self.search.suffix(&answers, context, most, &mut self.others) > score
                {
                    longest = self.search.longest();
                    std::mem::swap(&mut self.drafts, &mut self.others);
                }
            }
        }
        // What the caller expects, unless more of what was said last stands elsewhere.
        let expected =
            self.search.aligned(prediction.view(), context, &mut said.prediction, most, &mut self.others);
        if expected > 0 && expected >= longest.min(LAST) {
            std::mem::swap(&mut self.drafts, &mut self.others);
        }
        &self.drafts
    }

    /// Nobody is drafted for any more.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.grown.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{RequestAdapter, SamplingParams, Timing, Token};
    use folio_kv::{Identity, Root};

    /// What an answer with other weights said is no draft: time would tell of it.
    #[test]
    fn answers_of_other_weights_are_no_drafts() {
        let mut drafters = Drafters::default();
        let adapter = |id| std::num::NonZeroU32::new(id).map(AdapterId);
        let mut ask = |id: u64, tenant: u32, adapter: Option<AdapterId>, answer: &[u32]| {
            let (secret, digest) = (&[7; 32], &[1; 32]);
            let tenant = TenantId(tenant);
            let root = Root::derive(&Identity {
                tenant,
                tenant_secret: secret,
                model_digest: digest,
                layout_digest: digest,
                extra: &[],
            });
            let sampling = SamplingParams::greedy(64);
            let prompt: Arc<[u32]> = [9, 1, 2].into();
            let speculation = Some(Speculation::new(Drafter::Suffix, 8, &prompt, &[]));
            let request = Request::new(RequestId(id), tenant, root, prompt, sampling);
            let adapter = adapter.map(RequestAdapter::from);
            drafters.open(&Request { adapter, speculation, ..request });
            let event = |event| (RequestId(id), event);
            let token = |id: &u32| {
                event(Event::Token { choice: 0, token: Token { id: *id, us: 0.0, logprobs: None } })
            };
            drafters.follow(&answer.iter().map(token).collect::<Vec<_>>());
            let drafts = drafters.drafts(RequestId(id), 0).to_vec();
            let timing = Box::new(Timing::default());
            let reason = FinishReason::Stop;
            let end = Event::Finished { choice: 0, reason, stop_token: None, error: None, timing };
            drafters.follow(&[event(end)]);
            drafts
        };
        ask(1, 1, adapter(1), &[3, 4, 5, 6, 7]);
        for (id, tenant, adapter) in [(2, 1, None), (3, 1, adapter(2)), (4, 2, adapter(1))] {
            assert!(ask(id, tenant, adapter, &[3, 4]).is_empty());
        }
        assert_eq!(ask(5, 1, adapter(1), &[3, 4]), [5, 6], "as many as match");
    }
}
