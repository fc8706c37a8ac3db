// Products of rows with a matrix, summed in fp32, in which every element is added up in one order, whatever comes with
// it: sixteen sums side by side, the k-th term in the sum k mod 16, and then these in pairs, (i, i + 8), (i, i + 4),
// and so on. Each of the sixteen is a sum of sums, of the terms of one stretch each; what is left over at the end is a
// stretch of its own. A row's bits so depend neither on the number of rows, nor on threads, nor on how wide the
// processor's vectors are. Rows, matrix and products are in fp32, or in 16 bits: converted where they are read, which
// rounds nothing, and rounded once where they are written.  ELEMENT is Float, Bf16 or Fp16. One alone is compiled at a
// time, for with several in one file the compiler makes the first one slower.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr long LANES = 16;
// The more terms one sum has, the larger its error; the shorter the stretches, the longer it takes.
constexpr long STRETCH = 640;
typedef float Eight __attribute__((vector_size(32)));

#if defined(__clang__) || __GNUC__ >= 12
#define PICKED(a, b, type, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICKED(a, b, type, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif
typedef int EightPlaces __attribute__((vector_size(32)));

struct Float {
  float number;
};
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
typedef ELEMENT Element;

inline float value(const Float* from) { return from->number; }
inline float value(const Bf16* from) {
  const uint32_t bits = (uint32_t)from->bits << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
inline void put(Float* to, float number) { to->number = number; }
// To the nearest, and to even between two.
inline void put(Bf16* to, float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  to->bits = number != number ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#if defined(__F16C__)
inline float value(const Fp16* from) { return _cvtsh_ss(from->bits); }
inline void put(Fp16* to, float number) { to->bits = _cvtss_sh(number, 0); }
#endif

// Neighbours are added: a pair's totals from the last two sums of eight numbers.
inline Eight pairs_added(Eight a, Eight b) {
  return PICKED(a, b, EightPlaces, 0, 2, 4, 6, 8, 10, 12, 14) + PICKED(a, b, EightPlaces, 1, 3, 5, 7, 9, 11, 13, 15);
}

#if defined(__AVX512F__)

typedef float Vector __attribute__((vector_size(64)));
typedef int Places __attribute__((vector_size(64)));
// As many sums as there are registers for, beside those that are read.
constexpr int ROWS = 4, COLUMNS = 6;

inline Vector load(const float* from) { return (Vector)_mm512_loadu_ps(from); }
inline Vector load(const Float* from) { return load(&from->number); }
inline Vector load(const Bf16* from) {
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
inline Vector load(const Fp16* from) { return (Vector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline Vector plus_product(Vector sum, Vector a, Vector b) {
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}

inline Vector halved(Vector a, Vector b) {
  return PICKED(a, b, Places, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         PICKED(a, b, Places, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inline Vector quartered(Vector a, Vector b) {
  return PICKED(a, b, Places, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         PICKED(a, b, Places, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
inline Vector paired(Vector a, Vector b) {
  return PICKED(a, b, Places, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
         PICKED(a, b, Places, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}

// The totals of eight times sixteen sums.
inline Eight totals(const Vector* s) {
  const Vector p = paired(quartered(halved(s[0], s[1]), halved(s[2], s[3])),
                          quartered(halved(s[4], s[5]), halved(s[6], s[7])));
  float pairs[LANES];
  std::memcpy(pairs, &p, sizeof p);
  Eight low, high;
  std::memcpy(&low, pairs, sizeof low);
  std::memcpy(&high, pairs + 8, sizeof high);
  return pairs_added(low, high);
}

#else

typedef Eight Vector;
constexpr int ROWS = 3, COLUMNS = 4;

inline Vector load(const float* from) {
  Vector out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline Vector load(const Float* from) { return load(&from->number); }
#if defined(__AVX2__)
inline Vector load(const Bf16* from) {
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
inline Vector load(const Fp16* from) { return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
#endif
inline Vector plus_product(Vector sum, Vector a, Vector b) {
#if defined(__AVX2__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  for (int i = 0; i < 8; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
  return sum;
#endif
}

inline Eight quartered(Eight a, Eight b) {
  return PICKED(a, b, EightPlaces, 0, 1, 2, 3, 8, 9, 10, 11) + PICKED(a, b, EightPlaces, 4, 5, 6, 7, 12, 13, 14, 15);
}
inline Eight paired(Eight a, Eight b) {
  return PICKED(a, b, EightPlaces, 0, 1, 4, 5, 8, 9, 12, 13) + PICKED(a, b, EightPlaces, 2, 3, 6, 7, 10, 11, 14, 15);
}

// The totals of eight times sixteen sums.
inline Eight totals(const Vector* s) {
  Eight half[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) half[i] = s[2 * i] + s[2 * i + 1];
  return pairs_added(paired(quartered(half[0], half[1]), quartered(half[2], half[3])),
                     paired(quartered(half[4], half[5]), quartered(half[6], half[7])));
}

#endif

constexpr int WIDTH = sizeof(Vector) / sizeof(float), PARTS = LANES / WIDTH;

struct Operands {
  const float* x;
  long x_row;
  long w_column;
  const Element* bias;
  Element* out;
  long out_row;
  long inner;
};

// Sums of products in R times C vectors, one to each lane at every sixteenth number from the first on.
template <int R, int C, class W>
inline void sum_up(Vector* sums, const float* x, long x_row, const W* w, long w_column, long inner) {
  Vector kept[R * C] = {};
  for (long k = 0; k < inner; k += LANES) {
    Vector a[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) a[r] = load(x + r * x_row + k);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      const Vector b = load(w + c * w_column + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) kept[r * C + c] = plus_product(kept[r * C + c], a[r], b);
    }
  }
#pragma GCC unroll 64
  for (int i = 0; i < R * C; i++) sums[i * PARTS] = kept[i];
}

// Vectors narrower than sixteen numbers take one part of them after the other: more sums then fit into the registers.
template <int R, int C, class W>
inline void sum_all(Vector* sums, const float* x, long x_row, const W* w, long w_column, long inner) {
#pragma GCC unroll 2
  for (int p = 0; p < PARTS; p++) sum_up<R, C>(sums + p, x + p * WIDTH, x_row, w + p * WIDTH, w_column, inner);
}

template <int R, int C, class W>
inline void add(Vector* sums, const float* x, long x_row, const W* w, long w_column, long inner) {
  Vector more[R * C * PARTS];
  sum_all<R, C>(more, x, x_row, w, w_column, inner);
  for (int i = 0; i < R * C * PARTS; i++) sums[i] += more[i];
}

// One row and one column, as one stream of the matrix, which is what memory delivers fastest.
// Bytes ahead of which memory is asked for.
constexpr long AHEAD = 2048;
inline void sum_one(Vector* sums, const float* x, const Element* w, long inner) {
  for (long first = 0; first < inner; first += STRETCH) {
    Vector kept[PARTS] = {};
    for (long k = first; k < std::min(inner, first + STRETCH); k += LANES) {
      __builtin_prefetch((const char*)(w + k) + AHEAD);
#pragma GCC unroll 2
      for (int p = 0; p < PARTS; p++)
        kept[p] = plus_product(kept[p], load(x + k + p * WIDTH), load(w + k + p * WIDTH));
    }
    for (int p = 0; p < PARTS; p++) sums[p] = first ? sums[p] + kept[p] : kept[p];
  }
}

// Plain: of one stretch, with nothing left over. Its sums stay in registers, which they do not where more may be added.
template <int R, int C, bool PLAIN>
__attribute__((noinline)) void tile(const Operands& of, long row, long column, const Element* w) {
  constexpr int EIGHTS = (R * C + 7) / 8;
  Vector sums[EIGHTS * 8 * PARTS] = {};
  const float* x = of.x + row * of.x_row;
  const long x_row = of.x_row, w_column = of.w_column, whole = of.inner / LANES * LANES;
  // Where vectors are narrow, to take several columns at once is slower: each number is read in two passes.
  constexpr bool ONE_BY_ONE = R == 1 && PARTS > 1;
  if constexpr (ONE_BY_ONE)
    for (int c = 0; c < C; c++) sum_one(sums + c * PARTS, x, w + c * w_column, whole);
  else
    sum_all<R, C>(sums, x, x_row, w, w_column, PLAIN ? of.inner : std::min(whole, STRETCH));
  if constexpr (!PLAIN) {
    for (long first = STRETCH; first < whole && !ONE_BY_ONE; first += STRETCH)
      add<R, C>(sums, x + first, x_row, w + first, w_column, std::min(whole - first, STRETCH));
    if (const long rest = of.inner - whole) {
      float last_x[R * LANES] = {}, last_w[C * LANES] = {};
      for (int r = 0; r < R; r++) std::memcpy(last_x + r * LANES, x + r * x_row + whole, rest * sizeof(float));
      for (int c = 0; c < C; c++)
        for (long k = 0; k < rest; k++) last_w[c * LANES + k] = value(w + c * w_column + whole + k);
      add<R, C>(sums, last_x, LANES, last_w, LANES, LANES);
    }
  }
  float done[EIGHTS * 8];
#pragma GCC unroll 8
  for (int i = 0; i < EIGHTS; i++) {
    const Eight eight = totals(sums + 8 * PARTS * i);
    std::memcpy(done + 8 * i, &eight, sizeof eight);
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++)
      put(of.out + (row + r) * of.out_row + column + c,
          done[r * C + c] + (of.bias ? value(of.bias + column + c) : 0.0f));
}

typedef void (*Tile)(const Operands&, long, long, const Element*);

// The tile of so many rows and columns, at most those of a full one.
template <int R, int C>
Tile of_size(long rows, long columns, bool plain) {
  if constexpr (R > 1) if (rows < R) return of_size<R - 1, C>(rows, columns, plain);
  if constexpr (C > 1) if (columns < C) return of_size<R, C - 1>(rows, columns, plain);
  return plain ? tile<R, C, true> : tile<R, C, false>;
}

// A single row has registers for more columns.
constexpr int COLUMNS_OF_ONE = 8;
// So many columns are copied at once, and so many are summed at once that cannot be read one after the other.
constexpr int COPIED = 4 * COLUMNS, SUMMED = 128;
// Rows that are multiplied with one block of columns after the other: this many bytes of them stay in the second cache.
constexpr long GROUP = 1 << 18;

// One row times columns that lie side by side, in the same order; a whole line of the matrix is read at once.
void row_of_columns(const Operands& of, long column, long count, const Element* w, long w_inner) {
  float sums[LANES][SUMMED] = {}, kept[LANES][SUMMED];
  const long whole = of.inner / LANES * LANES;
  for (long first = 0; first < of.inner;) {
    const long stop = first < whole ? std::min(whole, first + STRETCH) : of.inner;
    std::memset(kept, 0, sizeof kept);
    for (long k = first; k < stop; k++) {
      float* its = kept[k % LANES];
      for (long c = 0; c < count; c++) its[c] = __builtin_fmaf(of.x[k], value(w + k * w_inner + c), its[c]);
    }
    for (int i = 0; i < LANES; i++)
      for (long c = 0; c < count; c++) sums[i][c] += kept[i][c];
    first = stop;
  }
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++)
      for (long c = 0; c < count; c++) sums[i][c] += sums[i + half][c];
  for (long c = 0; c < count; c++)
    put(of.out + column + c, sums[0][c] + (of.bias ? value(of.bias + column + c) : 0.0f));
}

inline const float* widened(const Float* x, long, std::vector<float>&, int) { return &x->number; }
template <class X>
const float* widened(const X* x, long n, std::vector<float>& room, int threads) {
  room.resize(n);
#pragma omp parallel for num_threads(threads) if (n > 1 << 15)
  for (long i = 0; i < n; i++) room[i] = value(x + i);
  return room.data();
}
}  // namespace

// out = x w + bias, with x of shape (rows, inner), w of (inner, columns) and bias of (columns,) or null; strides of w
// in elements. Where a column's numbers do not lie side by side, blocks of columns are copied first, but for a single
// row.
extern "C" void kvbook_product(const Element* x, const Element* w, long w_inner, long w_column, const Element* bias,
                               Element* out, long rows, long inner, long columns, int threads) {
  const bool plain = inner <= STRETCH && inner % LANES == 0;
  const bool copied = w_inner != 1, summed = copied && w_column == 1 && rows == 1;
  const long step = summed ? SUMMED : copied ? COPIED : rows == 1 ? COLUMNS_OF_ONE : COLUMNS;
  const long blocks = (columns + step - 1) / step;
  const long fit = GROUP / std::max<long>(inner * sizeof(float), 1) / ROWS;
  const long group = copied ? rows : std::max(fit, 1L) * ROWS;
  std::vector<float> room;
  const Operands of = {widened(x, rows * inner, room, threads), inner, copied ? inner : w_column,
                       bias, out, columns, inner};
  // Starting threads takes longer than a small product.
#pragma omp parallel num_threads(threads) if (rows * inner * columns > 1 << 15)
  {
    std::vector<Element> copy(copied && !summed ? step * inner : 0);
    for (long first = 0; first < rows; first += group) {
      const long end = std::min(first + group, rows);
#pragma omp for schedule(static) nowait
      for (long block = 0; block < blocks; block++) {
        const long column = block * step, count = std::min(step, columns - column);
        const Element* its = w + column * w_column;
        if (summed) {
          row_of_columns(of, column, count, its, w_inner);
          continue;
        }
        if (copied) {
          for (long k = 0; k < inner; k++)
            for (long c = 0; c < count; c++) copy[c * inner + k] = its[k * w_inner + c * w_column];
          its = copy.data();
        }
        if (rows == 1) {
          for (long c = 0; c < count; c += COLUMNS_OF_ONE)
            of_size<1, COLUMNS_OF_ONE>(1, count - c, plain)(of, 0, column + c, its + c * of.w_column);
          continue;
        }
        for (long row = first; row < end; row += ROWS)
          for (long c = 0; c < count; c += COLUMNS)
            of_size<ROWS, COLUMNS>(end - row, count - c, plain)(of, row, column + c, its + c * of.w_column);
      }
    }
  }
}
