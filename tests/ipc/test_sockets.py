"""Typed sockets: what is sent arrives, what does not decode is counted, an address is bound once."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from ipc.sockets import Receiver, Sender


def test_a_bad_frame_is_counted_and_the_next_good_one_arrives(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/inbox"
    receiver, sender = Receiver(address, list[int]), Sender[list[int]](address)
    with zmq.Context.instance().socket(zmq.PUSH) as stranger:
        stranger.connect(address)
        for frame in (b"", b"\xc1", b"\xa1x", b"\x91" * 5000, bytes(range(256))):
            stranger.send(frame)
        assert receiver.receive(0.5) is None
    sender.send([1, 2])
    assert receiver.receive(5.0) == [1, 2]
    assert receiver.dropped == 5
    sender.close()
    receiver.close()


def test_an_address_is_not_stolen(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/inbox"
    receiver = Receiver(address, int)
    with pytest.raises(FileExistsError):
        Receiver(address, int)
    receiver.close()
