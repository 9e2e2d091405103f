"""Each C kernel, for each instruction set of this machine, against float64; odd shapes, poisoned outputs.

Nothing may depend on the number of threads, and no row on its neighbours: both are bit for bit.
"""

from __future__ import annotations

from ctypes import byref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.kernels import library
from runtime.kernels.library import PART, Kernels, Layer, Model, Step, every
from runtime.kernels.pack import Packed, Unsupported, kind_of_dtype, pack, pack_gated, pack_together
from runtime.model.quantized import Quantized, quantize
from tests.coded import as_coded

KERNELS = {one.name: one for one in every()}
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not KERNELS, reason="the C library is not built here")


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return KERNELS[request.param]


def room(size: int) -> tuple[torch.Tensor, int]:
    """Memory, and the first address in it that is a multiple of 64."""
    memory = torch.full((size + 64,), 255, dtype=torch.uint8)
    return memory, -(-memory.data_ptr() // 64) * 64


def linear(kernels: Kernels, layer: Packed, x: torch.Tensor, threads: int = 2) -> torch.Tensor:
    out = torch.full((len(x), layer.struct.n), torch.nan)
    _memory, at = room(kernels.linear_size(byref(layer.struct), len(x), threads))
    kernels.linear(byref(layer.struct), x.data_ptr(), len(x), out.data_ptr(), at, threads)
    return out


def met(kernels: Kernels, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """Inputs as weights of `dtype` meet them."""
    return x.bfloat16() if (kernels.name, dtype) == ("avx512bf16", torch.bfloat16) else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(32, 2), (1, 6), (33, 64), (100, 130), (48, 4100)])
