//! How far ahead of a product its weights are asked for.
//!
//! Owns: the distances, by who made the processor and when. Must never: touch a bit of a result; a prefetch is a hint.
//!
//! Measured with `shape_bench` (Llama-1B shape, tokens per second). Intel (Sapphire and Emerald Rapids), Q4_0, one token: 16 without
//! asking, 17 at 1 KiB, 25 from 4 KiB on; Q8_0, in four streams: 13 at 256 bytes, 15 from 1 KiB on; eight tokens: 99 at 1 KiB, 143 at
//! 4.5, 152 at 8. AMD (Zen 4), one token: 57 asking for one stream, 62 leaving it to the prefetchers of the machine; four streams are
//! best at 256 bytes; eight tokens at 4.5 KiB. AMD (Zen 5), one token: Q8_0 26 in four streams, 33 in one that is asked for 4.5 KiB
//! ahead; Q4_0 51 without asking, 55 at 2.3 KiB, 57 at 4.5; eight tokens 347 at 4.5 KiB, 362 at 9, 344 at 18.

use std::sync::LazyLock;

/// Distances in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    /// One token, one stream of weights. `None`: the machine's own prefetchers do better undisturbed.
    pub(crate) one_stream: Option<usize>,
    /// Whether one token reads codes of a byte as one stream, as it does all shorter ones: otherwise as several.
    pub(crate) bytes_in_one: bool,
    /// One token, several streams.
    pub(crate) streams: usize,
    /// Several tokens, whose arithmetic leaves prefetchers time to forget the stream.
    pub(crate) several_tokens: usize,
}

const INTEL: Ahead =
    Ahead { one_stream: Some(8192), bytes_in_one: false, streams: 1024, several_tokens: 8192 };
const ZEN5: Ahead = Ahead { one_stream: Some(4608), bytes_in_one: true, streams: 256, several_tokens: 8192 };
const OTHERS: Ahead = Ahead { one_stream: None, bytes_in_one: false, streams: 256, several_tokens: 4608 };

impl Ahead {
    /// Of every machine.
    #[cfg(test)]
    pub(crate) const ALL: [Self; 3] = [INTEL, ZEN5, OTHERS];

    /// Of this machine.
    pub(crate) fn here() -> Self {
        // Asked once: on a virtual machine the question goes to the host.
        static HERE: LazyLock<Ahead> = LazyLock::new(|| match processor() {
            (maker, _) if &maker == b"GenuineIntel" => INTEL,
            (maker, 0x1a..) if &maker == b"AuthenticAMD" => ZEN5,
            _ => OTHERS,
        });
        *HERE
    }
}

/// Who made the processor, and its family.
#[cfg(target_arch = "x86_64")]
fn processor() -> ([u8; 12], u32) {
    use std::arch::x86_64::__cpuid;
    let leaf = __cpuid(0);
    let mut maker = [0; 12];
    for (part, register) in maker.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
        part.copy_from_slice(&register.to_le_bytes());
    }
    let signature = __cpuid(1).eax;
    // The extended family counts where the family is full.
    let family = match signature >> 8 & 0xf {
        0xf => 0xf + (signature >> 20 & 0xff),
        family => family,
    };
    (maker, family)
}

#[cfg(not(target_arch = "x86_64"))]
fn processor() -> ([u8; 12], u32) {
    ([0; 12], 0)
}
