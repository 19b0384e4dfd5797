//! Each promise of the scheduler, alone and in the open. `folio-sim` tests them all at once.

use std::sync::Arc;

use folio_engine::request::{Event, Request, RequestId};
use folio_engine::{AdmissionPolicy, FinishReason, Micros, SchedulerConfig, WaitingFor};
use folio_kv::TenantId;
use folio_sim::Machine;
use folio_sim::scenario::{request, root, small, text};

fn step_of_first_token(machine: &mut Machine, id: u64) -> usize {
    while machine.tokens(id, 0).is_empty() {
        machine.step();
    }
    machine.plans().len()
}

#[test]
fn decodes_get_their_token_in_every_step_beside_a_long_prompt() {
    let mut machine = Machine::new(small(), 200, 16);
    machine.submit(request(1, &text(1, 10), 100));
    machine.step();
    machine.submit(request(2, &text(2, 900), 2));
    let before = machine.tokens(1, 0).len();
    for step in 1..=50 {
        let plan = machine.step();
        let prompt: usize = plan.sequences.iter().map(|s| s.tokens.len()).filter(|n| *n > 1).sum();
        assert!(prompt <= 16, "{prompt} prompt tokens beside a decode");
        assert_eq!(machine.tokens(1, 0).len(), before + step, "the stream stalled in step {step}");
    }
    assert!(machine.computed() > 50 * 16, "the prompt was not computed beside the decodes");
}

#[test]
fn a_huge_prompt_does_not_block_short_ones() {
    let mut machine = Machine::new(small(), 200, 16);
    machine.submit(request(1, &text(1, 1000), 4));
    machine.step();
    for id in 2..6 {
        machine.submit(request(id, &text(id as u32, 20), 1));
    }
    for _ in 0..8 {
        machine.step();
    }
    for id in 2..6 {
        assert_eq!(machine.tokens(id, 0).len(), 1, "request {id} waits behind the huge prompt");
    }
    assert!(machine.tokens(1, 0).is_empty());
}

#[test]
fn a_huge_prompt_is_not_starved_by_short_ones() {
    let mut machine = Machine::new(small(), 200, 16);
    machine.submit(request(1, &text(1, 600), 1));
    for id in 2..200 {
        // More short prompts than the budget can ever take.
        for extra in 0..3 {
            machine.submit(request(id * 10 + extra, &text((id * 10 + extra) as u32, 60), 1));
        }
        machine.step();
        if !machine.tokens(1, 0).is_empty() {
            assert!(machine.plans().len() <= 600 / 32 + 2, "took {} steps", machine.plans().len());
            return;
        }
    }
    panic!("the oldest prompt never finished");
}

#[test]
fn a_shared_prefix_is_computed_once() {
    let mut machine = Machine::new(small(), 200, 16);
    let prefix = text(1, 320);
    let mut requests = Vec::new();
    for id in 1..=4 {
        let mut prompt = prefix.clone();
        prompt.extend(text(10 + id as u32, 8));
        requests.push(request(id, &prompt, 2));
    }
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.run();
    requests.iter().for_each(|request| machine.assert_as_alone(request));
    assert_eq!(machine.computed(), 320 + 4 * 8 + 4, "prefix once, then each its own");
    assert_eq!(machine.cached_tokens(1), Some(0));
    for id in 2..=4 {
        assert_eq!(machine.cached_tokens(id), Some(320));
    }
    assert_eq!(machine.scheduler.counters().waits[WaitingFor::SharedPrefix], 3);
}

/// The block with a prompt's last token is computed by each of them: nobody waits for another's.
#[test]
fn equal_prompts_of_whole_blocks_are_admitted_together() {
    let mut machine = Machine::new(small(), 200, 16);
    let prompt = text(1, 64);
    machine.submit(request(1, &prompt, 1));
    machine.run();
    (2..=5).for_each(|id| machine.submit(request(id, &prompt, 3)));
    assert_eq!(machine.step().sequences.len(), 4, "all of it but the last block is there");
    machine.run();
    assert_eq!(machine.scheduler.counters().waits[WaitingFor::SharedPrefix], 0);
}

