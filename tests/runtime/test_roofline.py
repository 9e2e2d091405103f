"""The written-down roofline: figures that can be computed by hand, files read, and what cannot be refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.device.roofline import names, roofline

FILE = """
[accelerator]
memory = 1e9
bandwidth = 1e9
rate = 1e12
bandwidth_efficiency = 0.5
rate_efficiency = 0.5
[model]
dense_bytes = 1e6
flops_per_token = 1e9
kv_bytes_per_token = 1e3
overhead_us = 100
launch_ms = 2
max_model_len = 64
"""


def test_a_step_is_weights_or_compute_then_kv_then_overhead(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(FILE)
    small = roofline(str(file))
    assert small.name == "small"
    assert small.step_ns(0, 0) == 2_100_000  # 1 MB at 0.5 GB/s, and 0.1 ms
    assert small.step_ns(1, 0) == 2_100_000  # reading the weights hides computing one token, 2 ms
    assert small.step_ns(2, 0) == 4_100_000
    assert small.step_ns(2, 500) == 5_100_000  # 0.5 MB of KV
    assert small.kv_tokens == int((0.9e9 - 1e6) / 1e3)


def test_every_name_has_room_for_kv_and_takes_milliseconds() -> None:
    for name in names():
        if name == "h100-deepseek-v2.5-fp8" or name == "h200-deepseek-v2.5-fp8":
            with pytest.raises(ValueError, match="236 GB of weights leave no memory"):
                roofline(name)
            continue
        found = roofline(name)
        assert 0.4e6 < found.step_ns(1, 1) < found.step_ns(256, 256 * 512) < 100e6
        assert found.kv_tokens > 10_000


def test_experts_are_read_as_far_as_the_tokens_need_them() -> None:
    deepseek = roofline("8xh200-deepseek-v2.5-fp8")
    bandwidth = 8 * 4.8e12 * 0.8
    assert deepseek.step_ns(0, 0) == pytest.approx(13e9 / bandwidth * 1e9 + 2.5e6, rel=1e-6)
    assert deepseek.step_ns(1, 0) == pytest.approx((13e9 + 223e9 * 6 / 160) / bandwidth * 1e9 + 2.5e6, rel=1e-6)
    assert deepseek.step_ns(1000, 0) == pytest.approx(236e9 / bandwidth * 1e9 + 2.5e6, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("launch_ms = 2", "lunch_ms = 2"), "lunch_ms"),
        (("launch_ms = 2", ""), "missing 1 required positional argument: 'launch_ms'"),
        (("launch_ms = 2", "launch_ms = true"), "launch_ms"),
        (("launch_ms = 2", "launch_ms = -1"), "launch_ms"),
        (("launch_ms = 2", "launch_ms = nan"), "launch_ms"),
        (("[model]", "[modell]"), "modell"),
        (("bandwidth = 1e9", "bandwidth = 0"), "must be above 0"),
        (("memory = 1e9", "memory = 1e6"), "no memory for KV"),
        (("[model]", "[model"), "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(FILE.replace(*change))
    with pytest.raises(ValueError, match=words):
        roofline(str(file))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="there are h100-llama"):
        roofline("b300-llama-3.1-8b")
    with pytest.raises(ValueError, match="cannot be read"):
        roofline("/nowhere.toml")
