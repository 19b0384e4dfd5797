//! What happened: metrics, usage and the audit log.

pub(crate) mod audit;
pub mod metrics;
pub mod tenant_metrics;
pub(crate) mod usage;
