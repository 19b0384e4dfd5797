//! What was asked for.

/// What was asked for, which says how soon an answer is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Chat,
    Completion,
}

impl RequestKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "completion",
        }
    }
}
