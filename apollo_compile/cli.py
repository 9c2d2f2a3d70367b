"""The `apollo` command.

    apollo calibrate [--units N] [--output PATH] [--json]    measure this machine, keep its device profile

The exit code is 0, 1 if the command could not do what it is for, 2 if it was called wrongly. Results go to standard
output, progress to standard error: a bar on a terminal, plain lines elsewhere. A command is a function that takes the
parsed arguments and returns the exit code; `_parser` says which there are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apollo_compile.config import load_config
from apollo_compile.errors import ApolloError
from apollo_compile.units import format_ns, seconds_to_ns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments`, by default those of the process; return the exit code."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except (ApolloError, OSError, ValueError) as error:
        print(f"apollo {args.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="apollo", description="Tools around torch.compile(backend='apollo').")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    calibrate = commands.add_parser(
        "calibrate", help="measure this machine and keep its device profile", description="Measure this machine."
    )
    calibrate.add_argument("--units", type=int, help="cores to use; default: every core that torch uses")
    calibrate.add_argument("--output", type=Path, help="file for the profile; default: the user's cache")
    calibrate.add_argument("--json", action="store_true", help="print the profile as JSON")
    calibrate.set_defaults(run=_calibrate)
    return parser


def _calibrate(args: argparse.Namespace) -> int:
    from apollo_compile.calibrate import calibrate  # torch takes seconds to import: not for --help
    from apollo_compile.device import cached_profile_path, format_profile, machine_fingerprint, save_profile
    from apollo_compile.execute import available_units

    units = available_units() if args.units is None else args.units
    cache = load_config().device.cache
    assert cache is not None, "load_config fills it in"
    path = cached_profile_path(cache, units) if args.output is None else args.output
    fingerprint = machine_fingerprint(units)
    begin = time.perf_counter()
    with _Progress() as progress:
        calibration = calibrate(units, progress=progress)
    is_kept = args.output is not None or not calibration.is_disturbed
    if is_kept:
        save_profile(calibration.profile, path, fingerprint=fingerprint)
    if args.json:
        print(format_profile(calibration.profile, fingerprint=fingerprint), end="")
    else:
        took = format_ns(seconds_to_ns(time.perf_counter() - begin))
        print(f"{calibration.profile.name}: measured in {took}" + (f", kept in {path}" if is_kept else ""))
    if calibration.is_disturbed:
        print(
            f"other processes held a core in {calibration.disturbed_share:.0%} of the rounds, so the numbers are "
            f"{'doubtful' if is_kept else 'not kept'}; stop them and run 'apollo calibrate' again",
            file=sys.stderr,
        )
        return 1
    return 0


class _Progress:
    """Shows steps on standard error: a bar on a terminal, a line per kind of step elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown = ""

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(unit="step", file=sys.stderr, leave=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            if what != self._shown:
                print(what, file=sys.stderr, flush=True)
        else:
            self._bar.total = total
            self._bar.set_description(what, refresh=False)
            self._bar.update(done - self._bar.n)
        self._shown = what


if __name__ == "__main__":
    sys.exit(main())
