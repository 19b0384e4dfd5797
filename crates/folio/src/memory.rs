//! How much memory this process may still take, and how much of it the KV cache gets.
//!
//! Owns: reading /proc and cgroups, and the arithmetic that turns a budget into blocks. Must never: allocate. All inputs
//! are arguments, so every rule has a test.

use std::path::{Path, PathBuf};

use folio_kv::{GroupConfig, Layout};

use crate::units;

/// Memory that can still be taken, and which limit says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    pub bytes: u64,
    /// Of mapped weights beside that: could be taken, too, if what is dropped of them is read again whenever it is needed.
    pub mapped: u64,
    /// "MemAvailable of this machine" or the cgroup's file.
    pub source: String,
}

impl FreeMemory {
    pub fn new(bytes: u64, source: String) -> Self {
        Self { bytes, mapped: 0, source }
    }

    /// Less weights that are mapped, and so counted as free.
    pub fn without(self, mapped: u64) -> Self {
        let mapped = mapped.min(self.bytes);
        Self { bytes: self.bytes - mapped, mapped, ..self }
    }
}

/// Reads this machine's. `None` where /proc is not Linux's.
pub fn free() -> Option<FreeMemory> {
    free_at(Path::new("/proc/meminfo"), Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"))
}

/// The least of what the machine has available and what each memory cgroup above this process leaves.
fn free_at(meminfo: &Path, groups: &Path, mount: &Path) -> Option<FreeMemory> {
    let meminfo = std::fs::read_to_string(meminfo).ok()?;
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = kib.trim().trim_end_matches("kB").trim().parse().ok()?;
    let mut least = FreeMemory::new(kib * 1024, "available on this machine".into());
    let groups = std::fs::read_to_string(groups).unwrap_or_default();
    for folder in group_folders(&groups, mount) {
        if let Some((bytes, limit)) = left_in_group(&folder)
            && bytes < least.bytes
        {
            let limit = units::bytes(limit);
            least = FreeMemory::new(bytes, format!("left of this container's limit of {limit}"));
        }
    }
    Some(least)
}

/// Folders of the memory controller, from this process's group to the root: cgroup v2, then v1.
fn group_folders(groups: &str, mount: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let root = match controllers {
            "" => mount.to_path_buf(),
            list if list.split(',').any(|name| name == "memory") => mount.join("memory"),
            _ => continue,
        };
        let full = root.join(path.trim_start_matches('/'));
        folders
            .extend(full.ancestors().take_while(|folder| folder.starts_with(&root)).map(Path::to_path_buf));
    }
    folders
}

/// (bytes left, limit): what is used counts without the page cache that can be dropped.
fn left_in_group(folder: &Path) -> Option<(u64, u64)> {
    let number = |file: &str| std::fs::read_to_string(folder.join(file)).ok()?.trim().parse::<u64>().ok();
    let (limit, used, of_all) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?, ""),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?, "total_"),
    };
    // cgroup v1 writes "no limit" as a number near 2^63.
    if limit > 1 << 60 {
        return None;
    }
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let file = |kind: &str| -> u64 {
        let key = format!("{of_all}{kind}_file ");
        stat.lines().find_map(|line| line.strip_prefix(&key)?.trim().parse().ok()).unwrap_or(0)
    };
    // Weights that were just read from their file are active.
    let cache = file("inactive") + file("active");
    Some((limit.saturating_sub(used.saturating_sub(cache)), limit))
}

/// What the KV pool is sized from.
#[derive(Clone, Debug)]
pub struct PoolRequest {
    /// `--kv-cache-memory`.
    pub asked_bytes: Option<u64>,
    /// `--kv-cache-share`, of free memory.
    pub share: f64,
    pub free: Option<FreeMemory>,
    /// Of the full-attention group; 0 where every layer has a window.
    pub bytes_per_block: u64,
    /// Tokens per block of the full-attention group.
    pub block_tokens: u32,
    /// The other groups, whose pools have no blocks yet.
    pub windows: Vec<GroupConfig>,
    pub max_model_len: u32,
    pub max_num_seqs: u32,
    /// Tokens one step may compute.
    pub max_num_batched_tokens: u32,
}

