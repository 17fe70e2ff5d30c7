"""The parts of the documentation that are made from `lifecycle.table`.

`python -m tests.docs_tables --write` puts them between their markers in README.md and docs/*.md;
without `--write` it names the files whose parts are stale. A part stands between
`<!-- generated: NAME -->` and `<!-- end -->`, where NAME is one of `PARTS`.
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from lifecycle import table
from lifecycle.table import GUARDS, MEMORY_TAGS, RULES, Facts, Need, State, Trigger, Weights

ROOT: Final = Path(__file__).parent.parent
MARKED: Final = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Calls that fire a trigger: where they are legal at all, the row's guard has a say too.
TRIGGERS: Final[Mapping[str, tuple[Trigger, ...]]] = {
    "sleep": (Trigger.DRAIN, Trigger.DEEPEN, Trigger.RESLEEP),
}
# Left out of the diagram, where they would lead from everywhere to one place.
FROM_EVERYWHERE: Final = (Trigger.FAIL, Trigger.CLOSE)
ORDER: Final = (
    *("resident", "level", "weights", "paused", "in_flight", "held", "can_resleep", "kept_may_load"),
)


def pages() -> list[Path]:
    """Every page that a reader may find: the README and the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _every_fact() -> Iterator[Facts]:
    residents = [
        frozenset(tags) for count in range(3) for tags in itertools.combinations(sorted(MEMORY_TAGS), count)
    ]
    yes_or_no = (False, True)
    values = (residents, (None, 0, 1, 2), Weights, yes_or_no, (0, 1), (0, 1), yes_or_no, yes_or_no)
    for combination in itertools.product(*values):
        yield Facts(**dict(zip(ORDER, combination, strict=True)))


def _fits(state: State, facts: Facts) -> bool:
    """Whether these facts can be those of an engine in this state."""
    if facts.kept_may_load and state not in table.ASLEEP:
        return False
    serves = facts.servable and facts.level is None and not facts.paused
    match state:
        case State.AWAKE:
            return serves and not facts.busy
        case State.RUNNING:
            return serves and facts.in_flight > 0 and not facts.held
        case State.DRAINING:
            return serves
        case State.SLEEPING:
            return facts.servable if facts.level == 0 else facts.level is not None and not facts.resident
        case State.PARTIALLY_AWAKE:
            return bool(facts.resident) and not facts.servable
        case _:
            return True


POSSIBLE: Final = {state: [facts for facts in _every_fact() if _fits(state, facts)] for state in State}


def _conditions(call: str, state: State) -> list[str]:
    """The words of what must hold before the engine is asked, where this call fires a trigger."""
    rows = [rule for rule in RULES if rule.trigger in TRIGGERS.get(call, ()) and rule.source is state]
    return [GUARDS[rule.before][1] for rule in rows]


def cell(call: str, state: State) -> str:
    """What the table says of a call in a state: yes, held, no, or what it needs."""
    need = table.NEEDS[call]
    met = [table.meets(need, state, facts) for facts in POSSIBLE[state]]
    if not any(met):
        return "no"
    if call == "add_request" and not table.admits(state):
        return "held"
    words = [] if all(met) else [table.NEED_CHECKS[need].words]
    words += _conditions(call, state)
    return f"needs {', '.join(words)}" if any(words) else "yes"


# -- the parts --------------------------------------------------------------------------------------


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def states() -> str:
    """States, their meaning, and what becomes of a new request and of a step."""
    requests = {"yes": "admitted", "held": "held", "no": "refused"}

    def step(state: State) -> str:
        if state is State.DRAINING:
            return "by the lifecycle only"
        return {"yes": "legal", "no": "refused"}[cell("step", state)]

    return _rows(
        ("state", "meaning", "a new request is", "`step()` is"),
        [
            (f"`{state.name}`", table.MEANINGS[state], requests[cell("add_request", state)], step(state))
            for state in State
        ],
    )


