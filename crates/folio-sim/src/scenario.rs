//! A world made from a seed: limits, pool, tenants, clients and faults.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use folio_engine::request::{AdapterId, Micros, Pooling, Request, RequestId, SamplingParams};
use folio_engine::{
    Adapter, AdapterSource, DRAFTS_MAX, Drafter, RequestAdapter, RulesRef, SchedulerConfig, Speculation,
};
use folio_kv::{CacheConfig, GroupConfig, Identity, Layout, PinLimits, Quota, Root, TenantId};

use crate::keeping;
use crate::machine::VOCAB;
use crate::rng::Rng;
use crate::rules::{HashRules, Late};

/// How a client treats what it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Reads to the end.
    Reads,
    /// Cancels at a point in time.
    CancelsAt(Micros),
    /// Cancels after so many events.
    CancelsAfter(u32),
    /// Ends one choice after so many events (found a stop string).
    EndsChoiceAfter { events: u32, choice: u32 },
    /// Is gone after so many events: its sink answers false.
    VanishesAfter(u32),
    /// Has room for `capacity` events and takes one per step; a full buffer counts as gone.
    Slow { capacity: u32 },
}

#[derive(Clone, Debug)]
pub struct Client {
    pub arrives: Micros,
    pub request: Request,
    /// What its answers must follow; the scheduler sees it as an object in the request.
    pub rules: Option<HashRules>,
    pub behaviour: Behaviour,
}

impl Client {
    /// What it asks for where masks are never late.
    pub fn alone(&self) -> Request {
        let mut request = self.request.clone();
        request.sampling.rules = self.rules.as_ref().map(|rules| RulesRef(Arc::new(rules.punctual())));
        request
    }
}

/// Everything a run depends on.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub config: SchedulerConfig,
    pub cache: CacheConfig,
    /// Cache groups beside the first; none in about half of the worlds.
    pub groups: Vec<GroupConfig>,
    /// Everybody who may be preempted is, once in so many steps; 0 never.
    pub preempts_one_in: u64,
    /// Empty: the pool is not divided.
    pub quotas: Vec<(TenantId, Quota)>,
    pub vocab: u32,
    /// Room of the backend in one pass; less than a step may need, so that steps are split.
    pub max_rows: usize,
    pub max_logit_rows: usize,
    /// Ascending by arrival.
    pub clients: Vec<Client>,
    /// What may be pinned.
    pub pins: PinLimits,
    /// The executor fails once in so many steps; 0 never.
    pub fails_one_in: u64,
    /// The device chooses tokens by itself.
    pub samples: bool,
    /// Steps that may be under way, and steps between a choice and its use.
    pub depth: usize,
    pub lag: usize,
    /// Some request waits for something outside, once in so many steps; 0 never.
    pub waits_one_in: u64,
    /// Somebody beside the steps begins to read, and to load, once in so many steps; 0 never.
    pub leases_one_in: u64,
    pub loads_one_in: u64,
    /// The scheduler loads and stores by itself.
    pub has_tier: bool,
    /// The first tier keeps what preempted sequences computed.
    pub swaps: bool,
    /// Events of the cache that may wait for their recorder.
    pub events_most: usize,
    /// Virtual time, for masks that are late.
    pub clock: Arc<AtomicU64>,
    /// The executor has a drafter, which some requests want: what it has beside K and V of all positions, as it computes with it. Of a draft
    /// model that may be windows and states, optional where its drafts do not depend on them; of a head it is nothing. As many of `groups`, and
    /// one more, are the drafter's: the last.
    pub drafter: Option<Vec<GroupConfig>>,
    /// Some sequences come with drafts, of which so many in a hundred are right; 0: none.
    pub drafts: u64,
    /// The engine's process dies before this step of the simulation.
    pub crashes_at: Option<u64>,
    pub seed: u64,
}

