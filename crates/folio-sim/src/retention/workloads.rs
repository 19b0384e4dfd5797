//! Traffic to judge retention on: what people and programs do with a server, generated, and a recorded trace in parts.
//!
//! Owns: how sessions of each kind go on, pause and end. Must never: know a policy. A workload is a kind, a seed and a load; the same
//! three give the same requests. Times are seconds of the modelled day and decide the order of requests, nothing else.
//!
//! The numbers are round ones, from what is published of such traffic (think times of minutes, tools that take seconds and now and then a
//! minute, documents by popularity), and were written down before a policy was tried on them.

use std::collections::HashMap;

use super::BlockTrace;
use crate::rng::Rng;

/// Requests of a generated workload.
const REQUESTS: usize = 5000;

/// Seeds and loads of each kind.
const SEEDS: u64 = 2;
const LOADS: [u32; 2] = [4, 16];

/// Of the same family workloads are alike: they are left out together.
pub struct Workload {
    pub family: &'static str,
    pub part: String,
    pub trace: BlockTrace,
}

/// All that a rule is judged on: `trace` as a whole and in halves, and what is generated.
pub fn all(trace: BlockTrace) -> Vec<Workload> {
    let whole = Workload { family: "recorded conversations", part: "all".into(), trace };
    let mut all = Vec::new();
    for (parts, names) in [
        (whole.trace.by_time(), ["first half", "second half"]),
        (whole.trace.by_session(), ["half of the sessions", "other half"]),
    ] {
        for (trace, part) in parts.into_iter().zip(names) {
            all.push(Workload { family: whole.family, part: part.into(), trace });
        }
    }
    all.push(whole);
    for kind in Kind::ALL {
        for load in LOADS {
            for seed in 0..SEEDS {
                let part = format!("load {load} seed {seed}");
                all.push(Workload { family: kind.name(), part, trace: kind.generate(seed, load) });
            }
        }
    }
    all
}

/// Who sends the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// People who write, read and think; half of the conversations end after two turns.
    Chats,
    /// Programs that call tools: many short steps on a long beginning, pauses of seconds, and of an hour while a person is away.
    Agents,
    /// Questions about documents that many ask about, by popularity, with a few questions more about the same one.
    Retrieval,
    /// Jobs: one instruction over hundreds of texts, each once; some jobs are done again.
    Batch,
    /// Texts that somebody pastes and asks one thing about.
    SingleShots,
    /// Chats beside jobs.
    ChatsAndBatch,
    /// Agents, questions about documents and single shots.
    AgentsAndRetrieval,
    /// Everything, in turns: by day people and agents, by night jobs.
    DayAndNight,
}

impl Kind {
    pub const ALL: [Kind; 8] = [
        Kind::Chats,
        Kind::Agents,
        Kind::Retrieval,
        Kind::Batch,
        Kind::SingleShots,
        Kind::ChatsAndBatch,
        Kind::AgentsAndRetrieval,
        Kind::DayAndNight,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Kind::Chats => "chats",
            Kind::Agents => "agents with long pauses",
            Kind::Retrieval => "retrieval over shared documents",
            Kind::Batch => "batch jobs",
            Kind::SingleShots => "single shots and a few chats",
            Kind::ChatsAndBatch => "mixture: chats, batch jobs",
            Kind::AgentsAndRetrieval => "mixture: agents, retrieval, single shots",
            Kind::DayAndNight => "mixture: all, by day and by night",
        }
    }

    /// `load`: sessions that begin in the time in which one begins at load 1.
    pub fn generate(self, seed: u64, load: u32) -> BlockTrace {
        let mut world = Arrivals { rng: Rng::new(seed), blocks: 0, timed: Vec::new() };
        let gap = |seconds: f64| seconds / f64::from(load);
        let mut now = 0.0;
        let mut batches = Vec::new();
        let library = world.library();
        let systems: Vec<_> = (0..4).map(|_| world.fresh(3)).collect();
        let tools: Vec<_> = (0..4)
            .map(|_| {
                let length = world.rng.range(20, 40);
                world.fresh(length)
            })
            .collect();
        while world.timed.len() < REQUESTS {
            let (of, mean) = match self {
                Kind::Chats => (0, 8.0),
                Kind::Agents => (1, 60.0),
                Kind::Retrieval => (2, 3.0),
                Kind::Batch => (3, 120.0),
                Kind::SingleShots => (if world.rng.one_in(6) { 0 } else { 4 }, 2.0),
                Kind::ChatsAndBatch => (if world.rng.one_in(40) { 3 } else { 0 }, 8.0),
                Kind::AgentsAndRetrieval => (*world.rng.pick(&[1, 2, 2, 2, 2, 4, 4, 4]), 4.0),
                Kind::DayAndNight if ((now / 14_400.0) as u64).is_multiple_of(2) => {
                    (*world.rng.pick(&[0, 0, 0, 0, 0, 1, 2, 2, 2, 4, 4]), 6.0)
                }
                Kind::DayAndNight => (if world.rng.one_in(2) { 3 } else { 4 }, 60.0),
            };
            now += gap(world.pause(mean));
            match of {
                0 => {
                    let system = world.rng.pick(&systems).clone();
                    world.chat(now, system)
                }
                1 => {
                    let tools = world.rng.pick(&tools).clone();
                    world.agent(now, tools)
                }
                2 => world.question(now, &library),
                3 => world.job(now, &mut batches),
                _ => {
                    let length = world.rng.range(10, 60);
                    let text = world.fresh(length);
                    world.timed.push((now, text))
                }
            }
        }
        world.trace()
    }
}

