"""What must be true of any run, said without the library: this module imports nothing of it.

`Requests` knows what was asked for and judges every output that a caller is handed: each
request ends once, nothing comes after its end, its tokens are those of an uninterrupted run
with the weights that it lived under, and an early end was somebody's wish or a fault.

`World` knows what a caller knows who did all the calls: whether the engine sleeps, what was
loaded, what was paused. It says before each call what must come of it, from the physics of
an engine and not from a table of states.

Both learn about the engine only through plain values that the test reads from it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

CUMULATIVE, DELTA, FINAL_ONLY = range(3)
WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
EVERYTHING = frozenset({WEIGHTS, KV_CACHE})


@dataclass
class Sample:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stop_reason: Any = None


@dataclass
class Asked:
    """One request. lived: the weights' contents that it has been in the world with, in order."""

    request_id: str
    prompt: Any
    options: Mapping[str, Any]
    lived: list[Mapping[str, int]]
    samples: list[Sample]
    over: bool = False

    @property
    def kind(self):
        return self.options["output_kind"]


class Requests:
    """Every request of a run.

    reference(asked, sample, contents, stop) is what the engine gives uninterrupted: an object
    with token_ids, text, finish_reason and stop_reason.
    """

    def __init__(self, reference: Callable[..., Any]) -> None:
        self._reference = reference
        self.asked: dict[str, Asked] = {}
        self.finished = 0
        self._may_end: dict[str, set[str]] = {"abort": set(), "error": set()}
        self._may_vanish: set[str] = set()

    def live(self) -> list[str]:
        return [name for name, asked in self.asked.items() if not asked.over]

    def ask(self, request_id, prompt, options, contents) -> None:
        samples = [Sample() for _ in range(options["n"])]
        self.asked[request_id] = Asked(request_id, prompt, options, [dict(contents)], samples)

    def weights_became(self, contents: Mapping[str, int]) -> None:
        """What is live from now on may be computed with these."""
        for name in self.live():
            self.asked[name].lived.append(dict(contents))

    def given_up(self, names: Iterable[str]) -> None:
        """Their own caller aborted them: nothing more may come."""
        for name in names:
            if name in self.asked:
                self.asked[name].over = True

    def may_end(self, names: Iterable[str], reason: str) -> None:
        """These were reported as ended early: by a sleep or a close, or by a failure."""
        self._may_end[reason].update(names)

    def may_vanish(self, names: Iterable[str]) -> None:
        """A fault struck their own caller's abort: an end may come, and need not."""
        self._may_vanish.update(names)

    def lost(self) -> list[str]:
        """What never ended, where everything should have."""
        return [name for name in self.live() if name not in self._may_vanish]

    # -- judging ---------------------------------------------------------------------------------------

    def take(self, outputs: Iterable[Any]) -> None:
        """Judge what one call handed out."""
        for output in outputs:
            asked = self.asked.get(output.request_id)
            assert asked is not None, f"an output of {output.request_id}, which nobody asked for"
            assert not asked.over, f"an output of {output.request_id} after its end"
            for part in output.outputs:
                self._add(asked, part)
            if output.finished:
                self._judge(asked)

    def _add(self, asked: Asked, part: Any) -> None:
        sample = asked.samples[part.index]
        assert sample.reason is None, f"{asked.request_id}: sample {part.index} went on after its end"
        new = list(part.token_ids)
        if asked.kind == DELTA:
            sample.tokens += new
            sample.text += part.text
        else:
            assert new[: len(sample.tokens)] == sample.tokens, f"{asked.request_id}: tokens changed"
            early = asked.kind == FINAL_ONLY and part.finish_reason is None
            assert not early, f"{asked.request_id}: an output before the end"
            sample.tokens, sample.text = new, part.text
        sample.reason, sample.stop_reason = part.finish_reason, part.stop_reason

    def _judge(self, asked: Asked) -> None:
        asked.over = True
        self.finished += 1
        for index, sample in enumerate(asked.samples):
            where = f"{asked.request_id}[{index}]"
            assert sample.reason is not None, f"{where} was said to be finished and gave no reason"
            if sample.reason in self._may_end:
                allowed = asked.request_id in self._may_end[sample.reason]
                assert allowed, f"{where} ended with {sample.reason!r}, and nobody said so"
                self._is_possible(asked, index, where)
            else:
                self._is_right(asked, index, where)

    def _is_right(self, asked: Asked, index: int, where: str) -> None:
        """Whole: equal to an uninterrupted run under one of the weights, or a mixture in their order."""
        sample = asked.samples[index]
        for contents in asked.lived:
            whole = self._reference(asked, index, contents, stop=True)
            mine = (sample.tokens, sample.text, sample.reason, sample.stop_reason)
            if mine == (list(whole.token_ids), whole.text, whole.finish_reason, whole.stop_reason):
                return
        assert len(asked.lived) > 1, f"{where} differs from an uninterrupted run: {sample}"
        if sample.reason == "length":
            most = self._reference(asked, index, asked.lived[0], stop=False)
            assert len(sample.tokens) == len(most.token_ids), f"{where} ended early: {sample}"
        else:
            assert sample.stop_reason in (asked.options["stop"] or ()), f"{where}: {sample}"
        self._is_possible(asked, index, where)

    def _is_possible(self, asked: Asked, index: int, where: str) -> None:
        """Each token is that of some weights, and never of older ones than the token before."""
        sample = asked.samples[index]
        runs = [
            list(self._reference(asked, index, contents, stop=False).token_ids) for contents in asked.lived
        ]
        at = 0
        for place, token in enumerate(sample.tokens):
            while at < len(runs) and not (place < len(runs[at]) and runs[at][place] == token):
                at += 1
            assert at < len(runs), f"{where}: token {place} is of no weights it lived under: {sample}"


