"""The command ``python -m tp_ext.verify module:make_model``: prints the report, ends with 0 (right), 1 (wrong) or 2
(wrong arguments)."""

import argparse
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tp_ext.share_sizes import shares
from tp_ext.verify.arguments import check_make_model
from tp_ext.verify.verification import verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tp_ext.verify",
        description="Proves by running it that a model computes and learns the same on p ranks as on one. All ranks "
        "are simulated in this process.",
        epilog="exit code: 0 the model is right, 1 it is wrong, 2 wrong arguments",
    )
    parser.add_argument("make_model", metavar="module:make_model", help="a function of a group that returns the model")
    parser.add_argument("--p", type=int, nargs="+", help="numbers of ranks (default: 1 2 3)")
    parser.add_argument(
        "--shares", type=_number, nargs="+", help="weights of the ranks, as of tp_ext.shares; p is 1 and their number"
    )
    parser.add_argument(
        "--example",
        metavar="module:make_batch",
        help="the arguments of forward, a tuple or dict, or a function that returns one "
        "(default: example, in the module of make_model)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and masks (default: 0)")
    options = parser.parse_args(arguments)
    example = options.example or f"{options.make_model.partition(':')[0]}:example"
    try:
        if options.shares is not None and options.p is not None:
            raise ValueError(f"--p: {options.p} must not be given with --shares, which says the number of ranks")
        numbers = [1, 2, 3] if options.p is None else options.p
        if options.shares is not None:
            shares(options.shares)  # raises for bad weights
            numbers = [1, len(options.shares)]
        make_model, batch = _object("make_model", options.make_model), _object("--example", example)
        check_make_model(make_model)
        if options.shares is not None:
            make_model = _in_shares(make_model, options.shares)
        report = verify(make_model, batch, numbers, seed=options.seed)
    except (TypeError, ValueError) as error:
        parser.error(str(error))  # exits with 2
    except Exception:  # of the module, or of the function that makes the example: 1 would mean a wrong model
        traceback.print_exc()
        return 2
    print(report)
    return 0 if report.ok else 1


def _number(text: str) -> float:
    """Returns an integer where the text is one, else a float."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _in_shares(make_model: Callable[[Any], Any], weights: Sequence[float]) -> Callable[[Any], Any]:
    def make_in_shares(group: Any) -> Any:
        with shares(weights):
            return make_model(group)

    return make_in_shares


def _object(argument: str, path: str) -> Any:
    """Returns the object of a path "module:name".

    Raises:
        ValueError: a path of another form, no such module, or no such name in it.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{argument}: {path!r} must be of the form module:name")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"{argument}: {path!r} must name a module that can be imported: {error}") from error
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{argument}: {module} has no {name!r}")
        value = getattr(value, part)
    return value


if __name__ == "__main__":
    sys.exit(main())