def rules() -> str:
    """Every row of the rules, those of one trigger and one destination together."""
    merged: dict[tuple[Trigger, State, str, str], list[str]] = {}
    for rule in RULES:
        source = f"`{rule.source.name}`" if rule.source else "(start)"
        words = (GUARDS[rule.before][1], GUARDS[rule.guard][1])
        merged.setdefault((rule.trigger, rule.dest, *words), []).append(source)
    return _rows(
        ("trigger", "from", "to", "begins only with", "taken if it leads to"),
        [
            (f"`{trigger}`", ", ".join(sources), f"`{dest.name}`", before or "-", after or "-")
            for (trigger, dest, before, after), sources in merged.items()
        ],
    )


def diagram() -> str:
    """The rules as a Mermaid state diagram: one edge a pair of states, guards in brackets."""
    edges: dict[tuple[str, str], dict[str, list[str]]] = {}
    for rule in RULES:
        if rule.trigger in FROM_EVERYWHERE:
            continue
        pair = (rule.source.name if rule.source else "[*]", rule.dest.name)
        words = GUARDS[rule.before][1] or GUARDS[rule.guard][1]
        edges.setdefault(pair, {}).setdefault(words, []).append(rule.trigger.value)
    lines = ["```mermaid", "stateDiagram-v2"]
    for (source, dest), labels in edges.items():
        texts = [f"{', '.join(names)}{f' [{words}]' if words else ''}" for words, names in labels.items()]
        lines.append(f"    {source} --> {dest} : {'<br/>'.join(texts)}")
    fails = [rule.source.name for rule in RULES if rule.trigger is Trigger.FAIL and rule.source]
    closes = [rule.source.name for rule in RULES if rule.trigger is Trigger.CLOSE and rule.source]
    lines += [
        "    note right of FAILED",
        f"        fail leads here from {_few(fails)}",
        "    end note",
        "    note right of CLOSED",
        f"        close leads here from {_few(closes)}",
        "    end note",
        "    CLOSED --> [*]",
        "```",
    ]
    return "\n".join(lines)


def _few(sources: list[str]) -> str:
    missing = [state.name for state in State if state.name not in sources]
    return f"every state but {' and '.join(missing)}"


def needs() -> str:
    """Each need in words, and the calls that have it."""
    calls: dict[Need, list[str]] = {}
    for call, need in table.NEEDS.items():
        calls.setdefault(need, []).append(call)
    return _rows(
        ("need", "the call needs", "calls"),
        [
            (
                f"`{need}`",
                table.NEED_CHECKS[need].words,
                _code(calls[need]) if need in calls else "worker methods only",
            )
            for need in Need
        ],
    )


def matrix() -> str:
    """Every call in every state."""
    return _rows(
        ("call", *(f"`{state.name}`" for state in State)),
        [(f"`{call}`", *(cell(call, state) for state in State)) for call in table.NEEDS],
    )


def rpc() -> str:
    """What `collective_rpc` needs, by the name of the worker's method."""
    methods: dict[Need, list[str]] = {}
    for name, need in table.RPC_NEEDS.items():
        methods.setdefault(need, []).append(name)
    prefix = table.rpc_need(f"{table.RPC_LOAD_PREFIX}_of_any_kind", {})
    rows = [
        (
            _code(names)
            + (f", and every name that begins with `{table.RPC_LOAD_PREFIX}`" if need is prefix else ""),
            f"`{need}`",
            "refused: " + table.NEED_CHECKS[need].words
            if need is Need.MACHINE
            else table.NEED_CHECKS[need].words,
        )
        for need, names in methods.items()
    ]
    rows.append(("any other", f"`{table.RPC_DEFAULT}`", table.NEED_CHECKS[table.RPC_DEFAULT].words))
    return _rows(("worker method", "need", "the call needs"), rows)


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "states": states,
    "rules": rules,
    "diagram": diagram,
    "needs": needs,
    "matrix": matrix,
    "rpc": rpc,
}


def renewed(text: str) -> str:
    """The text with every generated part made anew. An unknown name is a KeyError."""
    return MARKED.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", text)


def main() -> int:
    stale = [page for page in pages() if renewed(page.read_text("utf-8")) != page.read_text("utf-8")]
    for page in stale:
        if "--write" in sys.argv[1:]:
            page.write_text(renewed(page.read_text("utf-8")), "utf-8")
        print(f"{'wrote' if '--write' in sys.argv[1:] else 'stale:'} {page.relative_to(ROOT)}")
    return int(bool(stale) and "--write" not in sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