/// The pools, and the sentence that explains their size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Of the full-attention group.
    pub blocks: u32,
    /// The other groups, as they were asked for, with their pools.
    pub windows: Vec<GroupConfig>,
    /// Of all groups.
    pub bytes: u64,
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    #[error(
        "{budget} of KV cache ({why}) hold {tokens} tokens, less than one sequence of {max_model_len}: \
         give --kv-cache-memory {needed} or more, or a smaller --max-model-len"
    )]
    TooSmall { budget: String, why: String, tokens: u64, max_model_len: u32, needed: String },
    #[error("{asked} of KV cache were asked for, but only {free} of memory are {source_of}")]
    NotEnough { asked: String, free: String, source_of: String },
    #[error("free memory cannot be read on this machine: give --kv-cache-memory")]
    Unknown,
}

/// Blocks of group 0 where they cost no KV memory, only some 300 bytes of bookkeeping each.
const FREE_BLOCKS_MAX: u32 = 1 << 18;

impl PoolRequest {
    fn blocks(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    /// Blocks of one sequence at full length, and one for a copy-on-write in flight.
    fn sequence_blocks(&self) -> u32 {
        self.blocks(self.max_model_len) + 1
    }

    /// What one sequence at full length needs of a window or state group: what is read, the longest chunk, wherever they lie on the
    /// blocks, and one for a copy-on-write in flight.
    fn window_sequence_blocks(&self, window: &GroupConfig) -> u32 {
        let chunk = self.max_num_batched_tokens.min(self.max_model_len);
        // The state of a row that may be taken back lies behind all others.
        let apart = u32::from(window.layout == Layout::State);
        window.blocks_max(chunk, 1).min(self.max_model_len.div_ceil(window.block_tokens) + apart) + 1
    }

    /// Blocks of another group beside `blocks` of group 0.
    fn more_blocks(&self, group: &GroupConfig, blocks: u32) -> u32 {
        match group.layout {
            Layout::State => self.state_blocks(group, blocks),
            Layout::Paged | Layout::Window { .. } => self.window_blocks(group, blocks),
        }
    }

    /// Blocks of a state group, each a state, beside `blocks` of group 0: as many bytes as those take, or of a drafter's states, as its KV
    /// takes; at least what one sequence needs, and no more than all sequences do with as many that are kept for others. A state does not grow with its sequence, so lengths say
    /// nothing here; and as with windows, more than `blocks` are never of use.
    fn state_blocks(&self, group: &GroupConfig, blocks: u32) -> u32 {
        let least = self.window_sequence_blocks(group);
        let of_drafter = self.windows.iter().find(|first| first.optional && group.optional);
        let beside = of_drafter.map_or(self.bytes_per_block, |first| first.bytes_per_block);
        let bytes = u64::from(blocks).saturating_mul(beside);
        let share = u32::try_from(bytes / group.bytes_per_block.max(1)).unwrap_or(u32::MAX);
        let useful = least.saturating_mul(2).saturating_mul(self.max_num_seqs).min(blocks);
        share.min(useful).max(least)
    }

    /// Blocks of a window group beside `blocks` of group 0, each group in blocks of its own size:
    ///
    /// `blocks * min(window + chunk, max_model_len / 2) / (max_model_len / 2)`, and at least what one sequence needs.
    ///
    /// Sequences of half the longest length then fill both pools at once. Longer ones find the full-attention pool full
    /// first, shorter ones the window's, down to those that fit a window and need as many positions of either. More than
    /// `blocks` are never of use: each ends with another block of group 0.
    fn window_blocks(&self, window: &GroupConfig, blocks: u32) -> u32 {
        let half = self.max_model_len.div_ceil(2);
        let (full, windowed) = (self.blocks(half).max(1), half.div_ceil(window.block_tokens).max(1));
        let least = self.window_sequence_blocks(window);
        let share = u64::from(blocks) * u64::from((least - 1).min(windowed));
        u32::try_from(share.div_ceil(full.into())).unwrap_or(u32::MAX).max(least).min(blocks.max(least))
    }

    /// Bytes of all pools when group 0 has `blocks`.
    fn bytes(&self, blocks: u32) -> u64 {
        let windows = self.windows.iter();
        let windows =
            windows.map(|w| u64::from(self.more_blocks(w, blocks)).saturating_mul(w.bytes_per_block));
        u64::from(blocks).saturating_mul(self.bytes_per_block).saturating_add(windows.sum())
    }

    /// Most blocks of group 0 with which all pools fit `bytes`; 0 if none.
    fn most_blocks(&self, bytes: u64) -> u32 {
        // `bytes` grows with the blocks, so halving finds it.
        let (mut fits, mut above) = (0, u32::MAX >> 1);
        while above - fits > 1 {
            let middle = fits + (above - fits) / 2;
            *(if self.bytes(middle) <= bytes { &mut fits } else { &mut above }) = middle;
        }
        fits
    }
}

/// Blocks of every pool. Without an explicit size: a share of free memory, but no more than every sequence at full length
/// can use.
pub fn pool(request: &PoolRequest) -> Result<Pool, PoolError> {
    let full_blocks = request.sequence_blocks();
    let useful = full_blocks.saturating_mul(request.max_num_seqs).min(u32::MAX >> 1);
    let (bytes, why) = match (request.asked_bytes, &request.free) {
        // Whoever says so may have weights that do not fit beside it, and are read again and again.
        (Some(asked), Some(free)) if asked > free.bytes + free.mapped => {
            return Err(PoolError::NotEnough {
                asked: units::bytes(asked),
                free: units::bytes(free.bytes + free.mapped),
                source_of: free.source.clone(),
            });
        }
        (Some(asked), _) => (asked, "as asked by --kv-cache-memory".to_owned()),
        (None, None) => return Err(PoolError::Unknown),
        (None, Some(free)) => {
            let share = (free.bytes as f64 * request.share) as u64;
            if share > request.bytes(useful) {
                let why = format!(
                    "{} sequences of {} tokens need no more",
                    request.max_num_seqs,
                    units::count(request.max_model_len.into())
                );
                (request.bytes(useful), why)
            } else {
                let percent = request.share * 100.0;
                (share, format!("{percent:.0} % of the {} {}", units::bytes(free.bytes), free.source))
            }
        }
    };
    let blocks = request.most_blocks(bytes);
    if blocks < full_blocks {
        return Err(PoolError::TooSmall {
            budget: units::bytes(bytes),
            why,
            tokens: u64::from(blocks.saturating_sub(1)) * u64::from(request.block_tokens),
            max_model_len: request.max_model_len,
            needed: format!("{}MiB", request.bytes(full_blocks).div_ceil(1 << 20)),
        });
    }
    let windows = request.windows.iter().map(|window| {
        let blocks = request.more_blocks(window, blocks);
        GroupConfig { blocks, ..*window }
    });
    let (windows, bytes) = (windows.collect(), request.bytes(blocks));
    // Where group 0 is only the index, it must not be what runs out: a prefix keeps all of its blocks there and only its
    // last window in the other pools.
    let free = blocks.saturating_mul(4).max(useful).min(FREE_BLOCKS_MAX.max(blocks));
    let blocks = if request.bytes_per_block == 0 { free } else { blocks };
    Ok(Pool { blocks, windows, bytes, why })
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--host-kv-memory of {asked} was asked for, but beside the KV cache only {free} of memory are left")]
pub struct HostKvError {
    asked: String,
    free: String,
}

/// Of a KV cache of so many bytes, what each tier may hold up until it has read it.
pub fn store_bytes(pool_bytes: u64) -> u64 {
    (pool_bytes / 8).max(64 << 20)
}

/// Whether `asked` bytes of KV fit this machine's memory, of which `left` are left beside the pools.
pub fn host_kv(asked: u64, left: Option<u64>) -> Result<(), HostKvError> {
    match left {
        Some(left) if asked > left => {
            Err(HostKvError { asked: units::bytes(asked), free: units::bytes(left) })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use folio_model::backend::{KvFormat, KvLayout};

    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().expect("parent")).expect("folder");
        std::fs::write(path, text).expect("file");
    }

    fn machine(root: &Path, groups: &str) -> Option<FreeMemory> {
        write(root, "meminfo", "MemTotal:  9 kB\nMemAvailable:    1000 kB\n");
        write(root, "groups", groups);
        free_at(&root.join("meminfo"), &root.join("groups"), &root.join("mount"))
    }

    #[test]
    fn without_limits_it_is_what_is_available() {
        let root = tempfile::tempdir().expect("folder");
        assert_eq!(machine(root.path(), "").map(|free| free.bytes), Some(1_024_000));
        write(root.path(), "mount/a/memory.max", "max\n");
        assert_eq!(machine(root.path(), "0::/a\n").map(|free| free.bytes), Some(1_024_000));
    }

    #[test]
    fn the_tightest_group_counts_and_page_cache_is_free() {
        let root = tempfile::tempdir().expect("folder");
        write(root.path(), "mount/a/memory.max", "600000\n");
        write(root.path(), "mount/a/memory.current", "500000\n");
        write(root.path(), "mount/a/memory.stat", "anon 1\ninactive_file 150000\nactive_file 50000\n");
        write(root.path(), "mount/a/b/memory.max", "900000\n");
        write(root.path(), "mount/a/b/memory.current", "100000\n");
        let free = machine(root.path(), "0::/a/b\n").expect("read");
        assert_eq!(free.bytes, 300_000);
        assert!(free.source.contains("586 KiB"), "{}", free.source);
    }

    #[test]
    fn cgroup_v1_is_read_and_its_no_limit_ignored() {
        let root = tempfile::tempdir().expect("folder");
        write(root.path(), "mount/memory/job/memory.limit_in_bytes", "700000");
        write(root.path(), "mount/memory/job/memory.usage_in_bytes", "100000");
        write(root.path(), "mount/memory/memory.limit_in_bytes", "9223372036854771712");
        write(root.path(), "mount/memory/memory.usage_in_bytes", "5");
        assert_eq!(machine(root.path(), "4:cpu,memory:/job\n").map(|free| free.bytes), Some(600_000));
    }

    fn request() -> PoolRequest {
        PoolRequest {
            asked_bytes: None,
            share: 0.5,
            free: Some(FreeMemory::new(1 << 30, "available".into())),
            bytes_per_block: 1 << 20,
            windows: Vec::new(),
            block_tokens: 16,
            max_model_len: 1024,
            max_num_seqs: 64,
            max_num_batched_tokens: 64,
        }
    }

    #[test]
    fn memory_for_kv_is_there_or_both_numbers_are_named() {
        assert_eq!(host_kv(4 << 30, Some(4 << 30)), Ok(()));
        assert_eq!(host_kv(4 << 30, None), Ok(()));
        let error = host_kv(8 << 30, Some(4 << 30)).expect_err("too much").to_string();
        assert!(error.contains("8.00 GiB") && error.contains("4.00 GiB"), "{error}");
    }

    #[test]
    fn a_share_of_free_memory() {
        let pool = pool(&request()).expect("fits");
        assert_eq!((pool.blocks, pool.bytes), (512, 512 << 20));
        assert_eq!(pool.why, "50 % of the 1.00 GiB available");
    }

    #[test]
    fn smaller_formats_hold_more_tokens_in_the_same_memory() {
        let blocks = |format| {
            let layout = KvLayout::full(28, 8, 128, format, 16);
            let bytes_per_block = layout.groups[0].bytes_per_block() as u64;
            let request =
                PoolRequest { asked_bytes: Some(1 << 30), bytes_per_block, max_num_seqs: 4096, ..request() };
            f64::from(pool(&request).expect("fits").blocks)
        };
        let f16 = blocks(KvFormat::F16);
        for (format, times) in [(KvFormat::Int8, 1.96), (KvFormat::Fp8, 1.96), (KvFormat::Int4, 3.86)] {
            assert!(
                (times..times + 0.03).contains(&(blocks(format) / f16)),
                "{format}: {}",
                blocks(format) / f16
            );
        }
    }

    #[test]
    fn never_more_than_can_be_used() {
        let pool = pool(&PoolRequest { max_num_seqs: 2, ..request() }).expect("fits");
        assert_eq!(pool.blocks, 2 * 65);
        assert_eq!(pool.why, "2 sequences of 1,024 tokens need no more");
    }

    #[test]
    fn an_explicit_size_is_taken_as_it_is() {
        let pool = pool(&PoolRequest { asked_bytes: Some(100 << 20), ..request() }).expect("fits");
        assert_eq!(pool.blocks, 100);
    }

    #[test]
    fn too_little_for_one_sequence_says_what_to_do() {
        let error =
            pool(&PoolRequest { asked_bytes: Some(10 << 20), ..request() }).expect_err("refused").to_string();
        assert!(error.contains("hold 144 tokens") && error.contains("--kv-cache-memory 65MiB"), "{error}");
        let error = pool(&PoolRequest { asked_bytes: Some(2 << 30), ..request() }).expect_err("refused");
        assert!(matches!(error, PoolError::NotEnough { .. }));
        assert_eq!(pool(&PoolRequest { free: None, ..request() }), Err(PoolError::Unknown));
    }

    #[test]
    fn what_is_asked_for_may_take_the_room_of_mapped_weights_and_a_share_may_not() {
        let free = Some(FreeMemory::new(1 << 30, "available".into()).without(3 << 28));
        let share = pool(&PoolRequest { free: free.clone(), ..request() }).expect("fits");
        assert_eq!(share.bytes, 128 << 20, "half of a quarter");
        let asked = |bytes| pool(&PoolRequest { asked_bytes: Some(bytes), free: free.clone(), ..request() });
        assert_eq!(asked(512 << 20).expect("fits").bytes, 512 << 20);
        assert!(matches!(asked((1 << 30) + 1), Err(PoolError::NotEnough { .. })));
        let small = FreeMemory::new(1 << 20, String::new()).without(1 << 30);
        assert_eq!((small.bytes, small.mapped), (0, 1 << 20), "no more than there is");
    }

    fn window(bytes_per_block: u64, window_tokens: u32) -> GroupConfig {
        GroupConfig::window(window_tokens, 0, 16, bytes_per_block)
    }

    /// The same in blocks of `block_tokens`.
    fn window_in(bytes_per_token: u64, window_tokens: u32, block_tokens: u32) -> GroupConfig {
        GroupConfig::window(window_tokens, 0, block_tokens, bytes_per_token * u64::from(block_tokens))
    }

    /// Sequences of `tokens` positions that fit the pool of a window group.
    fn sequences(request: &PoolRequest, window: &GroupConfig, tokens: u32) -> u32 {
        let each = tokens.div_ceil(window.block_tokens).min(request.window_sequence_blocks(window) - 1);
        window.blocks / each
    }

    #[test]
    fn sequences_of_half_the_longest_length_fill_all_pools_at_once() {
        let request = PoolRequest {
            asked_bytes: Some(512 << 20),
            max_model_len: 4096,
            windows: vec![window(5 << 20, 256)],
            ..request()
        };
        let pool = pool(&request).expect("fits");
        assert!(pool.bytes <= 512 << 20 && request.bytes(pool.blocks + 1) > 512 << 20, "{pool:?}");
        assert_eq!(pool.bytes, request.bytes(pool.blocks));
        let (full, windowed) =
            (pool.blocks / request.blocks(2048), sequences(&request, &pool.windows[0], 2048));
        assert!(full.abs_diff(windowed) <= 1, "{full} and {windowed}: {pool:?}");
        // Without the window, every block would have cost six.
        assert!(pool.blocks > 2 * 512 / 6, "{pool:?}");
    }

    #[test]
    fn states_take_as_many_bytes_as_the_rest_and_no_more_than_are_of_use() {
        let states = |bytes_per_block| GroupConfig {
            layout: Layout::State,
            ..GroupConfig::window(0, 0, 256, bytes_per_block)
        };
        // A chunk of 64 lies in two blocks at most, one more state may be taken back, and one be copied.
        let least = 4;
        let request = |mib: u64, free: u64, seqs: u32| PoolRequest {
            free: Some(FreeMemory::new(free << 20, "available".into())),
            windows: vec![states(mib << 20)],
            max_num_seqs: seqs,
            ..request()
        };
        let found = |mib, free, seqs| {
            let pool = pool(&request(mib, free, seqs)).expect("fits");
            (pool.blocks, pool.windows[0].blocks)
        };
        assert_eq!(found(8, 4096, 64), (1024, 128), "half of two GiB for each");
        assert_eq!(found(1, 4096, 4), (260, 2 * least * 4), "as much as four sequences need");
        assert_eq!(found(100, 1024, 64), (112, least), "what one sequence needs goes first");
        // Of a drafter, as many bytes as its KV takes.
        let of_drafter = |layout, block_tokens, bytes_per_block| GroupConfig {
            layout,
            blocks: 0,
            block_tokens,
            bytes_per_block,
            optional: true,
        };
        let windows = vec![of_drafter(Layout::Paged, 16, 1 << 17), of_drafter(Layout::State, 256, 1 << 20)];
        let pool = pool(&PoolRequest { windows, ..request(1, 4096, 64) }).expect("fits");
        assert_eq!(pool.windows[0].blocks, pool.blocks);
        assert_eq!(pool.windows[1].blocks, pool.blocks / 8);
    }

    #[test]
    fn a_window_as_long_as_the_context_has_as_many_blocks() {
        let request = PoolRequest { windows: vec![window(1 << 20, 4096)], ..request() };
        let pool = pool(&request).expect("fits");
        assert_eq!((pool.blocks, pool.windows[0].blocks), (256, 256));
        // As many positions, in blocks of four times the size.
        let request = PoolRequest { windows: vec![window_in(1 << 16, 4096, 64)], ..request };
        let pool = super::pool(&request).expect("fits");
        assert_eq!((pool.blocks, pool.windows[0].blocks), (256, 64));
    }

    #[test]
    fn groups_with_blocks_of_other_sizes_are_full_at_once_too() {
        let sizes = [16, 32, 48, 128];
        let request = PoolRequest {
            asked_bytes: Some(2 << 30),
            free: None,
            max_model_len: 4096,
            windows: sizes.map(|size| window_in(64 << 10, 512, size)).to_vec(),
            ..request()
        };
        let pool = pool(&request).expect("fits");
        assert!(pool.bytes <= 2 << 30 && request.bytes(pool.blocks + 1) > 2 << 30, "{pool:?}");
        let full = pool.blocks / request.blocks(2048);
        for (window, asked) in pool.windows.iter().zip(&request.windows) {
            assert_eq!(GroupConfig { blocks: 0, ..*window }, *asked);
            let windowed = sequences(&request, window, 2048);
            assert!(full.abs_diff(windowed) <= 1, "{full} and {windowed} in {window:?}");
        }
        // As many positions in each, up to what a sequence has in blocks that are not full.
        let positions: Vec<u32> =
            pool.windows.iter().map(|window| window.blocks * window.block_tokens).collect();
        assert!(
            positions.iter().all(|of| (positions[0]..positions[0] * 14 / 10).contains(of)),
            "{positions:?}"
        );
        let bytes = pool.windows.iter().map(|window| u64::from(window.blocks) * window.bytes_per_block);
        assert_eq!(pool.bytes, (u64::from(pool.blocks) << 20) + bytes.sum::<u64>());
    }

    #[test]
    fn one_sequence_fits_every_pool_or_it_is_said_what_is_missing() {
        let windows = vec![window(1 << 20, 512), window_in(1 << 16, 16, 64), window(1 << 20, 16)];
        let least = PoolRequest { max_num_seqs: 1, windows, ..request() };
        let pool = super::pool(&least).expect("fits");
        assert_eq!(pool.blocks, 65);
        for window in &pool.windows {
            assert!(window.blocks >= least.window_sequence_blocks(window), "{pool:?}");
        }
        let needed = least.bytes(65);
        let error = super::pool(&PoolRequest { asked_bytes: Some(needed - 1), ..least.clone() });
        let text = error.expect_err("refused").to_string();
        assert!(text.contains(&format!("{}MiB", needed >> 20)), "{text}");
        assert_eq!(
            super::pool(&PoolRequest { asked_bytes: Some(needed), ..least }).expect("fits").blocks,
            65
        );
    }

    #[test]
    fn where_every_layer_has_a_window_the_index_is_not_what_runs_out() {
        let request = PoolRequest { bytes_per_block: 0, windows: vec![window(1 << 20, 128)], ..request() };
        let pool = pool(&request).expect("fits");
        assert!(pool.bytes <= 512 << 20 && pool.bytes == u64::from(pool.windows[0].blocks) << 20, "{pool:?}");
        assert!(pool.blocks >= 64 * 65, "every sequence at full length: {pool:?}");
        assert!(pool.blocks <= FREE_BLOCKS_MAX);
    }
}
