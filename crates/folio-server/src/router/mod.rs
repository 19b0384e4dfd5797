//! Several models at one address: an engine's process for each, started when somebody asks for it and stopped when nobody does.
//!
//! Owns: which processes run (`processes`, a pure state machine; `engines` carries its orders out; `process` is one of them), which model a
//! request is for (`catalog`, `asked`), and passing it on (`asking`, `proxy`). What is told of all models at once is `pages` and `figures`. Must never:
//! read more of a request than whom it is for, tokenize, or know a tenant's cache: a process is `folio serve` with the same keys, tenants and
//! limits, behind a socket of its user alone.
//!
//! Invariants: nobody is let in, and nothing is started, before a key is checked; a body is read within the limits of any server; a client
//! that leaves takes its request with it, in line and in the process; a process ends with the router, whose end it reads from its standard input.

mod asked;
mod asking;
mod catalog;
mod config;
mod engines;
mod figures;
mod keep_alive;
mod pages;
mod process;
mod processes;
mod proxy;
mod routes;
mod run;
mod state;

pub use config::{ModelProcess, RouterConfig};
pub use figures::documented;
pub use keep_alive::parse_keep_alive;
pub use run::{router_of, run_router};
