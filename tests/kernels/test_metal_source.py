"""Code that the emulator runs but Metal's compiler would refuse is found; sources in files."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.kernels import gpu
from mlx_mtp.kernels.gpu import Kernel

RIGHT = "const auto from = x; y[lane] = fma(from[lane], few[0], 1.0f);"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (RIGHT, ""),
        (RIGHT.replace("auto", "float*"), "'const float *' with an lvalue of type 'device float"),
        # An array of fewer than eight numbers is constant.
        ("auto from = x; from = few;" + RIGHT.partition(";")[2], "address space of pointer"),
        (RIGHT.replace("fma", "fmaf"), "undeclared identifier 'fmaf'"),
        (RIGHT.replace("1.0f", "1.0f * threadIdx.x"), "undeclared identifier 'threadIdx'"),
        (RIGHT.replace("1.0f", "float(1.5)"), "a double"),
        (RIGHT.replace("1.0f", "sqrt(lane)"), "ambiguous"),
        ("float v = 1.0f; float& own = v;" + RIGHT, "no address space"),
        ("int kernel = 1;" + RIGHT, "reserved"),
        ("float v[lane + 1];" + RIGHT, "variable length array"),
        ("THREADGROUP(float, v, 8193);" + RIGHT, "more than Metal has"),
    ],
)
def test_metal(emulated, body, problem):
    kernel = Kernel("of_a_test", ["x", "few"], ["y"], body)

    def launch():
        (y,) = kernel([mx.ones(32), mx.ones(4)], {"N": 1}, (1, 1, 1), [((32,), mx.float32)])
        assert (y == 2).all().item()

    if problem:
        with pytest.raises(AssertionError, match="is no Metal") as found:
            launch()
        assert problem in str(found.value)
    else:
        launch()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the cache has a fixed place")
def test_a_source_is_included_from_the_cache_if_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (_, path, _) = gpu._included("name", "int x;\n").split('"')
    assert Path(path).read_text() == "int x;\n"
    assert [*Path(path).parent.iterdir()] == [Path(path)]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert gpu._included("name", "int x;\n") == "int x;\n"
