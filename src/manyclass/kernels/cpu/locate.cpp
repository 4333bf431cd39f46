// The search of samplers/_table.py: the class that owns each position of a line, and its mass.

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

// Number of positions handled together: while one waits for memory, the loads of the others are in flight.
constexpr int64_t kTogether = 32;

struct Table {
    const double* cumulative;
    int64_t classes;
    const double* intercept;
    const double* slope;
    int64_t stretches;
    double scale;
    int64_t widest;
    int64_t cells;
};

// The integer part of x, moved into [0, end), so that no position and no table leads outside the memory; 0 for NaN.
inline int64_t inside(double x, int64_t end) {
    const double last = static_cast<double>(end - 1), least = x > 0.0 ? x : 0.0;
    return static_cast<int64_t>(least < last ? least : last);
}

// The rank r with cumulative[r] <= position < cumulative[r + 1], searched from the guide's hint.
inline int64_t search(const Table& table, double position, int64_t rank) {
    for (int64_t width = table.widest; width > 0;) {
        const int64_t step = (width + 1) / 2;
        rank += table.cumulative[rank + step] <= position ? step : 0;
        width -= step;
    }
    // At the edge of a cell, the guide may have rounded a position into another cell than the search does.
    while (rank > 0 && table.cumulative[rank] > position) --rank;
    while (rank + 1 < table.classes && table.cumulative[rank + 1] <= position) ++rank;
    return rank;
}

// Calls found(i, id, mass) for each of `number` positions position_of(i).
template <typename Index, typename Position, typename Found>
void locate(const Table& table, const Index* guide, const Index* ids, int64_t number, int threads, Position position_of,
            Found found) {
    // A search that begins later would go beyond the table.
    const int64_t last = table.classes - 1 - table.widest;
#pragma omp parallel for num_threads(threads) if (number > 4 * kTogether)
    for (int64_t begin = 0; begin < number; begin += kTogether) {
        const int64_t end = std::min(begin + kTogether, number);
        int64_t place[kTogether];
        double position[kTogether], mass[kTogether];
        for (int64_t i = begin; i < end; ++i) {
            position[i - begin] = position_of(i);
            place[i - begin] = inside(position[i - begin] * table.scale, table.stretches);
            __builtin_prefetch(table.intercept + place[i - begin]);
            __builtin_prefetch(table.slope + place[i - begin]);
        }
        for (int64_t i = begin; i < end; ++i) {
            int64_t& here = place[i - begin];
            here = inside(table.intercept[here] + table.slope[here] * position[i - begin], table.cells);
            __builtin_prefetch(guide + here);
        }
        for (int64_t i = begin; i < end; ++i) {
            int64_t& here = place[i - begin];
            here = std::clamp<int64_t>(guide[here], 0, last);
            __builtin_prefetch(table.cumulative + here);
        }
        for (int64_t i = begin; i < end; ++i) {
            int64_t& rank = place[i - begin];
            rank = search(table, position[i - begin], rank);
            mass[i - begin] = table.cumulative[rank + 1] - table.cumulative[rank];
            if (ids) __builtin_prefetch(ids + rank);
        }
        for (int64_t i = begin; i < end; ++i) {
            const int64_t rank = place[i - begin];
            found(i, ids ? static_cast<int64_t>(ids[rank]) : rank, mass[i - begin]);
        }
    }
}

template <typename Position, typename Found>
void locate(const Table& table, const void* guide, const void* ids, int index_bytes, int64_t number, int threads,
            Position position, Found found) {
    if (index_bytes == 4)
        locate(table, static_cast<const int32_t*>(guide), static_cast<const int32_t*>(ids), number, threads, position,
               found);
    else
        locate(table, static_cast<const int64_t*>(guide), static_cast<const int64_t*>(ids), number, threads, position,
               found);
}

}  // namespace

extern "C" void manyclass_locate(const double* cumulative, int64_t classes, const double* intercept,
                                 const double* slope, int64_t stretches, double scale, int64_t widest,
                                 const void* guide, int64_t cells, const void* ids, int index_bytes,
                                 const double* position, int64_t number, int64_t* out_ids, double* out_mass,
                                 int threads) {
    const Table table{cumulative, classes, intercept, slope, stretches, scale, widest, cells};
    locate(
        table, guide, ids, index_bytes, number, threads, [=](int64_t i) { return position[i]; },
        [=](int64_t i, int64_t id, double mass) {
            out_ids[i] = id;
            out_mass[i] = mass;
        });
}

// The draw of samplers/systematic.py: certain classes with log κ = 0, then those under a comb of teeth `spacing` apart.
extern "C" void manyclass_comb(const double* cumulative, int64_t classes, const double* intercept, const double* slope,
                               int64_t stretches, double scale, int64_t widest, const void* guide, int64_t cells,
                               const void* ids, int index_bytes, const double* offset, double spacing, int64_t teeth,
                               const int64_t* certain, int64_t num_certain, int64_t* out_ids, double* out_log_kappa,
                               int threads) {
    const Table table{cumulative, classes, intercept, slope, stretches, scale, widest, cells};
    const double log_spacing = std::log(spacing), first = *offset;
    std::copy(certain, certain + num_certain, out_ids);
    std::fill(out_log_kappa, out_log_kappa + num_certain, 0.0);
    locate(
        table, guide, ids, index_bytes, teeth, threads, [=](int64_t i) { return (first + i) * spacing; },
        [=](int64_t i, int64_t id, double mass) {
            out_ids[num_certain + i] = id;
            out_log_kappa[num_certain + i] = log_spacing - std::log(mass);
        });
}
