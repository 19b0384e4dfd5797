//! What keeps KV off the device, if anything does.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::Tier;
use folio_kv::{GroupConfig, KvCache};
use folio_model::backend::BlockMemory;
use folio_tiers::remote::RemoteStore;
use folio_tiers::remote::valkey::{self, Valkey, ValkeyConfig};
use folio_tiers::{DiskConfig, DiskStore, Secret, Store, StoreTier};

use crate::cli::{DiskKvArgs, EngineArgs, RemoteKvArgs};
use crate::device::Device;
use crate::runtime::Report;

/// What tiers carry: the memory, and its groups.
type Blocks = (Arc<dyn BlockMemory>, Vec<GroupConfig>);

pub fn open(
    args: &EngineArgs,
    device: &Device,
    cache: &KvCache,
    layout_digest: &[u8; 32],
    report: &mut Report,
) -> Result<Option<Arc<dyn Tier>>> {
    let option = match (&args.disk_kv.disk_kv, &args.remote_kv.remote_kv) {
        (None, None) => return Ok(None),
        (Some(_), None) => "--disk-kv",
        (None, Some(_)) => "--remote-kv",
        (Some(_), Some(_)) => bail!("--disk-kv and --remote-kv: KV is kept in one place, give one of them"),
    };
    let Some(memory) = device.block_memory() else {
        bail!(
            "{option}: KV can be carried away from the memory of the processors only, and this is {}",
            device.name()
        );
    };
    let groups = (0..cache.groups()).map(|group| *cache.group_config(group));
    let groups = groups.filter(|group| !group.optional).collect();
    let blocks = (memory, groups);
    let (store, threads) = match option {
        "--disk-kv" => disk(&args.disk_kv, layout_digest, report),
        _ => remote(&args.remote_kv, &blocks, layout_digest, report),
    }
    .context(option)?;
    let (memory, groups) = blocks;
    Ok(Some(Arc::new(StoreTier::new(store, memory, groups, threads.into()).context(option)?)))
}

fn disk(args: &DiskKvArgs, layout_digest: &[u8; 32], report: &mut Report) -> Result<(Arc<dyn Store>, u16)> {
    let dir = args.disk_kv.as_ref().context("no folder")?;
    let config = DiskConfig {
        seal: !args.disk_kv_unencrypted,
        write_bytes_per_day: args.disk_kv_writes_per_day,
        ..DiskConfig::new(dir, args.disk_kv_size, *layout_digest)
    };
    let store = DiskStore::open(config)?;
    report.describe_disk_kv(dir, args.disk_kv_size);
    Ok((store, args.disk_kv_threads))
}

fn remote(
    args: &RemoteKvArgs,
    (memory, groups): &Blocks,
    layout_digest: &[u8; 32],
    report: &mut Report,
) -> Result<(Arc<dyn Store>, u16)> {
    let url = args.remote_kv.as_ref().context("no URL")?;
    let authorities = args
        .remote_kv_ca
        .as_ref()
        .map(|path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display())));
    let secret = |text: &folio_server::Secret| Secret(text.to_string());
    let config = ValkeyConfig {
        url: secret(url),
        password: args.remote_kv_password.as_ref().map(secret),
        authorities: authorities.transpose()?,
    };
    let valkey = Valkey::new(&config)?;
    let largest = (0..groups.len()).map(|group| memory.block_bytes(group)).max().unwrap_or(0);
    if largest > valkey::VALUE_BYTES_MAX / 2 {
        bail!(
            "a block of KV has {largest} bytes, which is too much for a value of such a server: give a smaller --block-size"
        );
    }
    let gone = valkey.greet()?;
    let server = valkey.server();
    if let Some(fault) = &gone {
        tracing::warn!("--remote-kv: nothing is kept or found until the server answers: {fault}");
    }
    let store = RemoteStore::new(Arc::new(valkey), *layout_digest, gone)?;
    report.describe_remote_kv("valkey", &server);
    Ok((store, args.remote_kv_threads))
}
