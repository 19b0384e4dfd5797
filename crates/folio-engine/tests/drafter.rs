//! A model that proposes drafts: the tokens are as alone, and what it computes is what it lacks.

use std::sync::{Arc, Mutex};

use folio_engine::plan::{
    DraftPlan, ExecutorError, SamplePlan, SampleSpec, Sampled, SequenceId, SequencePlan, Want,
};
use folio_engine::{
    Drafter, DrafterModel, DraftingExecutor, Executor, Guide, GuideRef, Reads, Request, RequestId,
    Restricted, Rules, RulesRef, SamplingParams, SchedulerConfig, StepOutput, StepPlan,
};
use folio_kv::{GroupConfig, Layout, TenantId};
use folio_sim::machine::{Machine, VOCAB};
use folio_sim::rules::HashRules;
use folio_sim::scenario::{self, request};

const EVER: u32 = u32::MAX;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_prefill_tokens_while_decoding: 64,
        max_model_len: 200,
        ..SchedulerConfig::default()
    }
}

fn machine(blocks: u32, drafter_blocks: u32, positions: u32) -> Machine {
    Machine::new(config(), blocks, 4).with_drafter(drafter_blocks, positions, 64)
}

/// At most `drafts` of it in a step.
fn drafted(id: u64, prompt: &[u32], max_tokens: u32, drafts: u32) -> Request {
    scenario::drafted(id, Drafter::Model, prompt, max_tokens, drafts)
}

fn prompt(tokens: u32) -> Vec<u32> {
    (0..tokens).map(|at| at * 7 % 29).collect()
}

/// Drafts, and those that were right.
fn drafts(machine: &Machine) -> (u64, u64) {
    machine.scheduler.counters().draft_tokens()
}

#[test]
fn a_model_that_is_the_same_is_always_right() {
    for sampling in [false, true] {
        for temperature in [0.0, 1.0] {
            let mut machine = machine(64, 64, EVER);
            if sampling {
                machine = Machine::new(config(), 64, 4).with_sampling().with_drafter(64, EVER, 64);
            }
            let mut request = drafted(1, &prompt(30), 40, 3);
            (request.sampling.temperature, request.sampling.seed) = (temperature, 17);
            machine.submit(request.clone());
            machine.run();
            machine.assert_as_alone(&request);
            // A prompt with the first token, no draft in the next step, then one and two, to find out what rows take, then four tokens a step.
            let wanted = (12, (28, 28));
            assert_eq!((machine.scheduler.counters().steps, drafts(&machine)), wanted);
        }
    }
}

const LAYOUTS: [Layout; 2] = [Layout::State, Layout::Window { tokens: 12 }];

/// A model with layers of another layout, and the same as its drafter, which has so many blocks of each group.
fn machine_of(layout: Layout, drafter_blocks: u32) -> Machine {
    let group = GroupConfig { layout, ..GroupConfig::window(12, 64, 8, 1) };
    Machine::with_groups(config(), 64, 4, &[group]).with_drafter(drafter_blocks, EVER, 64)
}

#[test]
fn with_states_or_windows_it_is_always_right_too() {
    for (layout, temperature) in LAYOUTS.into_iter().flat_map(|layout| [(layout, 0.0), (layout, 1.0)]) {
        let mut machine = machine_of(layout, 64);
        let mut request = drafted(1, &prompt(30), 40, 3);
        (request.sampling.temperature, request.sampling.seed) = (temperature, 17);
        machine.submit(request.clone());
        machine.run();
        machine.assert_as_alone(&request);
        let (drafted, right) = drafts(&machine);
        assert!(drafted > 20 && right == drafted, "{layout:?}: {right} of {drafted}");
    }
}

