//! What a caller asks for and what it gets back. Plain data; the server parses JSON into this and the engine never sees JSON.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use folio_kv::RetentionRange;
use folio_kv::{BlockHashes, KeepRefused, PrefixInfo, Root, TenantId, TierId};
pub use folio_model::Pooling;

pub use crate::adapters::{AdapterId, RequestAdapter};
use crate::drafting::Speculation;
use crate::embeddings::{self, EmbeddingRange};
use crate::guide::RulesRef;
use crate::mailbox::{CancelRequest, Mailbox};
use crate::stats::PerReason;

/// Identifies a request for its whole life. Assigned by the caller's side ([`crate::EngineHandle`]), never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Microseconds since the engine started. The engine never reads a clock by itself: time is an input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Micros(pub u64);

/// A validated request. `n` choices share the prompt: the prompt is computed once and forked.
#[derive(Clone, Debug)]
pub struct Request {
    pub id: RequestId,
    pub tenant: TenantId,
    /// Root of this request's block-hash chain: tenant secret, model digest, layout digest and extras.
    pub root: Root,
    pub prompt: Arc<[u32]>,
    /// Number of choices, >= 1.
    pub n: u32,
    pub sampling: SamplingParams,
    /// The operator's word: lower runs first across tenants; 0 is normal.
    pub class: i32,
    /// The request's own, which orders its tenant's requests of one class: lower runs first (vLLM's convention); 0 is normal.
    pub priority: i32,
    /// The request fails with [`FinishReason::Deadline`] when not finished by then.
    pub deadline: Option<Micros>,
    /// Logprobs of the prompt's own tokens: the number of alternatives wanted at each position.
    pub prompt_logprobs: Option<u32>,
    /// How long what is computed (and what is found) should stay cached; empty: like everything else. Pinned ranges keep
    /// the prompt up to their end, see [`Event::Prompt`].
    pub retention: Vec<RetentionRange>,
    /// A vector is wanted instead of tokens, see [`Event::Pooled`]; `n` is 1 and `sampling.max_tokens` 0 then. A mean is summed in
    /// f64 in the order of the prompt, divided once and rounded once; its rows are computed, not found in the cache.
    pub pooling: Option<Pooling>,
    /// Whose weights its rows use beside the model's; its `root` says so, too ([`folio_kv::Identity::extra`]).
    pub adapter: Option<RequestAdapter>,
    /// Drafts of its tokens are verified, which changes nothing but the time that they take. `None`: they are not.
    pub speculation: Option<Speculation>,
    /// What stands in the places of some of the prompt's tokens, in order and apart from each other; `None`: they are all text.
    pub embeddings: Option<Arc<[EmbeddingRange]>>,
}

impl Request {
    pub fn adapter_id(&self) -> Option<AdapterId> {
        self.adapter.as_ref().map(|adapter| adapter.id)
    }

    /// One answer to `prompt`, of which nothing else is said: what other requests are spelled as changes of.
    pub fn new(
        id: RequestId,
        tenant: TenantId,
        root: Root,
        prompt: Arc<[u32]>,
        sampling: SamplingParams,
    ) -> Self {
        Self {
            id,
            tenant,
            root,
            prompt,
            n: 1,
            sampling,
            class: 0,
            priority: 0,
            deadline: None,
            prompt_logprobs: None,
            retention: Vec::new(),
            pooling: None,
            adapter: None,
            speculation: None,
            embeddings: None,
        }
    }

    /// With what identifies its prompt's blocks. O(prompt): where the request is made, not on the engine's thread.
    pub fn hashed(self, block_tokens: u32) -> (Self, BlockHashes) {
        let hashes = self.hashes(block_tokens);
        (self, hashes)
    }

    /// The same by itself.
    pub(crate) fn hashes(&self, block_tokens: u32) -> BlockHashes {
        let ranges = embeddings::identity(self.embeddings());
        BlockHashes::with_ranges(&self.root, &self.prompt, block_tokens, ranges)
    }

    pub(crate) fn embeddings(&self) -> &[EmbeddingRange] {
        self.embeddings.as_deref().unwrap_or_default()
    }

