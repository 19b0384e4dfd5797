use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const BOUNDS: ProcessLimits = ProcessLimits {
    memory: 10,
    waiting: 4,
    patience: Duration::from_secs(60),
    start: Duration::from_secs(100),
};

fn processes(needs: &[u64]) -> Processes {
    let wants = |need: &u64| Wants { need: *need, keep_alive: Some(s(300)) };
    Processes::new(BOUNDS, needs.iter().map(wants))
}

/// The one order there is.
fn only(processes: &mut Processes) -> Order {
    let mut orders = processes.orders();
    assert_eq!(orders.len(), 1, "{orders:?}");
    orders.remove(0)
}

fn started(processes: &mut Processes) -> Life {
    match only(processes) {
        Order::Start(life) => life,
        other => panic!("{other:?}"),
    }
}

/// Asks for a model that is stopped and fits, and has it ready and granted.
fn granted(processes: &mut Processes, model: usize, now: Duration) -> Life {
    let id = processes.ask(model, now).unwrap();
    let life = started(processes);
    processes.ready(life, now);
    assert_eq!(only(processes), Order::Grant(id, life));
    life
}

#[test]
fn many_first_requests_start_one_process_and_all_are_granted_when_it_is_ready() {
    let mut p = processes(&[4]);
    let ids: Vec<WaitId> = (0..4).map(|_| p.ask(0, s(0)).unwrap()).collect();
    let life = started(&mut p);
    assert_eq!(p.ask(0, s(1)), Err(NotGranted::Full { waiting: 4 }));
    p.ready(life, s(2));
    let grants: Vec<Order> = ids.iter().map(|id| Order::Grant(*id, life)).collect();
    assert_eq!(p.orders(), grants);
    assert_eq!(p.told(0).busy, 4);
}

#[test]
fn one_whose_clients_left_during_the_start_stays_for_its_time_and_goes() {
    let mut p = processes(&[4]);
    let id = p.ask(0, s(0)).unwrap();
    let life = started(&mut p);
    p.leave(id, s(1));
    p.ready(life, s(2));
    assert_eq!((p.orders(), p.due(s(2))), (vec![], Some(s(302))));
    p.tick(s(302));
    assert_eq!(only(&mut p), Order::Stop(life));
    p.ended(life, "", s(303));
    assert_eq!(p.taken(), 0);
}

#[test]
fn an_idle_one_goes_after_its_time_and_a_request_may_say_another() {
    let mut p = processes(&[4]);
    let life = granted(&mut p, 0, s(0));
    p.tick(s(1000));
    assert_eq!(p.orders(), [], "it is busy");
    p.release(life, None, s(1000));
    assert_eq!(p.told(0).expires, Some(s(1300)));
    let again = |p: &mut Processes, now| {
        let id = p.ask(0, now).unwrap();
        assert_eq!(only(p), Order::Grant(id, life));
    };
    again(&mut p, s(1001));
    p.release(life, Some(None), s(1001));
    assert_eq!((p.told(0).expires, p.due(s(1001))), (None, None));
    p.tick(s(1_000_000));
    assert_eq!(p.orders(), []);
    again(&mut p, s(1_000_001));
    p.release(life, Some(Some(s(0))), s(1_000_001));
    assert_eq!(only(&mut p), Order::Stop(life));
}

#[test]
fn what_is_only_looked_at_stays_no_longer_for_it_and_no_shorter() {
    let mut p = processes(&[4]);
    assert_eq!(p.look(0), None, "nothing is started for a look");
    let life = granted(&mut p, 0, s(0));
    p.release(life, None, s(0));
    assert_eq!(p.look(0), Some(life));
    p.tick(s(300));
    assert_eq!(p.orders(), [], "whoever looks gets to the end");
    p.looked(life, s(301));
    assert_eq!(only(&mut p), Order::Stop(life));
    assert_eq!(p.look(0), None);
}

