// A decoder layer over few rows in bf16, as one operation, and its parts: products, norms, picks.
//
// B rows of text, N new tokens in each, H query heads, G key-value heads, S keys, D head width. Sums are in float and every
// part is rounded where PyTorch rounds it, but for scores, which stay in float until they are weights.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

using at::Tensor;
using c10::BFloat16;
using Maybe = std::optional<Tensor>;

constexpr int64_t ALONE = 1 << 14;  // numbers that one thread works through sooner than two start
constexpr int BLOCK = 32;           // outputs of a product that are computed side by side
constexpr int AHEAD = 16;           // pairs of inputs by which weights are fetched before they are needed
constexpr int TOGETHER = 12;        // rows of a product whose sums fit into the registers beside one another

template <class To, class From>
To bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float wide(BFloat16 x) { return bits<float>(uint32_t(x.x) << 16); }

inline BFloat16 rounded(float x) {  // to nearest, ties to even
  uint32_t raw = bits<uint32_t>(x);
  return BFloat16(uint16_t((raw + 0x7fff + ((raw >> 16) & 1)) >> 16), BFloat16::from_bits());
}

// e to the x up to 88, as compilers can vectorize it: a power of two by its bits times a polynomial (that of Cephes).
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  float n = __builtin_rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float series = 1.9875691500e-4f;
  series = series * r + 1.3981999507e-3f;
  series = series * r + 8.3334519073e-3f;
  series = series * r + 4.1665795894e-2f;
  series = series * r + 1.6666665459e-1f;
  series = series * r + 5.0000001201e-1f;
  return bits<float>((int32_t(n) + 127) << 23) * (series * r * r + r + 1.0f);
}

inline float highest(const float* row, int64_t count) {
  float top = row[0];
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < count; i++) top = std::max(top, row[i]);
  return top;
}

template <class Work>
void share_out(int64_t rows, int64_t numbers, const Work& work) {
  if (numbers < ALONE)
    work(0, rows);
  else
    at::parallel_for(0, rows, 1, work);
}

// The norm by root mean square, in the precision and order of operations of transformers' Llama.
Tensor norm(const Tensor& states, const Tensor& weight, double eps) {
  Tensor in = states.contiguous(), out = at::empty(in.sizes(), in.options());
  int64_t width = weight.numel(), rows = in.numel() / width;
  const BFloat16 *from = in.const_data_ptr<BFloat16>(), *gain = weight.const_data_ptr<BFloat16>();
  BFloat16* to = out.data_ptr<BFloat16>();
  share_out(rows, in.numel(), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const BFloat16* x = from + row * width;
      BFloat16* y = to + row * width;
      float squares = 0.0f;
      for (int64_t i = 0; i < width; i++) squares += wide(x[i]) * wide(x[i]);
      float scale = 1.0f / std::sqrt(squares / width + float(eps));
      for (int64_t i = 0; i < width; i++) y[i] = rounded(wide(rounded(wide(x[i]) * scale)) * wide(gain[i]));
    }
  });
  return out;
}

// SiLU(gate) * up of rows that hold both, side by side.
Tensor gated(const Tensor& both) {
  int64_t width = both.size(-1) / 2, rows = both.numel() / (2 * width);
  auto size = both.sizes().vec();
  size.back() = width;
  Tensor out = at::empty(size, both.options());
  const BFloat16* from = both.const_data_ptr<BFloat16>();
  BFloat16* to = out.data_ptr<BFloat16>();
  share_out(rows, both.numel(), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const BFloat16 *gate = from + 2 * row * width, *up = gate + width;
      BFloat16* y = to + row * width;
      for (int64_t i = 0; i < width; i++) {
        float x = wide(gate[i]);
        y[i] = rounded(wide(rounded(x / (1.0f + exponential(-x)))) * wide(up[i]));
      }
    }
  });
  return out;
}

