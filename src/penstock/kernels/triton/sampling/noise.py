"""Computes the noise of runtime/sampling/noise.py on the device. Keys and hashes are the same bits."""

import triton
import triton.language as tl


@triton.jit
def noise_key(stream, index):
    """The key (k0, k1) for output `index` of a choice, from the choice's stream."""
    z = stream.to(tl.uint64) + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z ^= z >> 30
    z *= 0xBF58476D1CE4E5B9
    z ^= z >> 27
    z *= 0x94D049BB133111EB
    z ^= z >> 31
    return (z & 0xFFFFFFFF).to(tl.uint32), (z >> 32).to(tl.uint32)


@triton.jit
def hash_tokens(token, k0, k1):
    """The uint32 hash of each token under the key (k0, k1)."""
    x = token.to(tl.uint32) ^ k0
    x ^= x >> 17
    x *= 0xED5AD4BB
    x ^= k1
    x ^= x >> 11
    x *= 0xAC4C1B51
    x ^= x >> 15
    x *= 0x31848BAB
    x ^= x >> 14
    return x


@triton.jit
def gumbel(hashes):
    """Gumbel noise in fp64. u = (hash + 1/2) / 2**32 and 1 - u are exact, so that log(1 - u) needs no log1p."""
    u = (hashes.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(1.0 - u))


@triton.jit
def rough_gumbel(hashes):
    """Gumbel noise in fp32, with an error of about 1e-5."""
    u = (hashes.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((hashes ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # Below 1/2, log1p(-u) by Kahan's method, which corrects log(1 - u) for the rounding of 1 - u.
    rounded = 1.0 - u
    near = tl.where(rounded == 1.0, u, -tl.log(rounded) * u / tl.where(rounded == 1.0, 1.0, 1.0 - rounded))
    return -tl.log(tl.where(u < 0.5, near, -tl.log(rest)))
