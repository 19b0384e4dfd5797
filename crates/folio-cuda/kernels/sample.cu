// From rows of logits to tokens: the rules of folio-engine's sampler, and the same choice for the same logits, bit for bit.
//
// One block works on one row. Every sum is of whole numbers (counts, and masses in units of 2^-42) and every choice is the largest
// of keys of which no two are equal, so that no result depends on an order. exp, ln and the random numbers are the sampler's own
// arithmetic (`sampler/math.rs`, `sampler/rng.rs`), statement by statement. Records are laid out in `sample.rs`.

constexpr u32 RECORD = 24, RESULT = 5, TOP_MAX = 256;
constexpr double MASS_ONE = 4398046511104.0;

union Double {
    double x;
    u64 bits;
};

// ---- the sampler's arithmetic

__device__ __forceinline__ float plain_exp(float x) {
    const float ROUND = 12582912.0f;
    float clamped = x > -87.0f ? x : -87.0f;
    float shifted = clamped * 1.44269504088896340735992468100189214f + ROUND;
    float n = shifted - ROUND;
    float r = (clamped - n * 0.6933594f) - n * -2.1219444e-4f;
    float p = 1.9875691e-4f;
    p = p * r + 1.3982e-3f;
    p = p * r + 8.333452e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 0.5f;
    float y = (p * r) * r + r + 1.0f;
    u32 exponent = (__float_as_uint(shifted) - __float_as_uint(ROUND) + 127u) << 23;
    return x > -87.0f ? y * __uint_as_float(exponent) : 0.0f;
}

__device__ __forceinline__ u64 mass(float x) {
    Double rounded, round;
    round.x = 4503599627370496.0;
    rounded.x = (double)plain_exp(x) * MASS_ONE + round.x;
    return rounded.bits - round.bits;
}

__device__ __forceinline__ u64 share(float part, u64 total) {
    u64 wanted = (u64)((double)part * (double)total);
    return wanted > 0 ? wanted : 1;
}

