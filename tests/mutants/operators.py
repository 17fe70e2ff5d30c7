"""Which mutants there are: every place of a source file where an operator can plant a fault.

Theory of operation
-------------------
A mutant is an *edit*: a span of the source and the text that takes its place. The
classical operators are cosmic-ray's, asked for one or two variants a place where they
offer ten. The others know what cosmic-ray does not: that this project keeps its rules in
tables (an entry is dropped, a state or a guard is taken for another), and that a
statement can be forgotten.

Left out is what can change only text or types: strings (so also what stands inside an
f-string), annotations, imports, and the names in `TEXT`. The set is a function of the
source alone, and each mutant is identified by what it changes and where by name, so that
it is found again after lines have moved.
"""

import copy
import difflib
import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import parso
from cosmic_ray.operators.provider import OperatorProvider

_BUILTIN = OperatorProvider()
# Of ten ways to alter a comparison: its negation, and its neighbour at the boundary.
CLASSICAL = tuple(
    (name, _BUILTIN[name]())
    for name in (
        *(
            f"ReplaceComparisonOperator_{pair}"
            for pair in (
                "Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt"
            ).split()
        ),
        *(
            f"ReplaceBinaryOperator_{pair}"
            for pair in "Add_Sub Sub_Add Mul_Div Div_Mul BitOr_BitAnd BitAnd_BitOr".split()
        ),
        "ReplaceUnaryOperator_Delete_Not",
        "ReplaceUnaryOperator_Delete_USub",
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
        "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue",
        "ReplaceBreakWithContinue",
        "ReplaceContinueWithBreak",
        "ExceptionReplacer",
        "NumberReplacer",
        "RemoveDecorator",
        "ZeroIterationForLoop",
    )
)
# Names that stand for one another's mistakes: each is replaced by the next of its family.
FAMILIES = (
    ("_A", "_R", "_D", "_S", "_P", "_F", "_C"),
    ("WEIGHTS", "KV_CACHE", "SCHEDULING"),
    ("MEMORY_TAGS", "TAGS"),
    ("SERVING", "ALIVE", "ASLEEP"),
)
# And members of these: `State.AWAKE` by `State.RUNNING`.
MEMBERS = {
    "State": "AWAKE RUNNING DRAINING SLEEPING PARTIALLY_AWAKE FAILED CLOSED".split(),
    "Weights": "VALID DISCARDED TAINTED".split(),
    "Need": "NOTHING ALIVE QUIET SERVING WEIGHTS LOADING SLEEP WAKE RELEASE FAILED ABORT MACHINE".split(),
    "Trigger": (
        "ATTACH ADMIT SETTLE DRAIN ROLL_BACK SLEPT DEEPEN RESLEEP RELEASE_KV WAKE WEIGHTS_VALID "
        "WEIGHTS_TAINTED FAIL RECOVER CLOSE"
    ).split(),
    "PauseState": "UNPAUSED PAUSED_ALL".split(),
    "RequestOutputKind": "CUMULATIVE DELTA FINAL_ONLY".split(),
    "FinishReason": "ABORT STOP".split(),
}
# Assignments that hold words, or what only a type checker and an import read.
TEXT = {"MEANINGS", "TABLE_VERSION", "__all__", "__slots__"}
# Calls whose keywords are words about something that happened.
TELLS = {"emit", "emit_repeatable", "fire", "refuse", "invalid", "note_progress", "note_memory", "kind", "super"}
NEGATIONS = ("_Eq_NotEq", "_NotEq_Eq", "_Is_IsNot", "_IsNot_Is")
_NEXT = {family[i]: family[(i + 1) % len(family)] for family in FAMILIES for i in range(len(family))}
_IMPORTS = ("import_name", "import_from")


