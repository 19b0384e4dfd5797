//! What the scheduler does for models with recurrent layers. `folio-sim` tests it all at once.

use folio_engine::SchedulerConfig;
use folio_engine::request::Request;
use folio_kv::{GroupConfig, Layout};
use folio_sim::Machine;
use folio_sim::scenario::{request, small, text};

/// States are kept behind every 16th position, hashes come every fourth.
fn machine(config: SchedulerConfig) -> Machine {
    let (layout, blocks, block_tokens) = (Layout::State, 40, 16);
    let states = GroupConfig { layout, blocks, block_tokens, bytes_per_block: 1, optional: false };
    Machine::with_groups(config, 400, 4, &[states])
}

/// The second learns where it leaves what the first began with: a step of it ends there, also where others could be begun behind it, and the
/// third goes on from its state. A reservation has no room for another state.
#[test]
fn a_state_is_kept_where_prompts_part() {
    let guaranteed = SchedulerConfig { guarantee_completion: true, ..small() };
    for (mut machine, cached) in [
        (machine(small()), [0, 16, 24, 24]),
        (machine(small()).with_sampling(), [0, 16, 24, 24]),
        (machine(guaranteed), [0, 16, 16, 16]),
    ] {
        for id in 1..=4 {
            let prompt = [text(1, 24), text(10 + id as u32, 40)].concat();
            let request: Request = request(id, &prompt, 5);
            machine.submit(request.clone());
            machine.run();
            machine.assert_as_alone(&request);
        }
        assert_eq!([1, 2, 3, 4].map(|id| machine.cached_tokens(id)), cached.map(Some));
    }
}
