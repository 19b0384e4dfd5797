//! Two keys on one server: what one asks for has no say in when the other is served. Counted in the order in which the engine ends
//! requests; the engine is held at its first event until everything has been asked.

mod common;

use std::sync::{Arc, Condvar, Mutex};

use common::{Client, Submitting, app, modelled};
use folio_engine::{EngineHandle, Event, EventSink, Request, SchedulerConfig};
use folio_kv::TenantId;
use folio_server::{Declared, ServerConfig};
use serde_json::{Value, json};

const FLOOD: usize = 80;
const ASKED: usize = 9;
const PLACES: u32 = 4;

/// Whose requests ended, in order, and how many came.
#[derive(Default)]
struct Seen {
    came: Mutex<usize>,
    changed: Condvar,
    ended: Mutex<Vec<TenantId>>,
}

/// How many of the flood ended before the median of the requests of the other key, all of which came after the flood.
async fn overtaken(b: Value, flood: Value) -> usize {
    let limits = SchedulerConfig {
        max_model_len: 256,
        max_num_batched_tokens: 64,
        max_num_seqs: PLACES,
        ..Default::default()
    };
    let b = common::merged(json!({"name": "b", "keys": ["b"]}), b);
    let tenants = json!({"tenants": [{"name": "a", "keys": ["a"]}, b]}).to_string();
    let tenants = Declared::parse(&tenants, &|_| None).unwrap();
    let asking = tenants.tenants[1].id;
    let seen = Arc::new(Seen::default());
    let watched = seen.clone();
    let submit = move |engine: &EngineHandle, request: Request, mut sink: Box<dyn EventSink>| {
        let (tenant, seen) = (request.tenant, watched.clone());
        let watch = move |event: Event| {
            let came = seen.came.lock().unwrap();
            drop(seen.changed.wait_while(came, |came| *came < FLOOD + ASKED).unwrap());
            if matches!(event, Event::Finished { .. }) {
                seen.ended.lock().unwrap().push(tenant);
            }
            sink.deliver(event)
        };
        let flag = engine.submit(request, Box::new(watch));
        *watched.came.lock().unwrap() += 1;
        watched.changed.notify_all();
        flag
    };
    let engine = Submitting { engine: modelled(limits, 256, 1 << 20), submit };
    let client = Client::with(ServerConfig { tenants, ..Default::default() }, app(Arc::new(engine)));
    let ask = |key: &str, number: usize, extra: &Value| {
        let client = client.key(key);
        let body = json!({"prompt": format!("{key} {number}"), "max_tokens": 60, "ignore_eos": true});
        let body = common::merged(body, extra.clone());
        tokio::spawn(async move { client.complete(body).await.status })
    };
    let mut asked: Vec<_> = (0..FLOOD).map(|number| ask("a", number, &flood)).collect();
    while *seen.came.lock().unwrap() < FLOOD {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    asked.extend((0..ASKED).map(|number| ask("b", number, &json!({}))));
    for asked in asked {
        assert_eq!(asked.await.unwrap(), 200);
    }
    let ended = seen.ended.lock().unwrap();
    let median = ended.iter().enumerate().filter(|(_, tenant)| **tenant == asking).nth(ASKED / 2).unwrap().0;
    median - ASKED / 2
}

/// What ran already, and a turn of the flood's for each of the other key's.
const SHARE: usize = 2 * PLACES as usize + ASKED / 2 + 1;

#[tokio::test]
async fn a_flood_of_better_priority_delays_another_key_by_no_more_than_its_share() {
    for priority in [0, 1_000_000, -1_000_000, i64::from(i32::MIN)] {
        let flood = overtaken(json!({}), json!({"priority": priority})).await;
        assert!(flood <= SHARE, "{flood} of a flood with priority {priority} went before");
    }
}

#[tokio::test]
async fn a_class_goes_first_whatever_requests_say() {
    let flood = overtaken(json!({"class": -1}), json!({"priority": -1_000_000})).await;
    assert!(flood <= PLACES as usize, "{flood} of the flood went before");
    let flood = overtaken(json!({"class": 1}), json!({"priority": 1_000_000})).await;
    assert_eq!(flood, FLOOD, "and a later class goes last");
}
