"""From a name to a folder: what is found, converted once, or refused in one line. Nothing is fetched here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from proc import models
from proc.models import prepare
from proc.settings import Settings, UsageError
from runtime.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SIDESTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def told(**settings: Any) -> tuple[str, list[str]]:
    lines: list[str] = []
    return prepare(Settings(**settings), lines.append), lines


def test_a_simulated_device_needs_no_model(tmp_path: Path) -> None:
    assert told(device="sim") == ("", [])
    assert models.served_name(Settings(device="sim"), "") == "sim"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert told(model=str(tmp_path / "m")) == (str(tmp_path / "m"), [])
    assert models.served_name(Settings(model=str(tmp_path / "m")), "x") == "m"


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "missing.gguf"])
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        told(model=name)


def test_a_gguf_file_is_converted_once_for_each_content(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(file: Path, folder: Path, tell: Any) -> None:
        tell("converting")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
    (tmp_path / "m.gguf").write_bytes(b"one")
    first, lines = told(model=str(tmp_path / "m.gguf"))
    assert Path(first).parent == cache and lines == ["converting"]
    assert told(model=str(tmp_path / "m.gguf")) == (first, [])
    (tmp_path / "m.gguf").write_bytes(b"another")
    assert told(model=str(tmp_path / "m.gguf"))[0] != first


def test_a_broken_gguf_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="not a GGUF file"):
        told(model=str(tmp_path / "m.gguf"))


def test_a_fetch_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING\nERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UsageError, match="ERROR: no network"):
        told(model="smollm2")


def test_a_hub_id_offline_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("offline mode is enabled\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UsageError, match=r"some/model cannot be fetched: offline mode is enabled$"):
        told(model="some/model")


def test_a_slow_tokenizer_is_converted_once(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    text = [f"hello world number {n} the quick brown fox" for n in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    whole, lines = told(model=str(folder))
    assert lines == ["converting the tokenizer, once"]
    assert told(model=str(folder)) == (whole, [])
    theirs = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    ours = Tokenizer(Path(whole))
    for sentence in ("hello world", "quick 🙂 fox"):
        assert ours.encode(sentence, add_special=False) == theirs.encode(sentence)


def test_a_slow_tokenizer_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"junk")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    with pytest.raises(UsageError, match="tokenizer cannot be converted"):
        told(model=str(folder))
