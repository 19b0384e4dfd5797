//! Metrics that are read, not counted: their samples, and how they are written.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

pub(crate) type Labels = Vec<(&'static str, String)>;

/// Samples of one metric, each with its own labels.
pub(crate) enum Samples {
    Counter(u64),
    Gauge(f64),
    Gauges(Vec<(Labels, f64)>),
    Counters(Vec<(Labels, u64)>),
    /// A histogram of which only the number and the sum are known.
    Total {
        count: u64,
        sum: f64,
    },
}

pub(crate) fn encode_samples(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    samples: Samples,
) -> Result<(), fmt::Error> {
    let base = name.strip_suffix("_total").unwrap_or(name);
    // The encoder appends nothing here, unlike the registry.
    let help = format!("{help}.");
    match samples {
        Samples::Counter(value) => {
            let counter = ConstCounter::<u64>::new(value);
            counter.encode(encoder.encode_descriptor(base, &help, None, MetricType::Counter)?)
        }
        Samples::Gauge(value) => {
            let gauge = ConstGauge::<f64>::new(value);
            gauge.encode(encoder.encode_descriptor(name, &help, None, MetricType::Gauge)?)
        }
        Samples::Gauges(list) => {
            let mut metric = encoder.encode_descriptor(name, &help, None, MetricType::Gauge)?;
            for (labels, value) in &list {
                metric.encode_family(labels)?.encode_gauge(value)?;
            }
            Ok(())
        }
        Samples::Counters(list) => {
            let mut metric = encoder.encode_descriptor(base, &help, None, MetricType::Counter)?;
            for (labels, value) in &list {
                ConstCounter::<u64>::new(*value).encode(metric.encode_family(labels)?)?;
            }
            Ok(())
        }
        Samples::Total { count, sum } => {
            let mut metric = encoder.encode_descriptor(name, &help, None, MetricType::Histogram)?;
            metric.encode_histogram::<NoLabelSet>(sum, count, &[(f64::MAX, count)], None)
        }
    }
}
