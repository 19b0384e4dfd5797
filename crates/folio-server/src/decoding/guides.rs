//! Answers that follow a grammar: from a compiled grammar to the masks the engine's sampler asks for.
//!
//! Owns: the threads that compute masks. Must never: make the engine wait, or let one answer's failure reach another.
//!
//! A [`Follower`] is one answer's state. It is either with a thread, which tells it what was chosen and computes the next mask while
//! the forward pass runs, or in its [`Guided`] with nothing left to do. Where drafts may come next, the thread tells them to another that
//! is brought back behind them, and computes a mask behind each: no draft shows in the answer's own. Masks are kept beside it for the
//! sampler, which finds one or is told that it is late. A panic or an error of the grammar library puts the reason there instead, and ends
//! that answer alone.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use folio_engine::{DRAFTS_MAX, Guide, Restricted, Rules};
use folio_text::{STACK_BYTES, Tokenizer};
use parking_lot::Mutex;

use super::follower::{Begin, Follower, Form};
use crate::observability::metrics::MaskFigures;

/// Threads that compute masks.
pub struct Masks {
    /// Answers with something to do.
    jobs: Mutex<Sender<Arc<Guided>>>,
    figures: Arc<MaskFigures>,
}

impl Masks {
    /// `threads` threads; they end with this object.
    pub fn start(threads: usize, figures: Arc<MaskFigures>) -> std::io::Result<Self> {
        let (jobs, receiver) = channel();
        let receiver = Arc::new(Mutex::new(receiver));
        for index in 0..threads.max(1) {
            let receiver = receiver.clone();
            let thread =
                std::thread::Builder::new().name(format!("folio-masks-{index}")).stack_size(STACK_BYTES);
            thread.spawn(move || work(&receiver))?;
        }
        Ok(Self { jobs: Mutex::new(jobs), figures })
    }

    fn send(&self, answer: Arc<Guided>) {
        let jobs = self.jobs.lock();
        if let Err(lost) = jobs.send(answer) {
            lost.0.state.lock().failed = Some("the threads that follow grammars have ended".into());
        }
    }
}

fn work(jobs: &Mutex<Receiver<Arc<Guided>>>) {
    loop {
        let job = jobs.lock().recv();
        let Ok(answer) = job else { return };
        answer.work();
    }
}

/// Rules of one request, for the engine.
pub struct Structured {
    pub form: Form,
    pub begin: Begin,
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens that end an answer; not before the grammar has begun.
    pub ends: Arc<[u32]>,
    pub masks: Arc<Masks>,
    /// The field that asks for them.
    pub param: Arc<str>,
}

impl Rules for Structured {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        let follower = Follower::new(&self.form, &self.begin, &self.tokenizer, &self.ends);
        let follower = Some(Box::new(follower));
        let state = GuideProgress { follower, chosen: chosen.to_vec(), ..GuideProgress::default() };
        let answer = Arc::new(Guided { state: Mutex::new(state), masks: self.masks.clone() });
        self.masks.send(answer.clone());
        Arc::new(Following(answer))
    }

    fn name(&self) -> &str {
        &self.param
    }
}

/// An answer as the engine sees it.
struct Following(Arc<Guided>);

/// An answer as its thread sees it. Whoever finds its follower there may take it; whoever gives it something to do while it is there
/// sends it to a thread.
struct Guided {
    state: Mutex<GuideProgress>,
    masks: Arc<Masks>,
}

#[derive(Default)]
struct GuideProgress {
    /// `None`: a thread has it.
    follower: Option<Box<Follower>>,
    /// Tokens that it has not been told.
    chosen: Vec<u32>,
    drafts: Vec<u32>,
    /// What may come next, one bit per token: behind what was chosen, and behind each draft, as far as that is known. And memory for
    /// another.
    masks: Vec<Vec<u32>>,
    spare: Vec<u32>,
    failed: Option<String>,
    /// When the sampler asked for what was not known.
    late: Option<Instant>,
    /// Tokens that must come behind what was chosen, as far as that was found out.
    forced: VecDeque<u32>,
}

