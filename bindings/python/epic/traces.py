# SPDX-License-Identifier: Apache-2.0
"""Reads placements that epic-place wrote, and reads and writes traces."""

import hashlib
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from epic.errors import EpicArgumentError
from epic.options import check_int

MOST = 65536  # largest number of ranks and of experts in a placement


class Placement(NamedTuple):
    """A placement of experts on ranks, as `read_placement` returns it.

    Attributes:
        num_ranks: Number of ranks.
        num_experts: Number of experts; each replica counts.
        num_logical: Number of logical experts; 0: there are no replicas.
        rank_of_expert: [num_experts]: the rank that owns each expert.
        logical_of_expert: [num_experts]: the logical expert of which each expert is a replica; None
            without replicas.
    """

    num_ranks: int
    num_experts: int
    num_logical: int
    rank_of_expert: list[int]
    logical_of_expert: list[int] | None


def read_placement(path: str | os.PathLike[str]) -> Placement:
    """Read a placement file that epic-place wrote.

    Args:
        path: The file. The header epic/placement.h describes its format.

    Returns:
        The placement. Pass its lists to `plan`, `moe` or a layer.

    Raises:
        EpicArgumentError: The file is not a placement.
    """
    words = Path(path).read_text(encoding="ascii", errors="replace").split()
    at = 0

    def numbers(name: str, num: int, least: int, most: int) -> list[int]:
        """Return the next `num` numbers of the file, after checking that `name` precedes them."""
        nonlocal at
        found = words[at : at + 1 + num]
        at += 1 + num
        good = len(found) == 1 + num and found[0] == name
        good = good and all(w.isdigit() and len(w) < 10 for w in found[1:])
        values = [int(w) for w in found[1:]] if good else []
        if not good or not all(least <= v <= most for v in values):
            raise EpicArgumentError(
                f"{path}: {name} must be followed by {num} numbers from {least} to {most}; pass a "
                "file that epic-place wrote"
            )
        return values

    numbers("epic-placement", 1, 1, 1)
    (ranks,) = numbers("ranks", 1, 1, MOST)
    (experts,) = numbers("experts", 1, 1, MOST)
    (logical,) = numbers("logical", 1, 0, experts)
    rank_of = numbers("rank_of_expert", experts, 0, ranks - 1)
    logical_of = numbers("logical_of_expert", experts, 0, logical - 1) if logical else None
    if words[at:]:
        raise EpicArgumentError(
            f"{path}: {words[at][:40]!r} follows the last list: must end there; pass a file that "
            "epic-place wrote"
        )
    return Placement(ranks, experts, logical, rank_of, logical_of)


# ---------------------------------------------------------------------------- traces ----

# docs/reference/trace-format.md describes the header of a file, and the header of a record.
HEADER = struct.Struct("<8sIIiiQq64s24x")
RECORD = struct.Struct("<IIQQQqqIIII")
MAGIC, VERSION, KIND_PLAN = b"EPICTRC\n", 1, 1


class TraceStep(NamedTuple):
    """The choices of all ranks in one plan, as `read_trace` returns them.

    Attributes:
        topk_idx: [num_tokens, top_k] int32: the chosen experts of all ranks' tokens, in the order
            of ranks; -1: no expert.
        tokens_of: Number of tokens of each rank.
        num_experts: Number of experts.
    """

    topk_idx: np.ndarray
    tokens_of: list[int]
    num_experts: int

    def of_rank(self, rank: int) -> np.ndarray:
        """Return the ids [tokens, top_k] of one rank's tokens."""
        first = sum(self.tokens_of[:rank])
        return self.topk_idx[first : first + self.tokens_of[rank]]


class RankPlan(NamedTuple):
    """One rank's choices in a plan of a trace."""

    time_ns: int
    topk_idx: np.ndarray
    num_experts: int


class TraceFile(NamedTuple):
    """The file of one rank in a trace."""

    rank: int
    num_ranks: int
    group_id: int
    group: str
    plans: dict[tuple[int, int], RankPlan]  # by tag and sequence number