struct Arrivals {
    rng: Rng,
    blocks: u32,
    timed: Vec<(f64, Vec<u32>)>,
}

impl Arrivals {
    fn fresh(&mut self, count: u64) -> Vec<u32> {
        let first = self.blocks;
        self.blocks += count as u32;
        (first..self.blocks).collect()
    }

    fn unit(&mut self) -> f64 {
        ((self.rng.word() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Exponential.
    fn pause(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Seconds around a median, from a third of it to three times in most cases (log-normal, a sum of twelve for the bell).
    fn around(&mut self, median: f64) -> f64 {
        let bell: f64 = (0..12).map(|_| self.unit()).sum::<f64>() - 6.0;
        median * (0.7 * bell).exp()
    }

    fn chat(&mut self, mut now: f64, mut text: Vec<u32>) {
        let first = self.rng.skewed(1, 12);
        text.extend(self.fresh(first));
        loop {
            self.timed.push((now, text.clone()));
            if self.rng.one_in(3) || text.len() > 200 {
                return;
            }
            now += self.around(60.0);
            // What was answered, and the next question.
            let more = self.rng.range(1, 3) + self.rng.skewed(1, 8);
            text.extend(self.fresh(more));
        }
    }

    fn agent(&mut self, mut now: f64, mut text: Vec<u32>) {
        let task = self.rng.range(2, 8);
        text.extend(self.fresh(task));
        loop {
            for _ in 0..self.rng.range(5, 40) {
                self.timed.push((now, text.clone()));
                now += if self.rng.one_in(12) { self.around(60.0) } else { self.around(5.0) };
                let more = self.rng.skewed(1, 6);
                text.extend(self.fresh(more));
            }
            if self.rng.one_in(2) || text.len() > 300 {
                return;
            }
            // The person who is to say how it goes on is away.
            now += self.around(1800.0);
        }
    }

    /// Documents: the first is asked about as often as the next two together, and so on.
    fn library(&mut self) -> Vec<Vec<u32>> {
        (0..600)
            .map(|_| {
                let length = self.rng.range(8, 40);
                self.fresh(length)
            })
            .collect()
    }

    fn question(&mut self, mut now: f64, library: &[Vec<u32>]) {
        let at = self.rng.skewed(0, library.len() as u64 - 1) as usize;
        let mut text = library[at].clone();
        loop {
            let question = self.rng.range(1, 2);
            text.extend(self.fresh(question));
            self.timed.push((now, text.clone()));
            if !self.rng.one_in(3) {
                return;
            }
            now += self.around(90.0);
        }
    }

    fn job(&mut self, mut now: f64, done: &mut Vec<Vec<Vec<u32>>>) {
        let again = !done.is_empty() && self.rng.one_in(4);
        let texts = if again {
            self.rng.pick(done).clone()
        } else {
            let length = self.rng.range(6, 30);
            let instruction = self.fresh(length);
            let texts: Vec<Vec<u32>> = (0..self.rng.range(60, 300))
                .map(|_| {
                    let length = self.rng.range(3, 25);
                    [instruction.clone(), self.fresh(length)].concat()
                })
                .collect();
            done.push(texts.clone());
            texts
        };
        for text in texts {
            self.timed.push((now, text));
            now += self.pause(1.0);
        }
    }

    fn trace(mut self) -> BlockTrace {
        self.timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        // Sessions that began last would be cut in their middle: the tail has fewer beginnings than the rest.
        self.timed.truncate(REQUESTS);
        BlockTrace { requests: self.timed.into_iter().map(|(_, ids)| ids).collect() }
    }
}

impl BlockTrace {
    /// The first and the second half of the requests.
    pub fn by_time(&self) -> [BlockTrace; 2] {
        let (first, second) = self.requests.split_at(self.requests.len() / 2);
        [first, second].map(|requests| BlockTrace { requests: requests.to_vec() })
    }

    /// Requests of two halves of the sessions. A session is what has one block behind what a hundredth of all requests begin with.
    pub fn by_session(&self) -> [BlockTrace; 2] {
        let mut counts: HashMap<u32, usize> = HashMap::new();
        self.requests.iter().flatten().for_each(|id| *counts.entry(*id).or_default() += 1);
        let common = self.requests.len().div_ceil(100);
        let mut halves = [BlockTrace::default(), BlockTrace::default()];
        for ids in &self.requests {
            let own = ids.iter().find(|id| counts[id] < common);
            let half = own.map_or(0, |id| crate::rng::mix(u64::from(*id)) % 2);
            halves[half as usize].requests.push(ids.clone());
        }
        halves
    }
}
