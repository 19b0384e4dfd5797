//! Tenants are walls, in time too: what one tenant has cached, computes or repeats changes nothing that another can observe.
//!
//! Noninterference, exactly: two worlds differ in nothing but what the *other* tenant asked for. In one it is what the prober
//! will ask for, in the other it is unrelated text of the same length. Every step must then be the same: who computes how
//! many tokens from which position, how many blocks are copied, what the prober is told. So the time to its first token is
//! the same on any machine. Each path has its positive control: the same pair of worlds within one tenant must differ, or
//! the test would see nothing.

use folio_engine::{Request, SchedulerConfig};
use folio_kv::TenantId;
use folio_sim::Machine;
use folio_sim::scenario::{request, root, text};

const OTHER: TenantId = TenantId(1);
const SAME: TenantId = TenantId(0);

/// When the prober asks.
#[derive(Clone, Copy, Debug)]
enum When {
    /// After so many steps of the first request: 0 arrives together with it.
    After(usize),
    Finished,
    /// Everything is preempted after so many steps, and only then the prober comes.
    Preempted(usize),
}

struct Path {
    name: &'static str,
    when: When,
    /// The first request: tokens of its prompt and of its answer, choices.
    prompt: u32,
    answer: u32,
    n: u32,
    /// Tokens of prompt and answer that the prober repeats before its own.
    repeats: u32,
    blocks: u32,
    /// What the prober finds if it is the same tenant.
    same_tenant_finds: u32,
}

const PLAIN: Path = Path {
    name: "full blocks",
    when: When::Finished,
    prompt: 96,
    answer: 4,
    n: 1,
    repeats: 96,
    blocks: 100,
    same_tenant_finds: 96,
};

/// All that a step does, without the contents.
type Step = (Vec<(u32, usize)>, usize);

#[derive(Debug, PartialEq)]
struct Observed {
    steps: Vec<Step>,
    cached: Option<u32>,
    /// Steps until the prober's first token.
    first_token: usize,
    computed: u64,
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 40,
        max_model_len: 512,
        watermark_permille: 0,
        ..SchedulerConfig::default()
    }
}

impl Path {
    /// Lets the machine run as far as this path asks.
    fn bring(&self, machine: &mut Machine) {
        match self.when {
            When::After(steps) | When::Preempted(steps) => (0..steps).for_each(|_| {
                machine.step();
            }),
            When::Finished => machine.run(),
        }
        if matches!(self.when, When::Preempted(_)) {
            assert!(machine.scheduler.preempt_all(&mut machine.cache) > 0, "{}: nobody ran", self.name);
        }
    }
}

/// `secret`: the first request is what the prober repeats.
fn world(path: &Path, prober: TenantId, secret: bool) -> Observed {
    let mut machine = Machine::new(config(), path.blocks, 16).with_tier(path.blocks as usize, 0.0);
    let first = |kind| Request { n: path.n, ..request(1, &text(kind, path.prompt), path.answer) };
    machine.submit(first(if secret { 1 } else { 2 }));
    path.bring(&mut machine);
    let answer =
        machine.alone(&first(1)).choices[0].tokens.iter().map(|(token, _)| *token).collect::<Vec<_>>();
    let mut prompt = [text(1, path.prompt), answer].concat();
    prompt.truncate(path.repeats as usize);
    prompt.extend(text(5, 12));
    let probe = Request { tenant: prober, root: root(prober), n: path.n, ..request(2, &prompt, 6) };
    machine.submit(probe.clone());
    let asked = machine.plans().len();
    while machine.tokens(2, 0).is_empty() {
        machine.step();
    }
    let first_token = machine.plans().len() - asked;
    machine.run();
    machine.assert_as_alone(&probe);
    observed(&machine, first_token)
}

fn observed(machine: &Machine, first_token: usize) -> Observed {
    let step = |plan: &folio_engine::StepPlan| {
        let mut work: Vec<_> = plan.sequences.iter().map(|s| (s.first_position, s.tokens.len())).collect();
        work.sort_unstable();
        (work, plan.copies.len())
    };
    Observed {
        steps: machine.plans().iter().map(step).collect(),
        cached: machine.cached_tokens(2),
        first_token,
        computed: machine.computed(),
    }
}

