"""Ranks in processes of their own: the same numbers for each, nothing beyond the loopback, and a lost one noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from runtime.collective import Alone

ROOT = Path(__file__).parent.parent.parent
RANK = """
import glob, json, os, sys, torch
from runtime.collective import PeerLost, Together
from runtime.model.sharding import Rank

def listening():
    inodes = {os.readlink(fd) for fd in glob.glob("/proc/self/fd/*") if os.path.lexists(fd)}
    sockets = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}").readlines()[1:]]
    return [one[1].split(":")[0] for one in sockets if one[3] == "0A" and f"socket:[{one[9]}]" in inodes]

index = int(sys.argv[1])
with torch.inference_mode():
    ranks = Together(Rank(index, 2), sys.argv[2])
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    told = {
        "sums": [ranks.sum(torch.full((2,), index + 1.0, dtype=kind)).tolist() for kind in kinds],
        "gathered": ranks.gather(torch.full((2, 1), float(index))).tolist(),
        "least": ranks.least(10 - index),
        "listening": listening(),
    }
    if index == 0:
        try:
            ranks.sum(torch.ones(1))  # which the other does not take part in
        except PeerLost as error:
            told["lost"] = str(error)
    print(json.dumps(told), flush=True)
    if index == 1:
        os._exit(0)
"""


def test_alone_is_the_whole() -> None:
    ranks, part = Alone(), torch.ones(2, 3)
    assert ranks.sum(part) is part and ranks.gather(part) is part and ranks.least(7) == 7
    assert (ranks.rank.index, ranks.rank.size) == (0, 1)


def test_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(index), str(tmp_path / "ranks")], stdout=subprocess.PIPE, cwd=ROOT)
        for index in range(2)
    ]
    told: list[dict[str, Any]] = [json.loads(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told[0].pop("lost").startswith("another rank is lost: ")
    for one in told:
        assert one["sums"] == [[3.0, 3.0]] * 3 and one["gathered"] == [[0.0, 1.0]] * 2 and one["least"] == 9
        assert one["listening"] and set(one["listening"]) == {"0100007F"}
