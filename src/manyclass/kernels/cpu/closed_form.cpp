// The work between the matrix products of kernels/closed_form.py: one pass forward and one backward.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exponential.h"

namespace {

// Up to this number of scores a second thread takes longer to wake than it saves.
constexpr int64_t kSerialScores = 16384;

// The product of this number of factors, each at most 2, does not overflow in float32.
constexpr int64_t kFactors = 96;

template <typename T>
constexpr T kEmpty = -std::numeric_limits<T>::infinity();

// A hash table from a class to the slots that hold it: chains of slots whose ids share a bucket.
class Slots {
  public:
    Slots(const int64_t* ids, int64_t k) : ids_(ids), next_(k) {
        while ((int64_t{1} << bits_) < 2 * k) ++bits_;
        head_.assign(size_t{1} << bits_, -1);
        for (int64_t j = 0; j < k; ++j) {
            int32_t& head = head_[bucket(ids[j])];
            next_[j] = head;
            head = static_cast<int32_t>(j);
        }
    }

    template <typename Visit>
    void of(int64_t id, Visit visit) const {
        for (int32_t j = head_[bucket(id)]; j >= 0; j = next_[j])
            if (ids_[j] == id) visit(j);
    }

  private:
    size_t bucket(int64_t id) const { return (static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15u) >> (64 - bits_); }

    const int64_t* ids_;
    int bits_ = 4;
    std::vector<int32_t> head_, next_;
};

// A draw that the batch shares, with the tables that score it.
template <typename T>
struct Draw {
    int64_t batch, k, dim, num_excluded;
    const T *hidden, *target_rows, *bias;
    const int64_t *target, *ids, *excluded;
    // Bias and log κ, added to every score of a slot; -inf for an empty one.
    std::vector<T> offset;
    Slots slots;
    // The first slot, or k plus the first example, whose class has no bias in the table; -1: there is none.
    int64_t outside = -1;

    Draw(int64_t batch, int64_t k, int64_t dim, const T* hidden, const T* target_rows, const T* bias, int64_t classes,
         const int64_t* target, const int64_t* ids, const double* log_kappa, const int64_t* excluded,
         int64_t num_excluded, bool kappa)
        : batch(batch), k(k), dim(dim), num_excluded(num_excluded), hidden(hidden), target_rows(target_rows),
          bias(bias), target(target), ids(ids), excluded(excluded), offset(k), slots(ids, num_excluded ? k : 0) {
        const auto lacks_bias = [=](int64_t id) {
            return bias && static_cast<uint64_t>(id) >= static_cast<uint64_t>(classes);
        };
        for (int64_t b = 0; b < batch && outside < 0; ++b)
            if (lacks_bias(target[b])) outside = k + b;
        for (int64_t j = 0; j < k; ++j) {
            if (lacks_bias(ids[j])) {
                outside = j;
                return;
            }
            const bool empty = std::isinf(log_kappa[j]) && log_kappa[j] < 0;
            const double own = bias ? static_cast<double>(bias[ids[j]]) : 0.0;
            offset[j] = empty ? kEmpty<T> : static_cast<T>(own + (kappa ? log_kappa[j] : 0.0));
        }
    }

    // The target's score.
    T own(int64_t b) const {
        const T* const h = hidden + b * dim;
        const T* const w = target_rows + b * dim;
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dim; ++d) sum += h[d] * w[d];
        return bias ? sum + bias[target[b]] : sum;
    }

    // Turns inner products into scores, -inf if the slot is empty or the example excludes its class; returns the
    // largest.
    T score(int64_t b, T* row) const {
        for (int64_t e = 0; e < num_excluded; ++e)
            slots.of(excluded[b * num_excluded + e], [row](int32_t j) { row[j] = kEmpty<T>; });
        const T* const shift = offset.data();
        T most = kEmpty<T>;
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < k; ++j) {
            // The sum of an infinite score and the offset of an empty slot would be NaN.
            const T score = shift[j] == kEmpty<T> ? kEmpty<T> : row[j] + shift[j];
            row[j] = score;
            most = score > most ? score : most;
        }
        return most;
    }
};

// Each of the two forms of forms.py turns the inner products [B, K] into ∂loss/∂s in place, and writes the losses [B]
// and ∂loss/∂s(target) [B].