/// What others proposed was verified without the drafter; it was preempted; others that began alike were found. What it then goes on from is
/// what was said.
#[test]
fn states_and_windows_are_those_of_what_was_said() {
    for layout in LAYOUTS {
        let mut machine = machine_of(layout, 64);
        for id in 1..=6 {
            let wanted = drafted(id, &[prompt(40), vec![id as u32; 3 * id as usize]].concat(), 40, 3);
            let answer: Vec<u32> =
                machine.alone(&wanted).choices[0].tokens.iter().map(|(token, _)| *token).collect();
            machine.submit(wanted.clone());
            let mut preempted = 0;
            while machine.finished(id).is_empty() {
                let said = machine.tokens(id, 0).len();
                if (8..16).contains(&said) {
                    machine.scheduler.propose(RequestId(id), 0, &answer[said..said + 2]);
                }
                if said >= 24 && preempted == 0 {
                    preempted = machine.scheduler.preempt_all(&mut machine.cache);
                }
                machine.step();
            }
            machine.assert_as_alone(&wanted);
            assert_eq!(preempted, 1);
        }
        let (drafted, right) = drafts(&machine);
        assert!(drafted > 60 && right == drafted, "{layout:?}: {right} of {drafted}");
        assert!(machine.cached_tokens(6) >= Some(40), "{layout:?}");
    }
}

#[test]
fn choices_of_one_prompt_have_states_and_windows_of_their_own() {
    for layout in LAYOUTS {
        for length in [30, 32, 33] {
            let mut machine = machine_of(layout, 64);
            let mut request = drafted(1, &prompt(length), 20, 3);
            (request.n, request.sampling.temperature, request.sampling.seed) = (3, 1.0, 5);
            machine.submit(request.clone());
            machine.run();
            machine.assert_as_alone(&request);
            let (drafted, right) = drafts(&machine);
            assert!(drafted > 10 && right == drafted, "{layout:?}, {length}: {right} of {drafted}");
        }
    }
}

#[test]
fn without_room_for_states_or_windows_everything_goes_on_without_the_drafter() {
    for (layout, blocks) in LAYOUTS.into_iter().flat_map(|layout| [(layout, 9), (layout, 1)]) {
        let mut machine = machine_of(layout, blocks);
        let wanted = [1, 2].map(|id| drafted(id, &prompt(30), 40, 3));
        for wanted in &wanted {
            machine.submit(wanted.clone());
        }
        machine.run();
        wanted.iter().for_each(|wanted| machine.assert_as_alone(wanted));
        let (drafted, right) = drafts(&machine);
        assert_eq!(drafted, right, "{layout:?}, {blocks} blocks");
    }
}

#[test]
fn with_penalties_biases_and_rules_it_is_always_right_too() {
    type Change = fn(&mut SamplingParams);
    let changes: [Change; 4] = [
        |params| {
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) = (1.7, 0.6, 0.8)
        },
        |params| params.logit_bias = (0..VOCAB).step_by(3).map(|token| (token, 4.0)).collect(),
        |params| params.rules = Some(RulesRef(Arc::new(Plain(HashRules::default())))),
        |params| {
            (params.frequency_penalty, params.presence_penalty) = (1.5, 0.5);
            params.rules = Some(RulesRef(Arc::new(Plain(HashRules { seed: 5, ..HashRules::default() }))));
        },
    ];
    for (change, temperature) in changes.into_iter().flat_map(|change| [(change, 0.0), (change, 1.0)]) {
        let mut machine = machine(64, 64, EVER);
        let mut request = drafted(1, &prompt(30), 40, 3);
        (request.sampling.temperature, request.sampling.seed) = (temperature, 17);
        change(&mut request.sampling);
        machine.submit(request.clone());
        machine.run();
        machine.assert_as_alone(&request);
        let (drafted, right) = drafts(&machine);
        assert!(drafted >= 28 && right == drafted, "{right} of {drafted}");
    }
}

/// Rules that leave drafts as they are.
struct Plain(HashRules);

struct Following(Arc<dyn Guide>);

impl Rules for Plain {
    fn guide(&self, chosen: &[u32]) -> Arc<dyn Guide> {
        Arc::new(Following(self.0.guide(chosen)))
    }

    fn name(&self) -> &str {
        self.0.name()
    }
}

impl Guide for Following {
    fn advance(&self, token: u32) {
        self.0.advance(token);
    }

    fn restrict(&self, drafts: &[u32], logits: &mut [f32]) -> Result<Restricted, String> {
        self.0.restrict(drafts, logits)
    }
}