// Turn queries and keys in place by angles [B, N, D], of which the second half is read, and put keys and values where they stay.
void turn_and_keep(Tensor& made, const Tensor& cosine, const Tensor& sine, const Tensor& keys, const Tensor& values, at::IntArrayRef starts) {
  int64_t N = made.size(1), all = made.size(2), G = keys.size(1), D = keys.size(3), turned = all / D - G, half = D / 2;
  int64_t in_row = keys.stride(0), in_group = keys.stride(1);
  const BFloat16 *cosines = cosine.const_data_ptr<BFloat16>(), *sines = sine.const_data_ptr<BFloat16>();
  BFloat16 *states = made.data_ptr<BFloat16>(), *key = keys.data_ptr<BFloat16>(), *value = values.data_ptr<BFloat16>();
  share_out(keys.size(0) * N, made.numel(), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const BFloat16 *c = cosines + row * D + half, *s = sines + row * D + half;
      BFloat16* x = states + row * all;
      for (int64_t h = 0; h < turned; h++) {
        BFloat16 *low = x + h * D, *high = low + half;
        for (int64_t i = 0; i < half; i++) {
          float a = wide(low[i]), b = wide(high[i]);
          low[i] = rounded(a * wide(c[i]) - b * wide(s[i]));
          high[i] = rounded(b * wide(c[i]) + a * wide(s[i]));
        }
      }
      for (int64_t g = 0; g < G; g++) {
        int64_t to = row / N * in_row + g * in_group + (starts[row / N] + row % N) * D;
        std::memcpy(key + to, x + (turned - G + g) * D, D * sizeof(BFloat16));
        std::memcpy(value + to, x + (turned + g) * D, D * sizeof(BFloat16));
      }
    }
  });
}

