"""Functions for pytest."""


def test_one() -> None:
    pass


def test_two() -> None:
    raise AssertionError("planted")
