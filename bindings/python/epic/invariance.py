# SPDX-License-Identifier: Apache-2.0
"""Compares the bits of a layer's stages between batches, for check_invariance of PyTorch and JAX.

A *probe* is a function that runs the layer on a batch of tokens. For each stage it returns one row
of numbers for each token. The tokens of all batches are drawn from one *pool*. The rows of a token
must be equal in every batch.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from epic.errors import EpicArgumentError
from epic.options import Moe

# The stages in the order in which a layer computes them. If bits differ in one stage, they usually
# differ in all later stages too.
STAGES = ("gate", "router", "dispatch", "product", "combine", "gradient")
POOL = 64  # number of tokens in the pool
MOST_GROUPS = 8  # approximate number of groups of top_k logits that a probe reads


@dataclass(frozen=True)
class Difference:
    """A difference between the bits of one layer in two batches.

    Attributes:
        layer: Name of the layer in the model; "" for a single layer.
        stage: First stage whose bits differ. "gate": logits. "router": chosen ids and weights.
            "dispatch": rows that were sent to an expert and back. "product": result of one expert.
            "combine": output of the layer. "gradient": gradient of the tokens.
        num_tokens: Number of tokens in the batch of each rank.
        tokens: Number of tokens whose bits differ, on all ranks together.
    """

    layer: str
    stage: str
    num_tokens: int
    tokens: int


@dataclass(frozen=True)
class InvarianceReport:
    """Result of check_invariance, equal on all ranks.

    Attributes:
        layers: Names of the layers that were checked.
        batches: Number of tokens of each rank in each batch.
        differences: For each layer and batch whose bits differ, the first stage where they differ.
        fingerprint: Hash of the rows of all stages. It is equal for groups of different sizes with
            equal bits, options and parameters, if their max_tokens are equal, or all at least 64.
    """

    layers: tuple[str, ...]
    batches: tuple[int, ...]
    differences: tuple[Difference, ...]
    fingerprint: str

    @property
    def is_invariant(self) -> bool:
        """Whether the bits were equal in all batches."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The difference in the earliest stage; None if there is none."""
        return min(self.differences, key=lambda d: STAGES.index(d.stage), default=None)


Rows = dict[str, np.ndarray]  # by stage: [num_tokens, bytes] uint8


def check_replicas(options: Moe, logical_of_expert: Sequence[int]) -> None:
    """Raise an error for replicas in several leaves, with which no layer is invariant.

    The core checks the same on CPUs only.

    Args:
        options: The options of the layer.
        logical_of_expert: The logical expert of each expert.
    """
    if not options.invariant:
        return
    of_leaf = options.layer.num_experts // options.layer.leaves
    first: dict[int, int] = {}
    for expert, logical in enumerate(logical_of_expert):
        if logical < 0:
            continue
        other = first.setdefault(logical, expert)
        if expert // of_leaf != other // of_leaf:
            raise EpicArgumentError(
                f"logical_of_expert is {logical} for experts {other} and {expert}: with "
                f"invariant=True replicas must be in one leaf ({of_leaf} consecutive experts); "
                "pass a smaller `leaves`, or sum_order='tree' without invariant=True"
            )


def as_bytes(*parts: np.ndarray) -> np.ndarray:
    """Return arrays [num_tokens, ...] as one array [num_tokens, bytes] of their bits."""
    rows = [np.ascontiguousarray(part) for part in parts]
    return np.concatenate([r.view(np.uint8).reshape(len(r), -1) for r in rows], axis=1)


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens to try, at most `most`; the largest comes first."""
    return tuple(sorted({n for n in (1, 2, 7, 32, 100, 1000, 4096, most) if n <= most})[::-1])


def draw_pool(num_tokens: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the pool and their gradients, float32 [tokens, columns]."""
    shape = (2, min(POOL, num_tokens), columns)
    rows, gradients = np.random.default_rng(columns).standard_normal(shape, np.float32)
    return rows, gradients


def draw_tokens(num_tokens: int, pool: int, turn: int, rank: int) -> np.ndarray:
    """Return the tokens of a batch, as random numbers of tokens in the pool.

    Batch 0 begins with all tokens of the pool, in order, and is the reference.

    Args:
        num_tokens: Number of tokens in the batch.
        pool: Number of tokens in the pool.
        turn: Number of the batch.
        rank: Rank, which draws other tokens than other ranks.
    """
    drawn = np.random.default_rng((turn, num_tokens, rank)).integers(0, pool, num_tokens)
    if turn == 0:
        drawn[:pool] = np.arange(pool)
    return drawn


def column_groups(columns: int, top_k: int) -> list[np.ndarray]:
    """Return groups of top_k columns of logits, spread over all columns; -1 fills the last one."""
    starts = range(0, columns, top_k)
    step = max(1, len(starts) // MOST_GROUPS)
    whole = np.arange(columns + top_k)
    whole[columns:] = -1
    return [whole[start : start + top_k] for start in starts[::step]]


def count_differences(rows: Rows, tokens: np.ndarray, references: Rows) -> list[int]:
    """Return for each stage how many tokens do not have the bits of the reference.

    Args:
        rows: The rows of a batch by stage.
        tokens: The tokens of the batch, as numbers in the pool.
        references: The rows of all tokens of the pool by stage.
    """
    counts = []
    for stage in STAGES:
        values = rows.get(stage)
        same = True if values is None else (values == references[stage][tokens]).all(axis=1)
        counts.append(int(np.sum(np.logical_not(same))))
    return counts


def hash_rows(references: Iterable[Rows]) -> str:
    """Return a hash of the rows of all layers and stages."""
    found = hashlib.sha256()
    for rows in references:
        for stage in STAGES:
            if stage in rows:
                found.update(rows[stage].tobytes())
    return found.hexdigest()[:16]


def compare_batches(
    layer: str,
    sizes: Sequence[int],
    probe: Callable[[np.ndarray], Rows],
    share: Callable[[Rows], Rows],
    add: Callable[[list[int]], list[int]],
    rank: int,
    pool: int,
) -> tuple[list[Difference], Rows]:
    """Run the batches of one layer and compare them.

    Args:
        layer: Name of the layer.
        sizes: Number of tokens of each batch; the largest comes first.
        probe: Runs the layer on tokens of the pool.
        share: Returns the rows of the first member on all ranks.
        add: Adds counts over the ranks.
        rank: This rank.
        pool: Number of tokens in the pool, at most sizes[0].

    Returns:
        The differences, and the rows of the pool's tokens by stage.
    """
    differences, references = [], {}
    for turn, size in enumerate((sizes[0], *sizes)):
        tokens = draw_tokens(size, pool, turn, rank if turn else 0)
        own = probe(tokens)
        if turn == 0:
            references = share({stage: rows[:pool] for stage, rows in own.items()})
        counts = add(count_differences(own, tokens, references))
        worst = next((i for i, count in enumerate(counts) if count), None)
        if worst is not None:
            differences.append(Difference(layer, STAGES[worst], size, counts[worst]))
    return differences, references