def read_trace(
    path: str | os.PathLike[str], *, num_layers: int = 1, group: str | None = None
) -> list[list[TraceStep]]:
    """Read the chosen experts of each layer from a trace.

    A trace contains only choices that were sent. So choices of zero-experts are -1 in it.

    Args:
        path: The folder of the trace, which the variable EPIC_TRACE contained.
        num_layers: Number of layers that shared the group. Their plans alternate in the trace:
            layer i has the plans i, i + num_layers, i + 2 * num_layers and so on.
        group: Name of the group, or the 16 digits of its id. None: the folder has only one group.

    Returns:
        For each layer a list of its plans, in the order of time. Plans that not all ranks recorded
        are left out.

    Raises:
        EpicArgumentError: The folder has no trace, several groups, or files of runs with different
            numbers of ranks, or a file is not a trace.

    Example:
        layers = epic.read_trace("/tmp/run", num_layers=2)
        ids = torch.from_numpy(layers[0][0].of_rank(group.rank))
        out, loss = layer(x, forced=ids)
    """
    files = [read_trace_file(file) for file in sorted(Path(path).glob("*.epictrace"))]
    if group is not None:
        files = [f for f in files if group in (f.group, f"{f.group_id:016x}")]
    ids = sorted({f"{f.group_id:016x}" for f in files})
    if len(ids) != 1:
        raise EpicArgumentError(
            f"{path} has {len(ids)} groups{' ' + ', '.join(ids) if ids else ''}: must have one, "
            "from EPIC_TRACE; pass group= to select one"
        )
    check_int("num_layers", num_layers, 1)
    sizes = sorted({f.num_ranks for f in files})
    if len(sizes) != 1:
        raise EpicArgumentError(
            f"{path} has files of groups of {sizes[0]} and {sizes[1]} ranks: must be of one run; "
            "remove the files of the other run"
        )
    ranks = {f.rank: f.plans for f in files}
    complete = len(ranks) == files[0].num_ranks
    keys = set.intersection(*(set(plans) for plans in ranks.values())) if complete else set()
    parts = [[ranks[r][key] for r in range(len(ranks))] for key in keys]
    parts.sort(key=lambda step: min(part.time_ns for part in step))
    steps = [join_parts(path, step) for step in parts]
    return [steps[layer::num_layers] for layer in range(num_layers)]


def join_parts(path: str | os.PathLike[str], parts: list[RankPlan]) -> TraceStep:
    """Return one plan from the parts of all ranks, in the order of ranks."""
    shapes = {(part.topk_idx.shape[1], part.num_experts) for part in parts}
    if len(shapes) != 1:
        raise EpicArgumentError(
            f"{path} has a plan with {len(shapes)} different top_k or num_experts: must be equal "
            "on all ranks"
        )
    ids = np.concatenate([part.topk_idx for part in parts])
    return TraceStep(ids, [len(part.topk_idx) for part in parts], parts[0].num_experts)


def read_trace_file(file: Path) -> TraceFile:
    """Return the content of one rank's file. An incomplete last record is ignored."""
    data = file.read_bytes()
    if len(data) < HEADER.size or data[:8] != MAGIC:
        raise EpicArgumentError(f"{file} is not a trace: must be a file that EPIC_TRACE wrote")
    _, version, header_bytes, rank, num_ranks, group_id, _, name = HEADER.unpack_from(data)
    if version != VERSION or header_bytes < HEADER.size:
        raise EpicArgumentError(f"{file} has the version {version}: must be {VERSION}")
    group = name.split(b"\0")[0].decode("ascii", "replace")
    return TraceFile(rank, num_ranks, group_id, group, dict(plans_of(file, data, header_bytes)))


def plans_of(file: Path, data: bytes, at: int) -> Iterator[tuple[tuple[int, int], RankPlan]]:
    """Yield ((tag, sequence number), plan) for each plan of a file.

    Args:
        file: The file, for errors.
        data: Its content.
        at: Offset of the first record.
    """
    while at + RECORD.size <= len(data):
        kind, id_bytes, more, tag, sequence, time, *plan = RECORD.unpack_from(data, at)
        num_tokens, top_k, num_experts = plan[:3]
        at += RECORD.size
        if at + more > len(data):
            return
        if kind == KIND_PLAN:
            if id_bytes not in (1, 2, 4) or not 0 <= num_tokens * top_k * id_bytes <= more:
                raise EpicArgumentError(
                    f"{file} has a plan of {num_tokens} tokens in {more} bytes: must have an id "
                    "for each choice"
                )
            found = np.frombuffer(data, f"<u{id_bytes}", num_tokens * top_k, at)
            none = found == np.iinfo(found.dtype).max
            ids = np.where(none, -1, found.astype(np.int64)).astype(np.int32)
            yield (tag, sequence), RankPlan(time, ids.reshape(num_tokens, top_k), num_experts)
        at += more