#[test]
fn tenants_do_not_share_a_prefix() {
    let mut machine = Machine::new(small(), 200, 16);
    let prompt = text(1, 160);
    machine.submit(request(1, &prompt, 2));
    machine.submit(Request { tenant: TenantId(1), root: root(TenantId(1)), ..request(2, &prompt, 2) });
    machine.run();
    assert_eq!(machine.cached_tokens(2), Some(0));
    assert_eq!(
        machine.scheduler.counters().waits[WaitingFor::SharedPrefix],
        0,
        "waiting for a tenant tells about it"
    );
    assert_eq!(machine.computed(), 2 * 161);
}

/// Neither for a place that is free nor for better priority.
#[test]
fn a_static_batch_is_joined_by_nobody_until_all_of_it_have_ended() {
    for admission in [AdmissionPolicy::Static, AdmissionPolicy::Continuous] {
        let config = SchedulerConfig { admission, max_num_seqs: 3, ..small() };
        let mut machine = Machine::new(config, 200, 16);
        let answers = [4, 20, 9, 6, 3, 5];
        let requests = answers.into_iter().zip(1u64..);
        let mut requests: Vec<Request> =
            requests.map(|(tokens, id)| request(id, &text(id as u32, 8), tokens)).collect();
        requests[5].priority = -1;
        requests[..5].iter().for_each(|request| machine.submit(request.clone()));
        assert_eq!(machine.step().sequences.len(), 3, "a batch is as many as there are places");
        machine.submit(requests[5].clone());
        let mut joined = false;
        while machine.finished(2).is_empty() {
            machine.step();
            joined |= (4..=6).any(|id| !machine.tokens(id, 0).is_empty());
        }
        let preempted = machine.scheduler.counters().preemptions > 0;
        let continuous = admission == AdmissionPolicy::Continuous;
        assert_eq!((joined, preempted), (continuous, continuous), "{admission:?}");
        machine.run();
        requests.iter().for_each(|request| machine.assert_as_alone(request));
    }
}

#[test]
fn when_the_leader_of_a_prefix_dies_the_next_goes_on() {
    for dies_after in 0..6 {
        let mut machine = Machine::new(small(), 200, 16);
        let prompt = text(1, 320);
        let followers = [request(2, &prompt, 3), request(3, &prompt, 3)];
        machine.submit(request(1, &prompt, 3));
        followers.iter().for_each(|follower| machine.submit(follower.clone()));
        for _ in 0..dies_after {
            machine.step();
        }
        machine.cancel(1);
        machine.run();
        followers.iter().for_each(|follower| machine.assert_as_alone(follower));
        // What the dead leader had published is not computed again.
        assert!(machine.computed() <= 320 + 64 + 2 * 17 + 6, "computed {}", machine.computed());
    }
}

#[test]
fn choices_share_the_prompt_and_differ() {
    let mut machine = Machine::new(small(), 200, 16);
    let mut many = request(1, &text(1, 100), 20);
    many.n = 4;
    many.sampling.temperature = 1.0;
    many.sampling.seed = 5;
    machine.submit(many.clone());
    machine.run();
    machine.assert_as_alone(&many);
    assert_eq!(machine.computed(), 100 + 4 * 19, "the prompt once, then 19 more tokens of each choice");
    let outputs: std::collections::BTreeSet<_> = (0..4).map(|choice| machine.tokens(1, choice)).collect();
    assert_eq!(outputs.len(), 4);
    assert!(machine.cache.stats().copies >= 3, "the tail is copied on write");
}

#[test]
fn choices_beyond_the_places_wait_and_are_right() {
    let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 2, ..small() }, 200, 16);
    let mut many = request(1, &text(1, 40), 12);
    many.n = 7;
    many.sampling.temperature = 1.0;
    machine.submit(many.clone());
    machine.run();
    machine.assert_as_alone(&many);
}

#[test]
fn a_preempted_sequence_resumes_with_the_same_tokens() {
    // Three grow at once in a pool for little more than one.
    let mut machine = Machine::new(small(), 24, 4);
    let requests: Vec<Request> = (1..=3).map(|id| request(id, &text(id as u32, 20), 60)).collect();
    requests.iter().for_each(|request| machine.submit(request.clone()));
    machine.run();
    let counters = machine.scheduler.counters();
    assert!(counters.preemptions > 0, "the pool was not tight enough to prove anything");
    requests.iter().for_each(|request| machine.assert_as_alone(request));
}

