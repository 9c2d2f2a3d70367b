from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import pwd
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import apollo_compile.config as module
from apollo_compile.config import Config, known_options, load_config
from apollo_compile.errors import ApolloError, ConfigError
from tests.failures import raising

KNOWN = ", ".join(known_options())
SOURCE = Path(module.__file__).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take away the profile that all other tests have."""
    monkeypatch.delenv("APOLLO_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def option(config: Config, name: str) -> Any:
    """Return the value of a dotted option."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


# ------------------------------------------------------------------------------------------------------ three ways in


def test_without_options_and_environment_everything_is_default(tmp_path: Path) -> None:
    """But for the cache, which is the user's."""
    cache = tmp_path / "apollo_compile"
    expected = dataclasses.replace(Config(), device=dataclasses.replace(Config().device, cache=cache))
    assert load_config() == load_config({}) == load_config(None) == load_config({"plan": {}}) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"plan.planner": "serial", "plan.seed": 3, "disable": True},
        {"plan": {"planner": "serial", "seed": 3}, "disable": True},
        {"plan": {"planner": "serial"}, "plan.seed": 3, "disable": True},
    ],
)
def test_options_are_dotted_or_nested(options: Mapping[str, Any]) -> None:
    """Both forms may be given; other options keep their defaults, which a load does not change."""
    config = load_config(options)
    assert (config.plan.planner, config.plan.seed, config.disable) == ("serial", 3, True)
    assert config.plan.time_limit_s == Config().plan.time_limit_s
    assert load_config().plan.seed == Config().plan.seed == 0


@pytest.mark.parametrize(
    ("variable", "name", "text", "expected", "over"),
    [
        ("APOLLO_CUDA_LANES", "device.cuda_lanes", "0", False, True),
        ("APOLLO_CUDA_LANES", "device.cuda_lanes", "yes", True, False),
        *(("APOLLO_DISABLE", "disable", text, True, False) for text in ("1", "true", "Yes")),
        *(("APOLLO_DISABLE", "disable", text, False, True) for text in ("0", "false", "NO")),
        *(("APOLLO_DUMP", "debug.dump", text, Path(text), Path("else/where")) for text in ("some/where", "1", "true")),
        ("APOLLO_LOG", "debug.log", "DEBUG", "DEBUG", "WARNING"),
        ("APOLLO_PLAN", "plan.file", "plans", Path("plans"), Path("plans/plan.json")),
        *(("APOLLO_PROFILE", "device.profile", text, Path(text), Path("other.json")) for text in ("my.json", "0")),
    ],
)
def test_options_go_over_environment_over_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, name: str, text: str, expected: Any, over: Any
) -> None:
    """An empty variable counts as not set; only a yes or no is read as one: a directory may be called `1`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "plan.json").touch()
    default = option(Config(), name)
    assert option(load_config(), name) == default
    monkeypatch.setenv(variable, "")
    assert option(load_config(), name) == default
    monkeypatch.setenv(variable, text)
    assert option(load_config(), name) == expected
    assert option(load_config({name: over}), name) == over


def test_the_cache_is_the_users_unless_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the platform has it; a container may run as a number that no user has, and that has no home."""
    assert load_config().device.cache == tmp_path / "apollo_compile"
    assert load_config({"device.cache": "here"}).device.cache == Path("here")
    assert load_config({"device.cache": None}).device.cache == tmp_path / "apollo_compile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_config().device.cache == tmp_path / "home" / ".cache" / "apollo_compile"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", raising(KeyError("no user")))
    assert load_config().device.cache == Path(tempfile.gettempdir()) / f"apollo_compile-{os.getuid()}"


# -------------------------------------------------------------------------------------------------------------- errors


A_VALUE = "a value, not a mapping of options"
A_SHARE = "expected between 0 and 1"
A_PLANNER = "choose one of 'cp_sat', 'greedy', 'serial'"
NO_LATE_SHARE = (
    "option 'plan.late_share' does not exist any more: "
    "code is tuned from the start with mode='max-autotune', and not late in a run"
)


