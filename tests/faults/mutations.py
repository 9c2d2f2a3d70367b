"""Damage to files, for Hypothesis: changed values, cut texts, other bytes."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

NUMBERS = (-1, 0, 1, 7, 2**62, 2**63, 10**30, -(10**30), 0.5, 1e308, float("nan"), float("inf"))
ODD = (None, True, *NUMBERS, "", "x", "\ud800")
"""Values that a damaged or hostile file may have in the place of any other."""

_values = st.one_of(st.sampled_from(ODD), st.sampled_from([[], {}, [[]], [0], {"x": 0}]), st.text(max_size=3))


@st.composite
def damaged_json(draw: st.DrawFn, content: Any) -> str:
    """Return the text of a JSON value in which up to four places were changed."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 4))):
        container, key = _place(draw, content)
        if container is None:
            content = copy.deepcopy(draw(_values))
        else:
            _change(draw, container, key)
    return json.dumps(content)


def _place(draw: st.DrawFn, content: Any) -> tuple[Any, Any]:
    """Return a container and a key of it, some way down."""
    container, key, here = None, None, content
    for _ in range(draw(st.integers(0, 9))):
        if not isinstance(here, dict | list) or not here:
            break
        container = here
        key = draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
        here = here[key]
    return container, key


def _change(draw: st.DrawFn, container: Any, key: Any) -> None:
    match draw(st.sampled_from(("replace", "remove", "repeat", "shift"))):
        case "replace":
            container[key] = copy.deepcopy(draw(_values))
        case "remove":
            del container[key]
        case "repeat" if isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        case "repeat":
            container[draw(st.text(max_size=3))] = copy.deepcopy(container[key])
        case "shift" if isinstance(container[key], int):
            container[key] += draw(st.sampled_from((-1, 1, 1000)))
        case "shift" if isinstance(container, list):
            container.reverse()


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """Return bytes that were cut, or in which a few are others; or none of these bytes at all."""
    match draw(st.sampled_from(("cut", "flip", "other", "deep"))):
        case "cut":
            return content[: draw(st.integers(0, len(content) - 1))]
        case "flip":
            changed = bytearray(content)
            for _ in range(draw(st.integers(1, 5))):
                changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
            return bytes(changed)
        case "deep":
            return draw(st.sampled_from((b"[", b'{"format":', b'{"format":3,"report":['))) * draw(
                st.integers(1, 20_000)
            )
        case _:
            return draw(st.binary(max_size=40))