#[test]
fn room_is_left_for_the_next_tokens_of_each_and_no_more_than_it_may_generate() {
    // Each takes 5 blocks of 24 for its prompt and 20 for all it may become.
    let most_at_once = |headroom_tokens, max_tokens| {
        let mut machine = Machine::new(SchedulerConfig { headroom_tokens, ..small() }, 24, 4);
        (1..=4).for_each(|id| machine.submit(request(id, &text(id as u32, 20), max_tokens)));
        let mut most = 0;
        while {
            machine.step();
            machine.scheduler.has_work()
        } {
            most = most.max(machine.scheduler.tables().count());
        }
        most
    };
    // At first a fifth of what each may generate.
    assert_eq!([0, 12, 18, 30].map(|headroom| most_at_once(headroom, 60)), [3, 3, 2, 1]);
    assert_eq!([0, 4].map(|headroom| most_at_once(headroom, 15)), [4, 4]);
    assert_eq!(most_at_once(u32::MAX, 5), 4, "headroom beyond max_tokens");
}

#[test]
fn none_of_its_tenant_goes_before_who_was_preempted() {
    let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 3, ..small() }, 24, 4);
    let long: Vec<Request> = (1..=3).map(|id| request(id, &text(id as u32, 20), 60)).collect();
    long.iter().for_each(|request| machine.submit(request.clone()));
    while machine.scheduler.counters().preemptions == 0 {
        machine.step();
    }
    // Two places are free, one at most for who was preempted; these would fit into what is left.
    let short: Vec<Request> = (4..=9).map(|id| request(id, &text(id as u32, 3), 2)).collect();
    short.iter().for_each(|request| machine.submit(request.clone()));
    let holding =
        |machine: &Machine| -> Vec<u64> { machine.scheduler.tables().map(|(id, ..)| id.0).collect() };
    while machine.scheduler.has_work() {
        let before = holding(&machine);
        let waits = (1..=3).any(|id| machine.finished(id).is_empty() && !before.contains(&id));
        machine.step();
        let after = holding(&machine);
        let still = (1..=3).any(|id| machine.finished(id).is_empty() && !after.contains(&id));
        let comes = after.iter().any(|id| *id > 3 && !before.contains(id));
        assert!(!(waits && still && comes), "{before:?} {after:?}\n{:?}", machine.scheduler);
    }
    long.iter().chain(&short).for_each(|request| machine.assert_as_alone(request));
}

#[test]
fn preemptions_of_one_request_are_capped() {
    for max_preemptions in 0..4 {
        let mut machine = Machine::new(SchedulerConfig { max_preemptions, ..small() }, 24, 4);
        let requests: Vec<Request> = (1..=8).map(|id| request(id, &text(id as u32, 20), 60)).collect();
        requests.iter().for_each(|request| machine.submit(request.clone()));
        // `check` after each step fails on a sequence preempted too often.
        machine.run();
        requests.iter().for_each(|request| machine.assert_as_alone(request));
        let preemptions = machine.scheduler.counters().preemptions;
        assert!(
            preemptions <= 8 * u64::from(max_preemptions),
            "{preemptions} with a cap of {max_preemptions}"
        );
        assert!(max_preemptions == 0 || preemptions > 0);
        // Each is told with the time until the sequence ran again.
        let ended = machine.events.values().flatten().filter_map(|event| match event {
            Event::Finished { timing, .. } => Some(timing),
            _ => None,
        });
        let mut told = 0;
        for timing in ended {
            let pauses: Vec<_> = timing.pauses.iter().filter(|(gone, _)| gone.0 > 0).collect();
            assert_eq!(pauses.len() as u32, timing.preemptions);
            assert!(pauses.iter().all(|(gone, back)| back > gone && *back <= timing.finished), "{timing:?}");
            told += pauses.len() as u64;
        }
        assert_eq!(told, preemptions);
    }
}

