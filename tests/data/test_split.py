"""What is held out."""

from __future__ import annotations

import pytest

from gradbench.data.split import evenly, hold_out

KEYS = [f"paragraph {number % 40}" for number in range(100)]


def held_keys(keys: list[str], held_out: int) -> set[str]:
    return {key for key, is_held in zip(keys, hold_out(keys, held_out), strict=True) if is_held}


def test_equal_keys_stay_on_one_side() -> None:
    held = hold_out(KEYS, 10)
    trained = {key for key, is_held in zip(KEYS, held, strict=True) if not is_held}
    assert held_keys(KEYS, 10).isdisjoint(trained)
    assert 10 <= sum(held) <= 12  # a key has two or three items


def test_it_is_chosen_by_content_not_by_place() -> None:
    assert held_keys(KEYS[::-1], 10) == held_keys(KEYS, 10)
    assert held_keys(KEYS, 10) < held_keys(KEYS, 30)
    assert hold_out([key.encode() for key in KEYS], 10) == hold_out(KEYS, 10)


def test_more_data_leaves_most_of_the_choice() -> None:
    before = held_keys(KEYS, 30)
    after = held_keys([*KEYS, "something new"], 30)
    assert len(before ^ after) <= 2


def test_it_may_take_several_times_as_many() -> None:
    assert hold_out(KEYS, 10, times=3) == hold_out(KEYS, 30)


@pytest.mark.parametrize("held_out", [98, 100, 1000])
def test_something_is_left_to_train_on(held_out: int) -> None:
    with pytest.raises(
        ValueError, match=f"^data.held_out={held_out}: none of the 100 samples would be left to train on$"
    ):
        hold_out(KEYS, held_out)


def test_something_is_held_out() -> None:
    with pytest.raises(ValueError, match=r"^data\.held_out=0: must be 1 or more$"):
        hold_out(KEYS, 0)


def test_evenly() -> None:
    assert evenly(range(10), 5) == [0, 2, 4, 6, 8]
    assert evenly(range(7), 3) == [0, 2, 4]
    assert evenly("ab", 5) == ["a", "b"]
