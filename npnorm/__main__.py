"""The command line: ``python -m npnorm``, or ``npnorm``."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from ._commands.operations import DTYPES, OPERATIONS, numpy_dtype
from ._threads import get_num_threads


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        get_num_threads()
    except ValueError as error:
        parser.error(str(error))
    # Imported now, since commands bring Numba, which --help must not wait for.
    status: int = import_module(f"npnorm._commands.{options.command}").run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("npnorm", description="LayerNorm and RMSNorm for NumPy arrays.")
    commands = parser.add_subparsers(dest="command", metavar="command")

    compile_ = commands.add_parser(
        "compile",
        help="fill the kernel cache ahead of time",
        description="Compile the kernels that calls of the chosen operations need, for every shape and all values, "
        "so that no later process compiles them.",
    )
    _add_choice(compile_, ["float32"], "float32")
    compile_.add_argument(
        "--weight-dtype",
        type=_dtype,
        metavar="DTYPE",
        help="dtype of weight and bias (default: that of the input)",
    )
    compile_.add_argument(
        "--parameters",
        nargs="+",
        choices=("usual", "none", "weight", "weight+bias"),
        default=["usual"],
        metavar="WHICH",
        help="what is given: none, weight, weight+bias, or usual, which is weight+bias for LayerNorm and weight "
        "for RMSNorm (default: usual)",
    )
    compile_.add_argument(
        "--dresidual", action="store_true", help="backward: calls that give `dresidual`, too"
    )
    compile_.add_argument(
        "--cache-dir", metavar="FOLDER", help="the folder to fill, instead of what NPNORM_CACHE_DIR says"
    )

    info = commands.add_parser(
        "info",
        help="show versions, CPU, threads and cache",
        description="Show what npnorm finds on this machine.",
    )
    check = commands.add_parser(
        "check",
        help="check accuracy and speed on this machine",
        description="Compare results with exact ones and times with those of np.copyto. "
        "The exit status is 1 if an error is larger than npnorm promises.",
    )
    _add_choice(check, None, "all there are")
    for command in (info, check):
        command.add_argument("--json", action="store_true", help="write JSON")
    return parser


def _add_choice(parser: argparse.ArgumentParser, dtypes: list[str] | None, said: str) -> None:
    parser.add_argument(
        "--operations",
        nargs="+",
        choices=OPERATIONS,
        default=OPERATIONS,
        metavar="NAME",
        help=f"some of {', '.join(OPERATIONS)} (default: all)",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        type=_dtype,
        default=dtypes and [numpy_dtype(name) for name in dtypes],
        metavar="DTYPE",
        help=f"some of {', '.join(DTYPES)} (default: {said})",
    )


def _dtype(name: str) -> object:
    try:
        return numpy_dtype(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