#[test]
fn better_priority_runs_first_and_displaces() {
    let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 1, ..small() }, 100, 16);
    let low = Request { priority: 5, ..request(1, &text(1, 40), 50) };
    machine.submit(low.clone());
    for _ in 0..5 {
        machine.step();
    }
    let normal = request(2, &text(2, 40), 5);
    let high = Request { priority: -1, ..request(3, &text(3, 40), 5) };
    machine.submit(normal.clone());
    machine.submit(high.clone());
    let high_first = step_of_first_token(&mut machine, 3);
    assert!(machine.tokens(2, 0).is_empty());
    let normal_first = step_of_first_token(&mut machine, 2);
    assert!(high_first < normal_first);
    assert_ne!(machine.finished(1), vec![(0, FinishReason::Length)], "the low one was displaced");
    machine.run();
    for request in [&low, &normal, &high] {
        machine.assert_as_alone(request);
    }
    assert!(machine.scheduler.counters().preemptions >= 1);
}

/// Two tenants run in all the places there are; a third of a better class comes. Who gives way, where the later of the two said this of its
/// priority.
fn gives_way(priority: i32) -> Vec<u64> {
    let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 2, ..small() }, 100, 8);
    let of = |tenant: u32, request: Request| Request {
        tenant: TenantId(tenant),
        root: root(TenantId(tenant)),
        ..request
    };
    machine.submit(of(1, request(1, &text(1, 40), 90)));
    machine.submit(Request { priority, ..of(2, request(2, &text(2, 40), 90)) });
    for _ in 0..5 {
        machine.step();
    }
    machine.submit(Request { class: -1, ..of(3, request(3, &text(3, 16), 60)) });
    step_of_first_token(&mut machine, 3);
    assert_eq!(machine.scheduler.counters().preemptions, 1);
    let told = [1, 2].map(|id| machine.tokens(id, 0).len());
    machine.step();
    (1..3).filter(|id| machine.tokens(*id, 0).len() == told[*id as usize - 1]).collect()
}

#[test]
fn a_priority_spares_nobody_of_another_tenant() {
    let plain = gives_way(0);
    assert_eq!(plain.len(), 1);
    for priority in [-1_000_000, 1_000_000] {
        assert_eq!(gives_way(priority), plain, "with priority {priority}");
    }
}

/// A sequence of a better class, of a third tenant, runs dry while two others run with as much at stake; nobody else needs a block in that
/// step. Who loses its own, of these tenants and with these priorities.
fn victim_of_a_better_class(tenants: [u32; 2], priorities: [i32; 2]) -> Vec<u64> {
    let mut machine = Machine::new(small(), 11, 8);
    let of = |tenant: u32, request: Request| Request {
        tenant: TenantId(tenant),
        root: root(TenantId(tenant)),
        ..request
    };
    machine.submit(Request { class: -1, ..of(3, request(3, &text(3, 16), 40)) });
    for (id, (tenant, priority)) in (1..).zip(tenants.into_iter().zip(priorities)) {
        machine.submit(Request { priority, ..of(tenant, request(id, &text(id as u32, 18), 40)) });
    }
    // The two take their fourth blocks for position 24 in step 8, and with them the last; the third needs its own in step 10.
    for step in 1..10 {
        assert_eq!(machine.step().sequences.len(), 3, "in step {step}");
    }
    // Sequences are numbered as they come, the third first.
    let planned: Vec<u64> = machine.step().sequences.iter().map(|sequence| sequence.id.0 - 1).collect();
    assert_eq!(machine.scheduler.counters().preemptions, 1);
    (0..3).filter(|id| !planned.contains(id)).collect()
}

#[test]
fn who_runs_dry_asks_for_the_priority_of_no_other_tenant() {
    let [worse, better] = [1_000_000, -1_000_000];
    for priorities in [[0, 0], [0, better], [worse, 0], [worse, better], [better, worse]] {
        assert_eq!(
            victim_of_a_better_class([1, 2], priorities),
            [2],
            "with {priorities:?}: the last that came"
        );
    }
    // The control: of one tenant it is its own word.
    assert_eq!(victim_of_a_better_class([1, 1], [worse, better]), [1]);
    assert_eq!(victim_of_a_better_class([1, 1], [better, worse]), [2]);
}

#[test]
fn a_large_request_is_not_passed_for_ever() {
    let limits = SchedulerConfig { max_bypasses: 4, guarantee_completion: true, ..small() };
    let mut machine = Machine::new(limits, 24, 4);
    for id in 100..104 {
        machine.submit(request(id, &text(id as u32, 4), 12));
    }
    machine.step();
    machine.submit(request(1, &text(1, 60), 20));
    for id in 200..400 {
        machine.submit(request(id, &text(id as u32, 4), 12));
    }
    step_of_first_token(&mut machine, 1);
    let done = (200..400).filter(|id| !machine.finished(*id).is_empty()).count();
    assert!(done <= 8, "{done} small ones passed it");
}

