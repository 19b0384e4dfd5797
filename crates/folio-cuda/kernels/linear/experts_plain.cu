// Products of experts whose weights stand for themselves.

EXPERTS_KERNELS(bf16, Bf16)
EXPERTS_KERNELS(f16, F16)

extern "C" __global__ void __launch_bounds__(128)
f32_experts_8(EXPERTS_PARAMETERS(float), const float* weights, u32 weight_rows, u32 columns, const float* bias, float* out,
              u32 out_stride) {
    if (blockIdx.y >= header[HEADER_TILES]) return;
    const u32* tile = tiles + 4 * blockIdx.y;
    u32 row = (blockIdx.z * experts + tile[0]) * range, start = row - first_row;
    if (start >= weight_rows) return;
    Rows from = {list, tile[1], tile[2], share}, to = {list, tile[1], tile[2], 1};
    floats(weights, weight_rows, columns, {start, range}, x, x_stride, from, to,
           {bias ? bias + row : nullptr, out + blockIdx.z * range, out_stride, 0});
}
