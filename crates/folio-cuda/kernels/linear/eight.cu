// Products and embeddings of bytes with scales.

LINEAR_KERNELS(eight_16, Eight<1>)
LINEAR_KERNELS(eight, Eight<2>)
LINEAR_KERNELS(fp8, Fp8)
