"""What is computed from a GPU's profile."""

from benchmarks.timed import union


def test_kernels_that_overlap_count_once():
    assert union([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (5.25, 5.5), (3.0, 4.0)]) == 5.0
    assert union([]) == 0.0
