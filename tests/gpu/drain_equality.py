"""Drain, sleep and wake on a GPU: every request's tokens equal to an uninterrupted run.

    python -m tests.gpu.drain_equality [--out results.json]

Default asynchronous scheduling and full CUDA graphs. For each level and mode: sleep in
the middle of a rollout, wake by tags (weights reloaded after level 2), finish, compare
ids, text and finish reasons with the same prompts run without a sleep; print the
reports with device memory before and after. Then level 2 with one layer's `k_proj`
withheld: generation is refused, naming the parameter. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from engine_adapter import VllmInprocess
from lifecycle import Lifecycle, WeightsNotValid
from tests.tiny_model import make_tiny_model

PROMPTS = [f"Prompt number {index} tells of {'a lot of ' * (index % 5)}things" for index in range(16)]
SLOTS, TOKENS, STEPS_BEFORE = 8, 48, 12


def parameters():
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kinds = list(RequestOutputKind)
    return [
        SamplingParams(
            temperature=1.0,
            seed=1000 + index,
            max_tokens=TOKENS + index,
            ignore_eos=True,
            logprobs=1,
            output_kind=kinds[index % 3],
        )
        for index in range(len(PROMPTS))
    ]


class Rollout:
    """Runs the prompts and collects each request's tokens, text, reason and logprobs."""

    def __init__(self, engine, tag):
        self.engine, self.tag = engine, tag
        self.done = {}
        self.deltas = {}
        self.kinds = {}
        for index, (prompt, params) in enumerate(zip(PROMPTS, parameters(), strict=True)):
            self.kinds[f"{tag}-{index}"] = params.output_kind.name
            engine.add_request(f"{tag}-{index}", prompt, params)

    def steps(self, most=None):
        count = 0
        while self.engine.has_unfinished_requests() and (most is None or count < most):
            for output in self.engine.step():
                self._collect(output)
            count += 1

    def _collect(self, output):
        sample, name = output.outputs[0], output.request_id
        ids, text, logprobs = list(sample.token_ids), sample.text, list(sample.logprobs or ())
        if self.kinds[name] == "DELTA":
            before = self.deltas.get(name, ([], "", []))
            ids, text, logprobs = before[0] + ids, before[1] + text, before[2] + logprobs
            self.deltas[name] = (ids, text, logprobs)
        if output.finished:
            assert name not in self.done, f"{name} finished twice"
            chosen = [entry[token].logprob for entry, token in zip(logprobs, ids, strict=True)]
            self.done[name] = (ids, text, sample.finish_reason, chosen)

    def results(self):
        return [self.done.get(f"{self.tag}-{index}") for index in range(len(PROMPTS))]


def compare(reference, results):
    """(requests that differ, the largest difference of a logprob)."""
    differ = [
        index
        for index, (want, got) in enumerate(zip(reference, results, strict=True))
        if got is None or want[:3] != got[:3]
    ]
    drift = max(
        (
            abs(a - b)
            for want, got in zip(reference, results, strict=True)
            if got
            for a, b in zip(want[3], got[3], strict=False)
        ),
        default=0.0,
    )
    return differ, drift


def checkpoint(folder):
    from safetensors.torch import load_file

    return {
        key: value for file in Path(folder).glob("*.safetensors") for key, value in load_file(file).items()
    }


def model_of(lifecycle):
    return lifecycle._core.engine.raw.model_executor.driver_worker.worker.model_runner.model


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    import torch
    import vllm

    folder = make_tiny_model(Path(tempfile.gettempdir()) / "tiny-gpu")
    started = time.monotonic()
    lifecycle = Lifecycle(
        VllmInprocess(
            model=str(folder),
            max_model_len=256,
            max_num_seqs=SLOTS,
            enable_sleep_mode=True,
            gpu_memory_utilization=0.3,
            disable_log_stats=True,
        ),
        sinks=(),
    )
    raw = lifecycle._core.engine.raw
    found = {
        "device": torch.cuda.get_device_name(0),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "async_scheduling": raw.vllm_config.scheduler_config.async_scheduling,
        "cudagraph_mode": str(raw.vllm_config.compilation_config.cudagraph_mode),
        "start_s": round(time.monotonic() - started, 1),
        "capabilities": repr(lifecycle._core.engine.capabilities),
    }
    print(json.dumps(found, indent=1))
    reference_run = Rollout(lifecycle, "reference")
    reference_run.steps()
    reference = reference_run.results()
    again = Rollout(lifecycle, "again")
    again.steps()
    floor = compare(reference, again.results())
    print("the same run twice: differ", floor[0], "logprob drift", floor[1])
    rows, failed = [], bool(floor[0])
    for level in (0, 1, 2):
        for mode in ("wait", "keep"):
            rollout = Rollout(lifecycle, f"{level}-{mode}")
            rollout.steps(STEPS_BEFORE)
            slept = lifecycle.sleep(level, mode)
            wakes = []
            if level:
                wakes.append(lifecycle.wake_up(["weights"]))
                if level == 2:
                    lifecycle.reload_weights()
                wakes.append(lifecycle.wake_up(["kv_cache"]))
            else:
                wakes.append(lifecycle.wake_up())
            rollout.steps()
            differ, drift = compare(reference, rollout.results())
            failed = failed or bool(differ)
            print(f"level {level}, {mode}: {len(PROMPTS) - len(differ)}/{len(PROMPTS)} equal,", end=" ")
            print(f"differ {differ}, logprob drift {drift:.2e}")
            print("   ", slept)
            for wake in wakes:
                print("   ", wake, f"device {wake.device_before} -> {wake.device_after}")
            rows.append(
                {
                    "level": level,
                    "mode": mode,
                    "equal": len(PROMPTS) - len(differ),
                    "logprob_drift": drift,
                    "sleep": slept.to_dict(),
                    "wakes": [wake.to_dict() for wake in wakes],
                }
            )
    withheld = withhold(lifecycle, folder)
    failed = failed or not withheld["refused"] or not withheld["right_afterwards"]
    print("k_proj withheld:", json.dumps(withheld, indent=1))
    wrong = lifecycle.check()
    print("invariants:", wrong or "hold")
    if options.out:
        options.out.write_text(json.dumps({"found": found, "rows": rows, "withheld": withheld}, indent=1))
    lifecycle.close()
    return int(failed or bool(wrong))


def withhold(lifecycle, folder):
    """Level 2, everything loaded but one layer's k_proj; then that too."""
    tensors = checkpoint(folder)
    held_back = "model.layers.1.self_attn.k_proj.weight"
    lifecycle.sleep(2)
    lifecycle.wake_up(["weights"])
    for name, tensor in tensors.items():
        if name != held_back:
            model_of(lifecycle).load_weights([(name, tensor.cuda())])
    lifecycle.reset_prefix_cache()  # TRL's order: while the KV cache sleeps
    woken = lifecycle.wake_up(["kv_cache"])
    try:
        lifecycle.step()
        refused = ""
    except WeightsNotValid as error:
        refused = str(error)
    model_of(lifecycle).load_weights([(held_back, tensors[held_back].cuda())])
    lifecycle.wake_up()
    after = Rollout(lifecycle, "after")
    after.steps()
    reference = Rollout(lifecycle, "after-reference")
    reference.steps()
    return {
        "missing": list(woken.missing),
        "refused": refused,
        "right_afterwards": compare(reference.results(), after.results())[0] == [],
    }


if __name__ == "__main__":
    sys.exit(main())
