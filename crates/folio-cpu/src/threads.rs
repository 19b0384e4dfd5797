//! How many threads this process may use.
//!
//! The smallest of: the affinity mask, the cgroup v2 `cpu.max` of every level up to the root, the cgroup v1 quota.

use std::path::{Path, PathBuf};

use crate::pool::MAX_THREADS;

/// Threads the machine allows this process; at least 1.
pub(crate) fn allowance() -> usize {
    let affinity = rustix::thread::sched_getaffinity(None).map(|set| set.count() as usize).unwrap_or(1);
    let quota = std::fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|groups| quota(&groups, Path::new("/sys/fs/cgroup")))
        .unwrap_or(usize::MAX);
    affinity.min(quota).clamp(1, MAX_THREADS)
}

/// Smallest quota, in whole processors rounded down (but at least one), over the groups in `/proc/self/cgroup`.
fn quota(groups: &str, mount: &Path) -> Option<usize> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let path = path.trim_start_matches('/');
        let found = if controllers.is_empty() {
            levels(mount, path).filter_map(|dir| v2(&dir)).min()
        } else if controllers.split(',').any(|c| c == "cpu") {
            let root = [mount.join(controllers), mount.join("cpu")].into_iter().find(|dir| dir.is_dir());
            root.and_then(|root| levels(&root, path).filter_map(|dir| v1(&dir)).min())
        } else {
            None
        };
        least = [least, found].into_iter().flatten().min();
    }
    least
}

/// `mount/a/b`, `mount/a`, `mount`.
fn levels(mount: &Path, path: &str) -> impl Iterator<Item = PathBuf> {
    let full = mount.join(path);
    let mount = mount.to_path_buf();
    full.ancestors()
        .take_while(|dir| dir.starts_with(&mount))
        .map(Path::to_path_buf)
        .collect::<Vec<_>>()
        .into_iter()
}

fn v2(dir: &Path) -> Option<usize> {
    let text = std::fs::read_to_string(dir.join("cpu.max")).ok()?;
    let (quota, period) = text.trim().split_once(' ')?;
    processors(quota.parse().ok()?, period.parse().ok()?)
}

fn v1(dir: &Path) -> Option<usize> {
    let read = |name| std::fs::read_to_string(dir.join(name)).ok()?.trim().parse::<i64>().ok();
    processors(read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?)
}

fn processors(quota_us: i64, period_us: i64) -> Option<usize> {
    (quota_us > 0 && period_us > 0).then(|| usize::try_from(quota_us / period_us).unwrap_or(1).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("folio-cgroup-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).expect("temporary directory");
        dir
    }

    #[test]
    fn the_tightest_level_of_cgroup_v2_counts() {
        let mount = scratch("v2");
        std::fs::create_dir_all(mount.join("a/b")).unwrap();
        std::fs::write(mount.join("a/cpu.max"), "350000 100000\n").unwrap();
        std::fs::write(mount.join("a/b/cpu.max"), "max 100000\n").unwrap();
        assert_eq!(quota("0::/a/b\n", &mount), Some(3));
        std::fs::write(mount.join("a/b/cpu.max"), "50000 100000\n").unwrap();
        assert_eq!(quota("0::/a/b\n", &mount), Some(1));
        assert_eq!(quota("0::/\n", &mount), None);
    }

    #[test]
    fn cgroup_v1_quota_is_read_and_minus_one_means_none() {
        let mount = scratch("v1");
        std::fs::create_dir_all(mount.join("cpu/job")).unwrap();
        std::fs::write(mount.join("cpu/job/cpu.cfs_period_us"), "100000").unwrap();
        std::fs::write(mount.join("cpu/job/cpu.cfs_quota_us"), "-1").unwrap();
        assert_eq!(quota("4:cpu:/job\n", &mount), None);
        std::fs::write(mount.join("cpu/job/cpu.cfs_quota_us"), "200000").unwrap();
        assert_eq!(quota("9:name=systemd:/\n4:cpu:/job\n", &mount), Some(2));
    }

    #[test]
    fn at_least_one_thread_is_always_allowed() {
        assert!((1..=MAX_THREADS).contains(&allowance()));
    }
}
