"""Rules of the house that no single test of a room can see."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import apollo_compile

PACKAGE = Path(apollo_compile.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

_CONTRACTS = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
TORCH_FREE = tuple(
    name
    for contract in _CONTRACTS["contracts"]
    if contract.get("forbidden_modules") == ["torch"]
    for name in contract["source_modules"]
)
"""Files, and directories with all their files, that run on a machine without torch: pyproject.toml lists them."""


def name_of(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a file reads, such as `torch._dynamo`."""
    yield from (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def strings_of(tree: ast.AST) -> set[str]:
    """Return the texts that a file has, docstrings among them."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def run_fresh(code: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def parametrize_files() -> pytest.MarkDecorator:
    """Run a test for every file of the package."""
    return pytest.mark.parametrize("path", FILES, ids=name_of)


# ------------------------------------------------------------------------------------------------------------- imports


MOST_ROOMS, MOST_ARROWS = 20, 105


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of rooms, those for type checking included, of which the first imports the second.

    A room is a directory of the package with all below it. Files beside them are the entrance above all rooms, and what
    all rooms share.
    """
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return {
        (own, parts[1])
        for path in FILES
        for own in [path.relative_to(PACKAGE).parts[0]]
        for parts in (name.split(".") for name in imported(tree_of(path)))
        if own in rooms and parts[0] == "apollo_compile" and len(parts) > 1 and parts[1] in rooms - {own}
    }


def test_rooms_and_arrows_are_few_and_no_two_rooms_import_each_other() -> None:
    """A person can hold the picture of the package in mind."""
    found = arrows()
    assert len({room for arrow in found for room in arrow}) <= MOST_ROOMS
    assert len(found) <= MOST_ARROWS
    assert not {arrow for arrow in found if arrow[::-1] in found}


def test_no_two_folders_import_each_other() -> None:
    """Not even a folder and the one that it is in; the files beside the rooms are the entrance and what all share."""
    files = {name_of(path): path for path in FILES}
    imports = {
        (path.parent, files[name].parent)
        for path in FILES
        for name in imported(tree_of(path))
        if name in files and PACKAGE not in (path.parent, files[name].parent)
    }
    assert not {(own, other) for own, other in imports if own != other and (other, own) in imports}


def test_no_files_import_each_other_in_a_circle() -> None:
    """With late imports, and those for type checking; what the package itself exports is for users."""
    files = {name_of(path): path for path in FILES}
    names = files.keys() - {"apollo_compile"}
    graph = {name: names.intersection(imported(tree_of(path))) - {name} for name, path in files.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())[-1] in files  # or an error that names a circle


def test_importing_the_package_imports_neither_torch_nor_ortools() -> None:
    """Dynamo finds backends by their entry points, and asks for the names of all of them."""
    code = (
        "import sys, apollo_compile; apollo_compile.known_options(); dir(apollo_compile); "
        "print(sorted({'torch', 'ortools'} & set(sys.modules)))"
    )
    assert run_fresh(code) == "[]"


def test_torch_free_files_import_no_torch() -> None:
    """One interpreter imports one after the other; the first that brings torch in is named."""
    free = tuple(f"{name}." for name in TORCH_FREE)
    names = [name for name in map(name_of, FILES) if f"{name}.".startswith(free)]
    assert len(names) >= len(TORCH_FREE) > 10
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    run_fresh(code)


ONLY_IN = {
    "private modules of torch": (r"torch(\.\w+)*\._", r"torch\._(?!_|foreach_|ops\b)", r"torch_bridge/.*"),
    "OR-Tools": (r"ortools\b", None, r"planner/(bounds|cp_sat|model|placement_model)\.py"),
    "the environment": (*2 * [r"(.*\.)?(environb?|getenv|putenv)$"], r"config\.py"),
}
"""Names that are imported, names that are read, and the files that may do so.

A new release of torch is the business of one package; `torch._ops` has the classes of operators, which have no other
name. OR-Tools is large, and a schedule is found without. Nobody knows else what a compile depends on.
"""


@pytest.mark.parametrize("what", ONLY_IN)
@parametrize_files()
def test_what_all_depends_on_is_used_in_one_place_only(path: Path, what: str) -> None:
    """The name of the place is in the table."""
    to_import, to_read, place = ONLY_IN[what]
    found = [name for name in imported(tree_of(path)) if re.match(to_import, name)]
    found += [name for name in attributes(tree_of(path)) if to_read is not None and re.match(to_read, name)]
    assert not found or re.fullmatch(place, path.relative_to(PACKAGE).as_posix())


_PRIVATE_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks", "_boxed_call", "_orig_mod", "tangents_")
"""Names that torch gives no public access to."""


@parametrize_files()
def test_private_attributes_of_torch_are_used_in_one_package_only(path: Path) -> None:
    """Also where they are reached by a string, as in `getattr`; a pattern for module paths may name one."""
    if PACKAGE / "torch_bridge" in path.parents:
        return
    tree = tree_of(path)
    fields = {ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not (strings_of(tree) | fields | used) & set(_PRIVATE_ATTRIBUTES)


@parametrize_files()
def test_pickles_are_for_the_planners_process_only(path: Path) -> None:
    """They run what is in them: files are JSON, and of graphs torch's own cache keeps its own kind."""
    allowed = {
        "apollo_compile.planner.apart": {"pickle"},
        "apollo_compile.torch_bridge.serialize": {"torch.fx._graph_pickler"},
    }
    found = {
        name
        for name in imported(tree_of(path))
        if re.match(r"(\w*pickle|marshal|shelve|dill|joblib)\b", name) or name.endswith("pickler")
    }
    assert found <= allowed.get(name_of(path), set())


@parametrize_files()
def test_only_the_command_line_prints(path: Path) -> None:
    """All else returns text or logs."""
    calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))
    lines = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert not lines or path.name == "cli.py", f"lines {lines}"


