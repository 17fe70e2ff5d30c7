"""What the demo plays on and with: the engines, the requests, and the comparison of every token.

Theory of operation
-------------------
`on_vllm` and `on_simulated` each build a `Stage`: an engine, how to run it unguarded, how
to put a lifecycle around it, and a blocking `generate`. The stories (`demo`, blocking, and
`demo_async`) are told on either with nothing but the lifecycle's public calls.

The rollouts ask for *delta* outputs: every token comes exactly once, so that an output
that is lost or delivered twice changes the tokens that were collected. `FAULT` spoils
one output between the lifecycle and the collector. That is behind the lifecycle, which
does no such thing; it shows that the comparison would notice.

vLLM reads its environment when it is imported, so it is imported late.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from engine_adapter.models import prepare_smollm2
from lifecycle import IllegalCall, Lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from engine_adapter.demo_screen import Screen
    from lifecycle import Engine

SLOTS: Final = 4
# Tokens differ so that requests end one after another. After STEPS_BEFORE_SLEEP steps two of them have
# finished, four have started and the rest never did: one of each kind for the drain.
QUESTIONS: Final = (
    ("Why is the sky blue?", 16),
    ("Name three fruits.", 28),
    ("Write a line about rain.", 40),
    ("How do bees make honey?", 48),
    ("What is a prime number?", 24),
    ("Tell me a short story.", 44),
    ("How do I boil an egg?", 36),
    ("What causes the tides?", 20),
    ("Give me a riddle.", 40),
    ("Where do penguins live?", 32),
    ("Describe the colour red.", 48),
    ("Say goodbye politely.", 24),
)
STEPS_BEFORE_SLEEP: Final = 34
SIMULATED_STEP_S: Final = 0.02  # about what a small model on a CPU takes; for the streams that are watched
FAULTS: Final = ("drop", "dup", "alter")
VICTIM: Final = "r04"  # ends during the drain, so its last output comes through the mailbox

OK: Final = 0
DIFFERENT: Final = 1
CANNOT_START: Final = 2
INTERRUPTED: Final = 130

Tokens: TypeAlias = dict[str, list[int]]


class CannotStartError(Exception):
    """The demo can't begin; the message says why and what helps."""


def read_fault() -> str:
    """The fault that FAULT asks for, "" for none."""
    fault = os.environ.get("FAULT", "")
    if fault and fault not in FAULTS:
        msg = f"FAULT must be one of {', '.join(FAULTS)}, not {fault!r}"
        raise CannotStartError(msg)
    return fault


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the rollout, of so many tokens."""

    request_id: str
    prompt: str
    params: Any
    tokens: int


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine, and what the story needs of it.

    run_plain: serve all requests with nothing around the engine; the tokens of each.
    guard: put a blocking lifecycle around the engine. generate: the blocking call, guarded; likewise.
    engine: what `AsyncLifecycle` takes; made by the thread that will own it, as the whole stage.
    misuse: illegal calls that reached the engine, where the engine keeps a list.
    """

    title: str
    requests: list[Request]
    run_plain: Callable[[], Tokens]
    guard: Callable[[], Lifecycle]
    generate: Callable[[Lifecycle], Tokens]
    engine: Callable[[], Engine]
    misuse: list[str] | None = None


@contextlib.contextmanager
def refused(screen: Screen, call: str, problems: list[str]) -> Iterator[None]:
    """The block makes an unsafe call: show its refusal, or add to `problems` that it was let through."""
    try:
        yield
    except IllegalCall as error:
        screen.refusal(f"{call} -> {type(error).__name__}: {error}")
    else:
        problems.append(f"{call} was served although it is unsafe")


# -- collecting and comparing ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """One output as the collector sees it: the new tokens of one request."""

    request_id: str
    tokens: list[int]
    text: str
    finished: bool


