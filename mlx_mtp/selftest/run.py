"""The command `mlx-mtp selftest`: from a loaded model to the table."""

import argparse
import gc
from time import perf_counter

import mlx.core as mx

from mlx_mtp.bench.measure import showing
from mlx_mtp.calibration.exactness import exactness_of
from mlx_mtp.machine import machine_memory, wire_memory
from mlx_mtp.models.model import LoadedModel
from mlx_mtp.selftest.commands import check_engines
from mlx_mtp.selftest.kernels import check_model
from mlx_mtp.selftest.products import measure_products
from mlx_mtp.selftest.report import new_report
from mlx_mtp.selftest.steps import window_milliseconds
from mlx_mtp.text.tokenizer import Tokenizer

_PRODUCTS_SHARE = 0.2  # share of the time limit


def run_selftest(
    options: argparse.Namespace, model: LoadedModel, tokenizer: Tokenizer, backend: str
) -> int:
    """Check and measure a model with its head, and print the table; returns the exit status."""
    began, limit = perf_counter(), machine_memory()
    # On CUDA the memory that is free now, after loading the model, would become the limit.
    wired = wire_memory(limit) if mx.metal.is_available() else ""
    with showing("selftest: kernels ..."):
        kernels = check_model(model)
    with showing("selftest: exactness ..."):
        exact = exactness_of(model)
    report = new_report(model, kernels, backend)
    report.exact = exact
    with showing("selftest: products ..."):
        report.products = measure_products(
            model, perf_counter() + _PRODUCTS_SHARE * options.seconds
        )
        report.windows = window_milliseconds(model)
    before = _active_memory()
    check_engines(report, model, tokenizer, options.seconds, began)
    report.memory = {
        "limit": limit.nbytes,
        "source": limit.source,
        "wired": wired,
        "peak": mx.get_peak_memory(),
        "kept": _active_memory() - before,
    }
    report.seconds = perf_counter() - began
    report.show()
    report.write(options.json, options.report)
    return 1 if report.failures else 0


def _active_memory() -> int:
    """Bytes of all live arrays."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()
