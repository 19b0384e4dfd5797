//! Steps under way, choices that are used later, and drafts of which none to all are right: with chunks of prompts among them, answers
//! that end while rows of them are under way, rules that nothing overlaps, prefix hits and preemption. All of that by itself, with window
//! groups in blocks of other sizes, and with masks that come late.

use folio_cpu::Quantize;
use folio_engine::SchedulerConfig;
use folio_model::Checkpoint;
use folio_model::backend::KvFormat;
use folio_model::testing::FIXTURES;

use crate::harness::{Arrival, Oracle, Script, Setup, World, batched, in_turn, prompt};
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

/// Overlaps with numbers of drafts, masks in time and late, against the requests alone: those whose turn it is (see [`in_turn`]).
fn overlapped((number, fixture): (usize, &str), setup: Setup, seen: &mut Seen) {
    let mut arrivals = mixed(7, 97);
    for (id, arrival) in (0..).zip(&mut arrivals) {
        arrival.max_tokens += 6;
        arrival.rules = (id % 3 != 1).then_some(id);
    }
    // Of two that say the same, the second finds what the first left; two end with their first token.
    arrivals.push(Arrival { step: 9, ..arrivals[1].clone() });
    arrivals.extend((0..2).map(|i| Arrival { step: 3 + 4 * i, ..Arrival::brief(prompt(50 + i, 9, 97)) }));
    let blocks = blocks_for(&arrivals);
    // The size of a group's blocks changes no bit.
    let oracle =
        Oracle::new(&mut World::new(fixture, Setup { window_blocks: 1, ..setup }, blocks), &arrivals);
    let mut world = World::new(fixture, setup, blocks);
    let config = SchedulerConfig { max_num_batched_tokens: 48, ..batched(6) };
    for (at, (depth, lag)) in OVERLAPS.into_iter().enumerate() {
        for (column, most) in [0, 3, 20].into_iter().enumerate() {
            if !in_turn(number, at + column) {
                continue;
            }
            let late = (number / 3 + at + column / 2).is_multiple_of(2);
            let what = format!("{fixture}, {setup:?}, late {late}, depth {depth}, lag {lag}, {most} drafts");
            world.forget();
            world.overlap(depth, lag, (most > 0).then(|| oracle.drafter(Script::Mixed(most))));
            match late {
                true => world.late_masks(),
                false => world.on_time(),
            }
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
    all.for_each(|(number, (fixture, setup))| overlapped((number, fixture), setup, &mut seen));
    assert!(seen.ahead > 100 && seen.orphans > 10 && seen.preemptions > 10 && seen.late > 100, "{seen:?}");
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
            if !in_turn(groups, window_blocks as usize) {
                continue;
            }
            let setup = Setup { window_blocks, kv, ..Setup::PLAIN };
            overlapped((groups, fixture), setup, &mut seen);
        }
    }
    assert!(
        groups > 1 && seen.ahead > 100 && seen.preemptions > 10 && seen.cached > 100,
        "{groups} {seen:?}"
    );
}
