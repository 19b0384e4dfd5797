// Products of experts whose weights are nibbles with scales.

EXPERTS_KERNELS(four_16, Four<1>)
EXPERTS_KERNELS(four, Four<2>)
EXPERTS_KERNELS(mx4, Mx4)
EXPERTS_KERNELS(iq4, Iq4)
