//! Steps under way, choices that are used later, and drafts of which none to all are right: with chunks of prompts among them, answers
//! that end while rows of them are under way, rules that nothing overlaps, prefix hits and preemption. All of that by itself, with window
//! groups in blocks of other sizes, and with masks that come late.

use folio_cpu::Quantize;
use folio_engine::{Drafter, SchedulerConfig};
use folio_model::Checkpoint;
use folio_model::backend::KvFormat;
use folio_model::testing::FIXTURES;
use folio_model::testing::heads::{HEADS, WITH_MTP, target};

use crate::harness::{Arrival, KINDS, Oracle, Script, Setup, World, batched, in_turn, prompt};
use crate::{blocks_for, mixed};

/// (depth, lag)
const OVERLAPS: [(usize, usize); 6] = [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3), (4, 3)];

/// What happened, so that a test can say that it was enough.
#[derive(Debug, Default)]
struct Seen {
    ahead: u64,
    orphans: u64,
    preemptions: u32,
    late: u64,
    cached: u32,
}

/// Overlaps with numbers of drafts, against the requests alone: those whose turn it is (see [`in_turn`]).
fn overlapped((number, fixture): (usize, &str), setup: Setup, late: bool, seen: &mut Seen) {
    let mut arrivals = mixed(7, 97);
    arrivals.iter_mut().for_each(|arrival| arrival.max_tokens += 6);
    if late {
        (0..).zip(&mut arrivals).for_each(|(id, arrival)| arrival.rules = (id % 3 != 1).then_some(id));
    }
    // Of two that say the same, the second finds what the first left; two end with their first token.
    arrivals.push(Arrival { step: 9, ..arrivals[1].clone() });
    arrivals.extend((0..2).map(|i| Arrival { step: 3 + 4 * i, ..Arrival::brief(prompt(50 + i, 9, 97)) }));
    let blocks = blocks_for(&arrivals);
    // The size of a group's blocks changes no bit.
    let oracle =
        Oracle::new(&mut World::new(fixture, Setup { window_blocks: 1, ..setup }, blocks), &arrivals);
    let mut world = World::new(fixture, setup, blocks);
    if late {
        world.late_masks();
    }
    let config = SchedulerConfig { max_num_batched_tokens: 48, ..batched(6) };
    for (at, (depth, lag)) in OVERLAPS.into_iter().enumerate() {
        for (column, most) in [0, 3, 20].into_iter().enumerate() {
            if !in_turn(number, at + column) {
                continue;
            }
            let what = format!("{fixture}, {setup:?}, late {late}, depth {depth}, lag {lag}, {most} drafts");
            world.forget();
            world.overlap(depth, lag, (most > 0).then(|| oracle.drafter(Script::Mixed(most))));
            let disturbed = (5 + at + most) as u64;
            let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                if now == disturbed {
                    scheduler.preempt_all(cache);
                }
            });
            oracle.check(&run, &what);
            let (drafts, right) = run.drafts;
            assert!(
                (drafts > 0, right > 0, right < drafts) == (most > 0, most > 0, most > 0),
                "{what}: {drafts} {right}"
            );
            assert!(depth > 1 || (run.ahead, run.orphans) == (0, 0), "{what}");
            assert_eq!(run.late > 0, late, "{what}: {} rows with a late mask", run.late);
            seen.ahead += run.ahead;
            seen.orphans += run.orphans;
            seen.preemptions += run.preemptions;
            seen.late += run.late;
            seen.cached += run.cached.iter().sum::<u32>();
        }
    }
}

#[test]
fn with_steps_under_way_and_drafts() {
    let kv = |kv| Setup { kv, ..Setup::PLAIN };
    let formats = [
        ("qwen3", kv(KvFormat::Int8)),
        ("llama3", kv(KvFormat::Fp8)),
        ("smollm2", kv(KvFormat::Int4)),
        ("phi3", Setup { quantize: Some(Quantize::Q4), ..Setup::PLAIN }),
    ];
    let plain = FIXTURES.iter().map(|fixture| (*fixture, Setup::PLAIN));
    let mut seen = Seen::default();
    let all = plain.chain(formats).enumerate();
    all.for_each(|(number, (fixture, setup))| overlapped((number, fixture), setup, false, &mut seen));
    assert!(seen.ahead > 100 && seen.orphans > 10 && seen.preemptions > 10, "{seen:?}");
}

