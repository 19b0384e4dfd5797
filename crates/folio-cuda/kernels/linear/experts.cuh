// Products of a mixture of experts: a block has the rows of one expert, and its weights are a range of rows of the matrix.
//
// `tiles[4 * i..]` is what blockIdx.y = i works on: expert, first entry of `list`, entries. An entry of the list is a pair (row of the
// batch, slot), numbered row by row: pair / share is the row of `x` that is read, and the pair itself the row of `out` that is
// written. Expert e has the weight rows (part * experts + e) * range.. of part blockIdx.z, which are written to columns part * range..;
// those that are not of this segment are left alone.

#define EXPERTS_PARAMETERS(Float)                                                                                              \
    const u32 *header, const u32 *tiles, const u32 *list, u32 share, u32 experts, u32 range, u32 first_row, const Float *x,    \
        u32 x_stride

// Words of the header: pairs, tiles.
constexpr u32 HEADER_TILES = 1;

#define EXPERTS_KERNEL(name, threads, compute)                                                                                 \
    extern "C" __global__ void __launch_bounds__(threads)                                                                     \
        name(EXPERTS_PARAMETERS(u16), const u32* order, WEIGHTS_PARAMETERS, const float* bias, float* out, u32 out_stride) {  \
        if (blockIdx.y >= header[HEADER_TILES]) return;                                                                        \
        const u32* tile = tiles + 4 * blockIdx.y;                                                                              \
        u32 row = (blockIdx.z * experts + tile[0]) * range, start = row - first_row;                                           \
        if (start >= weight_rows) return;                                                                                      \
        Weights w = WEIGHTS_OF;                                                                                                \
        Rows from = {list, tile[1], tile[2], share}, to = {list, tile[1], tile[2], 1};                                         \
        compute(w, {start, range}, x, x_stride, order, from, to,                                                               \
                {bias ? bias + row : nullptr, out + blockIdx.z * range, out_stride, 0}, blockIdx.x);                                       \
    }

#define EXPERTS_KERNELS(prefix, Kind)                                                                                          \
    EXPERTS_KERNEL(prefix##_experts_8, 128, (narrow<Kind, 1, 1, 4>))                                                                 \
    EXPERTS_KERNEL(prefix##_experts_wide, 256, (wide<Kind, 2, 4, 2>))
