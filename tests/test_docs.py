"""The documentation: generated parts are fresh, examples run, links lead somewhere, names exist."""

import ast
import dataclasses
import inspect
import re

import pytest

import lifecycle
from lifecycle import AsyncLifecycle, Lifecycle, LifecycleError, table
from tests import docs_tables
from tests.docs_tables import ROOT, pages, renewed

PAGES = {str(page.relative_to(ROOT)): page.read_text("utf-8") for page in pages()}
# `<!-- run -->` before a block: it runs as it stands, after those above it on its page.
# `<!-- run: vllm -->`: it needs an `llm`. `<!-- run: pytest -->`: tests, run together as one module.
RUN = re.compile(r"^<!-- run(?:: (vllm|pytest))? -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
PUBLIC_METHODS = {
    f"{kind.__name__}.{name}": member
    for kind in (Lifecycle, AsyncLifecycle)
    for name, member in vars(kind).items()
    if not name.startswith("_") and inspect.isfunction(member)
}


def anchors(text):
    """The anchors that MkDocs and GitHub both give to the headings of a page."""
    titles = (
        re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in HEADING.findall(FENCE.sub("", text))
    )
    return {re.sub(r"\s+", "-", title) for title in titles}


def code_words(page):
    """What stands between backticks on a page, outside of blocks."""
    return CODE.findall(FENCE.sub("", PAGES[page]))


def plain_signature(name, function):
    """A signature as the reference writes it: no `self`, no types."""
    signature = inspect.signature(inspect.unwrap(function))
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    plain = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return f"{name}{plain}".replace("'", '"')


def emitted_events():
    """Names of all events that the code emits, with the fields given where they are."""
    events = {}
    for path in (ROOT / "lifecycle").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in ("emit", "emit_repeatable") or not node.args:
                continue
            names = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            fields = {keyword.arg for keyword in node.keywords if keyword.arg}
            for name in names:
                events.setdefault(name, set()).update(fields)
    return events


@pytest.mark.parametrize("page", PAGES)
def test_generated_parts_are_fresh(page):
    """What the documentation says is legal is what `lifecycle.table` says."""
    assert renewed(PAGES[page]) == PAGES[page], "run `python -m tests.docs_tables --write`"


def test_every_part_is_shown():
    """No generated part is without a place in the documentation."""
    shown = {name for text in PAGES.values() for _, name, _ in docs_tables.MARKED.findall(text)}
    assert shown == set(docs_tables.PARTS)


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if RUN.search(text)])
def test_examples_run(page):
    """An example that is marked runnable runs as it stands."""
    namespace = {}
    for how, code in RUN.findall(PAGES[page]):
        if not how:
            exec(compile(code, page, "exec"), namespace)  # noqa: S102  (our own examples)


@pytest.mark.vllm
@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "<!-- run: vllm -->" in text])
def test_examples_with_vllm_run(page, llm):
    """An example that needs an `LLM` runs on a real one, and can be taken off again."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=3)
    namespace = {"llm": llm, "prompts": ["one", "two"], "params": params}
    for how, code in RUN.findall(PAGES[page]):
        if how == "vllm":
            exec(compile(code, page, "exec"), namespace)  # noqa: S102
    assert [len(output.outputs[0].token_ids) for output in namespace["outputs"]] == [3, 3]
    assert namespace["lifecycle"].check() == []
    namespace["lifecycle"].detach()


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if "<!-- run: pytest -->" in text])
def test_example_tests_pass(page, pytester, monkeypatch):
    """Tests that the documentation shows pass, as a user's would: with the plugin and nothing else."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    code = "\n\n".join(code for how, code in RUN.findall(PAGES[page]) if how == "pytest")
    pytester.makepyfile(code)
    result = pytester.runpytest_inprocess("-p", "lifecycle.testing.plugin", "-p", "no:cacheprovider")
    outcomes = result.parseoutcomes()
    assert outcomes.pop("passed") >= code.count("def test_")
    assert set(outcomes) <= {"skipped"}


@pytest.mark.parametrize("page", PAGES)
def test_examples_are_python(page):
    """Every Python block, runnable or not, can be compiled."""
    for code in BLOCK.findall(PAGES[page]):
        compile(code, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """A link between pages names a page that exists, and a heading on it."""
    here = (ROOT / page).parent
    for link in LINK.findall(PAGES[page]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (here / path) if path else ROOT / page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), link


def test_every_page_is_in_the_navigation():
    """Each page under docs/ is reached from the menu."""
    menu = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f": {path.name}\n" not in menu] == []


