//! Where a client's prompts stop being alike although they go on alike.
//!
//! A cache finds what a prompt begins with, up to the first token that differs. A client that writes the time, a number or a name near the
//! beginning loses everything behind it. Owns: each tenant's last prompts, by tokens and never longer than it takes, and at which
//! positions they differed. Must never: tell a token. Bounded: [`PROMPTS`] prompts of [`TOKENS`] tokens for each of [`TENANTS`] tenants.

use std::collections::{HashMap, VecDeque};

use folio_kv::TenantId;

/// Prompts of a tenant that the next is compared with: several conversations take turns.
const PROMPTS: usize = 4;
const TOKENS: usize = 4096;
const TENANTS: usize = 128;
/// Tokens that may differ before they are alike again.
const DIFFER: usize = 32;
/// Tokens that are alike by no accident.
const ALIKE: usize = 16;
/// Alike tokens behind a difference that are worth a word.
const WORTH: usize = 64;
/// Positions of a tenant that are told apart.
const POSITIONS: usize = 16;

/// What two prompts have in common: `at` tokens in front, and behind some that differ `alike` more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Common {
    at: usize,
    alike: usize,
}

fn common(before: &[u32], now: &[u32]) -> Common {
    let alike =
        |before: &[u32], now: &[u32]| before.iter().zip(now).take_while(|(one, other)| one == other).count();
    let at = alike(before, now);
    let (before, now) = (&before[at..], &now[at..]);
    // The fewest that differ.
    for differ in 1..=2 * DIFFER {
        for left_out in differ.saturating_sub(DIFFER)..=differ.min(DIFFER) {
            let (Some(one), Some(other)) = (before.get(left_out..), now.get(differ - left_out..)) else {
                continue;
            };
            if one.len() >= ALIKE && other.len() >= ALIKE && one[..ALIKE] == other[..ALIKE] {
                return Common { at, alike: alike(one, other) };
            }
        }
    }
    Common { at, alike: 0 }
}

/// One position at which a tenant's prompts differ, old times counting less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Break {
    pub tenant: TenantId,
    /// The first token that differed.
    pub at: usize,
    /// Prompts that differed there, and tokens behind that were as before and were computed again.
    pub prompts: f64,
    pub tokens: f64,
}

#[derive(Default)]
struct Client {
    recent: VecDeque<Vec<u32>>,
    breaks: Vec<Break>,
    /// Of all prompts.
    prompts: f64,
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Breaks(HashMap<TenantId, Client>);

impl Breaks {
    /// A prompt was asked for, of which `cached` tokens were found.
    pub fn ask(&mut self, tenant: TenantId, prompt: &[u32], cached: usize, block_tokens: usize) {
        if self.0.len() >= TENANTS && !self.0.contains_key(&tenant) {
            // Whoever came least, lately.
            let least = self.0.iter().min_by(|one, other| one.1.prompts.total_cmp(&other.1.prompts));
            let least = least.map(|(tenant, _)| *tenant);
            least.map(|least| self.0.remove(&least));
        }
        let client = self.0.entry(tenant).or_default();
        client.prompts += 1.0;
        let prompt = &prompt[..prompt.len().min(TOKENS)];
        let nearest = client
            .recent
            .iter()
            .map(|before| common(before, prompt))
            .max_by_key(|common| common.at + common.alike);
        if let Some(Common { at, alike }) = nearest.filter(|common| common.alike >= WORTH)
            && cached < at + alike / 2
        {
            // Whole blocks, behind that of the difference.
            let lost = (alike / block_tokens * block_tokens) as f64;
            client.lose(tenant, at, lost);
        }
        if client.recent.len() == PROMPTS {
            client.recent.pop_front();
        }
        client.recent.push_back(prompt.to_vec());
    }

    /// What was asked until now counts so much less.
    pub fn age(&mut self, factor: f64) {
        for client in self.0.values_mut() {
            client.prompts *= factor;
            client.breaks.retain_mut(|found| {
                (found.prompts, found.tokens) = (found.prompts * factor, found.tokens * factor);
                found.prompts > 0.1
            });
        }
    }