    /// What it is counted as where tokens of prompts are that wait: a value of an embedding takes as much memory as a token.
    pub(crate) fn queued_tokens(&self) -> u64 {
        self.prompt.len() as u64 + embeddings::in_tokens(self.embeddings())
    }
}

/// How tokens are chosen and when generation stops. All fields are honoured.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1.0 is off.
    pub top_p: f32,
    /// 0.0 is off.
    pub min_p: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// 1.0 is off.
    pub repetition_penalty: f32,
    /// Sorted by token id, each id once.
    pub logit_bias: Arc<[(u32, f32)]>,
    /// Choice `i` of a request uses a seed derived from (seed, i).
    pub seed: u64,
    pub max_tokens: u32,
    /// Stop tokens (eos included unless ignore_eos) are not sampled before this many tokens.
    pub min_tokens: u32,
    /// End-of-sequence ids of the model; empty with `ignore_eos`.
    pub eos_token_ids: Arc<[u32]>,
    pub stop_token_ids: Arc<[u32]>,
    /// Number of alternatives to report with each token; `None`: no logprobs at all.
    pub logprobs: Option<u32>,
    /// What an answer may consist of; `None`: of anything. It ends where they end, also before `min_tokens`.
    pub rules: Option<RulesRef>,
}

impl SamplingParams {
    /// The most likely token each time, `max_tokens` of them, nothing else asked for: what others are spelled as changes of.
    pub fn greedy(max_tokens: u32) -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Arc::new([]),
            seed: 0,
            max_tokens,
            min_tokens: 0,
            eos_token_ids: Arc::new([]),
            stop_token_ids: Arc::new([]),
            logprobs: None,
            rules: None,
        }
    }
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Microseconds of steps that fall to its sequence since the event before ([`crate::Work`]).
    pub us: f32,
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural-log probabilities from the model's raw distribution (before temperature and truncation, after no penalty).
#[derive(Clone, Debug, PartialEq, Default)]
pub struct TokenLogprobs {
    pub logprob: f32,
    /// 1 is the most likely token.
    pub rank: u32,
    /// Best first; ties to the lowest id.
    pub top: Vec<(u32, f32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// An eos or stop token was sampled (it is the last token delivered), the caller found a stop string, or the prompt was
    /// pooled.
    Stop,
    /// max_tokens or the model's context length was reached.
    Length,
    /// The caller cancelled or vanished.
    Cancelled,
    Deadline,
    /// The engine is shutting down or the executor failed; the message is in the event.
    Error,
}

/// What a request's owner receives, in order: at most one `Prompt`, then `Token`s (or one `Pooled`), then exactly one `Finished` per
/// choice. A request refused at admission gets `Finished` with `Error` for each choice, never silence.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The prompt was computed (or found): exact counts, before the first token.
    Prompt {
        /// Prompt tokens whose KV came from the prefix cache.
        cached_tokens: u32,
        /// Microseconds of steps that fall to the prompt ([`crate::Work`]), and those of them that its rows take to read what was cached.
        us: f32,
        cached_us: f32,
        /// Entry `i` is for prompt token `i + 1` (nothing predicts the first); empty unless asked for.
        prompt_logprobs: Vec<TokenLogprobs>,
        /// What came of the pins that were asked for; `None`: of none. A refusal ends nothing.
        kept: Option<Box<Result<PrefixInfo, KeepRefused>>>,
    },
    Token {
        choice: u32,
        token: Token,
    },
    /// What was wanted by [`Request::pooling`], `[hidden]`, not normalized; between `Prompt` and `Finished`.
    Pooled {
        vector: Vec<f32>,
    },
    Finished {
        choice: u32,
        reason: FinishReason,
        stop_token: Option<u32>,
        error: Option<Arc<str>>,
        timing: Box<Timing>,
    },
}

// A step of thousands of sequences writes one each: what is rare is behind a pointer.
const _: () = assert!(size_of::<Event>() <= 48);

