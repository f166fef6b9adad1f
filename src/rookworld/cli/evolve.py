"""`rookworld evolve`: rounds of self-play and training, as a person meets them."""

from __future__ import annotations

from rookworld.cli.display import banner, bar, say, show
from rookworld.cli.flags import parse
from rookworld.evolve.settings import EvolveSettings
from rookworld.runtime.config import of_run
from rookworld.runtime.processes import Interrupted

COMMAND = "rookworld evolve"


def evolve(args: list[str]) -> int:
    settings = parse(EvolveSettings, args, command=COMMAND, default=EvolveSettings())
    own = of_run(EvolveSettings(), settings.out) if settings.resume else None
    if own is not None:
        say(f"what is not given is taken from {settings.out / 'config.json'}")
        settings = parse(EvolveSettings, args, command=COMMAND, default=own)
    from rookworld.evolve import rounds
    from rookworld.report.evolution import rounds_table

    if settings.dry_run:
        for line in rounds.plan(settings):
            print(line)
        return 0
    say(banner("evolve", settings, EvolveSettings()))
    try:
        with bar("rounds") as progress:
            records = rounds.evolve(
                settings,
                progress.say,
                lambda what, done, total: progress.update(done, total, what),
            )
    except Interrupted:
        say("stopped within a round; --resume goes on from there")
        return 130
    show(rounds_table(settings.out))
    print(f"model: {records[-1]['model']}")
    return 0