def unknown(name: str, guess: str = "") -> str:
    """Return what is said of an option that there is not."""
    meant = f", did you mean {guess}?" if guess else ""
    return f"unknown option {name!r} for backend 'apollo'{meant}; known options: {KNOWN}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # an option that is unknown, or gone
        ({"plan.planer": "serial"}, unknown("plan.planer", "plan.planner")),
        ({"plan": {"planer": "serial"}}, unknown("plan.planer", "plan.planner")),
        ({"planner": "serial"}, unknown("planner", "plan.planner")),
        ({"": 1}, unknown("")),
        ({"xyz": 1}, unknown("xyz")),
        ({"memory": {"plan.quota": 1}}, unknown("memory.plan.quota", "plan.memory_quota")),
        ({"plan.late_share": 0.0}, NO_LATE_SHARE),
        ({"plan": {"late_share": 1.0}}, NO_LATE_SHARE),
        # a group taken for an option, or an option for a group
        ({"plan": "serial"}, "option 'plan' has value 'serial'; plan expects options such as plan.planner"),
        ({"debug": None}, "option 'debug' has value None; debug expects options such as debug.dump"),
        ({"plan": {"planner": {"name": 1}}}, f"unknown option 'plan.planner.name': plan.planner expects {A_VALUE}"),
        ({"disable": {"x": 1}}, f"unknown option 'disable.x': disable expects {A_VALUE}"),
        # a value out of range
        ({"plan.time_limit_s": 0}, "option 'plan.time_limit_s' is 0; expected at least 0.01"),
        ({"plan": {"memory_quota": 0}}, "option 'plan.memory_quota' is 0; expected at least 1"),
        ({"plan.min_gain": float("nan")}, f"option 'plan.min_gain' is nan; {A_SHARE}"),
        ({"partition.min_segment_share": -0.1}, f"option 'partition.min_segment_share' is -0.1; {A_SHARE}"),
        ({"plan.seed": -1}, "option 'plan.seed' is -1; expected between 0 and 2147483647"),
        ({"device.units": 0}, "option 'device.units' is 0; expected at least 1"),
        # a wrong value; a bool is no number, and a number is no bool
        ({"plan.planner": "best"}, f"option 'plan.planner' has value 'best'; {A_PLANNER}"),
        ({"plan.planner": 1}, f"option 'plan.planner' has value 1; {A_PLANNER}"),
        ({"disable": 1}, "option 'disable' has value 1 of type int; expected bool"),
        ({"disable": "yes"}, "option 'disable' has value 'yes' of type str; expected bool"),
        ({"disable": None}, "option 'disable' has value None of type NoneType; expected bool"),
        ({"plan.seed": True}, "option 'plan.seed' has value True of type bool; expected int"),
        ({"plan.seed": "1"}, "option 'plan.seed' has value '1' of type str; expected int"),
        ({"plan.min_gain": True}, "option 'plan.min_gain' has value True of type bool; expected float"),
        ({"device.units": 1.5}, "option 'device.units' has value 1.5 of type float; expected int"),
        ({"device.profile": 3}, "option 'device.profile' has value 3 of type int; expected Path"),
        ({"device.cuda_lanes": "auto"}, "option 'device.cuda_lanes' has value 'auto' of type str; expected bool"),
        ({"debug.dump": False}, "option 'debug.dump' has value False of type bool; expected Path"),
        ({"debug.log": Path("x")}, f"option 'debug.log' has value {Path('x')!r} of type PosixPath; expected str"),
    ],
)
def test_a_wrong_option_or_value_is_an_error_that_says_what_was_expected(
    options: Mapping[str, Any], message: str
) -> None:
    """Dotted and nested options get the same message."""
    with pytest.raises(ConfigError) as caught:
        load_config(options)
    assert str(caught.value) == message
    assert isinstance(caught.value, ApolloError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("variable", ["APOLLO_DISABLE", "APOLLO_CUDA_LANES"])
def test_a_wrong_value_of_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """It comes from outside the program, so the user must know where to look."""
    monkeypatch.setenv(variable, "on")
    with pytest.raises(ConfigError) as caught:
        load_config()
    expected = f"environment variable {variable} has value 'on'; expected 1 or 0, true or false, yes or no"
    assert str(caught.value) == expected


def test_a_variable_that_nobody_reads_gets_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the variable that was meant, if one is like it."""
    monkeypatch.setenv("APOLLO_DISABEL", "1")
    monkeypatch.setenv("APOLLO_XYZ", "1")
    monkeypatch.setenv("NOT_APOLLO_DISABEL", "1")
    assert [load_config().disable for _ in range(2)] == [False, False]
    known = "known variables: APOLLO_CUDA_LANES, APOLLO_DISABLE, APOLLO_DUMP, APOLLO_LOG, APOLLO_PLAN, APOLLO_PROFILE"
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"environment variable APOLLO_DISABEL is ignored, did you mean APOLLO_DISABLE?; {known}",
        f"environment variable APOLLO_XYZ is ignored; {known}",
    ]


@pytest.mark.parametrize("where", ["option 'plan.file'", "environment variable APOLLO_PLAN"])
def test_a_plan_file_that_does_not_exist_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    """The user asked for a plan, and another one must not run instead."""
    absent, options = tmp_path / "plan.json", {}
    if where.startswith("environment"):
        monkeypatch.setenv("APOLLO_PLAN", str(absent))
    else:
        options = {"plan": {"file": absent}}
    with pytest.raises(ConfigError) as caught:
        load_config(options)
    says = f"is {str(absent)!r}, which does not exist; expected a plan.json, or a directory written by debug.dump"
    assert str(caught.value) == f"{where} {says}"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("plan.min_gain", 1, 1.0),
        ("device.units", None, None),
        ("device.profile", "a/b", Path("a/b")),
        ("device.profile", Path("a/b"), Path("a/b")),
        ("debug.log", "INFO", "INFO"),
        ("debug.strict", True, True),
    ],
)
def test_values_are_converted_where_nothing_is_lost(name: str, value: Any, expected: Any) -> None:
    """A whole number is a float, a text is a path, and None is allowed where it has a meaning."""
    found = option(load_config({name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


# ------------------------------------------------------------------------------------------------------- documentation


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, type, str]]:
    """Yield dotted name, class and field of every option, found by walking the dataclasses."""
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from leaves(hints[item.name], f"{prefix}{item.name}.")  # type: ignore[arg-type]
        else:
            yield prefix + item.name, cls, item.name


def test_known_options_are_all_fields_in_the_order_of_the_tree() -> None:
    """Each can be set to its own default."""
    assert list(known_options()) == [name for name, _, _ in leaves(Config)]
    assert len(set(known_options())) == len(known_options())
    assert load_config({name: option(Config(), name) for name in known_options()}) == load_config()


def test_every_option_has_a_docstring() -> None:
    """Under its field, as the house has it."""
    documented = {
        (node.name, ast.unparse(item.target))
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.ClassDef)
        for item, below in itertools.pairwise(node.body)
        if isinstance(item, ast.AnnAssign) and re.match(r"['\"]+[^'\"]", ast.unparse(below))
    }
    assert {(cls.__name__, field) for _, cls, field in leaves(Config)} <= documented


def test_the_table_of_variables_is_what_is_read() -> None:
    """Beside them only CUDA's own, which is shown and not used, and what a launcher says of local ranks."""
    table = dict(re.findall(r"^\| (\w+) +\| `([\w.]+)` +\|", module.__doc__ or "", re.MULTILINE))
    assert table == module._VARIABLES
    assert set(table.values()) <= set(known_options())
    strings = {n.value for n in ast.walk(ast.parse(SOURCE)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    mentioned = {text for text in strings if re.fullmatch(r"[A-Z][A-Z0-9_]*_[A-Z0-9_]+", text)}
    assert mentioned == {*table, *{"CUDA_DEVICE_MAX_CONNECTIONS", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"}}