impl GuideProgress {
    /// Whether a thread has something to do.
    fn wants(&self) -> bool {
        self.failed.is_none() && (!self.chosen.is_empty() || self.masks.len() <= self.drafts.len())
    }

    /// Whether what may come behind each of `drafts`, and nothing else, is to be found out.
    fn expects(&self, drafts: &[u32]) -> bool {
        self.chosen.is_empty() && self.drafts == drafts
    }

    /// What may come behind `drafts`, if that is known.
    fn mask(&self, drafts: &[u32]) -> Option<&Vec<u32>> {
        self.masks.get(drafts.len()).filter(|_| self.drafts.starts_with(drafts))
    }
}

impl Guided {
    /// Computes masks until none is wanted.
    fn work(&self) {
        let Some(mut follower) = self.state.lock().follower.take() else { return };
        loop {
            let mut state = self.state.lock();
            if !state.wants() {
                state.follower = Some(follower);
                return;
            }
            let began = Instant::now();
            let drafts = match state.chosen.is_empty() && !state.masks.is_empty() {
                true => state.drafts.clone(),
                false => Vec::new(),
            };
            let forces = state.forced.is_empty();
            std::mem::swap(&mut state.chosen, &mut follower.told);
            let mask = std::mem::take(&mut state.spare);
            drop(state);
            let done = catch_unwind(AssertUnwindSafe(|| match drafts.is_empty() {
                true => self.keep_up(&mut follower, mask, forces),
                false => {
                    self.walk(&mut follower, &drafts);
                    Ok(())
                }
            }));
            self.masks.figures.computed(began.elapsed());
            if let Err(reason) = done.unwrap_or_else(|_| Err("the grammar library failed".into())) {
                self.state.lock().failed = Some(reason);
            }
        }
    }

    /// Tells the follower what was chosen, and computes what may come behind it; with `forces`, what must come.
    fn keep_up(&self, follower: &mut Follower, mut mask: Vec<u32>, forces: bool) -> Result<(), String> {
        let told = std::mem::take(&mut follower.told);
        told.iter().try_for_each(|token| follower.accept(*token))?;
        follower.told = told;
        follower.told.clear();
        follower.look(&mut mask)?;
        self.publish(mask);
        if forces {
            let forced = follower.forced();
            let mut state = self.state.lock();
            if state.chosen.is_empty() && state.forced.is_empty() {
                state.forced.extend(forced);
            }
        }
        Ok(())
    }

    fn publish(&self, mask: Vec<u32>) {
        let mut state = self.state.lock();
        // Otherwise it is known from a draft, or more was chosen meanwhile.
        if state.chosen.is_empty() && state.masks.is_empty() {
            state.masks.push(mask);
        }
    }

    /// Computes what may come behind each of `drafts`, where that is not known. Where a draft may not come, nobody asks what may come
    /// behind it. O(`drafts`, and what was said since the last walk).
    fn walk(&self, follower: &mut Follower, drafts: &[u32]) {
        let mut ahead = follower.ahead();
        for (at, draft) in drafts.iter().enumerate() {
            let mut state = self.state.lock();
            let Some(before) = state.masks.get(at).filter(|_| state.expects(drafts)) else { break };
            if !allows(before, *draft) {
                state.drafts.truncate(at);
                break;
            }
            let is_known = state.masks.len() > at + 1;
            drop(state);
            let mut mask = Vec::new();
            let told = ahead.accept(*draft);
            let told = if is_known { told } else { told.and_then(|()| ahead.look(&mut mask)) };
            let mut state = self.state.lock();
            if !state.expects(drafts) {
                break;
            }
            match told {
                Ok(()) if !is_known && state.masks.len() == at + 1 => state.masks.push(mask),
                Ok(()) => {}
                Err(_) => {
                    state.drafts.truncate(at);
                    break;
                }
            }
        }
        follower.give_back(ahead);
    }
}

impl Following {
    /// Changes what is wanted, and sees to it that a thread knows.
    fn change(&self, change: impl FnOnce(&mut GuideProgress)) {
        let mut state = self.0.state.lock();
        change(&mut state);
        if state.follower.is_some() && state.wants() {
            drop(state);
            self.0.masks.send(self.0.clone());
        }
    }
}