#[test]
fn each_known_token_is_computed_once_and_each_draft_when_it_is_drawn() {
    let mut machine = machine(64, 64, EVER);
    machine.submit(drafted(1, &prompt(70), 12, 2));
    machine.run();
    let computed = machine.plans().iter().flat_map(|plan| &plan.sequences).map(|sequence| {
        let drafter = &sequence.drafter;
        (drafter.first_position, drafter.tokens.len() as u32, drafter.drafts)
    });
    let computed: Vec<_> = computed.collect();
    // The prompt in two pieces; nothing in the first step, to find out what it takes without drafts, and one draft in the next, to find out what a
    // row takes; then what was chosen behind the drafts, and the last draft, which it never computed.
    let pieces = [(0, 64, 0), (64, 6, 0)];
    assert_eq!(
        computed,
        [&pieces[..], &[(64, 0, 0), (70, 2, 1), (72, 2, 2), (75, 2, 2), (78, 2, 1)]].concat()
    );
}

#[test]
fn a_prefix_that_is_found_is_found_by_the_drafter_too() {
    let mut machine = machine(64, 64, EVER);
    let first = drafted(1, &prompt(40), 8, 3);
    machine.submit(first);
    machine.run();
    let second = drafted(2, &[prompt(40), vec![3, 4, 5]].concat(), 20, 3);
    machine.submit(second.clone());
    machine.run();
    machine.assert_as_alone(&second);
    assert_eq!(machine.cached_tokens(2), Some(40));
    let of_second = machine.plans().iter().flat_map(|plan| &plan.sequences).filter(|of| of.id.0 == 2);
    let first_positions: Vec<u32> = of_second.map(|of| of.drafter.first_position).take(2).collect();
    assert_eq!(first_positions, [40, 43]);
    let (drafted, right) = drafts(&machine);
    assert_eq!(drafted, right);
}

#[test]
fn without_room_for_the_drafter_everything_goes_on_without_it() {
    // Blocks for six tokens more than the prompt.
    let mut machine = machine(64, 9, EVER);
    let wanted = drafted(1, &prompt(30), 40, 3);
    machine.submit(wanted.clone());
    machine.run();
    machine.assert_as_alone(&wanted);
    let (drafted, right) = drafts(&machine);
    assert!((1..=6).contains(&drafted) && drafted == right, "{drafted} drafts, {right} right");
}

#[test]
fn a_context_that_the_drafter_cannot_see_to_its_end_has_no_drafts_there() {
    let mut machine = machine(64, 64, 40);
    let wanted = drafted(1, &prompt(30), 40, 4);
    machine.submit(wanted.clone());
    machine.run();
    machine.assert_as_alone(&wanted);
    let sequences = machine.plans().iter().flat_map(|plan| &plan.sequences);
    let ends =
        sequences.map(|of| of.drafter.first_position + of.drafter.tokens.len() as u32 + of.drafter.drafts);
    // The last draft is not computed.
    assert!(matches!(ends.max(), Some(38..=41)));
    let (drafted, right) = drafts(&machine);
    assert!(drafted > 0 && drafted == right);
}

#[test]
fn a_drafter_that_fails_is_not_asked_again_and_costs_no_token() {
    let mut machine = Machine::new(config(), 64, 4).with_drafter(64, EVER, 8);
    let wanted = drafted(1, &prompt(30), 40, 3);
    machine.submit(wanted.clone());
    machine.run();
    machine.assert_as_alone(&wanted);
    let (drafted, right) = drafts(&machine);
    assert!(right < drafted / 2, "its backend refuses {drafted} drafts' first rows");
}

