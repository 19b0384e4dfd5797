//! Downloads from a Hugging Face hub, in the hub's own cache layout.

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("`{0}` is not a model name; expected `organisation/model` or `organisation/model@revision`")]
    Name(String),
}