# -- the world -----------------------------------------------------------------------------------------

FINE, NOTHING, REFUSED, INVALID, LATE = "fine", "nothing to do", "refused", "invalid", "fine or too late"


@dataclass
class Physical:
    """What the engine is really in. inside: ids of requests in it."""

    resident: frozenset[str]
    inside: frozenset[str]
    paused: bool


@dataclass
class World:
    """What a caller knows. Its methods `may_...` say what a call must come to.

    level: of the sleep, None when serving. paused: an explicit pause is on. contents: what was
    loaded into each parameter, None where its memory was lost. tainted: an update failed or is
    open; before: what an open update comes back to at its end. torn: nothing was loaded since one failed.
    """

    contents: dict[str, int | None]
    resleep_partial: bool = True
    release_kv: bool = True
    max_held: int | None = None
    level: int | None = None
    paused: bool = False
    failed: bool = False
    closed: bool = False
    rebuildable: bool = True
    discarded: bool = False
    tainted: bool = False
    before: tuple[bool, bool] | None = None
    torn: bool = False
    physical: Physical = field(default_factory=lambda: Physical(EVERYTHING, frozenset(), paused=False))

    # -- what holds --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return not (self.failed or self.closed)

    @property
    def resident(self) -> frozenset[str]:
        return self.physical.resident

    @property
    def mapped(self) -> bool:
        return self.resident == EVERYTHING

    @property
    def valid(self) -> bool:
        return not (self.discarded or self.tainted)

    @property
    def loaded(self) -> bool:
        return None not in self.contents.values()

    @property
    def serving(self) -> bool:
        return self.alive and self.level is None and self.mapped and self.valid

    @property
    def asleep(self) -> bool:
        """Wholly: nothing was woken, or it is a pause that could end now."""
        return self.alive and self.level is not None and (not self.resident or (self.mapped and self.valid))

    @property
    def partly_awake(self) -> bool:
        return self.alive and not self.serving and not self.asleep

    @property
    def state(self) -> str:
        """Its name in the library's words."""
        if not self.alive:
            return "closed" if self.closed else "failed"
        if self.serving:
            return "running" if self.physical.inside else "awake"
        return "sleeping" if self.asleep else "partially_awake"

    # -- what a call must come to ------------------------------------------------------------------

    def may_add(self, held: int) -> str:
        if not self.alive:
            return REFUSED
        full = self.max_held is not None and held >= self.max_held
        return REFUSED if full and not self.will_serve() else FINE

    def will_serve(self) -> bool:
        """Whether the next look at the engine finds it serving: a load that nobody saw counts."""
        unseen = self.partly_awake and self.mapped and self.discarded and not self.tainted and self.loaded
        return self.serving or (unseen and not self.paused and self.level != 0)

    def may_sleep(self, level: int, mode: str, *, limited: bool, pause: bool) -> str:
        if not self.alive:
            return REFUSED
        if self.serving:
            return LATE if limited else FINE
        if pause or (self.asleep and self.level == level):
            return NOTHING
        if level == 0 or (self.asleep and self.level != 0):
            return REFUSED
        if self.partly_awake and not (self.mapped or (WEIGHTS in self.resident and self.resleep_partial)):
            return REFUSED
        return REFUSED if self.physical.inside and mode in ("wait", "wait_all") else FINE

    def may_wake(self) -> str:
        return FINE if self.alive else REFUSED

    def may_load(self) -> str:
        under = bool(self.physical.inside) and self.valid
        return FINE if self.alive and WEIGHTS in self.resident and not under else REFUSED

    def may_touch_weights(self) -> str:
        return FINE if self.alive and WEIGHTS in self.resident else REFUSED

    def may_mark(self) -> str:
        return FINE if self.may_load() == FINE and self.loaded else REFUSED

    @property
    def can_say_loaded(self) -> bool:
        """Whoever says so after a failed load, or within an update, is wrong."""
        return self.may_mark() == FINE and self.before is None and not self.torn

    def may_release_kv(self) -> str:
        fits = self.asleep and self.level == 0 and not self.physical.inside and self.release_kv
        return FINE if fits else REFUSED

    def may_recover(self) -> str:
        return FINE if self.failed and self.rebuildable else REFUSED

    # -- what a call does --------------------------------------------------------------------------

    def slept(self, level: int, *, pause: bool) -> None:
        self.level = level
        self.paused = self.paused or pause
        if level == 2:
            self.contents = dict.fromkeys(self.contents)
            self.discarded, self.tainted, self.before = True, False, None

    def loaded_some(self, values: Mapping[str, int], *, whole: bool) -> None:
        """A load came to its end. whole: one call that loads everything, so that it cures a failed one."""
        self.contents.update(values)
        self.torn = False
        if whole and self.loaded:
            self.cured()

    def lost_some(self, names: Iterable[str]) -> None:
        """A load made these anew and brought nothing to fill them with."""
        if lost := dict.fromkeys(names):
            self.contents.update(lost)
            self.discarded = self.discarded or self.valid

    def cured(self) -> None:
        """Everything is loaded, and somebody said or saw it."""
        self.discarded, self.tainted, self.before = False, False, None
        self.arrived(resumes=self.level != 0)

    def update_opened(self) -> None:
        if self.before is None:
            self.before = (self.discarded, self.tainted)
        self.tainted = True

    def update_closed(self) -> None:
        """The end of an update cures, unless something failed since its beginning or has holes."""
        if self.before is None:
            return
        self.discarded, self.tainted = self.before
        self.before = None
        if self.loaded:
            self.cured()

    def update_failed(self) -> None:
        self.tainted, self.before, self.torn = True, None, True

    def looked(self) -> None:
        """The library looks whether somebody loaded the weights unseen."""
        if self.discarded and not self.tainted and self.loaded:
            self.discarded = False

    def looks_before_serving(self) -> None:
        """A request or a step makes it look, if only that is missing."""
        if self.partly_awake and self.mapped and self.discarded:
            self.looked()
            self.arrived(resumes=self.level != 0)

    def wakes(self, tags: Iterable[str] | None) -> tuple[bool, bool]:
        """Whether a wake has something to do, and whether everything is awake after it."""
        wanted = EVERYTHING | {SCHEDULING} if tags is None else set(tags)
        sleeping = EVERYTHING - self.resident
        completes = sleeping <= wanted
        ends_pause = self.asleep and not sleeping and not self.paused and SCHEDULING in wanted
        looks = completes and not self.valid and not self.serving
        return bool(sleeping & wanted or ends_pause or looks), completes

    def woke(self, *, completes: bool) -> None:
        if completes:
            self.looked()
            if self.level == 0 and not self.paused:
                self.level = None  # that was the end of the pause, whatever is still missing
        self.arrived(resumes=True)

    def arrived(self, *, resumes: bool) -> None:
        """Everything may be back: serve, or stop at the pause."""
        if self.mapped and self.valid:
            self.level = 0 if self.paused or not resumes else None