// Two bf16 in 32 bits, as the dot product of AVX512-BF16 reads them.
inline __m512bh pairs(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh pair(uint32_t one) { return (__m512bh)_mm512_set1_epi32(int(one)); }

// to[j][s] = from[s][j] for 16 rows and 16 columns of 32 bits; rows begin `from_step` and `to_step` apart.
inline void turn_over(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step) {
  __m512i row[16], part[16];
  for (int i = 0; i < 16; i++) row[i] = _mm512_loadu_si512(from + i * from_step);
  for (int i = 0; i < 16; i += 2) {
    part[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    part[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int k = 0; k < 2; k++) {
      row[i + 2 * k] = _mm512_unpacklo_epi64(part[i + k], part[i + k + 2]);
      row[i + 2 * k + 1] = _mm512_unpackhi_epi64(part[i + k], part[i + k + 2]);
    }
  for (int i = 0; i < 8; i++) {
    int at = i / 4 * 8 + i % 4;
    part[at] = _mm512_shuffle_i32x4(row[at], row[at + 4], 0x88);
    part[at + 4] = _mm512_shuffle_i32x4(row[at], row[at + 4], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    _mm512_storeu_si512(to + i * to_step, _mm512_shuffle_i32x4(part[i], part[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 8) * to_step, _mm512_shuffle_i32x4(part[i], part[i + 8], 0xdd));
  }
}

// The keys and values of one group, laid out for dot products, and what its queries need meanwhile.
template <int D>
struct Group {
  static constexpr int R = D <= 64 ? 4 : 2;  // queries at a time, as many as there are registers for
  int64_t S = 0, full = 0;                   // keys, and those in whole registers
  std::vector<uint32_t> key, value;          // [D/2, full] pairs along D; [full/2, D] pairs of neighbouring keys
  std::vector<uint32_t> query, weight;       // [R, D/2], [R, full/2]
  std::vector<float> score;                  // [R, full]

  void read(const BFloat16* keys, const BFloat16* values, int64_t count) {
    S = count, full = (S + 31) / 32 * 32;
    key.resize(full * D / 2), value.resize(full * D / 2);
    query.resize(R * D / 2), weight.resize(R * full / 2), score.resize(R * full);
    const uint32_t* packed = reinterpret_cast<const uint32_t*>(keys);
    int64_t s = 0;
    for (; s + 16 <= S; s += 16)
      for (int j = 0; j < D / 2; j += 16) turn_over(packed + s * D / 2 + j, D / 2, &key[j * full + s], full);
    for (; s < full; s++)
      for (int j = 0; j < D / 2; j++) key[j * full + s] = s < S ? packed[s * D / 2 + j] : 0;
    for (s = 0; s < full; s += 2) {
      const BFloat16* x = values + s * D;
      uint32_t* to = &value[s / 2 * D];
      if (s + 1 < S)
        for (int d = 0; d < D; d++) to[d] = uint32_t(x[d].x) | uint32_t(x[D + d].x) << 16;
      else
        for (int d = 0; d < D; d++) to[d] = s < S ? x[d].x : 0;
    }
  }

  void ask(int r, const BFloat16* states, const bool* seen) {
    std::memcpy(&query[r * D / 2], states, D * sizeof(BFloat16));
    float* to = &score[r * full];
    for (int64_t s = 0; s < S; s++) to[s] = seen[s] ? 0.0f : -INFINITY;
    std::fill(to + S, to + full, -INFINITY);
  }

  // What the first `rows` queries find [rows, D].
  template <int rows>
  void find(float scale, float* found) {
    for (int64_t s = 0; s < full; s += 32) {
      __m512 sum[rows][2] = {};
      for (int j = 0; j < D / 2; j++)
        for (int half = 0; half < 2; half++) {
          __m512bh some = pairs(&key[j * full + s + 16 * half]);
          for (int r = 0; r < rows; r++) sum[r][half] = _mm512_dpbf16_ps(sum[r][half], pair(query[r * D / 2 + j]), some);
        }
      for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
          float* at = &score[r * full + s + 16 * half];
          _mm512_storeu_ps(at, _mm512_fmadd_ps(sum[r][half], _mm512_set1_ps(scale), _mm512_loadu_ps(at)));
        }
    }
    float total[rows] = {};
    for (int r = 0; r < rows; r++) {
      float *row = &score[r * full], top = highest(row, full);
      for (int64_t s = 0; s < full; s++) total[r] += row[s] = exponential(row[s] - top);
      for (int64_t s = 0; s < full; s += 32) {
        __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + s + 16), _mm512_loadu_ps(row + s));
        _mm512_storeu_si512(&weight[r * full / 2 + s / 2], (__m512i)both);
      }
    }
    __m512 mixed[rows][D / 16] = {};
    for (int64_t s = 0; s < full / 2; s++)
      for (int j = 0; j < D / 16; j++) {
        __m512bh some = pairs(&value[s * D + 16 * j]);
        for (int r = 0; r < rows; r++) mixed[r][j] = _mm512_dpbf16_ps(mixed[r][j], pair(weight[r * full / 2 + s]), some);
      }
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < D / 16; j++) _mm512_storeu_ps(found + r * D + 16 * j, _mm512_div_ps(mixed[r][j], _mm512_set1_ps(total[r])));
  }

  void find(int rows, float scale, float* found) {
    if (rows == 1) return find<1>(scale, found);
    if (rows == 2) return find<2>(scale, found);
    if constexpr (R == 4) rows == 3 ? find<3>(scale, found) : find<4>(scale, found);
  }
};

// What the queries at the beginning of `made` [B, N, (H + 2G) * D] find in what is `seen` [B, (1,) N, S].
template <int D>
Tensor attended(const Tensor& made, const Tensor& keys, const Tensor& values, const Tensor& seen, float scale) {
  int64_t B = keys.size(0), N = made.size(1), S = seen.size(-1), all = made.size(2), G = keys.size(1);
  int64_t H = all / D - 2 * G, shared = H / G, rows = shared * N, in_row = keys.stride(0), in_group = keys.stride(1);
  Tensor out = at::empty({B, N, H * D}, made.options());
  const BFloat16* states = made.const_data_ptr<BFloat16>();
  const bool* sees = seen.const_data_ptr<bool>();
  const BFloat16 *key = keys.const_data_ptr<BFloat16>(), *value = values.const_data_ptr<BFloat16>();
  BFloat16* to = out.data_ptr<BFloat16>();
  int64_t cuts = std::clamp<int64_t>((2 * at::get_num_threads() + B * G - 1) / (B * G), 1, std::max<int64_t>(rows / 4, 1));
  at::parallel_for(0, B * G * cuts, 1, [&](int64_t begin, int64_t end) {
    thread_local Group<D> group;
    for (int64_t item = begin; item < end; item++) {
      int64_t b = item / cuts / G, g = item / cuts % G, cut = item % cuts, from = b * in_row + g * in_group;
      if (item == begin || cut == 0) group.read(key + from, value + from, S);
      for (int64_t row = rows * cut / cuts, last = rows * (cut + 1) / cuts; row < last;) {
        int count = int(std::min<int64_t>(group.R, last - row));
        for (int r = 0; r < count; r++) {
          int64_t head = g * shared + (row + r) / N, node = (row + r) % N;
          group.ask(r, states + (b * N + node) * all + head * D, sees + (b * N + node) * S);
        }
        float found[Group<D>::R * D];
        group.find(count, scale, found);
        for (int r = 0; r < count; r++, row++)
          for (int d = 0; d < D; d++) to[((b * N + row % N) * H + g * shared + row / N) * D + d] = rounded(found[r * D + d]);
      }
    }
  });
  return out;
}

Tensor attend(const Tensor& made, const Tensor& keys, const Tensor& values, const Tensor& seen, double scale) {
  switch (keys.size(3)) {
    case 32: return attended<32>(made, keys, values, seen, float(scale));
    case 64: return attended<64>(made, keys, values, seen, float(scale));
    case 96: return attended<96>(made, keys, values, seen, float(scale));
    case 128: return attended<128>(made, keys, values, seen, float(scale));
  }
  TORCH_CHECK(false, "heads are 32, 64, 96 or 128 wide here, not ", keys.size(3));
}

// A weight [out, in] for products of few rows: blocks of 32 outputs, within which pairs of inputs follow one another, [blocks, in/2, 32].
Tensor lay_out(const Tensor& weight) {
  Tensor in = weight.contiguous();
  int64_t out = in.size(0), width = in.size(1), blocks = (out + BLOCK - 1) / BLOCK;
  TORCH_CHECK(width % 2 == 0, "inputs come in pairs, and this weight has ", width);
  Tensor laid = at::zeros({blocks, width / 2, BLOCK}, in.options().dtype(at::kInt));
  const uint32_t* from = reinterpret_cast<const uint32_t*>(in.const_data_ptr<BFloat16>());
  uint32_t* to = reinterpret_cast<uint32_t*>(laid.data_ptr<int32_t>());
  at::parallel_for(0, blocks, 1, [=](int64_t begin, int64_t end) {
    for (int64_t o = begin * BLOCK; o < std::min(end * BLOCK, out); o++)
      for (int64_t k = 0; k < width / 2; k++) to[(o / BLOCK * width / 2 + k) * BLOCK + o % BLOCK] = from[o * width / 2 + k];
  });
  return laid;
}

// Products [R, 32] of R rows, given as `pairs_in` times R pairs of inputs, with one block of a weight: each row's sums are taken
// in the same order whatever R is, so that what comes of a token does not depend on how many are read with it.
template <int R>
void multiply(const uint32_t* rows, const uint32_t* block, int64_t pairs_in, float* out) {
  __m512 sum[R][2] = {};
  for (int64_t k = 0; k < pairs_in; k++) {
    __m512bh low = pairs(block + k * BLOCK), high = pairs(block + k * BLOCK + 16);
    _mm_prefetch(reinterpret_cast<const char*>(block + (k + AHEAD) * BLOCK), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(block + (k + AHEAD) * BLOCK + 16), _MM_HINT_T0);
    for (int r = 0; r < R; r++) {
      __m512bh one = pair(rows[k * R + r]);
      sum[r][0] = _mm512_dpbf16_ps(sum[r][0], one, low);
      sum[r][1] = _mm512_dpbf16_ps(sum[r][1], one, high);
    }
  }
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++) _mm512_storeu_ps(out + r * BLOCK + 16 * half, sum[r][half]);
}

