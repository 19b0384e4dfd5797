// Products of experts whose weights are bytes with scales.

EXPERTS_KERNELS(eight_16, Eight<1>)
EXPERTS_KERNELS(eight, Eight<2>)
EXPERTS_KERNELS(fp8, Fp8)
