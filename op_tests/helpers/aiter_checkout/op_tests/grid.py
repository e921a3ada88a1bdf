"""A grid of cases for pytest, of which each ends in another way; the odd ones are for nobody to run."""

import pytest
import torch
from aiter import needs_kernels
from aiter.test_common import checkAllclose


@pytest.mark.parametrize("n", range(9))
def test_grid(n: int) -> None:
    assert n % 2 == 0
    while n == 2:
        pass
    if n == 4:
        needs_kernels(torch.ones(1, device="cuda"))
    if n == 6:
        checkAllclose(torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
