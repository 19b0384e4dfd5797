//! A key that is not printed.

use std::fmt;
use std::ops::Deref;

/// A text that opens something. It reads like a text and prints as `***`.
#[derive(Clone, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl Deref for Secret {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

#[cfg(test)]
mod tests {
    use crate::tenancy::declared::Declared;

    #[test]
    fn keys_are_in_nothing_that_is_printed() {
        let file = r#"{"tenants": [{"name": "acme", "keys": ["fk-hidden"], "keys_env": ["MORE"]}]}"#;
        let declared = Declared::parse(file, &|_| Some("from-outside".into())).unwrap();
        assert_eq!(&*declared.tenants[0].keys[0], "fk-hidden");
        let printed = format!("{declared:?}");
        assert!(printed.contains("***") && printed.contains("acme"), "{printed}");
        assert!(!printed.contains("hidden") && !printed.contains("outside"), "{printed}");
    }
}