# ------------------------------------------------------------------------------------------------- names and docstrings


SOURCES = {
    path.name for room in ("apollo_compile", "benchmarks", "tests") for path in PACKAGE.parent.glob(f"{room}/**/*.py")
}


@parametrize_files()
def test_files_and_types_that_docstrings_name_exist(path: Path) -> None:
    """A file is named as in `passes/plan.py`; the type of a result, in the docstring of a file, as in `-> Plan`."""
    tree, text = tree_of(path), path.read_text(encoding="utf-8")
    assert {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+\.py)`", text)} <= SOURCES
    types = set(re.findall(r"-> ([A-Z][a-z]\w+)\b", ast.get_docstring(tree) or "")) - {"None", "GraphModule"}
    known = set(re.findall(r"\w+", text.partition("from __future__")[2]))
    assert types <= known or path.stem == "__init__", f"the code has no {types - known}"


@parametrize_files()
def test_public_names_are_sorted_and_exist(path: Path) -> None:
    """Files that list them are looked at."""
    assigned = [
        node.value
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    ]
    for value in assigned:
        public = ast.literal_eval(value)
        assert public == sorted(set(public))
        module = importlib.import_module(name_of(path))
        for name in public:
            assert getattr(module, name) is not None
        assert set(public) <= set(dir(module))


def test_an_unknown_public_name_is_an_error_that_lists_the_known_ones() -> None:
    """As of any module."""
    assert apollo_compile.__all__
    with pytest.raises(
        AttributeError, match=r"^module 'apollo_compile' has no attribute 'compile'; public names: BalancedBatchSampler"
    ):
        apollo_compile.compile  # noqa: B018


@parametrize_files()
def test_no_file_mentions_a_place_of_one_machine(path: Path) -> None:
    """The package runs where it is installed; /proc, /sys and /bin are the system's interfaces, not places."""
    absolute = re.compile(r"(?<![\w./<>:])(/(?!proc/|sys/|bin/)[a-z_][\w.-]*/[\w.-]+|[A-Za-z]:\\\\|~/)")
    assert not [text for text in strings_of(tree_of(path)) if absolute.search(text)]
    assert not re.search(r"/(work|home|root|tmp|opt|Users)/", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("room", ["autotune", "session"])
def test_every_file_of_a_room_has_a_file_of_tests(room: str) -> None:
    """At the same place under `tests`, so that whoever changes one knows where to look."""
    files = [path.relative_to(PACKAGE) for path in FILES if PACKAGE / room in path.parents and path.stem != "__init__"]
    twins = [PACKAGE.parent / "tests" / path.parent / f"test_{path.name}" for path in files]
    assert len(files) > 5 and not [str(twin) for twin in twins if not twin.exists()]


def test_tests_that_need_a_gpu_are_collected_and_skipped_with_a_reason() -> None:
    """Where there is one, they run."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("tells what happens without a GPU")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "tests/gpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"SKIPPED \[(\d+)\] tests/gpu/\S+ needs a CUDA device; torch sees none here", done.stdout)
    assert sum(map(int, counts)) > 10
    assert re.fullmatch(rf"{sum(map(int, counts))} skipped in .*", done.stdout.strip().splitlines()[-1])


# --------------------------------------------------------------------------------------------------------------- names


def public_names(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the names of types that a file defines for others, and whether each is a class, not an alias."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, False


def test_a_public_class_has_a_name_of_its_own() -> None:
    """A reader who meets a name knows the class; callbacks are named as the frameworks that they are for ask it."""
    files = [path for path in FILES if path.parent.name != "integrations"]
    found = [each for path in files for each in public_names(tree_of(path)) if not each[0].startswith("_")]
    names = Counter(name for name, _ in found)
    assert not {name for name, is_class in found if is_class and names[name] > 1}


# ------------------------------------------------------------------------------------------------------------- budgets

BUDGETS = {
    "autotune": 1_100,
    "cluster": 1_400,
    "cost_model": 800,
    "device": 5_100,
    "distributed": 5_110,
    "distributed/deploy": 1_530,
    "ir": 1_800,
    "operators": 1_250,
    "passes": 2_860,
    "planner": 3_050,
    "reports": 2_600,
    "session": 5_890,
    "store": 850,
    "target": 700,
    "tools": 3_500,
    "torch_bridge": 6_210,
}
"""Most lines of Python by room: growth of a room is a decision, and this is where it shows."""

SEVERAL_DEVICES = (
    *("cluster", "distributed/deploy", "distributed/link.py", "passes/deploy.py"),
    *("planner/fleet.py", "planner/placement.py", "planner/placement_model.py"),
    *("cost_model/cells.py", "cost_model/collectives.py", "session/step/collectives.py"),
    *("tools/cluster.py", "tools/estimate.py", "tools/model_times.py"),
    *("torch_bridge/data_parallel.py", "torch_bridge/nested_graph.py", "torch_bridge/sharded.py"),
)
"""What is there for more than one device: deployment plans, estimates, clusters, and whole steps of several ranks."""

MOST_LINES, MOST_LINES_FOR_SEVERAL_DEVICES = 37_430, 5_920

MOST_LINES_OF_A_CLASS, MOST_LINES_OF_A_FILE = 250, 600


def lines_of(*places: str) -> int:
    """Return the lines of files of the package, and of all files in and below directories of it."""
    found = {path for place in places for path in [PACKAGE / place, *(PACKAGE / place).rglob("*.py")] if path.is_file()}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found)


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_its_budget(room: str) -> None:
    """Its files, and those below it, have no more lines than the table says."""
    assert lines_of(room) <= BUDGETS[room], f"{room} has {lines_of(room)} lines of at most {BUDGETS[room]}"


def test_the_package_keeps_its_budget() -> None:
    """Files for one device have a budget, and files for several have another."""
    several = lines_of(*SEVERAL_DEVICES)
    assert all(lines_of(place) for place in SEVERAL_DEVICES)
    assert several <= MOST_LINES_FOR_SEVERAL_DEVICES
    assert lines_of(".") - several <= MOST_LINES


@parametrize_files()
def test_classes_and_files_are_of_a_size_to_read(path: Path) -> None:
    """A class is one decision, and a file one subject."""
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE
    classes = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    assert not [node.name for node in classes if (node.end_lineno or 0) - node.lineno >= MOST_LINES_OF_A_CLASS]