class TraceWriter:
    """Writes the chosen experts of one rank to a trace, for groups on GPUs.

    EPIC_TRACE records only groups on CPUs, because the ids of a GPU group are on the device. This
    class writes the same files on request, at the end of a step. Each rank makes a writer, and all
    ranks write equally many plans in the same order.

    Args:
        path: The folder of the trace. It is created, but not its parents.
        rank: Rank of this process.
        num_ranks: Number of ranks.
        group: Name of the group. A folder has one trace for each name.

    Raises:
        EpicArgumentError: rank is not below num_ranks, or an argument has a wrong type.
        OSError: The file cannot be written.

    Example:
        with epic.TraceWriter("/tmp/run", rank=group.rank, num_ranks=group.num_ranks) as writer:
            for step in range(100):
                graph.replay()
                for ids in ids_of_layers:  # the tensors topk_idx that the graph has written
                    writer.write(ids, num_experts=64)
    """

    def __init__(
        self, path: str | os.PathLike[str], *, rank: int, num_ranks: int, group: str = "epic"
    ) -> None:
        num_ranks, rank = check_int("num_ranks", num_ranks, 1), check_int("rank", rank)
        if rank >= num_ranks:
            raise EpicArgumentError(
                f"rank is {rank}: must be from 0 to {num_ranks - 1}, because num_ranks is "
                f"{num_ranks}"
            )
        name = group.encode()[:63]
        group_id = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
        safe = re.sub("[^a-zA-Z0-9.-]", "_", name.decode(errors="replace"))
        Path(path).mkdir(exist_ok=True)
        file = Path(path, f"{safe}-{group_id:016x}-{rank}.epictrace")
        self.file = file.open("wb")
        self.num_plans = 0
        self.file.write(
            HEADER.pack(
                MAGIC, VERSION, HEADER.size, rank, num_ranks, group_id, time.time_ns(), name
            )
        )

    def write(self, topk_idx: Any, num_experts: int, *, alignment: int = 1) -> None:
        """Write the choices of one plan. For a tensor on a GPU, waits for its stream and copies it.

        Args:
            topk_idx: [num_tokens, top_k] integers, a tensor of torch, or an array of JAX or NumPy:
                the chosen experts of this rank's tokens; negative: no expert.
            num_experts: Number of experts that a token can choose.
            alignment: The alignment of the layer.

        Raises:
            EpicArgumentError: topk_idx has another shape or type, or an id is not an expert.
        """
        num_experts = check_int("num_experts", num_experts, 1)
        alignment = check_int("alignment", alignment, 1)
        ids = np.asarray(topk_idx.detach().cpu() if hasattr(topk_idx, "detach") else topk_idx)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise EpicArgumentError(
                f"topk_idx is {ids.dtype} {list(ids.shape)}: must be integers [num_tokens, top_k]"
            )
        if ids.size and int(ids.max()) >= num_experts:
            raise EpicArgumentError(
                f"topk_idx has the id {int(ids.max())}: must be below num_experts {num_experts}"
            )
        id_bytes = 1 if num_experts <= 0xFF else 2 if num_experts <= 0xFFFF else 4
        none = (1 << 8 * id_bytes) - 1
        payload = np.where(ids < 0, none, ids).astype(f"<u{id_bytes}").tobytes()
        payload += bytes(-len(payload) % 8)
        plan = (*ids.shape, num_experts, alignment, 0)
        record = RECORD.pack(
            KIND_PLAN, id_bytes, len(payload), 0, self.num_plans, time.time_ns(), *plan
        )
        self.file.write(record + payload)
        self.file.flush()  # so that the trace of a killed job is complete
        self.num_plans += 1

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        self.file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
