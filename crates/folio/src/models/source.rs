//! Where a model comes from: the built-in one, a folder, a GGUF file, or the hub.
//!
//! Owns: telling them apart by how they are written, and what clients call the model. Must never: load a weight.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use folio_model::Checkpoint;
use folio_model::hub::{DownloadProgress, Held, Hub, HubError, ModelName};

use super::Aliases;
use crate::demo;
use crate::progress::Bar;

/// Where a model comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    BuiltIn,
    /// A folder: Hugging Face's files, or one GGUF model.
    Folder(PathBuf),
    Gguf(PathBuf),
    Hub(ModelName),
}

impl Source {
    /// `None` and `demo` are the built-in model. What lies on the disk wins over an alias, of `aliases` or the user's own, and that
    /// over a hub name.
    pub fn parse(model: Option<&str>, aliases: &Aliases) -> Result<Self> {
        let Some(model) = model else { return Ok(Source::BuiltIn) };
        if let Some(source) = Self::written(model)? {
            return Ok(source);
        }
        match aliases.find(model)? {
            Some(meant) => {
                let source = Self::written(&meant).and_then(|source| match source {
                    Some(source) => Ok(source),
                    None => Self::named(&meant),
                });
                source.with_context(|| format!("the alias {model} stands for {meant}"))
            }
            None => Self::named(model),
        }
    }

    /// A path that exists, or the built-in model.
    fn written(model: &str) -> Result<Option<Self>> {
        let path = Path::new(model);
        if path.is_dir() {
            return Ok(Some(Source::Folder(path.to_owned())));
        }
        if path.is_file() {
            if !is_gguf(path) {
                bail!(
                    "{model} is a file; give a .gguf file, or the folder that holds config.json, *.safetensors and tokenizer.json"
                );
            }
            return Ok(Some(Source::Gguf(path.to_owned())));
        }
        Ok((model == demo::NAME || model == "demo").then_some(Source::BuiltIn))
    }

    fn named(model: &str) -> Result<Self> {
        let file = is_gguf(Path::new(model)) && !model.contains(':');
        if file || model.starts_with(['.', '/', '~']) || !model.contains('/') {
            bail!(
                "there is no folder {model} and no such .gguf file, and it is no hub name either (org/model, \
                 org/model@revision, org/model-GGUF:Q4_K_M) nor an alias{}",
                super::aliases::user_file().map_or(String::new(), |file| format!(" of {}", file.display()))
            );
        }
        let name = model.parse();
        Ok(Source::Hub(name.with_context(|| format!("there is no folder {model} and no such .gguf file"))?))
    }

    /// What clients call it by default.
    pub fn name(&self) -> String {
        match self {
            Source::BuiltIn => demo::NAME.to_owned(),
            Source::Folder(path) => {
                let path = path.canonicalize().unwrap_or_else(|_| path.clone());
                path.file_name()
                    .map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
            }
            Source::Gguf(path) => {
                let stem = path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy());
                // One name for all files of a split model: NAME-00001-of-00003.
                match stem.rsplit_once("-00001-of-") {
                    Some((name, _)) => name.to_owned(),
                    None => stem.into_owned(),
                }
            }
            Source::Hub(name) => match name.variant() {
                Some(variant) => format!("{}:{variant}", name.id()),
                None => name.id(),
            },
        }
    }

    /// Opens a folder for its configuration alone.
    pub fn open_without_weights(&self) -> Result<Checkpoint> {
        match self {
            Source::Folder(path) => Ok(Checkpoint::open_without_weights(path)?),
            other => bail!("--load-format dummy needs a folder with a config.json, {} is none", other.name()),
        }
    }

    /// Opens the checkpoint, downloading it first if need be. While the second lives, nobody removes what was downloaded.
    pub fn open(&self) -> Result<(Checkpoint, Held)> {
        match (self, self.fetch()?) {
            (Source::Hub(_), Some(path)) => {
                let held = Held::of(&path);
                Ok((Checkpoint::open(path)?, held))
            }
            _ => Ok((self.open_here()?, Held::default())),
        }
    }

    /// Where its files are, which are downloaded first if need be. `None`: it has none.
    pub fn fetch(&self) -> Result<Option<PathBuf>> {
        match self {
            Source::BuiltIn => Ok(None),
            Source::Folder(path) | Source::Gguf(path) => Ok(Some(path.clone())),
            Source::Hub(name) => {
                let hub = Hub::from_env()?;
                Ok(Some(download(|progress| hub.get(name, progress))?))
            }
        }
    }

    /// Opens the checkpoint if it is on this machine.
    pub fn open_here(&self) -> Result<Checkpoint> {
        match self {
            Source::BuiltIn => Checkpoint::from_bytes(demo::FILES).context("the built-in model"),
            Source::Folder(path) | Source::Gguf(path) => Ok(Checkpoint::open(path)?),
            Source::Hub(name) => {
                let hub = Hub::from_env()?;
                let absent = || HubError::NotCached {
                    model: name.to_string(),
                    cache: hub.cache().display().to_string(),
                };
                let path = hub.cached(name).ok_or_else(absent);
                Ok(Checkpoint::open(path.with_context(|| format!("try `folio pull {name}`"))?)?)
            }
        }
    }
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

