//! `organisation/model@revision`. Names become paths and addresses, so only harmless ones are let through.

use std::fmt;
use std::str::FromStr;

use super::error::HubError;

const PART_LENGTH_MAX: usize = 96;

/// A model on the hub at a revision.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModelName {
    organisation: String,
    model: String,
    /// Branch, tag or commit; "main" unless said.
    revision: String,
}

impl ModelName {
    /// `organisation/model`
    pub fn id(&self) -> String {
        format!("{}/{}", self.organisation, self.model)
    }

    pub fn revision(&self) -> &str {
        &self.revision
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
        let (id, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (organisation, model) = id.split_once('/').ok_or_else(wrong)?;
        let plain = |part: &str| {
            let charset = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
            (1..=PART_LENGTH_MAX).contains(&part.len())
                && part.chars().all(charset)
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
        };
        let sound =
            plain(organisation) && plain(model) && !id.contains("--") && revision.split('/').all(plain);
        if !sound {
            return Err(wrong());
        }
        Ok(Self {
            organisation: organisation.to_owned(),
            model: model.to_owned(),
            revision: revision.to_owned(),
        })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.organisation, self.model)?;
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
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
        let name: ModelName = "a/b@refs/pr/1".parse().unwrap();
        assert_eq!((name.revision(), name.to_string().as_str()), ("refs/pr/1", "a/b@refs/pr/1"));
    }

    #[test]
    fn refuses_what_could_leave_the_cache() {
        for text in [
            "", "model", "a/", "/b", "a/b/c", "../b", "a/..", "a/.b", "-a/b", "a/b@", "a/b@../x", "a/b@/x",
            "a b/c", "a--b/c", "a/b?c",
        ] {
            assert!(text.parse::<ModelName>().is_err(), "{text}");
        }
    }
}
