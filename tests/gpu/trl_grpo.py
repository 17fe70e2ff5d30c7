"""TRL's GRPOTrainer in colocate mode with vLLM's sleep mode, with and without `attach`.

    python -m tests.gpu.trl_grpo [--out results.json] [--steps 10]

The trainer is unmodified but for one line, `attach(trainer.vllm_generation.llm)`. Each
of the two runs is a process of its own with the same seeds; losses and rewards of every
step must be equal, nothing may be refused, and every cycle must be in the log. Exit
status 1 otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

FIELDS = ("loss", "reward", "grad_norm", "completions/mean_length")


def train(attached: bool, steps: int, out: Path) -> None:
    """One run of the trainer, in this process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        HF_HUB_OFFLINE="1",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29555",
        WANDB_MODE="disabled",
    )
    from datasets import Dataset
    from transformers import set_seed
    from trl import GRPOConfig, GRPOTrainer

    from tests.tiny_model import make_tiny_model

    folder = make_tiny_model(Path(tempfile.gettempdir()) / "tiny-trl")
    set_seed(0)

    def reward(completions, **_):
        """How many distinct letters a completion has: varies, and is exact."""
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float(len(set(text))) for text in texts]

    data = Dataset.from_dict({"prompt": [f"Say something about {index}" for index in range(64)]})
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.2,
        vllm_max_model_length=256,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=32,
        learning_rate=1e-4,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
        bf16=False,
    )
    trainer = GRPOTrainer(model=str(folder), reward_funcs=reward, args=config, train_dataset=data)
    lifecycle = None
    if attached:
        from engine_adapter import attach

        lifecycle = attach(trainer.vllm_generation.llm, sinks=())
        print("attached to an engine that is", lifecycle.snapshot())
    trainer.train()
    history = [{key: row.get(key) for key in FIELDS} for row in trainer.state.log_history if "loss" in row]
    events = lifecycle.events() if lifecycle else []
    versions = {package: version(package) for package in ("trl", "transformers", "vllm", "torch")}
    out.write_text(json.dumps({"versions": versions, "history": history, "events": events}, default=str))


def main() -> int:
    """Both runs, and the comparison."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--run", choices=["plain", "attached"])
    options = arguments.parse_args()
    if options.run:
        train(options.run == "attached", options.steps, options.out)
        return 0
    results = {}
    for run in ("plain", "attached"):
        file = Path(tempfile.mkdtemp()) / f"{run}.json"
        command = [sys.executable, "-m", "tests.gpu.trl_grpo", "--run", run, "--steps", str(options.steps)]
        subprocess.run([*command, "--out", str(file)], check=True)
        results[run] = json.loads(file.read_text())
    plain, attached = results["plain"]["history"], results["attached"]["history"]
    events = results["attached"]["events"]
    refused = [event for event in events if event["event"] in ("refused", "failed")]
    slept = [event for event in events if event.get("dest") == "sleeping" and event["event"] == "transition"]
    served = [
        event for event in events if event.get("trigger") == "wake" and event["dest"] in ("awake", "running")
    ]
    print(f"{len(plain)} steps without, {len(attached)} with the lifecycle")
    for row, (a, b) in enumerate(zip(plain, attached, strict=True), 1):
        print(row, "equal" if a == b else f"DIFFERS {a} {b}", b)
    print(
        f"sleeps in the log: {len(slept)}, full wakes: {len(served)}, refusals and failures: {len(refused)}"
    )
    for event in refused:
        print("   ", event)
    good = (
        plain == attached and len(attached) == options.steps and not refused and len(slept) == len(served) > 0
    )
    if options.out:
        options.out.write_text(json.dumps({"equal": good, **results}, indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
