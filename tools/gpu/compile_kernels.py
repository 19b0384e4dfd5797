#!/usr/bin/env python3
"""Compiles every kernel for every architecture, without a GPU, and keeps what they need in docs/gpu-kernels.md, and by a digest of what was
compiled (source, options, compiler) in tools/gpu/kernels.json. What is there is not compiled again, but with --check for sm_90.

    cargo build --locked --workspace --examples
    target/debug/examples/kernel_sources target/kernels
    python3 tools/gpu/compile_kernels.py target/kernels            # writes docs/gpu-kernels.md
    python3 tools/gpu/compile_kernels.py target/kernels --check    # fails where it would change

Needs NVRTC 12.8: `pip install -r tools/gpu/requirements.txt` in the Python that runs this, or --nvrtc FILE.
"""

import argparse
import concurrent.futures
import ctypes
import hashlib
import json
import pathlib
import re
import sys
import sysconfig

ARCHS = (80, 90, 100)
# Compiled at every check.
CHECKED = 90
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space", "--ptxas-options=-v")
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "gpu-kernels.md"
KEPT = pathlib.Path(__file__).resolve().parent / "kernels.json"

HEAD = """# What the GPU kernels need

Every kernel compiled for sm_80 (A100), sm_90 (H100, H200) and sm_100 (B200) by NVRTC {version}, as ptxas reports it. Made by
`tools/gpu/compile_kernels.py`, which needs no GPU; `.ci/run` checks that it is up to date.

Registers are per thread, of 65,536 in a multiprocessor. Shared is static shared memory in
bytes, dynamic shared memory comes with a launch. Spilled is stored to and loaded from local memory, in bytes per thread; stack is local
memory in all.
"""


def fail(text):
    sys.exit(f"compile_kernels: {text}")


def library(path):
    if path is None:
        folder = pathlib.Path(sysconfig.get_paths()["purelib"]) / "nvidia"
        found = sorted(folder.glob("*/lib/libnvrtc.so.*"))
        if not found:
            fail(f"no libnvrtc in {folder}: pip install -r tools/gpu/requirements.txt, or give --nvrtc FILE")
        path = found[0]
    return str(path)


class Nvrtc:
    """The calls of nvrtc.h that compiling takes."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        self.version = f"{major.value}.{minor.value}"

    @staticmethod
    def check(status, call):
        if status != 0:
            fail(f"{call}: error {status}")

    def compile(self, name, source, arch):
        """The log of ptxas."""
        program = ctypes.c_void_p()
        self.check(self.lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None), "nvrtcCreateProgram")
        options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture=sm_{arch}")]
        status = self.lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        self.check(self.lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
        log = ctypes.create_string_buffer(size.value)
        self.check(self.lib.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        text = log.value.decode(errors="replace")
        if status != 0:
            fail(f"{name} does not compile for sm_{arch}:\n{text}")
        warnings = [line for line in text.splitlines() if "warning" in line]
        if warnings:
            fail(f"{name} for sm_{arch}:\n" + "\n".join(warnings))
        return text


def needs(log):
    """{kernel: (registers, shared, spill stores, spill loads, stack)} of a log."""
    found, kernel, frame = {}, None, None
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame = tuple(int(group) for group in match.groups())
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[kernel] = (int(match[1]), int(shared[1]) if shared else 0, frame[1], frame[2], frame[0])
    return found


def needs_of(nvrtc, module, arch, kept, check):
    """The digest of a module's compilation, and its [`needs`]: what was kept of the same one, or else what it says."""
    source = module.read_text()
    digest = hashlib.sha256(f"{nvrtc.version} {arch} {OPTIONS} {source}".encode()).hexdigest()[:24]
    known = kept.get(digest)
    if known is None or (check and arch == CHECKED):
        found = {kernel: list(need) for kernel, need in needs(nvrtc.compile(module.name, source, arch)).items()}
        if known not in (None, found):
            fail(f"{module.name} for sm_{arch} needs {found}, {KEPT.name} has {known}")
        known = found
    return digest, known


def compile_all(nvrtc, folder, kept, check):
    """What every kernel needs, by module, and the same by digest."""
    modules = sorted(folder.glob("*.cu"))
    if not modules:
        fail(f"there are no sources in {folder}: run target/debug/examples/kernel_sources {folder}")
    jobs = {}
    # NVRTC compiles different programs at once, and ctypes lets others run meanwhile.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for module in modules:
            for arch in ARCHS:
                jobs[module, arch] = pool.submit(needs_of, nvrtc, module, arch, kept, check)
        done = {key: job.result() for key, job in jobs.items()}
    table = {}
    for module in modules:
        wanted = module.with_suffix(".txt").read_text().split()
        by_arch = [done[module, arch][1] for arch in ARCHS]
        for arch, found in zip(ARCHS, by_arch):
            if sorted(found) != sorted(wanted):
                fail(f"{module.name} for sm_{arch} has the kernels {sorted(found)}, its list says {sorted(wanted)}")
        table[module.stem] = {kernel: [found[kernel] for found in by_arch] for kernel in wanted}
    return table, dict(sorted(done.values()))


def page(version, table):
    lines = [HEAD.format(version=version)]
    kernels = sum(len(module) for module in table.values())
    spilling = sum(any(need[2] or need[3] for need in needs) for module in table.values() for needs in module.values())
    lines.append(f"{kernels} kernels in {len(table)} modules; {spilling} of them spill.\n")
    for module, kernels in table.items():
        lines.append(f"## {module}\n")
        lines.append("| kernel | registers " + " / ".join(f"sm_{arch}" for arch in ARCHS) + " | shared | spilled | stack |")
        lines.append("|---|---|---|---|---|")
        for kernel, by_arch in kernels.items():
            def cell(values):
                values = [str(value) for value in values]
                return values[0] if len(set(values)) == 1 else " / ".join(values)
            spilled = cell(stores + loads for _, _, stores, loads, _ in by_arch)
            registers = " / ".join(str(need[0]) for need in by_arch)
            lines.append(f"| {kernel} | {registers} | {cell(n[1] for n in by_arch)} | {spilled} | {cell(n[4] for n in by_arch)} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=pathlib.Path, help="folder that kernel_sources wrote")
    parser.add_argument("--nvrtc", help="the library's file")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is not what would be written")
    arguments = parser.parse_args()
    nvrtc = Nvrtc(library(arguments.nvrtc))
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    table, by_digest = compile_all(nvrtc, arguments.sources, kept, arguments.check)
    text = page(nvrtc.version, table)
    lines = ",\n".join(f"{json.dumps(digest)}: {json.dumps(found)}" for digest, found in by_digest.items())
    pages = {PAGE: text, KEPT: f"{{\n{lines}\n}}\n"}
    for file, content in pages.items():
        if not arguments.check:
            file.write_text(content)
        elif not file.exists() or file.read_text() != content:
            fail(f"{file.name} is stale: run without --check")
    print(next(line for line in text.splitlines() if " kernels in " in line))


if __name__ == "__main__":
    main()
