//! `--kv-events-config`: vLLM's JSON and its names, and what is ours beside it.
//!
//! Owns: what may be said, and the refusals. Must never: let the tokens of prompts out by default, or to other machines unasked.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use serde::Deserialize;

/// Where events are published if nothing is said: vLLM's port, on this machine only.
const ENDPOINT: &str = "tcp://127.0.0.1:5557";
const TOPIC_BYTES_MAX: usize = 255;
/// A message takes at most so much of the replay buffer, so two fit.
const BUFFER_BYTES_LEAST: u64 = 4 << 20;

/// How inner events are written. The batch around them is always an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventFormat {
    /// Positional, as every vLLM before 0.24 and every consumer reads them.
    #[default]
    Array,
    /// By field names, as vLLM from 0.24 on.
    Map,
}

/// Whose blocks are told.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum TenantsField {
    All(String),
    Named(Vec<String>),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    #[serde(default)]
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
    #[serde(default = "ten_thousand")]
    buffer_steps: u64,
    #[serde(default = "hundred_thousand")]
    hwm: u64,
    #[serde(default = "hundred_thousand")]
    max_queue_size: u64,
    #[serde(default)]
    topic: String,
    tenants: Option<TenantsField>,
    #[serde(default)]
    allow_remote: bool,
    #[serde(default)]
    event_format: EventFormat,
    #[serde(default = "yes")]
    int_block_hashes: bool,
    #[serde(default = "yes")]
    replay_topic: bool,
    #[serde(default)]
    tenant_extra_keys: bool,
    #[serde(default = "quarter_gib")]
    buffer_bytes: u64,
}

fn ten_thousand() -> u64 {
    10_000
}

fn hundred_thousand() -> u64 {
    100_000
}

fn yes() -> bool {
    true
}

fn quarter_gib() -> u64 {
    256 << 20
}

/// What is published, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventsConfig {
    pub endpoint: SocketAddr,
    /// Without one nobody can ask for what it missed.
    pub replay_endpoint: Option<SocketAddr>,
    /// Messages kept for replay, and for subscribers that are late; and their bytes.
    pub buffer_steps: usize,
    pub buffer_bytes: usize,
    /// Messages that a subscriber may be late.
    pub hwm: u64,
    /// Events that may wait between the engine and the publisher.
    pub max_queue_size: usize,
    pub topic: String,
    /// Names of tenants, or of groups that share a cache. `None`: all.
    pub tenants: Option<Vec<String>>,
    pub event_format: EventFormat,
    /// Hashes are their last 8 bytes as a number; otherwise all 32 bytes.
    pub int_block_hashes: bool,
    /// Replies of a replay carry the topic, as vLLM's from 0.26 on.
    pub replay_topic: bool,
    /// The first block of a chain has its tenant's name as extra key.
    pub tenant_extra_keys: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KvEventsConfigError {
    #[error("it is no JSON object of its fields: {0}")]
    Json(String),
    #[error("{field} {value:?}: {reason}")]
    Field { field: &'static str, value: String, reason: String },
    #[error(
        "whose blocks are told must be said, for events carry the tokens of prompts: give \"tenants\": \"*\" for all, or a list of names"
    )]
    NoTenants,
    #[error(
        "{field} {value:?} is reached by other machines, events carry the tokens of prompts, and ZMQ neither encrypts nor asks for a key: use an \
         address of this machine such as tcp://127.0.0.1:{port}, or say \"allow_remote\": true"
    )]
    Remote { field: &'static str, value: String, port: u16 },
    #[error("an endpoint is given and events are off: say \"enable_kv_cache_events\": true and \"tenants\"")]
    Off,
}

