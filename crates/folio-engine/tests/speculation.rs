//! Drafts of the host's drafters through a running engine: the same tokens with and without, and whose text they come from.

use std::sync::{Arc, mpsc};

use folio_engine::engine::EngineParts;
use folio_engine::plan::{ExecutorError, Sampled, StepOutput, StepPlan, Want};
use folio_engine::{
    Clock, Drafter, EngineHandle, Event, Executor, Micros, Request, SamplingParams, SchedulerConfig,
    Speculation, start,
};
use folio_kv::{CacheConfig, KvCache, TenantId, default_policy};
use folio_sim::scenario::root;

const VOCAB: u32 = 1000;

/// Says the same again and again: the token at a position is a function of the position alone.
struct Periodic(StepOutput);

fn token_at(position: u32) -> u32 {
    100 + position * 7 % 40
}

impl Executor for Periodic {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.0.step = plan.step;
        self.0.samples.clear();
        for sequence in &plan.sequences {
            for sample in &sequence.samples {
                if let Want::Token(spec) = &sample.want {
                    self.0.samples.push(Sampled::Token { id: token_at(spec.position), logprobs: None });
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        Ok(&self.0)
    }
}

/// Time stands still: rows cost nothing, and every draft is verified.
struct Still;

impl Clock for Still {
    fn now(&self) -> Micros {
        Micros(0)
    }
}

fn engine() -> EngineHandle {
    let geometry = CacheConfig { blocks: 512, block_tokens: 16, bytes_per_block: 1 };
    let cache = KvCache::new(geometry, default_policy(0.01));
    let executor = Box::new(Periodic(StepOutput::default()));
    let (config, clock) = (SchedulerConfig::default(), Arc::new(Still));
    start(EngineParts { config, cache, executor, clock, vocab: VOCAB, tier: None, events: None })
        .expect("an engine")
}

struct Answer {
    tokens: Vec<u32>,
    drafts: u32,
    right: u32,
}

/// Where drafts come from, and what is expected.
type From<'a> = Option<(Drafter, &'a [u32])>;

fn ask(engine: &EngineHandle, tenant: u32, prompt: &[u32], from: From<'_>) -> Answer {
    let speculation = from.map(|(drafter, prediction)| Speculation::new(drafter, 16, prompt, prediction));
    let request = Request { prompt: prompt.into(), speculation, ..request_of(engine, tenant, 120) };
    let (sender, events) = mpsc::channel();
    let sink = move |event: Event| sender.send(event).is_ok();
    engine.submit(request, Box::new(sink)).expect("it is taken");
    let mut tokens = Vec::new();
    for event in events {
        match event {
            Event::Token { token, .. } => tokens.push(token.id),
            Event::Finished { timing, error, .. } => {
                assert_eq!(error, None);
                return Answer { tokens, drafts: timing.draft_tokens, right: timing.accepted_draft_tokens };
            }
            _ => {}
        }
    }
    panic!("it never finished")
}

fn with(drafter: Drafter, prediction: &[u32]) -> From<'_> {
    Some((drafter, prediction))
}

#[test]
fn drafts_change_no_token_and_what_repeats_is_drafted() {
    let prompt = [1, 2, 3];
    let plain = ask(&engine(), 1, &prompt, None);
    assert_eq!((plain.drafts, plain.right), (0, 0));
    for drafter in [Drafter::Suffix, Drafter::Ngram] {
        let drafted = ask(&engine(), 1, &prompt, with(drafter, &[]));
        assert_eq!(drafted.tokens, plain.tokens);
        assert!(drafted.right > 40, "the last 80 of 120 tokens were said before: {}", drafted.right);
    }
}

#[test]
fn a_prediction_is_drafted_from_and_a_wrong_one_changes_nothing() {
    let prompt = [1, 2, 3];
    let plain = ask(&engine(), 1, &prompt, None);
    let right = ask(&engine(), 1, &prompt, with(Drafter::Ngram, &plain.tokens));
    let alone = ask(&engine(), 1, &prompt, with(Drafter::Ngram, &[]));
    assert_eq!(right.tokens, plain.tokens);
    assert!(right.right > alone.right, "{} {}", right.right, alone.right);
    let lie: Vec<u32> = plain.tokens.iter().enumerate().map(|(at, t)| t + u32::from(at % 5 == 4)).collect();
    let misled = ask(&engine(), 1, &prompt, with(Drafter::Ngram, &lie));
    assert_eq!(misled.tokens, plain.tokens);
    assert!(misled.drafts > misled.right);
}

#[test]
fn answers_of_a_tenant_are_drafts_for_it_and_for_nobody_else() {
    let engine = engine();
    let (prompt, own) = ([1, 2, 3], with(Drafter::Suffix, &[]));
    let first = ask(&engine, 1, &prompt, own);
    let other = ask(&engine, 2, &prompt, own);
    assert_eq!((other.drafts, other.right), (first.drafts, first.right), "as if nobody had asked before");
    let again = ask(&engine, 1, &prompt, own);
    assert!(again.right > first.right, "{} {}", again.right, first.right);
    assert_eq!(again.tokens, first.tokens);
    let lookup = |engine: &EngineHandle| ask(engine, 1, &prompt, with(Drafter::Ngram, &[])).right;
    assert_eq!(lookup(&engine), lookup(&self::engine()), "n-gram lookup looks at the request alone");
}

#[test]
fn a_prediction_out_of_bounds_is_refused() {
    let engine = engine();
    let refused = |prompt: &[u32], prediction: Vec<u32>| {
        let speculation = Some(Speculation::new(Drafter::Suffix, 16, prompt, &prediction));
        let request = Request { prompt: [1, 2, 3].into(), speculation, ..request_of(&engine, 1, 8) };
        let Err(refused) = engine.submit(request, Box::new(|_: Event| true)) else { panic!("it is refused") };
        refused.to_string()
    };
    assert_eq!(
        refused(&[1, 2, 3], vec![5, VOCAB]),
        "prediction: token id 1000 is not in the vocabulary of 1000"
    );
    assert_eq!(refused(&[1, 2, 4], vec![]), "speculation: is of another prompt");
    let refused = refused(&[1, 2, 3], vec![5; 4000]);
    assert_eq!(refused, "prediction: has 4000 tokens, the model's context is 2048");
}

fn request_of(engine: &EngineHandle, tenant: u32, max_tokens: u32) -> Request {
    let (id, tenant) = (engine.next_request_id(), TenantId(tenant));
    Request::new(id, tenant, root(tenant), [1].into(), SamplingParams::greedy(max_tokens))
}

/// Where a model proposes drafts, a prediction is looked at first; here there is no such model, so there are no others.
#[test]
fn a_prediction_goes_before_a_model() {
    let engine = engine();
    let prompt: Vec<u32> = (0..20).collect();
    let said: Vec<u32> = (20..140).map(token_at).collect();
    let alone = ask(&engine, 1, &prompt, None);
    for (prediction, drafts) in [(&[][..], false), (&said[..], true)] {
        let answer = ask(&engine, 1, &prompt, Some((Drafter::Model, prediction)));
        assert_eq!((answer.tokens == alone.tokens, answer.drafts > 0), (true, drafts));
        assert_eq!(answer.drafts, answer.right);
    }
}
