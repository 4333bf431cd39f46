// The search of samplers/_cells.py: each example scores the cells of its best nodes, and the classes of its best cells.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "exponential.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 16;

inline float dot(const float* a, const float* b, int64_t dim) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < dim; ++d) sum += a[d] * b[d];
    return sum;
}

// log(exp(total) + Σ exp(x)), where all x are at most `most`.
float add(float total, const float* x, int64_t n, float most) {
    if (most == kNone) return total;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += exponential(x[i] - most);
    const float added = most + std::log(sum);
    const float high = std::max(total, added), low = std::min(total, added);
    return low == kNone ? high : high + std::log1p(std::exp(low - high));
}

// Finds the largest of n scores and takes them out; NaN counts as the least.
class Best {
  public:
    const std::vector<int32_t>& take(float* score, int64_t n, int64_t number) {
        most_.clear();
        for (int64_t start = 0; start < n; start += kBlock) {
            float most = kNone;
            const int64_t end = std::min(n, start + kBlock);
            for (int64_t i = start; i < end; ++i) {
                score[i] = score[i] > kNone ? score[i] : kNone;
                most = score[i] > most ? score[i] : most;
            }
            most_.push_back(most);
        }
        // As many scores as there are blocks with larger maxima are above that of a block.
        float bar = kNone;
        if (number < static_cast<int64_t>(most_.size())) {
            std::nth_element(most_.begin(), most_.begin() + number - 1, most_.end(), std::greater<float>());
            bar = most_[number - 1];
        }
        found_.clear();
        for (int64_t i = 0; i < n; ++i)
            if (score[i] >= bar) found_.push_back(static_cast<int32_t>(i));
        const auto before = [score](int32_t a, int32_t b) { return score[a] > score[b] || (score[a] == score[b] && a < b); };
        if (number < static_cast<int64_t>(found_.size())) {
            std::nth_element(found_.begin(), found_.begin() + number - 1, found_.end(), before);
            found_.resize(number);
        }
        // In ascending order memory is read in one direction.
        std::sort(found_.begin(), found_.end());
        for (const int32_t i : found_) score[i] = kNone;
        return found_;
    }

    static float largest(const float* score, int64_t n) {
        float most = kNone;
        for (int64_t i = 0; i < n; ++i) most = score[i] > most ? score[i] : most;
        return most;
    }

  private:
    std::vector<float> most_;
    std::vector<int32_t> found_;
};

}  // namespace

// Writes the best cells [batch, probes] of each example and log p of their classes [batch, probes, capacity]. The scores
// of the nodes are overwritten.
extern "C" void manyclass_probe(const float* hidden, int64_t batch, int64_t dim, float* node_scores, int64_t num_nodes,
                                int64_t nodes, const float* centroids, const float* levels, int64_t num_cells,
                                const int32_t* order, int64_t num_classes, const float* weight, const float* bias,
                                int64_t probes, int64_t* out_cells, float* out_log_p, int threads) {
    const int64_t per_node = num_cells / num_nodes, scored = nodes * per_node;
    const int64_t capacity = (num_classes + num_cells - 1) / num_cells;
#pragma omp parallel num_threads(threads) if (batch > 8)
    {
        Best best_nodes, best_cells;
        std::vector<float> scores(scored);
        std::vector<int64_t> cells(probes);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < batch; ++n) {
            const float* h = hidden + n * dim;
            float* node_score = node_scores + n * num_nodes;
            const std::vector<int32_t>& near = best_nodes.take(node_score, num_nodes, nodes);
            float log_z = add(kNone, node_score, num_nodes, Best::largest(node_score, num_nodes));
            for (int64_t t = 0; t < nodes; ++t) {
                const int64_t first = near[t] * per_node;
                for (int64_t j = 0; j < per_node; ++j)
                    scores[t * per_node + j] = dot(centroids + (first + j) * dim, h, dim) + levels[first + j];
            }
            const std::vector<int32_t>& chosen = best_cells.take(scores.data(), scored, probes);
            log_z = add(log_z, scores.data(), scored, Best::largest(scores.data(), scored));
            float* log_p = out_log_p + n * probes * capacity;
            for (int64_t p = 0; p < probes; ++p) {
                cells[p] = near[chosen[p] / per_node] * per_node + chosen[p] % per_node;
                // Rows of classes are anywhere in memory: ask for all of them before the first is needed.
                for (int64_t i = cells[p] * num_classes / num_cells; i < (cells[p] + 1) * num_classes / num_cells; ++i)
                    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(weight + order[i] * dim + d);
            }
            for (int64_t p = 0; p < probes; ++p) {
                const int64_t start = cells[p] * num_classes / num_cells;
                const int64_t size = (cells[p] + 1) * num_classes / num_cells - start;
                for (int64_t i = 0; i < capacity; ++i) {
                    float score = kNone;
                    if (i < size) {
                        const int64_t id = order[start + i];
                        score = dot(weight + id * dim, h, dim) + (bias ? bias[id] : 0.0f);
                    }
                    log_p[p * capacity + i] = score;
                }
                out_cells[n * probes + p] = cells[p];
            }
            const int64_t slots = probes * capacity;
            log_z = add(log_z, log_p, slots, Best::largest(log_p, slots));
            for (int64_t i = 0; i < slots; ++i) log_p[i] -= log_z;
        }
    }
}
