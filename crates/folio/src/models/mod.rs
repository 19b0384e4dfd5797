//! Models by the names people give them: the one place where a MODEL of the command line, of a file or of `--draft-model` becomes
//! something to open; and what the cache of downloaded ones holds.

mod aliases;
pub mod commands;
mod show;
mod source;

pub use aliases::{Aliases, user_folder};
pub use show::run as show;
pub use source::Source;
