"""A UCI engine for tests that plays any position: `legal_engine.py FAULTS_FILE`.

Evaluations depend on the searches since `ucinewgame`, as a kept hash makes them: a row that
depends on which process made it, or on what was searched before its game, shows at once.
The file holds how many searches are still to end in the engine's death.
"""
# ruff: noqa: T201

import sys
import zlib
from pathlib import Path

import chess


def install_legal(folder: Path, faults: int = 0) -> Path:
    """An executable that runs this engine without arguments."""
    left, script = folder / "legal.faults", folder / "legal.sh"
    left.write_text(str(faults))
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{__file__}' '{left}'\n")
    script.chmod(0o755)
    return script


def main(faults: Path) -> None:
    searches, fen = 0, chess.STARTING_FEN
    for line in sys.stdin:
        words = line.split()
        if words[0] == "uci":
            print("id name Legal 1", "uciok", sep="\n", flush=True)
        elif words[0] == "isready":
            print("readyok", flush=True)
        elif words[0] == "ucinewgame":
            searches = 0
        elif words[0] == "position":
            fen, _, played = " ".join(words[2:]).partition(" moves ")
            board = chess.Board(fen)
            for move in played.split():
                board.push_uci(move)
            fen = board.fen() if played else fen
        elif words[0] == "go":
            if left := int(faults.read_text()):
                faults.write_text(str(left - 1))
                sys.exit(1)
            searches += 1
            moves = [move.uci() for move in chess.Board(fen).legal_moves]
            scores = {m: zlib.crc32(f"{fen} {m} {searches}".encode()) % 300 for m in moves}
            for rank, move in enumerate(sorted(scores, key=lambda m: -scores[m])[:5], 1):
                score = f"score cp {scores[move]}"
                print(f"info depth 1 multipv {rank} {score} nodes 1 pv {move}")
            print("bestmove", moves[0], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
