//! `folio cache`: a folder of `--disk-kv`, looked at without a server.

use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_kv::Root;
use folio_server::{Keyring, owner_digest};
use folio_tiers::DataKey;
use folio_tiers::export::{self, Moved};
use folio_tiers::inspect::{self, SegmentInfo, SegmentState};

use crate::cli::CacheAction;
use crate::keys;
use crate::units;

pub fn run(action: CacheAction) -> Result<()> {
    match action {
        CacheAction::Ls { folder } => {
            let all = inspect::segments(&folder.dir, false)?;
            println!("{:<11} {:<10} {:>9} {:>9} {:>7} layout", "segment", "state", "blocks", "bytes", "age");
            all.iter().for_each(|segment| println!("{}", row(segment)));
        }
        CacheAction::Stats { folder } => stats(&inspect::segments(&folder.dir, false)?),
        CacheAction::Verify { folder } => {
            let all = inspect::segments(&folder.dir, true)?;
            stats(&all);
            let damaged: u64 = all.iter().filter_map(|segment| segment.damaged).sum();
            let unreadable = all.iter().filter(|segment| segment.state == SegmentState::Unreadable).count();
            if damaged > 0 || unreadable > 0 {
                bail!(
                    "{damaged} blocks are damaged and {unreadable} segments unreadable; a server computes what they held"
                );
            }
            println!("every block is as it was written");
        }
        CacheAction::Gc { folder, size } => {
            let gone = inspect::shrink(&folder.dir, size)?;
            let (blocks, bytes) = sums(&gone);
            println!("deleted {} segments with {blocks} blocks, {}", gone.len(), units::bytes(bytes));
        }
        CacheAction::Export { folder, layout, tenant, keyring, keyring_key, file } => {
            let keyring = keyring.unwrap_or_else(|| folder.dir.join("keyring"));
            let key = tenant.map(|tenant| key_of(&keyring, keyring_key.as_deref(), &tenant)).transpose()?;
            let moved = export::export(&folder.dir, layout.as_deref(), key.as_ref(), &file)?;
            say("wrote", &moved);
        }
        CacheAction::Import { folder, size, file } => {
            let moved = export::import(&folder.dir, size, &file)?;
            say("stored", &moved);
            println!("{} blocks were there before", units::count(moved.known));
        }
    }
    Ok(())
}

/// What a tenant's blocks are sealed with.
fn key_of(keyring: &Path, key: Option<&Path>, tenant: &str) -> Result<DataKey> {
    keys::exists(keyring).context("--keyring")?;
    match Keyring::find(keyring, keys::wrapping(key)?.as_ref(), &owner_digest(tenant))? {
        Some(secret) => Ok(Root::data_key_of(&secret).into()),
        None => bail!("{} knows nobody by the name of {tenant:?}", keyring.display()),
    }
}

fn say(done: &str, moved: &Moved) {
    let left_out = match moved.damaged {
        0 => String::new(),
        damaged => format!("; {damaged} are damaged and were left out"),
    };
    println!("{done} {} blocks, {}{left_out}", units::count(moved.blocks), units::bytes(moved.bytes));
}

fn sums(segments: &[SegmentInfo]) -> (u64, u64) {
    (segments.iter().map(|of| of.blocks).sum(), segments.iter().map(|of| of.bytes).sum())
}

fn stats(segments: &[SegmentInfo]) {
    let (blocks, bytes) = sums(segments);
    let payload: u64 = segments.iter().map(|of| of.payload_bytes).sum();
    println!("segments   {}", segments.len());
    println!("blocks     {}", units::count(blocks));
    println!("on disk    {}, of it blocks {}", units::bytes(bytes), units::bytes(payload));
    let mut layouts: Vec<_> = segments.iter().filter(|of| of.blocks > 0).map(|of| of.layout).collect();
    layouts.sort_unstable();
    layouts.dedup();
    println!("layouts    {}", layouts.len());
}

fn row(segment: &SegmentInfo) -> String {
    let state = match segment.state {
        SegmentState::Ended => "ended",
        SegmentState::Open => "open",
        SegmentState::Foreign => "foreign",
        SegmentState::Unreadable => "unreadable",
    };
    let hours = segment.age.as_secs() / 3600;
    let age = if hours < 48 { format!("{hours} h") } else { format!("{} d", hours / 24) };
    let layout: String = segment.layout[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    let SegmentInfo { number, blocks, bytes, .. } = segment;
    format!("{number:010}  {state:<10} {blocks:>9} {:>9} {age:>7} {layout}", units::bytes(*bytes))
}
