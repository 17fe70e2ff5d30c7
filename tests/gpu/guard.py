"""What the guard costs an `AsyncLLM` on a GPU: `python -m tests.gpu.guard [--json results.json]`.

What `tests.benchmarks.self_driven` measures on two cores: one engine, read in turn by itself and through
`AsyncLifecycle`, with models of the shapes of `tests.gpu.streams`.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from tests.benchmarks.measure import tell
from tests.benchmarks.self_driven import compare, lines_of
from tests.benchmarks.streams import Load
from tests.gpu.streams import SHAPES, model_of

ROUNDS = 11
LOADS = {Load(1, 128): ROUNDS, Load(32, 128): ROUNDS, Load(256, 128): ROUNDS}
SETTINGS = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 256, "gpu_memory_utilization": 0.8}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.guard")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the lines to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = model_of(arguments.shape, Path(folder))
        results = asyncio.run(compare(model, LOADS, load_format="dummy", **SETTINGS))
    lines = tell((lines_of(*result, judged=True) for result in results), arguments.json)
    return int(not all(line.ok for line in lines))


if __name__ == "__main__":
    sys.exit(main())
