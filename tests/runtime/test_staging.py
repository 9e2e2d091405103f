"""A step's way to the device and back: nothing is overwritten that the device may still read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.device.staging import Staging
from tests.fake_accelerator import FakeAccelerator


def test_arrays_arrive_as_they_were_in_tensors_of_their_own() -> None:
    staging, arrays = Staging(FakeAccelerator(), 2, 1000), []
    for step in range(5):
        staging.begin()
        array = np.arange(40, dtype=np.int64).reshape(4, 10)[:, ::2] + step  # not contiguous
        arrays.append((array, staging.put(array)))
        into = torch.zeros(3, dtype=torch.float32)
        assert staging.put(np.array([1, 2, step], np.float32), into) is into
        assert into.tolist() == [1, 2, step]
        staging.end()
    for array, tensor in arrays:  # though the blocks have been written again
        assert np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.uint32, np.float32, np.float64, np.bool_])
def test_types_and_empty_arrays(dtype: type) -> None:
    staging = Staging(FakeAccelerator(), 1, 64)
    staging.begin()
    for count in (0, 1, 100):
        array = np.ones((count, 2), dtype)
        assert np.array_equal(staging.put(array).numpy(), array)


def test_a_block_is_waited_for_before_it_is_written_again() -> None:
    gpu = FakeAccelerator()
    staging = Staging(gpu, 3, 1000)
    fetched = []
    for step in range(3):
        staging.begin()
        fetched.append(staging.fetch(torch.full((4,), step)))
        staging.end()
    assert gpu.waits == 0 and [one[0].item() for one in fetched] == [0, 1, 2]
    staging.begin()
    assert gpu.waits == 1  # for the step whose block this is, and no other
    assert [event is not None and event.done for event in staging.events] == [True, False, False]  # type: ignore[attr-defined]
    staging.fetch(torch.full((4,), 9))
    assert [one[0].item() for one in fetched] == [9, 1, 2]


def test_a_block_grows_in_the_middle_of_a_step_and_is_whole_afterwards() -> None:
    gpu = FakeAccelerator()
    staging = Staging(gpu, 1, 256)
    for _ in range(3):
        staging.begin()
        tensors = [staging.put(np.full(300, n, np.uint8)) for n in range(5)]
        rooms = [staging.fetch(tensor) for tensor in tensors]
        assert [room.unique().tolist() for room in rooms] == [[0], [1], [2], [3], [4]]
        staging.end()
    grown = gpu.pinned_bytes
    for _ in range(3):
        staging.begin()
        assert len(staging.blocks[0]) == 1
        staging.put(np.zeros(3000, np.uint8))
        staging.end()
    assert gpu.pinned_bytes == grown
