//! What the page says of KV events.

use folio_engine::Medium;
use folio_events::{KvEventsStats, medium_name};

use super::samples::{Labels, Samples};

/// Of one metric; none where nothing is published.
pub(super) fn samples(name: &str, stats: Option<&KvEventsStats>) -> Samples {
    let Some(stats) = stats else {
        return if name.ends_with("_total") { Samples::Counters(vec![]) } else { Samples::Gauges(vec![]) };
    };
    let of = |label: &'static str, value: &str| -> Labels { vec![(label, value.to_owned())] };
    match name {
        "folio:kv_events_published_total" => Samples::Counters(vec![
            (of("event", "stored"), stats.stored),
            (of("event", "removed"), stats.removed),
            (of("event", "cleared"), stats.cleared),
        ]),
        "folio:kv_events_messages_total" => Samples::Counter(stats.next_message),
        "folio:kv_events_dropped_total" => Samples::Counter(stats.dropped),
        "folio:kv_events_lost_total" => Samples::Counter(stats.lost),
        "folio:kv_events_replays_total" => Samples::Counter(stats.replays),
        "folio:kv_events_refused_total" => Samples::Counter(stats.refused),
        "folio:kv_events_subscribers" => Samples::Gauge(stats.subscribers.len() as f64),
        "folio:kv_events_blocks" => {
            let media = Medium::ALL.into_iter().zip(stats.blocks);
            Samples::Gauges(media.map(|(of_it, n)| (of("medium", medium_name(of_it)), n as f64)).collect())
        }
        other => unreachable!("{other} is in the table of metrics but has no figure"),
    }
}
