"""`rookworld match` and `rookworld selfplay`: games between players, and what they amount to."""

from __future__ import annotations

import json

from rookworld.cli.display import bar, show
from rookworld.cli.flags import leading, parse
from rookworld.cli.play import one_model
from rookworld.runtime.errors import ConfigError


def match(args: list[str]) -> int:
    from rookworld.evaluation.evaluate import Evaluation
    from rookworld.evaluation.matches import MatchSettings, run_match
    from rookworld.evaluation.suites import EvalResult
    from rookworld.evaluation.tables import render_table

    players, rest = leading(args)
    settings = parse(MatchSettings, rest, command="rookworld match", default=MatchSettings())
    if len(players) != 2:
        raise ConfigError("match: name two players, such as `rookworld match nano stockfish`")
    with bar("games") as progress:
        result = run_match(players[0], players[1], settings, progress.update)
    if settings.json:
        print(json.dumps(result.to_json()))
        return 0
    names = " - ".join(result.players)
    show(render_table(EvalResult((names,), (Evaluation(result.estimates),), ())))
    won, drawn, lost = result.results
    print(f"{names}: {won} won, {drawn} drawn, {lost} lost; pairs {list(result.counts)}")
    print(f"likelihood that the first is stronger: {100 * result.superiority:.1f} %")
    test = settings.test()
    if test is not None and result.ratio is not None:
        lowest, highest = test.bounds
        said = "neither" if result.accepted is None else f"{result.accepted:+g} Elo"
        print(
            f"SPRT {test.low:g} {test.high:g}: {said} accepted, log-likelihood ratio"
            f" {result.ratio:.2f} of {lowest:.2f} … {highest:.2f}"
        )
    return 0


def selfplay(args: list[str]) -> int:
    from rookworld.evaluation.evaluate import Evaluation
    from rookworld.evaluation.matches import SelfplaySettings, run_selfplay
    from rookworld.evaluation.suites import EvalResult
    from rookworld.evaluation.tables import render_table

    models, rest = leading(args)
    settings = parse(
        SelfplaySettings, rest, command="rookworld selfplay", default=SelfplaySettings()
    )
    model = one_model(models, "selfplay")
    with bar("games") as progress:
        played = run_selfplay(model, settings, progress.update)
    if settings.json:
        print(json.dumps({name: one.to_json() for name, one in played.estimates.items()}))
    else:
        show(render_table(EvalResult((model,), (Evaluation(played.estimates),), ())))
    return 0
