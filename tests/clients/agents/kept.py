"""Where what was seen by hand is kept."""

import datetime
import itertools
import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "results"


def keep(name, seen):
    """Writes what was seen to a new file of today; no earlier run's is written over."""
    for run in itertools.count(1):
        number = "" if run == 1 else f"-{run}"
        try:
            with (FOLDER / f"{datetime.date.today()}-{name}{number}.json").open("x") as file:
                file.write(json.dumps(seen, indent=1) + "\n")
                return
        except FileExistsError:
            continue
