//! What time passes with, and whose steps' time is: every microsecond once.

use std::sync::Arc;

use folio_engine::request::{Event, RequestId};
use folio_engine::{Activity, Micros, Request, SamplingParams, SchedulerConfig};
use folio_kv::{Identity, Root, TenantId};
use folio_sim::machine::{Machine, VOCAB};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_model_len: 256,
        max_num_batched_tokens: 32,
        max_num_seqs: 8,
        ..SchedulerConfig::default()
    }
}

fn request(id: u64, tenant: u32, prompt: usize, max_tokens: u32) -> Request {
    let secret = [tenant as u8; 32];
    let identity = Identity {
        tenant: TenantId(tenant),
        tenant_secret: &secret,
        model_digest: &[2; 32],
        layout_digest: &[3; 32],
        extra: &[],
    };
    let prompt: Arc<[u32]> = (0..prompt as u32).map(|at| (at * 7 + id as u32) % VOCAB).collect();
    let sampling = SamplingParams::greedy(max_tokens);
    Request::new(RequestId(id), TenantId(tenant), Root::derive(&identity), prompt, sampling)
}

/// Microseconds that the events of a request tell.
fn told(events: &[Event]) -> f64 {
    let us = |event: &Event| match event {
        Event::Prompt { us, .. } => f64::from(*us),
        Event::Token { token, .. } => f64::from(token.us),
        Event::Finished { timing, .. } => f64::from(timing.us),
        Event::Pooled { .. } => 0.0,
    };
    events.iter().map(us).sum()
}

fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() <= 1e-3 * wanted.max(1.0), "{found}, {wanted} was wanted");
}

#[test]
fn what_events_tell_adds_up_to_the_time_of_the_steps() {
    for machine in [
        Machine::new(config(), 64, 4),
        Machine::new(config(), 64, 4).with_sampling(),
        Machine::new(config(), 14, 4),
    ] {
        let mut machine = machine;
        for id in 1..=6 {
            machine.submit(request(id, id as u32 % 3, 20 + 3 * id as usize, 5 + id as u32));
        }
        machine.submit(Request { n: 3, ..request(7, 9, 10, 4) });
        machine.run();
        let work = machine.scheduler.work().at(machine.now);
        assert_eq!(work.total_us(), machine.now.0, "every microsecond is of one kind");
        let steps: u64 = Activity::ALL[..Activity::STEPS].iter().map(|activity| work.us(*activity)).sum();
        let sum: f64 = machine.events.values().map(|events| told(events)).sum();
        near(sum + work.unattributed_us, steps as f64);
        assert!(work.unattributed_us < 0.01 * steps as f64, "{} of {steps}", work.unattributed_us);
        let rows: u64 = work.steps.iter().map(|step| step.rows()).sum();
        assert_eq!(
            rows,
            machine.scheduler.counters().iteration_tokens + machine.scheduler.counters().orphan_rows
        );
    }
}

#[test]
fn steps_are_of_prompts_of_decodes_or_of_both() {
    let mut machine = Machine::new(config(), 64, 4);
    machine.submit(request(1, 1, 12, 8));
    machine.step();
    machine.step();
    machine.submit(request(2, 2, 12, 1));
    machine.run();
    let work = machine.scheduler.work();
    let steps = |activity: Activity| work.steps[activity as usize];
    assert_eq!((steps(Activity::Prefill).steps, steps(Activity::Prefill).prompt_rows), (1, 12));
    assert_eq!(
        (
            steps(Activity::Mixed).steps,
            steps(Activity::Mixed).prompt_rows,
            steps(Activity::Mixed).decode_rows
        ),
        (1, 12, 1)
    );
    assert_eq!(steps(Activity::Decode).prompt_rows, 0);
    // One after the other reads what came before it.
    assert_eq!(steps(Activity::Prefill).kv_positions, 12);
    assert_eq!(steps(Activity::Prefill).attention, 12 * 13 / 2);
}

#[test]
fn what_rows_take_to_read_what_was_cached_is_told_apart() {
    let mut machine = Machine::new(config(), 64, 4);
    let mut ask = |id: u64| {
        machine.submit(Request { id: RequestId(id), ..request(1, 1, 100, 1) });
        machine.run();
        let told = match machine.events[&RequestId(id)].first() {
            Some(Event::Prompt { cached_tokens, us, cached_us, .. }) => (*cached_tokens, *us, *cached_us),
            other => panic!("{other:?}"),
        };
        (told, machine.scheduler.row_us())
    };
    let ((cached, us, cached_us), _) = ask(1);
    assert!((cached, cached_us) == (0, 0.0) && us > 0.0, "nothing was cached: {cached_us} of {us}");
    let ((cached, us, cached_us), (each, deep)) = ask(2);
    assert!(cached > 0 && deep > 0.0, "{cached}, {deep}");
    let (rows, first) = (f64::from(100 - cached), f64::from(cached));
    let read = deep * rows * first;
    let all = each * rows + read + deep * rows * (rows + 1.0) / 2.0;
    near(f64::from(cached_us), f64::from(us) * read / all);
    assert!(cached_us < us);
}

#[test]
fn who_is_cancelled_is_told_what_it_took() {
    let mut machine = Machine::new(config(), 64, 4);
    machine.submit(Request { n: 2, ..request(1, 1, 100, 8) });
    machine.step();
    machine.step();
    machine.cancel(1);
    machine.run();
    let work = machine.scheduler.work();
    near(told(&machine.events[&RequestId(1)]), (work.us(Activity::Prefill)) as f64);
}

#[test]
fn what_was_waited_for_is_told_by_reason() {
    // Room for one of them.
    let mut machine = Machine::new(SchedulerConfig { max_num_seqs: 1, ..config() }, 64, 4);
    machine.submit(request(1, 1, 8, 10));
    machine.submit(request(2, 2, 8, 1));
    machine.run();
    let timing = |id| match machine.events[&RequestId(id)].last() {
        Some(Event::Finished { timing, .. }) => **timing,
        other => panic!("{other:?}"),
    };
    let waited: u64 = timing(2).waited_us.iter().map(|(_, us)| us).sum();
    assert_eq!(waited, timing(2).scheduled.0 - timing(2).arrived.0);
    assert!(waited >= 9000, "while the other was computed: {waited}");
    assert_eq!(timing(1).waited_us.iter().map(|(_, us)| us).sum::<u64>(), 0);
    assert!(timing(2).finished > Micros(0));
}