@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 200])
def test_linear(kernels: Kernels, dtype: torch.dtype, n: int, k: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(n * k + rows)
    weight, bias = torch.randn(n, k, generator=generator).to(dtype), torch.randn(n, generator=generator)
    x = torch.randn(rows, k, generator=generator)
    expected = met(kernels, dtype, x).double() @ weight.double().T + bias.double()
    got = linear(kernels, pack(weight, bias), x)
    assert (got - expected).abs().max() < 1e-5 * k**0.5 * 10
    alone = torch.cat([linear(kernels, pack(weight, bias), x[row : row + 1], 1) for row in range(0, rows, 7)])
    assert torch.equal(got[::7], alone)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k"), [(32, 32), (1, 96), (33, 64), (100, 2112)])
@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 70])
def test_linear_of_codes(kernels: Kernels, bits: int, n: int, k: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(n * k + rows)
    weight, bias = quantize(torch.randn(n, k, generator=generator), bits), torch.randn(n, generator=generator)
    x = torch.randn(rows, k, generator=generator)
    expected = as_coded(x).double() @ weight.dequantized().double().T + bias.double()
    got = linear(kernels, pack(weight, bias), x)
    assert (got - expected).abs().max() < 1e-5 * k**0.5 * 10
    assert (got - x @ weight.dequantized().T - bias).abs().max() < 0.03 * k**0.5
    alone = torch.cat([linear(kernels, pack(weight, bias), x[row : row + 1], 1) for row in range(0, rows, 7)])
    assert torch.equal(got[::7], alone)


def test_float16_scales_are_read_as_they_are(kernels: Kernels) -> None:
    """Subnormal, negative and large ones; a group of zeros."""
    halves = torch.tensor([6e-8, 5.96e-5, -0.37, 65504.0, 1.0, 0.0]).half()[:, None]
    weight = Quantized(torch.full((6, 32), 7, dtype=torch.uint8), halves, -halves)
    got = linear(kernels, pack(weight), 127 * torch.eye(32)) / 127  # codes of such inputs are exact
    assert torch.allclose(got, weight.dequantized().T, rtol=1e-6, atol=0)


def test_extreme_codes_do_not_overflow(kernels: Kernels) -> None:
    """All weights and inputs as large as their codes can be, of either sign; -128 comes from GGUF files alone."""
    for code, bits in ((0, 8), (255, 8), (15, 4)):
        scale = torch.ones(32, 2).half()
        weight = Quantized(torch.full((32, 64), code, dtype=torch.uint8), scale, scale if bits == 4 else None)
        for x in (torch.full((9, 64), 127.0), torch.full((9, 64), -127.0)):
            assert torch.equal(linear(kernels, pack(weight), x), x @ weight.dequantized().T)


def test_an_input_that_is_no_number_shows(kernels: Kernels) -> None:
    x = torch.ones(2, 64)
    x[1, 40] = torch.nan
    weight = torch.randn(32, 64)
    for layer in (quantize(weight, 8), quantize(weight, 4), weight, weight.bfloat16()):
        got = linear(kernels, pack(layer), x)
        assert got[0].isfinite().all() and got[1].isnan().all()
    assert not linear(kernels, pack(quantize(torch.zeros(32, 32), 8)), torch.ones(1, 32)).any()


def test_layers_of_several_kinds_lie_together_in_int8(kernels: Kernels) -> None:
    parts = [torch.randn(16, 64), torch.randn(8, 64)]
    x = torch.randn(3, 64)
    mixed = linear(kernels, pack_together([quantize(parts[0], 4), parts[1]], None), x)
    anew = [quantize(quantize(parts[0], 4).dequantized(), 8), quantize(parts[1], 8)]
    assert torch.equal(mixed, linear(kernels, pack_together([*anew], None), x))
    assert (mixed[:, 16:] - x @ parts[1].T).abs().max() < 0.4


def test_exponentials_of_any_size_leave_greedy_choices_and_weights_finite(kernels: Kernels) -> None:
    """Scores so far apart that all but one key's weight is 0."""
    paged = Paged([40, 70], [1, 70], 16, (4, 2), 16)
    paged.qkv *= 200
    got = paged.attend(kernels, torch.float32, 0)
    assert got.isfinite().all() and (got - paged.expected(0)).abs().max() < 1e-2


def test_no_rows_are_fine(kernels: Kernels) -> None:
    assert linear(kernels, pack(torch.ones(32, 4)), torch.empty(0, 4)).shape == (0, 32)


def test_what_cannot_be_packed_is_named() -> None:
    with pytest.raises(Unsupported, match="float16"):
        pack(torch.ones(4, 4, dtype=torch.float16))
    with pytest.raises(Unsupported, match="odd"):
        pack(torch.ones(4, 3))


def test_rms_norm(kernels: Kernels) -> None:
    for rows, size in ((1, 1), (3, 7), (5, 64), (2, 577)):
        x, weight = torch.randn(rows, size), torch.randn(size)
        out = torch.full((rows, size), torch.nan)
        kernels.rms_norm(x.data_ptr(), weight.data_ptr(), 1e-5, rows, size, out.data_ptr(), 2)
        wide = x.double()
        expected = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        assert (out - expected).abs().max() < 1e-5


class Paged:
    """Rows with keys and values at shuffled pages; the first `decode` rows are decode rows."""

    def __init__(self, lengths: list[int], counts: list[int], block: int, heads: tuple[int, int], dim: int) -> None:
        draw = np.random.default_rng(len(lengths) + block)
        self.lengths, self.counts, (self.heads, self.kv_heads), self.dim = lengths, counts, heads, dim
        pages = -(-max(lengths) // block)
        self.table = draw.permutation(len(lengths) * pages).astype(np.int32).reshape(len(lengths), pages)
        self.tokens = sum(counts)
        self.block, cells = block, len(lengths) * pages * block
        generator = torch.Generator().manual_seed(dim)
        self.keys, self.values = (torch.randn(cells, self.kv_heads, dim, generator=generator) for _ in range(2))
        self.qkv = torch.randn(self.tokens, (self.heads + 2 * self.kv_heads) * dim, generator=generator)

    def expected(self, window: int) -> torch.Tensor:
        """float64[T, heads, dim], of what the last `attend` was given."""
        out, token = [], 0
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            at = np.arange(length)
            cells = torch.from_numpy(self.table[row, at // self.block].astype(np.int64) * self.block + at % self.block)
            group = self.heads // self.kv_heads
            keys, values = (part[cells].double().repeat_interleave(group, 1) for part in (self.keys, self.values))
            for position in range(length - count, length):
                query = self.queries[token].double()
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                scores = torch.einsum("hd,khd->hk", query, keys[seen]) / self.dim**0.5
                out.append(torch.einsum("hk,khd->hd", scores.softmax(1), values[seen]))
                token += 1
        return torch.stack(out).view(self.tokens, self.heads, self.dim)

    def attend(self, kernels: Kernels, dtype: torch.dtype, window: int, threads: int = 2) -> torch.Tensor:
        keys, values = self.keys.to(dtype), self.values.to(dtype)
        self.keys, self.values = keys.float(), values.float()
        self.queries = met(kernels, dtype, self.qkv.view(self.tokens, -1, self.dim)[:, : self.heads])
        rounded = self.queries.dtype == torch.bfloat16  # and so are weights, each by up to a part in 2**9
        self.rounding = 2**-8 * float(values.abs().max()) if rounded else 0.0
        layers = (Layer * 1)(Layer(keys=keys.data_ptr(), values=values.data_ptr()))
        shape: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.dim}
        model = Model(
            layers=1, block_size=self.block, window=window, kv_kind=kind_of_dtype(dtype), layer=layers, **shape
        )
        lens, counts = np.array(self.lengths, np.int32), np.array(self.counts, np.int32)
        decode, parts = sum(count == 1 for count in self.counts), -(-max(self.lengths) // PART)
        arrays = (counts.ctypes.data, lens.ctypes.data, self.table.ctypes.data)
        step = Step(self.tokens, len(lens), decode, self.table.shape[1], parts, *(None,) * 4, *arrays)
        out = torch.full((self.tokens, self.heads, self.dim), torch.nan)
        size = kernels.scratch_size(byref(model), self.tokens, len(lens), parts, threads)
        _memory, at = room(size)
        args = (byref(model), byref(step), 0, self.qkv.data_ptr(), self.qkv.shape[1], out.data_ptr(), at, threads)
        kernels.attend(*args)
        return out


SHAPES = [(16, (6, 2), 64), (1, (4, 4), 8), (3, (9, 3), 20), (32, (8, 1), 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize(("block", "heads", "dim"), SHAPES)
def test_attention(
    kernels: Kernels, dtype: torch.dtype, window: int, block: int, heads: tuple[int, int], dim: int
) -> None:
    paged = Paged([1, 33, 70, 65, 7, 100], [1, 1, 1, 65, 7, 40], block, heads, dim)
    got = paged.attend(kernels, dtype, window)
    assert (got - paged.expected(window)).abs().max() < 1e-4 + paged.rounding
    assert torch.equal(got, paged.attend(kernels, dtype, window, 1))


CHUNK_SHAPES = [(16, (9, 3), 64), (1, (2, 2), 20), (7, (8, 1), 72)]  # parts of a vector and of a tile are left over


@pytest.mark.parametrize("window", [0, 1, 50, 64])
@pytest.mark.parametrize(("block", "heads", "dim"), CHUNK_SHAPES)
def test_long_chunks(kernels: Kernels, window: int, block: int, heads: tuple[int, int], dim: int) -> None:
    """Several blocks of queries and keys: seen whole, in part, by some rows alone, or by none."""
    paged = Paged([170, 64, 129], [140, 64, 2], block, heads, dim)
    got = paged.attend(kernels, torch.bfloat16, window)
    assert (got - paged.expected(window)).abs().max() < 1e-5 + paged.rounding
    for threads in (1, 6):  # so many have smaller blocks of queries
        assert torch.equal(got, paged.attend(kernels, torch.bfloat16, window, threads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("block", "heads", "dim"), CHUNK_SHAPES)
def test_where_a_prompt_is_cut_changes_nothing(
    kernels: Kernels, dtype: torch.dtype, window: int, block: int, heads: tuple[int, int], dim: int
) -> None:
    whole, cut = (Paged([200] * rows, [200], block, heads, dim) for rows in (1, 3))
    cut.lengths, cut.counts, cut.table = [61, 66, 200], [61, 5, 134], whole.table.repeat(3, axis=0)
    cut.keys, cut.values, cut.qkv = whole.keys, whole.values, whole.qkv
    assert torch.equal(whole.attend(kernels, dtype, window), cut.attend(kernels, dtype, window))


@pytest.mark.parametrize("growth", [30.0, -30.0, 3000.0])
@pytest.mark.parametrize("count", [290, 1])
def test_scores_that_grow_with_the_keys_are_kept_in_range(kernels: Kernels, growth: float, count: int) -> None:
    """Whether the reference of the weights moves with each block of keys, now and then, or never."""
    paged = Paged([300], [count], 16, (4, 2), 16)
    at = torch.arange(300)
    cells = torch.from_numpy(paged.table[0].astype(np.int64))[at // 16] * 16 + at % 16
    paged.keys[cells] = paged.keys[cells] * 0.1 + growth / 300 * at[:, None, None]
    paged.qkv[:] = paged.qkv.abs() / 16
    got, expected = paged.attend(kernels, torch.float32, 0), paged.expected(0)
    assert (got - expected).abs().max() < 1e-6 * (10 + abs(growth))


@pytest.mark.parametrize("window", [0, 30])
def test_what_is_not_seen_does_not_show_at_all(kernels: Kernels, window: int) -> None:
    paged = Paged([100], [90], 16, (4, 2), 16)
    cell = int(paged.table[0, 3]) * 16 + 2  # of position 50, which is token 40
    paged.values.zero_()[cell] = 1.0
    shows = paged.attend(kernels, torch.float32, window).flatten(1).any(1)
    assert shows.nonzero().flatten().tolist() == list(range(40, 40 + window if window else 90))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_is_no_number_shows_in_its_row_alone(kernels: Kernels, dtype: torch.dtype) -> None:
    paged = Paged([100], [90], 16, (4, 2), 16)
    paged.qkv[40, 17] = torch.nan  # of the second head
    bad = ~paged.attend(kernels, dtype, 0).isfinite().all(-1)
    assert bad.nonzero().tolist() == [[40, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 16), ((9, 1), 80)])  # more heads than the registers hold
def test_long_decode_rows_are_cut_into_parts(
    kernels: Kernels, dtype: torch.dtype, window: int, heads: tuple[int, int], dim: int
) -> None:
    paged = Paged([1500, 3, 513], [1, 1, 1], 16, heads, dim)
    got = paged.attend(kernels, dtype, window)
    assert (got - paged.expected(window)).abs().max() < 1e-4 + paged.rounding
    assert torch.equal(got, paged.attend(kernels, dtype, window, 1))


def test_gated_layers_take_turns() -> None:
    gate, up = torch.arange(20.0)[:, None].repeat(1, 2), -torch.arange(20.0)[:, None].repeat(1, 2)
    tiles = pack_gated(gate, up).tiles.view(torch.float32)
    assert tiles[:, 0, 0].tolist() == [0.0, 0.0, 16.0, -16.0] and tiles.shape == (4, 2, 16)


def test_the_path_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "torch")
    assert library.kernels() is None
    monkeypatch.setenv(library.VARIABLE, "portable")
    assert library.kernels().name == "portable"  # type: ignore[union-attr]
    monkeypatch.setenv(library.VARIABLE, "abacus")
    with pytest.raises(ValueError, match=r"SIDESTEP_KERNELS=abacus: this machine has .*portable, torch"):
        library.kernels()
    monkeypatch.delenv(library.VARIABLE)
    assert library.kernels().name == next(iter(KERNELS))  # type: ignore[union-attr]


def test_a_library_that_cannot_be_loaded_leaves_the_torch_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "_native.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv(library.LIBRARY, str(broken))
    library._library.cache_clear()
    assert library.kernels() is None
    library._library.cache_clear()