impl Guide for Following {
    fn advance(&self, token: u32) {
        self.change(|state| {
            state.chosen.push(token);
            if state.forced.pop_front() != Some(token) {
                state.forced.clear();
            }
            let was_draft = state.drafts.first() == Some(&token) && state.masks.len() > 1;
            let over = if was_draft { 1 } else { state.masks.len() };
            state.spare = state.masks.drain(..over).next().unwrap_or_default();
            state.drafts.drain(..if was_draft { 1 } else { state.drafts.len() });
        });
    }

    fn expect(&self, drafts: &[u32]) {
        self.change(|state| {
            let same = state.drafts.iter().zip(drafts).take_while(|(old, new)| old == new).count();
            state.masks.truncate(same + 1);
            state.drafts.clear();
            state.drafts.extend_from_slice(drafts);
        });
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        let mut state = self.0.state.lock();
        if let Some(reason) = &state.failed {
            return Err(reason.clone());
        }
        let Some(mask) = state.mask(drafts) else {
            state.late.get_or_insert_with(Instant::now);
            return Ok(Restricted::Late);
        };
        apply(mask, logits);
        if let Some(late) = state.late.take() {
            self.0.masks.figures.waited(late.elapsed());
        }
        Ok(Restricted::Applied)
    }

    fn draft(&self, drafts: &mut Vec<u32>) -> usize {
        let state = self.0.state.lock();
        let forced = state.forced.len().min(DRAFTS_MAX as usize);
        if forced > 0 {
            let same = drafts.iter().zip(&state.forced).take_while(|(draft, forced)| draft == forced).count();
            if same < forced {
                drafts.clear();
                drafts.extend(state.forced.iter().take(forced));
            }
            return forced;
        }
        let known = drafts.iter().zip(&state.drafts).take_while(|(draft, known)| draft == known).count();
        let masks = state.masks.iter().take(known + 1);
        let forbidden = drafts.iter().zip(masks).position(|(draft, mask)| !allows(mask, *draft));
        drafts.truncate(forbidden.unwrap_or(usize::MAX));
        0
    }

    fn is_ready(&self, drafts: &[u32]) -> bool {
        let state = self.0.state.lock();
        state.failed.is_some() || state.mask(drafts).is_some()
    }
}

