// Products and embeddings of nibbles with scales.

LINEAR_KERNELS(four_16, Four<1>)
LINEAR_KERNELS(four, Four<2>)
LINEAR_KERNELS(mx4, Mx4)
LINEAR_KERNELS(iq4, Iq4)