impl KvEventsConfig {
    /// Reads `--kv-events-config`, with the endpoint of `--kv-events-endpoint` if there is one. `None`: events are off.
    pub fn parse(json: Option<&str>, endpoint: Option<&str>) -> Result<Option<Self>, KvEventsConfigError> {
        let fields: Fields = serde_json::from_str(json.unwrap_or("{}"))
            .map_err(|error| KvEventsConfigError::Json(error.to_string()))?;
        let publishes = match fields.publisher.as_deref() {
            None | Some("zmq") => true,
            Some("null") => false,
            Some(other) => return Err(field("publisher", other, "there are \"zmq\" and \"null\"")),
        };
        if !fields.enable_kv_cache_events || !publishes {
            return if endpoint.is_some() { Err(KvEventsConfigError::Off) } else { Ok(None) };
        }
        let tenants = match fields.tenants {
            None => return Err(KvEventsConfigError::NoTenants),
            Some(TenantsField::All(all)) if all == "*" => None,
            Some(TenantsField::All(name)) => {
                return Err(field("tenants", &name, "give \"*\" for all, or a list of names"));
            }
            Some(TenantsField::Named(names)) if names.is_empty() => {
                return Err(KvEventsConfigError::NoTenants);
            }
            Some(TenantsField::Named(names)) => Some(names),
        };
        let endpoint = endpoint.or(fields.endpoint.as_deref()).unwrap_or(ENDPOINT);
        let address = |name, text: &str| {
            let address = address(name, text)?;
            match address.ip().is_loopback() || fields.allow_remote {
                true => Ok(address),
                false => {
                    Err(KvEventsConfigError::Remote { field: name, value: text.into(), port: address.port() })
                }
            }
        };
        if fields.topic.len() > TOPIC_BYTES_MAX {
            return Err(field("topic", &fields.topic, &format!("it may have {TOPIC_BYTES_MAX} bytes")));
        }
        Ok(Some(Self {
            endpoint: address("endpoint", endpoint)?,
            replay_endpoint: fields
                .replay_endpoint
                .as_deref()
                .map(|text| address("replay_endpoint", text))
                .transpose()?,
            buffer_steps: within("buffer_steps", fields.buffer_steps, 1, 10_000_000)? as usize,
            buffer_bytes: within("buffer_bytes", fields.buffer_bytes, BUFFER_BYTES_LEAST, 1 << 40)? as usize,
            hwm: within("hwm", fields.hwm, 1, 10_000_000)?,
            max_queue_size: within("max_queue_size", fields.max_queue_size, 1024, 10_000_000)? as usize,
            topic: fields.topic,
            tenants,
            event_format: fields.event_format,
            int_block_hashes: fields.int_block_hashes,
            replay_topic: fields.replay_topic,
            tenant_extra_keys: fields.tenant_extra_keys,
        }))
    }
}

fn field(field: &'static str, value: &str, reason: &str) -> KvEventsConfigError {
    KvEventsConfigError::Field { field, value: value.into(), reason: reason.into() }
}

fn within(name: &'static str, value: u64, least: u64, most: u64) -> Result<u64, KvEventsConfigError> {
    match (least..=most).contains(&value) {
        true => Ok(value),
        false => Err(field(name, &value.to_string(), &format!("it is not within {least} to {most}"))),
    }
}

