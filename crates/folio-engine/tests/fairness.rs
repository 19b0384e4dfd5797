//! Tenants of one priority class share what there is by weight: the bound of `scheduler::fair`, with services counted here.

use std::collections::HashMap;

use folio_engine::SchedulerConfig;
use folio_engine::request::{Event, Request};
use folio_kv::{Quota, TenantId};
use folio_sim::Machine;
use folio_sim::scenario::{request, root};
use proptest::prelude::*;

/// What a tenant sends, again and again.
#[derive(Clone, Copy, Debug)]
struct Load {
    tenant: u32,
    weight: u32,
    prompt: u32,
    output: u32,
    /// Requests it keeps in the engine.
    outstanding: u64,
}

struct World {
    machine: Machine,
    generated_weight: u64,
    /// The engine is told that everything comes from one tenant.
    blind: bool,
    /// Whose, and how long its prompt; by number of the request, which is the number of its sequence too.
    sent: Vec<(Load, u32)>,
    finished: HashMap<u32, u64>,
    service: HashMap<u32, u64>,
    /// Positions computed, by request.
    computed: HashMap<u64, u64>,
    events_seen: HashMap<u64, usize>,
}

impl World {
    fn new(config: SchedulerConfig, blocks: u32) -> Self {
        let generated_weight = config.generated_token_weight.into();
        Self {
            machine: Machine::new(config, blocks, 4),
            generated_weight,
            blind: false,
            sent: Vec::new(),
            finished: HashMap::new(),
            service: HashMap::new(),
            computed: HashMap::new(),
            events_seen: HashMap::new(),
        }
    }

    fn send(&mut self, load: Load) {
        self.sent.push((load, load.prompt));
        let id = self.sent.len() as u64;
        let tenant = TenantId(if self.blind { 0 } else { load.tenant });
        let prompt: Vec<u32> = (0..u64::from(load.prompt))
            .map(|at| ((id * 7919 + at * 31 + at * at * id) % 29) as u32)
            .collect();
        self.machine.submit(Request { tenant, root: root(tenant), ..request(id, &prompt, load.output) });
    }

    /// Keeps `load.outstanding` requests of it in the engine.
    fn keep_up(&mut self, load: Load) {
        let sent = self.sent.iter().filter(|(other, _)| other.tenant == load.tenant).count() as u64;
        let finished = self.finished.get(&load.tenant).copied().unwrap_or(0);
        for _ in sent - finished..load.outstanding {
            self.send(load);
        }
    }

    fn step(&mut self) {
        for entry in self.machine.step().sequences.clone() {
            let (load, prompt) = self.sent[entry.id.0 as usize - 1];
            let before = self.computed.entry(entry.id.0).or_default();
            let after = u64::from(entry.first_position) + entry.tokens.len() as u64;
            let from = (*before).max(entry.first_position.into());
            *self.service.entry(load.tenant).or_default() += after.min(prompt.into()).saturating_sub(from);
            *before = (*before).max(after);
        }
        for (id, events) in &self.machine.events {
            let seen = self.events_seen.entry(id.0).or_default();
            let tenant = self.sent[id.0 as usize - 1].0.tenant;
            for event in &events[*seen..] {
                match event {
                    Event::Token { .. } => *self.service.entry(tenant).or_default() += self.generated_weight,
                    Event::Finished { .. } => *self.finished.entry(tenant).or_default() += 1,
                    Event::Prompt { .. } | Event::Pooled { .. } => {}
                }
            }
            *seen = events.len();
        }
    }

    fn normalised(&self, load: Load) -> f64 {
        self.service.get(&load.tenant).copied().unwrap_or(0) as f64 / f64::from(load.weight)
    }
}

fn config(loads: &[Load], max_num_seqs: u32, budget: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: budget.max(max_num_seqs),
        max_prefill_tokens_while_decoding: budget,
        max_model_len: 64,
        watermark_permille: 0,
        tenant_weights: loads.iter().map(|load| (TenantId(load.tenant), load.weight)).collect(),
        ..SchedulerConfig::default()
    }
}

/// The paper's quantity for these loads.
fn bound(loads: [Load; 2], config: &SchedulerConfig) -> f64 {
    let cost = |load: Load| f64::from(load.prompt + config.generated_token_weight * load.output);
    let most = loads.map(cost).into_iter().fold(0.0, f64::max) * f64::from(config.max_num_seqs);
    let weight = loads.map(|load| load.weight).into_iter().min().unwrap_or(1);
    2.0 * (f64::from(config.max_model_len) + most / f64::from(weight))
}

