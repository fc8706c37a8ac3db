// A decode step of a model of Llama's build as one call: one token in, the next one out, in one parallel region.
// Matrices are in bf16 and sums in fp32; a sum is rounded where torch rounds it.  Each thread reads its rows of a
// matrix one after the other, as one stream, which is what memory delivers fastest.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

namespace {

using Half = uint16_t;
typedef uint32_t Words __attribute__((vector_size(32), aligned(4)));
typedef float Floats __attribute__((vector_size(32), aligned(4)));
// Bytes ahead of which memory is asked for: two rows of a small model.
constexpr long kAhead = 2048;
constexpr long kWidest = 8192, kWidestHead = 256, kLongest = 16384, kThreads = 64;

inline float wide(Half number) {
    uint32_t bits = uint32_t(number) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// To the nearest, and to even between two.
inline Half narrow(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    return Half((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float rounded(float number) { return wide(narrow(number)); }

// A row's even and its odd elements, apart: a word of a matrix holds one of each.
struct Row {
    float even[kWidest], odd[kWidest];
    void set(long i, float number) { (i % 2 ? odd : even)[i / 2] = number; }
};

void product(const Half* matrix, const Row& row, long inner, long from, long to, float* out) {
    const Words upper = Words{} + 0xffff0000u;
    for (long r = from; r < to; r++) {
        const Half* at = matrix + r * inner;
        Floats even = {}, odd = {};
        for (long i = 0; i < inner; i += 16) {
            Words words = *(const Words*)(at + i);
            __builtin_prefetch((const char*)(at + i) + kAhead);
            even += (Floats)(words << 16) * *(const Floats*)(row.even + i / 2);
            odd += (Floats)(words & upper) * *(const Floats*)(row.odd + i / 2);
        }
        Floats both = even + odd;
        float sum = 0;
        for (int j = 0; j < 8; j++) sum += both[j];
        out[r] = rounded(sum);
    }
}

void norm(const float* from, const Half* weight, long width, float epsilon, Row& row) {
    float squares = 0;
    for (long i = 0; i < width; i++) squares += from[i] * from[i];
    float scale = 1 / std::sqrt(squares / width + epsilon);
    for (long i = 0; i < width; i++) row.set(i, rounded(wide(weight[i]) * rounded(from[i] * scale)));
}

void rotate(const float* from, const Half* cosine, const Half* sine, long width, float* to) {
    for (long i = 0; i < width; i++) {
        float other = i < width / 2 ? -from[i + width / 2] : from[i - width / 2];
        to[i] = rounded(rounded(from[i] * wide(cosine[i])) + rounded(other * wide(sine[i])));
    }
}

}  // namespace

// In the order of `kvbook.measuring.one_call`.
struct Layer {
    const Half *norm, *query, *key, *value, *output, *second_norm, *gate, *up, *down;
    Half *keys, *values;
};
struct Model {
    long layers, width, inner, heads, groups, head, vocabulary, room;
    float epsilon, scale;
    const Half *embedding, *norm, *lm_head;
};

extern "C" long kvbook_step(const Model* m, const Layer* layers, long token, long length, const Half* cosine,
                            const Half* sine, float* scratch, int threads) {
    const long width = m->width, head = m->head, queries = m->heads * head, keys = m->groups * head;
    float *hidden = scratch, *query = hidden + width, *key = query + queries, *value = key + keys, *gate = value + keys,
          *up = gate + m->inner, *mixed = up + m->inner, *added = mixed + queries, *logits = added + width;
    long best[kThreads];
    for (long i = 0; i < width; i++) hidden[i] = wide(m->embedding[token * width + i]);
#pragma omp parallel num_threads(threads)
    {
        const long me = omp_get_thread_num(), all = omp_get_num_threads();
        Row row;
        float sum[kWidest], scores[kLongest], turned[kWidestHead];
        auto times = [&](const Half* matrix, long inner, long rows, float* out) {
            product(matrix, row, inner, rows * me / all, rows * (me + 1) / all, out);
        };
        auto attend = [&](const Layer& layer, long group) {
            Half *all_keys = layer.keys + group * m->room * head, *all_values = layer.values + group * m->room * head;
            rotate(key + group * head, cosine, sine, head, turned);
            for (long i = 0; i < head; i++) {
                all_keys[length * head + i] = narrow(turned[i]);
                all_values[length * head + i] = narrow(value[group * head + i]);
            }
            const long each = m->heads / m->groups;
            for (long h = group * each; h < (group + 1) * each; h++) {
                rotate(query + h * head, cosine, sine, head, turned);
                float top = -1e30f, total = 0, out[kWidestHead] = {};
                for (long j = 0; j <= length; j++) {
                    float dot = 0;
                    for (long i = 0; i < head; i++) dot += turned[i] * wide(all_keys[j * head + i]);
                    scores[j] = dot * m->scale;
                    top = std::fmax(top, scores[j]);
                }
                for (long j = 0; j <= length; j++) total += scores[j] = std::exp(scores[j] - top);
                for (long j = 0; j <= length; j++)
                    for (long i = 0; i < head; i++) out[i] += scores[j] / total * wide(all_values[j * head + i]);
                for (long i = 0; i < head; i++) mixed[h * head + i] = rounded(out[i]);
            }
        };
        for (long l = 0; l < m->layers; l++) {
            const Layer& layer = layers[l];
            norm(hidden, layer.norm, width, m->epsilon, row);
            times(layer.query, width, queries, query);
            times(layer.key, width, keys, key);
            times(layer.value, width, keys, value);
#pragma omp barrier
            for (long group = me; group < m->groups; group += all) attend(layer, group);
#pragma omp barrier
            for (long i = 0; i < queries; i++) row.set(i, mixed[i]);
            times(layer.output, queries, width, added);
#pragma omp barrier
            for (long i = 0; i < width; i++) sum[i] = rounded(hidden[i] + added[i]);
            norm(sum, layer.second_norm, width, m->epsilon, row);
            times(layer.gate, width, m->inner, gate);
            times(layer.up, width, m->inner, up);
            // Of the rows that this thread has just written.
            for (long i = m->inner * me / all; i < m->inner * (me + 1) / all; i++)
                up[i] = rounded(rounded(gate[i] / (1 + std::exp(-gate[i]))) * up[i]);
#pragma omp barrier
            for (long i = 0; i < m->inner; i++) row.set(i, up[i]);
            times(layer.down, m->inner, width, added);
#pragma omp barrier
            for (long i = me; i < width; i += all) hidden[i] = rounded(sum[i] + added[i]);
#pragma omp barrier
        }
        norm(hidden, m->norm, width, m->epsilon, row);
        times(m->lm_head, width, m->vocabulary, logits);
        long first = m->vocabulary * me / all;
        for (long i = first; i < m->vocabulary * (me + 1) / all; i++) first = logits[i] > logits[first] ? i : first;
        best[me] = first;
    }
    long top = best[0];
    for (int t = 1; t < threads; t++) top = logits[best[t]] > logits[top] ? best[t] : top;
    return top;
}
