//! How much room a thread makes: every byte that it asks the allocator for, in our code and in that of others.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// An allocator that counts: a test that wants to know has it as its global one.
pub struct Counting;

thread_local! {
    static ROOM: Cell<u64> = const { Cell::new(0) };
}

fn count(bytes: usize) {
    // Not there any more while a thread ends.
    let _ = ROOM.try_with(|room| room.set(room.get() + bytes as u64));
}

// SAFETY: everything is the system allocator's; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

/// Bytes that this thread has asked for so far.
pub fn made() -> u64 {
    ROOM.get()
}