/// A root for `tenant`, as a server would derive it.
pub fn root(tenant: TenantId) -> Root {
    let mut secret = [7; 32];
    secret[..4].copy_from_slice(&tenant.0.to_le_bytes());
    Root::derive(&Identity {
        tenant,
        tenant_secret: &secret,
        model_digest: &[1; 32],
        layout_digest: &[2; 32],
        extra: &[],
    })
}

/// A greedy request of tenant 0.
pub fn request(id: u64, prompt: &[u32], max_tokens: u32) -> Request {
    let (tenant, sampling) = (TenantId(0), SamplingParams::greedy(max_tokens));
    Request::new(RequestId(id), tenant, root(tenant), prompt.into(), sampling)
}

/// A greedy request of tenant 0 for which `drafter` proposes at most `drafts` tokens in a step.
pub fn drafted(id: u64, drafter: Drafter, prompt: &[u32], max_tokens: u32, drafts: u32) -> Request {
    let speculation = Some(Speculation::new(drafter, drafts, prompt, &[]));
    Request { speculation, ..request(id, prompt, max_tokens) }
}

/// Tokens of a [`Machine`](crate::Machine)'s vocabulary, others for each `kind`.
pub fn text(kind: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * 7 + kind * 11 + i * i * (kind + 1)) % VOCAB).collect()
}

/// Limits of a [`Machine`](crate::Machine): few places, small steps, and nothing held back.
pub fn small() -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_prefill_tokens_while_decoding: 16,
        max_model_len: 1024,
        watermark_permille: 0,
        headroom_tokens: 0,
        ..SchedulerConfig::default()
    }
}

impl Scenario {
    /// Whether adapters come and go.
    pub fn pages_adapters(&self) -> bool {
        let SchedulerConfig { max_resident_adapters, max_adapter_bytes, .. } = self.config;
        max_resident_adapters < u32::MAX || max_adapter_bytes < u64::MAX
    }

    /// Whether its drafter is a head, which reads features.
    pub fn has_head(&self) -> bool {
        self.drafter.is_some() && is_head(self.seed)
    }

    /// Tokens that its draft model knows: in some worlds not all.
    pub fn drafter_vocab(&self) -> u32 {
        if self.seed.is_multiple_of(5) { self.vocab - 6 } else { self.vocab }
    }

    /// Whether its draft model now and then says something else than what it computes, so that any number of its drafts may be right.
    pub fn drafter_errs(&self) -> bool {
        self.seed / 4 % 2 == 1
    }

    /// Whether its drafter would choose what the model chooses.
    pub fn drafter_is_right(&self) -> bool {
        let needed = |groups: &[GroupConfig]| -> Vec<(usize, Layout)> {
            let needed = groups.iter().enumerate().filter(|(_, group)| !group.optional);
            needed.map(|(at, group)| (at, group.layout)).collect()
        };
        let says_less = self.drafter_vocab() < self.vocab || (self.drafter_errs() && !self.has_head());
        let layers = self.drafter.as_ref().filter(|_| !says_less);
        layers.is_some_and(|layers| needed(layers) == needed(self.model_groups()))
    }

    /// Of the model itself, but for group 0.
    pub fn model_groups(&self) -> &[GroupConfig] {
        let own = self.drafter.as_ref().map_or(0, |layers| 1 + layers.len());
        &self.groups[..self.groups.len() - own]
    }

