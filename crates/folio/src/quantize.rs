//! `folio quantize`: a folder that is served without the original weights.
//!
//! Owns: what such a folder holds, and refusing to write over anything. The weights come last: a folder without them is no
//! model, so an interrupted run leaves nothing that could be served.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use folio_cpu::{CpuBackend, CpuOptions};
use folio_model::Checkpoint;
use folio_model::checkpoint::PACKED;
use folio_model::hub::CARD;

use crate::cli::QuantizeArgs;
use crate::models::{Aliases, Source};
use crate::progress::Bar;
use crate::runtime::{self, WeightArgs};
use crate::units;

/// Files beside the weights that serving reads, or that belong to the model.
const SIDE_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    CARD,
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
];
const TEMPLATES: &str = "additional_chat_templates";

pub fn run(args: &QuantizeArgs) -> Result<()> {
    let source = Source::parse(Some(&args.model), &Aliases::default())?;
    let (checkpoint, _held) = source.open()?;
    if checkpoint.gguf().is_some() {
        bail!(
            "{} is a GGUF file, whose tokenizer could not be taken along: quantize the model's original folder, or serve the \
             file as it is (if its weights have 16 bits, with --quantize {}; the packed form is kept between starts)",
            checkpoint.location(),
            args.to.name()
        );
    }
    if checkpoint.packed().is_some() {
        bail!("{} holds weights that are packed already", checkpoint.location());
    }
    if checkpoint.only_embeds() {
        bail!(
            "{} was published for embeddings and has no output matrix, which the packed folder could not say: serve it as it is \
             with --quantize {}; the packed form is kept between starts",
            checkpoint.location(),
            args.to.name()
        );
    }
    // A wrong tokenizer would be found out only by serving the new folder.
    runtime::load_tokenizer(&checkpoint)?;
    prepare(&args.output, args.force)?;

    let mut backend = CpuBackend::new(CpuOptions { threads: args.threads.map(|n| n as usize), isa: None })?;
    let load = WeightArgs::for_packing(args.to);
    let (model, about) = runtime::pack(&checkpoint, &mut backend, &load, "folio quantize", None)?;
    copy_side_files(&checkpoint, &args.output)?;
    let bar = Bar::bytes("writing");
    let mut progress = |done, total| {
        bar.set(done, total, PACKED);
        true
    };
    let file = args.output.join(PACKED);
    backend.packed_weights().write(&file, &about.to_bytes(), &mut progress)?;
    bar.finish();
    let kept = backend.quantized().kept_plain;
    eprintln!(
        "{} of {} as {:?}{}, from {} in {}",
        units::bytes(fs::metadata(&file)?.len()),
        units::parameters(model.parameters),
        args.to.packed().format(),
        if kept > 0 { format!(" ({kept} matrices stayed as they were)") } else { String::new() },
        units::bytes(checkpoint.weight_file_bytes()),
        checkpoint.location(),
    );
    println!("{}", args.output.display());
    Ok(())
}

/// An empty folder, or one that may be written over.
fn prepare(output: &Path, force: bool) -> Result<()> {
    let shown = output.display();
    fs::create_dir_all(output).with_context(|| format!("cannot make {shown}"))?;
    let mut entries = fs::read_dir(output).with_context(|| format!("cannot read {shown}"))?;
    if !force && entries.next().is_some() {
        bail!("{shown} is not empty: choose another --output, or give --force to write over what is there");
    }
    for weights in ["model.safetensors", "model.safetensors.index.json"] {
        if output.join(weights).exists() {
            bail!("{shown} holds {weights}, which would be served instead: choose another --output");
        }
    }
    Ok(())
}

fn copy_side_files(checkpoint: &Checkpoint, output: &Path) -> Result<()> {
    let write = |name: &Path, bytes: &[u8]| {
        let path = output.join(name);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))
    };
    for name in SIDE_FILES.iter().chain(folio_model::POOLING_FILES) {
        // An older file must not stay where this model has none.
        let _ = fs::remove_file(output.join(name));
        if let Some(bytes) = checkpoint.read(name)? {
            if let Some(folder) = Path::new(name).parent() {
                fs::create_dir_all(output.join(folder))?;
            }
            write(Path::new(name), &bytes)?;
        }
    }
    let Some(templates) = checkpoint.folder().map(|folder| folder.join(TEMPLATES)) else { return Ok(()) };
    let Ok(entries) = fs::read_dir(&templates) else { return Ok(()) };
    fs::create_dir_all(output.join(TEMPLATES))?;
    for entry in entries {
        let path = entry?.path();
        if let (Some(name), true) = (path.file_name(), path.is_file()) {
            write(&Path::new(TEMPLATES).join(name), &fs::read(&path)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_written_over_unasked_and_no_original_ever() {
        let folder = tempfile::tempdir().expect("folder");
        let output = folder.path().join("new/model");
        prepare(&output, false).expect("made");
        fs::write(output.join("notes.txt"), "mine").expect("file");
        assert!(prepare(&output, false).expect_err("refused").to_string().contains("--force"));
        prepare(&output, true).expect("asked for");
        fs::write(output.join("model.safetensors"), "weights").expect("file");
        assert!(prepare(&output, true).expect_err("refused").to_string().contains("model.safetensors"));
    }
}
