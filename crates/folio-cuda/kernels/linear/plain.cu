// Products and embeddings of weights that stand for themselves.

LINEAR_KERNELS(bf16, Bf16)
LINEAR_KERNELS(f16, F16)

// Grid: 32 weight rows, 8 rows of the batch.
extern "C" __global__ void __launch_bounds__(128) f32_8(const u32* meta, u32 count_word, const float* x, u32 x_stride,
                                                        const float* weights, u32 weight_rows, u32 columns, const float* bias,
                                                        float* out, u32 out_stride, u32 add) {
    u32 rows = meta[count_word], first = blockIdx.y * 8;
    if (first >= rows) return;
    Rows batch = {nullptr, first, rows - first < 8 ? rows - first : 8, 1};
    floats(weights, weight_rows, columns, {0, weight_rows}, x, x_stride, batch, batch, {bias, out, out_stride, add});
}

extern "C" __global__ void __launch_bounds__(256) f32_embed(const u32* meta, u32 first_row, const float* weights, u32 weight_rows,
                                                            u32 width, float* out, u32 out_stride, u16* out_bf16,
                                                            u32 out_bf16_stride) {
    if (blockIdx.x >= meta[0]) return;
    u32 row = meta[meta[8] + blockIdx.x] - first_row, padded = (weight_rows + 31) / 32 * 32;
    if (row >= weight_rows) return;
    for (u32 column = threadIdx.x; column < width || column < out_bf16_stride; column += blockDim.x) {
        float value = column < width ? weights[(u64)column * padded + row] : 0.0f;
        if (out && column < width) out[(u64)blockIdx.x * out_stride + column] = value;
        if (out_bf16 && column < out_bf16_stride) out_bf16[(u64)blockIdx.x * out_bf16_stride + column] = f32_to_bf16(value);
    }
}