    pub fn forget(&mut self, gone: &std::collections::HashSet<TenantId>) {
        self.0.retain(|tenant, _| !gone.contains(tenant));
    }

    pub fn all(&self) -> impl Iterator<Item = &Break> {
        self.0.values().flat_map(|client| &client.breaks)
    }
}

impl Client {
    fn lose(&mut self, tenant: TenantId, at: usize, tokens: f64) {
        if let Some(known) = self.breaks.iter_mut().find(|known| known.at == at) {
            known.prompts += 1.0;
            known.tokens += tokens;
            return;
        }
        if self.breaks.len() == POSITIONS {
            let least =
                self.breaks.iter().enumerate().min_by(|one, other| one.1.tokens.total_cmp(&other.1.tokens));
            let least = least.map_or(0, |(at, _)| at);
            self.breaks.swap_remove(least);
        }
        self.breaks.push(Break { tenant, at, prompts: 1.0, tokens });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(front: &[u32], changed: &[u32], behind: usize) -> Vec<u32> {
        [front, changed, &(1000..1000 + behind as u32).collect::<Vec<_>>()].concat()
    }

    #[test]
    fn what_is_alike_behind_a_difference_is_found_whatever_its_length() {
        let front: Vec<u32> = (0..37).collect();
        let (one, other) = (prompt(&front, &[900, 901], 300), prompt(&front, &[800, 801, 802], 400));
        assert_eq!(common(&one, &other), Common { at: 37, alike: 300 });
        assert_eq!(common(&one, &one), Common { at: 339, alike: 0 }, "nothing differs");
        assert_eq!(common(&front, &other), Common { at: 37, alike: 0 }, "it goes on");
        let others: Vec<u32> = (5000..5400).collect();
        assert_eq!(common(&one, &[&front[..], &others[..]].concat()), Common { at: 37, alike: 0 });
    }

    #[test]
    fn a_client_is_told_of_the_position_and_only_when_it_loses_by_it() {
        let (front, tenant): (Vec<u32>, _) = ((0..37).collect(), TenantId(1));
        let mut breaks = Breaks::default();
        for turn in 0..10 {
            breaks.ask(tenant, &prompt(&front, &[500 + turn], 200), 32, 16);
        }
        assert_eq!(
            breaks.all().copied().collect::<Vec<_>>(),
            [Break { tenant, at: 37, prompts: 9.0, tokens: 9.0 * 192.0 }]
        );
        breaks.age(0.01);
        assert_eq!(breaks.all().count(), 0);
        let mut none = Breaks::default();
        for turn in 0..10 {
            // A conversation that goes on, others in between.
            none.ask(tenant, &prompt(&front, &[], 200 + 10 * turn), 200, 16);
            none.ask(tenant, &(9000 * (turn as u32 + 1)..).take(300).collect::<Vec<_>>(), 0, 16);
        }
        assert_eq!(none.all().count(), 0);
    }

    #[test]
    fn it_holds_no_more_tenants_and_positions_than_it_says() {
        let mut breaks = Breaks::default();
        for tenant in 0..500 {
            breaks.ask(TenantId(tenant), &[1; 10_000], 0, 16);
        }
        assert_eq!(breaks.0.len(), TENANTS);
        let tenant = *breaks.0.keys().next().unwrap();
        let tokens = |at: u32| (0..at).chain([70_000 + at]).chain(1000..1200).collect::<Vec<_>>();
        for at in 0..100 {
            breaks.ask(tenant, &tokens(at), 0, 16);
            breaks.ask(
                tenant,
                &tokens(at)
                    .iter()
                    .map(|token| if *token == 70_000 + at { 1 } else { *token })
                    .collect::<Vec<_>>(),
                0,
                16,
            );
        }
        let client = &breaks.0[&tenant];
        assert!(client.recent.len() <= PROMPTS && client.recent.iter().all(|prompt| prompt.len() <= TOKENS));
        assert!(client.breaks.len() <= POSITIONS);
    }
}
