// Prints a digest of the results of each instruction that emulation/ has. test_emulated.py compiles this twice, for the
// processor's instructions and for the emulated ones, and compares what both print. A new one needs a line in main.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <utility>

namespace {

constexpr int kRounds = 200;
int round_now;

uint32_t random_bits() {
  static uint64_t state;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}

// fp32 of a few ranges of exponents: small numbers, denormals, large ones, and any, of which some are not finite.
uint32_t random_float() {
  constexpr uint32_t kFirst[] = {117, 0, 225, 0}, kCount[] = {20, 24, 30, 256};
  const int kind = round_now % 4;
  const uint32_t bits = random_bits(), exponent = kFirst[kind] + random_bits() % kCount[kind];
  return (bits & 0x807fffff) | exponent << 23;
}

struct Operands {
  alignas(64) uint8_t bits[3][64];
  alignas(64) uint32_t floats[3][16];
  alignas(64) uint16_t bf16[3][16][32];  // as large as tiles

  Operands() {
    for (auto& vector : bits) {
      for (auto& byte : vector) byte = static_cast<uint8_t>(random_bits() >> 8);
    }
    for (auto& vector : floats) {
      for (auto& value : vector) value = random_float();
    }
    for (auto& tile : bf16) {
      for (auto& row : tile) {
        for (auto& value : row) value = static_cast<uint16_t>(random_float() >> 16);
      }
    }
  }
};
const Operands* operands;

template <class T>
T from(const void* memory) {
  T value;
  std::memcpy(&value, memory, sizeof value);
  return value;
}
__m512i ints(int i) { return from<__m512i>(operands->bits[i]); }
__m512h halves(int i) { return from<__m512h>(operands->bits[i]); }
__m512bh pairs(int i) { return from<__m512bh>(operands->bf16[i]); }
__m512 floats(int i) { return from<__m512>(operands->floats[i]); }
__m256i low(int i) { return from<__m256i>(operands->bits[i]); }
__m128i lowest(int i) { return from<__m128i>(operands->bits[i]); }

struct Digest {
  const char* name;
  uint64_t value = 14695981039346656037u;

  void add(const void* memory, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) value = (value ^ static_cast<const uint8_t*>(memory)[i]) * 1099511628211u;
  }
  // All that are not a number are alike.
  void add_floats(const void* memory, int count) {
    for (int i = 0; i < count; ++i) {
      auto bits = from<uint32_t>(static_cast<const uint8_t*>(memory) + 4 * i);
      if ((bits & 0x7fffffff) > 0x7f800000) bits = 0x7fc00000;
      add(&bits, sizeof bits);
    }
  }
  void add_shorts(const void* memory, int count, uint16_t infinity) {
    for (int i = 0; i < count; ++i) {
      auto bits = from<uint16_t>(static_cast<const uint8_t*>(memory) + 2 * i);
      if ((bits & 0x7fff) > infinity) bits = 0x7fff;
      add(&bits, sizeof bits);
    }
  }
  void operator()(const __m512& x) { add_floats(&x, 16); }
  void operator()(const __m512h& x) { add_shorts(&x, 32, 0x7c00); }
  void operator()(const __m512bh& x) { add_shorts(&x, 32, 0x7f80); }
  template <class T>
  void operator()(const T& x) {
    add(&x, sizeof x);
  }
};

template <class F>
void show(const char* name, const F& result) {
  Digest digest{name};
  for (round_now = 0; round_now < kRounds; ++round_now) {
    const Operands drawn;
    operands = &drawn;
    digest(result());
  }
  std::printf("%s %016llx\n", name, static_cast<unsigned long long>(digest.value));
}
#define SHOW(name, ...) show(#name, [] { return name(__VA_ARGS__); })
// The same, cast to a type whose floats may not be a number.
#define SHOW_AS(type, name, ...) show(#name, [] { const auto x = name(__VA_ARGS__); return from<type>(&x); })
// The memory that an instruction writes to.
#define SHOW_MEMORY(name, ...)                        \
  show(#name, [] {                                    \
    __m512i memory = ints(2);                         \
    name(reinterpret_cast<float*>(&memory), __VA_ARGS__); \
    return memory;                                    \
  })

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