def test_reference_names_everything_public():
    """Each name of `lifecycle.__all__` and `engine_adapter.__all__` stands in the reference."""
    import engine_adapter

    text = PAGES["docs/reference.md"]
    names = [*lifecycle.__all__, *engine_adapter.__all__]
    assert [name for name in names if not re.search(rf"`{name}[`(]", text)] == []


@pytest.mark.parametrize("name", PUBLIC_METHODS)
def test_reference_has_the_signature(name):
    """The reference gives each public method, under its class, with its parameters and defaults."""
    kind, _, method = name.partition(".")
    entry = PAGES["docs/reference.md"].split(f"### `{kind}`\n", 1)[1].split("\n### ", 1)[0]
    assert f"`{plain_signature(method, PUBLIC_METHODS[name])}`" in entry


@pytest.mark.parametrize("name", ["SleepReport", "WakeReport", "LoadReport", "Snapshot", "DrainProgress"])
def test_reference_has_the_fields(name):
    """The reference gives each record with all of its fields."""
    entry = PAGES["docs/reference.md"].split(f"- `{name}`: ", 1)[1].split("\n- ", 1)[0]
    fields = {field.name for field in dataclasses.fields(getattr(lifecycle, name))}
    assert fields - set(CODE.findall(entry)) == set()


def test_options_are_all_in_the_guide():
    """Each keyword of `Lifecycle` is described in the guide and given in the reference."""
    options = [name for name in inspect.signature(Lifecycle).parameters if name != "engine"]
    assert [name for name in options if f"`{name}`" not in PAGES["docs/guide.md"]] == []
    assert [name for name in options if f"{name}=" not in PAGES["docs/reference.md"]] == []


def test_every_error_is_described():
    """Each error has a row that says whose move it is; no row is without its error."""
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)?", PAGES["docs/errors.md"], re.MULTILINE)
    errors = {
        name: getattr(lifecycle, name)
        for name in lifecycle.__all__
        if inspect.isclass(getattr(lifecycle, name)) and issubclass(getattr(lifecycle, name), LifecycleError)
    }
    assert {name for name, _ in rows} == set(errors) - {"LifecycleError"}
    for name, base in rows:
        bases = {parent.__name__ for parent in errors[name].__mro__}
        assert not base or base in bases, name


def test_every_event_is_described():
    """The page of events names the events that the code emits, and no others, with their fields."""
    page = PAGES["docs/events.md"]
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", page, re.MULTILINE))
    emitted = emitted_events()
    assert set(rows) == set(emitted)
    common = set(CODE.findall(page.split("Every event has", 1)[1].split("\n\n", 1)[0]))
    for name, fields in emitted.items():
        assert fields - set(CODE.findall(rows[name])) - common == set(), name


SUBMODULES = {path.stem for path in (ROOT / "lifecycle").iterdir()}


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    """What the documentation calls a method of the lifecycle, a state or an error is one."""
    blocks = "\n".join(BLOCK.findall(PAGES[page]))
    used = set(re.findall(r"\blifecycle\.([a-z]\w*)", blocks)) - SUBMODULES
    assert {name for name in used if not (hasattr(Lifecycle, name) or hasattr(AsyncLifecycle, name))} == set()
    imported = re.findall(r"^from lifecycle import (.+)$", blocks, re.MULTILINE)
    assert {name for names in imported for name in names.split(", ") if not hasattr(lifecycle, name)} == set()
    states = {word for word in code_words(page) if re.fullmatch(r"[A-Z]{5,}(_[A-Z]+)?", word)} - {"SIGKILL"}
    known = {member.name for kind in (table.State, table.Weights) for member in kind}
    assert states - known == set()


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    """A command line that the documentation gives is one that the program takes."""
    from lifecycle import cli

    for command in re.findall(r"`lifecycle ([a-z][a-z -]*)`", PAGES[page]):
        cli._parser().parse_args(command.split())


def test_diagram_labels_can_be_drawn():
    """A label of the diagram has no sign that would end it for Mermaid."""
    edges = [line for line in docs_tables.diagram().splitlines() if "-->" in line]
    assert [line for line in edges if line.count(":") > 1 or ";" in line] == []


def test_matrix_knows_every_state():
    """Each state can be reached with some facts, so that no column of the matrix is empty by mistake."""
    assert [state for state, facts in docs_tables.POSSIBLE.items() if not facts] == []


def test_facts_of_a_state_lead_to_it():
    """The facts that the matrix takes for a serving state are those that attach would find it in."""
    for state in (table.State.AWAKE, table.State.RUNNING):
        for facts in docs_tables.POSSIBLE[state]:
            rule = table.match(table.Trigger.ATTACH, None, facts)
            assert rule is not None
            assert rule.dest is state
