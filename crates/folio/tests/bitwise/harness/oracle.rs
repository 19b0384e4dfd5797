//! What requests say alone, and drafts of what they will say.

use folio_engine::plan::PLACEHOLDER;
use folio_engine::{DRAFTS_MAX, RequestId, Scheduler, Speculation};

use super::recorder::Row;
use super::{Arrival, LogprobBits, MAX_LEN, Run, World, whole};

/// Each request alone, cold, its prompt in one chunk: what everything else must equal.
pub struct Oracle {
    /// Per request: token and logits hash of every position but the last.
    rows: Vec<Vec<Row>>,
    tokens: Vec<Vec<u32>>,
    logprobs: Vec<Vec<LogprobBits>>,
    vectors: Vec<Vec<u32>>,
}

impl Oracle {
    pub fn new(world: &mut World, arrivals: &[Arrival]) -> Self {
        let (rows, tokens, logprobs, vectors) = Default::default();
        let mut oracle = Self { rows, tokens, logprobs, vectors };
        for arrival in arrivals {
            world.forget();
            let alone = Arrival { step: 0, ..arrival.clone() };
            let mut run = world.run(&whole(), &[alone]);
            assert_eq!(run.cached, [0], "the oracle runs cold");
            oracle.tokens.push(run.tokens.remove(0));
            oracle.logprobs.push(run.logprobs.remove(0));
            oracle.vectors.push(run.vectors.remove(0));
            let wanted = arrival.pooling.is_some();
            assert_eq!(oracle.vectors.last().is_some_and(|vector| !vector.is_empty()), wanted);
            oracle.rows.push(run.rows.remove(0));
        }
        world.forget();
        oracle
    }

    /// The oracle of the first `count` requests.
    pub fn first(&self, count: usize) -> Self {
        let Self { rows, tokens, logprobs, vectors } = self;
        Self {
            rows: rows[..count].to_vec(),
            tokens: tokens[..count].to_vec(),
            logprobs: logprobs[..count].to_vec(),
            vectors: vectors[..count].to_vec(),
        }
    }

    /// Where drafts come from text: what they will say, but for one token in so many, is expected of them.
    pub fn speculation(
        &self,
        arrivals: &[Arrival],
        drafter: folio_engine::Drafter,
        wrong: usize,
    ) -> Vec<Speculation> {
        let of = |(arrival, answer): (&Arrival, &Vec<u32>)| {
            let said = (1..).zip(answer).map(|(at, token)| token.abs_diff(u32::from(at % wrong == 0)));
            let expected: Vec<u32> = if drafter.is_model() { Vec::new() } else { said.collect() };
            Speculation::new(drafter, DRAFTS_MAX, &arrival.prompt, &expected)
        };
        arrivals.iter().zip(&self.tokens).map(of).collect()
    }

    /// Who knows what they will say.
    pub fn drafter(&self, script: Script) -> Drafter {
        Drafter { script, answers: self.tokens.clone() }
    }

    /// Every request got its tokens, and every row that was computed has the bits it has alone.
    pub fn check(&self, run: &Run, what: &str) {
        assert_eq!(run.tokens, self.tokens, "{what}: other tokens");
        assert_eq!(run.logprobs, self.logprobs, "{what}: other log probabilities");
        assert_eq!(run.vectors, self.vectors, "{what}: other vectors");
        // Rows behind an answer's end: of steps that were under way when it ended.
        let mut orphans = 0;
        for rows in &run.rows {
            let same = |oracle: &&Vec<Row>| {
                rows.iter().all(|(position, token, _)| {
                    oracle.get(*position as usize).is_none_or(|row| row.1 == *token)
                })
            };
            let behind = |oracle: &Vec<Row>| {
                rows.iter().filter(|(position, ..)| *position as usize >= oracle.len()).count() as u64
            };
            // Requests may share a prefix, so several oracles can apply to a short piece: any of them will do.
            let candidates = || self.rows.iter().filter(same);
            let least = candidates().map(behind).min();
            orphans += least.unwrap_or_else(|| panic!("{what}: a sequence computed tokens nobody asked for"));
            let candidates = candidates().filter(|oracle| Some(behind(oracle)) == least);
            let differs =
                |oracle: &Vec<Row>, row: &Row| oracle.get(row.0 as usize).is_some_and(|own| own.2 != row.2);
            let differing = candidates.map(|oracle| rows.iter().find(|row| differs(oracle, row)));
            if let Some(row) = differing.min_by_key(Option::is_some).flatten() {
                panic!("{what}: the logits at position {} differ from the request alone", row.0);
            }
        }
        assert!(orphans <= run.orphans, "{what}: {orphans} rows behind the ends of answers");
    }
}