class Mutant(NamedTuple):
    """One planted fault. line: where it begins; where: the name of the function or class around it.

    before and after: the lines that differ, their white space reduced to single spaces.
    """

    file: str
    line: int
    where: str
    operator: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a list of survivors knows it by: no line numbers."""
        return self.file, self.where, self.before, self.after

    @property
    def digest(self) -> str:
        """What a verdict belongs to: this very source of the whole file."""
        return hashlib.sha256(f"{self.file}\0{self.source}".encode()).hexdigest()


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of this source, in its order, each source once."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(position: tuple[int, int]) -> int:
        return starts[position[0] - 1] + position[1]

    seen = {source}
    guards = re.findall(r'^    "(\w+)": \(', source, re.MULTILINE) if "GUARDS" in source else []
    for node in _worth(parso.parse(source)):
        for operator, start, end, text in (*_classical(node), *_own(node, guards)):
            mutated = source[: offset(start)] + text + source[offset(end) :]
            if mutated not in seen:
                seen.add(mutated)
                before, after = _difference(lines, mutated.splitlines(keepends=True))
                yield Mutant(file, start[0], _where(node), operator, before, after, mutated)


def _worth(node: Any) -> Iterator[Any]:
    """The nodes whose mutation could change what the program does."""
    if node.type in (*_IMPORTS, "strings", "string", "fstring"):
        return
    if node.type == "if_stmt" and node.children[1].get_code(include_prefix=False) == "TYPE_CHECKING":
        return
    if node.type == "expr_stmt" and node.children[0].get_code(include_prefix=False) in TEXT:
        return
    if node.parent is not None:
        yield node
    annotation = False
    for child in getattr(node, "children", ()):
        if not annotation:
            yield from _worth(child)
        annotation = node.type in ("annassign", "tfpdef", "funcdef") and child in (":", "->")
        annotation = annotation and not (node.type == "funcdef" and child == ":")


def _classical(node: Any) -> Iterator[tuple[str, Any, Any, str]]:
    for name, operator in CLASSICAL:
        if (_is_negation(name) and _in_condition(node)) or (name.endswith("Mul_Div") and node.parent.type != "term"):
            continue
        for index, _ in enumerate(operator.mutation_positions(node)):
            if index and name == "NumberReplacer":  # one more is enough: one less is seldom another mistake
                break
            mutated = operator.mutate(_alone(node), index)
            if mutated is None:
                yield name, node.get_start_pos_of_prefix(), node.end_pos, ""
            else:
                yield name, node.start_pos, node.end_pos, mutated.get_code(include_prefix=False)


def _alone(node: Any) -> Any:
    """A copy of this node; a plain deep copy would take the whole tree with it, through its parents."""
    parent, node.parent = node.parent, None
    alone = copy.deepcopy(node)
    node.parent = alone.parent = parent
    return alone


def _own(node: Any, guards: list[str]) -> Iterator[tuple[str, Any, Any, str]]:
    kind, parent = node.type, node.parent

    def whole(operator: str, text: str) -> tuple[str, Any, Any, str]:
        return operator, node.start_pos, node.end_pos, text

    if parent.type == "simple_stmt" and _forgettable(node):
        yield whole("ForgetStatement", "pass")
    if _is_condition(node, parent):
        yield whole("ConditionFalse", "False")
        if parent.type != "while_stmt":
            yield whole("ConditionTrue", "True")
    if parent.type == "comparison" and node == "in" and not _in_condition(parent):
        yield whole("InToNotIn", "not in")
    if kind == "comp_op" and node.get_code(include_prefix=False) == "not in" and not _in_condition(parent):
        yield whole("NotInToIn", "in")
    if kind == "argument" and parent.type == "arglist" and _is_of_a_method(parent) and node.children[1] == "=":
        yield "DropArgument", *_without(node, parent), ""
    if kind == "name" and node.value in _NEXT and not _is_binding(node):
        yield whole("SwapName", _NEXT[node.value])
    if kind == "name" and parent.type == "trailer" and parent.children[0] == ".":
        family = MEMBERS.get(parent.get_previous_sibling().get_code(include_prefix=False), ())
        if node.value in family:
            yield whole("SwapMember", family[(family.index(node.value) + 1) % len(family)])
    if kind in ("testlist_comp", "dictorsetmaker") and parent.parent.type != "dictorsetmaker":
        yield from _elements(node)
    if kind == "arglist" and "Rule" in parent.parent.get_code():
        for child in node.children:
            guard = child.children[-1] if child.type == "argument" else child
            if guard.type == "string" and guard.value[1:-1] in guards:
                other = guards[(guards.index(guard.value[1:-1]) + 1) % len(guards)]
                yield "SwapGuard", guard.start_pos, guard.end_pos, f'"{other}"'


def _elements(node: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """An entry of a literal collection is forgotten; not the only one, for without it there is no collection.

    The entries of a table of records are not: without one every look-up of it fails.
    """
    if node.children[-1].type in ("comp_for", "sync_comp_for"):
        return
    entries: list[list[Any]] = [[]]
    for child in node.children:
        entries[-1].append(child)
        if child == ",":
            entries.append([])
    entries = [entry for entry in entries if entry]
    if len(entries) > 1:
        for entry in entries:
            if ":" in entry and (_is_member(entry[2]) or entry[2].type in ("atom", "atom_expr")):
                continue  # a member is taken for another instead
            yield "DropElement", entry[0].start_pos, entry[-1].end_pos, ""


def _without(node: Any, parent: Any) -> tuple[Any, Any]:
    """The span of an argument and of its comma."""
    place = parent.children.index(node)
    if place + 1 < len(parent.children):
        return node.start_pos, parent.children[place + 1].end_pos
    return parent.children[place - 1].start_pos, node.end_pos


def _is_member(node: Any) -> bool:
    """`Need.ALIVE` and the like."""
    code = node.get_code(include_prefix=False).split(".")
    return len(code) == 2 and code[1] in MEMBERS.get(code[0], ())


def _is_of_a_method(arguments: Any) -> bool:
    """Of a call that acts; those of a class make a record, and those of `TELLS` say what happened."""
    call = arguments.parent.parent
    name = re.split(r"\W", call.get_code(include_prefix=False).partition("(")[0])[-1]
    return name.islower() and name not in TELLS


def _is_negation(operator: str) -> bool:
    return operator == "ReplaceUnaryOperator_Delete_Not" or operator.endswith(NEGATIONS)


def _in_condition(node: Any) -> bool:
    """Part of a condition that is forced both ways, and whose `and` and `or` are swapped: enough of it."""
    while node.parent is not None and node.parent.type in ("not_test", "and_test", "or_test", "comparison", "atom"):
        node = node.parent
    return node.parent is not None and _is_condition(node, node.parent)


def _forgettable(node: Any) -> bool:
    """A call for its effect, an assignment to something that outlives the function, a raise, a del.

    Not where a condition that is forced to be false forgets it too, and not in `__init__`,
    where an attribute that was never made is no mistake that could live for a minute.
    """
    suite, branch = node.parent.parent, node.parent.parent.parent
    if suite.type == "suite" and len(suite.children) == 2 and branch.type == "if_stmt" and len(branch.children) == 4:
        return False
    function = parso.tree.search_ancestor(node, "funcdef")
    if node.type == "expr_stmt" and function is not None and function.name.value == "__init__":
        return False
    if node.type in ("raise_stmt", "del_stmt", "atom_expr", "assert_stmt"):
        return True
    if node.type != "expr_stmt":
        return False
    augmented = not isinstance(node.children[1], parso.python.tree.PythonNode) and node.children[1] != "="
    targets = node.children[0]
    each = targets.children[::2] if targets.type == "testlist_star_expr" else [targets]
    return augmented or all(target.type == "atom_expr" for target in each)


def _is_condition(node: Any, parent: Any) -> bool:
    before = node.get_previous_sibling()
    if parent.type in ("if_stmt", "while_stmt", "comp_if"):
        return before in ("if", "elif", "while")
    return parent.type == "test" and before == "if"


def _is_binding(node: Any) -> bool:
    """The name is being assigned, or is an attribute or a keyword."""
    parent = node.parent
    if parent.type in ("trailer", "param", "tfpdef", "exprlist"):
        return node.get_previous_sibling() != "(" and node.get_previous_sibling() != "["
    if parent.type == "argument":
        return parent.children[0] is node
    if parent.type in ("expr_stmt", "testlist_star_expr"):
        return node.is_definition()
    return parent.type in ("sync_comp_for", "for_stmt") and node.get_previous_sibling() == "for"


def _where(node: Any) -> str:
    names = []
    while (node := parso.tree.search_ancestor(node, "funcdef", "classdef")) is not None:
        names.append(node.name.value)
    return ".".join(reversed(names))


def _difference(old: list[str], new: list[str]) -> tuple[str, str]:
    """What differs, as whole lines, with white space reduced."""
    blocks = [op for op in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if op[0] != "equal"]
    first, last = blocks[0], blocks[-1]
    before, after = old[first[1] : last[2]], new[first[3] : last[4]]
    return " ".join("".join(before).split()), " ".join("".join(after).split())
