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

use common::FakeEngine;
use folio_engine::handle::{Health, Rejected};
use folio_engine::{
    CacheCommand, CacheReply, CancelFlag, EngineStats, EventSink, Micros, Request, RequestId,
};
use folio_kv::{Holdings, TenantId};
use folio_server::{App, Engine, Parsers, ServerConfig};
use folio_text::{ReasoningFormat, ToolFormat};
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

struct Scripted {
    engine: Arc<FakeEngine>,
    rules: Vec<Rule>,
    /// One answer is chosen and said at a time.
    turn: Mutex<()>,
}

impl Engine for Scripted {
    fn next_request_id(&self) -> RequestId {
        self.engine.next_request_id()
    }

    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<CancelFlag, Rejected> {
        let _turn = self.turn.lock().expect("no rule panics");
        let bytes: Vec<u8> = request.prompt.iter().map(|id| u8::try_from(*id).unwrap_or(b'$')).collect();
        let prompt = String::from_utf8_lossy(&bytes);
        let fits = |rule: &&Rule| {
            rule.has.iter().all(|text| prompt.contains(text))
                && !rule.lacks.iter().any(|text| prompt.contains(text))
        };
        let say = self.rules.iter().find(fits).map_or("No rule of the script fits.", |rule| &rule.say);
        self.engine.plan(|plan| plan.say = say.into());
        self.engine.submit(request, sink)
    }

    fn command(&self, command: CacheCommand, reply: CacheReply) -> Result<(), Rejected> {
        self.engine.command(command, reply)
    }

    fn stats(&self) -> Arc<EngineStats> {
        self.engine.stats()
    }

    fn holdings(&self, tenant: TenantId) -> Holdings {
        self.engine.holdings(tenant)
    }

    fn retain_tenants(&self, stays: &dyn Fn(TenantId) -> bool) {
        self.engine.retain_tenants(stays);
    }

    fn health(&self, stall_us: u64) -> Health {
        self.engine.health(stall_us)
    }

    fn now(&self) -> Micros {
        self.engine.now()
    }

    fn choices_max(&self) -> u32 {
        self.engine.choices_max()
    }

    fn drain(&self) {
        self.engine.drain();
    }

    fn stop(&self) {
        self.engine.stop();
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: scripted PORT SCRIPT.json";
    let port: u16 = arguments.next().and_then(|port| port.parse().ok()).expect(usage);
    let script = std::fs::read_to_string(arguments.next().expect(usage)).expect("the script can be read");
    let rules = serde_json::from_str(&script).expect("the script is a list of rules");
    let engine = Arc::new(Scripted { engine: Arc::default(), rules, turn: Mutex::default() });
    let parsers = Parsers { tools: ToolFormat::named("hermes"), reasoning: ReasoningFormat::named("think") };
    let mut app = App { template: Some(Arc::new(common::tool_template())), parsers, ..common::app(engine) };
    app.model.context_length = 1 << 22;
    app.model.names.push("*".to_owned());
    let config =
        ServerConfig { listen: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port), ..Default::default() };
    folio_server::run(config, app, |addresses| eprintln!("listening on http://{}", addresses.serving))
        .expect("it serves");
}
