//! Listening, and ending well: the states of `serve`, of a server that computes nothing itself.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use prometheus_client::metrics::gauge::Gauge;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::config::ServerConfig;
use crate::error::ServerError;
use crate::http::tls::Tls;
use crate::listening::{Front, ListeningSocket, bind};
use crate::load::Load;
use crate::observability::audit::Audit;
use crate::observability::metrics::FrontFigures;
use crate::serve::{Addresses, CLOSING, ENDING, look_at_files, measure_lag, runtime, signals};
use crate::threads::{FILES, NOBODY, SINGLE};

use super::catalog::Catalog;
use super::config::RouterConfig;
use super::engines::Engines;
use super::routes;
use super::state::{RouterParts, RouterState};

/// How often tenants are looked for that are no more.
const FORGOTTEN_EVERY: Duration = Duration::from_secs(60);

/// Listens, and serves until a SIGTERM or Ctrl-C has drained it, or a second one stopped it. `ready` is told the addresses once connections
/// are accepted.
pub fn run_router(
    config: ServerConfig,
    router: RouterConfig,
    ready: impl FnOnce(Addresses),
) -> Result<(), ServerError> {
    let blocking = config.limits.text_threads.max(1) + FILES + SINGLE;
    let runtime = runtime(config.http_threads, blocking).map_err(ServerError::Runtime)?;
    let result = runtime.block_on(serve(config, router, ready));
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

fn state(config: &ServerConfig, router: RouterConfig) -> Result<RouterState, ServerError> {
    let figures = FrontFigures::default();
    Ok(RouterState::new(RouterParts {
        load: Arc::new(Load::new(config.limits.clone(), figures.panics.clone())),
        figures,
        tenants: Arc::new(config.key_ring()?),
        catalog: Arc::new(Catalog::new(&router.models)?),
        engines: Engines::new(&router, config.drain_timeout)?,
        audit: config.audit_file.as_deref().map(Audit::open).transpose()?,
        version: router.version,
        // Where keys are asked for nobody decides how long a model stays that others use, too.
        keep_alive: config.api_keys.is_empty()
            && config.tenants.tenants.is_empty()
            && config.key_file.is_none(),
        created_s: folio_api::unix_s(),
    }))
}

/// What clients reach, without a socket; time does not pass for its models.
pub fn router_of(config: &ServerConfig, router: RouterConfig) -> Result<axum::Router, ServerError> {
    Ok(routes::serving(&state(config, router)?, config.metrics_on_admin))
}

async fn serve(
    config: ServerConfig,
    router: RouterConfig,
    ready: impl FnOnce(Addresses),
) -> Result<(), ServerError> {
    let tls = config.tls.as_ref().map(Tls::open).transpose()?.map(Arc::new);
    let state = state(&config, router)?;
    let engines = state.engines.clone();
    let mut signals = signals().map_err(ServerError::Signals)?;
    let serving = bind(config.listen).await?;
    let admin = match &config.admin {
        Some(admin) => Some(bind(admin.listen).await?),
        None => None,
    };
    let local = |listener: &TcpListener| {
        let failed = |source| ServerError::Bind { address: config.listen.to_string(), source };
        listener.local_addr().map_err(failed)
    };
    ready(Addresses {
        serving: local(&serving)?,
        admin: admin.as_ref().map(local).transpose()?,
        kv_events: None,
        tls: tls.is_some(),
    });
    if let Some(tls) = &tls {
        tokio::spawn(look_at_files(Arc::downgrade(tls)));
    }
    let clock = tokio::spawn(engines.clone().keep_time());
    let forgetting = tokio::spawn(forget_tenants(state.clone()));
    let lag = tokio::spawn(measure_lag(state.figures.lag.clone()));
    let (clients, operators) = (routes::serving(&state, config.metrics_on_admin), routes::admin(&state));
    let front = Front { load: state.load.clone(), open: Gauge::default(), tls };
    let graceful = GracefulShutdown::new();
    let (serving, admin) = (ListeningSocket::Tcp(serving), admin.map(ListeningSocket::Tcp));
    let accept =
        front.accept_all((&serving, &clients), admin.as_ref().map(|admin| (admin, &operators)), &graceful);
    let drained = async {
        signals.recv().await;
        drain(&state, config.drain_timeout, &mut signals).await
    };
    let drained = tokio::select! {
        () = accept => false,
        drained = drained => drained,
    };
    if !drained {
        // Whoever still waits for an answer reads that it will not come.
        engines.kill();
    }
    tokio::select! {
        () = graceful.shutdown() => {}
        () = tokio::time::sleep(if drained { CLOSING } else { ENDING }) => {}
        _ = signals.recv() => {}
    }
    tokio::select! {
        () = engines.end() => {}
        _ = signals.recv() => {}
    }
    clock.abort();
    forgetting.abort();
    lag.abort();
    Ok(())
}

/// Lets go of tenants without a valid key.
async fn forget_tenants(state: RouterState) {
    loop {
        tokio::time::sleep(FORGOTTEN_EVERY).await;
        let tenants = state.tenants.clone();
        let _ = state.load.with_files(NOBODY, 0, move || Ok(tenants.leave())).await;
    }
}

/// Takes nothing new and waits for what runs. Whether all of it ended before the next signal, and before patience did.
async fn drain(state: &RouterState, patience: Duration, signals: &mut mpsc::Receiver<()>) -> bool {
    state.load.drain();
    state.engines.close();
    tracing::info!(running = state.load.in_flight.count(), "draining; a second signal stops at once");
    tokio::select! {
        () = state.load.in_flight.idle() => true,
        () = tokio::time::sleep(patience) => false,
        _ = signals.recv() => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrival::RequestLog;

    #[test]
    fn what_failed_here_is_counted_and_so_is_how_late_the_event_loop_comes() {
        let models = RouterConfig {
            models: Vec::new(),
            program: "folio".into(),
            configuration: "".into(),
            memory_bytes: 1,
            start_timeout: Duration::ZERO,
            wait_timeout: Duration::ZERO,
            waiting: 1,
            version: "1",
        };
        let state = state(&ServerConfig::default(), models).unwrap();
        state.panicked();
        state.figures.lag.observe(0.001);
        let page = state.figures.render().unwrap();
        for line in ["folio:panics_total 1", "folio:event_loop_lag_seconds_count 1"] {
            assert!(page.lines().any(|told| told == line), "{line} in {page}");
        }
    }
}