/// Shows a bar while `get` downloads.
pub(super) fn download(
    get: impl FnOnce(&(dyn Fn(DownloadProgress<'_>) + Sync)) -> Result<PathBuf, HubError>,
) -> Result<PathBuf> {
    let bar = Bar::bytes("downloading");
    let path = get(&|p: DownloadProgress<'_>| bar.set(p.done_bytes, p.total_bytes, p.file))?;
    bar.finish();
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_told_apart() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().to_str().expect("text");
        let table = format!(
            "small = \"org/small-GGUF:Q8_0\"\nhere = \"{path}\"\nwrong = \"nothing\"\nagain = \"small\"\ndemo = \"org/x\""
        );
        let aliases = Aliases::parse(&table.parse().expect("TOML")).expect("sound");
        let parse = |model: &str| Source::parse(Some(model), &aliases);
        assert_eq!(Source::parse(None, &aliases).expect("parses"), Source::BuiltIn);
        assert_eq!(parse("demo").expect("parses"), Source::BuiltIn, "no alias stands before it");
        assert_eq!(parse(path).expect("parses"), Source::Folder(folder.path().to_owned()));
        assert_eq!(parse("here").expect("parses"), Source::Folder(folder.path().to_owned()));
        for (model, name) in [
            ("org/model@main", "org/model"),
            ("org/model:q4_k_m", "org/model:q4_k_m"),
            ("org/model@v1:UD/m.gguf", "org/model:UD/m.gguf"),
            ("small", "org/small-GGUF:Q8_0"),
        ] {
            let hub = parse(model).expect(model);
            assert_eq!(hub.name(), name);
            assert!(matches!(hub, Source::Hub(_)), "{hub:?}");
        }
        for wrong in
            ["./nothing-here", "model", "/no/such/folder", "a/b/c", "org/model.gguf", "org/m:", "a:b"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        for (alias, meant) in [("wrong", "nothing"), ("again", "small")] {
            let error = format!("{:#}", parse(alias).expect_err("refused"));
            assert!(error.contains(&format!("the alias {alias} stands for {meant}")), "{error}");
        }
        let file = folder.path().join("model.safetensors");
        std::fs::write(&file, b"x").expect("file");
        assert!(parse(file.to_str().expect("text")).expect_err("refused").to_string().contains("folder"));
        for (file, name) in [("m.Q4_0.gguf", "m.Q4_0"), ("big-00001-of-00003.gguf", "big")] {
            let file = folder.path().join(file);
            std::fs::write(&file, b"x").expect("file");
            let source = parse(file.to_str().expect("text")).expect("parses");
            assert_eq!((source.name().as_str(), source), (name, Source::Gguf(file)));
        }
    }
}
