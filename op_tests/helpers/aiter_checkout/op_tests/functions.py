"""Functions for pytest."""

import pytest


def test_one() -> None:
    pass


def test_two() -> None:
    raise AssertionError("planted")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
