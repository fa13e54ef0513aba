"""Quality and cost of memory, on this machine.

    python -m benchmarks.memory [quality scale tenants working]
    python -m benchmarks.memory scale --episodes 1000000      (about an hour, 20 GB of disk)

    quality   recall@5, recall@10, NDCG@10 of words, vectors and both, by class of question, on a
              generated corpus with known answers, for each way of scoring; seeds 1 and 2
    scale     ingest, latency and recall of the modes of search, by id, by attributes; bytes each
    tenants   recall of tenants that own few of many rows
    working   operations of the working memory, and the prompts of a run of 200 tool calls

Without names: quality, working, and scale at 10,000 and 100,000. Absolute times depend on
the machine; ratios to the floor of the same invocation are comparable.
"""

import argparse
import asyncio
import os
from importlib import import_module
from pathlib import Path

from benchmarks.memory import quality, scale, working

PARTS = ("quality", "scale", "tenants", "working")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="part")
    parser.add_argument("--episodes", type=int, action="append", help="for scale; repeatable")
    parser.add_argument("--texts", type=Path, help="for scale: a file with a text per line")
    parser.add_argument("--shared-buffers", help="for scale: PostgreSQL's setting, such as 6GB")
    parser.add_argument("--seed", type=int, action="append", help="for quality; repeatable")
    arguments = parser.parse_args()
    parts = arguments.parts or ("quality", "working", "scale")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{os.cpu_count()} cores, load before {load}: others at work make times noisy")
    for part in PARTS:
        if part not in parts:
            continue
        print(f"\n== {part}")
        if part == "quality":
            for seed in arguments.seed or (1, 2):
                print(f"\nseed {seed}")
                quality.show(asyncio.run(quality.measure(seed, 5_000, 40)))
        elif part == "scale":
            for episodes in arguments.episodes or (10_000, 100_000):
                scale.main(episodes, arguments.texts, arguments.shared_buffers)
        elif part == "tenants":
            import_module("benchmarks.memory.tenants").main()
        else:
            working.main()


if __name__ == "__main__":
    main()
