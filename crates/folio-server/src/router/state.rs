//! The parts of a router, as its handlers take them.

use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRef;

use crate::arrival::RequestLog;
use crate::load::Load;
use crate::observability::audit::Audit;
use crate::observability::metrics::FrontFigures;
use crate::tenancy::tenants::Tenants;

use super::catalog::Catalog;
use super::engines::Engines;

/// What a router is made of.
pub(super) struct RouterParts {
    pub load: Arc<Load>,
    pub tenants: Arc<Tenants>,
    pub catalog: Arc<Catalog>,
    pub engines: Arc<Engines>,
    pub audit: Option<Audit>,
    /// Of this process.
    pub figures: FrontFigures,
    pub version: &'static str,
    /// Requests decide how long models stay.
    pub keep_alive: bool,
    /// Unix time, seconds.
    pub created_s: u64,
}

#[derive(Clone)]
pub(super) struct RouterState(Arc<RouterParts>);

impl RouterState {
    pub fn new(parts: RouterParts) -> Self {
        Self(Arc::new(parts))
    }
}

impl Deref for RouterState {
    type Target = RouterParts;

    fn deref(&self) -> &RouterParts {
        &self.0
    }
}

impl FromRef<RouterState> for Arc<Load> {
    fn from_ref(state: &RouterState) -> Self {
        state.load.clone()
    }
}

/// What is counted of requests, their models' processes count; what failed here, nobody else.
impl RequestLog for RouterParts {
    fn count(&self, _: &str, _: &str, _: u16) {}

    fn panicked(&self) {
        self.figures.panics.inc();
    }

    fn audit(&self) -> Option<&Audit> {
        self.audit.as_ref()
    }
}
