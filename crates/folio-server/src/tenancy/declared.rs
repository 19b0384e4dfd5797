//! `--tenants FILE`: the tenants an operator declares, as JSON.
//!
//! Owns: the file's format, and every way in which one can be wrong. Must never: read a file or the environment itself, or
//! keep a key longer than it takes to make the key ring.
//!
//! Ids: a tenant without an entry here has the number of its key (`tenants`); declared tenants and groups follow from
//! [`FIRST_TENANT`] and [`FIRST_GROUP`] in the order of the file. A group is a tenant to the cache: its members' chains start
//! from one secret, derived on the server from the group's name, and what they hold counts as the group's.

use folio_kv::{Quota, TenantId};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::adapters::AllowedAdapters;
use crate::error::ServerError;
use crate::tenancy::gate::TenantLimits;
use crate::tenancy::secret::Secret;

pub const FIRST_TENANT: u32 = 1 << 16;
pub const FIRST_GROUP: u32 = 1 << 24;
pub const FIRST_PREFIX: u32 = 1 << 25;
/// Tenants, and groups, of one file.
const DECLARED_MAX: usize = 10_000;
/// Classes are within this of 0: farther off are those of batches.
const CLASS_MAX: i32 = 1000;
/// Prefixes of one file: every prompt is compared with each.
const PREFIXES_MAX: usize = 64;

/// What the file says, checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Declared {
    pub tenants: Vec<DeclaredTenant>,
    /// Of every tenant that has no limits of its own.
    pub default_limits: TenantLimits,
    /// Of every tenant that has no list of its own.
    pub default_adapters: AllowedAdapters,
    pub groups: Vec<DeclaredGroup>,
    pub prefixes: Vec<DeclaredPrefix>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredTenant {
    pub id: TenantId,
    pub name: String,
    /// Those of the file; it may have others in the file of keys.
    pub keys: Vec<Secret>,
    pub limits: Option<TenantLimits>,
    /// Adapters that there are for it.
    pub adapters: Option<AllowedAdapters>,
    /// Its share of what several tenants want at once.
    pub weight: u32,
    /// Lower runs before other tenants.
    pub class: i32,
    /// What its requests may give as theirs.
    pub priority: PriorityRange,
    /// Index of its group.
    pub group: Option<usize>,
    pub guarantee: Share,
    pub ceiling: Share,
}

/// Tenants that share a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredGroup {
    pub id: TenantId,
    pub name: String,
    pub guarantee: Share,
    pub ceiling: Share,
}

/// A prefix that every tenant may read. To the cache it is a tenant, which nobody is.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredPrefix {
    pub id: TenantId,
    pub name: String,
    /// Its entry as it stands in the file, a JSON object: read with the tokenizer and chat template, at start.
    pub body: String,
}

/// The numbers that a tenant's requests may order themselves with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PriorityRange {
    pub min: i32,
    pub max: i32,
}

impl Default for PriorityRange {
    fn default() -> Self {
        Self { min: i32::MIN, max: i32::MAX }
    }
}

/// A part of the pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Share {
    /// Not given.
    Default,
    /// 0 to 100.
    Percent(f64),
    Blocks(u32),
}