struct Sums {
  __m512 rows[16];
};

enum class Product { bf16, signed_bytes, bytes };  // the last: those of x have no sign

// `rows` of x times `along` pairs, or fours of bytes, of 16 columns.
Sums tile_products(Product product, int rows, int along) {
  Shapes shapes;
  shapes.bytes[0] = shapes.bytes[2] = 64;
  shapes.bytes[1] = static_cast<uint16_t>(4 * along);
  shapes.rows[0] = shapes.rows[1] = static_cast<uint8_t>(rows);
  shapes.rows[2] = static_cast<uint8_t>(along);
  _tile_loadconfig(&shapes);
  Sums sums{};
  for (auto& row : sums.rows) row = floats(0);
  asm volatile("" : : "r"(&sums), "r"(operands) : "memory");
  _tile_loadd(0, &sums, 64);
  _tile_loadd(1, operands->bf16[1], 64);
  _tile_loadd(2, operands->bf16[2], 64);
  if (product == Product::bf16) _tile_dpbf16ps(0, 1, 2);
  if (product == Product::signed_bytes) _tile_dpbssd(0, 1, 2);
  if (product == Product::bytes) _tile_dpbusd(0, 1, 2);
  _tile_stored(0, &sums, 64);
  _tile_release();
  asm volatile("" : : "r"(&sums) : "memory");
  return sums;
}

}  // namespace