#[test]
fn the_least_recently_used_idle_one_gives_way_and_its_memory_counts_until_it_has_ended() {
    let mut p = processes(&[4, 4, 5]);
    let first = granted(&mut p, 0, s(0));
    let second = granted(&mut p, 1, s(1));
    p.release(second, None, s(2));
    p.release(first, None, s(3));
    let id = p.ask(2, s(4)).unwrap();
    assert_eq!(only(&mut p), Order::Stop(second));
    p.tick(s(5));
    assert_eq!((p.orders(), p.taken()), (vec![], 8), "its end is waited for, and nobody else goes");
    p.ended(second, "", s(6));
    let third = started(&mut p);
    p.ready(third, s(7));
    assert_eq!(only(&mut p), Order::Grant(id, third));
    assert_eq!(p.taken(), 9);
}

#[test]
fn busy_ones_are_waited_for_and_closed_only_after_a_while() {
    let mut p = processes(&[6, 6]);
    let first = granted(&mut p, 0, s(0));
    let second = p.ask(1, s(1)).unwrap();
    // At first whoever wants what is there gets it.
    let more = p.ask(0, s(2)).unwrap();
    assert_eq!(only(&mut p), Order::Grant(more, first));
    assert_eq!(p.due(s(2)), Some(s(1) + PATIENCE));
    p.tick(s(1) + PATIENCE);
    let behind = p.ask(0, s(7)).unwrap();
    assert_eq!(p.orders(), [], "it takes nothing new from behind");
    p.release(first, None, s(8));
    assert_eq!(p.orders(), []);
    p.release(first, None, s(9));
    assert_eq!(only(&mut p), Order::Stop(first));
    p.ended(first, "", s(10));
    let life = started(&mut p);
    p.ready(life, s(11));
    // Both in their turn: who waited first is granted before the model goes again for who is behind.
    assert_eq!(only(&mut p), Order::Grant(second, life));
    p.tick(s(7) + PATIENCE);
    p.release(life, None, s(20));
    assert_eq!(only(&mut p), Order::Stop(life));
    p.ended(life, "", s(21));
    let again = started(&mut p);
    p.ready(again, s(22));
    assert_eq!(only(&mut p), Order::Grant(behind, again));
}

#[test]
fn who_waits_too_long_for_room_is_told_how_long() {
    let mut p = processes(&[6, 6]);
    granted(&mut p, 0, s(0));
    let id = p.ask(1, s(1)).unwrap();
    p.tick(s(60));
    assert_eq!(p.orders(), []);
    p.tick(s(61));
    assert_eq!(only(&mut p), Order::Refuse(id, NotGranted::NoRoom { waited: s(60) }));
    // And nobody is closed any more for who has gone.
    let more = p.ask(0, s(62)).unwrap();
    assert!(matches!(only(&mut p), Order::Grant(id, _) if id == more));
}

#[test]
fn a_start_that_fails_tells_all_who_wait_and_is_left_alone_for_longer_each_time() {
    let mut p = processes(&[6, 6]);
    let mut now = s(0);
    for delay in [1, 2, 4, 8, 16, 32, 60, 60] {
        let ids = [p.ask(0, now).unwrap(), p.ask(0, now).unwrap()];
        let life = started(&mut p);
        p.ended(life, "no such file", now);
        let why = NotGranted::Failed { reason: "no such file".into(), again: s(delay) };
        assert_eq!(p.orders(), ids.map(|id| Order::Refuse(id, why.clone())));
        assert_eq!(p.ask(0, now), Err(why));
        now += s(delay);
    }
    let life = granted(&mut p, 0, now);
    p.release(life, None, now);
    p.expire(0, now);
    p.ended(life, "", now);
    assert_eq!(p.told(0).failures, 0, "one that ended as it should has nothing to make up for");
}

#[test]
fn a_start_that_takes_too_long_is_a_failure() {
    let mut p = processes(&[6]);
    let id = p.ask(0, s(0)).unwrap();
    let life = started(&mut p);
    p.tick(s(99));
    assert_eq!(p.orders(), [], "who waits for a start is told by that, not by time");
    p.tick(s(100));
    let why = NotGranted::Failed { reason: "it was not ready within 100 s".into(), again: s(1) };
    assert_eq!(p.orders(), [Order::Refuse(id, why), Order::Stop(life)]);
    p.ready(life, s(101));
    assert_eq!(p.told(0).state, ProcessState::Stopping);
    p.ended(life, "", s(102));
    assert_eq!((p.told(0).state, p.told(0).failures), (ProcessState::Stopped, 1));
}

