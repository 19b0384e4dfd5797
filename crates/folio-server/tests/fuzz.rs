//! What nobody would send: whatever arrives at any route is answered in its API's shape, never by a failure of the server. The fuzz
//! targets in `fuzz/` search deeper, by the same functions (`common/targets.rs`) and seeds.

mod common;

use std::fs;
use std::path::Path;

use common::targets::{ROUTES, Target, declared};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

/// Of a target of `fuzz/`.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 2, "{target} has no seeds");
    files.iter().map(|file| fs::read(file).unwrap()).collect()
}

/// Parameters of all routes, so that every reader of every parameter is met.
fn bodies() -> Vec<Value> {
    seeds("server_json").iter().map(|seed| serde_json::from_slice(&seed[1..]).unwrap()).collect()
}

/// What somebody may put where something else belongs.
fn odd() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        Just(json!(1e308)),
        Just(json!("")),
        ".{0,20}".prop_map(Value::from),
        Just(json!("x".repeat(5000))),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[[[[[[[]]]]]]]])),
        Just(json!([null, 1, "a", {}])),
        Just(json!({"type": "text"})),
        Just(json!({"type": "function", "function": {"name": "f"}})),
        Just(json!((0..300).collect::<Vec<_>>())),
        large(),
    ]
}

/// At the limits of what is read at all, and just beyond.
fn large() -> impl Strategy<Value = Value> {
    let element = prop_oneof![
        Just(json!(7)),
        Just(json!("a")),
        Just(json!({"type": "text", "text": "a"})),
        Just(json!({"role": "user", "content": "a"})),
        Just(json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}})),
        Just(json!([[]])),
    ];
    prop_oneof![
        (element, 1000..20_000usize).prop_map(|(element, count)| json!(vec![element; count])),
        Just(json!(vec![0; 262_145])),
        (4000..4200usize).prop_map(|count| (0..count).map(|at| (format!("n{at}"), json!(at))).collect()),
        (90..110usize).prop_map(|depth| (0..depth).fold(json!(1), |inner, _| json!([inner]))),
        (1000..1_000_000usize).prop_map(|bytes| json!("x ".repeat(bytes / 2))),
    ]
}

/// Every place in a value, as a path.
fn places(value: &Value, path: &mut Vec<String>, all: &mut Vec<String>) {
    all.push(path.iter().map(|part| format!("/{part}")).collect());
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => {
            map.iter().map(|(name, child)| (name.replace('~', "~0").replace('/', "~1"), child)).collect()
        }
        Value::Array(list) => list.iter().enumerate().map(|(at, child)| (at.to_string(), child)).collect(),
        _ => Vec::new(),
    };
    for (name, child) in children {
        path.push(name);
        places(child, path, all);
        path.pop();
    }
}

#[derive(Clone, Debug)]
enum Change {
    Put {
        place: prop::sample::Index,
        value: Value,
    },
    Remove {
        place: prop::sample::Index,
    },
    /// Of another seed.
    Add {
        seed: prop::sample::Index,
        place: prop::sample::Index,
    },
}

fn change() -> impl Strategy<Value = Change> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (index(), odd()).prop_map(|(place, value)| Change::Put { place, value }),
        2 => index().prop_map(|place| Change::Remove { place }),
        1 => (index(), index()).prop_map(|(seed, place)| Change::Add { seed, place }),
    ]
}

