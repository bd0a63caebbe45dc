# SPDX-License-Identifier: Apache-2.0
"""Generates tokens with vLLM's offline class, on one or several ranks, and writes them as JSON.

usage: generate.py JOB, where JOB is a JSON object with the keys
    model    folder of the model
    dp, tp   ranks of data and of tensor parallelism
    dtype    "float32" or "bfloat16"
    eager    whether not to compile
    prompts  lists of token numbers; rank r of data parallelism takes prompts r, r + dp, ...
    port     a free port of this host
    out      file for the results: for each prompt the tokens and their log-probabilities
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS = 12


def generate(job: dict[str, Any], rank: int) -> None:
    """Write the tokens and log-probabilities of the prompts of a data-parallel rank."""
    from vllm import LLM, SamplingParams

    ranks = job["dp"] * job["tp"]
    llm: Any = LLM(
        job["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        tensor_parallel_size=job["tp"],
        enable_expert_parallel=ranks > 1,
        enforce_eager=job["eager"],
        max_model_len=256,
        max_num_batched_tokens=64,  # so that longer prompts are cut into several steps
        max_num_seqs=8,
        additional_config={"epic": {"timeout_ms": 60000}} if ranks > 1 else {},
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    given = [{"prompt_token_ids": prompt} for prompt in job["prompts"][rank :: job["dp"]]]
    found = []
    for result in llm.generate(given, sampling, use_tqdm=False):
        out = result.outputs[0]
        pairs = zip(out.token_ids, out.logprobs, strict=True)
        found.append([list(out.token_ids), [by_token[t].logprob for t, by_token in pairs]])
    out_file = Path(f"{job['out']}.{rank}")
    out_file.with_suffix(".part").write_text(json.dumps(found))
    out_file.with_suffix(".part").rename(out_file)
    # The other ranks need this engine until they have their results, too.
    while not all(Path(f"{job['out']}.{other}").exists() for other in range(job["dp"])):
        time.sleep(0.1)
    llm.llm_engine.engine_core.shutdown()


def run_rank(job: dict[str, Any], rank: int, port: int) -> None:
    """Generate as one rank of data parallelism."""
    if job["dp"] > 1:
        os.environ |= {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(job["dp"]),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
    generate(job, rank)


def main() -> None:
    """Run the job with a process for each rank of data parallelism."""
    job = json.loads(sys.argv[1])
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=run_rank, args=(job, rank, job["port"])) for rank in range(job["dp"])
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"a rank failed: {[rank.exitcode for rank in ranks]}")
    results = [json.loads(Path(f"{job['out']}.{r}").read_text()) for r in range(job["dp"])]
    merged = [results[i % job["dp"]][i // job["dp"]] for i in range(len(job["prompts"]))]
    Path(job["out"]).write_text(json.dumps(merged))


if __name__ == "__main__":
    main()
