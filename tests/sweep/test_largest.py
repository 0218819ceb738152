import pytest

from gradbench.sweep.largest import MOST, largest


def looked_at(size_of, start, limit):
    """Return what is found and how often was looked."""
    looks = []

    def size(n):
        looks.append(n)
        return size_of(n)

    return largest(size, start, limit), len(looks)


@pytest.mark.parametrize("start", [1, 7, 32, 5000])
@pytest.mark.parametrize("limit", [1013, 5000, 77_777, 9_999_999])
def test_a_line_takes_four_looks(start, limit):
    found, looks = looked_at(lambda n: 1000 + 13 * n, start, limit)
    assert found == (limit - 1000) // 13
    assert looks <= 5


@pytest.mark.parametrize("start", [1, 8, 32])
@pytest.mark.parametrize(
    "size_of",
    [
        lambda n: max(50_000, 1000 + 13 * n),  # the optimizer's peak, then that of the activations
        lambda n: 1000 + 13 * n + n * n // 50,
        lambda n: 512 * -(-13 * n // 512),  # rounded up
        lambda n: 0 if n < 100 else 10**9,
    ],
)
@pytest.mark.parametrize("limit", [60_000, 200_000])
def test_what_is_no_line_is_found_too(size_of, start, limit):
    found, looks = looked_at(size_of, start, limit)
    assert size_of(found) <= limit < size_of(found + 1)
    assert looks <= 30


def test_nothing_fits():
    assert looked_at(lambda n: 10, 8, 9)[0] == 0
    assert looked_at(lambda n: 10, 1, 9) == (0, 1)


def test_what_never_grows_too_large_is_not_followed_for_ever():
    found, looks = looked_at(lambda n: 5, 1, 9)
    assert found == MOST
    assert looks < 30