fn changed(mut body: Value, changes: &[Change]) -> Value {
    for change in changes {
        let mut all = Vec::new();
        places(&body, &mut Vec::new(), &mut all);
        match change {
            Change::Put { place, value } => {
                if let Some(at) = body.pointer_mut(&all[place.index(all.len())]) {
                    *at = value.clone();
                }
            }
            Change::Remove { place } => {
                let path = &all[place.index(all.len())];
                let (parent, name) = path.rsplit_once('/').unwrap_or(("", ""));
                match body.pointer_mut(parent) {
                    Some(Value::Object(map)) => drop(map.remove(name)),
                    Some(Value::Array(list)) => {
                        drop(name.parse().ok().filter(|at| *at < list.len()).map(|at: usize| list.remove(at)))
                    }
                    _ => {}
                }
            }
            Change::Add { seed, place } => {
                let bodies = bodies();
                let other = &bodies[seed.index(bodies.len())];
                let names: Vec<_> = other.as_object().into_iter().flatten().collect();
                if let (Some(map), (name, value)) = (body.as_object_mut(), names[place.index(names.len())]) {
                    map.insert(name.clone(), value.clone());
                }
            }
        }
    }
    body
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

#[test]
fn mutated_bodies_are_answered_or_refused() {
    let (target, bodies) = (Target::new(), bodies());
    let strategy = (0..ROUTES.len(), 0..bodies.len(), prop::collection::vec(change(), 0..6));
    runner(3000)
        .run(&strategy, |(route, body, changes)| {
            target.body(ROUTES[route], changed(bodies[body].clone(), &changes).to_string().into_bytes());
            Ok(())
        })
        .unwrap();
    for depth in [100, 10_000, 1_000_000] {
        let nested = format!(r#"{{"messages": {}{}}}"#, "[".repeat(depth), "]".repeat(depth));
        ROUTES.iter().for_each(|route| target.body(route, nested.clone().into_bytes()));
    }
}

/// What may become of a seed.
#[derive(Clone, Debug)]
enum Damage {
    Byte(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    /// A part of another seed, or of this one, at some place.
    Splice(prop::sample::Index, prop::sample::Index, prop::sample::Index),
    /// The last bytes so often.
    Repeat(usize, usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (index(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        1 => index().prop_map(Damage::Cut),
        2 => (index(), index(), index()).prop_map(|(seed, from, at)| Damage::Splice(seed, from, at)),
        1 => (1..40usize, 2..2000usize).prop_map(|(bytes, times)| Damage::Repeat(bytes, times)),
    ]
}

fn damaged(seeds: &[Vec<u8>], seed: usize, damages: &[Damage]) -> Vec<u8> {
    let mut data = seeds[seed].clone();
    for damage in damages {
        if data.is_empty() {
            break;
        }
        match damage {
            Damage::Byte(at, byte) => *at.get_mut(&mut data) = *byte,
            Damage::Cut(at) => data.truncate(at.index(data.len())),
            Damage::Splice(seed, from, at) => {
                let other = seed.get(seeds);
                let from = from.index(other.len());
                let at = at.index(data.len());
                data.splice(at..at, other[from..].iter().take(64).copied());
            }
            Damage::Repeat(bytes, times) => {
                let from = data.len().saturating_sub(*bytes);
                (0..*times)
                    .for_each(|_| data.extend_from_within(from..from + (*bytes).min(data.len() - from)));
            }
        }
    }
    data
}

/// Every seed of a target of `fuzz/`, and so many that are damaged.
fn target(name: &str, cases: u32, run: impl Fn(&Target, &[u8])) {
    let (target, seeds) = (Target::new(), seeds(name));
    seeds.iter().for_each(|seed| run(&target, seed));
    let strategy = (0..seeds.len(), prop::collection::vec(damage(), 1..4));
    runner(cases)
        .run(&strategy, |(seed, damages)| {
            run(&target, &damaged(&seeds, seed, &damages));
            Ok(())
        })
        .unwrap();
}

#[test]
fn damaged_json_is_refused() {
    target("server_json", 1500, Target::json);
}

#[test]
fn whom_damaged_json_is_for_is_read_or_refused() {
    target("server_router", 1500, Target::router);
}

#[test]
fn damaged_forms_are_refused_or_kept_as_they_came() {
    target("server_multipart", 1500, Target::multipart);
}

#[test]
fn damaged_batches_end() {
    target("server_batch_lines", 100, Target::batch_lines);
}

#[test]
fn damaged_declarations_of_tenants_and_rules_say_what_is_wrong() {
    target("server_tenants", 700, |_, data| declared(data));
}

#[test]
fn odd_headers_are_answered() {
    target("server_headers", 1500, Target::headers);
}

#[test]
fn whatever_a_model_says_is_streamed_in_whole_events() {
    target("server_sse", 300, Target::sse);
}