// loss = -s(target) + log([sums_target] exp s(target) + Σ_j exp s_j); the scores include log κ.
template <typename T>
void log_sum_exp(const Draw<T>& draw, T* scores, bool sums_target, T* loss, T* target_gradient, int threads) {
    const int64_t k = draw.k;
#pragma omp parallel for num_threads(threads) schedule(static) if (draw.batch * k > kSerialScores)
    for (int64_t b = 0; b < draw.batch; ++b) {
        T* const row = scores + b * k;
        const T own = draw.own(b);
        const T greatest = draw.score(b, row);
        const T most = sums_target && !(own < greatest) ? own : greatest;
        if (most == kEmpty<T> && !sums_target &&
            std::all_of(row, row + k, [](T score) { return score == kEmpty<T>; })) {
            // An empty draw has no Z̃: loss and gradient are 0. All scores are checked, since a maximum over NaN may
            // be -inf too.
            std::fill(row, row + k, T{0});
            loss[b] = target_gradient[b] = 0;
            continue;
        }
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < k; ++j) {
            const T u = exponential(row[j] - most);
            row[j] = u;
            sum += u;
        }
        const T target_u = sums_target ? std::exp(own - most) : T{0};
        const T z = sum + target_u;
        const T share = 1 / z;
#pragma omp simd
        for (int64_t j = 0; j < k; ++j) row[j] *= share;
        loss[b] = most + std::log(z) - own;
        target_gradient[b] = target_u * share - 1;
    }
}

// loss = [positive] softplus(-s(target)) + Σ_j φ(s_j - [paired] s(target) + margin). The sum over n slots is divided by
// n if `mean`; the loss is 0 if all slots are empty. φ is softplus, or relu if `hinge`.
template <typename T>
void pair_sum(const Draw<T>& draw, T* scores, T margin, bool paired, bool positive, bool mean, bool hinge, T* loss,
              T* target_gradient, int threads) {
    const int64_t k = draw.k;
#pragma omp parallel for num_threads(threads) schedule(static) if (draw.batch * k > kSerialScores)
    for (int64_t b = 0; b < draw.batch; ++b) {
        T* const row = scores + b * k;
        const T own = draw.own(b);
        draw.score(b, row);
        const T shift = margin - (paired ? own : T{0});
        T number = 0, total = 0, pull = 0;
        for (int64_t begin = 0; begin < k; begin += kFactors) {
            const int64_t end = std::min(begin + kFactors, k);
            T above = 0, product = 1, slopes = 0, slots = 0;
#pragma omp simd reduction(+ : above, slopes, slots) reduction(* : product)
            for (int64_t j = begin; j < end; ++j) {
                const T x = row[j] + shift;
                const T below = x > 0 ? -x : x;
                // softplus(x) = max(x, 0) + log(1 + exp -|x|); the logarithm is taken of many factors at once.
                const T u = hinge ? T{0} : exponential(below);
                const T soft = x > 0 ? 1 / (1 + u) : u / (1 + u);
                const T hard = x > 0 ? T{1} : T{0};
                const T slope = hinge ? (x == x ? hard : x) : soft;
                slots += row[j] == kEmpty<T> ? T{0} : T{1};
                above += x > 0 ? x : x == x ? T{0} : x;
                product *= 1 + u;
                slopes += slope;
                row[j] = slope;
            }
            number += slots;
            total += above + std::log(product);
            pull += slopes;
        }
        if (number == 0) {
            std::fill(row, row + k, T{0});
            // A NaN score of the target stays visible.
            loss[b] = target_gradient[b] = own == own ? T{0} : own;
            continue;
        }
        const T share = mean ? 1 / number : T{1};
        if (mean) {
#pragma omp simd
            for (int64_t j = 0; j < k; ++j) row[j] *= share;
        }
        loss[b] = share * total;
        target_gradient[b] = paired ? -share * pull : T{0};
        if (positive) {
            const T u = std::exp(own > 0 ? -own : own);
            loss[b] += std::log1p(u) + (own > 0 ? T{0} : -own);
            target_gradient[b] -= own > 0 ? u / (1 + u) : 1 / (1 + u);
        }
    }
}

