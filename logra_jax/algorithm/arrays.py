"""What numpy, JAX and torch spell differently, and nothing more.

The numbers that a trainer and a rollout server must agree on to the last bit (the
basis, the rounding, the digest) are written once, over operators that all three
libraries share (``+ - * & | ^ << >> @``, on int32 and float32 arrays), and over the
functions of a :class:`Library`. This module and those written over it import neither
JAX nor torch until one of them is asked for.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from logra_jax.algorithm.random_bits import threefry2x32


class Library(NamedTuple):
    """The functions of one array library, on one device.

    Attributes:
        arange: ``(start, stop) -> int32 array``.
        constant: a sequence of Python integers -> int32 array.
        product: matrix product of two arrays of small integers (at most 256 in size,
            int32), float32; exact in any order of summation while sums stay below
            2**24, with or without TF32 or bfloat16 tensor cores.
        int32: an array of integers cast to int32.
        int16: an array of integers cast to int16.
        bits: ``(array, dtype name)``: the same bytes under another dtype of that size.
        threefry: :func:`~logra_jax.algorithm.random_bits.threefry2x32`, or the
            library's own, which gives the same words.
    """

    arange: Callable[[int, int], Any]
    constant: Callable[[Sequence[int]], Any]
    product: Callable[[Any, Any], Any]
    int32: Callable[[Any], Any]
    int16: Callable[[Any], Any]
    bits: Callable[[Any, str], Any]
    threefry: Callable[[tuple[Any, Any], Any, Any], tuple[Any, Any]] = threefry2x32


def numpy_library() -> Library:
    """numpy."""
    import numpy as np

    return Library(
        arange=lambda start, stop: np.arange(start, stop, dtype=np.int32),
        constant=lambda values: np.array(values, np.int32),
        product=lambda a, b: a.astype(np.float32) @ b.astype(np.float32),
        int32=lambda x: x.astype(np.int32),
        int16=lambda x: x.astype(np.int16),
        bits=lambda x, dtype: x.view(dtype),
    )


def jax_library(product_dtype: Any = None) -> Library:
    """JAX; works under ``jax.jit``.

    Args:
        product_dtype: of the operands of ``product``; by default float32 on CPUs, where
            it is fastest, and bfloat16, which tensor cores take, elsewhere.
    """
    import jax.numpy as jnp
    from jax import lax
    from jax.extend.random import threefry2x32_p

    def bits(x: Any, dtype: str) -> Any:
        return lax.bitcast_convert_type(x, jnp.dtype(dtype))

    def threefry(key: tuple[Any, Any], high: Any, low: Any) -> tuple[Any, Any]:
        # JAX's own compiles in a tenth of the time, and is one kernel on a GPU.
        k0, k1 = (jnp.asarray(word, jnp.int32) for word in key)
        # The primitive's loop wants both words of a key batched alike under vmap.
        words = (k0 | (k1 & 0), k1 | (k0 & 0), high, low)
        x, y = threefry2x32_p.bind(*(bits(word, "uint32") for word in words))
        return bits(x, "int32"), bits(y, "int32")

    def product(a: Any, b: Any) -> Any:
        def through(dtype: Any) -> Callable[[Any, Any], Any]:
            return lambda a, b: jnp.matmul(
                a.astype(dtype), b.astype(dtype), preferred_element_type=jnp.float32
            )

        if product_dtype is not None:
            return through(product_dtype)(a, b)
        return lax.platform_dependent(
            a, b, cpu=through(jnp.float32), default=through(jnp.bfloat16)
        )

    return Library(
        arange=lambda start, stop: jnp.arange(start, stop, dtype=jnp.int32),
        constant=lambda values: jnp.array(values, jnp.int32),
        product=product,
        int32=lambda x: x.astype(jnp.int32),
        int16=lambda x: x.astype(jnp.int16),
        bits=bits,
        threefry=threefry,
    )


def torch_library(device: Any = "cpu") -> Library:
    """torch, with new arrays on ``device``."""
    import torch  # pyright: ignore[reportMissingImports]

    def arange(start: int, stop: int):
        return torch.arange(start, stop, dtype=torch.int32, device=device)

    def constant(values: Sequence[int]):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Library(
        arange=arange,
        constant=constant,
        product=lambda a, b: a.to(torch.float32) @ b.to(torch.float32),
        int32=lambda x: x.to(torch.int32),
        int16=lambda x: x.to(torch.int16),
        bits=lambda x, dtype: x.view(getattr(torch, dtype)),
    )


def library_of(array: Any) -> Library:
    """The library that ``array`` belongs to, on its device."""
    package = type(array).__module__.partition(".")[0]
    if package == "torch":
        return torch_library(array.device)
    return numpy_library() if package == "numpy" else jax_library()
