"""Products of few rows of full-shape models with random weights, over reading their weights once.

    python -m benchmarks.products [--shape Qwen3.5-27B] [--rows 1,2,4,8] [--tokens 1,4,16,64,128]

Microseconds of a layer as the engine runs it, and in brackets how many times the time of reading
what it needs once at `--bandwidth`: of experts those that so many tokens chose, at random. The last
line of a table has all layers together, that below all tables those of all shapes. "mlx" is mlx's
own operation at the same numbers, where it is not in use, and "mx.max" the speed at which mlx reads
the weights in one reduction: what this machine has of `--bandwidth`. Layers of a kind are
independent of each other here, which those of a step are not. With CUDA and torch it is the GPU's
time by its profiler; by the clock the host's work for small products would be most of it.
"""

import argparse
import time
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from benchmarks.shapes import add_shape, build, integers, shape_of
from benchmarks.timed import gpu_microseconds, table
from mlx_mtp.selftest.products import Product, measure_products


def cells(times: Sequence[float], nbytes: Sequence[float], bandwidth: float) -> list[str]:
    """Microseconds, each over the time of reading so many bytes."""
    ratios = [us * bandwidth * 1e6 / size for us, size in zip(times, nbytes)]
    return [f"{us:.1f} ({ratio:.2f})" for us, ratio in zip(times, ratios)]


def total(products: Sequence[Product], bandwidth: float) -> list[str]:
    """`cells` of all layers together."""
    columns = range(len(products[0].rows))
    times = [sum(each.layers * each.microseconds[n] for each in products) for n in columns]
    nbytes = [sum(each.layers * each.nbytes[n] for each in products) for n in columns]
    return cells(times, nbytes, bandwidth)


def print_table(products: Sequence[Product], bandwidth: float) -> None:
    """Print one line a kind, and one for all of them."""
    row = table("layers", "product", *map(str, products[0].rows), "mlx", "mx.max, TB/s")
    for each in products:
        speed = each.nbytes[-1] / each.reading[-1] / 1e6
        theirs = ", ".join(f"{us:.0f}" for us in each.theirs)
        own = cells(each.microseconds, each.nbytes, bandwidth)
        row(each.layers, each.name, *own, theirs, f"{speed:.2f}")
    row(sum(each.layers for each in products), "all", *total(products, bandwidth), "", "")


def main() -> None:
    """Parse the command line, measure, print the tables of each shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_shape(parser, nargs="+", default=["Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-27B"])
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rows", type=integers, default=[1, 2, 4, 8])
    parser.add_argument("--tokens", type=integers, default=[1, 4, 16, 64, 128], help="of experts")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s")
    parser.add_argument("--seconds", type=float, default=540, help="begin no kind after them")
    options = parser.parse_args()
    end = time.perf_counter() + options.seconds
    counts = sorted(options.rows), sorted(options.tokens)
    all_shapes = list[Product]()
    for shape in options.shape:
        model, _ = build(shape_of(shape, options), options.bits)
        found = measure_products(model, end, *counts, timer=gpu_microseconds)
        all_shapes += [each for each in found if not each.routed]
        if time.perf_counter() > end:
            print("\nThe time is over: kinds with fewer bytes may be missing.", flush=True)
        for what, of in groupby(sorted(found, key=attrgetter("routed")), attrgetter("routed")):
            title = "experts, by tokens" if what else "products, by rows"
            print(f"\n{shape}, {options.bits} bit, {title}\n", flush=True)
            print_table([*of], options.bandwidth)
    if len(options.shape) > 1 and time.perf_counter() <= end:
        print(f"\nall shapes, products, by rows: {', '.join(total(all_shapes, options.bandwidth))}")


if __name__ == "__main__":
    main()
