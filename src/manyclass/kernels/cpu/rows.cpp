// Row optimisers of optim/: repeated rows are summed once, then each row is updated in place.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace {

// Number of rows by which memory is prefetched ahead of its use.
constexpr int64_t kRowsAhead = 3;

// The distinct ids of a gradient in the order of their first places, each with the chain of its places.
struct Groups {
    std::vector<int64_t> first;
    std::vector<int64_t> next;
    // The first place whose id is not in [0, classes); -1: there is none.
    int64_t outside = -1;

    Groups(const int64_t* ids, int64_t number, int64_t classes) : next(number, -1) {
        int bits = 4;
        while ((int64_t{1} << bits) < 2 * number) ++bits;
        const size_t mask = (size_t{1} << bits) - 1;
        std::vector<int64_t> slot(mask + 1, -1), last(number);
        first.reserve(number);
        for (int64_t n = 0; n < number; ++n) {
            if (static_cast<uint64_t>(ids[n]) >= static_cast<uint64_t>(classes)) {
                outside = n;
                return;
            }
            size_t at = (static_cast<uint64_t>(ids[n]) * 0x9E3779B97F4A7C15u) >> (64 - bits);
            while (slot[at] >= 0 && ids[slot[at]] != ids[n]) at = (at + 1) & mask;
            const int64_t head = slot[at];
            if (head < 0) {
                slot[at] = n;
                first.push_back(n);
                last[n] = n;
            } else {
                next[last[head]] = n;
                last[head] = n;
            }
        }
    }
};

// Calls update(id, gradient) for each distinct row; the gradient [dim] is the sum over the places of the row.
// The next rows of `tables` [classes, dim] are prefetched. Returns the first place whose id is outside the tables, in
// which case nothing is updated, or -1.
template <typename T, typename Update>
int64_t each_row(const int64_t* ids, int64_t number, int64_t classes, const T* values, int64_t dim,
                 std::initializer_list<T*> tables, int threads, Update update) {
    const Groups groups(ids, number, classes);
    if (groups.outside >= 0) return groups.outside;
    const int64_t rows = static_cast<int64_t>(groups.first.size());
#pragma omp parallel num_threads(threads) if (rows * dim > 16384)
    {
        std::vector<T> sum(dim);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; ++r) {
            if (r + kRowsAhead < rows)
                for (T* table : tables) {
                    const T* const next = table + ids[groups.first[r + kRowsAhead]] * dim;
                    for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(next + d, 1);
                }
            const int64_t head = groups.first[r];
            const T* gradient = values + head * dim;
            if (groups.next[head] >= 0) {
                std::copy(gradient, gradient + dim, sum.begin());
                for (int64_t n = groups.next[head]; n >= 0; n = groups.next[n]) {
                    const T* const more = values + n * dim;
#pragma omp simd
                    for (int64_t d = 0; d < dim; ++d) sum[d] += more[d];
                }
                gradient = sum.data();
            }
            update(ids[head], gradient);
        }
    }
    return -1;
}

template <typename T>
int64_t adagrad(T* weight, T* total, int64_t classes, const int64_t* ids, int64_t number, const T* values, int64_t dim,
                double rate, double eps, bool by_row, int threads) {
    const T lr = static_cast<T>(rate), small = static_cast<T>(eps);
    if (by_row) {
        return each_row(ids, number, classes, values, dim, {weight}, threads, [=](int64_t id, const T* g) {
            T square = 0;
#pragma omp simd reduction(+ : square)
            for (int64_t d = 0; d < dim; ++d) square += g[d] * g[d];
            total[id] += square / static_cast<T>(dim);
            const T step = lr / (std::sqrt(total[id]) + small);
            T* const w = weight + id * dim;
#pragma omp simd
            for (int64_t d = 0; d < dim; ++d) w[d] -= step * g[d];
        });
    }
    return each_row(ids, number, classes, values, dim, {weight, total}, threads, [=](int64_t id, const T* g) {
        T* const w = weight + id * dim;
        T* const t = total + id * dim;
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) {
            t[d] += g[d] * g[d];
            w[d] -= lr * g[d] / (std::sqrt(t[d]) + small);
        }
    });
}

// Adam with a step count for each row: `steps` counts the updates of a row and corrects its moments.
template <typename T>
int64_t adam(T* weight, T* first, T* second, float* steps, int64_t classes, const int64_t* ids, int64_t number,
             const T* values, int64_t dim, double rate, double beta1, double beta2, double eps, int threads) {
    // 1 - β is taken in float64: in float32 1 - 0.999 has four digits.
    const T new1 = static_cast<T>(1 - beta1), new2 = static_cast<T>(1 - beta2), old2 = static_cast<T>(beta2);
    const T small = static_cast<T>(eps);
    return each_row(ids, number, classes, values, dim, {weight, first, second}, threads, [=](int64_t id, const T* g) {
        T* const w = weight + id * dim;
        T* const m = first + id * dim;
        T* const v = second + id * dim;
        const double age = static_cast<double>(steps[id] += 1);
        const T step = static_cast<T>(rate / (1 - std::pow(beta1, age)));
        const T spread = static_cast<T>(1 / std::sqrt(1 - std::pow(beta2, age)));
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) {
            m[d] += new1 * (g[d] - m[d]);
            v[d] = old2 * v[d] + new2 * g[d] * g[d];
            w[d] -= step * m[d] / (std::sqrt(v[d]) * spread + small);
        }
    });
}

}  // namespace

#define ROWS(SUFFIX, T)                                                                                                \
    extern "C" int64_t manyclass_adagrad_##SUFFIX(T* weight, T* total, int64_t classes, const int64_t* ids,            \
                                                  int64_t number, const T* values, int64_t dim, double rate,           \
                                                  double eps, int by_row, int threads) {                               \
        return adagrad<T>(weight, total, classes, ids, number, values, dim, rate, eps, by_row != 0, threads);          \
    }                                                                                                                  \
    extern "C" int64_t manyclass_adam_##SUFFIX(T* weight, T* first, T* second, float* steps, int64_t classes,          \
                                               const int64_t* ids, int64_t number, const T* values, int64_t dim,       \
                                               double rate, double beta1, double beta2, double eps, int threads) {     \
        return adam<T>(weight, first, second, steps, classes, ids, number, values, dim, rate, beta1, beta2, eps,       \
                       threads);                                                                                       \
    }
ROWS(float32, float)
ROWS(float64, double)
