"""What of a GPU's memory goes where, and how many KV pages are left. Pure arithmetic; all in bytes."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
GRAPH = 16 * MIB  # of one recorded size beside what its steps share: assumed


@dataclass(frozen=True)
class Budget:
    """Of one device. `share`: of `total`, what this server may use."""

    total: int
    free: int  # once the weights are there
    weights: int
    peak: int  # of the largest step beyond them
    graphs: int
    workspace: int  # of attention
    histories: int  # of penalties
    share: float

    @property
    def others(self) -> int:
        """What is used and not ours: other processes, and what the CUDA context takes."""
        return max(0, self.total - self.free - self.weights)

    @property
    def kv(self) -> int:
        """What is left for KV; below 0 where nothing is."""
        allowed = int(self.total * self.share)
        needed = self.peak + self.graphs + self.workspace + self.histories
        return min(allowed - self.others - self.weights, self.free) - needed

    def blocks(self, nbytes: int, most: int) -> int:
        """Pages of `nbytes`, at most `most`. Raises `MemoryError` with the table and the flags to change."""
        count = min(self.kv // nbytes, most)
        if count < 2:
            raise MemoryError(
                f"no memory for the KV cache, of which a page takes {nbytes / MIB:.1f} MiB\n{self}\n{self.remedy}"
            )
        return count

    @property
    def remedy(self) -> str:
        """Which flag changes most."""
        if self.kv + int(self.total * (1 - self.share)) > 0 and self.others < self.total // 20:
            return "raise --gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs"
        if self.others >= self.total // 20:
            return f"others use {self.others / MIB:.0f} MiB of this device: end them, or raise --gpu-memory-utilization"
        return "lower --max-num-batched-tokens or --max-num-seqs, or spread the model with --tensor-parallel-size"

    def __str__(self) -> str:
        rows = {
            "device": self.total,
            f"  may be used (--gpu-memory-utilization {self.share:g})": int(self.total * self.share),
            "  used by others and the CUDA context": self.others,
            "  weights": self.weights,
            "  largest step (--max-num-batched-tokens, --max-num-seqs)": self.peak,
            "  graphs (--enforce-eager: none)": self.graphs,
            "  attention workspace": self.workspace,
            "  penalties, if all requests ask for them (--max-num-seqs)": self.histories,
            "  left for KV": self.kv,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}{value / MIB:>12,.0f} MiB" for name, value in rows.items())


def graphs_bytes(sizes: list[int], hidden_size: int, itemsize: int) -> int:
    """What recording these batch sizes is reckoned to take."""
    return len(sizes) * GRAPH + max(sizes, default=0) * hidden_size * itemsize
