//! `folio pull`, and the download behind `org/model` everywhere.

use std::path::PathBuf;

use anyhow::Result;
use folio_model::hub::{DownloadProgress, Hub, ModelName};

use crate::cli::PullArgs;
use crate::progress::Bar;

pub fn run(args: &PullArgs) -> Result<()> {
    let name: ModelName = args.model.parse()?;
    let bar = Bar::bytes("downloading");
    let folder = Hub::from_env()?
        .pull(&name, &|p: DownloadProgress<'_>| bar.set(p.done_bytes, p.total_bytes, p.file))?;
    bar.finish();
    println!("{}", folder.display());
    Ok(())
}

/// The model's folder, from the hub's cache when it is there.
pub fn download(model: &str) -> Result<PathBuf> {
    let name: ModelName = model.parse()?;
    let bar = Bar::bytes("downloading");
    let folder = Hub::from_env()?
        .get(&name, &|p: DownloadProgress<'_>| bar.set(p.done_bytes, p.total_bytes, p.file))?;
    bar.finish();
    Ok(folder)
}