/// An address to listen on; ZMQ writes all of a machine's as `*`.
fn address(name: &'static str, text: &str) -> Result<SocketAddr, KvEventsConfigError> {
    let wrong = |reason: &str| field(name, text, reason);
    let rest = text.strip_prefix("tcp://").ok_or_else(|| wrong("only tcp://ADDRESS:PORT is spoken"))?;
    let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("it has no port"))?;
    let port = port.parse().map_err(|_| wrong("its port is no number up to 65535"))?;
    let ip = match host {
        "*" => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
        host => {
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
            bare.parse().map_err(|_| {
                wrong("it is listened on, so it must be an address of this machine: a number, localhost or *")
            })?
        }
    };
    Ok(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Option<KvEventsConfig>, String> {
        KvEventsConfig::parse(Some(json), None).map_err(|error| error.to_string())
    }

    #[test]
    fn events_are_off_until_they_are_asked_for_and_tell_of_nobody_unasked() {
        assert_eq!(KvEventsConfig::parse(None, None), Ok(None));
        assert_eq!(parse(r#"{"endpoint": "tcp://127.0.0.1:1", "tenants": "*"}"#), Ok(None));
        assert_eq!(parse(r#"{"enable_kv_cache_events": true, "publisher": "null"}"#), Ok(None));
        let untold = parse(r#"{"enable_kv_cache_events": true}"#).unwrap_err();
        assert!(untold.contains("\"tenants\": \"*\""), "{untold}");
        assert!(parse(r#"{"enable_kv_cache_events": true, "tenants": []}"#).is_err());
        let on = parse(r#"{"enable_kv_cache_events": true, "tenants": "*"}"#).unwrap().unwrap();
        assert_eq!((on.endpoint.to_string().as_str(), on.replay_endpoint), ("127.0.0.1:5557", None));
        assert_eq!((on.buffer_steps, on.hwm, on.max_queue_size), (10_000, 100_000, 100_000));
        assert_eq!((on.event_format, on.int_block_hashes, on.replay_topic), (EventFormat::Array, true, true));
        let named = parse(r#"{"enable_kv_cache_events": true, "tenants": ["a"]}"#).unwrap().unwrap();
        assert_eq!(named.tenants, Some(vec!["a".to_owned()]));
    }

    #[test]
    fn other_machines_are_told_nothing_without_the_word_for_it() {
        let on =
            |more: &str| parse(&format!(r#"{{"enable_kv_cache_events": true, "tenants": "*", {more}}}"#));
        for endpoint in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "tcp://[::]:5557"] {
            for name in ["endpoint", "replay_endpoint"] {
                let error = on(&format!(r#""{name}": "{endpoint}""#)).unwrap_err();
                assert!(error.contains("allow_remote") && error.contains(endpoint), "{error}");
            }
            let allowed = on(&format!(r#""endpoint": "{endpoint}", "allow_remote": true"#)).unwrap().unwrap();
            assert_eq!(allowed.endpoint.port(), 5557);
        }
        for endpoint in ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "tcp://127.9.9.9:1"] {
            assert!(on(&format!(r#""endpoint": "{endpoint}""#)).is_ok(), "{endpoint}");
        }
        let config = r#"{"enable_kv_cache_events": true, "tenants": "*"}"#;
        let flag = |endpoint| KvEventsConfig::parse(Some(config), Some(endpoint));
        assert_eq!(flag("tcp://127.0.0.1:7").unwrap().unwrap().endpoint.port(), 7);
        assert!(matches!(flag("tcp://*:7"), Err(KvEventsConfigError::Remote { .. })));
        assert_eq!(KvEventsConfig::parse(None, Some("tcp://127.0.0.1:7")), Err(KvEventsConfigError::Off));
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        for (wrong, named) in [
            (r#""tenant": "a""#, "tenant"),
            (r#""tenants": "a""#, "tenants"),
            (r#""publisher": "nats""#, "publisher"),
            (r#""endpoint": "ipc:///tmp/x""#, "endpoint"),
            (r#""endpoint": "tcp://router.example:5557""#, "endpoint"),
            (r#""endpoint": "tcp://127.0.0.1""#, "endpoint"),
            (r#""endpoint": "tcp://127.0.0.1:70000""#, "endpoint"),
            (r#""buffer_steps": 0"#, "buffer_steps"),
            (r#""buffer_bytes": 1"#, "buffer_bytes"),
            (r#""hwm": 0"#, "hwm"),
            (r#""max_queue_size": 5"#, "max_queue_size"),
            (r#""event_format": "xml""#, "xml"),
        ] {
            let tenants = if wrong.contains("\"tenants\"") { "" } else { r#""tenants": "*", "# };
            let error =
                parse(&format!(r#"{{"enable_kv_cache_events": true, {tenants}{wrong}}}"#)).unwrap_err();
            assert!(error.contains(named), "{wrong}: {error}");
        }
        assert!(parse("[]").is_err() && parse("nonsense").is_err());
        let long = "x".repeat(256);
        let error =
            parse(&format!(r#"{{"enable_kv_cache_events": true, "tenants": "*", "topic": "{long}"}}"#));
        assert!(error.unwrap_err().contains("topic"));
    }
}
