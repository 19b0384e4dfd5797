//! Kernels against their definitions, on the emulated device: what they compute, and that its bits do not depend on company.

mod attention;
mod kv;
mod library;
mod rows;
mod support;