impl Share {
    /// Blocks of a pool of `blocks`; percentages are rounded down.
    fn of(self, blocks: u32, default: u32) -> u32 {
        match self {
            Self::Default => default,
            Self::Percent(percent) => (f64::from(blocks) * percent / 100.0) as u32,
            Self::Blocks(blocks) => blocks,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantsFile {
    #[serde(default)]
    tenants: Vec<TenantEntry>,
    default_limits: Option<LimitsEntry>,
    default_adapters: Option<Value>,
    #[serde(default)]
    groups: Vec<GroupEntry>,
    #[serde(default)]
    prefixes: Vec<Box<RawValue>>,
}

#[derive(Deserialize)]
struct PrefixName {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantEntry {
    name: String,
    #[serde(default)]
    keys: Vec<Secret>,
    #[serde(default)]
    keys_env: Vec<String>,
    weight: Option<u32>,
    class: Option<i32>,
    priority: Option<PriorityEntry>,
    group: Option<String>,
    guarantee: Option<Value>,
    ceiling: Option<Value>,
    limits: Option<LimitsEntry>,
    adapters: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PriorityEntry {
    min: Option<i32>,
    max: Option<i32>,
}

impl PriorityEntry {
    fn read(self, what: &str) -> Result<PriorityRange, ServerError> {
        let all = PriorityRange::default();
        let range = PriorityRange { min: self.min.unwrap_or(all.min), max: self.max.unwrap_or(all.max) };
        if range.min > 0 || range.max < 0 {
            let reason = format!(
                "{} to {} does not include 0, which a request has that gives none",
                range.min, range.max
            );
            return Err(wrong(what, "priority", reason));
        }
        Ok(range)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsEntry {
    requests_per_minute: Option<u32>,
    tokens_per_minute: Option<u64>,
    max_concurrent_requests: Option<u32>,
    max_queued_requests: Option<u32>,
    max_context: Option<u32>,
}

impl LimitsEntry {
    /// Nothing is limited to nothing: whoever may do nothing has no key.
    fn read(self, what: &str) -> Result<TenantLimits, ServerError> {
        let limits = TenantLimits {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            max_concurrent_requests: self.max_concurrent_requests,
            max_queued_requests: self.max_queued_requests,
            max_context: self.max_context,
        };
        for (name, value) in [
            ("requests_per_minute", limits.requests_per_minute.map(u64::from)),
            ("tokens_per_minute", limits.tokens_per_minute),
            ("max_concurrent_requests", limits.max_concurrent_requests.map(u64::from)),
            ("max_queued_requests", limits.max_queued_requests.map(u64::from)),
            ("max_context", limits.max_context.map(u64::from)),
        ] {
            if value == Some(0) {
                return Err(wrong(
                    what,
                    &format!("limits.{name}"),
                    "0 would refuse everything; leave it out for no limit",
                ));
            }
        }
        Ok(limits)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupEntry {
    name: String,
    guarantee: Option<Value>,
    ceiling: Option<Value>,
}

fn wrong(what: &str, field: &str, reason: impl std::fmt::Display) -> ServerError {
    ServerError::Config(format!("the tenants file: {what}: {field}: {reason}"))
}

impl Declared {
    /// `environment` looks up the variables that `keys_env` names.
    pub fn parse(text: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, ServerError> {
        let file: TenantsFile = serde_json::from_str(text)
            .map_err(|error| ServerError::Config(format!("the tenants file: {error}")))?;
        let nothing = file.tenants.is_empty() && file.groups.is_empty() && file.prefixes.is_empty();
        if nothing && file.default_limits.is_none() && file.default_adapters.is_none() {
            return Err(ServerError::Config("the tenants file: tenants: names nobody".into()));
        }
        if file.prefixes.len() > PREFIXES_MAX {
            return Err(ServerError::Config(format!("the tenants file: more than {PREFIXES_MAX} prefixes")));
        }
        if file.tenants.len().max(file.groups.len()) > DECLARED_MAX {
            let reason = format!("the tenants file: more than {DECLARED_MAX} tenants or groups");
            return Err(ServerError::Config(reason));
        }
        let mut declared = Self::default();
        if let Some(limits) = file.default_limits {
            declared.default_limits = limits.read("every tenant")?;
        }
        if let Some(list) = file.default_adapters {
            declared.default_adapters = adapters("every tenant", "default_adapters", &list)?;
        }
        for (index, entry) in file.groups.into_iter().enumerate() {
            let what = format!("group {} ({:?})", index + 1, entry.name);
            check_name(&what, &entry.name, declared.groups.iter().map(|group| &group.name))?;
            declared.groups.push(DeclaredGroup {
                id: TenantId(FIRST_GROUP + index as u32),
                name: entry.name,
                guarantee: share(&what, "guarantee", entry.guarantee)?,
                ceiling: share(&what, "ceiling", entry.ceiling)?,
            });
        }
        for (index, entry) in file.tenants.into_iter().enumerate() {
            let tenant = declared.tenant(index, entry, environment)?;
            declared.tenants.push(tenant);
        }
        for (index, body) in file.prefixes.into_iter().enumerate() {
            let what = format!("prefix {}", index + 1);
            let PrefixName { name } =
                serde_json::from_str(body.get()).map_err(|error| wrong(&what, "name", error))?;
            check_name(&what, &name, declared.prefixes.iter().map(|prefix| &prefix.name))?;
            let id = TenantId(FIRST_PREFIX + index as u32);
            declared.prefixes.push(DeclaredPrefix { id, name, body: body.get().to_owned() });
        }
        Ok(declared)
    }

    fn tenant(
        &self,
        index: usize,
        entry: TenantEntry,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<DeclaredTenant, ServerError> {
        let what = format!("tenant {} ({:?})", index + 1, entry.name);
        check_name(&what, &entry.name, self.tenants.iter().map(|tenant| &tenant.name))?;
        let mut keys = entry.keys;
        for variable in &entry.keys_env {
            let value = environment(variable).filter(|value| !value.trim().is_empty());
            let value = value
                .ok_or_else(|| wrong(&what, "keys_env", format!("the environment has no {variable}")))?;
            keys.extend(value.split(',').map(|key| Secret::from(key.trim())));
        }
        let weight = entry.weight.unwrap_or(1);
        if !(1..=folio_engine::config::TENANT_WEIGHT_MAX).contains(&weight) {
            let reason = format!("{weight} is not within 1 to {}", folio_engine::config::TENANT_WEIGHT_MAX);
            return Err(wrong(&what, "weight", reason));
        }
        let class = entry.class.unwrap_or(0);
        if !(-CLASS_MAX..=CLASS_MAX).contains(&class) {
            return Err(wrong(&what, "class", format!("{class} is not within -{CLASS_MAX} to {CLASS_MAX}")));
        }
        let priority = entry.priority.map(|entry| entry.read(&what)).transpose()?.unwrap_or_default();
        let guarantee = share(&what, "guarantee", entry.guarantee)?;
        let ceiling = share(&what, "ceiling", entry.ceiling)?;
        let group = match entry.group {
            None => None,
            Some(name) => {
                let known = self.groups.iter().position(|group| group.name == name);
                let group = known
                    .ok_or_else(|| wrong(&what, "group", format!("{name:?} is not among the groups")))?;
                for (field, given) in [("guarantee", guarantee), ("ceiling", ceiling)] {
                    if given != Share::Default {
                        let reason = format!("it shares the cache of group {name:?}; give it to the group");
                        return Err(wrong(&what, field, reason));
                    }
                }
                Some(group)
            }
        };
        let limits = entry.limits.map(|limits| limits.read(&what)).transpose()?;
        let adapters = entry.adapters.map(|list| adapters(&what, "adapters", &list)).transpose()?;
        let id = TenantId(FIRST_TENANT + index as u32);
        let name = entry.name;
        Ok(DeclaredTenant {
            id,
            name,
            keys,
            limits,
            adapters,
            weight,
            class,
            priority,
            group,
            guarantee,
            ceiling,
        })
    }

    /// Whether somebody may not use every adapter.
    pub fn restricts_adapters(&self) -> bool {
        let own = self.tenants.iter().filter_map(|tenant| tenant.adapters.as_ref());
        own.chain([&self.default_adapters]).any(|allowed| *allowed != AllowedAdapters::All)
    }

    /// For [`folio_engine::SchedulerConfig::tenant_weights`].
    pub fn weights(&self) -> Vec<(TenantId, u32)> {
        self.tenants.iter().map(|tenant| (tenant.id, tenant.weight)).collect()
    }

    /// For [`folio_kv::KvCache::set_quotas`], of a pool of `blocks`. Empty if nobody has a guarantee or a ceiling.
    pub fn quotas(&self, blocks: u32) -> Vec<(TenantId, Quota)> {
        let alone = self.tenants.iter().filter(|tenant| tenant.group.is_none());
        let alone = alone.map(|tenant| (tenant.id, tenant.guarantee, tenant.ceiling));
        let groups = self.groups.iter().map(|group| (group.id, group.guarantee, group.ceiling));
        let given = alone
            .chain(groups)
            .filter(|(_, guarantee, ceiling)| (*guarantee, *ceiling) != (Share::Default, Share::Default));
        given
            .map(|(id, guarantee, ceiling)| {
                let quota = Quota { guarantee: guarantee.of(blocks, 0), ceiling: ceiling.of(blocks, blocks) };
                (id, quota)
            })
            .collect()
    }

    /// What an operator calls a tenant or a group, for messages about [`Declared::quotas`].
    pub fn name(&self, id: TenantId) -> Option<&str> {
        let tenants = self.tenants.iter().map(|tenant| (tenant.id, tenant.name.as_str()));
        let groups = self.groups.iter().map(|group| (group.id, group.name.as_str()));
        tenants.chain(groups).find(|(known, _)| *known == id).map(|(_, name)| name)
    }
}

fn check_name<'a>(
    what: &str,
    name: &str,
    mut known: impl Iterator<Item = &'a String>,
) -> Result<(), ServerError> {
    if !good_name(name) {
        return Err(wrong(what, "name", "must be 1 to 64 letters, digits, '-', '_' or '.'"));
    }
    if known.any(|other| other == name) {
        return Err(wrong(what, "name", "is given twice"));
    }
    Ok(())
}

pub(crate) fn good_name(name: &str) -> bool {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(fine)
}

/// A list of names and patterns.
fn adapters(what: &str, field: &str, value: &Value) -> Result<AllowedAdapters, ServerError> {
    let names = |list: &Vec<Value>| -> Option<Vec<String>> {
        list.iter().map(|name| name.as_str().map(str::to_owned)).collect()
    };
    let Some(names) = value.as_array().and_then(names) else {
        let reason = format!("{value} is no list of names of adapters, such as [\"sql\", \"team-*\"]");
        return Err(wrong(what, field, reason));
    };
    AllowedAdapters::only(names).map_err(|problem| wrong(what, field, problem))
}

/// `"25%"`, or a number of blocks.
fn share(what: &str, field: &str, value: Option<Value>) -> Result<Share, ServerError> {
    let Some(value) = value else { return Ok(Share::Default) };
    let percent = |text: &str| text.strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
    let share = match &value {
        Value::String(text) => {
            percent(text).filter(|percent| (0.0..=100.0).contains(percent)).map(Share::Percent)
        }
        Value::Number(blocks) => {
            blocks.as_u64().and_then(|blocks| u32::try_from(blocks).ok()).map(Share::Blocks)
        }
        _ => None,
    };
    share.ok_or_else(|| {
        wrong(what, field, format!("{value} is neither a percentage like \"25%\" nor a number of blocks"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Declared, String> {
        let environment = |name: &str| (name == "ACME_KEYS").then(|| "e1, e2".to_owned());
        Declared::parse(text, &environment).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_says_who_there_is() {
        let declared = parse(
            r#"{"tenants": [
                {"name": "acme", "keys": ["k1"], "keys_env": ["ACME_KEYS"], "weight": 3, "guarantee": "25%", "ceiling": 60,
                 "class": -2, "priority": {"min": -5},
                 "limits": {"tokens_per_minute": 9000}},
                {"name": "a", "keys": ["k2"], "group": "lab"},
                {"name": "b", "keys": ["k3"], "group": "lab"}],
              "groups": [{"name": "lab", "guarantee": 10}], "default_limits": {"max_context": 100}}"#,
        )
        .expect("valid");
        let acme = &declared.tenants[0];
        assert_eq!(
            (acme.keys.iter().map(|key| &**key).collect::<Vec<_>>().join(" "), acme.weight, acme.group),
            ("k1 e1 e2".into(), 3, None)
        );
        assert_eq!(declared.tenants[2].group, Some(0));
        assert_eq!((acme.class, acme.priority), (-2, PriorityRange { min: -5, max: i32::MAX }));
        assert_eq!((declared.tenants[1].class, declared.tenants[1].priority), (0, PriorityRange::default()));
        assert_eq!(declared.tenants[0].limits.and_then(|limits| limits.tokens_per_minute), Some(9000));
        assert_eq!((declared.default_limits.max_context, declared.tenants[1].limits), (Some(100), None));
        let lab = declared.groups[0].id;
        assert_eq!(
            declared.quotas(100),
            [(acme.id, Quota { guarantee: 25, ceiling: 60 }), (lab, Quota { guarantee: 10, ceiling: 100 })]
        );
        assert_eq!(declared.weights()[..2], [(acme.id, 3), (declared.tenants[1].id, 1)]);
        assert_eq!((declared.name(lab), declared.name(acme.id)), (Some("lab"), Some("acme")));
    }

    #[test]
    fn a_list_of_adapters_is_a_tenants_own_or_the_default() {
        let declared = parse(
            r#"{"tenants": [{"name": "a", "keys": ["k"], "adapters": ["sql", "team-*"]}, {"name": "b", "keys": ["l"]},
                {"name": "c", "keys": ["m"], "adapters": []}], "default_adapters": ["public"]}"#,
        )
        .expect("valid");
        let own = |at: usize| declared.tenants[at].adapters.as_ref();
        assert!(own(0).is_some_and(|list| list.has("team-x") && !list.has("public")));
        assert!(own(1).is_none() && declared.default_adapters.has("public"));
        assert!(own(2).is_some_and(|list| !list.has("sql")));
        assert!(declared.restricts_adapters());
        let all = parse(r#"{"tenants": [{"name": "a", "keys": ["k"]}]}"#).expect("valid");
        assert!(all.default_adapters.has("anything") && !all.restricts_adapters());
        assert!(parse(r#"{"default_adapters": []}"#).expect("valid").restricts_adapters());
    }

    #[test]
    fn whoever_wants_no_quota_divides_nothing() {
        let declared = parse(r#"{"tenants": [{"name": "a", "keys": ["k"]}]}"#).expect("valid");
        assert_eq!(declared.quotas(100), []);
    }

    #[test]
    fn every_mistake_is_named_with_its_tenant_and_field() {
        let tenant = |fields: &str| {
            format!(
                r#"{{"tenants": [{{"name": "ok", "keys": ["k"]}}, {{{fields}}}], "groups": [{{"name": "g"}}]}}"#
            )
        };
        for (text, named) in [
            ("{", &["line 1"][..]),
            (r#"{"tenants": []}"#, &["tenants"]),
            (r#"{"tenants": [], "teams": []}"#, &["teams", "line 1"]),
            (
                r#"{"tenants": [{"name": "x", "keys": ["k"]}], "prefixes": [{"prompt": "p"}]}"#,
                &["prefix 1", "name"],
            ),
            (
                r#"{"tenants": [{"name": "x", "keys": ["k"]}], "prefixes": [{"name": "p"}, {"name": "p"}]}"#,
                &["prefix 2", "twice"],
            ),
            (&tenant(r#""name": "x", "key": "k""#), &["key", "line 1"]),
            (
                &tenant(r#""name": "x", "limits": {"requests_per_minute": 0}"#),
                &["tenant 2", "limits.requests_per_minute"],
            ),
            (&tenant(r#""name": "x", "limits": {"requests": 1}"#), &["requests", "line 1"]),
            (r#"{"tenants": [], "default_limits": {"max_context": 0}}"#, &["every tenant", "max_context"]),
            (&tenant(r#""name": "ok", "keys": ["l"]"#), &["tenant 2", "name", "twice"]),
            (&tenant(r#""name": "a b", "keys": ["l"]"#), &["tenant 2", "name"]),
            (&tenant(r#""name": "x", "keys_env": ["NONE"]"#), &["tenant 2", "keys_env", "NONE"]),
            (&tenant(r#""name": "x", "keys": ["l"], "weight": 0"#), &["tenant 2", "weight", "0"]),
            (&tenant(r#""name": "x", "keys": ["l"], "weight": 1001"#), &["weight", "1001"]),
            (&tenant(r#""name": "x", "keys": ["l"], "class": 1001"#), &["tenant 2", "class", "1001"]),
            (&tenant(r#""name": "x", "keys": ["l"], "class": "first""#), &["first", "line 1"]),
            (
                &tenant(r#""name": "x", "keys": ["l"], "priority": {"min": 1}"#),
                &["tenant 2", "priority", "include 0"],
            ),
            (&tenant(r#""name": "x", "keys": ["l"], "priority": {"least": 1}"#), &["least", "line 1"]),
            (
                &tenant(r#""name": "x", "keys": ["l"], "adapters": ["sql", ""]"#),
                &["tenant 2", "adapters", "\"\""],
            ),
            (
                &tenant(r#""name": "x", "keys": ["l"], "adapters": "sql""#),
                &["tenant 2", "adapters", "no list"],
            ),
            (&tenant(r#""name": "x", "keys": ["l"], "adapters": ["a b"]"#), &["tenant 2", "adapters", "a b"]),
            (&tenant(r#""name": "x", "keys": ["l"], "adapters": [3]"#), &["tenant 2", "adapters", "[3]"]),
            (
                r#"{"tenants": [], "default_adapters": {"sql": true}}"#,
                &["every tenant", "default_adapters", "no list"],
            ),
            (
                &tenant(r#""name": "x", "keys": ["l"], "guarantee": "120%""#),
                &["tenant 2", "guarantee", "120%"],
            ),
            (&tenant(r#""name": "x", "keys": ["l"], "ceiling": "half""#), &["tenant 2", "ceiling", "half"]),
            (&tenant(r#""name": "x", "keys": ["l"], "ceiling": -4"#), &["ceiling", "-4"]),
            (&tenant(r#""name": "x", "keys": ["l"], "group": "h""#), &["tenant 2", "group", "\"h\""]),
            (
                &tenant(r#""name": "x", "keys": ["l"], "group": "g", "ceiling": 4"#),
                &["tenant 2", "ceiling", "group \"g\""],
            ),
        ] {
            let error = parse(text).expect_err(text);
            for part in named {
                assert!(error.contains(part), "{part} is not in: {error}");
            }
        }
    }
}