    /// The world of `seed`.
    pub fn from_seed(seed: u64) -> Self {
        let rng = &mut Rng::new(seed);
        let vocab = 29;
        let block_tokens = *rng.pick(&[1u32, 2, 4, 8, 16]);
        let max_model_len = rng.range(40, 140) as u32;
        let max_num_seqs = rng.range(1, 10) as u32;
        let budget = max_num_seqs.max(rng.skewed(1, 120) as u32);
        // In some worlds few run at a time, and there is room beside them: loads begin in the queue.
        let queues = seed % 6 == 4;
        let config = SchedulerConfig {
            max_num_seqs: if queues { max_num_seqs.min(1 + (seed / 6 % 2) as u32) } else { max_num_seqs },
            max_num_batched_tokens: budget,
            max_prefill_tokens_while_decoding: rng.skewed(1, u64::from(budget)) as u32,
            max_model_len,
            max_choices: 4,
            watermark_permille: *rng.pick(&[0, 10, 100]),
            headroom_tokens: [0, 4, 64][(seed / 5 % 3) as usize],
            max_preemptions: rng.range(0, 4) as u32,
            max_bypasses: rng.range(0, 6) as u32,
            guarantee_completion: rng.one_in(8),
            shared_prefix_wait_us_max: *rng.pick(&[0, 50_000, 60_000_000]),
            tier_load_wait_us_max: 50_000,
            remote_prefill_wait_us_max: 100_000,
            grammar_wait_us_max: 2 * LATE_US_MAX,
            adapter_wait_us_max: 150_000,
            max_adapters: [0, 0, 1, 2, 0][(seed / 3 % 5) as usize],
            // In memory: all three, one of them, or the two that are small or the large one.
            max_resident_adapters: if seed % 3 == 1 { 1 } else { u32::MAX },
            max_adapter_bytes: if seed % 3 == 2 { 5 } else { u64::MAX },
            max_transfer_bytes: [4 << 10, 24 << 10, 1 << 20][(seed / 7 % 3) as usize],
            max_store_bytes: [1 << 10, 8 << 10, u64::MAX][(seed / 13 % 3) as usize],
            max_prefetch_requests: [8, 2, 1, 0][(seed / 11 % 4) as usize],
            max_prefetch_bytes: [2 << 10, 12 << 10, 1 << 19][(seed / 7 % 3) as usize],
            tenant_weights: vec![(TenantId(1), 1 + (seed % 4) as u32)],
            ..SchedulerConfig::default()
        };
        let mut clients = clients(rng, &config, vocab);
        if !seed.is_multiple_of(3) {
            pool(&mut Rng::new(seed ^ 0x9001), &mut clients);
        }
        let keeping = &mut Rng::new(seed ^ 0x9e7a);
        keeping::wishes(keeping, &mut clients);
        let largest = clients.iter().map(|client| positions(&client.request)).max().unwrap_or(1);
        let blocks = largest.div_ceil(block_tokens) + rng.skewed(0, 120 / u64::from(block_tokens) + 4) as u32;
        let blocks = if queues { 4 * blocks } else { blocks };
        let cache = CacheConfig { blocks, block_tokens, bytes_per_block: 1024 };
        declare(&mut Rng::new(seed ^ 0xdec1), &mut clients, block_tokens);
        let (samples, depth, lag) = overlap(&mut Rng::new(seed ^ 0xa4ea), &mut clients);
        let clock = Arc::default();
        restrict(&mut Rng::new(seed ^ 0x1a7e), &mut clients, !seed.is_multiple_of(3), &clock);
        let groups = groups(&mut Rng::new(seed ^ 0x3147), &config, &cache, largest);
        let mut groups = other_layouts(&mut Rng::new(seed ^ 0x57a7), groups);
        let drafter = match samples || depth == 1 {
            true => drafter(seed, &config, &cache, &mut groups, &mut clients),
            false => None,
        };
        // Worlds of draft models are those of even seeds.
        let is_layered = drafter.as_ref().is_some_and(|layers| !layers.is_empty());
        let preempts = seed % 4 == if is_layered { 2 } else { 1 };
        let beside = &mut Rng::new(seed ^ 0x1ea5);
        adapters(&mut Rng::new(seed ^ 0xada9), &mut clients, config.max_adapters);
        let crashing = &mut Rng::new(seed ^ 0xc4a5);
        Self {
            preempts_one_in: if preempts && !config.guarantee_completion { 4 + seed % 37 } else { 0 },
            pins: keeping::limits(keeping, blocks, largest.div_ceil(block_tokens)),
            groups,
            quotas: quotas(&mut Rng::new(seed ^ 0x90ab), &cache, largest),
            config,
            cache,
            vocab,
            max_rows: rng.skewed(1, u64::from(budget)) as usize,
            max_logit_rows: rng.range(1, 12) as usize,
            clients,
            samples,
            depth,
            lag,
            waits_one_in: if seed % 3 == 1 { 2 + seed % 41 } else { 0 },
            leases_one_in: *beside.pick(&[0, 2, 8, 30]),
            loads_one_in: *beside.pick(&[0, 0, 3, 10, 40]),
            has_tier: beside.one_in(2) || queues,
            swaps: !Rng::new(seed ^ 0x50a9).one_in(3),
            events_most: *beside.pick(&[100_000, 100_000, 100_000, 12]),
            clock,
            drafter,
            drafts: if seed % 5 < 2 { 25 * (seed % 4 + 1) } else { 0 },
            fails_one_in: if rng.one_in(6) { rng.range(5, 60) } else { 0 },
            crashes_at: crashing.one_in(12).then(|| crashing.skewed(1, 150)),
            seed,
        }
    }
}

