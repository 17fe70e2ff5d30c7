"""Whether the asynchronous machine would notice: faults planted in what it tests, one after another.

Each is a mistake that the code could well have had: a line left out, a condition too wide, an order turned
round. The machine must fail with each, within a number of runs that `make test` can afford, and for the
reason that the plant is about.
"""

import gc
import re
from unittest import mock

import pytest
from hypothesis import Phase

from lifecycle import asynchronous
from lifecycle.asynchronous import AsyncLifecycle, _Stream
from lifecycle.core import Core
from lifecycle.engine_thread import LATER, Batch, EngineThread
from tests import report
from tests.machine import Reached
from tests.test_async_machine import TIMES, run

pytestmark = [
    pytest.mark.timeout(600 * TIMES),
    # What a plant leaves unfinished may be collected in any later line.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]

# As they are without a plant.
put, end = _Stream.put, _Stream.end
hand_out, collect, withdraw = EngineThread._put, EngineThread._collect, EngineThread.withdraw
begin, give_up, advance = EngineThread.sleep, EngineThread.give_up, EngineThread._advance
execute, close, require = EngineThread._execute, EngineThread.close, Core.require
PLANTS = {}


def plant(where, name, says):
    """Register a replacement of `where.name`. says: what the machine must complain of."""

    def register(replacement):
        PLANTS[replacement.__name__] = (where, name, replacement, says)
        return replacement

    return register


# -- outputs and ends ----------------------------------------------------------------------------------


@plant(_Stream, "put", r"of no weights it lived under|differs from an uninterrupted run|gave no reason")
def what_was_not_taken_is_overwritten(self, output):
    self.output = None
    put(self, output)


@plant(_Stream, "end", r"ended without an end")
def an_end_overtakes_the_last_output(self, error):
    self.output = None
    end(self, error)


@plant(_Stream, "end", r"nobody will end r\d")
def an_end_does_not_wake_its_reader(self, error):
    self.ended, self._error = True, error


@plant(EngineThread, "_put", r"tokens=\[.*\b(\d+), \1\b|went on after its end")
def an_output_is_handed_out_twice(self, output, error=None):
    stream = self._streams.get(output.request_id)
    hand_out(self, output, error)
    if stream is not None and not output.finished:
        self._batch.outputs.append(self._batch.outputs[-1])


@plant(EngineThread, "_give", r"changed after it was handed out")
def lists_that_the_engine_goes_on_with_are_handed_out(self, core, outputs):
    for output in outputs:
        self._put(output)


@plant(EngineThread, "withdraw", r"id 'r\d+' is live until its last output was taken")
def a_withdrawn_request_stays_in_the_engine(self, stream):
    if self._streams.get(stream.request_id) is stream:
        del self._streams[stream.request_id]


@plant(EngineThread, "withdraw", r"r\d+ did not come to its end|r\d+ ended without an end|id 'r\d+' is live")
def what_is_left_of_a_withdrawn_request_meets_the_next_of_its_name(self, stream):
    with mock.patch.object(self, "_collect", return_value=None):
        withdraw(self, stream)


@plant(EngineThread, "_collect", r"ended with an error that nobody was told")
def nobody_is_told_of_the_failure(self, core):
    self._failure = core.failure
    collect(self, core)


@plant(EngineThread, "_collect", r"nobody will end r\d")
def held_streams_are_not_told_of_their_end(self, core):
    self._owner.lost.clear()
    collect(self, core)


# -- sleeps and who waits for them ---------------------------------------------------------------------


@plant(
    EngineThread,
    "sleep",
    r"^(sleep|pause){.* must be refused, and was fine|^bad sleep{} must be invalid, and was fine"
    r"|^(sleep|pause){.* came to the end of another",
)
def another_sleep_is_joined(self, answer, *asked, **limits):
    if self._sleep is not None:
        self._sleepers.append(answer)
        return LATER
    return begin(self, answer, *asked, **limits)


@plant(EngineThread, "give_up", r"nobody carries on|must be fine, and was IllegalCall .* is under way")
def a_drain_is_left_without_an_owner(self, answer):
    if answer in self._sleepers:
        self._sleepers.remove(answer)
        if not self._sleepers:
            self._sleep = None


@plant(EngineThread, "give_up", r"nobody waits for (sleep|pause)")
def a_drain_that_nobody_waits_for_goes_on(self, answer):
    if answer in self._sleepers:
        self._sleepers.remove(answer)


@plant(EngineThread, "give_up", r"nobody answers (sleep|pause)|^(sleep|pause){.* came to the end of another")
def one_of_two_sleepers_gives_up_for_both(self, answer):
    if answer in self._sleepers:
        sleepers, self._sleepers = self._sleepers, [answer]
        give_up(self, answer)
        self._sleepers = [each for each in sleepers if each is not answer]


@plant(EngineThread, "give_up", r"nobody carries on")
def a_release_is_abandoned_with_its_caller(self, answer):
    waited = answer in self._sleepers
    give_up(self, answer)
    if waited and not self._sleepers:
        self._sleep = None


@plant(Core, "require", r"^wake_up{} must be refused, and was fine")
def a_wake_is_let_through_in_a_drain(self, call, need=None):
    if call != "wake_up" or self.transition is None:
        require(self, call, need)


@plant(EngineThread, "_advance", r"nobody answers (sleep|pause)")
def only_the_first_sleeper_is_answered(self, sleep):
    self._sleepers, others = self._sleepers[:1], self._sleepers[1:]
    advance(self, sleep)
    if self._sleep is not None:
        self._sleepers += others


# -- commands and the end ------------------------------------------------------------------------------


@plant(EngineThread, "close", r"ended with 'abort', and nobody said so")
def closing_does_not_wait(self, answer, *, drain, timeout):
    return close(self, answer, drain=False, timeout=timeout)


@plant(EngineThread, "run_left_over", r"was sent to the thread, and never came to its end")
def what_comes_too_late_is_not_answered(self):
    return Batch()


@plant(EngineThread, "_execute", r"was sent to the thread, and never came to its end")
def a_command_whose_caller_was_cancelled_is_skipped(self, command):
    if command.answer is None or not command.answer.done():
        execute(self, command)


@plant(asynchronous, "_resolve", r"unseen: .*InvalidStateError")
def a_caller_who_was_cancelled_is_answered(answer, result, error):
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)


@plant(AsyncLifecycle, "_tell", r"nobody answers (wait_for|listen)")
def whoever_waits_for_events_is_not_told(self):
    pass


# Runs from one beginning resemble each other: better a few from each. It takes most plants far fewer.
BEGINNINGS, RUNS = 5, 40


@pytest.mark.parametrize("name", PLANTS)
def test_the_machine_notices(name):
    """With this fault planted, the machine fails, and says what the fault does."""
    where, attribute, replacement, says = PLANTS[name]
    reached, told = Reached(), "nothing"
    with mock.patch.object(where, attribute, replacement):
        try:
            for start in range(BEGINNINGS):
                run(reached, examples=RUNS, steps=50, start=start, phases=[Phase.generate])
        except AssertionError as error:
            told = str(error)
    gc.collect()  # what the plant left unfinished
    [first, *_] = told.splitlines()
    report.say("asynchronous machine: planted faults", f"{name}: after {reached.examples} runs: {first}")
    assert re.search(says, told), told
