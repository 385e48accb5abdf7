"""Matrix products of few rows in full-shape models with random weights."""

import time
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

from benchmarks import Row, Rows, row
from benchmarks.shapes import build, shape_of
from benchmarks.timed import gpu_microseconds
from mlx_mtp.selftest.products import Product, measure_products


def products(
    shape: tuple[str, ...] = ("Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-27B"),
    layers: int = 0,
    tiny: bool = False,
    rows: tuple[int, ...] = (1, 2, 4, 8),
    tokens: tuple[int, ...] = (1, 4, 16, 64, 128),
    bandwidth: float = 4.3,
    seconds: float = 540,
) -> Rows:
    """Matrix products of few rows in full-shape models, over reading their weights once.

    "us" is the time of a layer as the engine runs it, and "over reading" its ratio to the time of
    reading the weights once; of experts, only those that the tokens chose at random are read. The
    last rows of a table cover all its layers, and the last table covers all shapes. "mlx" is mlx's
    own operation where the engine does not use it, and "mx.max" the speed at which mlx reads the
    weights in one reduction, to compare with --bandwidth. Layers of a kind are independent of each
    other here, unlike in a step. With CUDA and torch, times are the GPU's from torch's profiler: by
    the clock, the time of small products would be mostly the host's.

    Args:
        rows: number of rows of dense products
        tokens: number of tokens in products of experts
    """
    end = time.perf_counter() + seconds
    counts, dense = (sorted(rows), sorted(tokens)), list[Product]()
    for each in shape:
        model, _ = build(shape_of(each, layers, tiny))
        measured = measure_products(model, end, *counts, timer=gpu_microseconds)
        dense += [product for product in measured if not product.routed]
        if time.perf_counter() > end:
            yield "The time is over: kinds with fewer bytes may be missing."
        for routed, group in groupby(
            sorted(measured, key=attrgetter("routed")), attrgetter("routed")
        ):
            kinds = [*group]
            yield f"{each}, {'experts, by tokens' if routed else 'products, by rows'}"
            for product in kinds:
                yield from _product_rows(product.name, [product], bandwidth)
            yield from _product_rows("all", kinds, bandwidth)
    if len(shape) > 1 and time.perf_counter() <= end:
        yield "all shapes, products, by rows"
        yield from _product_rows("all", dense, bandwidth)


def _product_rows(name: str, of: list[Product], bandwidth: float) -> Iterator[Row]:
    """Yields a row for each number of rows, with the means over all layers of the products."""
    for n, count in enumerate(of[0].rows):
        us, nbytes, theirs, reading = (
            sum(p.layers * each[n] for p, each in zip(of, column) if each)
            for column in zip(*((p.microseconds, p.nbytes, p.theirs, p.reading) for p in of))
        )
        layers = sum(p.layers for p in of)
        figures = us / layers, us * bandwidth * 1e6 / nbytes, theirs / layers or None
        names = "product | layers | at once | us | over reading | mlx, us | mx.max, TB/s"
        yield row(names, name, layers, count, *figures, nbytes / reading / 1e6)