template <int... R>
void multiply(int rows, const uint32_t* from, const uint32_t* block, int64_t pairs_in, float* out, std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? multiply<R + 1>(from, block, pairs_in, out) : void()), ...);
}

// `states` [..., in] times a weight laid out [blocks, in/2, 32] for `out` outputs, plus `bias` [out] and `plus` [..., out].
Tensor product(const Tensor& states, const Tensor& laid, int64_t out, const Maybe& bias, const Maybe& plus) {
  Tensor in = states.contiguous();
  int64_t half = laid.size(1), rows = in.numel() / (2 * half);
  auto size = in.sizes().vec();
  size.back() = out;
  Tensor made = at::empty(size, in.options()), added = plus ? plus->contiguous() : Tensor();
  const uint32_t* given = reinterpret_cast<const uint32_t*>(in.const_data_ptr<BFloat16>());
  std::vector<uint32_t> turned(rows * half);
  uint32_t* from = turned.data();
  share_out((rows + TOGETHER - 1) / TOGETHER, rows * half, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin * TOGETHER; row < std::min(end * TOGETHER, rows); row += TOGETHER)
      for (int64_t k = 0, count = std::min<int64_t>(TOGETHER, rows - row); k < half; k++)
        for (int64_t r = 0; r < count; r++) from[row * half + k * count + r] = given[(row + r) * half + k];
  });
  const uint32_t* weight = reinterpret_cast<const uint32_t*>(laid.const_data_ptr<int32_t>());
  const BFloat16 *base = plus ? added.const_data_ptr<BFloat16>() : nullptr, *always = bias ? bias->const_data_ptr<BFloat16>() : nullptr;
  BFloat16* to = made.data_ptr<BFloat16>();
  at::parallel_for(0, laid.size(0), 1, [=](int64_t begin, int64_t end) {
    float sums[TOGETHER * BLOCK];
    for (int64_t block = begin; block < end; block++)
      for (int64_t row = 0; row < rows; row += TOGETHER) {
        int count = int(std::min<int64_t>(TOGETHER, rows - row)), width = int(std::min<int64_t>(BLOCK, out - block * BLOCK));
        multiply(count, from + row * half, weight + block * half * BLOCK, half, sums, std::make_integer_sequence<int, TOGETHER>());
        for (int r = 0; r < count; r++) {
          int64_t at = (row + r) * out + block * BLOCK;
          for (int i = 0; i < width; i++) {
            float sum = sums[r * BLOCK + i] + (always ? wide(always[block * BLOCK + i]) : 0.0f);
            to[at + i] = rounded(base ? wide(rounded(sum)) + wide(base[at + i]) : sum);
          }
        }
      }
  });
  return made;
}