__device__ double plain_ln(double x) {
    const double LN2_HI = 6.931471803691238e-1, LN2_LO = 1.9082149292705877e-10;
    const double L0 = 6.666666666666735e-1, L1 = 3.999999999940942e-1, L2 = 2.857142874366239e-1, L3 = 2.2222198432149784e-1;
    const double L4 = 1.818357216161805e-1, L5 = 1.5313837699209373e-1, L6 = 1.4798198605116586e-1;
    int bias = 0;
    if (x < 2.2250738585072014e-308) {
        x = x * 18014398509481984.0;
        bias = -54;
    }
    Double bits, m;
    bits.x = x;
    int k = (int)(bits.bits >> 52) - 1023 + bias;
    m.bits = (bits.bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull;
    if (m.x > 1.41421356237309504880) {
        m.x *= 0.5;
        k += 1;
    }
    double f = m.x - 1.0, scale = (double)k;
    double s = f / (2.0 + f);
    double z = s * s;
    double w = z * z;
    double t1 = w * (L1 + w * (L3 + w * L5));
    double t2 = z * (L0 + w * (L2 + w * (L4 + w * L6)));
    double r = t2 + t1;
    double half = 0.5 * f * f;
    return scale * LN2_HI - ((half - (s * (half + r) + scale * LN2_LO)) - f);
}

// Philox4x32-10: words for tokens 4 * group .. 4 * group + 4.
__device__ __forceinline__ void philox(u32 k0, u32 k1, u32 group, u32 position, u32* out) {
    u32 c0 = group, c1 = position, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        if (round > 0) {
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
        u32 n0 = (u32)(p1 >> 32) ^ c1 ^ k0, n2 = (u32)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (u32)p1;
        c2 = n2;
        c3 = (u32)p0;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

__device__ __forceinline__ double noisy(float logit, double temperature, u32 bits) {
    double u = ((double)bits + 0.5) / 4294967296.0;
    return (double)logit / temperature - plain_ln(-plain_ln(u));
}

// ---- keys, and searches over a row by all threads of a block

// Ascending as the numbers are; negative zero equals zero.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 ordered_double(double x) {
    Double d;
    d.x = x + 0.0;
    return d.bits >> 63 ? ~d.bits : d.bits | 1ull << 63;
}

// Ascending in (logit, lowest id first).
__device__ __forceinline__ u64 key_of(float logit, u32 token) { return (u64)ordered(logit) << 32 | ~token; }
__device__ __forceinline__ u32 token_of(u64 key) { return ~(u32)key; }

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// The sum, or the largest, of a number of every thread, to all of them.
template <bool SUM> __device__ __forceinline__ u64 of_block(u64 value) {
    __shared__ u64 parts[32];
    for (int mask = 16; mask > 0; mask >>= 1) {
        u64 other = (u64)shuffle_xor((u32)(value >> 32), mask) << 32 | shuffle_xor((u32)value, mask);
        value = SUM ? value + other : other > value ? other : value;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[0];
    for (u32 warp = 1; warp < blockDim.x / 32; warp++) value = SUM ? value + parts[warp] : parts[warp] > value ? parts[warp] : value;
    return value;
}

struct Row {
    const float* logits;
    u32 vocab;
    u64 best;   // the largest key
    float max;
    bool nan;
};

__device__ __forceinline__ Row look(const float* logits, u32 vocab) {
    Row row = {logits, vocab, 0, 0.0f, false};
    u64 nan = 0;
    // Eight loads are under way at once.
    for (u32 start = threadIdx.x; start < vocab; start += 8 * blockDim.x) {
        float some[8];
#pragma unroll
        for (u32 k = 0; k < 8; k++) some[k] = logits[start + k * blockDim.x < vocab ? start + k * blockDim.x : start];
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            float x = some[k];
            u64 key = start + k * blockDim.x < vocab ? key_of(x, start + k * blockDim.x) : 0;
            if (x != x) nan = 1;
            if (key > row.best) row.best = key;
        }
    }
    row.best = of_block<false>(row.best);
    row.nan = of_block<false>(nan) != 0;
    row.max = logits[token_of(row.best)];
    return row;
}

// The key at which the number of keys (or, by mass, the mass of the keys) from the largest down reaches `wanted`; a smaller number
// with no key in between may stand for it. Of keys from `least` on, which reach it.
template <bool MASS> __device__ u64 reach(const Row& row, u64 least, u64 wanted, float scale) {
    __shared__ u32 counts[256];
    __shared__ u64 masses[256], lanes[32], found[2];
    u64 prefix = 0;
    for (int shift = 56;; shift -= 8) {
        for (u32 i = threadIdx.x; i < 256; i += blockDim.x) {
            counts[i] = 0;
            masses[i] = 0;
        }
        __syncthreads();
        for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
            u64 key = key_of(row.logits[i], i);
            if (key < least || (shift < 56 && key >> (shift + 8) != prefix)) continue;
            u32 bin = key >> shift & 255;
            atomic_add(&counts[bin], 1u);
            if (MASS) atomic_add(&masses[bin], mass((row.logits[i] - row.max) * scale));
        }
        __syncthreads();
        if (threadIdx.x < 32) {
            u64 sum = 0;
            for (u32 i = 8 * threadIdx.x; i < 8 * threadIdx.x + 8; i++) sum += MASS ? masses[i] : counts[i];
            lanes[threadIdx.x] = sum;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int lane = 31;
            for (; lane > 0 && lanes[lane] < wanted; lane--) wanted -= lanes[lane];
            int bin = 8 * lane + 7;
            for (; bin > 8 * lane && (MASS ? masses[bin] : counts[bin]) < wanted; bin--) wanted -= MASS ? masses[bin] : counts[bin];
            found[0] = bin;
            found[1] = wanted;
        }
        __syncthreads();
        u32 bin = (u32)found[0], count = counts[bin];
        wanted = found[1];
        prefix = prefix << 8 | bin;
        __syncthreads();
        if (shift == 0 || (MASS ? count == 1 : count == wanted)) return prefix << shift > least ? prefix << shift : least;
    }
}

// ---- the rules

// Applies what changes logits, to a copy.
__device__ __forceinline__ void change(const u32* words, const u32* r, const float* raw, float* logits, u32 vocab) {
    float infinity = __uint_as_float(0x7f800000u), repetition = __uint_as_float(r[9]), frequency = __uint_as_float(r[10]);
    float presence = __uint_as_float(r[11]);
    for (u32 i = threadIdx.x; i < vocab; i += blockDim.x) logits[i] = raw[i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < r[17]; i += blockDim.x) {
        u32 token = words[r[16] + i];
        if (token < vocab) logits[token] = -infinity;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < r[15]; i += blockDim.x) {
        const u32* entry = words + r[14] + 2 * i;
        if (entry[0] < vocab) logits[entry[0]] += __uint_as_float(entry[1]);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < r[13]; i += blockDim.x) {
        const u32* entry = words + r[12] + 2 * i;
        if (entry[0] >= vocab) continue;
        float x = logits[entry[0]];
        x = x > 0.0f ? x / repetition : x * repetition;
        if (entry[1] > 0) {
            x -= frequency * (float)entry[1];
            x -= presence;
        }
        logits[entry[0]] = x;
    }
    __syncthreads();
}

// The smallest key that min_p, top_k and top_p keep.
__device__ __forceinline__ u64 smallest_kept(const Row& row, const u32* r, float temperature) {
    float top_p = __uint_as_float(r[7]), min_p = __uint_as_float(r[8]), scale = 1.0f / temperature;
    u64 least = 0;
    if (min_p > 0.0f) {
        float floor = row.max + (float)(plain_ln((double)min_p) * (double)temperature);
        least = (u64)ordered(floor < row.max ? floor : row.max) << 32;
    }
    if (r[6] > 0 && r[6] < row.vocab) {
        u64 count = 0;
        for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) count += key_of(row.logits[i], i) >= least;
        if (of_block<true>(count) > r[6]) least = reach<false>(row, least, r[6], scale);
    }
    if (top_p < 1.0f) {
        u64 total = 0;
        for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
            if (key_of(row.logits[i], i) >= least) total += mass((row.logits[i] - row.max) * scale);
        }
        least = reach<true>(row, least, share(top_p, of_block<true>(total)), scale);
    }
    return least;
}

