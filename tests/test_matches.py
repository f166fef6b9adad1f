"""Pairs by hand, the sequential test by simulation, and the two commands end to end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import chess
import chess.pgn
import numpy as np
import pytest

from legal_engine import install_legal
from rookworld.cli.dispatch import main
from rookworld.evaluation.games import new_game, play_out
from rookworld.evaluation.matches import MatchSettings, lots, match_result
from rookworld.evaluation.opinion import Opinion
from rookworld.evaluation.pairs import (
    SCORES,
    SequentialTest,
    elo_score,
    likelihood,
    normalised_elo,
    pair_counts,
    superiority,
)
from rookworld.evaluation.players import OpinionPlayer, Referee, decided
from rookworld.evaluation.statistics import elo_difference, match_score
from rookworld.runtime.errors import ConfigError
from rookworld.tasks.engine import Engine, find_engine

BY_HAND = [
    # pairs of 0 ½ 1 1½ 2; score and its interval; Elo; normalised Elo and half its interval; LOS
    # variance of a pair 0.75/9: as good as 30 games; Wilson 0.5 ± 0.1685
    ((1, 2, 4, 2, 1), (0.5, 0.3315, 0.6685), 0.0, (0.0, 152.27), 0.5),
    # variance 0.50625/9 = 0.05625: as good as 39 games; 0.175 is 2 1/3 errors above a half
    ((0, 1, 3, 4, 2), (0.675, 0.5182, 0.8004), 126.97, (181.27, 152.27), 0.99018),
    # always level: no spread, and never more than four times the 8 games
    ((0, 0, 4, 0, 0), (0.5, 0.3356, 0.6644), 0.0, None, 0.5),
]


@pytest.mark.parametrize(("counts", "score", "elo", "normalised", "los"), BY_HAND)
def test_pairs_by_hand(
    counts: tuple[int, ...],
    score: tuple[float, float, float],
    elo: float,
    normalised: tuple[float, float] | None,
    los: float,
) -> None:
    pairs = np.repeat(SCORES, counts)
    assert tuple(pair_counts(pairs)) == counts
    found = match_score(pairs)
    if normalised is not None:
        assert (found.value, found.low, found.high) == pytest.approx(score, abs=1e-4)
    assert found.n == 2 * sum(counts)
    assert elo_difference(found).value == pytest.approx(elo, abs=0.01)
    other = normalised_elo(pairs)
    assert (other is None) == (normalised is None)
    if other is not None and normalised is not None:
        value, half = normalised
        low_high = (value, value - half, value + half)
        assert (other.value, other.low, other.high) == pytest.approx(low_high, abs=0.01)
    assert superiority(pairs) == pytest.approx(los, abs=1e-5)


def test_the_likelihood_by_hand() -> None:
    # seen mean is a half: the likeliest distribution there is what was seen, weight 0
    counts = np.array([1, 0, 2, 0, 1])
    assert likelihood(counts, 0.5) == pytest.approx(0.0, abs=1e-6)
    # two outcomes alone: a mean of 0.6 leaves no choice but 0.4 and 0.6
    two = np.array([5, 0, 0, 0, 5])
    by_hand = 5 * math.log(0.4 / 0.5) + 5 * math.log(0.6 / 0.5)
    assert likelihood(two, 0.6) == pytest.approx(by_hand, abs=0.01)


@pytest.mark.parametrize(("low", "high", "lot"), [(0.0, 40.0, 4), (0.0, 10.0, 16)])
def test_the_sequential_test_errs_as_often_as_it_says(low: float, high: float, lot: int) -> None:
    test = SequentialTest(low, high)
    for truth, wrong in ((low, high), (high, low)):
        accepted = simulated(test, elo_score(truth), trials=1_000, lot=lot)
        assert not np.isnan(accepted).any()
        assert abs(float((accepted == wrong).mean()) - 0.05) <= 0.02


def simulated(test: SequentialTest, score: float, *, trials: int, lot: int) -> np.ndarray:
    """What each of many matches accepts; NaN where it has not ended."""
    rng = np.random.default_rng(7)
    games = np.array([score - 0.25, 0.5, 0.75 - score])  # won, drawn, lost: half are draws
    counts = np.zeros((trials, 5), dtype=np.int64)
    accepted = np.full(trials, np.nan)
    lowest, highest = test.bounds
    for _ in range(3_000):
        going = np.flatnonzero(np.isnan(accepted))
        if not going.size:
            break
        drawn = rng.choice(3, p=games, size=(going.size, lot, 2)).sum(axis=2)
        for outcome in range(5):
            counts[going, 4 - outcome] += (drawn == outcome).sum(axis=1)
        ratio = test.ratio(counts[going])
        accepted[going[ratio <= lowest]] = test.low
        accepted[going[ratio >= highest]] = test.high
    return accepted


def test_bad_tests_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be lower"):
        MatchSettings(sprt=(10, 0))
    with pytest.raises(ConfigError, match="alpha"):
        MatchSettings(sprt=(0, 10), alpha=0.6)
    with pytest.raises(ConfigError, match="even"):
        MatchSettings(games=3)


# --- games ---------------------------------------------------------------------------------------


class ByName:
    """The first legal move by name, or the last."""

    def __init__(self, name: str, pick: str = "first") -> None:
        self.name, self.pick = name, min if pick == "first" else max

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        return [self.pick(move.uci() for move in board.legal_moves) for board in boards]


class Resigns:
    """Loses every game by writing no move."""

    name = "resigns"

    def choose(self, boards: Sequence[chess.Board], games: Sequence[int]) -> list[str]:
        return [""] * len(boards)


def test_lots_do_not_change_the_games() -> None:
    a, b = ByName("a"), ByName("b", "last")
    settings = MatchSettings(games=12, max_plies=8, at_once=4)
    (*_, small) = lots(a, b, settings)
    (large,) = lots(a, b, MatchSettings(games=12, max_plies=8, at_once=64))
    assert [game.board.move_stack for game in small] == [game.board.move_stack for game in large]
    assert [game.number for game in small] == list(range(12))
    assert [game.white is a for game in small] == [True, False] * 6
    result = match_result(a, b, small, None)
    assert result.results == (0, 12, 0) and result.counts == (0, 0, 6, 0, 0)
    assert result.ratio is None and result.accepted is None


def test_a_match_between_unequals_is_stopped_early() -> None:
    settings = MatchSettings(games=400, sprt=(0, 10), at_once=8)
    test = settings.test()
    assert test is not None
    for games in lots(ByName("a"), Resigns(), settings):
        found = match_result(games[0].white, games[0].black, games, test)
        if found.accepted is not None:
            break
    assert found.accepted == 10
    assert len(games) < 400


def test_a_referee_ends_what_is_decided() -> None:
    assert decided([1_200] * 6, 20) == "1-0" and decided([-1_200] * 6, 20) == "0-1"
    assert decided([1_200] * 5, 20) == "" and decided([1_200] * 5 + [900], 20) == ""
    assert decided([3, -9] * 8, 90) == "1/2-1/2"
    assert decided([3, -9] * 8, 60) == "" and decided([3, -9] * 7, 90) == ""
    assert decided([], 0) == ""


@pytest.mark.engine
def test_stockfish_is_a_referee() -> None:
    player = ByName("both")
    game = new_game(0, player, player)
    game.board.set_fen("7k/8/8/8/8/8/QQ6/K7 w - - 0 1")
    with Engine(find_engine()) as engine:
        judge = Referee(engine, nodes=500).judge
        play_out([game], max_plies=60, claim_draw=True, referee=judge)
    assert (game.end, game.result, game.plies) == ("adjudicated", "1-0", 6)


def test_the_match_command(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, pgn = str(install_legal(tmp_path)), tmp_path / "games.pgn"
    flags = ["--games", "4", "--max-plies", "6", "--device", "cpu", "--nodes", "10"]
    assert main(["match", str(tiny_folder), engine, *flags, "--pgn", str(pgn), "--sides"]) == 0
    shown = capsys.readouterr().out
    assert "0 won, 4 drawn, 0 lost; pairs [0, 0, 2, 0, 0]" in shown
    assert "match/replaced" in shown and "(all sides)" in shown
    with pgn.open() as file:
        games = [chess.pgn.read_game(file) for _ in range(4)]
        assert chess.pgn.read_game(file) is None
    assert next(game.headers["Black"] for game in games if game) == "Legal 1 (10 nodes)"
    assert main(["match", engine, engine, *flags, "--json", "--sprt", "0", "10"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["won_drawn_lost"] == [0, 4, 0] and found["accepted"] is None
    assert found["match/score"]["n"] == 4


def test_the_selfplay_command(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pgn = tmp_path / "games.pgn"
    flags = ["--games", "3", "--max-plies", "4", "--device", "cpu", "--pgn", str(pgn)]
    assert main(["selfplay", str(tiny_folder), *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["selfplay/illegal"]["value"] == 1.0
    assert main(["selfplay", str(tiny_folder), *flags, "--sides", "--temperature", "0"]) == 0
    assert "selfplay/ends/max_plies" in capsys.readouterr().out
    with pgn.open() as file:
        first, second = chess.pgn.read_game(file), chess.pgn.read_game(file)
    assert first is not None and second is not None
    assert list(first.mainline_moves()) != list(second.mainline_moves())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["match", "nano"], "name two players"),
        (["match", "nano", "nano", "--sprt", "10", "0"], "must be lower"),
        (["match", "nano", "no/such/folder/here"], "no model folder"),
        (["selfplay"], "name one model"),
    ],
)
def test_a_mistake_is_one_line(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert why in capsys.readouterr().err


class Blunders:
    """Thinks of one illegal best move, and of a legal one that could stand for it."""

    def opinions(self, boards: Sequence[chess.Board], salts: Sequence[int]) -> list[Opinion]:
        return [Opinion(board.fen(), (), "e2e5", "e2e4", "e2e5 is not legal") for board in boards]


@pytest.mark.parametrize(("strict", "end"), [(True, "illegal"), (False, "max_plies")])
def test_a_strict_player_loses_by_its_illegal_move(strict: bool, end: str) -> None:
    player = OpinionPlayer(Blunders(), "it", strict=strict)  # type: ignore[arg-type]
    game = new_game(0, player, player)
    play_out([game], max_plies=1, claim_draw=True)
    assert (game.end, player.replaced) == (end, 1)