/// In two of three worlds some want vectors instead of tokens.
fn pool(rng: &mut Rng, clients: &mut [Client]) {
    for client in clients {
        if !rng.one_in(3) {
            continue;
        }
        let request = &mut client.request;
        request.pooling = Some(*rng.pick(&[Pooling::Last, Pooling::Mean]));
        (request.n, request.prompt_logprobs) = (1, None);
        request.sampling = SamplingParams::greedy(0);
        client.rules = None;
        if let Behaviour::EndsChoiceAfter { choice, .. } = &mut client.behaviour {
            *choice = 0;
        }
    }
}

/// In two of three worlds several steps are under way: on a device that chooses by itself, or in a pipeline. In half of those nobody
/// asks for what keeps a sequence from overlapping.
fn overlap(rng: &mut Rng, clients: &mut [Client]) -> (bool, usize, usize) {
    let (samples, depth, lag) =
        *rng.pick(&[(false, 1, 1), (false, 1, 1), (true, 2, 1), (true, 2, 1), (false, 4, 1), (false, 4, 3)]);
    if depth > 1 && rng.one_in(2) {
        for client in clients {
            let logprobs = &mut client.request.sampling.logprobs;
            (client.rules, *logprobs) = (None, logprobs.filter(|alternatives| *alternatives < 3));
            client.request.sampling.repetition_penalty = 1.0;
            client.request.sampling.frequency_penalty = 0.0;
            client.request.sampling.presence_penalty = 0.0;
        }
    }
    (samples, depth, lag)
}

/// Whether the drafter of a seed's world, if it has one, is a head.
fn is_head(seed: u64) -> bool {
    seed % 2 == 1
}

/// In a third of the worlds the executor has a model for drafts, and half of the requests want it; its pools may be too small. See
/// [`Scenario::drafter`].
fn drafter(
    seed: u64,
    config: &SchedulerConfig,
    cache: &CacheConfig,
    groups: &mut Vec<GroupConfig>,
    clients: &mut [Client],
) -> Option<Vec<GroupConfig>> {
    let rng = &mut Rng::new(seed ^ 0xd4a7);
    if !rng.one_in(3) {
        return None;
    }
    let layers = match is_head(seed) {
        true => Vec::new(),
        false => layers(&mut Rng::new(seed ^ 0x1a4e), config, cache, groups),
    };
    groups.truncate(folio_kv::MAX_GROUPS - 2 - layers.len());
    let blocks = if rng.one_in(2) { cache.blocks } else { rng.range(1, cache.blocks.into()) as u32 };
    groups.push(GroupConfig { blocks, optional: true, ..cache.first_group() });
    groups.extend(layers.iter().map(|layer| {
        // What lies behind a window is kept.
        let layout = if layer.layout == Layout::State { Layout::State } else { Layout::Paged };
        GroupConfig { layout, optional: true, ..*layer }
    }));
    for Client { request, .. } in clients {
        if rng.one_in(2) {
            continue;
        }
        let most = *rng.pick(&[1, 3, DRAFTS_MAX]);
        request.speculation = Some(Speculation::new(Drafter::Model, most, &request.prompt, &[]));
    }
    Some(layers)
}

