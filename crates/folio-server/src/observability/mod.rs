//! What happened: metrics, usage and the audit log.

pub(crate) mod audit;
pub(crate) mod kv_events;
pub mod metrics;
pub mod tenant_metrics;
pub(crate) mod usage;