/// What a model reads of those that begin costs as much whether its drafts are right or not.
#[test]
fn a_drafter_that_was_wrong_reads_few_of_those_that_begin() {
    let mut machine = Machine::new(config(), 64, 4).with_drafter(64, EVER, 8).with_drafter_time(300);
    for id in 1..=64 {
        let wanted = drafted(id, &prompt(30 + id as u32 % 5), 12, 3);
        machine.submit(wanted.clone());
        machine.run();
        machine.assert_as_alone(&wanted);
    }
    let read = |id: u64| {
        let mut entries = machine.plans().iter().flat_map(|plan| &plan.sequences);
        entries.any(|of| of.id.0 == id && !of.drafter.tokens.is_empty())
    };
    assert!(read(1), "nothing is known of it yet");
    let late = (33..=64).filter(|id| read(*id)).count();
    assert!((1..=4).contains(&late), "{late} of the last 32 were read");
    // Of another tenant nothing is known.
    let tenant = TenantId(7);
    machine.submit(Request { tenant, root: scenario::root(tenant), ..drafted(65, &prompt(30), 12, 3) });
    machine.run();
    let read = machine
        .plans()
        .iter()
        .flat_map(|plan| &plan.sequences)
        .any(|of| of.id.0 == 65 && !of.drafter.tokens.is_empty());
    assert!(read, "whose drafts are wrong costs nobody else theirs");

    // One that is right reads them all.
    let mut machine = self::machine(64, 64, EVER).with_drafter_time(300);
    for id in 1..=20 {
        machine.submit(drafted(id, &prompt(30 + id as u32 % 5), 12, 3));
        machine.run();
    }
    let (drafted, right) = drafts(&machine);
    assert!(drafted > 100 && drafted == right, "{right} of {drafted}");
}

/// What a caller predicts says nothing of the model.
#[test]
fn wrong_drafts_of_others_are_not_the_models() {
    let mut machine = machine(64, 64, EVER).with_drafter_time(900);
    for id in 1..=40 {
        machine.submit(drafted(id, &prompt(30 + id as u32 % 5), 12, 3));
        while machine.finished(id).is_empty() {
            if machine.tokens(id, 0).len() >= 2 {
                machine.scheduler.propose(RequestId(id), 0, &[1, 1, 1]);
            }
            machine.step();
        }
    }
    let (drafted, right) = drafts(&machine);
    assert!(drafted > right + 40, "{right} of {drafted}: what was proposed is wrong");
    let late = machine.plans().iter().flat_map(|plan| &plan.sequences).filter(|of| of.id.0 > 30);
    let read: std::collections::BTreeSet<u64> =
        late.filter(|of| !of.drafter.tokens.is_empty()).map(|of| of.id.0).collect();
    assert_eq!(read.len(), 10, "all were read");
}

#[test]
fn who_wants_no_drafts_has_nothing_computed_for_the_drafter() {
    let mut machine = machine(64, 64, EVER);
    machine.submit(request(1, &prompt(40), 8));
    machine.run();
    let nothing =
        |plan: &folio_engine::StepPlan| plan.sequences.iter().all(|of| of.drafter.tokens.is_empty());
    assert!(machine.plans().iter().all(nothing));
    assert_eq!(machine.cache.stats().windows()[0].allocations, 0, "nor has it blocks for it");
}

/// A prompt that is found without the drafter's part is computed by the drafter beside the steps, so many tokens in each, and then it proposes.
#[test]
fn a_drafter_catches_up_with_a_prefix_that_was_computed_without_it() {
    let most = 20;
    let config = SchedulerConfig { max_prefill_tokens_while_decoding: most, ..config() };
    let mut machine = Machine::new(config, 64, 4).with_drafter(64, EVER, 64);
    machine.submit(request(1, &prompt(120), 8));
    machine.run();
    let second = drafted(2, &prompt(120), 30, 3);
    machine.submit(second.clone());
    machine.run();
    machine.assert_as_alone(&second);
    assert!(machine.cached_tokens(2) >= Some(116));
    let of_second = machine.plans().iter().flat_map(|plan| &plan.sequences).filter(|of| of.id.0 == 2);
    let computed: Vec<(u32, usize, u32)> = of_second
        .map(|of| (of.drafter.first_position, of.drafter.tokens.len(), of.drafter.drafts))
        .filter(|(_, tokens, _)| *tokens > 0)
        .collect();
    let catching_up = computed.iter().take_while(|(.., drafts)| *drafts == 0);
    assert!(catching_up.clone().all(|(_, tokens, _)| *tokens <= most as usize + 4), "{computed:?}");
    assert!(
        catching_up.count() >= 3 && computed.last().is_some_and(|(.., drafts)| *drafts > 0),
        "{computed:?}"
    );
    let gaps = computed.windows(2).filter(|pair| pair[0].2 == 0 && pair[0].0 + pair[0].1 as u32 != pair[1].0);
    assert_eq!(gaps.count(), 0, "{computed:?}");
    let (drafted, right) = drafts(&machine);
    assert!(drafted > 9 && drafted == right, "{right} of {drafted}");
}

