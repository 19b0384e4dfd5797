//! Writes the source of every module of kernels, prelude included, to a folder, and the names of its kernels: what
//! `tools/gpu/compile_kernels.py` compiles.

use std::path::PathBuf;

use folio_cuda::kernels::{MODULES, PRELUDE};

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args().nth(1).map(PathBuf::from) else {
        eprintln!("usage: kernel_sources FOLDER");
        std::process::exit(2);
    };
    // What a former run left there may be no module any more.
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    std::fs::create_dir_all(&folder)?;
    for module in MODULES {
        let file = folder.join(module.name);
        std::fs::write(file.with_extension("cu"), format!("{PRELUDE}\n{}", module.source))?;
        std::fs::write(file.with_extension("txt"), module.kernels.join("\n"))?;
    }
    Ok(())
}
