//! Which tenant's turn is it, inside a class: virtual token counters (VTC; Sheng et al., "Fairness in Serving
//! Large Language Models", OSDI 2024).
//!
//! Owns: the counters. Must never: look at a sequence or decide anything but the order of tenants.
//!
//! A tenant's *virtual time* in a class is the service it got there, divided by its weight. Service is counted in prompt
//! tokens: one for each prompt token computed for the first time (cached ones are free, and so is what a preemption makes
//! the engine compute again), [`SchedulerConfig::generated_token_weight`] for each generated one. Who is behind comes first.
//! A tenant that begins to wait is lifted to the least time of those that wait already: nobody saves up idle time.
//!
//! # The bound
//!
//! A tenant is *backlogged* while it has a sequence that waits for a turn or for blocks (not for its own prefix, and not
//! for its own quota). Let `L` be [`SchedulerConfig::max_model_len`], `w` a tenant's weight, and `U` the most service that
//! the sequences a tenant may have running at once can get until they end, at most `max_num_seqs` times the most expensive
//! request with all its choices. Then for two tenants `f`, `g` of one class, backlogged from `t1` to `t2`, with services
//! `W`:
//!
//! ```text
//! | W_f(t1, t2) / w_f  -  W_g(t1, t2) / w_g |  <=  2 * (L + U / min(w_f, w_g))
//! ```
//!
//! Proof. A sequence of `f` is admitted only while `time_f <= time_g + L` (`SLACK`: so much may pass a sequence that does
//! not fit). Times only grow, and after the last admission `f` gets at most `U` more, so `time_f <= time_g + L + U / w_f` at
//! any time; the same the other way round. That holds at `t1` as well as at `t2` (lifting keeps it), and the differences of
//! service are the differences of the times' changes. The paper's bound has the same form: twice what may be running. A
//! test (`tests/fairness.rs`) counts services by itself and checks it.
//!
//! Starvation: a tenant that waits is passed only by tenants behind it or, for want of blocks, by a bounded number of
//! sequences (`admission`), and everybody who is served moves ahead.
//!
//! Cost: a charge is O(1); lifting, and listing who waits, O(tenants of the class).

use folio_kv::TenantId;
use rustc_hash::FxHashMap;

use crate::config::SchedulerConfig;

/// Virtual time of one prompt token at weight 1.
const UNIT: u64 = 1 << 20;
/// Tenants of a class there may be before anybody is forgotten.
const ACCOUNTS_LEAST: usize = 64;

#[derive(Clone, Copy, Debug)]
struct Account {
    time: u64,
    /// What one prompt token costs: `UNIT` by weight.
    token: u64,
    /// Sequences in the waiting queue.
    waiting: u32,
    /// Sequences waiting or running.
    living: u32,
    /// Its own quota refused it last: it holds nobody back.
    quota_limited: bool,
}

#[derive(Debug, Default)]
struct Class {
    accounts: FxHashMap<TenantId, Account>,
    /// Accounts at which those without a sequence are looked for again.
    sweep_at: usize,
    /// Time of the tenant that waited last, for whoever comes when nobody waits.
    floor: u64,
    /// Sequences waiting or running; a class without any is forgotten, debts and all.
    living: u32,
}

impl Class {
    /// The least time of those that wait, else of who waited last: where whoever begins to wait is lifted to. It never falls.
    fn least(&self) -> u64 {
        let waiting = self.accounts.values().filter(|account| account.waiting > 0);
        waiting.map(|account| account.time).min().unwrap_or(self.floor)
    }

