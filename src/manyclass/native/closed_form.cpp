// What lies between the matrix products of kernels/closed_form.py, in one pass forward and one back.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

// Below so many scores a second thread takes longer to wake than it saves.
constexpr int64_t kSmall = 16384;

inline double exponential(double x) { return std::exp(x); }

// exp in float32 for x <= 0, within 2 ulp; a plain polynomial, so that the compiler can vectorise the loop around it.
inline float exponential(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;  // written so that NaN stays NaN
    const float n = std::floor(clamped * 1.44269504f + 0.5f);
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : y * power;
}

// Which slots hold a class: chains of slots whose ids share a bucket.
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

template <typename T>
void softmax(T* scores, int64_t batch, int64_t k, const T* hidden, const T* target_rows, int64_t dim, const T* bias,
             const int64_t* target, const int64_t* ids, const double* log_kappa, const int64_t* excluded,
             int64_t num_excluded, bool sums_target, bool weighs, T* loss, T* target_gradient, int threads) {
    constexpr T kEmpty = -std::numeric_limits<T>::infinity();
    // What is added to every score of a slot.
    std::vector<T> offset(k);
    for (int64_t j = 0; j < k; ++j) {
        const bool empty = std::isinf(log_kappa[j]) && log_kappa[j] < 0;
        const double own = bias ? static_cast<double>(bias[ids[j]]) : 0.0;
        offset[j] = empty ? kEmpty : static_cast<T>(own + (weighs ? log_kappa[j] : 0.0));
    }
    const Slots slots(ids, num_excluded ? k : 0);
    const T* const shift = offset.data();
#pragma omp parallel for num_threads(threads) schedule(static) if (batch * k > kSmall)
    for (int64_t b = 0; b < batch; ++b) {
        T* const row = scores + b * k;
        const T* const h = hidden + b * dim;
        const T* const w = target_rows + b * dim;
        for (int64_t e = 0; e < num_excluded; ++e)
            slots.of(excluded[b * num_excluded + e], [row](int32_t j) { row[j] = kEmpty; });
        T own = 0;
#pragma omp simd reduction(+ : own)
        for (int64_t d = 0; d < dim; ++d) own += h[d] * w[d];
        if (bias) own += bias[target[b]];
        T most = sums_target ? own : kEmpty;
#pragma omp simd reduction(max : most)
        for (int64_t j = 0; j < k; ++j) {
            // An infinite score in an empty slot would make NaN of the sum.
            const T score = shift[j] == kEmpty ? kEmpty : row[j] + shift[j];
            row[j] = score;
            most = score > most ? score : most;
        }
        if (most == kEmpty && !sums_target && std::all_of(row, row + k, [](T score) { return score == kEmpty; })) {
            // An empty draw has no Z̃: loss and gradient are 0. (A maximum over NaN may be -inf too.)
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

// From ∂loss/∂s, here `gradient` [B, K] and `target_gradient` [B], and the gradient `grad` [B] of the losses:
//   grad_hidden, on entry gradient · rows, gets the weight of its example and the target's part;
//   weighed = grad · hidden, the factor of the product that gives the gradients of the candidates' rows;
//   values [B, D], the gradients of the targets' rows; bias_values [B + K], of the targets' and candidates' biases.
// Outputs that are not wanted are null.
template <typename T>
void pull_back(const T* gradient, int64_t batch, int64_t k, const T* target_gradient, const T* grad, const T* hidden,
               const T* target_rows, int64_t dim, T* grad_hidden, T* weighed, T* values, T* bias_values, int threads) {
#pragma omp parallel num_threads(threads) if (batch * k > kSmall)
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
                T* const factor = weighed + b * dim;
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

#define CLOSED_FORM(SUFFIX, T)                                                                                         \
    extern "C" void manyclass_softmax_##SUFFIX(                                                                        \
        T* scores, int64_t batch, int64_t k, const T* hidden, const T* target_rows, int64_t dim, const T* bias,        \
        const int64_t* target, const int64_t* ids, const double* log_kappa, const int64_t* excluded,                   \
        int64_t num_excluded, int sums_target, int weighs, T* loss, T* target_gradient, int threads) {                 \
        softmax<T>(scores, batch, k, hidden, target_rows, dim, bias, target, ids, log_kappa, excluded, num_excluded,   \
                   sums_target != 0, weighs != 0, loss, target_gradient, threads);                                     \
    }                                                                                                                  \
    extern "C" void manyclass_pull_back_##SUFFIX(const T* gradient, int64_t batch, int64_t k,                          \
                                                 const T* target_gradient, const T* grad, const T* hidden,             \
                                                 const T* target_rows, int64_t dim, T* grad_hidden, T* weighed,        \
                                                 T* values, T* bias_values, int threads) {                             \
        pull_back<T>(gradient, batch, k, target_gradient, grad, hidden, target_rows, dim, grad_hidden, weighed,        \
                     values, bias_values, threads);                                                                    \
    }
CLOSED_FORM(float32, float)
CLOSED_FORM(float64, double)