fn paths() -> Vec<Path> {
    vec![
        PLAIN,
        Path { name: "a tail inside a block", repeats: 90, same_tenant_finds: 90, ..PLAIN },
        Path { name: "a generated answer", answer: 40, repeats: 130, same_tenant_finds: 130, ..PLAIN },
        Path { name: "choices", n: 4, answer: 8, ..PLAIN },
        Path { name: "a prefix just being computed", when: When::After(1), same_tenant_finds: 96, ..PLAIN },
        Path { name: "arriving together", when: When::After(0), same_tenant_finds: 96, ..PLAIN },
        Path { name: "a running answer", when: When::After(12), answer: 40, ..PLAIN },
        Path { name: "a preempted prompt", when: When::Preempted(2), ..PLAIN },
        Path { name: "a preempted answer", when: When::Preempted(9), answer: 40, ..PLAIN },
        // 7 blocks hold the first, 8 the second: most of the first is evicted for it.
        Path { name: "a full pool", blocks: 9, ..PLAIN },
    ]
}

#[test]
fn nothing_another_tenant_did_shows_in_any_step() {
    for path in paths() {
        let (secret, unrelated) = (world(&path, OTHER, true), world(&path, OTHER, false));
        assert_eq!(secret, unrelated, "{}: the other tenant's content shows", path.name);
        assert_eq!(secret.cached, Some(0), "{}", path.name);
    }
}

/// The control: where the worlds of one tenant did not differ, the test above would prove nothing.
#[test]
fn the_same_tenant_finds_it_in_every_path() {
    for path in paths() {
        let (again, cold) = (world(&path, SAME, true), world(&path, SAME, false));
        assert_eq!(cold.cached, Some(0), "{}", path.name);
        assert_eq!(again.cached, Some(path.same_tenant_finds), "{}", path.name);
        assert!(again.computed < cold.computed, "{}: {} computed", path.name, again.computed);
        assert_ne!(again.steps, cold.steps, "{}", path.name);
    }
}

/// Nor does it matter whether the other tenant is there at all, but for the time its own work takes.
#[test]
fn a_repeat_across_tenants_costs_what_a_cold_request_costs() {
    let path = PLAIN;
    let repeat = world(&path, OTHER, true);
    let mut alone = Machine::new(config(), path.blocks, 16);
    let prompt = [text(1, path.repeats), text(5, 12)].concat();
    alone.submit(Request { tenant: OTHER, root: root(OTHER), ..request(2, &prompt, 6) });
    while alone.tokens(2, 0).is_empty() {
        alone.step();
    }
    assert_eq!(repeat.first_token, alone.plans().len(), "steps to the first token");
    alone.run();
    let first = u64::from(path.prompt + path.answer - 1);
    assert_eq!(repeat.computed - first, alone.computed(), "computed tokens");
    let same = world(&path, SAME, true);
    assert!(same.first_token < repeat.first_token, "the control: a hit is faster");
}

/// The tenant of what an operator declared to be shared.
const DECLARED: TenantId = TenantId(50);

/// As [`world`], where both prompts begin with a declared prefix of 48 tokens: what the other appended to it shows as little.
fn declared_world(path: &Path, prober: TenantId, secret: bool) -> Observed {
    let declared = text(9, 48);
    let below = |tenant: TenantId| root(tenant).below(&root(DECLARED), &declared, 16);
    let mut machine = Machine::new(config(), path.blocks + 3, 16).with_tier(path.blocks as usize, 0.0);
    machine.submit(Request { tenant: DECLARED, root: root(DECLARED), ..request(9, &declared, 0) });
    machine.run();
    let prompt = |kind: u32| [declared.clone(), text(kind, path.prompt)].concat();
    let first =
        |kind: u32| Request { n: path.n, root: below(SAME), ..request(1, &prompt(kind), path.answer) };
    machine.submit(first(if secret { 1 } else { 2 }));
    path.bring(&mut machine);
    let answer =
        machine.alone(&first(1)).choices[0].tokens.iter().map(|(token, _)| *token).collect::<Vec<_>>();
    let mut probed = [prompt(1), answer].concat();
    probed.truncate(48 + path.repeats as usize);
    probed.extend(text(5, 12));
    let probe = Request { tenant: prober, root: below(prober), n: path.n, ..request(2, &probed, 6) };
    machine.submit(probe.clone());
    let asked = machine.plans().len();
    while machine.tokens(2, 0).is_empty() {
        machine.step();
    }
    let first_token = machine.plans().len() - asked;
    machine.run();
    machine.assert_as_alone(&probe);
    observed(&machine, first_token)
}

#[test]
fn behind_a_declared_prefix_nothing_of_another_tenant_shows() {
    for path in paths() {
        let (secret, unrelated) = (declared_world(&path, OTHER, true), declared_world(&path, OTHER, false));
        assert_eq!(secret, unrelated, "{}: the other tenant's content shows", path.name);
        assert_eq!(secret.cached, Some(48), "{}: the declared part, and no more", path.name);
        let again = declared_world(&path, SAME, true);
        let found = Some(48 + path.same_tenant_finds);
        assert_eq!(again.cached, found, "{}: the control", path.name);
    }
}
