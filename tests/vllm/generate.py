# SPDX-License-Identifier: Apache-2.0
"""Generates tokens with vLLM's offline class, on one or several ranks.

vLLM is imported once. Each rank is a fork of this process, with its own engine (vLLM's executor
backend "external_launcher"), because an import takes longer than a test.
"""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._inductor import cpu_vec_isa
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.worker import cpu_worker  # noqa: F401

from epic.vllm.workers import close_workers
from hosts import ADDRESSES, ENVIRONMENT, Hosts

NEW_TOKENS = 12
LIMIT = 280  # time limit of one run in seconds

# Every rank is a fork of this process. The first line does a slow check here, so that the ranks
# need not repeat it. The second line prevents that vLLM starts a process that imports vLLM again.
cpu_vec_isa.pick_vec_isa()
registry._run_in_subprocess = lambda function: function()


class Job(NamedTuple):
    """What to generate.

    Attributes:
        model: Folder of the model.
        dp: Ranks of data parallelism.
        tp: Ranks of tensor parallelism.
        dtype: "float32" or "bfloat16".
        compiled: Whether torch.compile with inductor is used.
        prompts: The tokens of each prompt. Data-parallel rank r takes prompts r, r + dp, ...
    """

    model: Path
    dp: int
    tp: int
    dtype: str
    compiled: bool
    prompts: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp


class Result(NamedTuple):
    """What was generated for a prompt.

    Attributes:
        tokens: The generated tokens.
        logs: Their log-probabilities.
        prompt_logs: The log-probabilities of the tokens of the prompt after the first one.
    """

    tokens: list[int]
    logs: list[float]
    prompt_logs: list[float]


def free_port() -> int:
    """Return a port that no program uses."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def log_probabilities(tokens: Any, found: Any) -> list[float]:
    """Return the log-probability of each token from vLLM's dicts by token."""
    return [by_token[token].logprob for token, by_token in zip(tokens, found, strict=True)]


def generate_rank(job: Job, rank: int) -> list[Result]:
    """Return the results of the prompts of a rank."""
    torch._dynamo.config.disable = not job.compiled  # vLLM compiles some functions in any case
    llm: Any = LLM(
        str(job.model),
        dtype=job.dtype,
        data_parallel_size=job.dp,
        tensor_parallel_size=job.tp,
        distributed_executor_backend="external_launcher" if job.ranks > 1 else "uni",
        enable_expert_parallel=job.ranks > 1,
        enforce_eager=not job.compiled,
        max_model_len=256,
        max_num_batched_tokens=64,  # so that longer prompts are cut into several steps
        max_num_seqs=8,
        additional_config={"epic": {"timeout_ms": 60000}} if job.ranks > 1 else {},
    )
    given = [{"prompt_token_ids": list(prompt)} for prompt in job.prompts[rank // job.tp :: job.dp]]
    first, second = (
        llm.generate(
            given,
            SamplingParams(
                temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0,
                prompt_logprobs=number,
            ),
            use_tqdm=False,
        )
        # vLLM does not read its prefix cache for log-probabilities of prompts, so the second call
        # is the one that finds the prompts in the cache.
        for number in (0, None)
    )  # fmt: skip
    found = []
    for result, repeated in zip(first, second, strict=True):
        out, again = result.outputs[0], repeated.outputs[0]
        assert list(out.token_ids) == list(again.token_ids) or job.dtype != "float32"
        logs = log_probabilities(out.token_ids, out.logprobs)
        prompt_logs = log_probabilities(result.prompt_token_ids[1:], result.prompt_logprobs[1:])
        found.append(Result(list(out.token_ids), logs, prompt_logs))
    if job.ranks > 1:
        torch.distributed.barrier()  # no rank ends while another one still needs it
    return found


def write_log(log: Path) -> None:
    """Redirect the output of this process to a file."""
    with log.open("w") as file:
        for number in {1, 2, sys.stdout.fileno(), sys.stderr.fileno()}:  # pytest has replaced both
            os.dup2(file.fileno(), number)


def run_rank(job: Job, rank: int, address: str, port: int, out: Path) -> None:
    """Write the results of a rank as JSON, and its log next to them."""
    write_log(out.with_suffix(".log"))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    # vLLM derives the name of its shared memory from this address, so it must be unique.
    launcher: Any = ExecutorWithExternalLauncher
    launcher._distributed_args = lambda _: (f"tcp://{address}:{port}", rank, rank)
    out.write_text(json.dumps(generate_rank(job, rank)))


def run_forked(job: Job, rank: int, port: int, out: Path) -> None:
    """Run a rank and end the process; the body of a fork."""
    os.setpgid(0, 0)
    run_rank(job, rank, "127.0.0.1", port, out)
    close_workers()
    os._exit(0)  # threads of vLLM may wait for other ranks


def generate(job: Job, folder: Path) -> tuple[list[Result], str]:
    """Return the results of all prompts, and the logs of all ranks.

    Args:
        job: What to generate.
        folder: An empty folder for the files of the ranks.

    Raises:
        RuntimeError: A rank failed, or the time limit has passed.
    """
    port, fork = free_port(), multiprocessing.get_context("fork")
    outs = [folder / f"{rank}.json" for rank in range(job.ranks)]
    ranks = [
        fork.Process(target=run_forked, args=(job, rank, port, out))
        for rank, out in enumerate(outs)
    ]
    end = time.monotonic() + LIMIT
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.exitcode is None:
            os.killpg(rank.pid or 0, signal.SIGKILL)
            rank.join()
    for left in Path("/dev/shm").glob(f"{port}-*-cpushm_*"):
        left.unlink()  # vLLM's memory for tensor parallelism
    return collect(job, outs, codes)


def generate_on_hosts(job: Job, folder: Path, hosts: Hosts) -> tuple[list[Result], str]:
    """Return what generate() returns, of two ranks that Open MPI starts on two hosts."""
    outs = [folder / f"{rank}.json" for rank in range(job.ranks)]
    passed = json.dumps([[str(job.model), *job[1:]], ADDRESSES[0], free_port(), str(folder)])
    words = [*hosts.mpirun(), sys.executable, __file__, passed]
    run = subprocess.run(words, env=os.environ | ENVIRONMENT, timeout=LIMIT, check=False)
    return collect(job, outs, [run.returncode])


def collect(job: Job, outs: list[Path], codes: list[int | None]) -> tuple[list[Result], str]:
    """Return the results of all prompts and the logs of all ranks, or raise RuntimeError."""
    logs = "".join(out.with_suffix(".log").read_text(errors="replace") for out in outs)
    if any(codes):
        raise RuntimeError(f"the exit statuses of the ranks are {codes}\n{logs}")
    # All ranks of a group of tensor parallelism have the same results.
    results = [json.loads(outs[rank * job.tp].read_text()) for rank in range(job.dp)]
    return [Result(*results[i % job.dp][i // job.dp]) for i in range(len(job.prompts))], logs


def main() -> None:
    """Run the rank that Open MPI has started."""
    (model, *others), address, port, folder = json.loads(sys.argv[1])
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    run_rank(Job(Path(model), *others), rank, address, port, Path(folder) / f"{rank}.json")


if __name__ == "__main__":
    main()