fn allows(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Forbids what `mask` does not allow.
fn apply(mask: &[u32], logits: &mut [f32]) {
    let mut rows = logits.chunks_mut(32);
    for (word, row) in mask.iter().zip(&mut rows) {
        match *word {
            u32::MAX => {}
            0 => row.fill(f32::NEG_INFINITY),
            word => {
                for (bit, logit) in row.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
    // A checkpoint's logits may be wider than its vocabulary.
    rows.for_each(|row| row.fill(f32::NEG_INFINITY));
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use folio_engine::{
        EngineHandle, EngineParts, Event, ModelExecutor, RulesRef, SchedulerConfig, SystemClock, WaitingFor,
    };
    use folio_kv::{CacheConfig, KvCache, default_policy};
    use folio_text::{CallPlace, Grammars, Syntax, work};

    /// One token per printable character, and three more.
    pub(crate) fn tokenizer() -> Arc<Tokenizer> {
        let vocab: serde_json::Map<String, serde_json::Value> =
            (0..95u8).map(|id| (char::from(id + 32).to_string().replace(' ', "Ġ"), id.into())).collect();
        let special = |id: u32, text: &str| serde_json::json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let file = serde_json::json!({
            "model": {"type": "BPE", "vocab": vocab, "merges": []}, "decoder": byte_level, "pre_tokenizer": byte_level,
            "added_tokens": [special(95, "<end>"), special(96, "<|channel|>"), special(97, "<|message|>")],
        });
        Arc::new(Tokenizer::from_bytes(file.to_string().as_bytes(), None).expect("a tokenizer"))
    }

    fn rules(pattern: &str, begin: Begin) -> Structured {
        let tokenizer = tokenizer();
        let ends: Arc<[u32]> = Arc::new([95]);
        let grammars = Grammars::new(&tokenizer, &ends).expect("a vocabulary");
        let grammar = Arc::new(grammars.compile(&Syntax::Regex(pattern.into())).expect("a grammar"));
        let masks = Arc::new(Masks::start(1, Arc::default()).expect("threads"));
        Structured { form: Form::Answer(grammar), begin, tokenizer, ends, masks, param: "a field".into() }
    }

    /// The same for threads that nobody starts, and what those would do.
    fn stuck(pattern: &str) -> (Structured, Receiver<Arc<Guided>>) {
        let (sender, jobs) = channel();
        let masks = Arc::new(Masks { jobs: Mutex::new(sender), figures: Arc::default() });
        (Structured { masks, ..rules(pattern, Begin::default()) }, jobs)
    }

    fn id(c: char) -> u32 {
        c as u32 - 32
    }

    /// What may come behind `drafts`, once that is known.
    fn allowed_behind(guide: &Arc<dyn Guide>, drafts: &[u32]) -> Result<Vec<u32>, String> {
        let mut logits = [0.0; 130];
        while guide.restrict(drafts, &mut logits)? == Restricted::Late {
            std::thread::yield_now();
        }
        Ok((0..130).filter(|id| logits[*id as usize] == 0.0).collect())
    }

    fn allowed(guide: &Arc<dyn Guide>) -> Result<Vec<u32>, String> {
        allowed_behind(guide, &[])
    }

    #[test]
    fn a_guide_follows_its_answer_and_no_other() {
        let rules = rules("ab?", Begin::default());
        let (one, other) = (rules.guide(&[]), rules.guide(&[id('a')]));
        assert_eq!(allowed(&one), Ok(vec![id('a')]));
        assert_eq!(allowed(&other), Ok(vec![id('b'), 95]));
        one.advance(id('a'));
        assert_eq!(allowed(&one), Ok(vec![id('b'), 95]));
        assert_eq!(allowed(&one), Ok(vec![id('b'), 95]), "asking changes nothing");
        other.advance(id('b'));
        assert_eq!(allowed(&other), Ok(vec![95]));
        other.advance(95);
        assert!(allowed(&other).is_ok());
    }

    #[test]
    fn a_failure_ends_its_own_answer_only() {
        let rules = rules("a*", Begin::default());
        let (broken, whole) = (rules.guide(&[]), rules.guide(&[]));
        assert!(allowed(&broken).is_ok() && allowed(&whole).is_ok());
        broken.advance(4_000_000);
        assert!(allowed(&broken).is_err());
        broken.advance(id('a'));
        assert!(allowed(&broken).is_err(), "what failed stays failed");
        whole.advance(id('a'));
        assert_eq!(allowed(&whole), Ok(vec![id('a'), 95]));
    }

    #[test]
    fn what_may_come_behind_drafts_is_what_comes_when_they_are_chosen() {
        let rules = rules("a[bc]d", Begin::default());
        let guide = rules.guide(&[]);
        let (a, b, c, d) = (id('a'), id('b'), id('c'), id('d'));
        guide.expect(&[a, b, a, d]);
        assert_eq!(allowed(&guide), Ok(vec![a]));
        assert_eq!(allowed_behind(&guide, &[a]), Ok(vec![b, c]));
        assert_eq!(allowed_behind(&guide, &[a, b]), Ok(vec![d]));
        guide.expect(&[a, c]);
        assert_eq!(allowed_behind(&guide, &[a, c]), Ok(vec![d]));
        guide.advance(a);
        guide.advance(b);
        assert_eq!(allowed(&guide), Ok(vec![d]), "c was a draft and nothing more");
        guide.expect(&[d]);
        guide.advance(d);
        assert_eq!(allowed(&guide), Ok(vec![95]));
    }

    /// What becomes of `drafts`, and how many of it the grammar leaves alone.
    fn drafted(guide: &Arc<dyn Guide>, drafts: &[u32]) -> (Vec<u32>, usize) {
        let mut drafts = drafts.to_vec();
        let forced = guide.draft(&mut drafts);
        (drafts, forced)
    }

    fn forced(guide: &Arc<dyn Guide>) -> Vec<u32> {
        let (drafts, forced) = drafted(guide, &[]);
        assert_eq!(drafts.len(), forced);
        drafts
    }

    #[test]
    fn drafts_are_cut_where_they_may_not_come_and_begin_with_what_must() {
        let (rules, jobs) = stuck("say (yes|no), .*");
        let guide = rules.guide(&[]);
        let ids = |text: &str| text.chars().map(id).collect::<Vec<u32>>();
        let work = || jobs.try_iter().for_each(|answer| answer.work());
        assert_eq!(drafted(&guide, &ids("what")), (ids("what"), 0), "nobody has looked");
        work();
        assert_eq!(drafted(&guide, &ids("what")), (ids("say "), 4));
        assert_eq!(drafted(&guide, &ids("say")), (ids("say "), 4));
        assert_eq!(drafted(&guide, &ids("say yes")), (ids("say yes"), 4));
        ids("say ").iter().for_each(|token| guide.advance(*token));
        work();
        assert_eq!(drafted(&guide, &ids("maybe")), (ids(""), 0));
        assert_eq!(drafted(&guide, &ids("yes!")), (ids("yes!"), 0), "what comes behind y is not known");
        guide.expect(&ids("yes!"));
        work();
        assert_eq!(drafted(&guide, &ids("yes!")), (ids("yes"), 0));
        assert_eq!(drafted(&guide, &ids("yea!")), (ids("ye"), 0));
        assert_eq!(
            drafted(&guide, &ids("no!")),
            (ids("no!"), 0),
            "what comes behind another draft is not asked"
        );
        guide.advance(id('y'));
        work();
        assert_eq!(drafted(&guide, &ids("eh")), (ids("es, "), 4));
        assert_eq!(drafted(&guide, &ids("es, of course")), (ids("es, of course"), 4));
    }

    #[test]
    fn what_must_come_is_known_ahead_of_time() {
        let (rules, jobs) = stuck("say (yes|no), .*");
        let guide = rules.guide(&[]);
        let ids = |text: &str| text.chars().map(id).collect::<Vec<u32>>();
        assert_eq!(forced(&guide), ids(""), "nobody has looked");
        jobs.recv().expect("a job").work();
        assert_eq!(forced(&guide), ids("say "));
        guide.advance(id('s'));
        assert_eq!(forced(&guide), ids("ay "), "before a thread knows of it");
        guide.expect(&forced(&guide));
        jobs.recv().expect("a job").work();
        assert_eq!(allowed_behind(&guide, &ids("ay")), Ok(vec![id(' ')]));
        for c in "ay y".chars() {
            guide.advance(id(c));
        }
        assert_eq!(forced(&guide), ids(""), "two words may come, and it was told which only now");
        jobs.iter().take(1).for_each(|answer| answer.work());
        assert_eq!(forced(&guide), ids("es, "));
        for c in "es, ".chars() {
            guide.advance(id(c));
        }
        jobs.try_iter().for_each(|answer| answer.work());
        assert_eq!(forced(&guide), ids(""), "anything may come");
    }

    #[test]
    fn an_answer_is_looked_ahead_for_so_far_and_no_further() {
        let rules = rules("a{9000}", Begin::default());
        let mut follower = Follower::new(&rules.form, &rules.begin, &rules.tokenizer, &rules.ends);
        follower.look(&mut Vec::new()).expect("a mask");
        assert_eq!(follower.forced().len(), 9000);
        assert_eq!(follower.forced().len(), 9000, "some is left");
        assert_eq!(follower.forced(), Vec::<u32>::new());
    }

    /// A matcher has all that was said in it: it is not copied at each token to find out what is forced, nor for drafts.
    #[test]
    fn an_answer_is_followed_in_proportion_to_its_length() {
        let rules = rules("([ab]cd)*", Begin::default());
        let steps = |tokens: usize| {
            let mut follower = Follower::new(&rules.form, &rules.begin, &rules.tokenizer, &rules.ends);
            let before = work::done();
            for token in ['a', 'c', 'd', 'b', 'c', 'd'].map(id).into_iter().cycle().take(tokens) {
                follower.look(&mut Vec::new()).expect("a mask");
                let forced = if token == id('c') { vec![id('c'), id('d')] } else { Vec::new() };
                assert!(token == id('d') || follower.forced() == forced);
                let mut ahead = follower.ahead();
                ahead.accept(token).expect("allowed");
                ahead.look(&mut Vec::new()).expect("a mask");
                follower.give_back(ahead);
                follower.accept(token).expect("allowed");
            }
            work::done() - before
        };
        let (single, double) = (steps(500), steps(1000));
        assert!(
            double < 4096 || double * 10 <= single * 23,
            "{single} steps, and {double} for twice as much"
        );
    }

    #[test]
    fn nothing_waits_for_a_mask() {
        let (rules, jobs) = stuck("ab");
        let guide = rules.guide(&[]);
        let mut logits = [0.0; 130];
        assert_eq!(guide.restrict(&[], &mut logits), Ok(Restricted::Late));
        assert!(!guide.is_ready(&[]));
        jobs.recv().expect("a job").work();
        assert!(guide.is_ready(&[]));
        assert_eq!(allowed(&guide), Ok(vec![id('a')]));
        guide.expect(&[id('a'), id('a')]);
        guide.advance(id('a'));
        assert!(!guide.is_ready(&[]), "behind a token that was just chosen");
        jobs.iter().take(1).for_each(|answer| answer.work());
        assert_eq!(allowed(&guide), Ok(vec![id('b')]));
        assert_eq!(
            guide.restrict(&[id('a')], &mut logits),
            Ok(Restricted::Late),
            "a draft that may not come"
        );
        drop(jobs);
        guide.advance(id('b'));
        assert!(guide.is_ready(&[]) && guide.restrict(&[], &mut logits).is_err());
    }

    /// A grammar that is not followed in time holds up nobody else; its own answer is what it is otherwise, or ends with its name.
    #[test]
    fn a_slow_grammar_holds_up_no_neighbour() {
        let (rules, jobs) = stuck("ab");
        let ask = |engine: &EngineHandle, id: u64, rules: Option<Arc<dyn Rules>>| {
            let (sender, events) = channel();
            let mut request = folio_sim::scenario::request(id, &[1, 2, 3], 20);
            request.sampling.rules = rules.map(RulesRef);
            request.sampling.eos_token_ids = Arc::new([95]);
            engine.submit(request, Box::new(move |event| sender.send(event).is_ok())).expect("accepted");
            events
        };
        let rules: Arc<dyn Rules> = Arc::new(rules);
        let patient = engine(SchedulerConfig { grammar_wait_us_max: 60_000_000, ..Default::default() });
        let (slow, neighbour) = (ask(&patient, 1, Some(rules.clone())), ask(&patient, 2, None));
        let (tokens, error) = read(&neighbour);
        assert!(tokens.len() == 20 && error.is_none(), "{error:?}");
        assert!(slow.try_iter().all(|event| !matches!(event, Event::Token { .. })));
        let working = std::thread::spawn(move || jobs.iter().for_each(|answer| answer.work()));
        assert_eq!(read(&slow), (vec![id('a'), id('b'), 95], None));
        let stats = patient.stats();
        assert!(stats.counters.late_rows > 0 && stats.counters.waits[WaitingFor::Grammar] > 0);
        drop(rules);
        working.join().expect("the jobs end with the last rules");
        let (rules, _jobs) = stuck("ab");
        let hasty = engine(SchedulerConfig { grammar_wait_us_max: 20_000, ..Default::default() });
        let (tokens, error) = read(&ask(&hasty, 1, Some(Arc::new(rules))));
        let error = error.expect("its mask never comes");
        assert!(tokens.is_empty() && error.contains("'a field'") && error.contains("0.02 s"), "{error}");
    }

    fn engine(config: SchedulerConfig) -> EngineHandle {
        let backend = folio_sim::SimBackend::new(130, 64, 16, config.max_num_batched_tokens as usize, 64);
        let geometry = CacheConfig { blocks: 64, block_tokens: 16, bytes_per_block: 1 };
        let rows = config.max_num_batched_tokens as usize;
        folio_engine::start(EngineParts {
            config,
            cache: KvCache::new(geometry, default_policy(0.01)),
            executor: Box::new(ModelExecutor::new(Box::new(backend), 130, rows, 64)),
            clock: Arc::new(SystemClock::new()),
            vocab: 130,
            tiers: Vec::new(),
            events: None,
        })
        .expect("an engine")
    }

    /// Tokens of a request, and the error it ended with.
    fn read(events: &Receiver<Event>) -> (Vec<u32>, Option<Arc<str>>) {
        let mut tokens = Vec::new();
        loop {
            match events.recv_timeout(std::time::Duration::from_secs(30)).expect("the engine went silent") {
                Event::Token { token, .. } => tokens.push(token.id),
                Event::Finished { error, .. } => return (tokens, error),
                _ => {}
            }
        }
    }

    #[test]
    fn what_comes_before_the_grammar_is_free_but_for_an_end() {
        let begin = Begin { after: vec!["<|channel|>final", "<|message|>"], unless: None };
        let rules = rules("x", begin);
        let guide = rules.guide(&[]);
        let everything: Vec<u32> = (0..128).filter(|id| *id != 95).collect();
        let said = [
            vec![96],
            "analysis".chars().map(id).collect(),
            vec![97],
            vec![id('x'), 96],
            "final json".chars().map(id).collect(),
        ];
        for token in said.concat() {
            assert_eq!(allowed(&guide).map(|ids| ids.into_iter().filter(|id| *id < 95).count()), Ok(95));
            assert!(!allowed(&guide).is_ok_and(|ids| ids.contains(&95)));
            guide.advance(token);
        }
        assert!(
            allowed(&guide).is_ok_and(|ids| ids.len() > 90 && ids.iter().all(|id| everything.contains(id)))
        );
        guide.advance(97);
        assert_eq!(allowed(&guide), Ok(vec![id('x')]));
    }

    #[test]
    fn an_answer_goes_on_as_it_likes_behind_a_beginning_it_must_have() {
        let mut rules = rules("never used", Begin { after: vec!["</t>"], unless: None });
        let grammars = Grammars::new(&rules.tokenizer, &rules.ends).expect("a vocabulary");
        let opening = grammars.compile(&Syntax::Regex(" ?go\\(".into())).expect("a grammar");
        rules.form = Form::Opening(Arc::new(opening));
        let guide = rules.guide(&[]);
        let may = |c: char| allowed(&guide).is_ok_and(|ids| ids.contains(&id(c)));
        for c in "x</t>".chars() {
            assert!(may(c));
            guide.advance(id(c));
        }
        for c in " go(".chars() {
            assert!(may(c) && !may('x'), "{c}");
            guide.advance(id(c));
        }
        assert!(may('x') && allowed(&guide).is_ok_and(|ids| ids.contains(&95)));
    }

    #[test]
    fn calls_are_held_wherever_they_begin_and_text_around_them_is_free() {
        let mut rules = rules("never used", Begin { after: vec!["</think>"], unless: None });
        let grammars = Grammars::new(&rules.tokenizer, &rules.ends).expect("a vocabulary");
        let call = Arc::new(grammars.compile(&Syntax::Regex("[ab]</call>".into())).expect("a grammar"));
        rules.form = Form::Calls {
            place: CallPlace { trigger: "<call>", at_start: false, again: true },
            grammar: call,
            begun: None,
        };
        let guide = rules.guide(&[]);
        let say = |text: &str| {
            for c in text.chars() {
                assert!(allowed(&guide).is_ok_and(|ids| ids.contains(&id(c))), "{c:?} of {text:?}");
                guide.advance(id(c));
            }
        };
        let may_end = || allowed(&guide).is_ok_and(|ids| ids.contains(&95));
        say("thinks of <call>zzz");
        assert!(!may_end());
        say("</think> and says <cal");
        assert!(may_end());
        say("l>");
        assert_eq!(allowed(&guide), Ok(vec![id('a'), id('b')]));
        say("b</call>");
        assert!(may_end());
        say(" more <call>a");
        assert_eq!(allowed(&guide), Ok(vec![id('<')]));
    }
}