// Whether a token whose logit is `lead` above a score surely loses to it: it wins if -ln(u) < e^lead, and -ln(u) >= 1 - u.
__device__ __forceinline__ bool hopeless(double lead, u32 bits) {
    double rest = ((double)~bits + 0.5) / 4294967296.0;
    return lead < 0.0 && rest > (double)plain_exp((float)lead) * 1.001;
}

// The largest `logit / T + g` of the keys that are kept; the lowest id of equals.
__device__ __forceinline__ u32 draw(const Row& row, const u32* r, float cold, u64 least) {
    double temperature = (double)cold;
    u32 words[4], best_token = token_of(row.best);
    philox(r[2], r[3], best_token >> 2, r[4], words);
    double best = noisy(row.max, temperature, words[best_token & 3]);
    for (u32 group = threadIdx.x; 4 * group < row.vocab; group += blockDim.x) {
        philox(r[2], r[3], group, r[4], words);
        for (u32 token = 4 * group; token < 4 * group + 4 && token < row.vocab; token++) {
            float logit = row.logits[token];
            u32 bits = words[token & 3];
            if (key_of(logit, token) < least || hopeless((double)logit / temperature - best, bits)) continue;
            double score = noisy(logit, temperature, bits);
            if (score > best || (score == best && token < best_token)) {
                best = score;
                best_token = token;
            }
        }
    }
    u64 own = ordered_double(best), all = of_block<false>(own);
    return ~(u32)of_block<false>(own == all ? (u64)~best_token : 0);
}

