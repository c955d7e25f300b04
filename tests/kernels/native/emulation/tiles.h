// AMX's tiles, after Intel's pseudocode. What the processor refuses (no shapes set, shapes that do not fit) ends the
// process here too. After the compiler's own immintrin.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulated {

// Denormals are zeros, as operands and as results, and all is rounded to the nearest, whatever the thread has set.
// `compute` calls a function that is not inlined, which stays between the two settings.
template <class F>
inline void without_denormals(const F& compute) {
  constexpr unsigned kMasked = 0x1f80, kNoDenormals = 0x8040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kMasked | kNoDenormals);
  compute();
  _mm_setcsr(before);
}

struct Tiles {
  int bytes[8] = {}, rows[8] = {};
  uint8_t data[8][16][64] = {};
};
inline thread_local Tiles tiles;

inline void tile_loadconfig(const void* shapes) {
  const auto* from = static_cast<const uint8_t*>(shapes);
  if (from[0] != 1 || from[1] != 0) __builtin_trap();
  tiles = {};
  for (int i = 0; i < 8; ++i) {
    tiles.bytes[i] = from[16 + 2 * i] | from[17 + 2 * i] << 8;
    tiles.rows[i] = from[48 + i];
    if (tiles.bytes[i] > 64 || tiles.rows[i] > 16) __builtin_trap();
  }
}
inline void tile_release() { tiles = {}; }
inline void in_use(int tile) {
  if (tiles.bytes[tile] == 0 || tiles.rows[tile] == 0) __builtin_trap();
}
inline void tile_zero(int tile) {
  in_use(tile);
  std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}
inline void tile_loadd(int tile, const void* base, int64_t stride) {
  tile_zero(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row) {
    std::memcpy(tiles.data[tile][row], static_cast<const char*>(base) + row * stride,
                static_cast<size_t>(tiles.bytes[tile]));
  }
}
inline void tile_stored(int tile, void* base, int64_t stride) {
  in_use(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, tiles.data[tile][row],
                static_cast<size_t>(tiles.bytes[tile]));
  }
}
inline void check_shapes(int c, int a, int b) {
  in_use(c);
  in_use(a);
  in_use(b);
  if (a == b || a == c || b == c || tiles.rows[c] != tiles.rows[a] || tiles.bytes[c] != tiles.bytes[b] ||
      tiles.bytes[a] != 4 * tiles.rows[b]) {
    __builtin_trap();
  }
}

// Sums of the even and of the odd products each, in order; then both to each other, and that to what was there.
[[gnu::noinline]] inline void add_products(int c, int a, int b) {
  __m256 weights[16][2][2];  // [k][even, odd][half]
  for (int k = 0; k < tiles.rows[b]; ++k) {
    for (int half = 0; half < 2; ++half) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tiles.data[b][k] + 32 * half));
      weights[k][0][half] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
      weights[k][1][half] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
    }
  }
  for (int m = 0; m < tiles.rows[c]; ++m) {
    __m256 sums[2][2] = {};
    for (int k = 0; k < tiles.rows[b]; ++k) {
      for (int odd = 0; odd < 2; ++odd) {
        uint16_t bits;
        std::memcpy(&bits, tiles.data[a][m] + 4 * k + 2 * odd, sizeof bits);
        const __m256 x = _mm256_castsi256_ps(_mm256_set1_epi32(bits << 16));
        for (int half = 0; half < 2; ++half) {
          sums[odd][half] = _mm256_fmadd_ps(x, weights[k][odd][half], sums[odd][half]);
        }
      }
    }
    auto* to = reinterpret_cast<float*>(tiles.data[c][m]);
    for (int half = 0; half < 2; ++half, to += 8) {
      _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), _mm256_add_ps(sums[0][half], sums[1][half])));
    }
  }
}

inline void tile_dpbf16ps(int c, int a, int b) {
  check_shapes(c, a, b);
  without_denormals([&] { add_products(c, a, b); });
}

// Products of bytes with a sign and of bytes without one.
inline void tile_dpbsud(int c, int a, int b) {
  check_shapes(c, a, b);
  for (int m = 0; m < tiles.rows[c]; ++m) {
    int32_t sums[16];
    std::memcpy(sums, tiles.data[c][m], sizeof sums);
    for (int k = 0; k < tiles.rows[b]; ++k) {
      for (int n = 0; n < 16; ++n) {
        for (int part = 0; part < 4; ++part) {
          sums[n] += static_cast<int8_t>(tiles.data[a][m][4 * k + part]) * tiles.data[b][k][4 * n + part];
        }
      }
    }
    std::memcpy(tiles.data[c][m], sums, static_cast<size_t>(tiles.bytes[c]));
  }
}

}  // namespace emulated

#undef _tile_loadconfig
#define _tile_loadconfig emulated::tile_loadconfig
#undef _tile_release
#define _tile_release emulated::tile_release
#undef _tile_zero
#define _tile_zero emulated::tile_zero
#undef _tile_loadd
#define _tile_loadd emulated::tile_loadd
#undef _tile_stream_loadd
#define _tile_stream_loadd emulated::tile_loadd
#undef _tile_stored
#define _tile_stored emulated::tile_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated::tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_dpbsud emulated::tile_dpbsud
