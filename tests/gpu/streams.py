"""`AsyncLifecycle` against vLLM's `AsyncLLM` on a GPU: `python -m tests.gpu.streams [--json results.json]`.

What `tests.benchmarks.streams` measures on two cores, with up to 1,024 streams, on models of the shapes of
Mistral Small 24B, Llama 3.1 8B and Qwen 2.5 0.5B: random weights, and a vocabulary of 259 tokens, so that
nothing need be downloaded. Asynchronous scheduling and CUDA graphs are on, as vLLM has them by default. Both
engines share the card, and run in turn.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
)  # of `LLMEngine`; `AsyncLLM` has its process anyway
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from tests.benchmarks.measure import tell
from tests.benchmarks.streams import BURN_S, Load, measure
from tests.tiny_model import make_tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "24b": {
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
LOADS = (
    Load(1, 128),
    Load(32, 128),
    Load(256, 128),
    Load(1024, 64),
    Load(32, 24, BURN_S),
    Load(256, 8, BURN_S),
)


def model_of(shape: str, folder: Path) -> Path:
    """A folder with the configuration of this shape, and the tokenizer of the tiny model."""
    target = folder / shape
    shutil.copytree(make_tiny_model(folder / "tiny"), target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config.update(SHAPES[shape], max_position_embeddings=4096, dtype="bfloat16")
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.streams")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the lines to this file too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(
            model_of(arguments.shape, Path(folder)),
            {load: 1 if load.burn_s else arguments.rounds for load in LOADS},
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=1024,
            gpu_memory_utilization=0.45,
        )
        lines = tell(measured, arguments.json)
    return int(not all(line.ok for line in lines))


if __name__ == "__main__":
    sys.exit(main())
