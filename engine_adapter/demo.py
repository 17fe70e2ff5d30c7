"""The demo: a rollout that sleeps in the middle, and every token compared with one that did not.

Theory of operation
-------------------
`_on_vllm` and `_on_simulated` each build a `Stage`: an engine, how to run it unguarded,
how to put a lifecycle around it, and a blocking `generate`. `_play` tells the same story
on either, with nothing but the lifecycle's public calls: what stands there is what a
trainer would write.

The rollout asks for *delta* outputs: every token comes exactly once, so that an output
that is lost or delivered twice changes the tokens that were collected. `FAULT` spoils
one output between the step loop and the collector. That is behind the lifecycle, which
does no such thing; it shows that the comparison would notice.

vLLM reads its environment when it is imported, so it is imported late. `rich` makes the
output readable and is optional.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from engine_adapter.models import ModelPreparationError, prepare_smollm2
from lifecycle import IllegalCall, Lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lifecycle import DrainProgress

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
FAULTS: Final = ("drop", "dup", "alter")
VICTIM: Final = "r04"  # ends during the drain, so its last output comes through the mailbox

OK: Final = 0
DIFFERENT: Final = 1
CANNOT_START: Final = 2
INTERRUPTED: Final = 130


class _CannotStartError(Exception):
    """The demo can't begin; the message says why and what helps."""


def run(*, simulated: bool = False) -> int:
    """Play the demo and return its exit status."""
    screen = _screen()
    try:
        fault = _fault()
        if fault:
            screen.line(f"FAULT={fault}: one output of {VICTIM} is spoiled before it is compared")
        stage = _on_simulated() if simulated else _on_vllm(screen)
        return _play(screen, stage, fault)
    except (_CannotStartError, ModelPreparationError) as error:
        screen.line(f"The demo can't start: {error}")
        return CANNOT_START
    except KeyboardInterrupt:
        screen.line("Interrupted.")
        return INTERRUPTED


def _fault() -> str:
    fault = os.environ.get("FAULT", "")
    if fault and fault not in FAULTS:
        msg = f"FAULT must be one of {', '.join(FAULTS)}, not {fault!r}"
        raise _CannotStartError(msg)
    return fault


Tokens: TypeAlias = dict[str, list[int]]


# -- the story -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the rollout."""

    request_id: str
    prompt: str
    params: Any


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine, and what the story needs of it.

    run_plain: serve all requests with nothing around the engine; the tokens of each.
    guard: put a lifecycle around the engine. generate: the blocking call, guarded; likewise.
    misuse: illegal calls that reached the engine, where the engine keeps a list.
    """

    title: str
    requests: list[Request]
    run_plain: Callable[[], Tokens]
    guard: Callable[[], Lifecycle]
    generate: Callable[[Lifecycle], Tokens]
    misuse: list[str] | None = None


def _play(screen: Screen, stage: Stage, fault: str) -> int:
    screen.heading("1. The reference: nothing guarded, nothing interrupted")
    screen.line(f"{stage.title}; {len(stage.requests)} requests in {SLOTS} slots")
    started = time.monotonic()
    reference = stage.run_plain()
    screen.line(f"{_count(reference)} tokens in {time.monotonic() - started:.1f} s")

    screen.heading("2. The same requests guarded, and put to sleep in the middle")
    lifecycle, collected = stage.guard(), Collected(fault)
    *early, late = stage.requests
    for request in early:
        lifecycle.add_request(request.request_id, request.prompt, request.params)
    for _ in range(STEPS_BEFORE_SLEEP):
        collected.add(lifecycle.step(), "before the sleep")
    screen.line(f"{STEPS_BEFORE_SLEEP} steps: {len(collected.ended)} of {len(early)} requests finished")
    screen.line('sleep(level=1, mode="wait"): finish what started, hold the rest')
    with screen.drain_bar() as progress:
        slept = lifecycle.sleep(level=1, mode="wait", progress=progress)
    screen.line(f"finished before: {' '.join(collected.ended)}; in the drain: {' '.join(slept.drained)}")
    screen.line(f"held until the wake: {' '.join(slept.held)}")
    screen.report(slept)
    if slept.released_bytes is None:
        screen.line("(On a CPU vLLM keeps its memory: nothing to measure. The order of calls is a GPU's.)")

    screen.heading("3. While it sleeps: what is safe works, what is not is refused")
    collected.add(lifecycle.step(), "in the drain")
    screen.line("step() hands out what the drain finished, once")
    lifecycle.add_request(late.request_id, late.prompt, late.params)
    screen.line(f"add_request({late.request_id!r}) is held: {lifecycle.snapshot().held} wait now")
    served = [
        *_not_refused(screen, "step()", lifecycle.step),
        *_not_refused(screen, "generate()", lambda: stage.generate(lifecycle)),
    ]

    screen.heading("4. Wake: the weights, then the KV cache, and finish the rest")
    screen.report(lifecycle.wake_up(["weights"]))
    screen.report(lifecycle.wake_up(["kv_cache"]))
    while lifecycle.has_unfinished_requests():
        collected.add(lifecycle.step(), "after the wake")
    screen.line(f"{len(collected.ended)} requests finished; the engine is {lifecycle.state}")

    screen.heading("5. Level 2 discards the weights: nothing is served until they are loaded")
    discarded = lifecycle.sleep(level=2)
    screen.report(discarded)
    if discarded.released_bytes is None:
        screen.line("(On a CPU they really stay; the guard asks for the load that a GPU needs.)")
    screen.report(lifecycle.wake_up())
    served += _not_refused(screen, "generate()", lambda: stage.generate(lifecycle))
    loaded = lifecycle.reload_weights()
    screen.line(f"reload_weights() in {loaded.seconds:.2f} s; the engine is {lifecycle.state}")
    again = stage.generate(lifecycle)
    screen.line(f"generate(): {_count(again)} tokens")

    screen.heading("6. Every transition, from lifecycle.events()")
    screen.table(_TRANSITION_COLUMNS, _transitions(lifecycle.events()))

    screen.heading("7. Every request against the uninterrupted run")
    problems = [*served, *(f"an illegal call reached the engine: {line}" for line in stage.misuse or ())]
    problems += _compare(screen, reference, collected, again)
    return _verdict(screen, problems, len(reference), lists_misuse=stage.misuse is not None)


def _verdict(screen: Screen, problems: list[str], count: int, *, lists_misuse: bool) -> int:
    for problem in problems:
        screen.bad(f"FAILED: {problem}")
    if problems:
        return DIFFERENT
    screen.good(
        f"All {count} requests, each delivered once, have the tokens of the uninterrupted run: "
        "across a sleep at level 1, and after level 2."
    )
    if lists_misuse:
        screen.good("No illegal call reached the engine.")
    return OK


def _count(tokens: Tokens) -> int:
    return sum(map(len, tokens.values()))


def _not_refused(screen: Screen, call: str, attempt: Callable[[], Any]) -> list[str]:
    """Make an unsafe call and show its refusal; the call's name if it was let through."""
    try:
        attempt()
    except IllegalCall as error:
        screen.refusal(f"{call} -> {type(error).__name__}: {error}")
        return []
    return [f"{call} was served although it is unsafe"]


