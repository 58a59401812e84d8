"""Random numbers: Philox4x32-10 (Salmon et al. 2011), a block per (seed, step, purpose, i)."""

from collections.abc import Sequence
from functools import lru_cache

_WORD = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


PLACES, CAPS, SKETCH, ROWS, SAMPLE = 1, 2, 3, 4, 5  # purposes


@lru_cache(2**17)  # runs of the same seed draw the same
def random_block(seed: int, step: int, purpose: int, i: int) -> tuple[int, int, int, int]:
    return philox((i, purpose, step & _WORD, step >> 32), (seed & _WORD, seed >> 32))


def random_bits(seed: int, step: int, purpose: int, i: int) -> int:
    """64 bits: the first two words of the block."""
    first, second, _, _ = random_block(seed, step, purpose, i)
    return second << 32 | first


def random_below(bound: int, seed: int, step: int, purpose: int, i: int) -> int:
    """The upper 32 bits, scaled to [0, bound)."""
    return (random_bits(seed, step, purpose, i) >> 32) * bound >> 32


def random_unit(seed: int, step: int, purpose: int, i: int) -> float:
    """The upper 53 bits as a fraction."""
    return (random_bits(seed, step, purpose, i) >> 11) / 2.0**53


def random_normal(seed: int, step: int, purpose: int, i: int) -> float:
    """Eight 16-bit numbers added up, standardised, corrected once after Cornish and Fisher."""
    block = random_block(seed, step, purpose, i)
    x = (sum((word & 0xFFFF) + (word >> 16) for word in block) - 4 * 65535.0) * (1 / 53509.91992145)
    return x + 1.2 / 8 / 24 * ((x * x - 3) * x)