/// Draws the next token each time, and notes at which temperatures.
#[derive(Default)]
struct Noting {
    temperatures: Arc<Mutex<Vec<f32>>>,
    output: StepOutput,
}

impl Executor for Noting {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let samples = plan.sequences.iter().flat_map(|sequence| &sequence.samples);
        let specs =
            samples.filter_map(|sample| if let Want::Token(spec) = &sample.want { Some(spec) } else { None });
        self.output.samples.clear();
        for spec in specs {
            self.temperatures.lock().expect("no panic").push(spec.params.temperature);
            self.output.samples.push(Sampled::Token { id: spec.position, logprobs: None });
        }
        Ok(())
    }

    fn begin_with_drafts(&mut self, plan: &StepPlan, _: &[u32]) -> Result<(), ExecutorError> {
        self.begin(plan)
    }

    fn finish(&mut self) -> Result<&StepOutput, ExecutorError> {
        Ok(&self.output)
    }
}

/// What it sees begins with a block of that one; a state would be that of a text it never saw.
#[test]
#[should_panic(expected = "a head keeps K and V of all positions")]
fn a_head_has_one_cache_group() {
    let reads = Reads::Features { width: 4 };
    let as_head = DrafterModel { group: 1, groups: 2, block_tokens: 4, positions: EVER, reads };
    DraftingExecutor::new(Noting::default(), Noting::default(), as_head, 100);
}

#[test]
fn drafts_are_drawn_at_their_share_of_the_temperature() {
    let (model, drafter) = (Noting::default(), Noting::default());
    let noted = [&model, &drafter].map(|executor| executor.temperatures.clone());
    let as_drafter =
        DrafterModel { group: 1, groups: 1, block_tokens: 4, positions: EVER, reads: Reads::Tokens };
    let mut executor = DraftingExecutor::new(model, drafter, as_drafter, 100).at_temperature(0.5);
    let guide: Arc<dyn Guide> = HashRules::default().guide(&[]);
    let plan = |step, id, temperature| {
        let params = Arc::new(SamplingParams { temperature, ..SamplingParams::greedy(9) });
        let sample = |row| {
            let (history, forbid_stop, guide) = (None, false, Some(GuideRef(guide.clone())));
            let spec = SampleSpec {
                params: params.clone(),
                seed: 1,
                position: 7 + row,
                history,
                forbid_stop,
                guide,
            };
            SamplePlan { row, want: Want::Token(spec) }
        };
        let sequence = SequencePlan {
            samples: (0..3).map(sample).collect(),
            drafter: DraftPlan {
                first_position: 6,
                tokens: [5].into_iter().collect(),
                drafts: 2,
                ..DraftPlan::default()
            },
            block_tables: vec![vec![0, 1], vec![0, 1]],
            ..SequencePlan::empty(SequenceId(id))
        };
        StepPlan { step, sequences: vec![Box::new(sequence)], ..StepPlan::default() }
    };
    // Another sequence in the same slot of tables has its own.
    for (step, (id, temperature)) in (1..).zip([(1, 0.8), (1, 0.8), (2, 0.6), (3, 0.0), (4, 0.2)]) {
        executor.execute(&plan(step, id, temperature)).expect("nothing fails");
        let [of_model, of_drafts] =
            noted.each_ref().map(|noted| std::mem::take(&mut *noted.lock().expect("no panic")));
        assert_eq!(of_model, [temperature; 3]);
        // The last draft's successor is drawn by nobody.
        assert_eq!(of_drafts, [temperature / 2.0; 2]);
        assert_eq!(Arc::strong_count(&guide), 1, "nobody holds it behind the step");
    }
}
