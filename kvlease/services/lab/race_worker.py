"""A worker of the race: a process that answers sessions cold and runs rows, one at a time.

Its lines are structs of `race_jobs` and `race_data`; see `services.processes` for the near end.
"""

import sys
from collections.abc import Callable

import msgspec

from kvlease.services.lab.race import cold_session, run_row
from kvlease.services.lab.race_data import WorkerSetup
from kvlease.services.lab.race_jobs import ColdJob, RowJob
from kvlease.services.processes import answers_alone_on_stdout


def serve(say: Callable[[msgspec.Struct], None]) -> None:
    """Answer the lines of stdin until it ends."""
    read = sys.stdin.buffer.readline
    setup = msgspec.json.decode(read(), type=WorkerSetup)
    decoder = msgspec.json.Decoder(ColdJob | RowJob)
    while line := read():
        job = decoder.decode(line)
        match job:
            case ColdJob():
                say(cold_session(setup.race, job.session, job.formats))
            case RowJob():
                say(run_row(setup.race, job, setup.cold))


if __name__ == "__main__":
    with answers_alone_on_stdout() as answer:
        serve(answer)
