//! Short names for models: `[aliases]` of a configuration file, and the user's own file.
//!
//! Owns: reading both. A name means what the table of `folio serve --config` says, else what the user's file says. Must never: let an
//! alias stand for another, so that every name is looked up once.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};

/// The user's file; a table of the same form as `[aliases]` of a configuration file.
const FILE: &str = "folio/aliases.toml";

/// Short names and the models that they mean.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Aliases(BTreeMap<String, String>);

impl Aliases {
    /// Of a table whose values are models: a folder, a `.gguf` file or a name on the hub.
    pub fn parse(table: &toml::Table) -> Result<Self> {
        let mut aliases = BTreeMap::new();
        for (name, model) in table {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
            let sound = !name.is_empty() && name.chars().all(plain) && !name.starts_with(['.', '-']);
            ensure!(
                sound,
                "'{name}': an alias is letters, digits, '.', '_', '-' and ':', and begins with none of '.' and '-'"
            );
            let Some(model) = model.as_str() else {
                bail!("{name}: names no model, such as \"org/model-GGUF:Q4_K_M\"")
            };
            aliases.insert(name.clone(), model.to_owned());
        }
        Ok(Self(aliases))
    }

    /// What a name means here, or to the user.
    pub fn find(&self, name: &str) -> Result<Option<String>> {
        if let Some(model) = self.0.get(name) {
            return Ok(Some(model.clone()));
        }
        let Some(path) = user_file() else { return Ok(None) };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let table = text.parse::<toml::Table>().map_err(anyhow::Error::from);
        let own = table.and_then(|table| Self::parse(&table));
        let own = own.with_context(|| format!("{} cannot be used", path.display()))?;
        Ok(own.0.get(name).cloned())
    }
}

/// `~/.config/folio/aliases.toml`, or below `XDG_CONFIG_HOME`.
pub fn user_file() -> Option<PathBuf> {
    Some(user_folder()?.join(FILE))
}

/// `~/.config`, or `XDG_CONFIG_HOME`.
pub fn user_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_models_and_mistakes_are_named() {
        let table = |text: &str| text.parse::<toml::Table>().expect("TOML");
        let aliases =
            Aliases::parse(&table("small = \"org/m\"\n\"qwen3:0.6b\" = \"/models/q.gguf\"")).expect("sound");
        assert_eq!(aliases.0["small"], "org/m");
        assert_eq!(aliases.find("qwen3:0.6b").expect("found").as_deref(), Some("/models/q.gguf"));
        for (text, named) in [
            ("\"a/b\" = \"c\"", "a/b"),
            ("x = 3", "x: names no model"),
            ("\".x\" = \"c\"", ".x"),
            ("x = {}", "x"),
        ] {
            let error = Aliases::parse(&table(text)).expect_err(text).to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