// From ∂loss/∂s, here `gradient` [B, K] and `target_gradient` [B], and the gradient `grad` [B] of the losses, writes
//   grad_hidden, on entry gradient · rows: multiplied by grad, plus the target's part;
//   scaled_hidden = grad · hidden, the factor of the product that gives the gradients of the candidates' rows;
//   values [B, D], the gradients of the targets' rows; bias_values [B + K], of the targets' and candidates' biases.
// Outputs that are not wanted are null.
template <typename T>
void pull_back(const T* gradient, int64_t batch, int64_t k, const T* target_gradient, const T* grad, const T* hidden,
               const T* target_rows, int64_t dim, T* grad_hidden, T* scaled_hidden, T* values, T* bias_values,
               int threads) {
#pragma omp parallel num_threads(threads) if (batch * k > kSerialScores)
    {
#pragma omp for schedule(static) nowait
        for (int64_t b = 0; b < batch; ++b) {
            const T all = grad[b], own = target_gradient[b] * all;
            const T* const h = hidden + b * dim;
            const T* const w = target_rows + b * dim;
            if (bias_values) bias_values[b] = own;
            if (grad_hidden) {
                T* const out = grad_hidden + b * dim;
#pragma omp simd
                for (int64_t d = 0; d < dim; ++d) out[d] = all * out[d] + own * w[d];
            }
            if (values) {
                T* const factor = scaled_hidden + b * dim;
                T* const out = values + b * dim;
#pragma omp simd
                for (int64_t d = 0; d < dim; ++d) {
                    factor[d] = all * h[d];
                    out[d] = own * h[d];
                }
            }
        }
        if (bias_values) {
            constexpr int64_t kColumns = 256;
#pragma omp for schedule(static)
            for (int64_t begin = 0; begin < k; begin += kColumns) {
                const int64_t columns = std::min(kColumns, k - begin);
                T sum[kColumns] = {};
                for (int64_t b = 0; b < batch; ++b) {
                    const T all = grad[b];
                    const T* const row = gradient + b * k + begin;
#pragma omp simd
                    for (int64_t j = 0; j < columns; ++j) sum[j] += all * row[j];
                }
                std::copy(sum, sum + columns, bias_values + batch + begin);
            }
        }
    }
}

}  // namespace

#define DRAW(T)                                                                                                        \
    int64_t batch, int64_t k, const T *hidden, const T *target_rows, int64_t dim, const T *bias, int64_t classes,      \
        const int64_t *target, const int64_t *ids, const double *log_kappa, const int64_t *excluded,                   \
        int64_t num_excluded
#define CLOSED_FORM(SUFFIX, T)                                                                                         \
    extern "C" int64_t manyclass_log_sum_exp_##SUFFIX(T* scores, DRAW(T), int sums_target, int kappa, T* loss,         \
                                                      T* target_gradient, int threads) {                               \
        const Draw<T> draw(batch, k, dim, hidden, target_rows, bias, classes, target, ids, log_kappa, excluded,        \
                           num_excluded, kappa != 0);                                                                  \
        if (draw.outside < 0) log_sum_exp(draw, scores, sums_target != 0, loss, target_gradient, threads);             \
        return draw.outside;                                                                                           \
    }                                                                                                                  \
    extern "C" int64_t manyclass_pair_sum_##SUFFIX(T* scores, DRAW(T), double margin, int paired, int positive,        \
                                                   int mean, int hinge, T* loss, T* target_gradient, int threads) {    \
        const Draw<T> draw(batch, k, dim, hidden, target_rows, bias, classes, target, ids, log_kappa, excluded,        \
                           num_excluded, false);                                                                       \
        if (draw.outside < 0)                                                                                          \
            pair_sum(draw, scores, static_cast<T>(margin), paired != 0, positive != 0, mean != 0, hinge != 0, loss,    \
                     target_gradient, threads);                                                                        \
        return draw.outside;                                                                                           \
    }                                                                                                                  \
    extern "C" void manyclass_pull_back_##SUFFIX(const T* gradient, int64_t batch, int64_t k,                          \
                                                 const T* target_gradient, const T* grad, const T* hidden,             \
                                                 const T* target_rows, int64_t dim, T* grad_hidden, T* scaled_hidden,  \
                                                 T* values, T* bias_values, int threads) {                             \
        pull_back<T>(gradient, batch, k, target_gradient, grad, hidden, target_rows, dim, grad_hidden, scaled_hidden,  \
                     values, bias_values, threads);                                                                    \
    }
CLOSED_FORM(float32, float)
CLOSED_FORM(float64, double)
