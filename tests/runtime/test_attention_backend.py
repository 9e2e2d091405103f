"""Which attention a GPU gets, and what its user is told."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import runtime.attention
from runtime.attention import backend
from runtime.attention.backend import GATHERED, choose, nvcc
from runtime.model.config import ModelConfig
from tests.test_layering import imported

CONFIG = ModelConfig("LlamaForCausalLM", 100, 8, 8, 1, 4, 2, 128, 4096, 1e-5, 1e4)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As if it were installed, alone."""
    module = ModuleType("flashinfer")
    vars(module).update(
        __version__="0.6.13", BatchDecodeWithPagedKVCacheWrapper=1, BatchPrefillWithPagedKVCacheWrapper=2
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(backend, "find_spec", {"flashinfer_jit_cache": None}.__getitem__)
    monkeypatch.setenv("FLASHINFER_NVCC", "/nowhere/nvcc")
    return module


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "nvcc"
    path.parent.mkdir()
    path.touch(0o755)
    (path.parent / "ninja").touch(0o755)
    return path


def test_flashinfer_with_a_compiler(flashinfer: ModuleType, compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_NVCC", str(compiler))
    monkeypatch.setenv("PATH", str(compiler.parent))
    chosen, told = choose(CONFIG)
    assert (chosen.name, chosen.decode, chosen.prefill, chosen.fused) == ("flashinfer", 1, 2, True)
    assert "flashinfer 0.6.13" in told and str(compiler) in told


def test_flashinfer_with_kernels_built_before(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_spec", {"flashinfer_jit_cache": "spec"}.__getitem__)
    chosen, told = choose(CONFIG)
    assert chosen.fused and "flashinfer-jit-cache" in told


def test_no_kernels_and_no_compiler(flashinfer: ModuleType) -> None:
    chosen, told = choose(CONFIG)
    assert chosen is GATHERED and "neither nvcc nor kernels" in told and "CUDA_HOME" in told


@pytest.mark.parametrize("dim", [32, 80, 96, 512])
def test_heads_without_kernels(flashinfer: ModuleType, dim: int) -> None:
    chosen, told = choose(replace(CONFIG, head_dim=dim))
    assert chosen is GATHERED and told.endswith(f"no kernels for heads of {dim}")


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'flashinfer'"), RuntimeError("two\nversions")])
def test_an_import_that_fails_is_told_in_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr(backend, "import_module", fail)
    chosen, told = choose(CONFIG)
    assert chosen is GATHERED and "\n" not in told
    assert str(error).replace("\n", " ") in told and "pip install flashinfer-python" in told


def test_the_compiler_is_the_one_that_flashinfer_takes(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(compiler.parent))
    assert nvcc() == compiler
    monkeypatch.setenv("CUDA_HOME", "/nowhere")  # which goes before the path, as there
    assert nvcc() is None
    monkeypatch.setenv("CUDA_HOME", str(compiler.parent.parent))
    assert nvcc() == compiler


def test_ninja_is_found_beside_an_interpreter_whose_environment_is_not_activated(
    flashinfer: ModuleType, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_NVCC", str(compiler))
    monkeypatch.setenv("PATH", "/nowhere")
    chosen, told = choose(CONFIG)
    assert chosen is GATHERED and "no ninja" in told and os.environ["PATH"] == "/nowhere"
    monkeypatch.setattr(sys, "executable", str(compiler.parent / "python"))
    assert choose(CONFIG)[0].fused
    assert os.environ["PATH"] == f"{compiler.parent}{os.pathsep}/nowhere"


def test_flashinfer_is_imported_by_choice_alone() -> None:
    folder = Path(next(iter(runtime.attention.__path__)))
    assert not [path for path in folder.glob("*.py") if "flashinfer" in imported(path)]