fn load(tenant: u32) -> impl Strategy<Value = Load> {
    (1..5u32, 1..40u32, 1..20u32, 8..40u64).prop_map(move |(weight, prompt, output, outstanding)| Load {
        tenant,
        weight,
        prompt,
        output,
        outstanding,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Between any two moments at which both were backlogged.
    #[test]
    fn backlogged_tenants_stay_within_the_bound(
        (first, second) in (load(1), load(2)),
        (seqs, budget, blocks, head_start) in (1..6u32, 1..60u32, 16..80u32, 0..30u32),
    ) {
        let config = config(&[first, second], seqs, budget);
        let apart = furthest_apart([first, second], World::new(config.clone(), blocks), head_start);
        let bound = bound([first, second], &config);
        prop_assert!(apart <= bound, "{apart} apart, the bound is {bound}");
    }
}

/// The most that the difference of their normalised services changed in 600 steps, both backlogged, after the first was
/// alone for `head_start` steps.
fn furthest_apart(loads: [Load; 2], mut world: World, head_start: u32) -> f64 {
    for _ in 0..head_start {
        world.keep_up(loads[0]);
        world.step();
    }
    let (mut least, mut most) = (f64::MAX, f64::MIN);
    for _ in 0..600 {
        loads.iter().for_each(|load| world.keep_up(*load));
        let ahead = world.normalised(loads[0]) - world.normalised(loads[1]);
        (least, most) = (least.min(ahead), most.max(ahead));
        world.step();
    }
    most - least
}

/// The controls: with broken counters these two break the bound, so the property above can fail.
#[test]
fn broken_counters_break_the_bound() {
    let loud = Load { tenant: 1, weight: 1, prompt: 24, output: 6, outstanding: 40 };
    let quiet = Load { tenant: 2, outstanding: 8, weight: 4, ..loud };
    let loads = [loud, quiet];
    let config = config(&loads, 3, 40);
    let bound = bound(loads, &config);
    let sound = furthest_apart(loads, World::new(config.clone(), 60), 10);
    assert!(sound <= bound, "{sound} apart, the bound is {bound}");

    // Everybody's tokens on one account: first come, first served.
    let blind = World { blind: true, ..World::new(config.clone(), 60) };
    let served = furthest_apart(loads, blind, 10);
    assert!(served > bound, "first come, first served: {served} apart, the bound is {bound}");

    // What was charged is not divided by the weight.
    let unweighted = SchedulerConfig { tenant_weights: Vec::new(), ..config.clone() };
    let served = furthest_apart(loads, World::new(unweighted, 60), 10);
    assert!(served > bound, "weights forgotten: {served} apart, the bound is {bound}");

    // Generated tokens cost nothing: who asks for long answers gets more.
    let [talker, reader] = [Load { prompt: 2, output: 28, ..loud }, Load { prompt: 28, output: 2, ..loud }];
    let loads = [talker, Load { tenant: 2, ..reader }];
    let config = SchedulerConfig { generated_token_weight: 0, ..self::config(&loads, 3, 40) };
    let world = World { generated_weight: 2, ..World::new(config.clone(), 60) };
    let bound = self::bound(loads, &SchedulerConfig { generated_token_weight: 2, ..config });
    let served = furthest_apart(loads, world, 10);
    assert!(served > bound, "answers not counted: {served} apart, the bound is {bound}");
}

/// Steps until `tokens` of service were given, and how much of it each got.
fn shares(loads: &[Load], seqs: u32, blocks: u32, service: u64) -> Vec<f64> {
    let mut world = World::new(config(loads, seqs, 64), blocks);
    while world.service.values().sum::<u64>() < service {
        loads.iter().for_each(|load| world.keep_up(*load));
        world.step();
    }
    let total = world.service.values().sum::<u64>() as f64;
    loads.iter().map(|load| world.service[&load.tenant] as f64 / total).collect()
}

#[test]
fn sending_more_does_not_get_more() {
    let quiet = Load { tenant: 1, weight: 1, prompt: 12, output: 6, outstanding: 10 };
    let loud = Load { tenant: 2, outstanding: 200, ..quiet };
    let shares = shares(&[loud, quiet], 4, 40, 12_000);
    assert!((shares[1] - 0.5).abs() < 0.05, "{shares:?}");
}

#[test]
fn three_times_the_weight_is_three_times_the_service() {
    let one = Load { tenant: 1, weight: 1, prompt: 10, output: 8, outstanding: 20 };
    let three = Load { tenant: 2, weight: 3, prompt: 30, output: 3, ..one };
    let shares = shares(&[one, three], 6, 60, 20_000);
    assert!((shares[1] - 0.75).abs() < 0.05, "{shares:?}");
}

#[test]
fn a_tenant_that_sends_seldom_need_not_wait_behind_a_crowd() {
    let crowd = Load { tenant: 1, weight: 1, prompt: 20, output: 10, outstanding: 100 };
    let mut world = World::new(config(&[crowd], 4, 64), 60);
    for _ in 0..40 {
        world.keep_up(crowd);
        world.step();
    }
    let before = world.finished[&1];
    world.send(Load { tenant: 2, ..crowd });
    let id = world.sent.len() as u64;
    while world.machine.finished(id).is_empty() {
        world.keep_up(crowd);
        world.step();
    }
    let passed = world.finished[&1] - before;
    assert!(passed <= 8, "{passed} requests of the crowd were finished first");
}

#[test]
fn a_tenant_at_its_ceiling_holds_nobody_back() {
    let capped = Load { tenant: 1, weight: 1, prompt: 12, output: 6, outstanding: 20 };
    let free = Load { tenant: 2, ..capped };
    let mut world = World::new(config(&[capped, free], 8, 64), 80);
    let quota = Quota { guarantee: 0, ceiling: 5 };
    world.machine.cache.set_quotas(&[(TenantId(1), quota)]).expect("a division that can be");
    for _ in 0..400 {
        [capped, free].iter().for_each(|load| world.keep_up(*load));
        world.step();
    }
    let (one, two) = (world.service[&1], world.service[&2]);
    assert!(one > 0 && two > 4 * one, "one place against seven: {one} and {two}");
}
