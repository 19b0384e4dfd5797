//! What keeps KV off the device, the nearest first.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use folio_engine::Tier;
use folio_kv::{GroupConfig, KvCache};
use folio_model::backend::BlockMemory;
use folio_tiers::remote::s3::{S3, S3Config};
use folio_tiers::remote::valkey::{Valkey, ValkeyConfig};
use folio_tiers::remote::{Objects, RemoteStore, greet};
use folio_tiers::{DiskConfig, DiskStore, HostStore, Secret, Sharing, Store, StoreTier, WallClock};

use crate::cli::{DiskKvArgs, EngineArgs, RemoteKvArgs};
use crate::device::Device;
use crate::runtime::StartReport;
use crate::units;

/// What tiers carry: the memory, and its groups.
type Blocks = (Arc<dyn BlockMemory>, Vec<GroupConfig>);

pub fn open(
    args: &EngineArgs,
    device: &Device,
    cache: &KvCache,
    layout_digest: &[u8; 32],
    report: &mut StartReport,
) -> Result<Vec<Arc<dyn Tier>>> {
    let (disk_kv, remote_kv) = (&args.disk_kv, &args.remote_kv);
    let wanted = [
        args.host_kv_memory.filter(|bytes| *bytes > 0).map(|_| "--host-kv-memory"),
        disk_kv.disk_kv.as_ref().map(|_| "--disk-kv"),
        disk_kv.disk_kv_shared.as_ref().map(|_| "--disk-kv-shared"),
        remote_kv.remote_kv.as_ref().map(|_| "--remote-kv"),
    ];
    let mut tiers: Vec<Arc<dyn Tier>> = Vec::new();
    // The nearest first.
    for option in wanted.into_iter().flatten() {
        let Some(memory) = device.block_memory() else {
            bail!("{option}: the memory of {} cannot be read", device.name());
        };
        let groups = (0..cache.groups()).map(|group| *cache.group_config(group));
        let groups: Vec<GroupConfig> = groups.filter(|group| !group.optional).collect();
        let blocks = (memory, groups);
        let (store, threads) = match option {
            "--host-kv-memory" => host(args, &blocks, device.is_gpu(), report),
            "--disk-kv" | "--disk-kv-shared" => disk(disk_kv, layout_digest, report),
            _ => remote(remote_kv, &blocks, layout_digest, report),
        }
        .context(option)?;
        let (memory, groups) = blocks;
        tiers.push(Arc::new(StoreTier::new(store, memory, groups, threads.into()).context(option)?));
    }
    Ok(tiers)
}

/// Copies are bound by the memory's rate, which one thread does not reach everywhere.
const HOST_THREADS: u16 = 2;

fn host(
    args: &EngineArgs,
    (memory, groups): &Blocks,
    is_gpu: bool,
    report: &mut StartReport,
) -> Result<(Arc<dyn Store>, u16)> {
    let bytes = args.host_kv_memory.unwrap_or_default();
    let block: usize = (0..groups.len()).map(|group| memory.block_bytes(group)).sum();
    if bytes < block as u64 {
        bail!(
            "{} hold no block of the KV cache, which has {block} bytes: write a unit, such as 4GiB",
            units::bytes(bytes)
        );
    }
    report.describe_host_kv(bytes, is_gpu);
    Ok((HostStore::new(bytes, WallClock::default()), HOST_THREADS))
}

fn disk(
    args: &DiskKvArgs,
    layout_digest: &[u8; 32],
    report: &mut StartReport,
) -> Result<(Arc<dyn Store>, u16)> {
    let shared = args.disk_kv_shared.as_ref().map(|_| Sharing::default());
    let dir = args.disk_kv.as_ref().or(args.disk_kv_shared.as_ref()).context("no folder")?;
    let config = DiskConfig {
        shared,
        seal: !args.disk_kv_unencrypted,
        write_bytes_per_day: args.disk_kv_writes_per_day,
        ..DiskConfig::new(dir, args.disk_kv_size, *layout_digest)
    };
    let store = DiskStore::open(config)?;
    report.describe_disk_kv(dir, args.disk_kv_size, shared.is_some());
    Ok((store, args.disk_kv_threads))
}

fn remote(
    args: &RemoteKvArgs,
    (memory, groups): &Blocks,
    layout_digest: &[u8; 32],
    report: &mut StartReport,
) -> Result<(Arc<dyn Store>, u16)> {
    let url = args.remote_kv.as_ref().context("no URL")?;
    let authorities = args
        .remote_kv_ca
        .as_ref()
        .map(|path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display())));
    let objects = objects(args, url, authorities.transpose()?)?;
    let largest = (0..groups.len()).map(|group| memory.block_bytes(group)).max().unwrap_or(0);
    if largest > objects.limits().value_bytes_max / 2 {
        bail!(
            "a block of KV has {largest} bytes, which is too much for a value of such a server: give a smaller --block-size"
        );
    }
    let gone = greet(&*objects)?;
    if let Some(fault) = &gone {
        tracing::warn!("--remote-kv: nothing is kept or found until the server answers: {fault}");
    }
    report.describe_remote_kv(objects.name(), &objects.server());
    let store = RemoteStore::new(objects, *layout_digest, gone, WallClock::default())?;
    Ok((store, args.remote_kv_threads))
}

fn objects(
    args: &RemoteKvArgs,
    url: &folio_server::Secret,
    authorities: Option<Vec<u8>>,
) -> Result<Arc<dyn Objects>> {
    let secret = |text: &str| Secret(text.to_owned());
    let given = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    if !url.starts_with("s3:") {
        if args.remote_kv_requests_per_day.is_some() || args.remote_kv_dollars_per_month.is_some() {
            bail!("--remote-kv-requests-per-day and --remote-kv-dollars-per-month are for s3:// only");
        }
        let password = args.remote_kv_password.as_deref().map(secret);
        return Ok(Arc::new(Valkey::new(&ValkeyConfig { url: secret(url), password, authorities })?));
    }
    if args.remote_kv_password.is_some() {
        bail!(
            "--remote-kv-password is not for s3://: its credentials are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        );
    }
    let credentials = match (given("AWS_ACCESS_KEY_ID"), given("AWS_SECRET_ACCESS_KEY")) {
        (Some(key), Some(hidden)) => {
            let token = given("AWS_SESSION_TOKEN").as_deref().map(secret);
            Some((secret(&key), secret(&hidden), token))
        }
        (None, None) => None,
        _ => bail!("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY belong together: give both"),
    };
    if let Some(dollars) =
        args.remote_kv_dollars_per_month.filter(|dollars| *dollars <= 0.0 || dollars.is_nan())
    {
        bail!("--remote-kv-dollars-per-month is more than 0, not {dollars}");
    }
    let config = S3Config {
        url: secret(url),
        credentials,
        endpoint: given("AWS_ENDPOINT_URL_S3").or_else(|| given("AWS_ENDPOINT_URL")),
        region: given("AWS_REGION").or_else(|| given("AWS_DEFAULT_REGION")),
        authorities,
        requests_per_day: args.remote_kv_requests_per_day,
        dollars_per_month: args.remote_kv_dollars_per_month,
    };
    Ok(Arc::new(S3::new(&config)?))
}