/// Says before each step what each answer goes on with, from the last token that was told.
#[derive(Clone)]
pub struct Drafter {
    pub script: Script,
    /// What each arrival says, and would say behind its end.
    pub answers: Vec<Vec<u32>>,
}

/// What a [`Drafter`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Script {
    /// Of so many drafts none to all are right, in turn.
    Mixed(usize),
    /// So many, all right.
    Right(usize),
    /// All wrong.
    Wrong,
    /// Right for so many tokens, then wrong.
    RightFor(usize),
    /// One right, then what is no token, then right ones.
    OutOfVocabulary,
    /// One that the arrival's rules forbid, or else its stop token, then right ones.
    Forbidden,
    /// Two right, then the arrival's stop token, then more.
    EndsInStop,
    /// Right ones and behind them more than the context has room for.
    LongerThanContext,
}

/// Each case that has a name.
pub const SCRIPTS: [Script; 9] = [
    Script::Mixed(3),
    Script::Right(5),
    Script::Wrong,
    Script::RightFor(1),
    Script::RightFor(4),
    Script::OutOfVocabulary,
    Script::Forbidden,
    Script::EndsInStop,
    Script::LongerThanContext,
];

impl Drafter {
    pub(super) fn propose(
        &self,
        step: u64,
        vocab: u32,
        run: &Run,
        arrivals: &[Arrival],
        scheduler: &mut Scheduler,
    ) {
        for (id, (answer, said)) in self.answers.iter().zip(&run.tokens).enumerate() {
            let rest = answer.get(said.len()..).unwrap_or_default();
            let drafts = self.drafts(step as usize + id, vocab, &arrivals[id], said, rest);
            scheduler.propose(RequestId(id as u64), 0, &drafts);
        }
    }

    /// What `rest` makes of an answer that so far is `said`.
    fn drafts(&self, turn: usize, vocab: u32, arrival: &Arrival, said: &[u32], rest: &[u32]) -> Vec<u32> {
        // The first `right` are.
        let of = |right: usize, most: usize| -> Vec<u32> {
            let wrong = |at: usize| u32::from(at >= right);
            rest.iter().take(most).enumerate().map(|(at, token)| (token + wrong(at)) % vocab).collect()
        };
        let stop = arrival.stop.unwrap_or(0);
        let right = |most| of(most, most);
        match self.script {
            Script::Mixed(most) => of((turn + turn / 4) % 4 * most / 3, most),
            Script::Right(most) => right(most),
            Script::Wrong => of(0, 4),
            Script::RightFor(tokens) => of(tokens, tokens + 3),
            Script::OutOfVocabulary => {
                let outside = [vocab, PLACEHOLDER, u32::MAX][turn % 3];
                [&right(1)[..], &[outside], &rest[rest.len().min(2)..]].concat()
            }
            Script::Forbidden => [&[arrival.forbidden(said, vocab).unwrap_or(stop)], &right(3)[..]].concat(),
            Script::EndsInStop => [&right(2)[..], &[stop], &right(3)].concat(),
            Script::LongerThanContext => [&right(usize::MAX)[..], &[1; 4 * MAX_LEN as usize]].concat(),
        }
    }
}