/// Blocks of two to four times the positions of group 0's: hits end within them, and what is reused of one is copied.
#[test]
fn with_a_group_of_larger_blocks() {
    let (mut seen, mut groups) = (Seen::default(), 0);
    for fixture in FIXTURES {
        if !World::new(fixture, Setup::PLAIN, 8).recorder.has_windows() {
            continue;
        }
        groups += 1;
        let head_dim =
            Checkpoint::open(folio_model::testing::fixture(fixture)).expect("a fixture").config().head_dim;
        let int8 = if head_dim.is_multiple_of(4) { KvFormat::Int8 } else { KvFormat::F16 };
        for (window_blocks, kv) in [(2, KvFormat::F16), (3, int8), (4, KvFormat::F16)] {
            let setup = Setup { window_blocks, kv, ..Setup::PLAIN };
            overlapped((groups + window_blocks as usize, fixture), setup, false, &mut seen);
        }
    }
    assert!(
        groups > 1 && seen.ahead > 100 && seen.preemptions > 10 && seen.cached > 100,
        "{groups} {seen:?}"
    );
}

/// The row whose mask is late is computed again, to the same bits; everybody else goes on.
#[test]
fn with_masks_that_come_late() {
    let mut seen = Seen::default();
    for (number, fixture) in FIXTURES.iter().enumerate() {
        overlapped((number, fixture), Setup::PLAIN, true, &mut seen);
    }
    overlapped((0, "gemma3"), Setup { window_blocks: 2, ..Setup::PLAIN }, true, &mut seen);
    assert!(seen.late > 100 && seen.ahead > 100 && seen.preemptions > 10, "{seen:?}");
}

/// The engine's own drafters, on what each is expected to say, what it said and what others said, as many rows as are worth it: right for
/// long, and now and then wrong; with rules and late masks, chunks, hits and preemption, and steps under way.
#[test]
fn with_drafts_of_the_drafters() {
    let config = SchedulerConfig { max_num_batched_tokens: 48, ..batched(6) };
    let (mut drafts, mut right, mut preemptions) = (0, 0, 0);
    for fixture in KINDS {
        let mut arrivals = mixed(8, 97);
        (0..).zip(&mut arrivals).for_each(|(id, arrival)| {
            arrival.max_tokens += 20;
            arrival.rules = (id % 4 == 3).then_some(id);
        });
        arrivals.push(Arrival { step: 9, ..arrivals[1].clone() });
        let blocks = blocks_for(&arrivals);
        let oracle = Oracle::new(&mut World::new(fixture, Setup::PLAIN, blocks), &arrivals);
        let mut world = World::new(fixture, Setup::PLAIN, blocks);
        for (drafter, wrong, depth, late) in [
            (Drafter::Suffix, 5, 1, false),
            (Drafter::Ngram, 9, 1, false),
            (Drafter::Suffix, usize::MAX, 2, false),
            (Drafter::Ngram, 7, 1, true),
        ] {
            world.forget();
            world.overlap(depth, 1, None);
            world.speculate(oracle.speculation(&arrivals, drafter, wrong));
            if late {
                world.late_masks();
            }
            let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                if now == 12 {
                    scheduler.preempt_all(cache);
                }
            });
            let what =
                format!("{fixture}, {drafter:?}, one token in {wrong} wrong, depth {depth}, late {late}");
            oracle.check(&run, &what);
            assert!(run.drafts.1 > 0, "{what}");
            drafts += run.drafts.0;
            right += run.drafts.1;
            preemptions += run.preemptions;
        }
    }
    assert!(right > 500 && drafts > right + 100 && preemptions > 10, "{drafts} {right} {preemptions}");
}