#[test]
fn what_crashes_once_is_started_at_once_and_then_not() {
    let mut p = processes(&[6]);
    let life = granted(&mut p, 0, s(0));
    p.ended(life, "killed", s(1));
    p.release(life, None, s(1));
    let again = granted(&mut p, 0, s(1));
    assert_ne!(again, life);
    p.ended(again, "killed", s(2));
    assert_eq!(p.ask(0, s(2)), Err(NotGranted::Failed { reason: "killed".into(), again: s(1) }));
    let third = granted(&mut p, 0, s(3));
    p.ended(third, "killed", s(63));
    granted(&mut p, 0, s(63));
}

#[test]
fn what_is_closed_takes_nothing_and_ends_all() {
    let mut p = processes(&[4, 4, 4]);
    let first = granted(&mut p, 0, s(0));
    let id = p.ask(1, s(0)).unwrap();
    let second = started(&mut p);
    p.close();
    assert_eq!(only(&mut p), Order::Refuse(id, NotGranted::Closed));
    assert_eq!(p.ask(0, s(1)), Err(NotGranted::Closed));
    p.stop_all(s(2));
    assert_eq!(p.orders(), [Order::Stop(first), Order::Stop(second)]);
}

/// A world around the state machine that does what it is told, late.
#[derive(Default)]
struct World {
    /// Starting, ready or stopping.
    living: HashMap<u64, (Life, bool, bool)>,
    waiting: HashSet<WaitId>,
    held: Vec<Life>,
    seen: HashSet<u64>,
}

impl World {
    fn obey(&mut self, p: &mut Processes, needs: &[u64], in_time: bool) {
        for order in p.orders() {
            match order {
                Order::Start(life) => {
                    assert!(
                        self.living.values().all(|(other, ..)| other.model != life.model),
                        "two of a model"
                    );
                    assert!(self.seen.insert(life.number), "a number is used twice");
                    self.living.insert(life.number, (life, false, false));
                }
                Order::Stop(life) => {
                    let (_, ready, stopping) = self.living.get_mut(&life.number).expect("what stops lives");
                    assert!(!std::mem::replace(stopping, true), "told twice");
                    assert!(*ready || !in_time, "stopped while it starts");
                    assert!(!self.held.contains(&life), "a busy one is stopped");
                }
                Order::Grant(id, life) => {
                    assert!(self.waiting.remove(&id));
                    let (_, ready, stopping) = self.living[&life.number];
                    assert!(ready && !stopping, "granted what is not ready");
                    self.held.push(life);
                }
                Order::Refuse(id, _) => assert!(self.waiting.remove(&id)),
            }
        }
        let taken: u64 = self.living.values().map(|(life, ..)| needs[life.model]).sum();
        assert!(taken <= BOUNDS.memory, "{taken} of {}", BOUNDS.memory);
        assert_eq!(taken, p.taken());
        assert_eq!(self.waiting.len(), p.waiting());
        assert!(p.waiting() <= BOUNDS.waiting);
    }

