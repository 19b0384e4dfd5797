//! How far ahead of a product its weights are asked for.
//!
//! Owns: the distances, by who made the processor. Must never: touch a bit of a result; a prefetch is a hint.
//!
//! Measured with `shape_bench` (Llama-1B shape, tokens per second). Intel (Sapphire and Emerald Rapids), Q4_0, one token: 16 without
//! asking, 17 at 1 KiB, 25 from 4 KiB on; Q8_0, in four streams: 13 at 256 bytes, 15 from 1 KiB on; eight tokens: 99 at 1 KiB, 143 at
//! 4.5, 152 at 8. AMD (Zen 4), one token: 57 asking for one stream, 62 leaving it to the prefetchers of the machine; four streams are
//! best at 256 bytes; eight tokens at 4.5 KiB.

use std::sync::LazyLock;

/// Distances in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    /// One token, one stream of weights. `None`: the machine's own prefetchers do better undisturbed.
    pub(crate) one_stream: Option<usize>,
    /// One token, several streams.
    pub(crate) streams: usize,
    /// Several tokens, whose arithmetic leaves prefetchers time to forget the stream.
    pub(crate) several_tokens: usize,
}

const INTEL: Ahead = Ahead { one_stream: Some(8192), streams: 1024, several_tokens: 8192 };
const OTHERS: Ahead = Ahead { one_stream: None, streams: 256, several_tokens: 4608 };

impl Ahead {
    /// Of this machine.
    pub(crate) fn here() -> Self {
        // Asked once: on a virtual machine the question goes to the host.
        static HERE: LazyLock<Ahead> = LazyLock::new(|| if is_intel() { INTEL } else { OTHERS });
        *HERE
    }
}

#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

#[cfg(not(target_arch = "x86_64"))]
fn is_intel() -> bool {
    false
}
