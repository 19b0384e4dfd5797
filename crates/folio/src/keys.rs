//! `folio keys`: the file of API keys.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use folio_server::keys::{self, KeyRecord, NewKey, Scope};
use folio_server::{Keyring, WrappingKey, owner_digest, unix_s};

use crate::cli::KeysAction;

pub fn run(action: KeysAction) -> Result<()> {
    match action {
        KeysAction::Create { file, tenant, name, scope, expires } => {
            create(&file, tenant, name, scope, expires)
        }
        KeysAction::List { file, json } => list(&file, json),
        KeysAction::Revoke { file, id } => {
            let record = keys::revoke(&file, &id, unix_s())?;
            println!("revoked {} of {}", record.id, record.tenant);
            Ok(())
        }
        KeysAction::Wrap { keyring, from, to } => {
            exists(&keyring)?;
            let (from, to) = (wrapping(from.as_deref())?, wrapping(to.as_deref())?);
            Keyring::wrap(&keyring, from.as_ref(), to.as_ref())?;
            let how = if to.is_some() { "wrapped" } else { "not wrapped any more" };
            println!("the secrets of {} are {how}", keyring.display());
            Ok(())
        }
        KeysAction::Forget { keyring, keyring_key, tenant } => {
            exists(&keyring)?;
            let key = wrapping(keyring_key.as_deref())?;
            if !Keyring::forget(&keyring, key.as_ref(), &owner_digest(&tenant))? {
                bail!("{} knows nobody by the name of {tenant:?}", keyring.display());
            }
            println!("forgot {tenant}: what was kept of it cannot be read any more");
            Ok(())
        }
    }
}

pub fn exists(keyring: &Path) -> Result<()> {
    match keyring.exists() {
        true => Ok(()),
        false => bail!("there is no keyring {}", keyring.display()),
    }
}

pub fn wrapping(key: Option<&Path>) -> Result<Option<WrappingKey>> {
    Ok(key.map(WrappingKey::read).transpose()?)
}

fn create(
    file: &Path,
    tenant: String,
    name: String,
    scopes: Vec<Scope>,
    expires: Option<Duration>,
) -> Result<()> {
    let now = unix_s();
    let expires_s = expires.map(|time| now.saturating_add(time.as_secs()));
    let (record, key) = keys::create(file, NewKey { tenant, name, scopes, expires_s }, now)?;
    eprintln!("key {} of {}; it is not shown again:", record.id, record.tenant);
    println!("{key}");
    Ok(())
}

fn list(file: &Path, json: bool) -> Result<()> {
    let records = keys::list(file)?;
    let now = unix_s();
    if json {
        let rows: Vec<_> = records
            .iter()
            .map(|record| {
                serde_json::json!({
                    "id": record.id, "tenant": record.tenant, "name": record.name, "scopes": record.scopes,
                    "state": record.state(now), "created": record.created_s, "expires": record.expires_s,
                    "revoked": record.revoked_s,
                })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&rows)?);
        return Ok(());
    }
    println!("{:<14} {:<20} {:<20} {:<8} {:<10} scopes", "id", "tenant", "name", "state", "expires");
    records.iter().for_each(|record| println!("{}", row(record, now)));
    Ok(())
}

fn row(record: &KeyRecord, now: u64) -> String {
    let expires = match record.expires_s {
        None => "never".to_owned(),
        Some(end) if end <= now => "over".to_owned(),
        Some(end) if end - now < 2 * 86_400 => format!("in {} h", (end - now).div_ceil(3600)),
        Some(end) => format!("in {} d", (end - now).div_ceil(86_400)),
    };
    let scopes: Vec<_> = record.scopes.iter().map(|scope| scope.name()).collect();
    let KeyRecord { id, tenant, name, .. } = record;
    format!("{id:<14} {tenant:<20} {name:<20} {:<8} {expires:<10} {}", record.state(now), scopes.join(","))
}
