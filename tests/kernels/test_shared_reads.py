"""Products of two to eight rows, emulated: exact, each row by itself, and used where they serve."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.kernels import shared_reads
from mlx_mtp.kernels.formats import Format, weight_of
from mlx_mtp.models import few_rows
from tests.kernels.test_few_rows import AFFINE4, BF16, MX4, MX8, NV4, exact, linear, near

ODD = [Format("affine", *each) for each in [(2, 64), (3, 32), (5, 64), (6, 64), (4, 128)]] + [MX4]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, BF16) for form in (AFFINE4, Format("affine", 6, 32), MX8, NV4)),
        (Format("affine", 8, 32), mx.float32),
        *(pytest.param(form, mx.float16, marks=pytest.mark.full) for form in ODD),
    ],
)
def test_rows_are_exact_and_do_not_depend_on_others(emulated, form, dtype):
    # Some lanes have less to do, and a warp has features too many.
    weight = weight_of(linear(384, 10, form, seed=form.bits, dtype=dtype))
    x = mx.random.normal((7, 384), key=mx.random.key(1)).astype(dtype)
    (found,) = shared_reads.products(x, [weight])
    near(found, exact(x, weight))
    for rows in (slice(0, 2), slice(3, 7), slice(6, 7)):
        assert mx.array_equal(shared_reads.products(x[rows], [weight])[0], found[rows])


@pytest.mark.parametrize("emulated", ["metal"], indirect=True)
def test_it_is_used_where_it_agrees_and_is_worth_it(emulated, monkeypatch, caplog):
    def kind(faster):
        monkeypatch.setattr(few_rows, "_is_worth_it", lambda *_: faster)
        layer = linear(256, 32, AFFINE4, seed=0)
        few_rows.use_few_rows(layer, BF16)
        return layer

    layer = kind(faster=True)
    assert type(layer) is few_rows.FewRowsLinear
    for rows in (1, 2, 8, 9):
        x = mx.random.normal((1, rows, 256), key=mx.random.key(rows)).astype(BF16)
        if ours := 2 <= rows <= 8:
            near(layer(x)[0], exact(x[0], weight_of(layer)))
        plain = nn.QuantizedLinear.__call__(layer, x)
        assert mx.array_equal(layer(x), plain).item() != ours
    assert type(kind(faster=False)) is nn.QuantizedLinear
    assert "WARNING" not in caplog.text
    wrong = shared_reads._BODY.replace("fma(bias, total", "fma(2 * bias, total")
    monkeypatch.setattr(shared_reads.KERNEL, "body", wrong)
    monkeypatch.setattr(shared_reads.KERNEL, "_built", {})
    assert type(kind(faster=True)) is nn.QuantizedLinear
    assert "it is off by" in caplog.text
