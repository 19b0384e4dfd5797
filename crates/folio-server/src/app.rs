//! The composition root: makes the parts of a server and hands each what it needs. Only `routes` and `serve` see them all; a handler names
//! the parts that it takes.

use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRef;
use prometheus_client::collector::Collector;

use crate::batch::Batches;
use crate::config::ServerConfig;
use crate::endpoints::batches::Runner;
use crate::endpoints::live::sampling::LivePage;
use crate::endpoints::prefixes;
use crate::engine::{App, Served};
use crate::error::ServerError;
use crate::generation::Generator;
use crate::generation::input::InputProcessor;
use crate::load::Load;
use crate::observability::Observability;
use crate::observability::audit::Audit;
use crate::observability::kv_events;
use crate::observability::metrics::Metrics;
use crate::observability::recording::Recorder;
use crate::observability::tenant_metrics::TenantCollector;
use crate::observability::traces::Traces;
use crate::observability::usage::Meters;
use crate::observability::why::Why;
use crate::response_store::ResponseStore;
use crate::tenancy::Tenancy;

/// Every part of a running server.
#[derive(Clone)]
pub(crate) struct State(Arc<ServerParts>);

macro_rules! parts {
    ($($part:ident: $owner:ty,)*) => {
        pub(crate) struct ServerParts {
            $(pub $part: Arc<$owner>,)*
        }

        $(impl FromRef<State> for Arc<$owner> {
            fn from_ref(state: &State) -> Self {
                state.$part.clone()
            }
        })*
    };
}

parts! {
    served: Served,
    tenancy: Tenancy,
    observability: Observability,
    load: Load,
    inputs: InputProcessor,
    generator: Generator,
    responses: ResponseStore,
    batches: Batches,
    runner: Runner,
    live: LivePage,
}

impl Deref for State {
    type Target = ServerParts;

    fn deref(&self) -> &ServerParts {
        &self.0
    }
}

impl State {
    pub fn new(config: &ServerConfig, app: App) -> Result<Self, ServerError> {
        let limits = &config.limits;
        let served = Arc::new(Served::new(app, &limits.request, &config.hints, config.listen)?);
        let tenants = Arc::new(config.key_ring()?);
        let meters = Arc::new(Meters::new(served.name(), config.usage_file.as_deref())?);
        let by_tenant = config.tenant_metrics.then(|| {
            let collector = TenantCollector::new(served.engine.clone(), meters.clone(), tenants.clone());
            Box::new(collector) as Box<dyn Collector>
        });
        let kv_events =
            config.kv_events.as_ref().map(|source| kv_events::start(source, &tenants)).transpose()?;
        let events = kv_events.as_ref().map(|published| published.events.clone());
        let adapters = (served.adapters.clone(), tenants.restricts_adapters());
        let metrics = Metrics::new(&served.engine, events, adapters, served.name(), by_tenant);
        let traces = config.traces_endpoint.as_deref();
        let traces =
            traces.map(|endpoint| Traces::start(endpoint, served.name(), metrics.traced())).transpose()?;
        let traces = traces.map(Arc::new);
        let recorder = Arc::new(Recorder::new(served.engine.clone()));
        let observability = Arc::new(Observability {
            metrics,
            meters,
            why: Why::new(
                served.engine.clone(),
                served.model.context_length,
                config.why.clone(),
                traces.clone(),
                recorder.clone(),
            ),
            recorder,
            traces,
            kv_events,
            audit: config.audit_file.as_deref().map(Audit::open).transpose()?,
            started_s: folio_api::unix_s(),
        });
        let load = Arc::new(Load::new(limits.clone(), observability.metrics.panics.clone()));
        let inputs = Arc::new(InputProcessor::new(config, served.clone(), observability.clone()));
        let tokens = |prefix: &_| prefixes::declared(&inputs, prefix);
        let tenancy = Tenancy::new(tenants, served.clone(), &config.tenants.prefixes, tokens)?;
        let tenancy = Arc::new(tenancy);
        let generator = Arc::new(Generator {
            served: served.clone(),
            inputs: inputs.clone(),
            tenancy: tenancy.clone(),
            load: load.clone(),
            observability: observability.clone(),
        });
        let responses = Arc::new(ResponseStore::new(limits.responses, limits.responses_bytes));
        let batches = Arc::new(Batches::open(&config.batch)?);
        let runner = Arc::new(Runner {
            generator: generator.clone(),
            batches: batches.clone(),
            responses: responses.clone(),
        });
        let live = LivePage::new(served.clone(), tenancy.clone(), observability.clone(), load.clone());
        Ok(Self(Arc::new(ServerParts {
            served,
            tenancy,
            observability,
            load,
            inputs,
            generator,
            responses,
            batches,
            runner,
            live: Arc::new(live),
        })))
    }

    /// Lets go of tenants that have no valid key and are at rest, and of what is kept and counted for them. Blocks.
    pub fn forget_tenants(&self) {
        let gone = self.tenancy.leave();
        if !gone.is_empty() {
            self.observability.meters.forget(&gone);
            self.observability.why.forget(&gone);
            self.inputs.forget(&gone);
        }
        // Also of tenants that left before: what they had cached was evicted since.
        self.served.engine.retain_tenants(&|tenant| self.tenancy.tenants.is_known(tenant));
    }
}