/// A model that proposes drafts: the same one, which is right wherever nothing restricts the choice, and another, which hardly ever is; with rules
/// and late masks, chunks, hits and preemption, steps under way, and room for some of its KV or for all.
#[test]
fn with_drafts_of_a_model() {
    let config = SchedulerConfig { max_num_batched_tokens: 48, ..batched(6) };
    let (mut drafts, mut right, mut preemptions) = (0, 0, 0);
    for fixture in KINDS {
        let mut arrivals = mixed(8, 97);
        (0..).zip(&mut arrivals).for_each(|(id, arrival)| {
            arrival.max_tokens += 20;
            arrival.rules = (id % 4 == 3).then_some(id);
        });
        arrivals.push(Arrival { step: 9, ..arrivals[1].clone() });
        let blocks = blocks_for(&arrivals);
        let mut world = World::new(fixture, Setup::PLAIN, blocks);
        let oracle = Oracle::new(&mut world, &arrivals);
        for (draft, depth, late, of_draft) in
            [(fixture, 1, false, blocks), (FIXTURES[0], 2, false, blocks), (fixture, 1, true, blocks / 3)]
        {
            let draft = if world.recorder.has_windows() { FIXTURES[0] } else { draft };
            world.draft_by(draft, Setup::PLAIN, of_draft);
            world.overlap(depth, 1, None);
            world.on_time();
            world.speculate(oracle.speculation(&arrivals, Drafter::Model, usize::MAX));
            if late {
                world.late_masks();
            }
            let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                if now == 12 {
                    scheduler.preempt_all(cache);
                }
            });
            let what = format!("{fixture} with {draft}, depth {depth}, late {late}, {of_draft} blocks");
            oracle.check(&run, &what);
            assert!(run.drafts.0 > 0, "{what}");
            drafts += run.drafts.0;
            right += run.drafts.1;
            preemptions += run.preemptions;
        }
    }
    assert!(right > 500 && drafts > right + 100 && preemptions > 10, "{drafts} {right} {preemptions}");
}

/// EAGLE-3 and MTP heads that propose drafts from what the model computes, in each form, which were never trained and are hardly ever right: with rules and late masks,
/// chunks, hits and preemption, steps under way, 1 and 2 threads, and room for some of their KV or for all.
#[test]
fn with_drafts_of_a_head() {
    let eagle = HEADS.iter().map(|head| (*head, Drafter::Eagle3, target(head)));
    let forms = WITH_MTP.iter().map(|head| (*head, Drafter::Mtp, "qwen3".to_owned()));
    let published = ["qwen3_5_moe", "glm4_moe_lite"].map(|name| (name, Drafter::Mtp, name.to_owned()));
    let (mut drafts, mut preemptions, mut cached) = (0, 0, 0);
    for (head, drafter, fixture) in eagle.chain(forms).chain(published) {
        let mut arrivals = mixed(8, 97);
        (0..).zip(&mut arrivals).for_each(|(id, arrival)| {
            arrival.max_tokens += 20;
            arrival.rules = (id % 4 == 3).then_some(id);
        });
        arrivals.push(Arrival { step: 9, ..arrivals[1].clone() });
        let blocks = blocks_for(&arrivals);
        // What is tapped changes no bit of the model.
        let oracle = Oracle::new(&mut World::new(&fixture, Setup::PLAIN, blocks), &arrivals);
        for (rows, depth, lag, late, threads, of_head) in [
            (48, 1, 1, false, 2, blocks),
            (48, 2, 1, false, 1, blocks),
            (17, 2, 1, true, 2, blocks / 3),
            (512, 2, 3, false, 2, blocks),
        ] {
            let setup = Setup { threads, ..Setup::PLAIN };
            let mut world = match drafter {
                Drafter::Mtp => World::with_mtp(head, setup, blocks, of_head),
                _ => World::with_head(head, setup, blocks, of_head),
            };
            world.overlap(depth, lag, None);
            world.speculate(oracle.speculation(&arrivals, drafter, usize::MAX));
            if late {
                world.late_masks();
            }
            let config = SchedulerConfig { max_num_batched_tokens: rows, ..batched(6) };
            for again in [false, true] {
                let run = world.run_disturbed(&config, &arrivals, &mut |now, scheduler, cache| {
                    if now == 12 {
                        scheduler.preempt_all(cache);
                    }
                });
                let what =
                    format!("{head}, {rows} rows, depth {depth}, lag {lag}, late {late}, again {again}");
                oracle.check(&run, &what);
                assert!(run.drafts.0 > 0, "{what}");
                drafts += run.drafts.0;
                preemptions += run.preemptions;
                cached += run.cached.iter().sum::<u32>();
            }
        }
    }
    assert!(drafts > 300 && preemptions > 10 && cached > 300, "{drafts} {preemptions} {cached}");
}
