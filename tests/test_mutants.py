"""The tool behind `make test-mutants`, on a module of a few lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.operators import mutants

ROOT = Path(__file__).parents[1]
TOY = '''\
"""Nothing of this docstring is mutated."""

SIZES = {"small": 1, "large": 3}
LIMIT = SIZES["large"]


def grow(value: int) -> int:
    if value >= LIMIT:
        return value
    return value + SIZES["small"]


def count(times: int) -> int:
    seen = 0
    while times:
        times -= 1
        seen += 1
    return seen


def describe(value: int | None = None) -> str:
    return f"{'none' if value is None else value + 1}"
'''
JUDGES = """\
from toy import count, describe, grow


def test_grow():
    assert [grow(value) for value in (1, 2, 3)] == [2, 3, 3]


def test_count():
    if count(3) == 6:
        raise KeyboardInterrupt
    assert count(3) in (3, 4)
    assert describe(1) == "2"
"""
# The one mutant that these judges, who look at `count` too kindly, do not notice.
ALIVE = ("toy.py", "count", "seen = 0", "seen = 1")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Runs the tool on the toy, with these survivors listed; its exit code and what it said."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.py").write_text(TOY)

    def run(*survivors, judges=JUDGES, options=()):
        (folder / "test_toy.py").write_text(judges)
        lines = []
        for survivor in survivors:
            fields = zip(("file", "where", "before", "after"), survivor, strict=True)
            lines += ["[[survivor]]", *(f"{name} = {value!r}" for name, value in fields), "reason = 'a toy'"]
        (folder / "survivors.toml").write_text("\n".join(lines))
        arguments = "--file toy.py --tests test_toy.py --survivors survivors.toml --patience 2 --jobs 2"
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutants", *arguments.split(), *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def first(toy):
    """What the first run said, with nothing listed."""
    return toy()


@pytest.mark.parametrize(
    ("mutant", "verdict"),
    [
        ("if value >= LIMIT: -> if value > LIMIT:", "killed test_toy.py::test_grow"),
        ("seen += 1 -> pass", "killed test_toy.py::test_count"),
        ("seen += 1 -> seen += 2", "killed test_toy.py::test_count"),  # by a Ctrl-C that nobody caught
        ("times -= 1 -> pass", "timeout test_toy.py::test_count"),
        ('SIZES = {"small": 1, "large": 3} -> SIZES = {"small": 1, }', "invalid KeyError('large')"),
        ("seen = 0 -> seen = 1", "survived"),
    ],
)
def test_every_mutant_gets_its_verdict(first, mutant, verdict):
    """Killed is what a test notices, by failing or by hanging; what can't be imported is no mutant."""
    assert any(f"{mutant}   {verdict}" in line for line in first[1].splitlines()), first[1]


def test_the_score_leaves_out_what_is_invalid(first):
    """Killed and hanging mutants count, of those that can be imported."""
    assert first[1].count("13       9       2        1       1   91.7%") == 2, first[1]


def test_a_survivor_must_be_listed(toy, first):
    """A run fails for a survivor without a reason, whatever the score, and prints the entry to fill in."""
    code, said = first
    assert code == 1
    assert 'before = "seen = 0"\nafter = "seen = 1"\nreason = ""' in said
    assert toy(ALIVE, options=["--resume"])[0] == 0


def test_a_stale_entry_is_an_error(toy, first):
    """A run fails for a listed survivor that is killed by now, or gone."""
    killed, gone = ("toy.py", "count", "seen += 1", "pass"), ("toy.py", "count", "seen = 2", "seen = 3")
    for stale in (killed, gone):
        code, said = toy(ALIVE, stale, options=["--resume"])
        assert (code, " | ".join(stale) in said) == (1, True)


def test_verdicts_that_still_hold_are_kept(toy, first):
    """With --resume only what may have changed is judged again: survivors, once the tests are others."""
    said = toy(ALIVE, options=["--resume"])[1]
    assert "killed test_toy" not in said
    code, said = toy(judges=JUDGES.replace("in (3, 4)", "== 3"), options=["--resume"])
    assert code == 0
    assert "seen = 0 -> seen = 1   killed" in said
    assert said.count("killed test_toy") == 1


def test_tests_that_fail_anyway_judge_nothing(toy):
    """Without a mutant every test must pass: otherwise there is no score."""
    code, said = toy(judges=JUDGES.replace("in (3, 4)", "== 4"))
    assert code == 1
    assert "fails without any mutant: test_toy.py::test_count" in said
    assert "survived" not in said


def test_mutants_are_known_without_their_line():
    """An entry still fits after lines were added above; the set is the same at every run."""
    keys = [mutant.key for mutant in mutants("toy.py", TOY)]
    assert keys == [mutant.key for mutant in mutants("toy.py", TOY)]
    assert keys == [mutant.key for mutant in mutants("toy.py", TOY.replace("SIZES =", "\n\nSIZES =", 1))]
    assert ALIVE in keys


def test_words_are_not_mutated():
    """What can change only text or types is left out: strings, f-strings, annotations, imports."""
    words = (
        '"""Docstring."""\nfrom a import b\n\n\n'
        'def f(a: int | None = b) -> int | str:\n    return f"{1 + a}" "{1}"\n'
    )
    assert list(mutants("words.py", words)) == []


def test_tables_are_mutated():
    """An entry of a table is forgotten, and a state, a need, a guard or a tag is taken for another."""
    table = (
        'GUARDS = {\n    "always": (yes, "words"),\n    "never": (no, "words"),\n}\n'
        'RULES = (\n    Rule(Trigger.WAKE, _S, _A, "always"),\n    Rule(Trigger.FAIL, _S, _F),\n)\n'
    )
    found = {mutant.after for mutant in mutants("table.py", table)}
    assert {
        'Rule(Trigger.WEIGHTS_VALID, _S, _A, "always"),',
        'Rule(Trigger.WAKE, _P, _A, "always"),',
        'Rule(Trigger.WAKE, _S, _R, "always"),',
        'Rule(Trigger.WAKE, _S, _A, "never"),',
        "Rule(Trigger.RECOVER, _S, _F),",
        "",
    } <= found