_TRANSITION_COLUMNS: Final = ("trigger", "transition", "in flight", "held", "memory", "weights")


def _transitions(events: Iterable[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [
        (
            event["trigger"],
            f"{event['source']} -> {event['dest']}",
            str(event["counts"]["in_flight"]),
            str(event["counts"]["held"]),
            "both" if len(event["resident"]) > 1 else "".join(event["resident"]) or "none",
            event["weights"],
        )
        for event in events
        if event["event"] == "transition"
    ]


# -- collecting and comparing ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """One output as the collecting loop sees it: the new tokens of one request."""

    request_id: str
    tokens: list[int]
    text: str
    finished: bool


@dataclass(slots=True)
class Collected:
    """What the step loop received. ended: when each request's last output came, one entry for each."""

    fault: str = ""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    ended: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outputs: Iterable[Any], when: str) -> None:
        """Take the outputs of one step."""
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
        return " ".join(text.split())[:60]


def _spoil(delivery: Delivery, fault: str) -> list[Delivery]:
    """Plant the fault in the victim's last output; anything else passes as it is."""
    if not fault or not delivery.finished or delivery.request_id != VICTIM:
        return [delivery]
    if fault == "drop":
        return []
    if fault == "dup":
        return [delivery, delivery]
    return [replace(delivery, tokens=[*delivery.tokens[:-1], delivery.tokens[-1] + 1])]


def _difference(expected: list[int], tokens: list[int], ends: int) -> str:
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


def _compare(screen: Screen, reference: Tokens, collected: Collected, again: Tokens) -> list[str]:
    """Show each request beside the reference, and return what is wrong, naming the request."""
    problems, rows = [], []
    for name, expected in reference.items():
        tokens, ended = collected.tokens.get(name, []), collected.ended.get(name, [])
        rollout = _difference(expected, tokens, len(ended))
        reloaded = _difference(expected, again.get(name, []), int(name in again))
        if rollout:
            problems.append(f"{name} {rollout}")
        if reloaded:
            problems.append(f"{name} after level 2: {reloaded}")
        verdicts = ["NOT THE SAME" if what else "same" for what in (rollout, reloaded)]
        rows.append(
            (name, ", ".join(ended) or "never", str(len(tokens)), *verdicts, collected.one_line(name))
        )
    screen.table(("request", "finished", "tokens", "level 1", "level 2", "text"), rows)
    return problems


# -- the simulated engine --------------------------------------------------------------------------


def _on_simulated() -> Stage:
    from engine_adapter.simulated import OutputKind, SamplingParams, SimulatedEngine

    requests = [
        Request(
            f"r{place:02}", text, SamplingParams(seed=place, max_tokens=tokens, output_kind=OutputKind.DELTA)
        )
        for place, (text, tokens) in enumerate(QUESTIONS)
    ]

    engine = SimulatedEngine(max_num_seqs=SLOTS)

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

    title = "the simulated engine, without a model"
    return Stage(title, requests, run_plain, lambda: Lifecycle(engine), generate, engine.misuse)


# -- vLLM ------------------------------------------------------------------------------------------


def _on_vllm(screen: Screen) -> Stage:
    if importlib.util.find_spec("vllm") is None:
        msg = "vLLM is not installed; `lifecycle demo --simulated` needs none"
        raise _CannotStartError(msg)
    _prepare_environment()
    model = _model(screen)
    screen.line(f"Starting vLLM on {model.name}: ten seconds to half a minute ...")
    try:
        llm = _build(model)
    except Exception as error:
        msg = f"vLLM could not serve the model in {model}: {_in_short(error)}"
        raise _CannotStartError(msg) from error
    return _set_stage(llm, model)


def _model(screen: Screen) -> Path:
    given = os.environ.get("MODEL")
    if not given:
        return prepare_smollm2(progress=screen.line)
    model = Path(given).expanduser()
    if not (model / "config.json").is_file():
        msg = f"MODEL={given} is not a folder with a model: there is no config.json in it"
        raise _CannotStartError(msg)
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
    requests = [Request(f"r{place:02}", prompts[place], params(place)) for place in places]

    def generate() -> Tokens:
        # New parameters at each call: `LLM.generate` writes its own output kind into what it is given.
        outputs = llm.generate(prompts, [params(place) for place in places], use_tqdm=False)
        return {
            request.request_id: list(output.outputs[0].token_ids)
            for request, output in zip(requests, outputs, strict=True)
        }

    title = f"vLLM {vllm.__version__}, model {model.name}"
    # Once `attach` was called, the same `llm.generate` is guarded.
    return Stage(title, requests, generate, lambda: attach(llm), lambda _: generate())


def _as_chat(llm: Any, text: str) -> str:
    """The question in the model's own chat format, if it has one."""
    tokenizer = llm.get_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        return text
    message = {"role": "user", "content": text}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# -- the screen ------------------------------------------------------------------------------------


class Screen:
    """Plain text. `RichScreen` shows the same with colours and a moving bar."""

    def heading(self, text: str) -> None:
        """Begin a chapter."""
        self.line(f"\n{text}")

    def line(self, text: str) -> None:
        """One line, seen at once also through a pipe."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def report(self, report: object) -> None:
        """A report of the lifecycle, as it prints itself."""
        self.line(f"{report}")

    def refusal(self, text: str) -> None:
        """A call that was refused, as it should be."""
        self.line(text)

    def good(self, text: str) -> None:
        """The verdict that was hoped for."""
        self.line(text)

    def bad(self, text: str) -> None:
        """The other one."""
        self.line(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows under column names."""
        widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line("  ".join(cells).rstrip())

    @contextmanager
    def drain_bar(self) -> Iterator[Callable[[DrainProgress], None]]:
        """Lend a `progress` callback: one line whenever a request finishes."""
        seen = 0

        def show(view: DrainProgress) -> None:
            nonlocal seen
            if view.drained != seen:
                seen = view.drained
                self.line(f"draining: {seen} of {seen + view.remaining} finished after {view.steps} steps")

        yield show


class RichScreen(Screen):
    """The same through rich, whose absence is the constructor's ImportError."""

    def __init__(self) -> None:
        from rich.console import Console

        # Messages hold brackets of their own: nothing is markup.
        self._console = Console(markup=False, highlight=False)

    def heading(self, text: str) -> None:  # noqa: D102  (described by the base, as what follows)
        self._console.print(f"\n{text}", style="bold cyan")

    def line(self, text: str) -> None:  # noqa: D102
        self._print(text)

    def report(self, report: object) -> None:  # noqa: D102
        self._print(f"{report}", "green")

    def refusal(self, text: str) -> None:  # noqa: D102
        self._print(text, "yellow")

    def good(self, text: str) -> None:  # noqa: D102
        self._print(text, "bold green")

    def bad(self, text: str) -> None:  # noqa: D102
        self._print(text, "bold red")

    def _print(self, text: str, style: str = "") -> None:
        from rich.padding import Padding

        self._console.print(Padding(text, (0, 0, 0, 3), expand=False), style=style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:  # noqa: D102
        from rich.table import Table

        # The last column is the one that may be cut short.
        shown = Table(box=None, expand=True, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in columns[:-1]:
            shown.add_column(column, no_wrap=True)
        shown.add_column(columns[-1], no_wrap=True, overflow="ellipsis", ratio=1)
        for row in rows:
            shown.add_row(*row)
        self._console.print(shown)

    @contextmanager
    def drain_bar(self) -> Iterator[Callable[[DrainProgress], None]]:  # noqa: D102
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (
            TextColumn("   draining"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task("", total=None)

            def show(view: DrainProgress) -> None:
                bar.update(
                    task,
                    total=view.drained + view.remaining,
                    completed=view.drained,
                    description=f"{view.steps} steps, {view.tokens} tokens, {view.held} held",
                )

            yield show


def _screen() -> Screen:
    try:
        return RichScreen()
    except ImportError:
        return Screen()
