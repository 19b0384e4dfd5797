//! `--tenants FILE`: the tenants an operator declares, as JSON.
//!
//! Owns: the file's format, and every way in which one can be wrong. Must never: read a file or the environment itself, or
//! keep a key longer than it takes to make the key ring.
//!
//! Ids: a tenant without an entry here has the number of its key (`tenants`); declared tenants and groups follow from
//! [`FIRST_TENANT`] and [`FIRST_GROUP`] in the order of the file. A group is a tenant to the cache: its members' chains start
//! from one secret, derived on the server from the group's name, and what they hold counts as the group's.

use folio_kv::TenantId;
use serde::Deserialize;

use crate::error::ServerError;

pub const FIRST_TENANT: u32 = 1 << 16;
pub const FIRST_GROUP: u32 = 1 << 24;
/// Tenants, and groups, of one file.
const DECLARED_MAX: usize = 10_000;

/// What the file says, checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Declared {
    pub tenants: Vec<DeclaredTenant>,
    pub groups: Vec<DeclaredGroup>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredTenant {
    pub id: TenantId,
    pub name: String,
    pub keys: Vec<String>,
    /// Its share of what several tenants want at once.
    pub weight: u32,
    /// Index of its group.
    pub group: Option<usize>,
}

/// Tenants that share a cache.
#[derive(Clone, Debug, PartialEq)]
pub struct DeclaredGroup {
    pub id: TenantId,
    pub name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    tenants: Vec<TenantEntry>,
    #[serde(default)]
    groups: Vec<GroupEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantEntry {
    name: String,
    #[serde(default)]
    keys: Vec<String>,
    #[serde(default)]
    keys_env: Vec<String>,
    weight: Option<u32>,
    group: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupEntry {
    name: String,
}

fn wrong(what: &str, field: &str, reason: impl std::fmt::Display) -> ServerError {
    ServerError::Config(format!("the tenants file: {what}: {field}: {reason}"))
}

impl Declared {
    /// `environment` looks up the variables that `keys_env` names.
    pub fn parse(text: &str, environment: &dyn Fn(&str) -> Option<String>) -> Result<Self, ServerError> {
        let file: File = serde_json::from_str(text)
            .map_err(|error| ServerError::Config(format!("the tenants file: {error}")))?;
        if file.tenants.is_empty() {
            return Err(ServerError::Config("the tenants file: tenants: names nobody".into()));
        }
        if file.tenants.len().max(file.groups.len()) > DECLARED_MAX {
            let reason = format!("the tenants file: more than {DECLARED_MAX} tenants or groups");
            return Err(ServerError::Config(reason));
        }
        let mut declared = Self::default();
        for (index, entry) in file.groups.into_iter().enumerate() {
            let what = format!("group {} ({:?})", index + 1, entry.name);
            check_name(&what, &entry.name, declared.groups.iter().map(|group| &group.name))?;
            let id = TenantId(FIRST_GROUP + index as u32);
            declared.groups.push(DeclaredGroup { id, name: entry.name });
        }
        for (index, entry) in file.tenants.into_iter().enumerate() {
            let tenant = declared.tenant(index, entry, environment)?;
            declared.tenants.push(tenant);
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
            keys.extend(value.split(',').map(|key| key.trim().to_owned()));
        }
        if keys.is_empty() {
            return Err(wrong(&what, "keys", "is empty, so nobody can be this tenant"));
        }
        let weight = entry.weight.unwrap_or(1);
        if !(1..=folio_engine::config::TENANT_WEIGHT_MAX).contains(&weight) {
            let reason = format!("{weight} is not within 1 to {}", folio_engine::config::TENANT_WEIGHT_MAX);
            return Err(wrong(&what, "weight", reason));
        }
        let known = |name: &String| self.groups.iter().position(|group| group.name == *name);
        let group = entry.group.map(|name| {
            known(&name).ok_or_else(|| wrong(&what, "group", format!("{name:?} is not among the groups")))
        });
        let group = group.transpose()?;
        let id = TenantId(FIRST_TENANT + index as u32);
        Ok(DeclaredTenant { id, name: entry.name, keys, weight, group })
    }

    /// For [`folio_engine::SchedulerConfig::tenant_weights`].
    pub fn weights(&self) -> Vec<(TenantId, u32)> {
        self.tenants.iter().map(|tenant| (tenant.id, tenant.weight)).collect()
    }
}

fn check_name<'a>(
    what: &str,
    name: &str,
    mut known: impl Iterator<Item = &'a String>,
) -> Result<(), ServerError> {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > 64 || !name.bytes().all(fine) {
        return Err(wrong(what, "name", "must be 1 to 64 letters, digits, '-', '_' or '.'"));
    }
    if known.any(|other| other == name) {
        return Err(wrong(what, "name", "is given twice"));
    }
    Ok(())
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
                {"name": "acme", "keys": ["k1"], "keys_env": ["ACME_KEYS"], "weight": 3},
                {"name": "a", "keys": ["k2"], "group": "lab"},
                {"name": "b", "keys": ["k3"], "group": "lab"}],
              "groups": [{"name": "lab"}]}"#,
        )
        .expect("valid");
        let acme = &declared.tenants[0];
        assert_eq!((acme.keys.join(" "), acme.weight, acme.group), ("k1 e1 e2".into(), 3, None));
        assert_eq!(declared.tenants[2].group, Some(0));
        assert_eq!(declared.weights()[..2], [(acme.id, 3), (declared.tenants[1].id, 1)]);
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
            (&tenant(r#""name": "x", "key": "k""#), &["key", "line 1"]),
            (&tenant(r#""name": "x""#), &["tenant 2", "\"x\"", "keys:"]),
            (&tenant(r#""name": "ok", "keys": ["l"]"#), &["tenant 2", "name", "twice"]),
            (&tenant(r#""name": "a b", "keys": ["l"]"#), &["tenant 2", "name"]),
            (&tenant(r#""name": "x", "keys_env": ["NONE"]"#), &["tenant 2", "keys_env", "NONE"]),
            (&tenant(r#""name": "x", "keys": ["l"], "weight": 0"#), &["tenant 2", "weight", "0"]),
            (&tenant(r#""name": "x", "keys": ["l"], "weight": 1001"#), &["weight", "1001"]),
            (&tenant(r#""name": "x", "keys": ["l"], "group": "h""#), &["tenant 2", "group", "\"h\""]),
        ] {
            let error = parse(text).expect_err(text);
            for part in named {
                assert!(error.contains(part), "{part} is not in: {error}");
            }
        }
    }
}
