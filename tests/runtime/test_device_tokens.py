"""The TokenTable as tensors: what is there, what is missed, and that no call needs an answer from the device."""

from __future__ import annotations

import pytest
import torch

from runtime.device.device_tokens import DeviceTokens

RING, ROWS, WIDTH, SLOTS, VOCAB = 3, 4, 2, 6, 100


def tokens(device: str = "cpu") -> DeviceTokens:
    def full(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=device)

    stamp = torch.full((RING,), -1, device=device)
    return DeviceTokens(stamp, full(0, RING), full(0, RING, ROWS), full(-1, RING, ROWS, WIDTH), full(0, SLOTS))


def at(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)[:, None]


def test_a_slot_decodes_what_the_step_before_published() -> None:
    table = tokens()
    table.poison(at(7), at(5, 2))
    table.publish(at(7), at(0, 1), at(5, 2), ids(11, 12))
    table.poison(at(8), at())
    assert table.gather(at(8), at(2, 5), VOCAB).tolist() == [12, 11]
    assert table.stamp.tolist() == [-1, 7, 8] and not table.error.any()
    assert table.ids[1].tolist() == [[11, -1], [12, -1], [-1, -1], [-1, -1]]
    assert table.count[1].tolist() == [1, 1, 0, 0]


def test_poison_empties_the_entry_and_no_other() -> None:
    table = tokens()
    for step in (1, 2, 4):
        table.poison(at(step), at())
        if step < 4:
            table.publish(at(step), at(0, 3), at(1, 2), torch.tensor([[4, 5], [6, 7]], dtype=torch.int32))
    assert (table.ids[1] == -1).all() and not table.count[1].any()
    assert table.ids[2, 3].tolist() == [6, 7] and table.count[2].tolist() == [2, 0, 0, 2]


def test_the_last_of_several_tokens_comes_next() -> None:
    table = tokens()
    table.poison(at(0), at(1))
    table.publish(at(0), at(3), at(1), torch.tensor([[4, 5]], dtype=torch.int32))
    assert table.next.tolist() == [0, 5, 0, 0, 0, 0] and table.count[0].tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize("read", ["twice", "after a chunk that did not sample", "beyond the vocabulary"])
def test_an_id_that_is_not_there_counts_and_a_harmless_one_is_taken(read: str) -> None:
    table = tokens()
    table.publish(at(0), at(0, 1), at(3, 4), ids(7, VOCAB if "beyond" in read else 8))
    if read == "twice":
        table.gather(at(0), at(4), VOCAB)
    elif "chunk" in read:
        table.poison(at(0), at(4))
    table.poison(at(1), at())
    found = table.gather(at(1), at(3, 4), VOCAB)
    assert found.tolist() == [7, VOCAB - 1 if "beyond" in read else 0]
    assert table.error.tolist() == [0, 1, 0]
    table.poison(at(4), at())
    assert table.error[1] == 0


def test_padding_reads_and_leaves_0() -> None:
    table = tokens()
    table.poison(at(0), at(0, 0))
    assert table.gather(at(0), at(0, 0), VOCAB).tolist() == [0, 0]
    table.publish(at(0), at(2, 3), at(0, 0), ids(5, 6))
    assert table.next[0] == 0 and not table.error.any()


def test_no_call_depends_on_a_value_or_waits_for_one() -> None:
    """On tensors without contents: whoever asks for one raises. So a CUDA graph may hold them."""
    table, step = tokens("meta"), torch.empty(1, dtype=torch.int64, device="meta")
    rows = torch.empty(2, dtype=torch.int64, device="meta")
    table.poison(step, rows)
    found = table.gather(step, rows, VOCAB)
    table.publish(step, rows, rows, found[:, None])
    assert found.shape == (2,) and found.dtype == torch.int32


def test_arrays_are_taken_without_a_copy() -> None:
    table = tokens()
    over = DeviceTokens.over({name: tensor.numpy() for name, tensor in vars(table).items()})
    over.poison(at(2), at())
    assert table.stamp[2] == 2
