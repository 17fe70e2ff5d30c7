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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import parso
from cosmic_ray.operators.provider import OperatorProvider

_BUILTIN = OperatorProvider()
# Of ten ways to alter a comparison: its negation, and its neighbour at the boundary.
_NAMES = """
ReplaceComparisonOperator_Eq_NotEq ReplaceComparisonOperator_NotEq_Eq
ReplaceComparisonOperator_Is_IsNot ReplaceComparisonOperator_IsNot_Is
ReplaceComparisonOperator_Lt_LtE ReplaceComparisonOperator_Lt_GtE
ReplaceComparisonOperator_LtE_Lt ReplaceComparisonOperator_LtE_Gt
ReplaceComparisonOperator_Gt_GtE ReplaceComparisonOperator_Gt_LtE
ReplaceComparisonOperator_GtE_Gt ReplaceComparisonOperator_GtE_Lt
ReplaceBinaryOperator_Add_Sub ReplaceBinaryOperator_Sub_Add
ReplaceBinaryOperator_Mul_Div ReplaceBinaryOperator_Div_Mul
ReplaceBinaryOperator_BitOr_BitAnd ReplaceBinaryOperator_BitAnd_BitOr
ReplaceUnaryOperator_Delete_Not ReplaceUnaryOperator_Delete_USub
ReplaceAndWithOr ReplaceOrWithAnd ReplaceTrueWithFalse ReplaceFalseWithTrue
ReplaceBreakWithContinue ReplaceContinueWithBreak
ExceptionReplacer NumberReplacer ZeroIterationForLoop
"""
CLASSICAL = {name: _BUILTIN[name]() for name in _NAMES.split()}
NEGATIONS = ("_Eq_NotEq", "_NotEq_Eq", "_Is_IsNot", "_IsNot_Is", "_Delete_Not")
NEGATIONS += ("_Lt_GtE", "_LtE_Gt", "_Gt_LtE", "_GtE_Lt")

# Names that are easily taken for one another: each is replaced by the next of its family.
FAMILIES = [
    family.split()
    for family in (
        "_A _R _D _S _P _F _C",
        "WEIGHTS KV_CACHE SCHEDULING",
        "MEMORY_TAGS TAGS",
        "SERVING ALIVE ASLEEP",
    )
]
# And members of these: `State.AWAKE` by `State.RUNNING`.
MEMBERS = {
    name: members.split()
    for name, members in {
        "State": "AWAKE RUNNING DRAINING SLEEPING PARTIALLY_AWAKE FAILED CLOSED",
        "Weights": "VALID DISCARDED TAINTED",
        "Need": "NOTHING ALIVE QUIET SERVING WEIGHTS LOADING SLEEP WAKE RELEASE FAILED ABORT MACHINE",
        "Trigger": "ATTACH ADMIT SETTLE DRAIN ROLL_BACK SLEPT DEEPEN RESLEEP RELEASE_KV WAKE WEIGHTS_VALID "
        "WEIGHTS_TAINTED FAIL RECOVER CLOSE",
        "PauseState": "UNPAUSED PAUSED_ALL",
        "RequestOutputKind": "CUMULATIVE DELTA FINAL_ONLY",
        "FinishReason": "ABORT STOP",
    }.items()
}
_NEXT = {name: family[(place + 1) % len(family)] for family in FAMILIES for place, name in enumerate(family)}

# Assignments that hold words, or what only a type checker and an import read.
TEXT = {"MEANINGS", "TABLE_VERSION", "__all__", "__slots__"}
# Calls whose keywords are words about something that happened.
TELLS = {"emit", "emit_repeatable", "fire", "refuse", "invalid", "note_progress", "note_memory", "kind"}

# An edit: the operator's name, where it begins and ends, and the new text.
Edit = tuple[str, tuple[int, int], tuple[int, int], str]


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
    guards = re.findall(r'^    "(\w+)": \(', source, re.MULTILINE) if "GUARDS" in source else []
    seen = {source}
    for node in _worth(parso.parse(source)):
        for operator, start, end, text in (*_classical(node), *_own(node), *_guards(node, guards)):
            from_, to = (starts[line - 1] + column for line, column in (start, end))
            mutated = source[:from_] + text + source[to:]
            if mutated not in seen:
                seen.add(mutated)
                before, after = _difference(lines, mutated.splitlines(keepends=True))
                yield Mutant(file, start[0], _where(node), operator, before, after, mutated)