/// What a draft model has beside K and V of all positions: nothing, states, a window or both, none of which its drafts depend on, or what the
/// model has. Blocks of states are enough for everybody, or few.
fn layers(
    rng: &mut Rng,
    config: &SchedulerConfig,
    cache: &CacheConfig,
    groups: &mut Vec<GroupConfig>,
) -> Vec<GroupConfig> {
    let layer = |rng: &mut Rng, layout: Layout| {
        let block_tokens = cache.block_tokens * *rng.pick(&[1, 1, 2, 3, 4]);
        let most = cache.blocks + (1 + DRAFTS_MAX) * config.max_num_seqs;
        let blocks = if rng.one_in(2) { most } else { rng.skewed(1, most.into()) as u32 };
        GroupConfig { layout, blocks, block_tokens, bytes_per_block: 256, optional: true }
    };
    let window = Layout::Window { tokens: rng.skewed(1, u64::from(config.max_model_len)) as u32 };
    match rng.range(0, 7) {
        0 => Vec::new(),
        1 | 2 => vec![layer(rng, Layout::State)],
        3 => vec![layer(rng, window)],
        4 | 5 => vec![layer(rng, Layout::State), layer(rng, window)],
        _ => {
            groups.truncate(1);
            let needed = groups.iter().filter(|group| !group.optional);
            needed.map(|group| GroupConfig { optional: false, ..layer(rng, group.layout) }).collect()
        }
    }
}

/// Two of three requests name one of three adapters where any is served.
fn adapters(rng: &mut Rng, clients: &mut [Client], most: u32) {
    for client in clients.iter_mut().filter(|_| most > 0) {
        client.request.adapter = NonZeroU32::new(rng.range(0, 4).saturating_sub(1) as u32).map(adapter);
    }
}

/// Weights that change nothing and take some bytes.
struct SimAdapter(u64);

impl AdapterSource for SimAdapter {
    fn digest(&self) -> &[u8; 32] {
        &[0; 32]
    }

    fn bytes(&self) -> u64 {
        self.0
    }

    fn read(&self) -> Result<Arc<Adapter>, String> {
        Ok(Arc::default())
    }
}

/// The adapter of this number, whose weights take one byte more than that.
pub fn adapter(id: NonZeroU32) -> RequestAdapter {
    RequestAdapter { id: AdapterId(id), source: Arc::new(SimAdapter(u64::from(id.get()) + 1)) }
}

/// Longest time to a mask that comes at all.
const LATE_US_MAX: u64 = 100_000;

/// Makes objects of the rules; in `late` worlds some masks come late, or never.
fn restrict(rng: &mut Rng, clients: &mut [Client], late: bool, clock: &Arc<AtomicU64>) {
    let late = late.then(|| Late {
        clock: Some(clock.clone()),
        longest_us: rng.skewed(1, LATE_US_MAX),
        never_one_in: *rng.pick(&[0, 0, 400, 50]),
    });
    for client in clients {
        if let Some(rules) = &mut client.rules {
            rules.late = late.clone();
            client.request.sampling.rules = Some(RulesRef(Arc::new(rules.clone())));
        }
    }
}

/// Owner of what is declared to be shared: nobody else is this tenant.
pub const DECLARED: TenantId = TenantId(99);