    /// Forgets tenants that have no sequence here, if they would be lifted when they came back. While nobody waits everybody is
    /// lifted to the furthest of them, so that they can be. O(1) amortized: there must be twice as many accounts as were left.
    fn sweep(&mut self) {
        if self.accounts.len() < self.sweep_at.max(ACCOUNTS_LEAST) {
            return;
        }
        let idle = |account: &Account| account.living == 0;
        if self.accounts.values().all(|account| account.waiting == 0) {
            let times = self.accounts.values().filter(|account| idle(account)).map(|account| account.time);
            self.floor = times.max().unwrap_or(0).max(self.floor);
        }
        let least = self.least();
        self.accounts.retain(|_, account| !idle(account) || account.time > least);
        self.sweep_at = 2 * self.accounts.len();
        self.accounts.shrink_to(self.sweep_at);
    }
}

/// A tenant with something in the waiting queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Head {
    pub class: i32,
    pub time: u64,
    pub tenant: TenantId,
}

#[derive(Debug)]
pub(super) struct Fairness {
    weights: FxHashMap<TenantId, u32>,
    generated_weight: u64,
    /// How far ahead of the tenant whose turn it is another may be and still be admitted.
    pub slack: u64,
    classes: FxHashMap<i32, Class>,
}

impl Fairness {
    pub fn new(config: &SchedulerConfig) -> Self {
        Self {
            weights: config.tenant_weights.iter().copied().collect(),
            generated_weight: config.generated_token_weight.into(),
            slack: u64::from(config.max_model_len) * UNIT,
            classes: FxHashMap::default(),
        }
    }

    /// A sequence exists from now on.
    pub fn begins(&mut self, class: i32, tenant: TenantId) {
        self.account(class, tenant).living += 1;
        self.classes.entry(class).or_default().living += 1;
    }

    /// It exists no more, neither waiting nor running.
    pub fn ends(&mut self, class: i32, tenant: TenantId) {
        self.account(class, tenant).living -= 1;
        let Some(counts) = self.classes.get_mut(&class) else { return };
        counts.living -= 1;
        match counts.living {
            0 => drop(self.classes.remove(&class)),
            _ => counts.sweep(),
        }
    }

    fn account_of(&self, class: i32, tenant: TenantId) -> Option<&Account> {
        self.classes.get(&class)?.accounts.get(&tenant)
    }

    /// Which is opened where there is none.
    fn account(&mut self, class: i32, tenant: TenantId) -> &mut Account {
        let weight = self.weights.get(&tenant).copied().unwrap_or(1);
        let class = self.classes.entry(class).or_default();
        class.accounts.entry(tenant).or_insert_with(|| Account {
            time: 0,
            token: UNIT / u64::from(weight.max(1)),
            waiting: 0,
            living: 0,
            quota_limited: false,
        })
    }

    /// A sequence enters the waiting queue.
    pub fn waits(&mut self, class: i32, tenant: TenantId) {
        if self.account(class, tenant).waiting == 0 {
            let least = self.classes.get(&class).map_or(0, Class::least);
            let account = self.account(class, tenant);
            account.time = account.time.max(least);
        }
        self.account(class, tenant).waiting += 1;
    }

    /// A sequence leaves the waiting queue, to run or for good.
    pub fn leaves(&mut self, class: i32, tenant: TenantId) {
        let account = self.account(class, tenant);
        account.waiting -= 1;
        account.quota_limited = false;
        let time = account.time;
        if let Some(class) = self.classes.get_mut(&class) {
            class.floor = class.floor.max(time);
        }
    }

    /// Its own quota refuses a tenant. Until one of its sequences leaves the queue the others need not wait for it.
    pub fn limit_by_quota(&mut self, class: i32, tenant: TenantId) {
        self.account(class, tenant).quota_limited = true;
    }

    pub fn is_limited_by_quota(&self, head: Head) -> bool {
        self.account_of(head.class, head.tenant).is_some_and(|account| account.quota_limited)
    }

    /// `prompt` prompt tokens were computed for the first time, `generated` ones were generated.
    pub fn charge(&mut self, class: i32, tenant: TenantId, prompt: u32, generated: u32) {
        let service = u64::from(prompt) + u64::from(generated) * self.generated_weight;
        let account = self.account(class, tenant);
        account.time = account.time.saturating_add(service * account.token);
    }

