"""mlx arrays as bytes with safetensors' names of their types, and back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_mtp.cache.prefix_file import HostArray

TYPES = {
    "BOOL": (mx.bool_, np.bool_),
    "U8": (mx.uint8, np.uint8),
    "U16": (mx.uint16, np.uint16),
    "U32": (mx.uint32, np.uint32),
    "U64": (mx.uint64, np.uint64),
    "I8": (mx.int8, np.int8),
    "I16": (mx.int16, np.int16),
    "I32": (mx.int32, np.int32),
    "I64": (mx.int64, np.int64),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),
    "F32": (mx.float32, np.float32),
    "F64": (mx.float64, np.float64),
    "C64": (mx.complex64, np.complex64),
}
"""By name: mlx's type, and numpy's of the same width, as numpy has no bfloat16."""
_NAMES = {dtype: name for name, (dtype, _) in TYPES.items()}


def to_host(array: mx.array) -> HostArray:
    """An evaluated array's bytes. No operation runs on the device for it."""
    return HostArray(_NAMES[array.dtype], tuple(array.shape), memoryview(array).tobytes())  # type: ignore[arg-type]


def to_mlx(array: HostArray) -> mx.array:
    """The array again."""
    dtype, same_width = TYPES[array.dtype]
    if not array.data:
        return mx.zeros(array.shape, dtype=dtype)
    numbers: np.ndarray = np.frombuffer(array.data, dtype=same_width)
    if dtype == mx.bfloat16:
        return mx.array(numbers).view(dtype).reshape(array.shape)
    return mx.array(numbers, dtype=dtype).reshape(array.shape)
