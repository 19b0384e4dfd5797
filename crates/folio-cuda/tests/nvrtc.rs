//! The binding of NVRTC and the folder of cubins, with the real compiler where one is found: `FOLIO_NVRTC`, the loader's, or the wheel of
//! an active Python environment. No GPU is needed.

use folio_cuda::cubins::Cubins;
use folio_cuda::kernels::{MODULES, Module};
use folio_cuda::nvrtc::{Nvrtc, NvrtcError};

fn compiler() -> Option<Nvrtc> {
    match Nvrtc::find() {
        Ok(nvrtc) => Some(nvrtc),
        Err(NvrtcError::Absent { tried }) => {
            eprintln!("SKIPPED: there is no NVRTC here; looked for {tried}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Some that compile quickly; `tools/gpu/compile_kernels.py` compiles all, for three architectures.
const SOME: [&str; 4] = ["rows", "kv", "rates", "linear_plain"];

#[test]
fn a_module_becomes_a_cubin_of_its_kernels() {
    let Some(nvrtc) = compiler() else { return };
    let modules: Vec<Module> = MODULES.iter().filter(|module| SOME.contains(&module.name)).copied().collect();
    assert_eq!(modules.len(), SOME.len());
    let mut cubins = Cubins::new(None, 90);
    cubins.prepare(&modules).unwrap_or_else(|error| panic!("{error}"));
    for module in &modules {
        let cubin = cubins.get(module).unwrap_or_else(|error| panic!("{}: {error}", module.name));
        assert_eq!(&cubin[..4], b"\x7fELF", "{}", module.name);
        for kernel in module.kernels {
            let found = cubin.windows(kernel.len()).any(|window| window == kernel.as_bytes());
            assert!(found, "{kernel} is not in the cubin of {} by {:?}", module.name, nvrtc.version());
        }
    }
    assert_eq!(cubins.counts(), (0, SOME.len()));
}

#[test]
fn a_mistake_is_shown_with_its_line() {
    let Some(nvrtc) = compiler() else { return };
    let source = "extern \"C\" __global__ void k(float* x) {\n  x[0] = nonsense;\n}\n";
    let error = nvrtc.compile("wrong.cu", source, 90).expect_err("refused").to_string();
    assert!(error.contains("wrong.cu(2)") && error.contains("nonsense"), "{error}");
    let error = nvrtc.compile("old.cu", "", 10).expect_err("no such architecture").to_string();
    assert!(error.contains("sm_10"), "{error}");
}

#[test]
fn the_second_time_nothing_is_compiled() {
    if compiler().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = "extern \"C\" __global__ void k(float* x) { x[0] = 1.0f; }";
    let module = Module { name: "small", source, kernels: &["k"] };
    let get = |arch| {
        let mut cubins = Cubins::new(Some(folder.path().join("kernels")), arch);
        cubins.prepare(&[module]).unwrap_or_else(|error| panic!("{error}"));
        let cubin = cubins.get(&module).unwrap_or_else(|error| panic!("{error}"));
        (cubin, cubins.counts())
    };
    let (first, counts) = get(90);
    assert_eq!(counts, (0, 1));
    assert_eq!(get(90), (first, (1, 0)));
    assert_eq!(get(80).1, (0, 1), "another architecture is another file");
}
