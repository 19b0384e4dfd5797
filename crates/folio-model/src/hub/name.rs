//! `organisation/model@revision:VARIANT`. Names become paths and addresses, so only harmless ones are let through.

use std::fmt;
use std::str::FromStr;

use super::error::HubError;

const PART_LENGTH_MAX: usize = 96;

/// A model on the hub, at a revision where one is named.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelName {
    organisation: String,
    model: String,
    /// Branch, tag or commit.
    revision: Option<String>,
    /// See [`ModelName::variant`].
    variant: Option<String>,
}

impl ModelName {
    /// `organisation/model`
    pub fn id(&self) -> String {
        format!("{}/{}", self.organisation, self.model)
    }

    /// "main" unless another is named.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    pub fn names_revision(&self) -> bool {
        self.revision.is_some()
    }

    /// Which of a repository's GGUF files is meant: a quantization such as `Q4_K_M`, or a file's name.
    pub fn variant(&self) -> Option<&str> {
        self.variant.as_deref()
    }

    /// The same model at another revision ("main": at none that is named) and with another variant.
    pub(super) fn with(&self, revision: &str, variant: Option<&str>) -> Self {
        Self {
            revision: (revision != "main").then(|| revision.to_owned()),
            variant: variant.map(str::to_owned),
            ..self.clone()
        }
    }

    /// The model that a folder of the cache is called after.
    pub(super) fn of_folder(folder: &str) -> Option<Self> {
        let (organisation, model) = folder.strip_prefix("models--")?.split_once("--")?;
        format!("{organisation}/{model}").parse().ok()
    }

    /// `models--organisation--model`, the folder in the hub's cache.
    pub fn folder(&self) -> String {
        format!("models--{}--{}", self.organisation, self.model)
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let wrong = || HubError::Name(text.chars().take(200).collect());
        let (rest, variant) = match text.split_once(':') {
            Some((rest, variant)) => (rest, Some(variant)),
            None => (text, None),
        };
        let (id, revision) = match rest.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (rest, None),
        };
        let (organisation, model) = id.split_once('/').ok_or_else(wrong)?;
        let plain = |part: &str| {
            let charset = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            (1..=PART_LENGTH_MAX).contains(&part.len())
                && part.chars().all(charset)
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
        };
        let path = |path: Option<&str>| path.is_none_or(|path| path.split('/').all(plain));
        let sound = plain(organisation) && plain(model) && !id.contains("--");
        if !(sound && path(revision) && path(variant)) {
            return Err(wrong());
        }
        Ok(Self {
            organisation: organisation.to_owned(),
            model: model.to_owned(),
            revision: revision.map(str::to_owned),
            variant: variant.map(str::to_owned),
        })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.organisation, self.model)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(variant) = &self.variant {
            write!(f, ":{variant}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names() {
        let name: ModelName = "HuggingFaceTB/SmolLM2-135M".parse().unwrap();
        assert_eq!(name.folder(), "models--HuggingFaceTB--SmolLM2-135M");
        assert_eq!((name.revision(), name.to_string().as_str()), ("main", "HuggingFaceTB/SmolLM2-135M"));
        assert_eq!(ModelName::of_folder(&name.folder()), Some(name));
        let name: ModelName = "a/b@refs/pr/1".parse().unwrap();
        assert_eq!((name.revision(), name.to_string().as_str()), ("refs/pr/1", "a/b@refs/pr/1"));
        let name: ModelName = "a/b-GGUF:Q4_K_M".parse().unwrap();
        assert_eq!((name.revision(), name.variant()), ("main", Some("Q4_K_M")));
        let name: ModelName = "a/b@v1:UD/b-Q8_0.gguf".parse().unwrap();
        assert_eq!((name.revision(), name.variant()), ("v1", Some("UD/b-Q8_0.gguf")));
        assert_eq!(name.to_string(), "a/b@v1:UD/b-Q8_0.gguf");
    }

    #[test]
    fn refuses_what_could_leave_the_cache() {
        for text in [
            "",
            "model",
            "a/",
            "/b",
            "a/b/c",
            "../b",
            "a/..",
            "a/.b",
            "-a/b",
            "a/b@",
            "a/b@../x",
            "a/b@/x",
            "a b/c",
            "a--b/c",
            "a/b?c",
            "a/b:",
            "a/b:../x",
            "a/b:/x",
            "a/b:Q4:Q5",
            "a/b:Q4@v1",
        ] {
            assert!(text.parse::<ModelName>().is_err(), "{text}");
        }
        for folder in ["models--a", "models--..--b", "datasets--a--b", "models--a--b--c"] {
            assert_eq!(ModelName::of_folder(folder), None, "{folder}");
        }
    }
}