/// In every third world an operator shares the beginning of some prompt: it is computed for nobody in particular, at some time,
/// and everybody whose prompt begins with it may read it.
fn declare(rng: &mut Rng, clients: &mut Vec<Client>, block_tokens: u32) {
    if !rng.one_in(3) {
        return;
    }
    let prompt = rng.pick(clients).request.prompt.clone();
    let prefix = &prompt[..rng.range(1, prompt.len() as u64) as usize];
    let owner = root(DECLARED);
    let last = clients.last().map_or(0, |client| client.arrives.0);
    for client in clients.iter_mut().filter(|client| client.request.prompt.starts_with(prefix)) {
        client.request.root = client.request.root.below(&owner, prefix, block_tokens);
    }
    let arrives = Micros(if rng.one_in(2) { 0 } else { rng.range(0, last) });
    let request = Request { tenant: DECLARED, root: owner, ..request(1000, prefix, 0) };
    let at = clients.partition_point(|client| client.arrives < arrives);
    clients.insert(at, Client { arrives, request, rules: None, behaviour: Behaviour::Reads });
}

/// In every third world the pool is divided, so that the largest request fits whoever sends it: tenants 1 to 3 share what it
/// leaves.
fn quotas(rng: &mut Rng, cache: &CacheConfig, largest: u32) -> Vec<(TenantId, Quota)> {
    if !rng.one_in(3) {
        return Vec::new();
    }
    let least = largest.div_ceil(cache.block_tokens);
    let mut left = u64::from(cache.blocks - least);
    (1..=rng.range(1, 3))
        .map(|tenant| {
            let guarantee = rng.range(0, left) as u32;
            left -= u64::from(guarantee);
            let ceiling = rng.range(u64::from(least.max(guarantee)), cache.blocks.into()) as u32;
            (TenantId(tenant as u32), Quota { guarantee, ceiling })
        })
        .collect()
}

/// Groups whose pools hold the largest request, alone, and little more.
fn groups(rng: &mut Rng, config: &SchedulerConfig, cache: &CacheConfig, largest: u32) -> Vec<GroupConfig> {
    let window = |rng: &mut Rng| {
        let window_tokens = rng.skewed(1, u64::from(config.max_model_len)) as u32;
        let block_tokens = cache.block_tokens * *rng.pick(&[1, 1, 1, 2, 3, 4]);
        let window = GroupConfig::window(window_tokens, 0, block_tokens, 256);
        let most = window.blocks_max(config.max_num_batched_tokens, 0);
        let more = rng.skewed(0, 100 / u64::from(block_tokens) + 4) as u32;
        GroupConfig { blocks: window.blocks_of(largest, 0).min(most) + more, ..window }
    };
    let count = if rng.one_in(2) { rng.range(1, folio_kv::MAX_GROUPS as u64 - 1) } else { 0 };
    (0..count).map(|_| window(rng)).collect()
}

/// In half of those worlds some are states, and nobody needs some.
fn other_layouts(rng: &mut Rng, mut groups: Vec<GroupConfig>) -> Vec<GroupConfig> {
    for group in &mut groups {
        match rng.range(0, 9) {
            0 => (group.layout, group.optional) = (Layout::Paged, true),
            1 => group.optional = true,
            // A window may have needed less.
            2..=4 => (group.layout, group.blocks) = (Layout::State, group.blocks + 3),
            _ => {}
        }
    }
    groups
}

/// Positions one choice of a request needs KV for.
pub fn positions(request: &Request) -> u32 {
    let prompt = request.prompt.len() as u32;
    (prompt + request.sampling.max_tokens).saturating_sub(1).max(prompt)
}

