// The largest probability that an example of a batch gives to each class, from all scores: samplers/_scan.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "exponential.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// Up to this number of scores a second thread takes longer to wake than it saves.
constexpr int64_t kSerialScores = 16384;

// Classes that are compared with the threshold at once.
constexpr int64_t kBlock = 64;

inline float widened(float x) { return x; }

inline float widened(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, sizeof x);
    return x;
}

// exp for x <= 0; NaN becomes nearly 0, since a comparison with it is false.
inline float clamped_exponential(float x) { return exponential(x > -87.0f ? x : -87.0f); }

// The places of the n largest finite values, in descending order; -1 if there are fewer.
void find_largest(const float* row, int64_t classes, int64_t n, std::vector<float>& best, int64_t* ids) {
    std::fill(ids, ids + n, int64_t{-1});
    best.assign(n, kNone);
    for (int64_t start = 0; start < classes; start += kBlock) {
        const int64_t end = std::min(classes, start + kBlock);
        float highest = kNone;
#pragma omp simd reduction(max : highest)
        for (int64_t c = start; c < end; ++c) highest = row[c] > highest ? row[c] : highest;
        if (!(highest > best[n - 1])) continue;
        for (int64_t c = start; c < end; ++c) {
            if (!(row[c] > best[n - 1])) continue;
            int64_t i = n - 1;
            for (; i > 0 && best[i - 1] < row[c]; --i) best[i] = best[i - 1], ids[i] = ids[i - 1];
            best[i] = row[c], ids[i] = c;
        }
    }
}

template <typename T>
void likely(const T* scores, const float* bias, int64_t batch, int64_t classes, int64_t nearest, float* largest,
            int64_t* ids, int threads) {
#pragma omp parallel num_threads(threads) if (batch * classes > kSerialScores)
    {
        std::vector<float> row(classes), found(classes, kNone), best, kept(nearest);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < batch; ++b) {
            const T* const own = scores + b * classes;
            float* const s = row.data();
            float* const m = found.data();
            float highest = kNone;
            if (bias) {
#pragma omp simd reduction(max : highest)
                for (int64_t c = 0; c < classes; ++c) {
                    s[c] = widened(own[c]) + bias[c];
                    highest = s[c] > highest ? s[c] : highest;
                }
            } else {
#pragma omp simd reduction(max : highest)
                for (int64_t c = 0; c < classes; ++c) {
                    s[c] = widened(own[c]);
                    highest = s[c] > highest ? s[c] : highest;
                }
            }
            int64_t* const near = ids + b * nearest;
            if (nearest) find_largest(s, classes, nearest, best, near);
            // Of an example with infinite scores, or with NaN alone, nothing is known.
            if (!std::isfinite(highest)) continue;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < classes; ++c) sum += clamped_exponential(s[c] - highest);
            const float log_z = highest + std::log(sum);
            // Classes that the example sums itself keep what the others gave them.
            for (int64_t i = 0; i < nearest; ++i) kept[i] = near[i] < 0 ? kNone : m[near[i]];
#pragma omp simd
            for (int64_t c = 0; c < classes; ++c) m[c] = s[c] - log_z > m[c] ? s[c] - log_z : m[c];
            for (int64_t i = 0; i < nearest; ++i)
                if (near[i] >= 0) m[near[i]] = kept[i];
        }
#pragma omp critical
        for (int64_t c = 0; c < classes; ++c) largest[c] = std::max(largest[c], found[c]);
    }
}

}  // namespace

// Raises `largest` [C] to max_b log p_b(c) over the rows of scores [B, C]; each row leaves its `nearest` largest out
// and writes them to ids [B, nearest], -1 if there are fewer.
extern "C" void manyclass_likely_float32(const float* scores, const float* bias, int64_t batch, int64_t classes,
                                         int64_t nearest, float* largest, int64_t* ids, int threads) {
    likely(scores, bias, batch, classes, nearest, largest, ids, threads);
}

extern "C" void manyclass_likely_bfloat16(const uint16_t* scores, const float* bias, int64_t batch, int64_t classes,
                                          int64_t nearest, float* largest, int64_t* ids, int threads) {
    likely(scores, bias, batch, classes, nearest, largest, ids, threads);
}