// `entering` [B, N, ...], through the norm of `before` where there is one, is what attention reads and `base` [B, N, width]
// what its output is added to; queries see what `seen` [B, (1,) N, S] says, and new keys and values go into `keys` and `values`
// [B, G, room, D] from `starts` on.
Tensor layer(const Tensor& entering, const Tensor& base, const Tensor& cosine, const Tensor& sine, const Tensor& keys,
             const Tensor& values, at::IntArrayRef starts, const Tensor& seen, const Maybe& before, const Tensor& project,
             const Maybe& project_bias, const Tensor& mix, const Maybe& mix_bias, const Tensor& after, const Tensor& gate,
             const Maybe& gate_bias, const Tensor& down, const Maybe& down_bias, int64_t projected, int64_t gates, double scale, double eps) {
  int64_t B = base.size(0), N = base.size(1), width = base.size(2), S = seen.size(-1), angles = B * N * keys.size(3);
  TORCH_CHECK(cosine.numel() == angles && sine.numel() == angles, "angles are not those of ", B, " rows of ", N, " tokens");
  TORCH_CHECK(seen.numel() == B * N * S && S <= keys.size(2), "what is seen is not that of ", B, " rows of ", N, " tokens");
  TORCH_CHECK(int64_t(starts.size()) == B && keys.size(0) == B, "there are not keys for ", B, " rows");
  for (int64_t start : starts) TORCH_CHECK(0 <= start && start + N <= keys.size(2), "there is no room for ", N, " tokens from ", start, " on");
  Tensor made = product(before ? norm(entering, *before, eps) : entering, project, projected, project_bias, {});
  turn_and_keep(made, cosine.contiguous(), sine.contiguous(), keys, values, starts);
  Tensor states = product(attend(made, keys, values, seen.contiguous(), scale), mix, width, mix_bias, base);
  return product(gated(product(norm(states, after, eps), gate, gates, gate_bias, {})), down, width, down_bias, states);
}