@dataclass(slots=True)
class Collected:
    """What was received. ended: when each request's last output came, one entry for each."""

    fault: str = ""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    ended: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outputs: Iterable[Any], when: str) -> None:
        """Take the outputs of one step, or of one stream."""
        for output in outputs:
            new = output.outputs[0]
            delivery = Delivery(output.request_id, list(new.token_ids), new.text, output.finished)
            for seen in _spoil(delivery, self.fault):
                self.tokens.setdefault(seen.request_id, []).extend(seen.tokens)
                self.text[seen.request_id] = self.text.get(seen.request_id, "") + seen.text
                if seen.finished:
                    self.ended.setdefault(seen.request_id, []).append(when)

    def one_line(self, name: str) -> str:
        """The text of a request, fit for a table whatever the model wrote."""
        text = "".join(letter if letter.isprintable() else " " for letter in self.text.get(name, ""))
        return " ".join(text.split())


def _spoil(delivery: Delivery, fault: str) -> list[Delivery]:
    """Plant the fault in the victim's last output; anything else passes as it is."""
    if not fault or not delivery.finished or delivery.request_id != VICTIM:
        return [delivery]
    if fault == "drop":
        return []
    if fault == "dup":
        return [delivery, delivery]
    return [replace(delivery, tokens=[*delivery.tokens[:-1], delivery.tokens[-1] + 1])]


def count(tokens: Tokens) -> int:
    """How many there are of all requests."""
    return sum(map(len, tokens.values()))


def difference(expected: list[int], tokens: list[int], ends: int) -> str:
    """How what was delivered differs from the reference; "" if it does not."""
    if not ends:
        return f"lost: its last output never came, {len(tokens)} of {len(expected)} tokens did"
    if ends > 1:
        return f"delivered twice: {ends} last outputs, {len(tokens)} tokens instead of {len(expected)}"
    if len(tokens) != len(expected):
        return f"{len(tokens)} tokens instead of {len(expected)}"
    for place, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if token != wanted:
            return f"different: token {place} is {token}, not {wanted}"
    return ""


def compare(screen: Screen, reference: Tokens, collected: Collected, again: Tokens) -> list[str]:
    """Show each request beside the reference, and return what is wrong, naming the request."""
    problems, rows = [], []
    for name, expected in reference.items():
        tokens, ended = collected.tokens.get(name, []), collected.ended.get(name, [])
        rollout = difference(expected, tokens, len(ended))
        reloaded = difference(expected, again.get(name, []), int(name in again))
        if rollout:
            problems.append(f"{name} {rollout}")
        if reloaded:
            problems.append(f"{name} after level 2: {reloaded}")
        verdicts = ["NOT THE SAME" if what else "same" for what in (rollout, reloaded)]
        rows.append(
            (name, ", ".join(ended) or "never", str(len(tokens)), *verdicts, collected.one_line(name)[:60])
        )
    screen.table(("request", "finished", "tokens", "level 1", "level 2", "text"), rows)
    return problems


def verdict(screen: Screen, stage: Stage, problems: list[str]) -> int:
    """Say what is wrong, misuse of the engine included, or that nothing is; return the exit status."""
    problems = [*problems, *(f"an illegal call reached the engine: {line}" for line in stage.misuse or ())]
    for problem in problems:
        screen.bad(f"FAILED: {problem}")
    if problems:
        return DIFFERENT
    screen.good(
        f"All {len(stage.requests)} requests, each delivered once, have the tokens of the uninterrupted run: "
        "across a sleep at level 1, and after level 2."
    )
    if stage.misuse is not None:
        screen.good("No illegal call reached the engine.")
    return OK


# -- the simulated engine --------------------------------------------------------------------------


