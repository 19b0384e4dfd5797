// Weights that are made up where they lie: the values of folio-model's `dummy`, in the order in which products load them.
//
// Every thread makes one load of 16 bytes, whose weights follow from their places in the run of random words alone. Rows and columns
// that do not exist are zero.

// Word `place` of the run: Chris Wellons' lowbias32.
__device__ __forceinline__ u32 run_word(u64 place) {
    u32 x = (u32)place;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}
__device__ __forceinline__ u32 run_half(u64 place) { return run_word(place / 2) >> 16 * (u32)(place % 2) & 0xffff; }
__device__ __forceinline__ u32 run_byte(u64 place) { return run_word(place / 4) >> 8 * (u32)(place % 4) & 0xff; }

// The loads of a matrix: `[row tile][load][lane]`. Lane 4g + c has rows g and g + 8 of the tile and columns 4c..4c + 4 of 16.
struct Load {
    u32 row, column;    // of the lane's first weight
    u64 number;
    __device__ __forceinline__ Load(u32 loads, u32 columns_of_a_load)
        : number((u64)blockIdx.x * blockDim.x + threadIdx.x) {
        u32 lane = (u32)(number % 32);
        u64 load = number / 32;
        row = (u32)(load / loads) * 16 + lane / 4;
        column = (u32)(load % loads) * columns_of_a_load + lane % 4 * 4;
    }
};

// 16-bit weights: the bits of the run in `keep`, and those of `set`. `loads` are those of a row tile.
extern "C" __global__ void __launch_bounds__(256)
make_up_sixteen(u32x4* out, u32 rows, u32 columns, u32 loads, u32 keep, u32 set) {
    Load load(loads, 16);
    if (load.number / 32 >= (u64)((rows + 15) / 16) * loads) return;
    u32 words[4];
    for (u32 word = 0; word < 4; word++) {
        u32 row = load.row + 8 * (word % 2);
        words[word] = 0;
        for (u32 half = 0; half < 2; half++) {
            u32 column = load.column + word / 2 * 2 + half;
            if (row >= rows || column >= columns) continue;
            words[word] |= (run_half((u64)row * columns + column) & keep | set) << 16 * half;
        }
    }
    out[load.number] = {words[0], words[1], words[2], words[3]};
}

// Codes of blocks of `values` of them, `block_bytes` bytes each, of which `header` come before the codes.
struct Blocks {
    u32 columns, values, block_bytes, header;
    // Where the run has the byte `at` of the codes of the block with this column.
    __device__ __forceinline__ u64 place(u32 row, u32 column, u32 at) const {
        u64 block = (u64)row * (columns / values) + column / values;
        return block * block_bytes + header + at;
    }
    __device__ __forceinline__ u32 byte(u32 row, u32 column) const { return run_byte(place(row, column, column % values)); }
    // Byte i of a run of 16 has values i and i + 16.
    __device__ __forceinline__ u32 nibble(u32 row, u32 column) const {
        u32 i = column % values;
        return run_byte(place(row, column, i / 32 * 16 + i % 16)) >> 4 * (i / 16 % 2) & 15;
    }
};

// Codes of a byte, 32 columns to a load. `fp8`: codes that are no number become zero.
extern "C" __global__ void __launch_bounds__(256)
make_up_eight(u32x4* out, u32 rows, u32 columns, u32 loads, u32 values, u32 block_bytes, u32 header, u32 fp8) {
    Load load(loads, 32);
    if (load.number / 32 >= (u64)((rows + 15) / 16) * loads) return;
    Blocks blocks = {columns, values, block_bytes, header};
    u32 words[4];
    for (u32 word = 0; word < 4; word++) {
        u32 row = load.row + 8 * (word % 2);
        words[word] = 0;
        for (u32 j = 0; j < 4; j++) {
            u32 column = load.column + word / 2 * 16 + j;
            if (row >= rows || column >= columns) continue;
            u32 code = blocks.byte(row, column);
            if (fp8 && (code & 0x7f) == 0x7f) code = 0;
            words[word] |= code << 8 * j;
        }
    }
    out[load.number] = {words[0], words[1], words[2], words[3]};
}

// Codes of a nibble, 64 columns to a load.
extern "C" __global__ void __launch_bounds__(256)
make_up_four(u32x4* out, u32 rows, u32 columns, u32 loads, u32 values, u32 block_bytes, u32 header) {
    Load load(loads, 64);
    if (load.number / 32 >= (u64)((rows + 15) / 16) * loads) return;
    Blocks blocks = {columns, values, block_bytes, header};
    u32 words[4];
    for (u32 word = 0; word < 4; word++) {
        words[word] = 0;
        for (u32 i = 0; i < 8; i++) {
            u32 half = i / 4, j = i % 4, row = load.row + 8 * half, column = load.column + word * 16 + j;
            if (row >= rows || column >= columns) continue;
            words[word] |= blocks.nibble(row, column) << (16 * (j % 2) + 4 * (half + j / 2 * 2));
        }
    }
    out[load.number] = {words[0], words[1], words[2], words[3]};
}

// The one scale that all blocks have: `[row tile][group][16]`.
extern "C" __global__ void __launch_bounds__(256) make_up_scales(float* out, u32 rows, u32 groups, float scale) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)((rows + 15) / 16) * 16 * groups) return;
    u32 row = (u32)(at / (16 * groups)) * 16 + (u32)(at % 16);
    out[at] = row < rows ? scale : 0.0f;
}

// f32 weights, `[column][row, padded to 32]`.
extern "C" __global__ void __launch_bounds__(256) make_up_f32(u32* out, u32 rows, u32 columns, u32 keep, u32 set) {
    u32 padded = (rows + 31) / 32 * 32;
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)padded * columns) return;
    u32 row = (u32)(at % padded), column = (u32)(at / padded);
    out[at] = row < rows ? run_word((u64)row * columns + column) & keep | set : 0;
}
