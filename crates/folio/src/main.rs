/// One of thousands of sequences has a handful of buffers, all of the same sizes. In glibc's heap those lie at the same offset of their pages
/// and get into each other's way in the caches: a step of 4,096 takes nearly twice as long (`docs/performance.md`).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    if let Err(error) = folio::main() {
        eprintln!("folio: {error:#}");
        std::process::exit(1);
    }
}
