//! The real server around a model that says what a script tells it to: for trying clients without a model and without the network.
//!
//!     cargo run -p folio-server --example scripted -- 8000 script.json
//!
//! The script is a list of `{"has": [...], "lacks": [...], "say": "..."}`: an answer is that of the first rule whose texts the rendered
//! prompt has and lacks. The model's template shows tools and calls as Hermes' do, and reasoning in `<think>`. It answers to any name.

#[path = "../tests/common/mod.rs"]
mod common;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use common::{FakeEngine, Submitting};
use folio_engine::{EventSink, Request};
use folio_server::{Engine, ServerConfig};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(default)]
    has: Vec<String>,
    #[serde(default)]
    lacks: Vec<String>,
    say: String,
}

/// Says what the first rule that fits the prompt says.
fn scripted(rules: Vec<Rule>) -> impl Engine {
    // One answer is chosen and said at a time.
    let turn = Mutex::new(());
    let submit = move |engine: &FakeEngine, request: Request, sink: Box<dyn EventSink>| {
        let _turn = turn.lock().expect("no rule panics");
        let bytes: Vec<u8> = request.prompt.iter().map(|id| u8::try_from(*id).unwrap_or(b'$')).collect();
        let prompt = String::from_utf8_lossy(&bytes);
        let fits = |rule: &&Rule| {
            rule.has.iter().all(|text| prompt.contains(text))
                && !rule.lacks.iter().any(|text| prompt.contains(text))
        };
        let say = rules.iter().find(fits).map_or("No rule of the script fits.", |rule| &rule.say);
        engine.plan(|plan| plan.say = say.into());
        let hashes = engine.hashes(&request.root, &request.prompt);
        engine.submit(request, hashes, sink)
    };
    Submitting { engine: FakeEngine::default(), submit }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: scripted PORT SCRIPT.json";
    let port: u16 = arguments.next().and_then(|port| port.parse().ok()).expect(usage);
    let script = std::fs::read_to_string(arguments.next().expect(usage)).expect("the script can be read");
    let rules = serde_json::from_str(&script).expect("the script is a list of rules");
    let mut app = common::tool_app(Arc::new(scripted(rules)), 1 << 22);
    app.model.names.push("*".to_owned());
    let config =
        ServerConfig { listen: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port), ..Default::default() };
    folio_server::run(config, app, |addresses| eprintln!("listening on http://{}", addresses.serving))
        .expect("it serves");
}
