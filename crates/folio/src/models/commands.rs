//! `folio pull`, `folio list` and `folio rm`: models of the hub on this machine.

use std::path::Path;
use std::time::SystemTime;

use anyhow::{Result, bail};
use folio_model::hub::{CachedKind, CachedModel, Hub, ModelName};
use serde_json::{Value, json};

use super::source::download;
use super::{Aliases, Source};
use crate::bench::table;
use crate::cli::{ListArgs, PullArgs, RmArgs};
use crate::units;

pub fn pull(args: &PullArgs) -> Result<()> {
    let (hub, name) = (Hub::from_env()?, on_the_hub(&args.model)?);
    let path = download(|progress| hub.pull(&name, progress))?;
    println!("{}", path.display());
    Ok(())
}

pub fn list(args: &ListArgs) -> Result<()> {
    let hub = Hub::from_env()?;
    let models = hub.models()?;
    if args.json {
        println!("{:#}", Value::from_iter(models.iter().map(json)));
        return Ok(());
    }
    if models.is_empty() {
        eprintln!("There is no model in {}; `folio pull org/model` downloads one.", hub.cache().display());
        return Ok(());
    }
    let now = SystemTime::now();
    let row = |model: &CachedModel| {
        let ago = model.used.map(|used| units::ago(now.duration_since(used).unwrap_or_default()));
        let used = ago.unwrap_or_else(|| "unknown".to_owned());
        vec![model.name.to_string(), units::bytes(model.bytes), format(model), used]
    };
    let rows: Vec<_> = models.iter().map(row).collect();
    print!("{}", table::render(&["name", "size", "format", "used"], &rows));
    Ok(())
}

pub fn rm(args: &RmArgs) -> Result<()> {
    let (hub, name) = (Hub::from_env()?, on_the_hub(&args.model)?);
    let removed = hub.remove(&name)?;
    println!("removed {name}: {} in {} files", units::bytes(removed.bytes), removed.files);
    Ok(())
}

/// The name that a MODEL is on the hub, aliases included.
fn on_the_hub(model: &str) -> Result<ModelName> {
    match Source::parse(Some(model), &Aliases::default())? {
        Source::Hub(name) => Ok(name),
        Source::BuiltIn => bail!("{model} is the built-in model, which is part of the program"),
        Source::Folder(path) | Source::Gguf(path) => {
            bail!("{} is no model of the hub: it lies where you put it", path.display())
        }
    }
}

fn json(model: &CachedModel) -> Value {
    let used = model.used.and_then(|used| used.duration_since(SystemTime::UNIX_EPOCH).ok());
    let path = match &model.kind {
        CachedKind::Folder(path) | CachedKind::Gguf { file: path, .. } => Some(path.display().to_string()),
        CachedKind::Partial => None,
    };
    json!({
        "name": model.name.to_string(),
        "bytes": model.bytes,
        "format": format(model),
        "used_s": used.map(|used| used.as_secs()),
        "path": path,
    })
}

/// `GGUF Q4_K_M`, `safetensors bfloat16`, `safetensors awq`.
fn format(model: &CachedModel) -> String {
    match &model.kind {
        CachedKind::Gguf { quantization, .. } => format!("GGUF {quantization}"),
        CachedKind::Folder(folder) => {
            format!("safetensors {}", stored_as(folder).unwrap_or_default()).trim().to_owned()
        }
        CachedKind::Partial => "incomplete, or no model to serve".to_owned(),
    }
}

/// As config.json says.
fn stored_as(folder: &Path) -> Option<String> {
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).ok()?).ok()?;
    let stored = [&config["quantization_config"]["quant_method"], &config["dtype"], &config["torch_dtype"]];
    stored.into_iter().find_map(|value| Some(value.as_str()?.chars().take(40).collect()))
}
