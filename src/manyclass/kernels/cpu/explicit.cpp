// The targets of the batch as explicit classes, in front of a draw: samplers/explicit.py.

#include <algorithm>
#include <cstdint>
#include <limits>

// Writes the targets in ascending order, log κ = 0 for the first copy of each and -inf for the others, then the drawn
// classes, -inf for those among the targets.
extern "C" void manyclass_put_in_front(const int64_t* target, int64_t batch, const int64_t* ids,
                                       const double* log_kappa, int64_t k, int64_t* out_ids, double* out_log_kappa) {
    constexpr double kEmpty = -std::numeric_limits<double>::infinity();
    std::copy(target, target + batch, out_ids);
    std::sort(out_ids, out_ids + batch);
    for (int64_t i = 0; i < batch; ++i) out_log_kappa[i] = i > 0 && out_ids[i] == out_ids[i - 1] ? kEmpty : 0.0;
    for (int64_t j = 0; j < k; ++j) {
        out_ids[batch + j] = ids[j];
        out_log_kappa[batch + j] = std::binary_search(out_ids, out_ids + batch, ids[j]) ? kEmpty : log_kappa[j];
    }
}
