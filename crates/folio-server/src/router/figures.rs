//! `/metrics` of all models: each process's own page, which names its model in every line, and what the router knows of them.

use std::collections::HashMap;
use std::fmt::Write as _;

use crate::observability::metrics::{Documented, counter, gauge};

use super::engines::Engines;
use super::processes::ProcessState;

const LOADED: Documented = gauge("folio:model_loaded", "Whether the model's process is ready");
const BUSY: Documented =
    gauge("folio:model_requests_running", "Requests that a model's process was granted to");
const NEED: Documented =
    gauge("folio:model_memory_bytes", "What is promised to a model's process, from its start to its end");
const STARTS: Documented = counter("folio:model_starts_total", "Processes that were started");
const FAILURES: Documented =
    counter("folio:model_failures_total", "Processes that ended without being told to, or did not start");
const REFUSED: Documented = counter(
    "folio:model_refusals_total",
    "Requests that waited for a start or for room and were told to come again",
);
const WAITING: Documented = gauge(
    "folio:models_requests_waiting",
    "Requests that wait for a start or for room, of all models; without model_name",
);
const MEMORY: Documented = gauge(
    "folio:models_memory_bytes",
    "What the processes of all models may need together; without model_name",
);

/// What a server of several models exports beside what each of them does.
pub fn documented() -> impl Iterator<Item = Documented> {
    [LOADED, BUSY, NEED, STARTS, FAILURES, REFUSED, WAITING, MEMORY].into_iter()
}

/// The router's own page.
pub(super) fn own(engines: &Engines) -> String {
    let mut page = String::new();
    let models: Vec<_> = (0..engines.models.len()).map(|model| engines.told(model)).collect();
    let of_model: [(Documented, &dyn Fn(usize) -> u64); 6] = [
        (LOADED, &|model| u64::from(models[model].0.state == ProcessState::Ready)),
        (BUSY, &|model| models[model].0.busy as u64),
        (NEED, &|model| match models[model].0.state {
            ProcessState::Stopped => 0,
            _ => engines.models[model].need_bytes,
        }),
        (STARTS, &|model| models[model].1.starts),
        (FAILURES, &|model| models[model].1.failures),
        (REFUSED, &|model| models[model].1.refused),
    ];
    for (metric, value) in of_model {
        head(&mut page, metric);
        for (index, model) in engines.models.iter().enumerate() {
            let name = model.names[0].replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = writeln!(page, "{}{{model_name=\"{name}\"}} {}", metric.name, value(index));
        }
    }
    for (metric, value) in [(WAITING, engines.totals().0 as u64), (MEMORY, engines.memory_bytes)] {
        head(&mut page, metric);
        let _ = writeln!(page, "{} {value}", metric.name);
    }
    page
}

fn head(page: &mut String, Documented { name, help, kind, .. }: Documented) {
    let _ = writeln!(page, "# HELP {name} {help}.\n# TYPE {name} {kind}");
}

/// Pages of one form as one: all lines of a metric behind its first head, since they have to stand together. O(bytes).
pub(super) fn merged<'a>(pages: impl IntoIterator<Item = &'a str>) -> String {
    let mut order: Vec<&str> = Vec::new();
    let mut metrics: HashMap<&str, (String, String)> = HashMap::new();
    for page in pages {
        let mut current = "";
        let mut heads_of_this = Vec::new();
        for line in page.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let mut words = comment.splitn(3, ' ');
                let (Some(_), Some(name)) = (words.next(), words.next()) else { continue };
                current = name;
                if !metrics.contains_key(name) {
                    order.push(name);
                    heads_of_this.push(name);
                }
                let (head, _) = metrics.entry(name).or_default();
                if heads_of_this.contains(&name) {
                    head.push_str(line);
                    head.push('\n');
                }
            } else if !line.is_empty() {
                let (_, lines) = metrics.entry(current).or_default();
                lines.push_str(line);
                lines.push('\n');
            }
        }
    }
    order.iter().flat_map(|name| [&*metrics[name].0, &*metrics[name].1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_metric_stand_together_behind_one_head() {
        let page = |model: &str, more: &str| {
            format!(
                "# HELP a one.\n# TYPE a counter\na_total{{m=\"{model}\"}} 1\n# HELP b two.\n# TYPE b gauge\n\
                 b{{m=\"{model}\"}} 2\nb{{m=\"{model}\",x=\"# y\"}} 3\n{more}"
            )
        };
        let (first, second) = (page("1", ""), page("2", "# HELP c three.\n# TYPE c gauge\nc 4\n# EOF\n"));
        assert_eq!(
            merged([&*first, &*second]),
            "# HELP a one.\n# TYPE a counter\na_total{m=\"1\"} 1\na_total{m=\"2\"} 1\n# HELP b two.\n# TYPE b gauge\n\
             b{m=\"1\"} 2\nb{m=\"1\",x=\"# y\"} 3\nb{m=\"2\"} 2\nb{m=\"2\",x=\"# y\"} 3\n# HELP c three.\n# TYPE c gauge\nc 4\n"
        );
        assert_eq!(merged([]), "");
    }
}