def _worth(node: Any) -> Iterator[Any]:
    """The nodes whose mutation could change what the program does."""
    if node.type in {"import_name", "import_from", "strings", "string", "fstring"}:
        return
    if node.type == "if_stmt" and _code(node.children[1]) == "TYPE_CHECKING":
        return
    if node.type == "expr_stmt" and _code(node.children[0]) in TEXT:
        return
    if node.parent is not None:
        yield node
    marks = {"annassign": ":", "tfpdef": ":", "funcdef": "->"}
    before = None
    for child in getattr(node, "children", ()):
        if before is None or before != marks.get(node.type):  # else it is an annotation
            yield from _worth(child)
        before = child


def _classical(node: Any) -> Iterator[Edit]:
    for name, operator in CLASSICAL.items():
        if name.endswith(NEGATIONS) and _in_condition(node):
            continue
        if name.endswith("_Mul_Div") and node.parent.type != "term":  # the star of a parameter
            continue
        for index, _ in enumerate(operator.mutation_positions(node)):
            if index and name == "NumberReplacer":  # one more is enough: one less is seldom another mistake
                break
            yield name, node.start_pos, node.end_pos, _code(operator.mutate(_alone(node), index))


def _own(node: Any) -> Iterator[Edit]:
    parent = node.parent

    def become(operator: str, text: str) -> Edit:
        return operator, node.start_pos, node.end_pos, text

    if parent.type == "simple_stmt" and _can_be_forgotten(node):
        yield become("ForgetStatement", "pass")
    if _is_condition(node):
        yield become("ConditionFalse", "False")
        if parent.type != "while_stmt" and not _leaves(node):
            yield become("ConditionTrue", "True")
    if parent.type == "comparison" and not _in_condition(parent) and _code(node) in {"in", "not in"}:
        yield become("NegateIn", "not in" if _code(node) == "in" else "in")
    if node.type == "argument" and _is_named_argument(node):
        yield "DropArgument", *_with_comma(node), ""
    if node.type == "name" and node.value in _NEXT and not _is_assigned(node):
        yield become("SwapName", _NEXT[node.value])
    if node.type == "atom_expr" and (family := _family(node)):
        owner, member = _code(node).split(".")
        yield become("SwapMember", f"{owner}.{family[(family.index(member) + 1) % len(family)]}")
    if node.type in {"testlist_comp", "dictorsetmaker"} and parent.parent.type != "dictorsetmaker":
        yield from _elements(node)


def _guards(node: Any, guards: Sequence[str]) -> Iterator[Edit]:
    """In a row of the table, a guard is taken for the next one."""
    if node.type == "string" or not guards:
        return
    if node.type == "arglist" and _code(node.parent.parent).startswith("Rule("):
        for child in node.children:
            guard = child.children[-1] if child.type == "argument" else child
            if guard.type == "string" and guard.value[1:-1] in guards:
                other = guards[(guards.index(guard.value[1:-1]) + 1) % len(guards)]
                yield "SwapGuard", guard.start_pos, guard.end_pos, f'"{other}"'


def _elements(node: Any) -> Iterator[Edit]:
    """An entry of a literal collection is forgotten; not the only one, for without it there is no collection.

    The entries of a table of records are not: without one every look-up of it fails.
    """
    if node.children[-1].type in {"comp_for", "sync_comp_for"}:
        return
    entries: list[list[Any]] = [[]]
    for child in node.children:
        entries[-1].append(child)
        if child == ",":
            entries.append([])
    entries = [entry for entry in entries if entry]
    for entry in entries if len(entries) > 1 else ():
        # A member in the place of a value is taken for another instead.
        if ":" in entry and entry[2].type in {"atom", "atom_expr"}:
            continue
        rest = [other for other in entries if other is not entry]
        if node.type == "testlist_comp" and len(rest) == 1:  # a tuple of one needs its comma
            yield "DropElement", node.start_pos, node.end_pos, f"{_code(rest[0][0])},"
        else:
            yield "DropElement", entry[0].start_pos, entry[-1].end_pos, ""


