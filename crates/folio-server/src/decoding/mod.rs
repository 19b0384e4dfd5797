//! Between tokens and text, for one answer: what may be chosen next (grammars and other rules), and what the chosen tokens say.

pub(crate) mod bounds;
pub(crate) mod choice;
pub(crate) mod follower;
pub(crate) mod guides;
pub(crate) mod kept_grammars;
pub(crate) mod reading;
pub(crate) mod structured;