    /// Virtual time of a tenant.
    pub fn time(&self, class: i32, tenant: TenantId) -> u64 {
        self.account_of(class, tenant).map_or(0, |account| account.time)
    }

    /// What `tokens` prompt tokens would add to a tenant's time.
    pub fn cost(&self, class: i32, tenant: TenantId, tokens: u32) -> u64 {
        u64::from(tokens) * self.account_of(class, tenant).map_or(UNIT, |account| account.token)
    }

    /// Everybody who waits, whose turn it is first.
    pub fn heads(&self, into: &mut Vec<Head>) {
        into.clear();
        for (class, accounts) in &self.classes {
            let waiting = accounts.accounts.iter().filter(|(_, account)| account.waiting > 0);
            into.extend(waiting.map(|(tenant, account)| Head {
                class: *class,
                time: account.time,
                tenant: *tenant,
            }));
        }
        into.sort_unstable();
    }

    /// Tenants with something in a class of the waiting queue, in no particular order.
    pub fn waiting_tenants(&self, class: i32) -> impl Iterator<Item = TenantId> + '_ {
        let accounts = self.classes.get(&class).into_iter().flat_map(|class| &class.accounts);
        accounts.filter(|(_, account)| account.waiting > 0).map(|(tenant, _)| *tenant)
    }

    /// Sequences in the waiting queue and alive, as counted here.
    pub fn counted(&self) -> (usize, usize) {
        let waiting =
            |class: &Class| class.accounts.values().map(|account| account.waiting as usize).sum::<usize>();
        let classes = self.classes.values();
        classes.fold((0, 0), |(waits, lives), class| (waits + waiting(class), lives + class.living as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fairness() -> Fairness {
        let config = SchedulerConfig {
            tenant_weights: vec![(TenantId(2), 4)],
            generated_token_weight: 2,
            max_model_len: 100,
            ..SchedulerConfig::default()
        };
        Fairness::new(&config)
    }

    fn order(fairness: &Fairness) -> Vec<u32> {
        let mut heads = Vec::new();
        fairness.heads(&mut heads);
        heads.iter().map(|head| head.tenant.0).collect()
    }

    #[test]
    fn service_counts_by_weight_and_the_one_behind_comes_first() {
        let mut fairness = fairness();
        for tenant in [1, 2] {
            fairness.begins(0, TenantId(tenant));
            fairness.waits(0, TenantId(tenant));
        }
        fairness.charge(0, TenantId(1), 10, 5);
        fairness.charge(0, TenantId(2), 10, 14);
        assert_eq!(fairness.time(0, TenantId(1)), 20 * UNIT);
        assert_eq!(fairness.time(0, TenantId(2)), 38 * UNIT / 4);
        assert_eq!(order(&fairness), [2, 1]);
        fairness.charge(0, TenantId(2), 60, 0);
        assert_eq!(order(&fairness), [1, 2]);
    }

    #[test]
    fn idle_time_is_not_saved_up() {
        let mut fairness = fairness();
        fairness.begins(0, TenantId(1));
        fairness.waits(0, TenantId(1));
        fairness.charge(0, TenantId(1), 500, 0);
        fairness.waits(0, TenantId(3));
        assert_eq!(fairness.time(0, TenantId(3)), 500 * UNIT, "lifted to who waits");
        fairness.leaves(0, TenantId(1));
        fairness.leaves(0, TenantId(3));
        fairness.waits(0, TenantId(4));
        assert_eq!(fairness.time(0, TenantId(4)), 500 * UNIT, "lifted to who waited last");
        fairness.charge(0, TenantId(4), 7, 0);
        fairness.waits(0, TenantId(4));
        assert_eq!(fairness.time(0, TenantId(4)), 507 * UNIT, "and never lowered");
    }

    #[test]
    fn classes_are_apart_and_end_with_their_last_sequence() {
        let mut fairness = fairness();
        fairness.begins(0, TenantId(1));
        fairness.begins(-1, TenantId(2));
        fairness.waits(0, TenantId(1));
        fairness.waits(-1, TenantId(2));
        fairness.charge(0, TenantId(1), 10, 0);
        assert_eq!(order(&fairness), [2, 1], "better class first");
        assert_eq!(fairness.time(-1, TenantId(1)), 0);
        fairness.leaves(0, TenantId(1));
        fairness.ends(0, TenantId(1));
        assert_eq!(fairness.time(0, TenantId(1)), 0, "a class without sequences is forgotten");
        assert_eq!(fairness.counted(), (1, 1));
    }

    /// Serves one sequence from its turn to its end. The time it ends with.
    fn serve(fairness: &mut Fairness, tenant: TenantId, tokens: u32) -> u64 {
        fairness.leaves(0, tenant);
        fairness.charge(0, tenant, tokens, 0);
        let time = fairness.time(0, tenant);
        fairness.ends(0, tenant);
        time
    }

    fn comes(fairness: &mut Fairness, tenant: TenantId) {
        fairness.begins(0, tenant);
        fairness.waits(0, tenant);
    }

    #[test]
    fn a_hundred_thousand_tenants_that_come_once_are_forgotten() {
        const STAYS: TenantId = TenantId(0);
        for backlogged in [false, true] {
            let mut fairness = fairness();
            comes(&mut fairness, STAYS);
            if !backlogged {
                fairness.leaves(0, STAYS);
            }
            let (mut heads, mut most, mut served) = (Vec::new(), 0, 0);
            for visit in 1..=100_000u32 {
                comes(&mut fairness, TenantId(visit));
                let mut first = STAYS;
                while first != TenantId(visit) {
                    fairness.heads(&mut heads);
                    first = heads[0].tenant;
                    if first == STAYS {
                        comes(&mut fairness, STAYS);
                        served += 1;
                    }
                    serve(&mut fairness, first, 1 + visit % 7);
                }
                most = most.max(fairness.classes[&0].accounts.capacity());
            }
            assert!(most <= 8 * ACCOUNTS_LEAST, "{most} accounts, {backlogged}");
            assert_eq!(served > 0, backlogged);
        }
    }

    /// Whoever leaves and comes back, forgotten or not, goes on where it was or further on.
    #[test]
    fn coming_back_brings_no_advantage() {
        let mut fairness = fairness();
        let (mut left_at, mut heads) = (FxHashMap::default(), Vec::new());
        let (mut running, mut forgotten, mut state) = (Vec::new(), 0, 1u64);
        for _ in 0..50_000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let draw = (state >> 33) as u32;
            let tenant = TenantId(draw % 2000);
            fairness.heads(&mut heads);
            let lives = running.contains(&tenant) || heads.iter().any(|head| head.tenant == tenant);
            match draw >> 16 & 3 {
                0 if running.len() > 1 => {
                    let tenant = running.swap_remove(draw as usize % running.len());
                    fairness.charge(0, tenant, draw % 100, 0);
                    left_at.insert(tenant, fairness.time(0, tenant));
                    fairness.ends(0, tenant);
                }
                1 | 2 if !lives && heads.len() + running.len() < 20 => {
                    let before = left_at.remove(&tenant).unwrap_or(0);
                    forgotten += u32::from(fairness.time(0, tenant) < before);
                    comes(&mut fairness, tenant);
                    assert!(fairness.time(0, tenant) >= before, "{tenant:?} saved {before}");
                }
                _ => {
                    for head in heads.iter().take(draw as usize % 3) {
                        fairness.leaves(0, head.tenant);
                        running.push(head.tenant);
                    }
                }
            }
        }
        assert!(forgotten > 1000, "{forgotten} came back after they were forgotten");
    }
}