/// Preemptions of a sequence whose times are told: more than there are by default ([`crate::SchedulerConfig::max_preemptions`]).
pub const PAUSES_MAX: usize = 4;

/// Loads of a sequence whose times are told.
pub const LOADS_MAX: usize = 4;

/// A load from a tier, from its order to its report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierLoad {
    pub tier: TierId,
    pub from: Micros,
    /// 0: there was none.
    pub to: Micros,
    /// What arrived was what it had to be.
    pub verified: bool,
}

/// When things happened and what they took, for metrics; engine time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timing {
    pub arrived: Micros,
    /// First scheduled.
    pub scheduled: Micros,
    pub first_token: Micros,
    pub finished: Micros,
    pub preemptions: u32,
    /// Of the first preemptions, when each was and when its sequence ran again; 0: it did not come to that.
    pub pauses: [(Micros, Micros); PAUSES_MAX],
    /// The first loads from tiers that reported while it was there, whether it still waited for them or not.
    pub loads: [TierLoad; LOADS_MAX],
    /// Steps that verified drafts, the drafts, and those of them that were what was chosen.
    pub draft_steps: u32,
    pub draft_tokens: u32,
    pub accepted_draft_tokens: u32,
    /// Microseconds that it was not computed, by what it waited for.
    pub waited_us: PerReason<u64>,
    /// Microseconds of steps that fall to it and that no event told before ([`crate::Work`]).
    pub us: f32,
}

impl Timing {
    pub(crate) fn preempted(&mut self, now: Micros) {
        if let Some(pause) = self.pauses.get_mut(self.preemptions as usize) {
            pause.0 = now;
        }
        self.preemptions += 1;
    }

    pub(crate) fn loaded(&mut self, load: TierLoad) {
        if let Some(free) = self.loads.iter_mut().find(|load| load.to == Micros(0)) {
            *free = load;
        }
    }

    /// It runs, for the first time or again.
    pub(crate) fn admitted(&mut self, now: Micros) {
        let last = self.preemptions.checked_sub(1).and_then(|last| self.pauses.get_mut(last as usize));
        if let Some(pause) = last {
            pause.1 = now;
        }
    }
}

/// Receives a request's events. Must not block and must not call the engine. `false`: the receiver is gone, cancel.
pub trait EventSink: Send {
    fn deliver(&mut self, event: Event) -> bool;
}

impl<F: FnMut(Event) -> bool + Send> EventSink for F {
    fn deliver(&mut self, event: Event) -> bool {
        self(event)
    }
}

/// Shared between a caller and the engine. Cancelling takes effect at the next step boundary, at any point of a
/// request's life, and frees its blocks there; every choice that was still running gets [`FinishReason::Cancelled`].
///
/// Clones cancel the same request. A flag that is merely dropped cancels nothing.
#[derive(Clone, Default)]
pub struct CancelFlag(Arc<Cancellation>);

#[derive(Default)]
struct Cancellation {
    cancelled: AtomicBool,
    /// Who is told, and of which request.
    to: Option<(Arc<Mailbox>, RequestId)>,
}

impl CancelFlag {
    pub(crate) fn new(mailbox: Arc<Mailbox>, request: RequestId) -> Self {
        Self(Arc::new(Cancellation { cancelled: AtomicBool::new(false), to: Some((mailbox, request)) }))
    }

    fn send(&self, choice: Option<u32>) {
        if let Some((mailbox, request)) = &self.0.to {
            mailbox.cancel(CancelRequest { request: *request, choice });
        }
    }

    /// Cancels all choices. Calling it again does nothing.
    pub fn cancel(&self) {
        if !self.0.cancelled.swap(true, Ordering::AcqRel) {
            self.send(None);
        }
    }

    /// Cancels one choice: it is finished for its reader (a stop string was found) while the others go on.
    pub fn cancel_choice(&self, choice: u32) {
        if !self.is_cancelled() {
            self.send(Some(choice));
        }
    }

    /// Whether [`CancelFlag::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.load(Ordering::Acquire)
    }
}

impl std::fmt::Debug for CancelFlag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CancelFlag").field(&self.is_cancelled()).finish()
    }
}