fn clients(rng: &mut Rng, config: &SchedulerConfig, vocab: u32) -> Vec<Client> {
    let text = |rng: &mut Rng, length: u64| -> Vec<u32> {
        (0..length).map(|_| (rng.word() % u64::from(vocab)) as u32).collect()
    };
    let longest = u64::from(config.max_model_len) - 1;
    let shared: Vec<Vec<u32>> = (0..rng.range(1, 3))
        .map(|_| {
            let n = rng.skewed(4, longest);
            text(rng, n)
        })
        .collect();
    let (tenants, pace) = (rng.range(1, 3), rng.skewed(1, 400_000));
    let mut now = 0;
    let mut clients = Vec::new();
    for id in 1..=rng.range(2, 18) {
        let mut prompt = match rng.one_in(4) {
            true => Vec::new(),
            false => {
                let prefix = rng.pick(&shared).clone();
                let cut = if rng.one_in(3) { prefix.len() as u64 } else { rng.range(1, prefix.len() as u64) };
                prefix[..cut as usize].to_vec()
            }
        };
        let own = rng.skewed(u64::from(prompt.is_empty()), (longest - prompt.len() as u64).max(1));
        prompt.extend(text(rng, own));
        prompt.truncate(longest as usize);
        let room = u64::from(config.max_model_len) - prompt.len() as u64;
        let tenant = TenantId(rng.range(1, tenants) as u32);
        now += rng.skewed(0, pace);
        let n = if rng.one_in(4) { rng.range(2, 4) as u32 } else { 1 };
        let (sampling, rules) = sampling(rng, room, vocab);
        // The engine's drafters, which in so few words are now and then right.
        let drafter = if id % 2 == 0 { Drafter::Suffix } else { Drafter::Ngram };
        let speculation = (id % 3 == 0).then(|| Speculation::new(drafter, DRAFTS_MAX, &prompt, &[]));
        let request = Request {
            n,
            priority: if rng.one_in(4) { rng.range(0, 4) as i32 - 2 } else { 0 },
            deadline: rng.one_in(8).then(|| Micros(now + rng.skewed(1, 2_000_000))),
            prompt_logprobs: rng.one_in(6).then(|| rng.range(0, 3) as u32),
            speculation,
            ..Request::new(RequestId(id), tenant, root(tenant), prompt.into(), sampling)
        };
        let behaviour = behaviour(rng, now, request.n);
        clients.push(Client { arrives: Micros(now), request, rules, behaviour });
    }
    clients
}

fn sampling(rng: &mut Rng, room: u64, vocab: u32) -> (SamplingParams, Option<HashRules>) {
    let max_tokens = if rng.one_in(12) { 0 } else { rng.skewed(1, room.min(60)) as u32 };
    let mut params = SamplingParams::greedy(max_tokens);
    params.seed = rng.word();
    params.min_tokens = if rng.one_in(4) { rng.range(0, u64::from(max_tokens)) as u32 } else { 0 };
    if rng.one_in(2) {
        params.eos_token_ids = Arc::new([(rng.word() % u64::from(vocab)) as u32]);
    }
    if rng.one_in(3) {
        params.stop_token_ids = Arc::new([(rng.word() % u64::from(vocab)) as u32]);
    }
    if rng.one_in(2) {
        params.temperature = *rng.pick(&[0.3, 1.0, 1.5]);
        params.top_k = *rng.pick(&[0, 0, 5]);
        params.top_p = *rng.pick(&[1.0, 0.9]);
        params.min_p = *rng.pick(&[0.0, 0.0, 0.05]);
    }
    if rng.one_in(4) {
        params.repetition_penalty = 1.3;
        params.frequency_penalty = *rng.pick(&[0.0, 0.5]);
        params.presence_penalty = *rng.pick(&[0.0, -0.7]);
    }
    let rules = rng.one_in(4).then(|| HashRules { seed: rng.word(), ends: true, late: None });
    params.logprobs = rng.one_in(5).then(|| rng.range(0, 3) as u32);
    (params, rules)
}

fn behaviour(rng: &mut Rng, arrived: u64, n: u32) -> Behaviour {
    match rng.range(0, 9) {
        0 => Behaviour::CancelsAt(Micros(arrived + rng.skewed(0, 1_500_000))),
        1 => Behaviour::CancelsAfter(rng.skewed(1, 30) as u32),
        2 => Behaviour::VanishesAfter(rng.skewed(0, 30) as u32),
        3 => Behaviour::EndsChoiceAfter {
            events: rng.skewed(0, 20) as u32,
            choice: (rng.word() % u64::from(n)) as u32,
        },
        4 => Behaviour::Slow { capacity: rng.range(2, 12) as u32 },
        _ => Behaviour::Reads,
    }
}
