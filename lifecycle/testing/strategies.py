"""Hypothesis strategies for the calls that an orchestrator makes.

Each draws the keyword arguments of one call as plain values, so that the same ones can be
given to the simulated engine and to vLLM: `engine.faults.add(**fault)`,
`lifecycle.sleep(**sleep)`, `SamplingParams(**sampling)`. All of them draw legal arguments;
whether the call is legal *now* depends on the state, and is the test's to know.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lifecycle.table import KV_CACHE, LEVELS, MODES, WEIGHTS

CUMULATIVE, DELTA, FINAL_ONLY = range(3)

# What can go wrong in an engine: the call, and an effect or nothing for an exception.
_FAULTS: Final[Sequence[tuple[str, str]]] = (
    ("add", ""),
    ("step", ""),
    ("abort", ""),
    ("pause_scheduling", ""),
    ("resume_scheduling", ""),
    ("sleep", ""),
    ("wake_up", ""),
    ("reset_caches", ""),
    ("discard_weights", ""),
    ("call", ""),
    ("sleep", "frees_nothing"),
    ("wake_up", "tag_stays_asleep"),
)
# Every order in which a caller may ask for memory that is asleep; None is all at once.
WAKE_ORDERS: Final[Sequence[Sequence[list[str] | None]]] = (
    (None,),
    ([WEIGHTS], [KV_CACHE]),
    ([KV_CACHE], [WEIGHTS]),
    ([WEIGHTS, KV_CACHE],),
    ([KV_CACHE, WEIGHTS],),
    ([WEIGHTS], None),
)


class ScriptedFault(RuntimeError):
    """What a drawn fault raises, so that a test can tell it from a real failure."""


def engine_options() -> SearchStrategy[dict[str, Any]]:
    """Arguments of `SimulatedEngine`: few slots and blocks, so that requests wait and are preempted."""
    return st.fixed_dictionaries(
        {
            "max_model_len": st.just(64),
            "max_num_seqs": st.sampled_from([2, 3, 8]),
            "max_num_batched_tokens": st.sampled_from([12, 64]),
            "num_blocks": st.sampled_from([None, 20]),
            "batch_queue_size": st.sampled_from([1, 2]),
            "prefix_caching": st.booleans(),
            "policy": st.sampled_from(["fcfs", "priority"]),
        }
    )


def prompts() -> SearchStrategy[list[int]]:
    """Token ids, often with a common beginning, as a prefix cache likes it."""
    heads: SearchStrategy[list[int]] = st.sampled_from([[], [1] * 8, [2] * 12])
    tails = st.lists(st.integers(1, 9), min_size=1, max_size=6)
    return st.builds(lambda head, tail: [*head, *tail], heads, tails)


def sampling_options(most_tokens: int = 20, most_samples: int = 3) -> SearchStrategy[dict[str, Any]]:
    """Arguments of `SamplingParams`: all output kinds, several samples, stop strings, short and long."""
    return st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, most_tokens),
            "n": st.integers(1, most_samples) if most_samples > 1 else st.just(1),
            "seed": st.integers(0, 7),
            "stop": st.sampled_from([None, None, ["e"], ["q", "ab"]]),
            "output_kind": st.sampled_from([CUMULATIVE, DELTA, FINAL_ONLY]),
        }
    )


def sleeps(levels: Sequence[int] = LEVELS) -> SearchStrategy[dict[str, Any]]:
    """Arguments of `Lifecycle.sleep`: every level, mode and kind of deadline."""
    limits = st.sampled_from(
        [{}, {}, {"max_steps": 0}, {"max_steps": 2}, {"max_steps": 9}, {"timeout": 0}, {"timeout": 3600.0}]
    )
    return st.builds(
        lambda level, mode, limit, on_timeout: {
            "level": level,
            "mode": mode,
            **limit,
            **({"on_timeout": on_timeout} if limit else {}),
        },
        st.sampled_from(levels),
        st.sampled_from(MODES),
        limits,
        st.sampled_from(["raise", "abort", "keep"]),
    )


def wake_orders() -> SearchStrategy[Sequence[list[str] | None]]:
    """Arguments of consecutive `wake_up` calls that together wake everything."""
    return st.sampled_from(WAKE_ORDERS)


def faults() -> SearchStrategy[Mapping[str, Any]]:
    """Arguments of `engine.faults.add`: a call that fails before or after it acted, or acts wrongly."""

    def script(what: tuple[str, str], at: int, when: str) -> dict[str, Any]:
        call, effect = what
        if effect:
            return {"call": call, "effect": effect}
        return {"call": call, "at": at, "when": when, "raises": ScriptedFault(f"{call} failed")}

    return st.builds(
        script, st.sampled_from(_FAULTS), st.integers(1, 3), st.sampled_from(["before", "after"])
    )
