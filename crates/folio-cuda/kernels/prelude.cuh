// What kernels are written in, besides plain CUDA C++: names for the instructions that have no plain name. Header-less, so that
// any NVRTC 12 or 13 compiles it. The host's form of the same names is in folio-emulator.