    fn some(&self, choice: usize, of: impl Fn(bool, bool) -> bool) -> Option<Life> {
        let mut lives: Vec<Life> = self
            .living
            .values()
            .filter(|(_, ready, stopping)| of(*ready, *stopping))
            .map(|(life, ..)| *life)
            .collect();
        lives.sort_by_key(|life| life.number);
        (!lives.is_empty()).then(|| lives[choice % lives.len()])
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Whatever happens in whatever order: the budget holds, a model has one process, nothing busy is stopped, and once the world
    /// does what it is told everybody gets an answer.
    #[test]
    fn the_budget_holds_and_everybody_is_answered(
        needs in proptest::collection::vec(1u64..=10, 1..5),
        events in proptest::collection::vec((0u8..8, any::<usize>(), 0u64..40), 0..120),
    ) {
        let mut p = processes(&needs);
        let mut world = World::default();
        let mut now = s(0);
        for (kind, choice, pause) in events {
            now += s(if pause > 30 { pause * 10 } else { pause / 10 });
            p.tick(now);
            world.obey(&mut p, &needs, false);
            match kind {
                0..=2 => if let Ok(id) = p.ask(choice % needs.len(), now) {
                    world.waiting.insert(id);
                },
                3 => if let Some(life) = world.some(choice, |ready, stopping| !ready && !stopping) {
                    world.living.get_mut(&life.number).expect("lives").1 = true;
                    p.ready(life, now);
                },
                4 => if !world.held.is_empty() {
                    let life = world.held.swap_remove(choice % world.held.len());
                    p.release(life, [None, Some(None), Some(Some(s(0)))][choice % 3], now);
                },
                5 => if let Some(life) = world.some(choice, |_, stopping| stopping) {
                    world.living.remove(&life.number);
                    p.ended(life, "", now);
                },
                6 => if let Some(life) = world.some(choice, |_, stopping| !stopping) {
                    // It crashes; what it was granted to is released later.
                    world.living.remove(&life.number);
                    p.ended(life, "crashed", now);
                },
                _ => if let Some(id) = world.waiting.iter().min().copied() {
                    world.waiting.remove(&id);
                    p.leave(id, now);
                },
            }
            world.obey(&mut p, &needs, false);
        }
        // From now on processes start and end, and requests end, within a second.
        for _ in 0..200 {
            now += s(1);
            p.tick(now);
            world.obey(&mut p, &needs, false);
            for (life, ready, stopping) in world.living.clone().into_values() {
                match (ready, stopping) {
                    (_, true) => {
                        world.living.remove(&life.number);
                        p.ended(life, "", now);
                    }
                    (false, false) => {
                        world.living.get_mut(&life.number).expect("lives").1 = true;
                        p.ready(life, now);
                    }
                    (true, false) => {}
                }
                world.obey(&mut p, &needs, false);
            }
            for life in std::mem::take(&mut world.held) {
                p.release(life, None, now);
            }
            world.obey(&mut p, &needs, false);
        }
        prop_assert!(world.waiting.is_empty(), "{:?} were not answered", world.waiting);
        // And left alone everything ends.
        now += s(301);
        p.tick(now);
        prop_assert_eq!(p.due(now), None);
    }

    /// Where everything starts and nothing crashes nobody is refused, however the models contend.
    #[test]
    fn nobody_starves(
        needs in proptest::collection::vec(1u64..=10, 2..5),
        asked in proptest::collection::vec(any::<usize>(), 1..60),
    ) {
        let mut p = processes(&needs);
        let mut world = World::default();
        let (mut now, mut answered) = (s(0), 0);
        let total = asked.len();
        let mut asked = asked.into_iter();
        while answered < total {
            now += s(1);
            prop_assert!(now < s(60) * 60, "{answered} of {total} were answered");
            if p.waiting() < BOUNDS.waiting && let Some(choice) = asked.next() {
                world.waiting.insert(p.ask(choice % needs.len(), now).expect("taken"));
            }
            p.tick(now);
            let before = world.waiting.len();
            for order in p.orders() {
                prop_assert!(!matches!(order, Order::Refuse(..)), "{order:?}");
                match order {
                    Order::Start(life) => { world.living.insert(life.number, (life, false, false)); }
                    Order::Stop(life) => world.living.get_mut(&life.number).expect("lives").2 = true,
                    Order::Grant(id, life) => { world.waiting.remove(&id); world.held.push(life); }
                    Order::Refuse(..) => {}
                }
            }
            answered += before - world.waiting.len();
            for (life, ready, stopping) in world.living.clone().into_values() {
                if stopping {
                    world.living.remove(&life.number);
                    p.ended(life, "", now);
                } else if !ready {
                    world.living.get_mut(&life.number).expect("lives").1 = true;
                    p.ready(life, now);
                }
            }
            // Each takes two seconds.
            if now.as_secs() % 2 == 0 {
                world.held.drain(..).for_each(|life| p.release(life, None, now));
            }
        }
    }
}