def on_simulated() -> Stage:
    """Set the stage with an engine that has no model."""
    from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine

    class Paced(SimulatedEngine):
        """Takes its time for a step once `step_s` is set, as a model does: a stream can be watched."""

        step_s = 0.0

        def step(self) -> list[Any]:
            time.sleep(self.step_s)
            return super().step()

    requests = [
        Request(
            f"r{place:02}",
            text,
            SamplingParams(seed=place, max_tokens=tokens, output_kind=OutputKind.DELTA),
            tokens,
        )
        for place, (text, tokens) in enumerate(QUESTIONS)
    ]

    engine = Paced(max_num_seqs=SLOTS)

    def run_plain() -> Tokens:
        received = Collected()
        for request in requests:
            engine.add(engine.prepare(request.request_id, request.prompt, request.params, {}))
        while engine.has_work():
            received.add(engine.step(), "")
        return received.tokens

    def generate(lifecycle: Lifecycle) -> Tokens:
        # What `attach` makes of the blocking `LLM.generate`: the same loop inside a scope.
        received = Collected()
        with lifecycle.scope("generate"):
            for request in requests:
                lifecycle.add_request(request.request_id, request.prompt, request.params)
            while lifecycle.has_unfinished_requests():
                received.add(lifecycle.step(), "")
        return received.tokens

    def paced() -> Engine:
        engine.step_s = SIMULATED_STEP_S
        return engine

    title = "the simulated engine, without a model"
    return Stage(title, requests, run_plain, lambda: Lifecycle(engine), generate, paced, engine.misuse)


# -- vLLM ------------------------------------------------------------------------------------------


def on_vllm(screen: Screen) -> Stage:
    """Set the stage with a real vLLM. Raises CannotStartError, saying what is missing or wrong."""
    if importlib.util.find_spec("vllm") is None:
        msg = "vLLM is not installed; `lifecycle demo --simulated` needs none"
        raise CannotStartError(msg)
    _prepare_environment()
    model = _model(screen)
    screen.line(f"Starting vLLM on {model.name}: ten seconds to half a minute ...")
    try:
        llm = _build(model)
    except Exception as error:
        msg = f"vLLM could not serve the model in {model}: {_in_short(error)}"
        raise CannotStartError(msg) from error
    return _set_stage(llm, model)


def _model(screen: Screen) -> Path:
    given = os.environ.get("MODEL")
    if not given:
        return prepare_smollm2(progress=screen.line)
    model = Path(given).expanduser()
    if not (model / "config.json").is_file():
        msg = f"MODEL={given} is not a folder with a model: there is no config.json in it"
        raise CannotStartError(msg)
    return model.resolve()


def _prepare_environment() -> None:
    """What vLLM and torch must find when they are imported."""
    # In a process of its own the engine can't be reached, nor guarded.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"  # the model is a folder; nothing is to be asked for
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",  # what fails is raised as well, and said once here
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
    }.items():
        os.environ.setdefault(name, value)
    # Before it has configured its logging, what vLLM says would go to the standard library's last resort.
    logging.getLogger("vllm").addHandler(logging.NullHandler())
    warnings.filterwarnings("ignore", module=r"(vllm|torch)\b.*")


def _build(model: Path) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    return LLM(
        model=str(model),
        dtype="float32",  # in bfloat16 another batch changes a token now and then
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=SLOTS,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        enable_sleep_mode=current_platform.is_sleep_mode_available(),
    )


def _set_stage(llm: Any, model: Path) -> Stage:
    import vllm
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from engine_adapter.standin import attach
    from engine_adapter.vllm_inprocess import VllmInprocess

    def params(place: int) -> Any:
        # A seed for each request: its tokens then depend on nothing but itself.
        tokens = QUESTIONS[place][1]
        return SamplingParams(
            temperature=1.0,
            seed=place,
            max_tokens=tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )

    prompts = [_as_chat(llm, text) for text, _ in QUESTIONS]
    places = range(len(prompts))
    requests = [
        Request(f"r{place:02}", prompts[place], params(place), QUESTIONS[place][1]) for place in places
    ]

    def generate() -> Tokens:
        # New parameters at each call: `LLM.generate` writes its own output kind into what it is given.
        outputs = llm.generate(prompts, [params(place) for place in places], use_tqdm=False)
        return {
            request.request_id: list(output.outputs[0].token_ids)
            for request, output in zip(requests, outputs, strict=True)
        }

    title = f"vLLM {vllm.__version__}, model {model.name}"
    # Once `attach` was called, the same `llm.generate` is guarded.
    return Stage(
        title, requests, generate, lambda: attach(llm), lambda _: generate(), lambda: VllmInprocess(llm)
    )


def _as_chat(llm: Any, text: str) -> str:
    """The question in the model's own chat format, if it has one."""
    tokenizer = llm.get_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        return text
    message = {"role": "user", "content": text}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
