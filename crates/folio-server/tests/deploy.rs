//! What `deploy/` names is exported.

use std::collections::BTreeSet;

use folio_server::{metrics, tenant_metrics};
use serde_json::Value;

const DASHBOARD: &str = include_str!("../../../deploy/grafana/folio.json");
const RULES: &str = include_str!("../../../deploy/prometheus/folio.rules.yml");

/// The names of metrics in a text: those with a prefix, and that of HTTP responses.
fn named(text: &str) -> BTreeSet<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = text.split(|c| !word(c)).map(|name| name.trim_end_matches(':'));
    let ours = |name: &&str| {
        let prefixed = ["vllm:", "folio:"]
            .iter()
            .any(|prefix| name.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty()));
        prefixed || name.starts_with("http_requests")
    };
    words.filter(ours).map(str::to_owned).collect()
}

/// What Prometheus sees: of a histogram its series.
fn exported() -> BTreeSet<String> {
    let all = metrics::documented().chain(tenant_metrics::documented());
    let series = |metric: metrics::Documented| match metric.kind {
        "histogram" => {
            ["_bucket", "_sum", "_count"].iter().map(|end| format!("{}{end}", metric.name)).collect()
        }
        _ => vec![metric.name.to_owned()],
    };
    all.flat_map(series).collect()
}

#[test]
fn every_metric_of_the_dashboard_and_the_alerts_is_exported() {
    let exported = exported();
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("a dashboard is JSON");
    let recorded: BTreeSet<String> =
        RULES.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).map(str::to_owned).collect();
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut expressions = 0;
    for target in panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten() {
        let names = named(target["expr"].as_str().expect("an expression"));
        assert!(!names.is_empty(), "{target}");
        for name in names {
            assert!(exported.contains(&name), "{name} is in the dashboard and is not exported");
        }
        expressions += 1;
    }
    assert!(expressions > 20, "only {expressions} expressions were found");
    let rules: Vec<&str> = RULES.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).collect();
    assert!(rules.len() > 8, "only {} rules were found", rules.len());
    for name in rules.iter().flat_map(|rule| named(rule)) {
        assert!(
            exported.contains(&name) || recorded.contains(&name),
            "{name} is in the alerts and is not exported"
        );
    }
}
