"""Which part of a model each tensor-parallel rank holds (Megatron-LM, Shoeybi et al. 2019). Knows no tensor, no torch.

Attention and the feed-forward part are split by heads and by intermediate features: projections into them by outputs,
projections out of them by inputs, so that a layer costs two sums over the ranks. Embedding and head are split by ids.
Norms are held whole by every rank. Projections out of a part have no biases in this family; such a bias would have to
be added by one rank alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.model.coding import ALL, Axes, stored_shape
from runtime.model.config import ConfigError, ModelConfig
from runtime.model.shapes import expected_shapes

MOST = 64  # ranks
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Rank:
    """One of the `size` processes that hold a model together."""

    index: int = 0
    size: int = 1


ALONE = Rank()


@dataclass(frozen=True)
class Part:
    """Of a tensor: `start` to `stop` along `dim`, followed by `padding` rows of zeros."""

    dim: int
    start: int
    stop: int
    padding: int = 0

    @property
    def index(self) -> tuple[slice, ...]:
        return (slice(None),) * self.dim + (slice(self.start, self.stop),)


def config_of(config: ModelConfig, rank: Rank) -> ModelConfig:
    """The shape of what a rank computes: its heads and its intermediate features, of the whole vocabulary.

    With fewer KV heads than ranks each is held by several. Raises `ConfigError` for what cannot be split.
    """
    if obstacle := _obstacle(config, rank.size):
        others = ", ".join(str(size) for size in range(1, MOST + 1) if not _obstacle(config, size))
        raise ConfigError(
            f"--tensor-parallel-size {rank.size}: the model's {obstacle} cannot be split so (but into {others})"
        )
    kv_heads = max(1, config.num_kv_heads // rank.size)
    return replace(
        config,
        num_heads=config.num_heads // rank.size,
        num_kv_heads=kv_heads,
        intermediate_size=config.intermediate_size // rank.size,
    )


def _obstacle(config: ModelConfig, size: int) -> str:
    """What cannot be split into so many parts; "" where all can."""
    if config.num_heads % size:
        return f"{config.num_heads} attention heads"
    if config.intermediate_size % size:
        return f"{config.intermediate_size} intermediate features"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"{config.num_kv_heads} KV heads"
    return _obstacle_of_codes(config, size)


def _obstacle_of_codes(config: ModelConfig, size: int) -> str:
    if config.coding is None or size == 1:
        return ""
    for name, shape in expected_shapes(replace(config, num_layers=1)).items():
        for axes in config.coding.tensors.values() if name.endswith("_proj.weight") else ():
            if axes and stored_part(axes, part_of(name, config, shape, Rank(0, size)), shape) is None:
                return f"groups of {name.split('.')[-2]}"
    return ""


def part_of(name: str, config: ModelConfig, shape: tuple[int, ...], rank: Rank) -> Part:
    """What a rank holds of the tensor `name` of the whole model; `shape` and `config` are the whole's."""
    kind = name.split(".")[-2]
    if name in VOCABULARY:
        return ids(config.vocab_size, rank)
    if kind in ("k_proj", "v_proj"):
        return _heads(config.num_kv_heads, shape[0], rank)
    if kind in ("q_proj", "gate_proj", "up_proj"):
        return _even(0, shape[0], rank)
    if kind in ("o_proj", "down_proj"):
        return _even(1, shape[1], rank)
    return Part(0, 0, shape[0])


def stored_part(axes: Axes, held: Part, shape: tuple[int, ...]) -> Part | None:
    """What belongs to a part of a weight of `shape`; None where the part does not end where an entry does.

    `held` has no padding, the tensor one dimension at least.
    """
    for at, axis in enumerate(axes):
        if axis.dim == held.dim and axis.per != ALL:
            ends = (held.start, held.stop)
            if any(end % axis.per and end != shape[held.dim] for end in ends):
                return None
            return Part(at, held.start // axis.per, -(-held.stop // axis.per))
    return Part(0, 0, stored_shape(axes, shape)[0])


def ids(vocab_size: int, rank: Rank) -> Part:
    """The ids whose rows a rank holds: as many for each rank, where there are none any more rows of zeros."""
    count = -(-vocab_size // rank.size)
    start, stop = (min(at * count, vocab_size) for at in (rank.index, rank.index + 1))
    return Part(0, start, stop, count - (stop - start))


def _even(dim: int, length: int, rank: Rank) -> Part:
    count = length // rank.size
    return Part(dim, rank.index * count, (rank.index + 1) * count)


def _heads(heads: int, length: int, rank: Rank) -> Part:
    """Of KV heads, the ones that the rank's query heads read."""
    count = max(1, heads // rank.size) * length // heads
    start = rank.index * heads // rank.size * length // heads
    return Part(0, start, start + count)
