//! Where rows lie on the device.
//!
//! Owns: the shapes that launches speak of. Must never: allocate.

use crate::driver::DevicePtr;

/// The rows of one buffer, `[max_rows, width]`, in one or both of two forms: f32 for whoever adds to them or normalizes them, and bf16
/// for products. A plane nobody reads does not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planes {
    pub width: u32,
    pub f32: Option<DevicePtr>,
    /// Values from one row to the next: the width rounded up to 32. What lies behind the width is anything.
    pub f32_stride: u32,
    pub bf16: Option<DevicePtr>,
    /// Values from one row to the next: the width rounded up to 32. What lies behind the width is zero.
    pub bf16_stride: u32,
}

impl Planes {
    /// The f32 plane from this value of each row on.
    pub fn from(&self, first: usize) -> Self {
        let f32 = self.f32.map(|plane| plane.offset(4 * first as u64));
        Self { width: self.width - first as u32, f32, bf16: None, ..*self }
    }
}

/// How many rows a launch covers: the grid is made for `bound`, the count itself is read from the metadata on the device, so that a
/// captured launch serves every smaller count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBound {
    pub bound: u32,
    /// Word of the metadata that holds the count.
    pub count_word: u32,
}

/// The metadata of a step on the device; see `step`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meta(pub DevicePtr);

/// Words of the metadata's header.
pub mod word {
    pub const ROWS: u32 = 0;
    pub const SPANS: u32 = 1;
    pub const LOGIT_ROWS: u32 = 2;
    pub const HIDDEN_ROWS: u32 = 3;
    pub const GROUPS: u32 = 4;
    pub const TILES: u32 = 5;
    /// Changes of block tables.
    pub const EDITS: u32 = 6;
    pub const AT_TOKENS: u32 = 8;
    pub const AT_POSITIONS: u32 = 9;
    pub const AT_ROW_SPAN: u32 = 10;
    pub const AT_SPANS: u32 = 11;
    pub const AT_SLOTS: u32 = 12;
    pub const AT_LOGIT_ROWS: u32 = 13;
    pub const AT_HIDDEN_ROWS: u32 = 14;
    pub const AT_TILES: u32 = 15;
    pub const AT_EDITS: u32 = 16;
    /// What rows are given beside their tokens, f32.
    pub const AT_FEATURES: u32 = 17;
    /// Words of the header.
    pub const HEADER: usize = 32;
    /// Words of a span: first row, rows, first position, address of its slot of block tables (low, high), three of nothing.
    pub const SPAN: usize = 8;
    /// Words of an edit: address (low, high), where its entries are, entries.
    pub const EDIT: usize = 4;
    /// Words of a tile: span, first token in it, tokens, nothing.
    pub const TILE: usize = 4;
    /// Most tokens of a tile.
    pub const TILE_TOKENS: u32 = 16;
}