def _can_be_forgotten(node: Any) -> bool:
    """A call for its effect, an assignment to something that outlives the function, a raise, a del.

    Not where a condition that is forced to be false forgets it too, and not in `__init__`,
    where an attribute that was never made is no mistake that could live for a minute.
    """
    suite = node.parent.parent
    alone = suite.type == "suite" and len(suite.children) == len(["newline", "statement"])
    if (
        alone
        and suite.parent.type == "if_stmt"
        and not {"else", "elif"} & {*map(_code, suite.parent.children)}
    ):
        return False
    if node.type != "expr_stmt":
        return node.type in {"raise_stmt", "del_stmt", "atom_expr"}
    function = parso.tree.search_ancestor(node, "funcdef")
    if function is not None and function.name.value == "__init__":
        return False
    target, sign = node.children[:2]
    if sign.type == "operator" and sign != "=":
        return True
    targets = target.children[::2] if target.type == "testlist_star_expr" else [target]
    return all(each.type == "atom_expr" for each in targets)


def _is_condition(node: Any) -> bool:
    before, parent = node.get_previous_sibling(), node.parent
    if parent.type in {"if_stmt", "while_stmt", "comp_if"}:
        return before in ("if", "elif", "while")
    return parent.type == "test" and before == "if"


def _leaves(condition: Any) -> bool:
    """Its branch ends the function or the loop: to take it always would be no mistake that could hide."""
    suite = condition.get_next_sibling() and condition.get_next_sibling().get_next_sibling()
    last = suite.children[-1] if suite and suite.type == "suite" else None
    ends = {"raise_stmt", "return_stmt", "keyword"}  # the keywords: break and continue
    return last is not None and last.type == "simple_stmt" and last.children[0].type in ends


def _in_condition(node: Any) -> bool:
    """Part of a condition that is forced both ways, and whose `and` and `or` are swapped: enough of it."""
    parts = {"not_test", "and_test", "or_test", "comparison", "atom"}
    while node.parent is not None and node.parent.type in parts:
        node = node.parent
    return node.parent is not None and _is_condition(node)


def _is_named_argument(node: Any) -> bool:
    """Of a call that acts; those of a class make a record, and those of `TELLS` say what happened."""
    if node.parent.type != "arglist" or node.children[1] != "=":
        return False
    name = re.split(r"\W", _code(node.parent.parent.parent).partition("(")[0])[-1]
    return name.islower() and name not in TELLS


def _with_comma(node: Any) -> tuple[Any, Any]:
    """The span of an argument and of its comma."""
    comma = node.get_next_sibling()
    if comma is not None:
        return node.start_pos, comma.end_pos
    return node.get_previous_sibling().start_pos, node.end_pos


def _family(node: Any) -> Sequence[str]:
    """The members that `State.AWAKE` and the like could be taken for."""
    owner, _, member = _code(node).partition(".")
    family = MEMBERS.get(owner, ())
    return family if member in family else ()


def _is_assigned(node: Any) -> bool:
    """The name is bound here, or is an attribute or a keyword."""
    parent, before = node.parent, node.get_previous_sibling()
    if parent.type in {"trailer", "param", "tfpdef", "exprlist"}:
        return before not in ("(", "[")
    if parent.type == "argument":
        return before is None
    if parent.type in {"expr_stmt", "testlist_star_expr"}:
        return bool(node.is_definition())
    return parent.type in {"sync_comp_for", "for_stmt"} and before == "for"


def _alone(node: Any) -> Any:
    """A copy of this node; a plain deep copy would take the whole tree with it, through its parents."""
    parent, node.parent = node.parent, None
    alone = copy.deepcopy(node)
    node.parent = alone.parent = parent
    return alone


def _code(node: Any) -> str:
    code: str = node.get_code(include_prefix=False)
    return code


def _where(node: Any) -> str:
    names = []
    while (node := parso.tree.search_ancestor(node, "funcdef", "classdef")) is not None:
        names.append(node.name.value)
    return ".".join(reversed(names))


def _difference(old: list[str], new: list[str]) -> tuple[str, str]:
    """What differs, as whole lines, with white space reduced."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    blocks = [block for block in matcher.get_opcodes() if block[0] != "equal"]
    _, from_, _, new_from, _ = blocks[0]
    _, _, to, _, new_to = blocks[-1]
    return " ".join("".join(old[from_:to]).split()), " ".join("".join(new[new_from:new_to]).split())
