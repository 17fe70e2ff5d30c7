"""The benchmarks: `python -m tests.benchmarks`, or `make bench`.

Prints one table; each line has a figure and the target that it must meet. The exit status is 1 if one is
missed. `--quick` measures fewer blocks (its bounds are wider, so it may fail where the whole run passes),
`--only` names the groups to run, `--json` writes the lines to a file.

Everything is compared with the same work done without the lifecycle, in the same process, in blocks that
alternate; so a slow machine slows both. A busy one still widens the bounds: run it on an idle one. The
garbage collector is off in timed blocks and runs between them, because a collection that happens to fall
into one of them would be charged to it alone.
"""

import argparse
import sys
from itertools import chain
from pathlib import Path

from tests.benchmarks import audit, drain, held, self_driven, steps, streams, throughput
from tests.benchmarks.measure import tell

# Those without a model come first: the memory of held requests is best measured in a small process.
GROUPS = {
    "steps": steps.run,
    "held": held.run,
    "audit": audit.run,
    "throughput": throughput.run,
    "drain": drain.run,
    "wake": held.run_on_vllm,
    "streams": streams.run,
    "guard": self_driven.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__.split("\n\n")[1])
    parser.add_argument("--quick", action="store_true", help="fewer blocks, wider bounds")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the lines to this file too")
    arguments = parser.parse_args()
    groups = (run(quick=arguments.quick) for name, run in GROUPS.items() if name in arguments.only)
    lines = tell(chain.from_iterable(groups), arguments.json)
    missed = sum(not line.ok for line in lines)
    print(
        f"\n{len(lines)} figures, {missed} FAIL"
        if missed
        else f"\n{len(lines)} figures, all within their targets"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
