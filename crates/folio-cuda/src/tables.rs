//! Block tables on the device, kept from step to step.
//!
//! Owns: where they lie, and the launch that changes them. Must never: hold another entry than those that `folio_model::tables` has on
//! the host. A step carries what changed among its words, and a kernel puts it in place before anything reads it.

use crate::driver::{Arg, DevicePtr, Driver, DriverError, Launch};
use crate::planes::Meta;

type Result<T> = std::result::Result<T, DriverError>;

/// Slots that there is room for at first.
const FIRST_SLOTS: u32 = 64;

/// `[slot][group][entry]` words.
#[derive(Debug, Default)]
pub struct DeviceTables {
    at: DevicePtr,
    slots: u32,
    /// Words of a slot.
    stride: u32,
    /// Where each group's table begins in it.
    starts: Vec<u32>,
}

impl DeviceTables {
    /// Nothing yet, for tables of up to so many entries in each group.
    pub fn new(longest: &[usize]) -> Self {
        let mut stride = 0;
        let starts = longest.iter().map(|longest| {
            let start = stride;
            stride += *longest as u32;
            start
        });
        let starts = starts.collect();
        Self { at: DevicePtr::default(), slots: 0, stride, starts }
    }

    /// There, with room for one slot.
    #[cfg(test)]
    pub(crate) fn at(at: DevicePtr, longest: &[usize]) -> Self {
        Self { at, ..Self::new(longest) }
    }

    /// Makes room for so many slots. Whether all are elsewhere now, and hold anything.
    pub fn reserve(&mut self, driver: &mut dyn Driver, slots: u32) -> Result<bool> {
        if slots <= self.slots {
            return Ok(false);
        }
        self.free(driver)?;
        let slots = slots.next_power_of_two().max(FIRST_SLOTS);
        self.at = driver.allocate(4 * u64::from(slots) * u64::from(self.stride))?;
        self.slots = slots;
        Ok(true)
    }

    /// Gives the memory back.
    pub fn free(&mut self, driver: &mut dyn Driver) -> Result<()> {
        self.slots = 0;
        match std::mem::take(&mut self.at) {
            at if at == DevicePtr::default() => Ok(()),
            at => driver.free(at),
        }
    }

    /// Where the block table of a group begins among the words of a slot.
    pub fn start(&self, group: usize) -> u32 {
        self.starts[group]
    }

    /// The words of a slot.
    pub fn slot(&self, slot: u32) -> DevicePtr {
        self.at.offset(4 * u64::from(slot) * u64::from(self.stride))
    }

    /// An entry of a block table.
    pub fn entry(&self, slot: u32, group: u32, entry: u32) -> DevicePtr {
        self.slot(slot).offset(4 * u64::from(self.starts[group as usize] + entry))
    }
}

/// Puts the new entries of a step's block tables in their places: `edits` of them, as the words of the step have them.
pub fn set_tables(driver: &mut dyn Driver, meta: Meta, edits: u32) -> Result<()> {
    let args = [Arg::Ptr(meta.0)];
    driver.launch(&Launch { kernel: "set_tables", grid: [edits, 1, 1], threads: 128, shared: 0, args: &args })
}
