//! Runs the CUDA kernels of `folio-cuda` on the host: the device of tests.