#[test]
fn deadlines_end_what_runs_and_what_waits() {
    let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 1, ..small() }, 100, 16);
    machine.submit(Request { deadline: Some(Micros(10_000)), ..request(1, &text(1, 10), 500) });
    machine.submit(Request { deadline: Some(Micros(5_000)), ..request(2, &text(2, 10), 5) });
    machine.submit(request(3, &text(3, 10), 5));
    machine.run();
    assert_eq!(machine.finished(2), [(0, FinishReason::Deadline)], "it waited until its deadline");
    assert_eq!(machine.finished(1), [(0, FinishReason::Deadline)]);
    assert_eq!(machine.tokens(1, 0).len(), 10, "it ran until its deadline");
    assert_eq!(machine.finished(3), [(0, FinishReason::Length)]);
}

#[test]
fn cancellation_at_every_step_frees_everything_within_one() {
    let mut forked = request(1, &text(1, 50), 10);
    forked.n = 3;
    forked.sampling.temperature = 1.0;
    for at in 0..20 {
        let mut machine = Machine::new(SchedulerConfig { max_num_batched_tokens: 16, ..small() }, 100, 4);
        machine.submit(forked.clone());
        for _ in 0..at {
            machine.step();
        }
        let running = machine.finished(1).len() < 3;
        machine.cancel(1);
        machine.step();
        assert_eq!(machine.cache.stats().active_blocks, 0, "cancelled before step {at}");
        assert_eq!(machine.finished(1).len(), 3, "one end for each choice");
        if running {
            assert!(machine.finished(1).iter().all(|(_, reason)| *reason == FinishReason::Cancelled));
        }
        assert!(!machine.scheduler.has_work());
    }
}

#[test]
fn prompt_logprobs_are_computed_even_if_the_prompt_is_cached() {
    let mut machine = Machine::new(small(), 100, 4);
    let prompt = text(1, 90);
    machine.submit(request(1, &prompt, 2));
    machine.run();
    let scored = Request { prompt_logprobs: Some(2), ..request(2, &prompt, 2) };
    machine.submit(scored.clone());
    machine.run();
    let Some(Event::Prompt { cached_tokens, prompt_logprobs, .. }) = machine.events[&RequestId(2)].first()
    else {
        panic!("no prompt event")
    };
    assert_eq!(*cached_tokens, 0);
    assert_eq!(*prompt_logprobs, machine.alone(&scored).prompt_logprobs);
    assert_eq!(prompt_logprobs.len(), 89);
}

#[test]
fn max_tokens_zero_computes_the_prompt_and_nothing_else() {
    let mut machine = Machine::new(small(), 100, 4);
    let scored = Request { prompt_logprobs: Some(0), n: 2, ..request(1, &text(1, 30), 0) };
    machine.submit(scored);
    machine.run();
    assert_eq!(machine.finished(1), [(0, FinishReason::Length), (1, FinishReason::Length)]);
    assert_eq!(machine.computed(), 30);
}

#[test]
fn min_tokens_stop_tokens_and_length() {
    let mut machine = Machine::new(SchedulerConfig { max_model_len: 40, ..small() }, 100, 4);
    let all: Arc<[u32]> = (0..29).collect();
    let mut stops = request(1, &text(1, 10), 20);
    stops.sampling.stop_token_ids = all.clone();
    machine.submit(stops);
    let mut stuck = request(2, &text(2, 10), 20);
    stuck.sampling.eos_token_ids = all;
    stuck.sampling.min_tokens = 3;
    machine.submit(stuck);
    machine.submit(request(3, &text(3, 30), 10));
    machine.run();
    assert_eq!(machine.finished(1), [(0, FinishReason::Stop)]);
    assert_eq!(machine.tokens(1, 0).len(), 1);
    assert_eq!(
        machine.finished(2),
        [(0, FinishReason::Error)],
        "every token is a stop token before min_tokens"
    );
    assert_eq!(machine.finished(3), [(0, FinishReason::Length)]);
    assert_eq!(machine.tokens(3, 0).len(), 10);
}
