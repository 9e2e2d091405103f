"""A trace: every step's slices on its process, arrows that join them, counters, in the format that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path

from ipc.client import Client
from proc.settings import settings_from
from proc.supervisor import Supervisor
from proc.trace import COUNTERS, FLOW, write


def test_all_processes_on_one_time_axis(tmp_path: Path) -> None:
    settings = settings_from(device="sim:h200-qwen3-0.6b", sim_launch_ms=0.0, procs="tokenizer=2,scheduler=2")
    with Supervisor(settings) as server, Client(server.addresses[0]) as client:
        streams = [client.stream("x", max_tokens=6, ignore_eos=True) for _ in range(4)]
        assert [len(list(stream)) for stream in streams] == [6] * 4
        tracks = client.trace()
    assert sorted(track.role for track in tracks) == ["scheduler0", "scheduler1", "tokenizer0", "tokenizer1"]
    count = write(tracks, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"worker0", "worker1", *(track.role for track in tracks)} == set(names.values())
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and event["pid"] in names for event in slices)
    assert sum(event["name"].startswith("step ") for event in slices) == count
    for kind in ("plan", "launch", "commit", "deliver", "detokenize", "send"):
        assert any(event["name"] == kind for event in slices)
    assert {event["name"] for event in events if event["ph"] == "C"} == set(COUNTERS)
    flows = [event for event in events if event["ph"] in "stf"]
    assert len([event for event in flows if event["ph"] == "s"]) == count
    assert len(flows) <= count * (len(FLOW) + 1)  # both tokenizers may have had tokens of a step
    for track in tracks:
        if track.role.startswith("scheduler"):
            rows = [dict(zip(track.columns, row, strict=True)) for row in track.rows]
            order = ("planned", "received", "launched", "started", "ended", "reported", "taken", "committed")
            for row in rows:
                assert [row[name] for name in order] == sorted(row[name] for name in order)
                assert row["delivered"] >= row["committed"] and row["sent"] >= row["planned"]
