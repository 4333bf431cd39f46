// The work between the matrix products of kernels/all_classes.py: one pass over the scores of a run of classes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "exponential.h"

namespace {

// Up to this number of scores a second thread takes longer to wake than it saves.
constexpr int64_t kSerialScores = 16384;

// Turns inner products [B, n] with classes start .. start + n - 1 into exp(s - shift) in place, where s adds the bias
// [n] and is -inf for the classes that an example excludes [B, E].
// If `log_sum` is null, `shift` [B] is given. Otherwise it is the largest score of the example, and log_sum [B] is the
// log of Σ exp s; the score of a target among these classes is written to target_score [B].
template <typename T>
void exponentials(T* scores, int64_t batch, int64_t n, int64_t start, const T* bias, const int64_t* target,
                  const int64_t* excluded, int64_t num_excluded, T* shift, T* log_sum, T* target_score, int threads) {
    constexpr T kEmpty = -std::numeric_limits<T>::infinity();
#pragma omp parallel for num_threads(threads) schedule(static) if (batch * n > kSerialScores)
    for (int64_t b = 0; b < batch; ++b) {
        T* const row = scores + b * n;
        for (int64_t e = 0; e < num_excluded; ++e) {
            const int64_t column = excluded[b * num_excluded + e] - start;
            if (column >= 0 && column < n) row[column] = kEmpty;
        }
        if (!log_sum) {
            const T all = shift[b];
#pragma omp simd
            for (int64_t j = 0; j < n; ++j) row[j] = exponential(row[j] + (bias ? bias[j] : T{0}) - all);
            continue;
        }
        T most = kEmpty;
        if (bias) {
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < n; ++j) {
                const T score = row[j] + bias[j];
                row[j] = score;
                most = score > most ? score : most;
            }
        } else {
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < n; ++j) most = row[j] > most ? row[j] : most;
        }
        const int64_t own = target[b] - start;
        if (own >= 0 && own < n) target_score[b] = row[own];
        shift[b] = most;
        // All scores are checked, since a maximum over NaN may be -inf too.
        if (most == kEmpty && std::all_of(row, row + n, [=](T score) { return score == kEmpty; })) {
            std::fill(row, row + n, T{0});
            log_sum[b] = kEmpty;
            continue;
        }
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; ++j) {
            const T u = exponential(row[j] - most);
            row[j] = u;
            sum += u;
        }
        log_sum[b] = most + std::log(sum);
    }
}

}  // namespace

#define EXACT(SUFFIX, T)                                                                                               \
    extern "C" void manyclass_exponentials_##SUFFIX(T* scores, int64_t batch, int64_t n, int64_t start, const T* bias, \
                                                    const int64_t* target, const int64_t* excluded,                    \
                                                    int64_t num_excluded, T* shift, T* log_sum, T* target_score,       \
                                                    int threads) {                                                     \
        exponentials<T>(scores, batch, n, start, bias, target, excluded, num_excluded, shift, log_sum, target_score,   \
                        threads);                                                                                      \
    }
EXACT(float32, float)
EXACT(float64, double)