// The `count` likeliest tokens of each row of `logits` [..., V], the first of equals first, and their log-probabilities.
// `offsets` [V] are added to the tokens.
std::tuple<Tensor, Tensor> likeliest(const Tensor& logits, int64_t count, const Maybe& offsets) {
  Tensor in = logits.contiguous();
  int64_t V = in.size(-1), rows = in.numel() / V, blocks = (V + BLOCK - 1) / BLOCK;
  auto size = in.sizes().vec();
  size.back() = count;
  Tensor values = at::empty(size, in.options().dtype(at::kFloat)), picks = at::empty(size, in.options().dtype(at::kLong));
  const BFloat16* from = in.const_data_ptr<BFloat16>();
  float* worth = values.data_ptr<float>();
  const int64_t* offset = offsets ? offsets->const_data_ptr<int64_t>() : nullptr;
  int64_t* pick = picks.data_ptr<int64_t>();
  share_out(rows, in.numel(), [=](int64_t begin, int64_t end) {
    std::vector<float> row(blocks * BLOCK), top(blocks);
    for (int64_t r = begin; r < end; r++) {
      for (int64_t i = 0; i < V; i++) {
        float x = wide(from[r * V + i]), least = std::numeric_limits<float>::lowest();
        row[i] = x > least ? x : least;  // what is no number is no better than what cannot be
      }
      std::fill(row.begin() + V, row.end(), -INFINITY);  // below all, as what was picked is
      for (int64_t b = 0; b < blocks; b++) top[b] = highest(&row[b * BLOCK], BLOCK);
      float high = highest(top.data(), blocks), total = 0.0f;
      for (int64_t i = 0; i < V; i++) total += exponential(row[i] - high);
      for (int64_t n = 0; n < count; n++) {
        int64_t block = std::max_element(top.begin(), top.end()) - top.begin();
        float* at = std::find(&row[block * BLOCK], &row[block * BLOCK] + BLOCK, top[block]);
        int64_t place = at - row.data();
        worth[r * count + n] = wide(from[r * V + place]) - high - std::log(total);
        pick[r * count + n] = place + (offset ? offset[place] : 0);
        *at = -INFINITY;
        top[block] = highest(&row[block * BLOCK], BLOCK);
      }
    }
  });
  return {values, picks};
}

TORCH_LIBRARY(outrider, library) {
  library.def("lay_out(Tensor weight) -> Tensor", &lay_out);
  library.def("product(Tensor states, Tensor laid, int out, Tensor? bias, Tensor? plus) -> Tensor", &product);
  library.def("norm(Tensor states, Tensor weight, float eps) -> Tensor", &norm);
  library.def("likeliest(Tensor logits, int count, Tensor? offsets) -> (Tensor, Tensor)", &likeliest);
  library.def(
      "layer(Tensor entering, Tensor base, Tensor cosine, Tensor sine, Tensor(a!) keys, Tensor(b!) values, int[] starts, "
      "Tensor seen, Tensor? before, Tensor project, Tensor? project_bias, Tensor mix, Tensor? mix_bias, Tensor after, "
      "Tensor gate, Tensor? gate_bias, Tensor down, Tensor? down_bias, int projected, int gates, float scale, float eps) -> Tensor",
      &layer);
}