__device__ __forceinline__ void logprobs(const Row& row, u32 token, u32 wanted, u32* out) {
    __shared__ u64 list[TOP_MAX];
    __shared__ u32 listed;
    u64 total = 0, before = 0;
    float own = row.logits[token];
    for (u32 i = threadIdx.x; i < row.vocab; i += blockDim.x) {
        float x = row.logits[i];
        total += mass((x - row.max) * 1.0f);
        before += i < token ? x >= own : x > own;
    }
    total = of_block<true>(total);
    before = of_block<true>(before);
    double normalizer = (double)row.max + plain_ln((double)total / MASS_ONE);
    u32 top = wanted < row.vocab ? wanted : row.vocab;
    u64 least = top > 0 && top < row.vocab ? reach<false>(row, 0, top, 1.0f) : 0;
    if (threadIdx.x == 0) {
        listed = 0;
        out[2] = __float_as_uint((float)((double)own - normalizer));
        out[3] = (u32)before + 1;
        out[4] = top;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; top > 0 && i < row.vocab; i += blockDim.x) {
        u64 key = key_of(row.logits[i], i);
        if (key >= least) list[atomic_add(&listed, 1u)] = key;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < top; i += blockDim.x) {
        u32 place = 0;
        for (u32 j = 0; j < top; j++) place += list[j] > list[i];
        out[RESULT + 2 * place] = token_of(list[i]);
        out[RESULT + 2 * place + 1] = __float_as_uint((float)((double)row.logits[token_of(list[i])] - normalizer));
    }
}

// `words`: rows, then seven of nothing, then a record for each row, then their lists.
extern "C" __global__ void __launch_bounds__(1024)
sample_rows(const u32* words, const float* logits, u32 stride, u32 vocab, float* scratch, u32 scratch_stride, u32* out, u32 out_words) {
    if (blockIdx.x >= words[0]) return;
    const u32* r = words + 8 + RECORD * blockIdx.x;
    out += (u64)out_words * blockIdx.x;
    Row raw = look(logits + (u64)stride * blockIdx.x, vocab);
    u32 status = raw.nan ? 1 : !is_finite(raw.max) ? 2 : 0, token = r[1];
    if (status == 0 && r[0] == 1 && token >= vocab) status = 4;
    if (status == 0 && r[0] == 0) {
        Row row = raw;
        if (r[19]) {
            float* changed = scratch + (u64)scratch_stride * blockIdx.x;
            change(words, r, raw.logits, changed, vocab);
            row = look(changed, vocab);
        }
        float temperature = __uint_as_float(r[5]);
        if (row.nan || !is_finite(row.max)) {
            status = 3;
        } else if (temperature == 0.0f) {
            token = token_of(row.best);
        } else {
            token = draw(row, r, temperature, smallest_kept(row, r, temperature));
        }
    }
    if (threadIdx.x == 0) {
        out[0] = status;
        out[1] = token;
    }
    if (status == 0 && r[18] > 0) logprobs(raw, token, r[18] - 1, out);
}

// The tokens of a step that are those the step before chooses: bit 31 and the row of its results. Where it chose none, or none that can
// be embedded, token 0. One thread for each row of the step.
extern "C" __global__ void __launch_bounds__(128) follow(u32* meta, const u32* results, u32 result_words, u32 vocabulary) {
    u32 row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= meta[0]) return;
    u32* token = meta + meta[8] + row;
    if (*token >> 31 == 0) return;
    const u32* result = results + (u64)result_words * (*token & 0x7fffffffu);
    *token = result[0] == 0 && result[1] < vocabulary ? result[1] : 0;
}
