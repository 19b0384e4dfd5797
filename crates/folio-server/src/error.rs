//! Why the server could not start or had to stop.

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("cannot listen on {address}: {source}; is another server using the port? choose one with --port")]
    Bind { address: String, source: std::io::Error },
    #[error("the server configuration is invalid: {0}")]
    Config(String),
    #[error("cannot install the signal handlers: {0}")]
    Signals(std::io::Error),
    #[error("cannot start the runtime: {0}")]
    Runtime(std::io::Error),
}