int main() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  syscall(SYS_arch_prctl, kRequestPermission, kTileData);
  constexpr int kRound = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

  SHOW(_mm512_setzero_ps);
  SHOW(_mm512_set1_ps, from<float>(operands->floats[0]));
  SHOW(_mm512_loadu_ps, operands->floats[0]);
  SHOW_MEMORY(_mm512_storeu_ps, floats(0));
  SHOW(_mm512_maskz_loadu_ps, 0x5a3c, reinterpret_cast<const float*>(operands->floats[0]));
  SHOW_MEMORY(_mm512_mask_storeu_ps, 0x5a3c, floats(0));
  SHOW(_mm512_add_ps, floats(0), floats(1));
  SHOW(_mm512_sub_ps, floats(0), floats(1));
  SHOW(_mm512_mul_ps, floats(0), floats(1));
  SHOW(_mm512_div_ps, floats(0), floats(1));
  SHOW(_mm512_max_ps, floats(0), floats(1));
  SHOW(_mm512_min_ps, floats(0), floats(1));
  SHOW(_mm512_fmadd_ps, floats(0), floats(1), floats(2));
  SHOW(_mm512_roundscale_ps, floats(0), kRound);
  SHOW(_mm512_mask_blend_ps, 0x5a3c, floats(0), floats(1));
  SHOW(_mm512_permutexvar_ps, ints(0), floats(1));
  SHOW(_mm512_mask_permutexvar_ps, floats(0), 0x5a3c, ints(1), floats(2));
  SHOW(_mm512_shuffle_f32x4, floats(0), floats(1), 0x9c);
  SHOW(_mm512_permute_ps, floats(0), 0x9c);
  SHOW(_mm512_cmp_ps_mask, floats(0), floats(1), _CMP_GT_OQ);
  SHOW(_mm512_cmp_ps_mask, floats(0), floats(1), _CMP_UNORD_Q);
  SHOW(_mm512_castps512_ps256, floats(0));
  SHOW(_mm512_extractf32x8_ps, floats(0), 1);
  SHOW(_mm512_cvtph_ps, low(0));

  SHOW(_mm512_setzero_si512);
  SHOW(_mm512_set1_epi32, from<int>(operands->bits[0]));
  SHOW(_mm512_set1_epi16, from<short>(operands->bits[0]));
  SHOW(_mm512_set1_epi8, from<char>(operands->bits[0]));
  SHOW(_mm512_broadcast_i32x4, lowest(0));
  SHOW(_mm512_reduce_add_epi32, ints(0));
  SHOW(_mm512_loadu_si512, operands->bits[0]);
  SHOW_MEMORY(_mm512_storeu_si512, ints(0));
  SHOW(_mm512_shuffle_epi8, ints(0), ints(1));
  SHOW(_mm512_shufflelo_epi16, ints(0), 0x9c);
  SHOW(_mm512_shufflehi_epi16, ints(0), 0x9c);
  SHOW(_mm512_shuffle_i64x2, ints(0), ints(1), 0x9c);
  SHOW(_mm512_permutexvar_epi16, ints(0), ints(1));
  SHOW(_mm512_unpacklo_epi64, ints(0), ints(1));
  SHOW(_mm512_unpackhi_epi64, ints(0), ints(1));
  SHOW(_mm512_castps512_ps256, _mm512_castsi512_ps(_mm512_castsi256_si512(low(0))));
  SHOW(_mm512_and_si512, ints(0), ints(1));
  SHOW(_mm512_xor_si512, ints(0), ints(1));
  SHOW(_mm512_ternarylogic_epi32, ints(0), ints(1), ints(2), 0xea);
  SHOW(_mm512_ternarylogic_epi32, ints(0), ints(1), ints(2), 0x1b);
  SHOW(_mm512_add_epi32, ints(0), ints(1));
  SHOW(_mm512_mullo_epi32, ints(0), ints(1));
  SHOW(_mm512_min_epu32, ints(0), ints(1));
  SHOW(_mm512_slli_epi32, ints(0), 5);
  SHOW(_mm512_srli_epi32, ints(0), 5);
  SHOW(_mm512_mask_blend_epi32, 0x5a3c, ints(0), ints(1));
  SHOW(_mm512_cvtps_epi32, floats(0));
  SHOW(_mm512_cvtepi32_ps, ints(0));
  SHOW(_mm512_cvtepu16_epi32, low(0));
  SHOW(_mm512_cvtepi8_epi32, lowest(0));
  SHOW(_mm512_cvtepi32_epi16, ints(0));
  SHOW(_mm512_cvtepi32_epi8, ints(0));
  SHOW(_mm512_dpbusd_epi32, ints(0), ints(1), ints(2));
  SHOW(_mm512_dpwssd_epi32, ints(0), ints(1), ints(2));
  SHOW(_mm512_mulhi_epu16, ints(0), ints(1));
  SHOW(_mm512_mulhrs_epi16, ints(0), ints(1));
  SHOW(_mm512_slli_epi16, ints(0), 5);
  SHOW(_mm512_srai_epi16, ints(0), 5);
  SHOW(_mm512_maskz_loadu_epi16, 0x5a3c96f1, operands->bits[0]);
  SHOW(_mm256_maskz_loadu_epi16, 0x5a3c, operands->bits[0]);
  SHOW_MEMORY(_mm256_mask_storeu_epi16, 0x5a3c, low(0));

  SHOW(_mm512_setzero_ph);
  SHOW(_mm512_set1_ph, from<_Float16>(operands->bits[0]));
  SHOW(_mm512_mul_ph, halves(0), halves(1));
  SHOW(_mm512_fmadd_ph, halves(0), halves(1), halves(2));
  SHOW(_mm512_fnmadd_ph, halves(0), halves(1), halves(2));
  SHOW(_mm512_cvtepu16_ph, ints(0));
  SHOW(_mm512_castsi512_ph, ints(0));
  SHOW(_mm512_castph_si512, halves(0));

  SHOW_AS(__m256i, _mm512_cvtneps_pbh, floats(0));
  SHOW(_mm512_cvtne2ps_pbh, floats(0), floats(1));
  SHOW(_mm512_dpbf16_ps, floats(0), pairs(1), pairs(2));
  const std::pair<Product, const char*> products[] = {
      {Product::bf16, "_tile_dpbf16ps"}, {Product::signed_bytes, "_tile_dpbssd"}, {Product::bytes, "_tile_dpbusd"}};
  for (const auto& [product, instruction] : products) {
    for (const int rows : {1, 2, 7, 15, 16}) {
      for (const int along : {1, 8, 16}) {
        char name[64];
        std::snprintf(name, sizeof name, "%s of %d rows and %d along", instruction, rows, along);
        show(name, [&] {
          Digest digest{name};
          const Sums sums = tile_products(product, rows, along);
          for (const auto& row : sums.rows) digest(row);
          return digest.value;
        });
      }
    }
  }
}
